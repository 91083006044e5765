#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check the text of files: licence line, blanks, line ends, left-over marks, unique names; that the
documentation names all there is to choose from, and only commands and files that exist.

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
PAGE = re.compile(r"^(README|ARCHITECTURE|CONTRIBUTING)\.md$|^docs/.*\.md$")
DATA = re.compile(r"^tests/.*/(data|golden|goldens|corpus)/|^examples/recall/model/|/results/")
# Spelled in two parts, so that this file does not find itself.
LEFT_OVER = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
LINE_MAX = 100
# Front pages are read to the end only if they are short.
LINES_MAX = {"README.md": 190, "ARCHITECTURE.md": 260, "CONTRIBUTING.md": 200}
# A concept is a file, of about 900 lines at most; the public API is read as one.
SOURCE_LINES_MAX = 1000
WHOLE = "include/kvferry/kvferry.h"
# Names and nouns that have another word now, and where they are not to come back: a noun that ARCHITECTURE
# explains has that meaning alone in kernels/ and runtime/.
RETIRED = (
    (r"kvf_row_bytes",
     r"(kernels|runtime|offload|tests|bench)/"),
    (r"kvf_given\w*|given_\w+|take_given|takes_given",
     r"(kernels|runtime)/"),
    (r"vf_(?:round|widen)_row|quantized_rows|store_row",
     r"(include|kernels|runtime)/"),
    (r"[Rr]ows?",
     r"kernels/(score/(codes|encode_simd)|move/quantized(_simd)?\.c?u?h)"),
    (r"[Rr]ows?|row_bytes|ROW_\w+",
     r"kernels/move/(copy|heads|move|repack|take)[._](?!args)"),
    (r"[Rr]ows?|TILE_ROWS|row_block",
     r"kernels/(tile_simd\.h|attend/(attend|merge|prefill)(_ref|_simd)\.c)"),
    (r"[Rr]ows?|\w+_ROWS|\w+_rows?",
     r"kernels/(cuda/(plain|tile|words)|attend/(attend|merge|prefill)\w*)\.cuh?"),
    (r"row_(?:max|sum)|kvf_observe_row",
     r"(kernels|runtime|tests)/"),
    (r"[Rr]ows?",
     r"kernels/observe/(observe|pool|profile)(_ref|_simd)?\.cu?$"),
    (r"[Rr]ows?|NO_ROW",
     r"kernels/(score/(digest|reduce|rotate|score_codes(_ref)?\.|score(_ref|_simd)?\.)|select/topk)"),
    (r"[Rr]ows?",
     r"runtime/(cache/(rings|select_policy\.c)|handle/|prune/(choose|policies|prune_))"),
    (r"id_list|live_list|va_list list",
     r"(kernels|runtime)/"),
    (r"store_(?:index|count|pages)|kvf_store_(?:tokens?|page)|(?<=->)stores?",
     r"(kernels|runtime|tests/kernels)/"),
    (r"kvf_step\w*|kvf_heads_call\w*",
     r"(kernels|runtime|offload|tests|bench)/"),
)


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
    if text.count("\n") > LINES_MAX.get(path, sys.maxsize):
        yield LINES_MAX[path], "more than so many lines; the rest belongs in docs/"
    if SOURCE.search(path) and path != WHOLE and text.count("\n") > SOURCE_LINES_MAX:
        yield SOURCE_LINES_MAX, "more than so many lines; two concepts are two files"
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
        # A row of a table cannot be wrapped.
        if len(line) > LINE_MAX and (SOURCE.search(path) or
                                     PAGE.search(path) and not line.startswith("|")):
            yield number, "longer than %d columns" % LINE_MAX
    for names, places in RETIRED:
        if SOURCE.search(path) and re.match(places, path):
            for found in re.finditer(r"\b(?:%s)\b" % names, text):
                yield text.count("\n", 0, found.start()) + 1, "%s has another name now" % found.group()
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


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def unnamed():
    """(page, name) of every selection policy, transfer method and prune policy that its page lacks."""
    choices = re.findall(r'X\(KVF_(?:SELECT|TRANSFER)_\w+, \d+, "(\w+)"',
                         read("include/kvferry/kvferry.h"))
    policies = re.search(r"prune_policies = ''.*?foreach name : \[(.*?)\]",
                         read("runtime/meson.build"), re.S).group(1)
    for page, names in (("docs/run.md", choices), ("docs/prune.md", re.findall(r"\w+", policies))):
        known = set(re.findall(r"\w+", read(page)))
        yield from ((page, name) for name in names if name not in known)


def astray(path, paths):
    """(line, what) for every link to a file, `./dev` command and name of a source that is not."""
    commands = set(re.findall(r"^  (\w+)  ", read("dev"), re.M))
    for number, line in enumerate(read(path).split("\n"), 1):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", line):
            if not os.path.exists(os.path.join(os.path.dirname(path), target)):
                yield number, "nothing is at %s" % target
        for name in re.findall(r"`([\w./]*\w\.(?:c|h|cuh?|py))`", line):
            if not any(("/" + held).endswith("/" + name) for held in paths):
                yield number, "no file is named %s" % name
        for command in re.findall(r"\./dev (\w+)", line):
            if command not in commands:
                yield number, "./dev help has no command %s" % command


def main():
    findings = 0
    paths = sys.argv[1:]
    for path in paths:
        if not TEXT.search(path) or DATA.search(path):
            continue
        told = list(check(path)) + (list(astray(path, paths)) if path.endswith(".md") else [])
        for line, what in told:
            print("%s:%d: %s" % (path, line, what))
            findings += 1
    for path, what in same_names(paths):
        print("%s:1: %s" % (path, what))
        findings += 1
    for page, name in unnamed():
        print("%s:1: does not name %s" % (page, name))
        findings += 1
    return findings > 0


if __name__ == "__main__":
    sys.exit(main())
