#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count circles of files that call each other, and hold their number to that of .ci/circles, which
only falls.

usage: check_circles.py FILE...    prints the circles if there are more; exits 1 if so

A file calls another one if it names a function that the other defines and that is not its own. A
function that is handed over as an argument is not called. Files of tests and examples do not count.
"""
import re
import sys

COUNTED = re.compile(r"(kernels|offload|runtime|runner|llama)/.*\.(c|cu)$")
BESIDE_CODE = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", re.S)
DEFINED = re.compile(r"^(static )?(?!typedef|extern|return|else)[A-Za-z_][\w *]*?[ *]([A-Za-z_]\w*)"
                     r"\([^;{]*\)\s*\{", re.M)
WORD = re.compile(r"\b[A-Za-z_]\w*\b")


def read(path):
    """Functions for others, functions of its own, and all words of a file."""
    with open(path, encoding="utf-8") as f:
        text = BESIDE_CODE.sub(" ", f.read())
    found = DEFINED.findall(text)
    return ({name for static, name in found if not static}, {name for static, name in found if static},
            set(WORD.findall(text)))


def circles(calls):
    """Largest sets of files of which each reaches each (Tarjan)."""
    index, low, stack, out = {}, {}, [], []

    def visit(path):
        index[path] = low[path] = len(index)
        stack.append(path)
        for other in sorted(calls[path]):
            if other not in index:
                visit(other)
            if other in stack:
                low[path] = min(low[path], low[other])
        if low[path] == index[path]:
            at = stack.index(path)
            out.append(stack[at:])
            del stack[at:]

    for path in calls:
        if path not in index:
            visit(path)
    return [sorted(circle) for circle in out if len(circle) > 1]


def main():
    sys.setrecursionlimit(10000)
    files = {path: read(path) for path in sys.argv[1:] if COUNTED.match(path)}
    owner = {name: path for path, (public, _, _) in files.items() for name in public}
    calls = {path: {owner[word] for word in words - public - own if word in owner} - {path}
             for path, (public, own, words) in files.items()}
    found = circles(calls)
    with open(".ci/circles", encoding="utf-8") as f:
        most = int(re.search(r"^\d+$", f.read(), re.M).group())
    if len(found) > most:
        print("\n".join(" ".join(circle) for circle in found))
    if len(found) != most:
        print("%d circles of files that call each other; .ci/circles has %d" % (len(found), most))
    return len(found) != most


if __name__ == "__main__":
    sys.exit(main())
