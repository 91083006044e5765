#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the CUDA device cost on paper: instructions and bytes, without a GPU.

usage: kernel_report.py BUILD [--target 90] > bench/results/cuda_kernels.md

Instructions are counted in the machine code (cuobjdump): every one once, loops not unrolled in time.
Bytes follow from shapes by the formulas below, for one layer of a decode step of Llama-3.1-8B
(8 KV heads, group 4, d = 128, bf16, codes, pages of 4) with a budget of 512 of 131,072 tokens, and for its
attention over prompts (kernel_floors.py). A floor is bytes or operations over a rate that is given, not measured.
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
import kernel_floors as floors
import kernel_occupancy as occupancy

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

# What kvf_wait_for_earlier and kvf_let_next_start become.
MARKS = {"ACQBULK": "wait", "PREEXIT": "let"}

# One layer of one sequence, with the default settings: codes, pages of 4, a budget of 512.
HEADS, GROUP, DIM, PAGE, BUDGET, CONTEXT, BLOCK = 8, 4, 128, 4, 512, 131072, 32
PAGES, PAGE_BYTES, TOKEN = CONTEXT // PAGE, 2 * PAGE * DIM * 2, 2 * DIM * 2
SPANS, HELD = occupancy.spans(BUDGET, PAGE, 4, 64, BLOCK)
SPLITS = occupancy.ceil(HELD + 1, occupancy.split_spans(SPANS, PAGE))
CHOSEN, CODE = (BUDGET - 80) // PAGE, DIM // 4 + 2
MISS = 0.1
PARTS = HEADS * GROUP * SPLITS * (DIM + 1) * 4
BYTES = [
    ("append", "one token", HEADS * (TOKEN + GROUP * DIM * 2) * 2, "device"),
    ("rotate", "queries", HEADS * GROUP * (DIM * 3 + 4), "device"),
    ("weigh", "codes of all tokens, read; masses, written", HEADS * (CONTEXT * CODE + PAGES * GROUP * 2), "device"),
    ("fold", "masses, read; scores, written", HEADS * PAGES * (GROUP * 2 + 4), "device"),
    ("select", "scores, read once; tables of the chosen pages and slots; spans, written",
     HEADS * (PAGES * 4 + CHOSEN * 2 * (4 + 4 + 8 + 4) + BUDGET // PAGE * 32), "device"),
    ("attend_step", "budget of keys and values, read; partial results of %d splits, written and read" % SPLITS,
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
                if code[1].strip("; ") in MARKS:
                    counts.setdefault(MARKS[code[1].strip("; ")], counts["all"])
                counts["all"] += 1
                for kind, pattern in CLASSES.items():
                    if re.match(pattern, code[1]):
                        counts[kind] += 1
                        break
    return result


def by_kernel(units):
    """{(file, kernel): [(Counter, full name)]}, the largest form first."""
    result = {}
    for unit, found in units.items():
        forms = collections.defaultdict(list)
        for (_, counts), full in zip(found, budget.demangle([f[0] for f in found])):
            own, full = budget.own_unit(unit, full)
            forms[own, budget.short(full)].append((counts, full))
        for key in sorted(forms):
            result[key] = sorted(forms[key], key=lambda f: -f[0]["all"])
    return result


def targets_of(kernels):
    return [t for t in occupancy.LIMITS if any(k.target == "sm_" + t for k in kernels)]


def print_occupancy(kernels, a):
    """Blocks that fit, blocks that there are, and bytes on the way."""
    device = collections.Counter()
    for name, _, size, over in BYTES:
        device[name] += size if over == "device" else 0
    kinds = {b: occupancy.launches(b, HEADS, GROUP, DIM, PAGE, BUDGET, CHOSEN, CONTEXT, device)
             for b in (1, 4, 16)}
    found = {(k.target[3:], k.full): k for k in kernels}
    targets = targets_of(kernels)
    print("\n## Blocks of a multiprocessor\n")
    print("The same step. Registers and shared memory from ptxas and the launches, limits per multiprocessor from the CUDA\n"
          "programming guide: blocks that one holds, and what keeps it from more.\n")
    print("| kernel | threads | shared, KiB | %s |" % " | ".join("sm_%s: registers | blocks | by" % t for t in targets))
    print("|---|---:|---:|%s" % ("---:|---:|---|" * len(targets)))
    fits = {}
    for x in kinds[1]:
        cells = []
        for t in targets:
            k = found.get((t, x.form))
            if not k:
                sys.exit("%s: no %s for sm_%s; build all kernels for the targets that were begun" % (a.build, x.form, t))
            r = occupancy.residency(occupancy.LIMITS[t], k.registers, x.threads, x.shared + k.shared)
            fits[t, x.kernel] = r.blocks
            cells.append("%d | %d | %s" % (k.registers, r.blocks, r.by))
        print("| %s | %d | %.1f | %s |" % (x.kernel, x.threads, x.shared / 1024, " | ".join(cells)))
    need = [a.device_gb * ns / a.multiprocessors / 1024 for ns in a.latency_ns]
    print("\n## Bytes on their way\n")
    print("On sm_%s with %d multiprocessors: blocks that do something, waves of them, and what a multiprocessor has asked for\n"
          "and not got. For %g GB/s at %d to %d ns it needs %.1f to %.1f KiB, by Little's law. `all`: a block asks for\n"
          "all it reads before it waits, and the kernel is bound by latency. `yes`: enough. `no`: its bytes cannot come\n"
          "at that rate from device memory; what the kernel before it wrote comes from the second-level cache, sooner.\n"
          % (a.target, a.multiprocessors, a.device_gb, *a.latency_ns, *need))
    print("| kernel | batch | blocks | waves | KiB of a block | KiB of a multiprocessor | enough |\n|---|---:|---:|---:|---:|---:|---|")
    for i, one in enumerate(kinds[1]):
        for batch in kinds:
            x = kinds[batch][i]
            share = x.blocks / a.multiprocessors
            there = min(share, fits[a.target, one.kernel]) * x.in_flight / 1024
            verdict = "yes" if there >= need[1] else "all" if x.bytes <= x.blocks * x.in_flight * 2 else "no"
            print("| %s | %d | %d | %.2f | %.1f | %.1f | %s |" % (
                x.kernel, batch, x.blocks, share / fits[a.target, one.kernel], x.in_flight / 1024, there, verdict))


def print_floors(a):
    """Of prompts, and of a step beside its aims."""
    sizes = {"device": collections.Counter(), "link": collections.Counter()}
    for name, _, size, over in BYTES:
        sizes[over][name] += size
    forms = {"prefill": "prefill_tiles<__nv_bfloat16, %du, false>" % DIM, "weigh": "weigh_tile<1u, 2u>",
             "select": "select_list"}
    code = {unit: floors.Code(os.path.join(a.build, "kernels", "cuda_%s.o" % unit), a.target, form)
            for unit, form in forms.items()}
    floors.print_token(code, (sizes["device"], sizes["link"]), HEADS, GROUP, DIM, CONTEXT, a)
    floors.print_prompts(code["prefill"], HEADS, GROUP, DIM, a)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("--target", default="90")
    parser.add_argument("--device-gb", type=float, default=3350, help="GB/s of device memory")
    parser.add_argument("--multiprocessors", type=int, default=132)
    parser.add_argument("--latency-ns", type=int, nargs=2, default=[600, 800], help="of device memory under load")
    parser.add_argument("--tensor-tflops", type=float, default=989.4, help="of dense products in bf16")
    parser.add_argument("--clock-ghz", type=float, default=1.83, help="of a multiprocessor at that peak")
    parser.add_argument("--link-gb", type=float, default=55, help="GB/s of the link")
    a = parser.parse_args()
    kernels, _ = budget.read_logs(a.build)
    registers = {}
    for k in kernels:
        if k.target == "sm_" + a.target:
            registers.setdefault(k.full, k)
    print("# Kernels of the CUDA device, on paper\n")
    print("Counted, not measured: no GPU was at hand. Written by\n")
    print("    meson setup BUILD -Dgpu_targets=%s && ninja -C BUILD" % ",".join(targets_of(kernels)))
    print("    python3 tools/kernel_report.py BUILD --target %s\n" % a.target)
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
          "launches seal, encode or digest, writeback and table besides: recorded once for all layers, enqueued in each.\n"
          "The runner adds four products per layer, which end with what follows them, and for more than 8 rows two norms.\n")
    print("| pages | recorded | nodes | enqueued |\n|---|---|---:|---:|")
    for pages, names, enqueued in NODES:
        print("| %s | %s | %d | %d |" % (pages, names, names.count(",") + 1, enqueued))
    print_occupancy(kernels, a)
    print_floors(a)
    code = by_kernel(instructions(a.build, a.target))
    print("\n## Early starts\n")
    print("The blocks of these kernels take their places while the kernel before them in the stream ends, and every\n"
          "thread waits for that end: `wait` is how many instructions it has before, `let` how many before the kernel\n"
          "that comes next may take its places. What is saved is a launch, not work: only a product asks for something\n"
          "before it waits, its first weights. `frame`, the first node of a recorded step, lets the next one come and\n"
          "does not start early itself; nor does a node behind a join. Not measured.\n")
    print("| file | kernel | wait | let |\n|---|---|---:|---:|")
    for (unit, name), forms in code.items():
        if "wait" in forms[0][0]:
            print("| %s | %s | %d | %d |" % (unit, name, forms[0][0]["wait"], forms[0][0]["let"]))
    print("\n## Instructions in the machine code of sm_%s\n" % a.target)
    print("Every instruction once. The largest form of a kernel stands for its templates.\n")
    print("| file | kernel | forms | registers | all | %s |" % " | ".join(CLASSES))
    print("|---|---|---:|---:|---:|%s" % ("---:|" * len(CLASSES)))
    for (unit, name), forms in code.items():
        counts, full = forms[0]
        k = registers.get(full)
        print("| %s | %s | %d | %s | %d | %s |" % (
            unit, name, len(forms), k.registers if k else "", counts["all"],
            " | ".join(str(counts[c]) if counts[c] else "" for c in CLASSES)))


if __name__ == "__main__":
    main()
