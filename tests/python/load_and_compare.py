"""Loads a TorchScript file, runs it on input0, input1, ... of a safetensors file and compares with output0, ...

Exit status 0 when every output is there and close enough; --tolerance 0 asks for equal bits.
"""

import argparse
import json
import struct
import sys

import torch

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32}


def read_safetensors(path):
    data = open(path, "rb").read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = bytearray(data[8 + length + begin : 8 + length + end])
        tensors[name] = torch.frombuffer(values, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def flatten(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for key in sorted(value) for tensor in flatten(value[key])]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in flatten(item)]
    return []


def numbered(tensors, prefix):
    return [tensors[f"{prefix}{i}"] for i in range(len(tensors)) if f"{prefix}{i}" in tensors]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--library", help="operators to load first")
    parser.add_argument("--tolerance", type=float, default=0.0)
    options = parser.parse_args()
    if options.library:
        torch.ops.load_library(options.library)
    data = read_safetensors(options.data)
    model = torch.jit.load(options.model).eval()
    with torch.no_grad():
        outputs = flatten(model(*numbered(data, "input")))
    expected = numbered(data, "output")
    if len(outputs) != len(expected):
        sys.exit(f"{len(outputs)} outputs, expected {len(expected)}")
    for i, (got, want) in enumerate(zip(outputs, expected)):
        if got.shape != want.shape or got.dtype != want.dtype:
            sys.exit(f"output {i}: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}")
        worst = (got.double() - want.double()).abs().max().item() if got.numel() else 0.0
        if not worst <= options.tolerance:
            sys.exit(f"output {i} differs by {worst}")


main()
