#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count the tests of one `meson test` run.

usage: count.py TESTLOG.JSON    prints `PASSED FAILED SKIPPED`, then the names of the skipped

A program that reports its own tests (cmocka) counts as that many, any other as one. A program
that fails without reporting a failed test (a crash, a sanitizer, a timeout) counts as one failure.
"""
import json
import re
import sys

PASSED = re.compile(r"^\[  PASSED  \] (\d+) test\(s\)", re.M)
FAILED = re.compile(r"^\[  FAILED  \] (\d+) test\(s\)", re.M)
SKIPPED = re.compile(r"^\[  SKIPPED \] (\d+) test\(s\)", re.M)


def total(pattern, text):
    return sum(int(n) for n in pattern.findall(text))


def main():
    passed, failed, skipped, names = 0, 0, 0, []
    with open(sys.argv[1], encoding="utf-8") as f:
        for line in f:
            test = json.loads(line)
            text = (test.get("stdout") or "") + "\n" + (test.get("stderr") or "")
            good, bad, left = total(PASSED, text), total(FAILED, text), total(SKIPPED, text)
            if test["result"] in ("OK", "EXPECTEDFAIL"):
                passed += max(good, 1 - min(left, 1))
                skipped += left
                names += [test["name"]] * (left > 0)
            elif test["result"] == "SKIP":
                skipped += 1
                names.append(test["name"])
            else:
                passed += good
                failed += max(bad, 1)
    print(passed, failed, skipped)
    for name in names:
        print(name)


if __name__ == "__main__":
    main()
