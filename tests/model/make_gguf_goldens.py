#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write what the Python package `gguf` makes of blocks of every type.

usage: make_gguf_goldens.py [--check]     needs NumPy and the `gguf` package, no network

Writes goldens/gguf_types.txt: for every type, FNV-1a over the bits of the numbers of BLOCKS blocks,
and the first 4 numbers. The blocks are not written: test_gguf.c makes the same ones. Their bytes are
random (splitmix64, seeded with the type's id), except that the fp16 in each of SCALES is finite.

--check compares with what is there instead of writing.
"""
import os
import sys

try:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "goldens", "gguf_types.txt")
BLOCKS = 256
MASK = (1 << 64) - 1
# Where a block has numbers of fp16; all of it where the type is one.
SCALES = {"F16": [0], "BF16": [0], "F32": [2], "Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0]}


def blocks_of(name, size):
    """Finite: the highest bit of the exponent is clear."""
    state, out = int(GGMLQuantizationType[name]), bytearray()
    while len(out) < BLOCKS * size:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        out += (z ^ z >> 31).to_bytes(8, "little")
    for block in range(0, BLOCKS * size, size):
        for at in SCALES[name]:
            out[block + at + 1] &= 0xBF
    return np.frombuffer(bytes(out[:BLOCKS * size]), np.uint8)


def line(name):
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    values = dequantize(blocks_of(name, size), GGMLQuantizationType[name]).astype(np.float32)
    assert values.size == BLOCKS * numbers
    h = 0xCBF29CE484222325
    for bits in values.view(np.uint32).tolist():
        h = (h ^ bits) * 0x100000001B3 & MASK
    return "%s %016x %s" % (name, h, " ".join("%.9g" % v for v in values[:4]))


def main():
    text = "".join(line(name) + "\n" for name in SCALES)
    if sys.argv[1:] != ["--check"]:
        with open(PATH, "w", encoding="utf-8") as f:
            f.write(text)
        return 0
    with open(PATH, encoding="utf-8") as f:
        same = f.read() == text
    print("same" if same else "DIFFERENT")
    return not same


if __name__ == "__main__":
    sys.exit(main())
