#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile one .cu file, and keep what the compiler said.

usage: cuda_compile.py LOG COMMAND...

Everything that COMMAND prints goes to LOG, which tools/check_cuda_budget.py reads; it is shown only
if the command fails. Warnings are always shown.
"""
import subprocess
import sys


def main():
    log, command = sys.argv[1], sys.argv[2:]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         errors="replace")
    with open(log, "w", encoding="utf-8") as f:
        f.write(run.stdout)
    if run.returncode or "warning" in run.stdout:
        sys.stderr.write(run.stdout)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
