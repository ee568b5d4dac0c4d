#!/usr/bin/env bash
# Builds the extension, runs the GPU tests and the GPU benchmarks: one command, no network, a few minutes.
#
#   benchmarks/gpu_check.sh [OUTPUT_DIR]        default: gpu_check
#
# Needs one CUDA GPU (24 GiB; larger workloads are skipped below that), torch >= 2.11, triton >= 3.6,
# pytest, pytest-benchmark, pybind11, setuptools and a C++ compiler. PYTHON names the interpreter.
# Leaves OUTPUT_DIR/result.json, table.txt and a log of each stage. Fails if a test fails; the
# benchmarks run even then.
set -euo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${1:-gpu_check}
mkdir -p "$out"
out=$(cd "$out" && pwd)
unset TRITON_INTERPRET

if ! command -v "$python" > /dev/null; then
    echo "gpu_check: expected a Python interpreter, got PYTHON=$python" >&2
    exit 2
fi
"$python" - << 'PROBE' || exit 2
import sys

try:
    import torch
except ImportError as error:
    sys.exit(f"gpu_check: expected torch >= 2.11, got none ({error})")
if not torch.cuda.is_available():
    sys.exit(f"gpu_check: expected a CUDA device, got none (torch {torch.__version__})")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
PROBE

stage() { # name, seconds at most, command...
    local name=$1 limit=$2 started=$SECONDS status=0
    shift 2
    timeout "$limit" "$@" > "$out/$name.log" 2>&1 || status=$?
    echo "$name: $((SECONDS - started)) s, exit status $status ($out/$name.log)"
    return $status
}

if ! stage build 60 "$python" -m pip install --no-build-isolation --no-deps -e .; then
    tail -n 30 "$out/build.log" >&2
    exit 1
fi
status=0
# Without TRITON_INTERPRET the op tests run their triton cases on the GPU. Elsewhere only the files
# with GPU tests are collected: others, like the properties (CPU), may import what is not here.
mapfile -t gpu_tests < <(grep -rlE --include='test_*.py' 'mark\.gpu' tests --exclude-dir=ops | sort)
if ! stage op_tests 140 "$python" -m pytest -k triton -m "not slow" tests/ops \
    --ignore tests/ops/test_properties.py \
    --junitxml "$out/op_tests.xml" -p no:cacheprovider; then
    status=1
    tail -n 60 "$out/op_tests.log" >&2
fi
if ((${#gpu_tests[@]})); then
    if ! stage gpu_tests 40 "$python" -m pytest -m "gpu and not slow" "${gpu_tests[@]}" \
        --junitxml "$out/gpu_tests.xml" -p no:cacheprovider; then
        status=1
        tail -n 60 "$out/gpu_tests.log" >&2
    fi
fi
if ! stage benchmarks 200 "$python" -m pytest benchmarks/bench_gpu.py --benchmark-only \
    --benchmark-json "$out/benchmarks.json" -p no:cacheprovider; then
    status=1
    tail -n 60 "$out/benchmarks.log" >&2
fi
if [[ -s $out/benchmarks.json ]]; then
    shopt -s nullglob
    counts=("$out"/*_tests.xml)
    if ((${#counts[@]})); then counts=(--tests "${counts[@]}"); fi
    "$python" benchmarks/gpu_table.py "$out/benchmarks.json" "$out/result.json" "${counts[@]}" |
        tee "$out/table.txt"
fi
exit $status
