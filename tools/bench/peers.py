"""Times the reference MLP (768-512-256-128), float and compressed by several tools, interleaved in one process.

usage: peers.py DIRECTORY LIBTERSOR_OPS ROUNDS   (tools/bench/peers.sh calls it)

Each round gives every variant one turn of about 20 ms, in which each call is timed; ratios are medians over rounds of
(TorchScript float / variant), so what slows the machine for a while meets every variant alike. One thread.
"""

import copy
import os
import statistics
import sys
import time
import warnings

import onnxruntime
import torch
import torch_pruning
from onnxruntime.quantization import QuantType, quantize_dynamic

warnings.filterwarnings("ignore")
BASE = "TorchScript float"


def eager(scripted):
    """The network of a TorchScript file as nn.Sequential."""
    weights = dict(scripted.named_parameters())
    layers = []
    for name in ("fc1", "fc2", "fc3"):
        weight = weights[name + ".weight"]
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(weights[name + ".bias"])
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).eval()


def torch_pruned(model):
    model = copy.deepcopy(model)
    with torch.enable_grad():
        torch_pruning.pruner.MagnitudePruner(
            model, torch.randn(1, 768), importance=torch_pruning.importance.MagnitudeImportance(p=1),
            pruning_ratio=0.3, ignored_layers=[model[-1]]).step()
    return model.eval()


def torch_dynamic(model):
    torch.backends.quantized.engine = "x86"
    model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear}, dtype=torch.qint8)
    return torch.jit.freeze(torch.jit.script(model).eval())


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    run = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run
    return lambda x: run(None, {"x": x})[0]


def onnx(model, path):
    torch.onnx.export(model, (torch.randn(2, 768),), path, input_names=["x"], output_names=["y"],
                      dynamic_axes={"x": {0: "n"}, "y": {0: "n"}}, dynamo=False, opset_version=17)
    # 7-bit weights: with 8 bits this runtime's AVX2 kernels saturate.
    quantize_dynamic(path, path + ".int8", per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
    return session(path), session(path + ".int8")


def variants(directory):
    load = lambda name: torch.jit.load(os.path.join(directory, name + ".pt"))
    original = load("mlp")
    model = eager(original)
    pruned = torch_pruned(model)
    ort, ort_int8 = onnx(model, os.path.join(directory, "mlp.onnx"))
    ort_pruned, ort_pruned_int8 = onnx(pruned, os.path.join(directory, "mlp-pruned.onnx"))
    return {
        BASE: original,
        "tersor, 30 % removed": load("mlp-pruned"),
        "tersor, dynamic INT8": load("mlp-int8"),
        "tersor, 30 % removed, dynamic INT8": load("mlp-small"),
        "torch.ao, dynamic INT8": torch_dynamic(model),
        "torch-pruning 30 % and torch.ao INT8": torch_dynamic(pruned),
        "ONNX Runtime float": ort,
        "ONNX Runtime, dynamic INT8": ort_int8,
        "ONNX Runtime, 30 % removed": ort_pruned,
        "ONNX Runtime, 30 % removed, INT8": ort_pruned_int8,
    }


def interleaved(calls, rounds, turn=0.02):
    """Seconds of every call, and the median of each turn, by name."""
    count = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        start = time.perf_counter()
        for _ in range(5):
            call()
        count[name] = max(3, min(2000, int(turn * 5 / (time.perf_counter() - start))))
    times = {name: [] for name in calls}
    medians = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            own = []
            for _ in range(count[name]):
                start = time.perf_counter()
                call()
                own.append(time.perf_counter() - start)
            times[name] += own
            medians[name].append(statistics.median(own))
    return times, medians


def main(directory, library, rounds):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.ops.load_library(library)
    nets = variants(directory)
    for batch in (1, 4, 8, 16):
        x = torch.randn(batch, 768)
        calls = {}
        for name, net in nets.items():
            given = x.numpy() if name.startswith("ONNX") else x
            calls[name] = lambda net=net, given=given: net(given)
        times, medians = interleaved(calls, rounds)
        print(f"\nbatch {batch:<33}{'p50 us':>9}{'p99 us':>9}{'items/s':>11}{'ratio':>8}")
        for name in calls:
            own = sorted(times[name])
            ratio = statistics.median(a / b for a, b in zip(medians[BASE], medians[name]))
            p50, p99 = own[len(own) // 2], own[int(0.99 * (len(own) - 1))]
            print(f"{name:39}{p50 * 1e6:9.1f}{p99 * 1e6:9.1f}{batch / p50:11,.0f}{ratio:7.2f}x", flush=True)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
