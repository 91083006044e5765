#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run clang-tidy over the C files of a compile database, as many at a time as there are cores.

usage: check_tidy.py --tidy CLANG_TIDY --build FOLDER

A file that is compiled several times (once per instruction set) is looked at once.
"""
import argparse
import concurrent.futures
import json
import os
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tidy", required=True)
    parser.add_argument("--build", required=True)
    args = parser.parse_args()
    with open(os.path.join(args.build, "compile_commands.json"), encoding="utf-8") as f:
        entries = json.load(f)
    files = sorted({os.path.normpath(os.path.join(e["directory"], e["file"])) for e in entries
                    if e["file"].endswith(".c")})

    def tidy(path):
        run = subprocess.run([args.tidy, "-p", args.build, "--quiet", path],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return run.returncode, run.stdout

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for code, output in pool.map(tidy, files):
            if code:
                failed += 1
                print(output.strip())
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
