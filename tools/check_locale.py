#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that only include/common/text.h calls functions of the C library whose results depend on the
locale: numbers are read and written as in the C locale, whatever the process has set.

usage: check_locale.py FILE...    prints `FILE:LINE: what` for every finding, exits 1 if any
"""
import re
import sys

SOURCE = re.compile(r"\.(c|cc|h|inc|cu|cuh)$")
# Examples and tests are programs of their own, which set no locale, or set one on purpose.
OUTSIDE = re.compile(r"^(tests|examples)/|^include/common/text\.h$")
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*|\'(?:\\.|[^\'\\\n])+\'', re.S)
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')
REAL = re.compile(r"%[-+ #0']*(?:\d+|\*)?(?:\.(?:\d+|\*)?)?[lL]?[aAeEfFgG]")
SCANNED_REAL = re.compile(r"%\*?\d*[lL]?[aAeEfFgG]")
PRINTS = re.compile(r"\b(v?)(?:f|d|s|sn|as)?printf\s*\(")
SCANS = re.compile(r"\bv?[fs]?scanf\s*\(")
INSTEAD = {
    r"strto(?:d|f|ld)(?:_l)?|atof": "kvf_real_of",
    r"is(?:alnum|alpha|ascii|blank|cntrl|digit|graph|lower|print|punct|space|upper|xdigit)":
        "kvf_is_space and its like",
    r"to(?:lower|upper)": "kvf_lower, kvf_upper",
    r"strn?casecmp|strcasestr": "a comparison by kvf_lower",
    r"strcoll|strxfrm|localeconv|nl_langinfo|strftime": "text of the C locale",
    r"strerror(?:_[rl])?": "kvf_errno_text",
    r"newlocale|uselocale": "kvf_c_locale_begin",
}
CALLS = [(re.compile(r"(?<![\w.>])(%s)\s*\(" % names), fix) for names, fix in INSTEAD.items()]


def without_comments(text):
    """The text with comments and characters blanked, so that offsets and lines stay."""
    return TOKEN.sub(lambda m: m.group() if m.group()[0] == '"' else
                     re.sub(r"[^\n]", " ", m.group()), text)


def call_at(bare, opening):
    """The text of a call from its opening parenthesis on."""
    depth = 0
    for at in range(opening, len(bare)):
        depth += (bare[at] == "(") - (bare[at] == ")")
        if depth == 0:
            return bare[opening:at]
    return bare[opening:]


def findings(text):
    """(line, what) for every call of one source that depends on the locale."""
    code = without_comments(text)
    bare = LITERAL.sub(lambda m: '"' + " " * (len(m.group()) - 2) + '"', code)
    found = []

    def tell(at, what):
        found.append((code.count("\n", 0, at) + 1, what + " follows the locale"))

    for calls, fix in CALLS:
        for call in calls.finditer(bare):
            tell(call.start(), "%s (use %s)" % (call.group(1), fix))
    for kind, real in ((PRINTS, REAL), (SCANS, SCANNED_REAL)):
        for call in kind.finditer(bare):
            size = len(call_at(bare, call.end() - 1))
            literals = LITERAL.findall(code[call.end() - 1:call.end() - 1 + size])
            format = "".join(word[1:-1] for word in literals).replace("%%", "")
            name = call.group().rstrip(" (")
            if not literals:
                tell(call.start(), "%s of a format that is not here (use kvf_vformat)" % name)
            elif real.search(format):
                tell(call.start(), "%s of %s (use kvf_format, kvf_print or kvf_real_of)"
                     % (name, real.search(format).group()))
    return sorted(found)


def main():
    count = 0
    for path in sys.argv[1:]:
        if not SOURCE.search(path) or OUTSIDE.search(path):
            continue
        with open(path, encoding="utf-8") as f:
            told = findings(f.read())
        for line, what in told:
            print("%s:%d: %s" % (path, line, what))
        count += len(told)
    return count > 0


if __name__ == "__main__":
    sys.exit(main())
