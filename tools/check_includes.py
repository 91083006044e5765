#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check the direction of #include lines: include -> kernels -> offload -> runtime -> clients, and
from room to room in offload and runtime.

usage: check_includes.py FILE...    prints `FILE:LINE: what` for every finding, exits 1 if any

The build's include paths say the same; this also catches relative paths, and headers of other
libraries in a layer that should not know them. And a source of runtime that has no header of its
name begins by saying whose header it shares: "Part of cache.h".
"""
import os
import re
import sys

# Folders that files of a folder may include, besides their own. The longest prefix decides.
FLOOR = ["include", "include/common"]
MODEL = ["runner/model/" + room for room in ("chat", "formats", "matrix", "tokenizer", "transformer")]
# Rooms of offload, from below: each sees those before it, and kernels from `device` on.
OFFLOAD = ["offload/" + room for room in ("base", "file", "device", "memory", "pages", "transfer",
                                          "measure")]
# Rooms of the command, from below: each sees those before it.
CLI = ["runner/cli/" + room for room in ("base", "output", "text", "prune", "run", "tune",
                                          "bench", "plan", "cache", "info")]
# Rooms of the core, from below: each sees those before it.
CORE = ["runtime/" + room for room in ("handle", "cache", "launch", "select", "step", "prune",
                                       "blocks", "save", "api")]
MAY_SEE = {
    "include": [],
    "include/common": ["include"],
    "kernels": FLOOR + ["kernels/cuda"],
    # Under KVF_EMULATED the language of kernels comes from the emulator.
    "kernels/cuda": FLOOR + ["kernels", "tests/emu"],
    "runner/model/formats": FLOOR,
    "runner/model/tokenizer": FLOOR + ["runner/model/formats"],
    "runner/model/chat": FLOOR + ["runner/model/formats", "runner/model/tokenizer"],
    "runner/model/matrix": FLOOR + ["runner/model/formats"],
    "runner/model/transformer": FLOOR + ["runner/model/formats", "runner/model/matrix",
                                          "kernels/cuda"],
    "runner/cli": FLOOR + CLI,
    "runner/cli/absent": CLI[:1],
    "tests": FLOOR + ["kernels", "kernels/cuda", "tests/emu", "llama"] + OFFLOAD + CORE + MODEL + CLI,
    "tests/emu": FLOOR + ["kernels", "kernels/cuda", "tests"], # tests/unit.h, for its tests
    "llama": FLOOR,
    "bench": FLOOR + ["kernels", "tests"] + OFFLOAD + CORE + MODEL + CLI,
    "examples": ["include"],
}
MAY_SEE.update({room: FLOOR + (["kernels"] if i > 1 else []) + OFFLOAD[:i]
                for i, room in enumerate(OFFLOAD)})
MAY_SEE.update({room: FLOOR + ["kernels"] + OFFLOAD + CORE[:i] for i, room in enumerate(CORE)})
MAY_SEE.update({room: FLOOR + MODEL + CLI[:i] for i, room in enumerate(CLI)})
CUDA = ["kernels", "offload/device", "runner/model", "tests"]
# Headers of other libraries, and the only folders that may name them, with the folders inside.
FOREIGN = {
    "cuda.h": CUDA,
    "cuda_bf16.h": CUDA,
    "cuda_fp16.h": CUDA,
    "cuda_runtime.h": CUDA,
    "cuda_runtime_api.h": CUDA,
    "cublas_v2.h": ["runner/model", "tests"],
    "numa.h": ["offload/memory"],
    "numaif.h": ["offload/memory"],
    "liburing.h": ["offload/file"],
    "xxhash.h": ["offload/file"],
    "dnnl.h": ["runner/model"],
    "jansson.h": ["runner/model"],
    "pcre2.h": ["runner/model"],
    "utf8proc.h": ["runner/model"],
    "cmocka.h": ["tests"],
    "pthread.h": ["offload", "runtime", "runner/model", "runner/cli", "llama", "tests", "bench"],
}
PART = re.compile(r"^/\* SPDX[^\n]*\n\n/\*\n \* Part of (?:kvferry/)?(\w+\.h)[.:]")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def folder_of(path):
    """The layer that a path belongs to, or None."""
    fits = [f for f in MAY_SEE if path.startswith(f + "/")]
    return max(fits, key=len) if fits else None


def check(path, owner_of):
    layer = folder_of(path)
    if layer is None:
        return
    with open(path, encoding="utf-8") as f:
        lines = f.readlines()
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quote, name = match.groups()
        if ".." in name.split("/"):
            yield number, "relative include of " + name
            continue
        target = owner_of.get(os.path.basename(name))
        if name.startswith("kvferry/"):
            target = "include/" + name
        elif quote == "<":
            allowed = FOREIGN.get(name)
            if allowed is not None and not any((layer + "/").startswith(f + "/") for f in allowed):
                yield number, "%s is not for %s/, only for %s" % (name, layer, ", ".join(allowed))
            continue
        if target is None:
            yield number, 'unknown file "%s"' % name
            continue
        other = folder_of(target)
        if other != layer and other not in MAY_SEE[layer]:
            yield number, "%s/ may not see %s" % (layer, target)


def check_header(path, owner_of):
    """A header of the same name, or the first line says which one declares what the source defines."""
    if not path.startswith("runtime/") or not path.endswith(".c"):
        return
    name = os.path.basename(path)
    with open(path, encoding="utf-8") as f:
        part = PART.match(f.read(400))
    if not part and name[:-1] + "h" not in owner_of:
        yield 4, "no %sh, and the first line does not begin \"Part of NAME.h\"" % name[:-1]
    elif part and part.group(1) not in owner_of:
        yield 4, "there is no " + part.group(1)


def main():
    findings = 0
    owner_of = {os.path.basename(p): p for p in sys.argv[1:]}
    for path in sys.argv[1:]:
        for line, what in [*check(path, owner_of), *check_header(path, owner_of)]:
            print("%s:%d: %s" % (path, line, what))
            findings += 1
    return findings > 0


if __name__ == "__main__":
    sys.exit(main())
