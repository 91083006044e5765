#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count turns of speech that stop a reader, and hold each to its number in .ci/prose, which only falls.

The first kinds are counted in comments of sources and in pages, the others in pages and public headers.

usage: check_prose.py FILE...    prints the counts that are too large, and where; exits 1 if any
"""
import io
import re
import sys
import tokenize

SOURCE = re.compile(r"\.(c|h|cu|cuh)$")
PUBLIC = re.compile(r"^((docs/|docs/design/)?[^/]*\.md|include/kvferry/.*\.h)$")
# A sentence begins the text, or follows the end of another one, a mark of a list, or a cell.
BEGIN = r"(?:^|(?<=[.:;!?] )|(?<=\| )|(?<=- )|(?<=\*))"
KINDS = {
    "What": re.compile(BEGIN + r"What \w"),
    "Of": re.compile(BEGIN + r"Of \w"),
    "behind": re.compile(r"\bbehind\b"),
    "one behind the other": re.compile(r"\bone behind the other\b"),
}
PUBLIC_KINDS = {
    "has, have": re.compile(r"\b(?:has|have)\b"), # one verb for ten relations
    "where": re.compile(r"(?:^|[.,;:(] ?)[Ww]here\b"), # for if and when
    "tells, says, asks, knows": re.compile(r"\b(?:tells?|told|says?|said|asks?|asked|knows?)\b"),
    "that of": re.compile(r"\b(?:that|those) of\b"),
    "nobody, whoever": re.compile(r"\b(?:nobody|somebody|whoever|whatever)\b", re.I),
    "beside, anew, likewise": re.compile(r"\b(?:beside|anew|likewise)\b", re.I),
    "over 40 words": re.compile(r"(?:\S*[^\s.!?|] ){40}\S"),
}
ALL_KINDS = {**KINDS, **PUBLIC_KINDS}


def comments(path, text):
    """(line, text) of every comment, or of every paragraph, mark of a list and row of a page."""
    if path.endswith(".md"):
        text = re.sub(r"^(?:```.*?^```|<!-- models:.*?^<!-- end of models)", # a program wrote those tables
                      lambda found: "\n" * found.group().count("\n"), text, flags=re.S | re.M)
        for found in re.finditer(r"^(?!#)\S.*(\n(?![-|#*\d]|\s*\n| *- ).+)*", text, re.M):
            yield text.count("\n", 0, found.start()) + 1, found.group()
    elif SOURCE.search(path):
        for found in re.finditer(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", text, re.S):
            if found.group().startswith("/"):
                body = re.sub(r"\n\s*\*", "\n", found.group().strip("/*"))
                body = re.sub(r"(?<=\n\n)(?: {4,}.*\n|\n)+", "\n", body) # examples
                body = re.sub(r"\n *@", ". @", body)
                yield text.count("\n", 0, found.start()) + 1, body
    elif path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT or token.string.startswith(('"""', 'r"""')):
                yield token.start[0], token.string.lstrip("#").strip("\"")


def main():
    counts = {kind: [] for kind in ALL_KINDS}
    for path in sys.argv[1:]:
        if not (SOURCE.search(path) or path.endswith((".py", ".md"))) or path == "CHANGELOG.md":
            continue
        with open(path, encoding="utf-8") as f:
            text = f.read()
        for line, body in comments(path, text):
            body = re.sub(r"\s+", " ", body).strip()
            for kind, pattern in (ALL_KINDS if PUBLIC.search(path) else KINDS).items():
                counts[kind] += ["%s:%d: %s" % (path, line, m.group()) for m in
                                 pattern.finditer(body)]
    with open(".ci/prose", encoding="utf-8") as f:
        most = {kind: int(n) for n, kind in re.findall(r"^(\d+) (.+)$", f.read(), re.M)}
    for kind, found in counts.items():
        if len(found) > most[kind]:
            print("\n".join(found))
        if len(found) != most[kind]:
            print("'%s' %d times; .ci/prose has %d" % (kind, len(found), most[kind]))
    return any(len(found) > most[kind] for kind, found in counts.items())


if __name__ == "__main__":
    sys.exit(main())
