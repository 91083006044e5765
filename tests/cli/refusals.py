# SPDX-License-Identifier: Apache-2.0
"""Run the command as each row of a table says; it must print nothing and refuse with this status and
these words, and no others.

usage: refusals.py KVFERRY TABLE [NAME=WORDS...]

A row is a line of arguments, in which $NAME stands for WORDS, and below it, after spaces, the status
and the last line of standard error. A line `>NAME TEXT` writes the file NAME for the rows below it; in
TEXT \\n is the end of a line. As in tests/refusals.h, with KVF_WRITE_REFUSALS=1 in the environment the
table is written anew with the answers of today.
"""
import os
import re
import shlex
import sys

import checks


def main():
    kvferry, table = sys.argv[1:3]
    words = dict(argument.split("=", 1) for argument in sys.argv[3:])
    lines = checks.read(table).splitlines()
    out, failed = [], 0
    for i, line in enumerate(lines):
        if line.startswith(" "):
            continue
        out.append(line)
        if line.startswith(">"):
            name, _, text = line[1:].partition(" ")
            checks.write(name, text.replace("\\n", "\n"))
        if not line or line[0] in "#>":
            continue
        row = re.sub(r"\$(\w+)", lambda m: words[m[1]], line)
        done = checks.command(kvferry, *shlex.split(row))
        told = "    %d %s" % (done.returncode, (done.stderr.splitlines() or [""])[-1])
        out.append(told)
        if done.stdout or done.returncode not in (1, 2) or told not in lines[i + 1:i + 2]:
            failed += 1
            print("not ok: %s\n%s\n%s" % (line, told, done.stdout))
    if os.environ.get("KVF_WRITE_REFUSALS") == "1":
        checks.write(table, "\n".join(out) + "\n")
    print("%s: %d rows, %d failed" % (os.path.basename(table), sum(x.startswith(" ") for x in out), failed))
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
