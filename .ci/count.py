#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count the tests of one `meson test` run.

usage: count.py TESTLOG.JSON PART DURATIONS

It prints `PASSED FAILED SKIPPED`, then `failed: NAME, RESULT` and the end of its output for each program
that failed, then `skipped: NAME` for each that skipped tests, then `left out: N of M cases, NAME` for each
that tried only some of its cases (tests/sweep.h). To the file DURATIONS it adds `SECONDS PART NAME` for
each program.

A program that reports its own tests (cmocka) counts as that many, any other as one. A program
that fails without reporting a failed test (a crash, a sanitizer, a timeout) counts as one failure.
"""
import json
import re
import sys

PASSED = re.compile(r"^\[  PASSED  \] (\d+) test\(s\)", re.M)
FAILED = re.compile(r"^\[  FAILED  \] (\d+) test\(s\)", re.M)
SKIPPED = re.compile(r"^\[  SKIPPED \] (\d+) test\(s\)", re.M)
LEFT_OUT = re.compile(r"^# left out: (\d+) of (\d+)$", re.M)
LINES_SHOWN = 25


def total(pattern, text):
    return sum(int(n) for n in pattern.findall(text))


def main():
    passed, failed, skipped, skips, failures, partial = 0, 0, 0, [], [], []
    log, part, durations = sys.argv[1:]
    with open(log, encoding="utf-8") as f, open(durations, "a", encoding="utf-8") as times:
        for record in f:
            test = json.loads(record)
            times.write("%7.1f %-16s %s\n" % (test["duration"], part, test["name"]))
            text = (test.get("stdout") or "") + "\n" + (test.get("stderr") or "")
            good, bad, left = total(PASSED, text), total(FAILED, text), total(SKIPPED, text)
            cases = [(int(n), int(of)) for n, of in LEFT_OUT.findall(text)]
            if cases:
                partial.append("left out: %d of %d cases, %s" % (*map(sum, zip(*cases)), test["name"]))
            if test["result"] in ("OK", "EXPECTEDFAIL"):
                passed += max(good, 1 - min(left, 1))
                skipped += left
                skips += ["skipped: " + test["name"]] * (left > 0)
            elif test["result"] == "SKIP":
                skipped += 1
                skips.append("skipped: " + test["name"])
            else:
                passed += good
                failed += max(bad, 1)
                failures.append("failed: %s, %s" % (test["name"], test["result"]))
                failures += ["    " + line for line in text.rstrip().splitlines()[-LINES_SHOWN:]]
    print(passed, failed, skipped)
    for told in failures + skips + partial:
        print(told)


if __name__ == "__main__":
    main()
