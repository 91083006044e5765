#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU, on a machine that may lack package registries: what is missing is left
# out and named. Builds go to build-gpu/ and build-gpu-bench/, figures to bench/results/.
#
#   tools/gpu.sh [PART...]     parts: build tests sanitizer budget bench; all of them if none is named
#
# GPU_SANITIZER_SECONDS (300) bounds each run of compute-sanitizer, GPU_BENCH_SECONDS (240) each of
# `kvferry bench`, GPU_TEST_SCALE (3) multiplies the time limits of tests.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export PATH=$PATH:/usr/local/cuda/bin:/opt/cuda/bin:/usr/local/nvidia/bin
folder=build-gpu
failures=0

say() { printf 'gpu: %s\n' "$*" >&2; }

# part NAME COMMAND...: run it, say how it ended, go on.
part() {
    local name=$1 begin=$SECONDS code
    shift
    say "$name"
    "$@"
    code=$?
    case $code in
    0) say "$name: ok ($((SECONDS - begin)) s)" ;;
    77) say "$name: skipped" ;;
    *)
        say "$name: FAILED with status $code ($((SECONDS - begin)) s)"
        failures=$((failures + 1))
        ;;
    esac
}

# Compute capability of the first GPU without its dot, or nothing.
capability() {
    command -v nvidia-smi >/dev/null &&
        nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d ' .'
}

need_machine() {
    local tool
    for tool in cc meson ninja nvcc; do
        command -v "$tool" >/dev/null || { say "skipped: no $tool here"; exit 77; }
    done
    if [ -z "$(capability)" ]; then
        say "skipped: no NVIDIA GPU and driver here (nvidia-smi shows none)"
        exit 77
    fi
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >&2
}

# configure FOLDER [MESON OPTION...]: for this GPU only, with what this machine has.
configure() {
    local where=$1
    shift
    [ -f "$where/build.ninja" ] ||
        meson setup -Dcuda=enabled "$@" "$where" >"$where.txt" 2>&1 ||
        { tail -n 20 "$where.txt" >&2; return 1; }
    grep -E 'no cmocka|is not built|no hwloc|no libnuma' "$where/meson-logs/meson-log.txt" |
        sed 's/^Message: /gpu: left out: /' >&2
    ninja -C "$where" >"$where.txt" 2>&1 || { tail -n 60 "$where.txt" >&2; return 1; }
}

run_build() { part "build" configure $folder; }

run_tests() { # the same suite as everywhere, on the GPU; gpu_only.c holds what only hardware can say
    run_build
    KVF_TEST_DEVICE=cuda part "suite on the GPU" meson test -C $folder --no-rebuild --print-errorlogs \
        --timeout-multiplier "${GPU_TEST_SCALE:-3}" --num-processes 2
}

sanitize() { # TOOL
    timeout --kill-after=10 "${GPU_SANITIZER_SECONDS:-300}" compute-sanitizer --tool "$1" \
        --error-exitcode 9 $folder/tests/kernels/check_kernels --isa cuda
}

run_sanitizer() {
    run_build
    if ! command -v compute-sanitizer >/dev/null; then
        say "compute-sanitizer: skipped, not installed"
        return
    fi
    part "memcheck of the kernels" sanitize memcheck
    part "racecheck of the kernels" sanitize racecheck
}

run_budget() { # with the instructions, where cuobjdump is there
    run_build
    part "budget of the kernels" python3 tools/check_cuda_budget.py $folder
}

run_bench() {
    local name what
    name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs 'A-Za-z0-9\n' '-')
    part "build for speed" configure build-gpu-bench --buildtype=release -Dassert_level=0
    mkdir -p "bench/results/$name"
    KVF_TEST_DEVICE=cuda part "kernels" bash -c "build-gpu-bench/tests/kernels/check_kernels --isa cuda \
        --bench | tee 'bench/results/$name/kernels.txt'"
    # The link, and a decode step.
    for what in link decode; do
        part "bench $what" timeout --kill-after=10 "${GPU_BENCH_SECONDS:-240}" \
            build-gpu-bench/runtime/cli/kvferry bench $what --device cuda \
            --json "bench/results/$name/$what.json"
    done
    build-gpu-bench/runtime/cli/kvferry info >"bench/results/$name/info.txt"
    KVF_TEST_DEVICE=cuda part "benchmarks" python3 tools/bench.py --build build-gpu-bench \
        --into "bench/results/$name"
}

need_machine
for name in "${@:-build tests sanitizer budget bench}"; do
    for what in $name; do
        case $what in
        build | tests | sanitizer | budget | bench) "run_$what" ;;
        *)
            say "unknown part '$what'; parts are build tests sanitizer budget bench"
            exit 2
            ;;
        esac
    done
done
say "$failures failed"
[ "$failures" -eq 0 ]
