#!/usr/bin/env bash
# Compares the compressed reference MLP with what other tools make of the same network, side by side in one process.
# Installs them into build/peers-venv, never into .venv; tools/demo.sh must have run. No test needs it.
#   tools/bench/peers.sh [ROUNDS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

mlp=build/demo/mlp venv=build/peers-venv
[[ -f $mlp/mlp-small.pt ]] || { echo "peers: run tools/demo.sh first: it makes $mlp/mlp-small.pt" >&2; exit 1; }
if [[ ! -x $venv/bin/python ]]; then
  echo "peers: making $venv"
  python3 -m venv $venv
fi
# The same LibTorch that libtersor_ops was built with.
torch=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))')
$venv/bin/python -m pip install --quiet --disable-pip-version-check \
  "torch==$torch" numpy onnx onnxruntime onnxscript torch-pruning </dev/null

build/release/tersor compress $mlp/mlp.pt -o $mlp/mlp-pruned.pt --overwrite --quiet \
  --input-shape 2,768 --passes 'prune_structured(amount=0.3)'
build/release/tersor compress $mlp/mlp.pt -o $mlp/mlp-int8.pt --overwrite --quiet --passes quantize_dynamic
OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $venv/bin/python tools/bench/peers.py $mlp build/release/libtersor_ops.so "${1:-30}"
