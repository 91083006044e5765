#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run every benchmark, one at a time, and write what it says to bench/results/.

usage: bench.py --build FOLDER [--into FOLDER] [NAME...]    NAME: a part of a benchmark's name

A benchmark is a program bench_* below FOLDER/bench/, or a row of COMMANDS. It prints a table, kept
as NAME.txt under the machine and the command, and writes every figure to NAME.json, which git ignores
in bench/results/; --into keeps those of one machine apart. Tables of answers are `./dev eval`'s.
"""
import argparse
import os
import subprocess
import sys
import time

from results_folder import ROOT, machine, write

# Of `kvferry bench`, on the host device.
COMMANDS = {
    "bench_decode": "decode --context 128K --budget 1024 --select hybrid,dynamic"
                    " --method direct,gather,each --batch 1,4 --steps 300 --dense-steps 15",
    "bench_disk": "disk --disk build --file 512M --bytes 32M --rest-ms 1500 --depth 1,8,64,128 --rounds 9",
    "bench_link_parts": "link parts --page-bytes 16K --pages 4096 --pool 1G"
                        " --chunk 512K,1M,2M,4M --slots-in-order on",
    "bench_link_rows": "link parts --page-bytes 256,512,1K --pages 2048 --pool 1G --what memcpy,gather,both",
    "bench_link_methods": "link methods --page-bytes 16K --pages 4096 --pool 1G"
                          " --slots-in-order off,on",
}


def benchmarks(build):
    """(name, command) of each."""
    found = []
    for folder, _, names in os.walk(os.path.join(ROOT, build, "bench")):
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith("bench_") and "." not in name and os.access(path, os.X_OK):
                found.append((name, [os.path.relpath(path, ROOT)]))
    command = os.path.join(build, "runner", "cli", "kvferry")
    if os.access(os.path.join(ROOT, command), os.X_OK):
        found += [(name, [command, "bench"] + options.split() + ["--device", "host"])
                  for name, options in COMMANDS.items()]
    return sorted(found)


def run(name, command, results):
    """Print what a benchmark prints, and keep it in `results`. True if it succeeded."""
    print("== %s" % name, flush=True)
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    code = process.wait()
    if code == 77:
        print("skipped")
        return True
    if code != 0:
        print("FAILED with status %d" % code)
        return False
    write(os.path.join(ROOT, results, name + ".txt"), "machine: %s\ncommand: %s\n\n%s\n" % (
        machine(), " ".join(command), "\n".join(lines).strip("\n")))
    print("(%.0f s)\n" % (time.monotonic() - begin), flush=True)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", required=True)
    parser.add_argument("--into", default=os.path.join("bench", "results"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="only those whose name has this")
    args = parser.parse_args()
    os.makedirs(os.path.join(ROOT, args.into), exist_ok=True)
    failed = 0

    for name, command in benchmarks(args.build):
        if not args.names or any(n in name for n in args.names):
            json_path = os.path.join(args.into, name + ".json")
            failed += not run(name, command + ["--json", json_path], args.into)
    print("results are in " + args.into)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
