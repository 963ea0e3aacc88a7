"""A small CNN, data, and what PyTorch says of both: make_importance.py FOLDER

net.pt, traced.pt: the network, scripted and traced. expected.safetensors: data, scores of filters, gradients' scores,
channel means and BatchNorm statistics, each computed by PyTorch alone.
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(6, eps=1e-3)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc1 = nn.Linear(24, 10)
        self.fc2 = nn.Linear(10, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.fc1(torch.flatten(self.pool(x), 1)))
        return self.fc2(x)


def main():
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    net = Net()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.5)
            nn.init.normal_(module.bias, 0.0, 0.5)
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    net.eval()
    x, labels = torch.randn(10, 3, 9, 9) + 0.5, torch.randint(5, (10,))
    batches = list(zip(x.split(4), labels.split(4)))
    torch.jit.script(net).save(str(folder / "net.pt"))
    torch.jit.trace(net, x[:2]).save(str(folder / "traced.pt"))
    out = {"input0": x, "label": labels}

    for name in ("conv1", "conv2", "fc1"):
        w = net.get_parameter(name + ".weight").detach().double().flatten(1)
        out[f"l1.{name}"] = w.abs().sum(1)
        out[f"l2.{name}"] = w.norm(dim=1)
        out[f"geometric_median.{name}"] = torch.stack([(w - row).norm(dim=1).sum() for row in w])
    out["bn_scale.conv1"] = net.bn1.weight.detach().abs().double()
    out["bn_scale.conv2"] = net.bn2.weight.detach().abs().double()

    for name in ("conv1", "conv2", "fc1"):
        total = 0
        for data, target in batches:
            net.zero_grad()
            nn.functional.cross_entropy(net(data), target).backward()
            parameter = net.get_parameter(name + ".weight")
            total = total + (parameter * parameter.grad).flatten(1).sum(1).detach().double() ** 2
        out[f"taylor.{name}"] = total / len(batches)

    seen = {}
    hooks = [
        net.get_submodule(name).register_forward_hook(lambda m, i, o, name=name: seen.update({name: (i[0], o)}))
        for name in ("conv1", "conv2", "fc1", "fc2")
    ]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    for name, (inputs, outputs) in seen.items():
        out[f"input_mean.{name}"] = inputs.double().transpose(0, 1).flatten(1).mean(1)
        out[f"activation.{name}"] = outputs.double().abs().transpose(0, 1).flatten(1).mean(1)

    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
            module.train()
    with torch.no_grad():
        for data, _ in batches:
            net(data)
    for name in ("bn1", "bn2"):
        out[f"{name}.running_mean"] = net.get_buffer(name + ".running_mean").clone()
        out[f"{name}.running_var"] = net.get_buffer(name + ".running_var").clone()
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, folder / "expected.safetensors")


main()
