"""Writes TorchScript files for the tests into a directory: forms that no case file has (tests/model/made.hpp)."""

import sys
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
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


class OwnNames(nn.Module):
    """Attributes with the names that codes and scales would get."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.register_buffer("weight_scale", torch.full((8, 1), 3.0))
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.randn(8, 8))
        self.inner.weight_packed = nn.Parameter(torch.randn(8))

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias) * self.weight_scale.t()
        return F.linear(y, self.inner.weight) + self.inner.weight_packed


class StaysFloat(nn.Module):
    """Layers whose weights cannot become codes, each for another reason, and one whose can."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.doubled = nn.Linear(8, 8)
        self.even = nn.Conv1d(3, 3, 4, padding="same")
        self.stride = nn.Conv1d(3, 3, 3)
        self.product = nn.Linear(8, 8, bias=False)
        self.position = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        y = self.other(torch.relu(self.one(x)))
        y = F.linear(y, self.doubled.weight, self.doubled.bias * 2)
        y = self.even(y)
        z = F.conv1d(y, self.stride.weight, None, [x.size(1) // 3])
        return torch.matmul(y, self.product.weight.t()) + self.position, z


save("own_names", torch.jit.script(OwnNames()))
save("stays_float", torch.jit.script(StaysFloat()))


class Doubled(nn.Module):
    """A convolution whose bias is computed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, 3, 3))
        self.base = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return F.conv2d(x, self.weight, self.base * 2)


class Folds(nn.Module):
    """BatchNorms that must not be folded, and one (last) that may."""

    def __init__(self):
        super().__init__()
        self.doubled, self.doubled_bn = Doubled(), nn.BatchNorm2d(6)
        self.first, self.first_bn = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.second, self.second_bn = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.second.bias = self.first.bias
        self.plain, self.plain_bn = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6, affine=False)
        self.scale, self.shift = nn.Parameter(torch.rand(6) + 1), nn.Parameter(torch.randn(6))
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("var", torch.rand(6) + 1)
        self.before = nn.Conv2d(6, 6, 1)
        self.branch, self.branch_bn = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.last, self.last_bn = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)

    def forward(self, x):
        x = torch.relu(self.doubled_bn(self.doubled(x)))
        x = self.second_bn(self.second(torch.relu(self.first_bn(self.first(x)))))
        x = self.plain_bn(self.plain(torch.relu(x)))
        x = F.batch_norm(self.before(torch.relu(x)), self.mean, self.var, self.scale, self.shift)
        if x.shape[0] > 4:
            x = self.branch(x)
        else:
            x = self.branch_bn(self.branch(x))
        return self.last_bn(self.last(torch.relu(x)))


class OtherCourse(nn.Module):
    """Larger batches take another way, with a layer of its own and no different width."""

    def __init__(self):
        super().__init__()
        self.free, self.stem = nn.Linear(8, 12), nn.Linear(12, 8)
        self.small, self.large, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        if x.dim() != 2:
            raise ValueError("expected 2 dimensions, got {}".format(x.dim()))
        y = torch.relu(self.stem(torch.relu(self.free(x))))
        if x.shape[0] > 4:
            z = self.large(y)
        else:
            z = self.small(y)
        return self.out(torch.relu(z))


class ChangesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x.mul_(2.0)
        return self.fc(x)


class Counts(nn.Module):
    """A buffer that forward itself changes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.fc(x)


class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        out: Dict[str, torch.Tensor] = {}
        for i in range(2):
            out["out_{}".format(i)] = self.fc(x) * i
        if x.dim() != 2:
            raise ValueError("two dimensions, please")
        return out


class Transposed(nn.Module):
    def forward(self, x):
        return x.t()


def with_statistics(module):
    for name, buffer in module.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2)
    return module


save("folds", torch.jit.script(with_statistics(Folds()).eval()))
save("other_course", torch.jit.script(OtherCourse()))
save("changes_input", torch.jit.script(ChangesInput()))
save("counts", torch.jit.script(Counts()))
save("talks", torch.jit.script(Talks()))
save("half_linear", torch.jit.script(nn.Sequential(nn.Linear(16, 8), nn.ReLU()).half()))
save("root_linear", torch.jit.script(nn.Linear(8, 8)))
save("transposed", torch.jit.script(Transposed()))
