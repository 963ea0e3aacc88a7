"""Writes the TorchScript files of tests/model/script_forms_test.cpp into a directory: forms that no case file has."""

import sys
from typing import Dict, List, Optional, Tuple

import torch
from torch import nn

directory = sys.argv[1]
torch.manual_seed(0)


def save(name, module, **options):
    module.save(f"{directory}/{name}.pt", **options)


class Tied(nn.Module):
    """A language model's head that shares its weight with the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.mix(self.embed(ids))))


class Twice(nn.Module):
    """One submodule reached by two names, one weight used by two calls."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first

    def forward(self, x):
        return self.again(torch.relu(self.first(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        h = self.up(x).view(x.size(0), 2, 4).reshape(-1, 8)
        return self.down(torch.relu(h))


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Block()
        self.b = Block()

    def forward(self, x):
        return self.b(self.a(x))


class Bare(nn.Module):
    """Bare parameters in every spelling of a Linear."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(5, 3))
        self.w2 = nn.Parameter(torch.randn(5, 5))
        self.w3 = nn.Parameter(torch.randn(2, 5))
        self.b2 = nn.Parameter(torch.randn(5))
        self.b3 = nn.Parameter(torch.randn(2))

    def forward(self, x):
        x = torch.relu(torch.matmul(x, self.w1.t()))
        x = torch.addmm(self.b2, x, self.w2.transpose(0, 1))
        return torch.matmul(x, self.w3.t()) + self.b3


class Containers(nn.Module):
    """Tuples, dictionaries and optional inputs; a loop; in-place operators."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.steps = 2

    def forward(self, pair: Tuple[torch.Tensor, torch.Tensor], extra: Optional[torch.Tensor] = None) -> Dict[str, torch.Tensor]:
        x = pair[0] + pair[1]
        for layer in self.layers:
            x = layer(x)
            x += 1.0
        for _ in range(self.steps):
            x = x * 2.0
        parts: List[torch.Tensor] = []
        for part in torch.split(x, 1, 1):
            parts.append(part)
        out = {"b": torch.cat(parts, 1), "a": parts[0]}
        if extra is not None:
            out["c"] = extra
        return out


class ThroughView(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        y = self.fc(x)
        y[:, 0].zero_()
        return y


class Exported(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return self.fc(x)

    @torch.jit.export
    def other(self, x):
        return self.fc(x) * 2


class Stack(nn.Module):
    """Convolutions in their rarer forms, one after the other."""

    def __init__(self):
        super().__init__()
        self.same = nn.Conv2d(3, 4, 3, padding="same", dilation=2)
        self.strided = nn.Conv2d(4, 6, 3, stride=2, padding=(1, 0), groups=2, bias=False)
        self.one = nn.Conv1d(6, 5, 3, padding=1)

    def forward(self, x):
        return self.one(self.strided(self.same(x)).flatten(2))


class Mixed(nn.Module):
    """Some submodules train, some do not."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.fc(x)))


save("tied", torch.jit.script(Tied()))
save("twice", torch.jit.script(Twice()))
save("two_blocks", torch.jit.script(TwoBlocks()))
save("bare", torch.jit.script(Bare()))
save("containers", torch.jit.script(Containers()))
save("through_view", torch.jit.script(ThroughView()))
save("exported", torch.jit.script(Exported()))
save("convolutions", torch.jit.script(Stack()))
mixed = Mixed().train()
mixed.norm.eval()
save("mixed", torch.jit.script(mixed), _extra_files={"labels.txt": "cat\ndog"})
save("frozen", torch.jit.freeze(torch.jit.script(Twice().eval())))
save("half", torch.jit.script(Twice().to(torch.bfloat16)))
save("traced_tied", torch.jit.trace(Tied().eval(), torch.zeros(1, 3, dtype=torch.long)))
