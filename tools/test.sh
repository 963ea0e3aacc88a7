#!/usr/bin/env bash
# Sets up, builds and runs the tests; exit status 0 when all passed.
#   tools/test.sh [--preset release|ci|dev] [ctest options]   all tests
#   tools/test.sh --sanitize [ctest options]                  core, io and kernels under ASan and UBSan
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=release
case "${1:-}" in
  --preset) preset=${2:?which preset}; shift 2 ;;
  --sanitize) preset=asan; shift ;;
  -h|--help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

tools/setup.sh
cmake --preset "$preset"
cmake --build --preset "$preset" --parallel "$(nproc)"
ctest --preset "$preset" --output-on-failure "$@"
