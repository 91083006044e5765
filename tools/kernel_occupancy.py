# SPDX-License-Identifier: Apache-2.0
"""How many blocks of a decode step's kernels a multiprocessor holds, and how many bytes they have on the way.

Registers and static shared memory are what ptxas said; block sizes and the like are read in the sources; what the
launches make of them is restated here, so a change of a launch is one here. Knows nothing of Markdown but a row.
"""
import collections
import math
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Per multiprocessor, from the CUDA programming guide's table of compute capabilities. All have 65,536 registers,
# given to a warp 256 at a time, and take 1 KiB of shared memory per block for themselves.
Limit = collections.namedtuple("Limit", "warps blocks shared")
LIMITS = {"80": Limit(64, 32, 164), "86": Limit(48, 16, 100), "89": Limit(48, 24, 100),
          "90": Limit(64, 32, 228), "100": Limit(64, 32, 228), "120": Limit(48, 24, 100)}
REGISTERS, RESERVED, WARP = 65536, 1024, 32

# A launch: what its blocks need, and what one of them asks for before it waits. `bytes` = that of all blocks.
Launch = collections.namedtuple("Launch", "kernel form threads shared in_flight blocks bytes")
Residency = collections.namedtuple("Residency", "blocks by")


def constants(*paths):
    """The numbers that headers and kernels define, as one reads after the other."""
    known = {}
    for path in paths:
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            lines = re.findall(r"^#define[ \t]+(\w+)[ \t]+([^\n]*?)[ \t]*(?:/\*.*)?$", f.read(), re.M)
        for name, value in lines:
            value = re.sub(r"\b(0x[0-9a-f]+|\d+)u\b", r"\1", value)
            value = re.sub(r"\b[A-Z]\w+\b", lambda m: str(known.get(m[0], m[0])), value).replace("/", "//")
            if re.fullmatch(r"[0-9a-fx()+*/<> -]+", value):
                known[name] = eval(value, {"__builtins__": {}})  # digits and operators only
    return known


def ceil(a, b):
    return -(-a // b)


def residency(limit, registers, threads, shared):
    """Blocks of a kernel that one multiprocessor holds, and what limits them."""
    warps = ceil(threads, WARP)
    per_warp = ceil(registers * WARP, 256) * 256
    by = {"warps": limit.warps // warps,
          "registers": REGISTERS // per_warp // 4 * 4 // warps,
          "shared memory": limit.shared * 1024 // (ceil(shared, 128) * 128 + RESERVED),
          "blocks": limit.blocks}
    least = min(by.values())
    return Residency(least, next(name for name in by if by[name] == least))


def split_spans(spans_max, page):
    """kvf_split."""
    c = constants("runtime/cache/cache.h")
    tokens = c["KVF_SPLIT_TOKENS_MIN"]
    while tokens < c["KVF_SPLIT_TOKENS_MAX"] and spans_max * page > c["KVF_SPLITS"] * tokens:
        tokens *= 2
    return max(1, tokens // page)


def spans(budget, page, sink, local, block):
    """Spans of a list: at most, and while its window is shortest."""
    most = max(1, ceil(sink, page)) + ceil(local + block - 1, page) + budget // page
    return most, budget // page


def topk_blocks(lists, pages, chosen):
    """kvf_topk_parts and kvf_topk_threads."""
    c = constants("kernels/cuda/cuda.cuh", "kernels/cuda/select.cuh", "kernels/select/topk.cuh")
    parts, threads = 1, c["KVF_TOPK_THREADS_MIN"]
    while (parts < c["KVF_TOPK_PARTS_MAX"] and 2 * parts * lists <= c["KVF_TOPK_BLOCKS_MAX"] and
           pages // (2 * parts) >= c["KVF_TOPK_PART_MIN"] and 4 * parts * parts * chosen <= pages):
        parts *= 2
    most = max(pages // parts, parts * chosen if parts > 1 else 0)
    while threads < c["KVF_TOPK_THREADS_MAX"] and threads * c["KVF_TOPK_ITEMS"] < most:
        threads *= 2
    return parts, threads, c["KVF_TOPK_ITEMS"]


def launches(batch, heads, group, dim, page, budget, chosen, context, per_layer):
    """Of one layer; `per_layer` gives the bytes of a kernel for one sequence."""
    lists, pages, common = batch * heads, context // page, "kernels/cuda/cuda.cuh"
    append = constants("kernels/move/append.cu")
    rotate = constants("kernels/score/codes.h", "kernels/score/rotate.cu")
    weigh = constants(common, "kernels/score/codes.h", "kernels/score/score_args.h", "kernels/score/weigh.cu")
    fold = constants(common, "kernels/score/fold.cu")
    attend = constants(common, "kernels/attend/attend.cuh")
    select = constants(common, "kernels/cuda/select.cuh")
    span, tile = math.ceil(dim / 64), weigh["KVF_WEIGH_TOKENS"]
    slot_count = weigh["RING"] // span
    ring = weigh["WARPS"] * (weigh["RING"] * 512 + slot_count * 64)
    part = fold["PART_LARGE"] if ceil(context, tile) > 256 else fold["PART"]
    while part < fold["PART_LARGE"] and lists * ceil(pages, part) > fold["BLOCKS"]:
        part *= 2
    parts, threads, items = topk_blocks(lists, pages, chosen)
    most, held = spans(budget, page, 4, 64, 32)
    split = split_spans(most, page)
    warps = min(attend["WARPS"], ceil(split * page, attend["CHUNK"]))
    rows = warps * 2 * ceil(ceil(split * page, attend["CHUNK"]), warps) * attend["CHUNK"]
    results = warps * (group * (dim + 8) + 2 * attend["GROUP_ROWS"]) * 4
    chosen_of = (select["KVF_SELECT_BINS"] + 2 * WARP + 5) * 4
    return [Launch(*x, batch * per_layer[x[0]]) for x in [
        ("append", "append_kernel", append["THREADS"], 0, append["THREADS"] * 16, lists),
        ("rotate", "rotate_rows<__nv_bfloat16>", rotate["THREADS"], 0, rotate["ROWS"] * dim * 2,
         ceil(lists * group, rotate["ROWS"])),
        ("weigh", "weigh_tile<1u, %du>" % span, weigh["WARPS"] * WARP,
         span * 512 + group * (tile + 2 * weigh["WARPS"]) * 4 + ring, ring, lists * ceil(context, tile)),
        ("fold", "fold_pages<(kvf_group_reduce)0>", fold["WARPS"] * WARP, group * 8,
         fold["WARPS"] * WARP * min(4, group) * 2, lists * ceil(pages, part)),
        ("select", "select_list", threads, chosen_of, threads * items * 4, lists * parts),
        ("attend_step", "step_chunks<__nv_bfloat16, %du>" % dim, warps * WARP,
         max(rows * (2 * dim + 16), results), rows * 2 * dim, lists * ceil(held + 1, split)),
    ]]
