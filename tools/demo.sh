#!/usr/bin/env bash
# From a fresh clone to a table: sets up, builds, trains a small network on Fashion-MNIST (once; it is kept in
# build/demo), makes it and a fully connected network smaller, and measures both against their originals.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  "") ;;
  -h|--help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "demo: it takes no arguments" >&2; exit 2 ;;
esac

tools/setup.sh
cmake --preset release
cmake --build --preset release --parallel "$(nproc)" \
  --target tersor_cli tersor_example_01_train_fashion_mnist tersor_example_02_reference_mlp

tersor=build/release/tersor
cnn=build/demo/cnn mlp=build/demo/mlp
show() {  # prints the command, then runs it
  { echo; printf '$'; for word in "$@"; do [[ $word =~ ^[[:alnum:]_./,:=-]+$ ]] && printf ' %s' "$word" || printf " '%s'" "$word"; done; echo; } >&2
  "$@"
}

[[ -f $cnn/cnn.pt ]] || show build/release/examples/01_train_fashion_mnist "$cnn"
[[ -f $mlp/mlp.pt ]] || show build/release/examples/02_reference_mlp "$mlp"

# compress NETWORK PASSES: NETWORK.pt becomes NETWORK-small.pt, and both are compared and timed.
compress() {
  local network=$1 directory passes=$2
  directory=$(dirname "$network")
  show $tersor compress "$network.pt" -o "$network-small.pt" --passes "$passes" \
    --calibration "$directory/calibration.safetensors" --eval "$directory/test.safetensors" --overwrite
  show $tersor eval "$network-small.pt" --data "$directory/test.safetensors" --against "$network.pt" --json \
    | tee "$network-eval.json"
  show $tersor bench "$network.pt" "$network-small.pt" --example "$directory/test.safetensors" \
    --batch 1,4,8,16 --threads 1 --json >"$network-bench.json"
}
compress $cnn/cnn 'prune_structured(amount=0.3), fold_batch_norm, quantize_static'
# The same without removing channels: what rounding to INT8 alone costs.
show $tersor compress $cnn/cnn.pt -o $cnn/cnn-int8.pt --passes 'fold_batch_norm, quantize_static' \
  --calibration $cnn/calibration.safetensors --overwrite --quiet
show $tersor eval $cnn/cnn-int8.pt --data $cnn/test.safetensors --against $cnn/cnn.pt --json >$cnn/cnn-int8-eval.json
compress $mlp/mlp 'prune_structured(amount=0.3), quantize_dynamic'

echo
python3 tools/demo_table.py \
  "Fashion-MNIST CNN, 30 % of channels removed, static INT8" $cnn/cnn \
  "Reference MLP 768-512-256-128, 30 % removed, dynamic INT8" $mlp/mlp
