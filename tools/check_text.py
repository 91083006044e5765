#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check the text of files: licence line, blanks, line ends, left-over marks, unique names; and that
README names all there is to choose from.

usage: check_text.py FILE...    prints `FILE:LINE: what` for every finding, exits 1 if any
"""
import collections
import os
import re
import sys

SOURCE = re.compile(r"\.(c|cc|h|inc|cu|cuh)$")
SCRIPT = re.compile(r"(\.(py|sh)$)|(^dev$)|(^tools/lint$)|(^\.ci/run$)")
TEXT = re.compile(r"\.(c|cc|h|inc|cu|cuh|py|sh|md|map|txt|svg|in|build|yml)$|^dev$|^tools/lint$"
                  r"|^\.ci/run$|^\.(gitignore|editorconfig|clang-format|clang-tidy)$")
PAGE = re.compile(r"^ARCHITECTURE\.md$|^docs/design/.*\.md$")
DATA = re.compile(r"^tests/.*/(data|golden|goldens|corpus)/|^examples/recall/model/|/results/")
# Spelled in two parts, so that this file does not find itself.
LEFT_OVER = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
LINE_MAX = 100


def check(path):
    """(line, what) for every finding in one file."""
    with open(path, "rb") as f:
        raw = f.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        yield 1, "is not UTF-8"
        return
    if text and not text.endswith("\n"):
        yield text.count("\n") + 1, "no newline at the end of the file"
    if text.endswith("\n\n"):
        yield text.count("\n"), "blank line at the end of the file"
    for number, line in enumerate(text.split("\n"), 1):
        if "\r" in line:
            yield number, "carriage return"
        if line != line.rstrip():
            yield number, "blanks at the end of the line"
        if "\t" in line and SOURCE.search(path):
            yield number, "tab"
        if LEFT_OVER.search(line):
            yield number, "left-over mark: " + LEFT_OVER.search(line).group()
        if len(line) > LINE_MAX and (SOURCE.search(path) or PAGE.search(path)):
            yield number, "longer than %d columns" % LINE_MAX
    if SOURCE.search(path) or SCRIPT.search(path):
        head = text.split("\n", 2)[:2]
        if not any("SPDX-License-Identifier: Apache-2.0" in line for line in head):
            yield 1, "no SPDX-License-Identifier in the first two lines"


def same_names(paths):
    """Source files must be named apart over the whole tree."""
    places = collections.defaultdict(list)
    for path in paths:
        if SOURCE.search(path):
            places[os.path.basename(path)].append(path)
    for name, found in places.items():
        if len(found) > 1:
            yield found[1], "the name %s is taken by %s" % (name, found[0])


def unnamed():
    """README must name every selection policy, transfer method and prune policy."""
    def read(path):
        with open(path, encoding="utf-8") as f:
            return f.read()
    lists = re.findall(r'X\(KVF_(?:SELECT|TRANSFER)_\w+, \d+, "(\w+)"',
                       read("include/kvferry/kvferry.h"))
    policies = re.search(r"prune_policies = ''.*?foreach name : \[(.*?)\]",
                         read("runtime/meson.build"), re.S).group(1)
    known = set(re.findall(r"\w+", read("README.md")))
    return [name for name in lists + re.findall(r"\w+", policies) if name not in known]


def main():
    findings = 0
    paths = sys.argv[1:]
    for path in paths:
        if not TEXT.search(path) or DATA.search(path):
            continue
        for line, what in check(path):
            print("%s:%d: %s" % (path, line, what))
            findings += 1
    for path, what in same_names(paths):
        print("%s:1: %s" % (path, what))
        findings += 1
    for name in unnamed():
        print("README.md:1: does not name %s" % name)
        findings += 1
    return findings > 0


if __name__ == "__main__":
    sys.exit(main())
