#!/usr/bin/env bash
# Brings what tersor needs to build: Debian packages, and LibTorch in .venv unless another one is named.
# Safe to run again: it installs only what is missing and says what it does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(ninja-build cmake g++ git ccache clang-format libeigen3-dev libfmt-dev libcli11-dev catch2
          nlohmann-json3-dev libyaml-cpp-dev libbenchmark-dev zlib1g-dev libxxhash-dev libssl-dev
          python3-venv dataset-fashion-mnist)
torch_version=2.13.0

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

# --- Debian packages ---
if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
  missing=()
  for package in "${packages[@]}"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then
    say "all Debian packages are there"
  else
    as_root=()
    if ((EUID != 0)); then
      command -v sudo >/dev/null ||
        die "not root and no sudo; please have these packages installed, then run this again: ${missing[*]}"
      as_root=(sudo)
    fi
    say "installing Debian packages: ${missing[*]}"
    apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300)
    "${apt[@]}" update </dev/null >/dev/null
    "${apt[@]}" install --no-install-recommends "${missing[@]}" </dev/null >/dev/null
  fi
else
  say "no apt-get here; make sure that your system has the likes of these Debian packages: ${packages[*]}"
fi

cmake_version=$(cmake --version | sed -n '1s/[^0-9]*//p')
[[ "$(printf '%s\n' 3.22 "$cmake_version" | sort -V | head -1)" == 3.22 ]] ||
  die "CMake $cmake_version ($(command -v cmake)) is too old; 3.22 or newer is needed"

# --- LibTorch ---
libtorch=""
if [[ -n "${Torch_DIR:-}" ]]; then
  libtorch=$Torch_DIR
else
  IFS=':;' read -r -a prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do
    for config in "$prefix"/{,share/cmake/}Torch/TorchConfig.cmake; do
      [[ -f "$config" ]] && libtorch=$(dirname "$config") && break 2
    done
  done
fi
if [[ -n "$libtorch" ]]; then
  [[ -f "$libtorch/TorchConfig.cmake" ]] || die "Torch_DIR is '$libtorch', but there is no TorchConfig.cmake in it"
  say "using the LibTorch of $libtorch"
  exit 0
fi

python=.venv/bin/python
if ! "$python" -m pip --version >/dev/null 2>&1; then
  say "making a Python environment in .venv"
  python3 -m venv .venv || /usr/bin/python3 -m venv --clear .venv ||
    die "python3 -m venv failed; a Python 3 with venv and ensurepip (Debian: python3-venv) is needed"
fi
version_of() { "$python" -c "import importlib.metadata as m; print(m.version('$1'))" 2>/dev/null || true; }
pip=("$python" -m pip install --quiet --disable-pip-version-check)

have=$(version_of torch)
if [[ "${have%%+*}" == "$torch_version" ]]; then
  say "LibTorch $have is in .venv"
else
  say "installing torch==$torch_version+cpu into .venv"
  if ! "${pip[@]}" "torch==$torch_version+cpu" </dev/null; then
    say "that wheel is not to be had here; trying torch==$torch_version"
    "${pip[@]}" "torch==$torch_version" </dev/null ||
      die "pip cannot install torch==$torch_version; see 'LibTorch' in README.md for other ways"
  fi
fi
# A CUDA wheel's CMake config looks for a CUDA toolkit.
if grep -Eq "^cuda.*= *['\"]" .venv/lib/python3*/site-packages/torch/version.py && ! command -v nvcc >/dev/null; then
  die "the torch wheel in .venv is a CUDA build whose CMake config asks for the CUDA toolkit, which is not here:" \
    "put the CPU wheel into .venv (README.md, 'LibTorch', says how) or install the toolkit, then run this again"
fi

if [[ -z "$(version_of numpy)" || -z "$(version_of safetensors)" ]]; then
  say "installing numpy and safetensors into .venv (the tests read our files with them)"
  "${pip[@]}" numpy safetensors </dev/null
fi
say "done"
