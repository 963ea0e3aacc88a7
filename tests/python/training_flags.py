"""Prints the training flag of every submodule of a TorchScript file, then its extra file labels.txt."""

import sys

import torch

extra = {"labels.txt": ""}
model = torch.jit.load(sys.argv[1], _extra_files=extra)
for name, module in model.named_modules():
    print(f"{name}={module.training}", end=" ")
print(extra["labels.txt"].decode())
