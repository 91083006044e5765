#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Builds the kernels and their check for AArch64 (NEON), warnings as errors, and runs the check where an
# emulator is installed. Usage: tests/cross/check_aarch64.sh [BUILD_DIR]. Exit 77: no cross compiler.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$here/build-aarch64}
cc=${CC_AARCH64:-aarch64-linux-gnu-gcc}
command -v "$cc" >/dev/null || { echo "skipped: no $cc (Debian: gcc-aarch64-linux-gnu)"; exit 77; }
mkdir -p "$out"
flags="-std=c17 -ffp-contract=off -D_GNU_SOURCE -DKVF_BUILD -DKVF_ASSERT_LEVEL=1
  -Wall -Wextra -Wundef -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla -Werror
  -I$here/include -I$here/kernels"
objects=
for source in "$here"/kernels/*.c "$here"/tests/kernels/check_*.c; do
  object=$out/$(basename "$source" .c).o
  case $source in *_simd.c) level=-O3 ;; *) level=-O2 ;; esac
  "$cc" $flags $level -DKVF_SIMD=neon -DKVF_HAVE_NEON -c "$source" -o "$object"
  objects="$objects $object"
done
"$cc" -static $objects -lm -o "$out/check_kernels"
if command -v qemu-aarch64-static >/dev/null; then
  qemu-aarch64-static "$out/check_kernels" --isa neon
else
  echo "built $out/check_kernels; not run: no qemu-aarch64-static (Debian: qemu-user-static)"
fi
