"""Writes the networks of tests/data/passes: fold.pt with fold_io.safetensors around BatchNorm, and shared.pt, where
an Embedding and a Linear have one weight.

Run once with the Python that has torch and safetensors: make_pass_cases.py tests/data/passes
"""

import sys

import torch
from safetensors.torch import save_file
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.conv_bn = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 6, 2, groups=2)  # two groups of 2 inputs and 3 outputs
        self.up_bn = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 5, 1)  # its output is used beside its BatchNorm
        self.twice_bn = nn.BatchNorm2d(5)
        self.relu_bn = nn.BatchNorm2d(5)  # behind an activation
        self.input_bn = nn.BatchNorm1d(7)  # behind the input
        self.fc = nn.Linear(7, 5)
        self.fc_bn = nn.BatchNorm1d(5)
        self.tokens = nn.Linear(5, 6)  # [N, 4, 6]: dimension 1 is not its output
        self.tokens_bn = nn.BatchNorm1d(4)

    def forward(self, image, vector):
        x = torch.relu(self.conv_bn(self.conv(image)))
        x = self.twice(self.up_bn(self.up(x)))
        x = self.relu_bn(torch.relu(x + self.twice_bn(x)))
        y = self.fc_bn(self.fc(self.input_bn(vector)))
        z = self.tokens_bn(self.tokens(y.unsqueeze(1).repeat(1, 4, 1)))
        return x, y, z


class Shared(nn.Module):
    """A Linear with the weight of an Embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.scores = nn.Linear(4, 5)
        self.scores.weight = self.words.weight

    def forward(self, ids):
        return self.scores(self.words(ids))


def shared(directory):
    net = Shared().eval()
    torch.jit.script(net).save(f"{directory}/shared.pt")


def main(directory):
    torch.manual_seed(1)
    net = Net().eval()
    for module in net.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(module.weight, -2, 2)
            nn.init.uniform_(module.bias, -1, 1)
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.1, 3)
    image, vector = torch.randn(3, 3, 6, 6), torch.randn(3, 7)
    script = torch.jit.script(net)
    script.save(f"{directory}/fold.pt")
    outputs = {f"output{i}": y.detach().contiguous() for i, y in enumerate(script(image, vector))}
    save_file({"input0": image, "input1": vector, **outputs}, f"{directory}/fold_io.safetensors")
    shared(directory)


main(sys.argv[1])
