# SPDX-License-Identifier: Apache-2.0
"""Floors of prompts, of scoring and of a token, from bytes, operations and machine code.

It measures nothing. A loop of machine code is what lies between a branch back and its target; inside one every
instruction counts once per turn, as if no branch left any out.
"""
import collections
import re
import subprocess

import kernel_occupancy as occupancy

PROMPTS = (4096, 32768, 131072)
PRODUCT = 4096  # operations of 16x8x16
SCHEDULERS, SHARED_BYTES, SPECIAL = 4, 128, 16  # of a multiprocessor, per clock
LAYERS, WIDTH, INNER, WORDS = 32, 4096, 14336, 128256  # of Llama-3.1-8B
AIMS = {1: 1.15, 16: 1.4}  # a token at 128K to dense attention at 4K

Loop = collections.namedtuple("Loop", "first last names")


class Code:
    """The instructions of one function."""

    def __init__(self, path, target, form):
        run = subprocess.run("cuobjdump -arch sm_%s -sass %s | c++filt -p" % (target, path), shell=True, text=True,
                             stdout=subprocess.PIPE, check=True)
        body = next(t for t in run.stdout.split("Function : ")[1:] if form in t.split("\n", 1)[0])
        found = re.findall(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?\w+ )?\s*([A-Z][\w.]*)([^;]*);", body, re.M)
        self.code = [(int(at, 16), name, rest) for at, name, rest in found if name != "NOP"]
        self.loops = []
        for at, name, rest in self.code:
            to = re.search(r"0x([0-9a-f]+)", rest)
            if name.startswith("BRA") and to and int(to[1], 16) < at:
                self.loops.append(self.between(int(to[1], 16), at))

    def between(self, first, last):
        return Loop(first, last, [name for at, name, _ in self.code if first <= at <= last])

    def loop_of(self, kind):
        """The smallest that has every instruction of that kind."""
        need = count([name for _, name, _ in self.code], kind)
        return min((x for x in self.loops if count(x.names, kind) == need), key=lambda x: x.last - x.first)

    def others(self, main, kind):
        """The largest loops with such an instruction that share nothing with `main`."""
        apart = [x for x in self.loops if (x.last < main.first or x.first > main.last) and count(x.names, kind)]
        return [x for x in apart if not any(y.first <= x.first and x.last <= y.last and y is not x for y in apart)]

    def inside(self, main, kind):
        return [x for x in self.loops if main.first < x.first and x.last < main.last and count(x.names, kind)]


def count(names, kind):
    return sum(re.match(kind, name) is not None for name in names)


def prompt_clocks(code, dim):
    """Clocks that a tile of 128 rows and 64 keys takes of each unit of a multiprocessor, and its instructions."""
    c = occupancy.constants("kernels/attend/prefill.cu")
    warps, keys = c["WARPS"], 64
    main = code.loop_of("HMMA")
    loads = code.inside(main, "LDGSTS")
    turns = keys * dim * 2 // 16 // (warps * 32) // 4  # unrolled by four
    issued = len(main.names) + sum(len(x.names) * (turns - 1) for x in loads)
    products, tiles = count(main.names, "HMMA"), count(main.names, "LDSM")
    return {
        "products": products * warps * PRODUCT,
        "tensor cores, at their peak": None,
        "shared memory": (warps * tiles * 512 + 2 * keys * dim * 2) / SHARED_BYTES,
        "issue of instructions": issued * warps / SCHEDULERS,
        "special functions": count(main.names, "MUFU") * warps * 32 / SPECIAL,
    }, dict(main=len(main.names), issued=issued, products=products, tiles=tiles,
            special=count(main.names, "MUFU"), loads=sum(len(x.names) * turns for x in loads))


def print_prompts(code, heads, group, dim, a):
    clocks, seen = prompt_clocks(code, dim)
    per_clock = a.tensor_tflops * 1e3 / a.multiprocessors / a.clock_ghz
    clocks["tensor cores, at their peak"] = clocks.pop("products") / per_clock
    peak = clocks["tensor cores, at their peak"]
    by = max(clocks, key=clocks.get)
    ratio, rows = clocks[by] / peak, 128 // group
    print("\n## Attention of one layer over a prompt\n")
    print("Not measured. The same shape, causal, the whole prompt in one call. Operations: 4 * %d per visible pair of a\n"
          "query and a key. `once`: queries, keys, values and results, each once. `asked for`: what blocks of 128 rows,\n"
          "%d tokens of a KV head, load of keys and values; what other blocks have just read comes from the second-level\n"
          "cache. Floors: %g TFLOP/s of dense bf16 at the peak and %g GB/s, from the data sheet of an H100 SXM, and the\n"
          "rate that the instructions of `prefill_tiles` allow.\n"
          % (dim, rows, a.tensor_tflops, a.device_gb))
    print("| tokens | operations, 10^12 | once, MiB | asked for, GiB | floor at the peak, ms | by bytes once, ms | "
          "by our instructions, ms |\n|---:|---:|---:|---:|---:|---:|---:|")
    for tokens in PROMPTS:
        operations = 4 * dim * heads * group * tokens * (tokens + 1) / 2
        once = tokens * dim * 2 * 2 * heads * (group + 1)
        asked = heads * dim * 4 * sum(range(rows, tokens + 1, rows))
        ms = operations / a.tensor_tflops / 1e9
        print("| %d | %.2f | %d | %.1f | %.3f | %.3f | %.3f |" % (
            tokens, operations / 1e12, once >> 20, asked / 2**30, ms, once / a.device_gb / 1e6, ms * ratio))
    print("\nA tile of 128 rows and 64 keys of `prefill_tiles<__nv_bfloat16, %du, false>`, from its loop in the machine code:\n"
          "a warp issues %d products of 16x8x16 (`HMMA`, which is mma.sync, not wgmma), %d loads of four 8x8 tiles\n"
          "(`LDSM`), %d special functions and %d instructions in all, %d of them to bring the next tile. Four warps, in\n"
          "clocks of a multiprocessor at %g GHz, at which the peak is %d operations a clock:\n"
          % (dim, seen["products"], seen["tiles"], seen["special"], seen["issued"], seen["loads"], a.clock_ghz,
             round(per_clock)))
    print("| unit | rate per clock | clocks of a tile | to the peak |\n|---|---|---:|---:|")
    rates = {"tensor cores, at their peak": "%d operations" % round(per_clock), "shared memory": "%d bytes" % SHARED_BYTES,
             "issue of instructions": "%d" % SCHEDULERS, "special functions": "%d" % SPECIAL}
    for unit, value in clocks.items():
        print("| %s | %s | %d | %.2f |" % (unit, rates[unit], value, value / peak))
    print("\nSo the kernel takes at least %.2f times the floor at the peak by shared memory, and %.2f times, %d TFLOP/s, by %s,\n"
          "which the table takes, if no branch leaves an instruction out; waits between units come on top, and mma.sync itself\n"
          "may not reach the peak of wgmma. For comparison, the abstract of FlashAttention-3 (arXiv 2407.08608): FlashAttention-2\n"
          "reaches 35%% of the peak of an H100, FlashAttention-3 up to 740 TFLOP/s of fp16."
          % (clocks["shared memory"] / peak, ratio, a.tensor_tflops / ratio, by))


def weigh_instructions(code, group):
    """Of one tile of 1024 tokens."""
    c = occupancy.constants("kernels/cuda/cuda.cuh", "kernels/score/codes.h", "kernels/score/score_args.h",
                            "kernels/score/weigh.cu")
    main = code.loop_of("IMMA")
    rest = sum(len(x.names) for x in code.others(main, "SHFL") if len(x.names) < len(main.names))
    turns = c["KVF_WEIGH_TOKENS"] // 32 // c["WARPS"]
    return c["WARPS"] * (turns * len(main.names) + group * rest), c["KVF_WEIGH_TOKENS"], len(main.names), rest


def print_token(code, sizes, heads, group, dim, context, a):
    """`sizes`: bytes per layer and sequence, by kernel, of device memory and of the link."""
    device, link = sizes
    issued, tile, main, rest = weigh_instructions(code["weigh"], group)
    print("\n## Floors of a decode step beside its aims\n")
    print("Not measured. One layer, every sequence with %d tokens of its own, the budget of above; bytes over %g GB/s of\n"
          "device memory and %g GB/s of the link. `allowed`: the floor over the share of a copy's bandwidth that is the aim.\n"
          % (context, a.device_gb, a.link_gb))
    print("| phase | batch | MiB | floor, us | aim, us or share | allowed, us |\n|---|---:|---:|---:|---|---:|")
    phases = [("scores: rotate, weigh, fold", ("rotate", "weigh", "fold"), {16: 0.85}),
              ("select", ("select",), {}), ("attention of the budget", ("append", "attend_step"), {16: 0.8})]
    for what, names, aims in phases:
        for batch in (1, 16):
            size = batch * sum(device[n] for n in names)
            us = size / a.device_gb / 1e3
            aim = ("8 us", "8.00") if what == "select" and batch == 1 else (
                "%d%% of a copy" % (aims[batch] * 100), "%.2f" % (us / aims[batch])) if batch in aims else ("", "")
            print("| %s | %d | %.1f | %.2f | %s | %s |" % (what, batch, size / 2**20, us, *aim))
    for batch in (1, 16):
        size = batch * sum(link.values())
        print("| link: missed pages, one block written | %d | %.1f | %.2f | | |" % (
            batch, size / 2**20, size / a.link_gb / 1e3))
    tiles = heads * context / tile / a.multiprocessors
    us = tiles * issued / SCHEDULERS / a.clock_ghz / 1e3
    print("\nInstructions of `weigh`: a warp issues at most %d for 32 tokens and then %d per head, %d for a tile of %d tokens,\n"
          "which is %.1f us per sequence at %d a clock and multiprocessor and %g GHz, if no branch leaves any out; its bytes\n"
          "take %.1f. Unless branches leave out more than half, scores miss their aim by instructions, not by bytes."
          % (main, rest, issued, tile, us, SCHEDULERS, a.clock_ghz, device["weigh"] / a.device_gb / 1e3))
    once, warps = len(code["select"].code), 32
    barriers = count([name for _, name, _ in code["select"].code], "BAR")
    print("`select`: %d instructions, and %d warps on the multiprocessor of a list's block. 8 us are %d instructions of a\n"
          "warp, so less than half of them may run, loops counted by their turns; %d of them are barriers. The aim is in\n"
          "doubt until it has run."
          % (once, warps, 8e3 * a.clock_ghz * SCHEDULERS / warps, barriers))
    weights = 2 * (LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * heads * dim + 3 * WIDTH * INNER) + WORDS * WIDTH)
    print("\nA token of all %d layers, %.2f GB of weights read once per step:\n" % (LAYERS, weights / 1e9))
    print("| batch | dense at 4K, GB | floor, ms | at %dK, GB | floor, ms | link, ms | ratio of the floors | aim |\n"
          "|---:|---:|---:|---:|---:|---:|---:|---:|" % (context >> 10))
    for batch, aim in AIMS.items():
        dense = weights + batch * LAYERS * heads * 4096 * 4 * dim
        ours = weights + batch * LAYERS * sum(device.values())
        print("| %d | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f |" % (
            batch, dense / 1e9, dense / a.device_gb / 1e6, ours / 1e9, ours / a.device_gb / 1e6,
            batch * LAYERS * sum(link.values()) / a.link_gb / 1e6, ours / dense, aim))
    print("\nAt batch 16 the aim is below the floor: codes of %d tokens are more bytes than keys and values of 4K. It can be\n"
          "met only with a shorter context, smaller codes, or sequences that share what they score, as those do which\n"
          "`./dev gpu runner` forks from one prompt. The aims against `each` and of the link are ratios of measured times, for\n"
          "which there is no floor on paper." % context)
