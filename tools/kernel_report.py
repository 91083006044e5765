#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the CUDA device cost on paper: instructions and bytes, without a GPU.

usage: kernel_report.py BUILD [--target 90] > bench/results/cuda_kernels.md

Instructions are counted in the machine code (cuobjdump): every one once, loops not unrolled in time.
Bytes follow from shapes by the formulas below, for one layer of a decode step of Llama-3.1-8B
(8 KV heads, group 4, d = 128, bf16, codes, pages of 4) with a budget of 512 of 131,072 tokens. The floor is
those bytes over a bandwidth that is given, not measured.
"""
import argparse
import collections
import glob
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_cuda_budget as budget

CLASSES = collections.OrderedDict([
    ("global 16 B", r"(LD|ST)G?\.\S*128|LDG\S*\.128|STG\S*\.128|LDGSTS\S*\.128"),
    ("global other", r"(LDG|STG|LDGSTS|RED|ATOMG|ATOM|LD\.|ST\.|LD |ST )"),
    ("shared", r"(LDS|STS|LDSM|ATOMS)"),
    ("tensor", r"(HMMA|HGMMA)"),
    ("float", r"(FFMA|FADD|FMUL|FMNMX|FSETP|FSEL|HFMA2|HADD2|HMUL2|HMNMX2)"),
    ("special", r"MUFU"),
    ("shuffle", r"(SHFL|VOTE|MATCH|REDUX)"),
    ("barrier", r"(BAR|WARPSYNC|SYNCS|BSYNC)"),
    ("bulk", r"(UBLKCP|UBLKPF|UTMA)"),
])

# One layer of one sequence, with the default settings: codes, pages of 4, a budget of 512.
HEADS, GROUP, DIM, PAGE, BUDGET, CONTEXT, BLOCK = 8, 4, 128, 4, 512, 131072, 32
PAGES, PAGE_BYTES, TOKEN, SPLIT = CONTEXT // PAGE, 2 * PAGE * DIM * 2, 2 * DIM * 2, 32
CHOSEN, CODE = (BUDGET - 80) // PAGE, DIM // 4 + 2
MISS = 0.1
PARTS = HEADS * GROUP * (BUDGET // SPLIT) * (DIM + 1) * 4
BYTES = [
    ("append", "one token", HEADS * (TOKEN + GROUP * DIM * 2) * 2, "device"),
    ("rotate", "queries", HEADS * GROUP * (DIM * 3 + 4), "device"),
    ("weigh", "codes of all tokens, read; masses, written", HEADS * (CONTEXT * CODE + PAGES * GROUP * 2), "device"),
    ("fold", "masses, read; scores, written", HEADS * PAGES * (GROUP * 2 + 4), "device"),
    ("select", "scores, read once; tables of the chosen pages and slots; spans, written",
     HEADS * (PAGES * 4 + CHOSEN * 2 * (4 + 4 + 8 + 4) + BUDGET // PAGE * 32), "device"),
    ("attend_step", "budget of keys and values, read; partial results of 16 splits, written and read",
     HEADS * BUDGET * TOKEN + 2 * PARTS, "device"),
    ("attend_step", "missed pages (a tenth of the chosen), read over the link", HEADS * CHOSEN * MISS * PAGE_BYTES,
     "link"),
    ("encode", "one block, every 32 steps", HEADS * BLOCK * (TOKEN // 2 + CODE) / BLOCK, "device"),
    ("writeback", "one block, every 32 steps, to the host", HEADS * BLOCK * TOKEN / BLOCK, "link"),
]
NODES = [
    ("codes, pages ranked (the default)", "append, rotate, weigh, fold, select, attend_step", 12),
    ("boxes, pages ranked", "append, score, reduce, select, attend_step", 11),
    ("not ranked (`full`, `static`, `streaming`)", "append, newest, select, attend_step", 9),
]

def instructions(build, target):
    """{(file, kernel): [(full name, Counter)]} of one target."""
    result = collections.defaultdict(list)
    for path in sorted(glob.glob(os.path.join(build, "**", "cuda_*.o"), recursive=True)):
        unit = budget.unit_of(path, ".o")
        run = subprocess.run(["cuobjdump", "-arch", "sm_" + target, "-sass", path], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        name, counts = None, None
        for line in run.stdout.splitlines():
            head = re.match(r"\s*Function : (\S+)", line)
            if head:
                name, counts = head[1], collections.Counter()
                result[unit].append((name, counts))
            code = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?([A-Z][\w.]*(?: |;))", line)
            if code and counts is not None and code[1].strip("; ") != "NOP":
                counts["all"] += 1
                for kind, pattern in CLASSES.items():
                    if re.match(pattern, code[1]):
                        counts[kind] += 1
                        break
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("--target", default="90")
    parser.add_argument("--device-gb", type=float, default=4800, help="GB/s of device memory")
    parser.add_argument("--link-gb", type=float, default=55, help="GB/s of the link")
    a = parser.parse_args()
    kernels, _ = budget.read_logs(a.build)
    registers = {}
    for k in kernels:
        if k.target == "sm_" + a.target:
            registers.setdefault(k.full, k)
    print("# Kernels of the CUDA device, on paper\n")
    print("Counted, not measured: no GPU was at hand. Written by\n")
    print("    python3 tools/kernel_report.py %s --target %s\n" % ("BUILD", a.target))
    print("## Bytes of one layer of a decode step\n")
    print("Llama-3.1-8B's shape (8 KV heads, group 4, d = 128, bf16, codes, pages of 4), one sequence, %d of %d "
          "tokens. The\nfloor takes %g GB/s for device memory and %g GB/s for the link, both from data sheets.\n"
          % (BUDGET, CONTEXT, a.device_gb, a.link_gb))
    print("| kernel | what | KiB | over | floor, us |\n|---|---|---:|---|---:|")
    for name, what, size, over in BYTES:
        rate = a.device_gb if over == "device" else a.link_gb
        print("| %s | %s | %.1f | %s | %.2f |" % (name, what, size / 1024, over, size / rate / 1e3))
    device = sum(b[2] for b in BYTES if b[3] == "device")
    link = sum(b[2] for b in BYTES if b[3] == "link")
    print("| all | | %.1f + %.1f | device + link | %.2f, %.2f |\n"
          % (device / 1024, link / 1024, device / a.device_gb / 1e3, link / a.link_gb / 1e3))
    print("## Launches of one layer of a decode step\n")
    print("Nodes of a recorded step, which the test `record` counts, and launches of an enqueued one. A step that seals\n"
          "launches seal, encode or digest, writeback and table besides: recorded once for all layers, enqueued in each.\n")
    print("| pages | recorded | nodes | enqueued |\n|---|---|---:|---:|")
    for pages, names, enqueued in NODES:
        print("| %s | %s | %d | %d |" % (pages, names, names.count(",") + 1, enqueued))
    print("\n## Instructions in the machine code of sm_%s\n" % a.target)
    print("Every instruction once. The largest form of a kernel stands for its templates.\n")
    print("| file | kernel | forms | registers | all | %s |" % " | ".join(CLASSES))
    print("|---|---|---:|---:|---:|%s" % ("---:|" * len(CLASSES)))
    for unit, found in instructions(a.build, a.target).items():
        by_name = collections.defaultdict(list)
        for (symbol, counts), full in zip(found, budget.demangle([f[0] for f in found])):
            by_name[budget.short(full)].append((counts, full))
        for name, forms in sorted(by_name.items()):
            counts, full = max(forms, key=lambda f: f[0]["all"])
            k = registers.get(full)
            print("| %s | %s | %d | %s | %d | %s |" % (
                unit, name, len(forms), k.registers if k else "", counts["all"],
                " | ".join(str(counts[c]) if counts[c] else "" for c in CLASSES)))


if __name__ == "__main__":
    main()
