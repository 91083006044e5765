#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Aims on a GPU beside what `./dev gpu` measured: reads its results.json, prints a table.

usage: gpu_aims.py RESULTS

It knows the names of jobs and of their figures, and measures nothing. Invariant: a figure comes from
one run of one machine; what was not measured says so, and what the emulator gave meets nothing.
"""
import json
import sys

import gpu_figures

PAGE, ROW, ENOUGH = 16384, 512, 4 << 20  # bytes of a page, of a small row, of a transfer


class Results:
    """Figures by part and job; None where there are none."""

    def __init__(self, results):
        self.results = results

    def figures(self, part, name):
        return gpu_figures.figures_of(self.results, part, name)

    def rows(self, part, name):
        return self.figures(part, name)["results"]

    def kernel(self, op, batch):
        return next(k for k in self.figures("kernels", "timed")["kernels"]
                    if (k["op"], k["batch"]) == (op, batch))

    def layer(self, name):
        """The only case of a job of `kvferry bench decode`, or the last."""
        return self.rows("decode", name)[-1]

    def token(self, name):
        return self.figures("runner", name)["tpot_ms"]["p50"]

    def peer(self, what, context, batch, part="peers"):
        return next(r["us"] for r in self.rows(part, "torch")
                    if (r["what"], r["context"], r["batch"]) == (what, context, batch) and "us" in r)


def share_of_floor(op, batch):
    return lambda r: 1 / r.kernel(op, batch)["times_floor"]


def of_peak(job, method, page_bytes):
    """The worst of the transfers that are large enough."""
    return lambda r: min(row["of_peak"] for row in r.rows("link", job)
                         if "of_peak" in row and row["method"] == method and
                         row["page_bytes"] == page_bytes and row["bytes"] >= ENOUGH)


def tokens(over, under):
    return lambda r: r.token(over) / r.token(under)


def products(way):
    """Products of one row, one after the other: the least that copies allow over the time taken."""
    def measure(r):
        rows = [p for p in r.rows("runner", "products") if p["rows"] == 1]
        return sum(p["floor_us"] for p in rows) / sum(p[way] for p in rows)
    return measure


def nodes(r):
    decode = r.figures("decode", "32 layers")
    return decode["results"][-1]["graph_nodes"] // decode["layers"]


def peers(over, under, part="peers"):
    return [("%s to %s, %dK, batch %d" % (over, under, context, batch), None, None,
             lambda r, c=context * 1024, b=batch: r.peer(over, c, b, part) / r.peer(under, c, b, part))
            for context in (32, 128) for batch in (1, 16)]


# What, the relation, the aim, how it is found.
AIMS = [
    ("nodes of a layer, recorded", "<=", 6, nodes),
    ("score_codes, share of copy bandwidth, batch 4", ">=", 0.85, share_of_floor("score_codes", 4)),
    ("score_codes, share of copy bandwidth, batch 16", ">=", 0.85, share_of_floor("score_codes", 16)),
    ("reduce_mass, share of copy bandwidth, batch 4", ">=", 0.85, share_of_floor("reduce_mass", 4)),
    ("reduce_mass, share of copy bandwidth, batch 16", ">=", 0.85, share_of_floor("reduce_mass", 16)),
    ("select, us of a layer at 128K", "<=", 8, lambda r: r.kernel("select", 1)["us"]),
    ("attention of the budget, share of copy bandwidth, batch 16", ">=", 0.8,
     share_of_floor("attend, all here", 16)),
    ("a token at 128K to dense at 4K, batch 1", "<=", 1.15, tokens("run, 128K", "run, all of 4K")),
    ("a token at 128K to dense at 4K, batch 16", "<=", 1.4,
     tokens("run, 128K, batch 16", "run, all of 4K, batch 16")),
    ("a token by `each`, fewest slots, to the default", ">=", 6.75, tokens("run, 128K, each", "run, 128K")),
    ("attention by `each`, nothing resident, to the default", None, None,
     lambda r: r.layer("4 layers, each, nothing resident")["layer_us"] / r.layer("32 layers")["layer_us"]),
    ("products of one row, share of copy bandwidth", ">=", 0.85, products("kernel_us")),
    ("the same by cuBLAS", None, None, products("cublas_us")),
    ("mapped, share of the link's peak, pages of 16 KiB", ">=", 0.85, of_peak("methods", "mapped", PAGE)),
    ("gather, share of the link's peak, pages of 16 KiB", ">=", 0.9, of_peak("methods", "gather", PAGE)),
    ("mapped, share of the link's peak, rows of 512 B", ">=", 0.6,
     of_peak("rows of 512 bytes", "mapped", ROW)),
    ("gather, share of the link's peak, rows of 512 B", ">=", 0.6,
     of_peak("rows of 512 bytes", "gather", ROW)),
] + peers("SDPA", "kvferry") + peers("offloaded DynamicCache", "kvferry", "offloaded") + [
    ("prefill attention to %s's time, %dK" % (other, n), None, None,
     lambda r, c=n * 1024, o=other: r.peer("kvferry prefill", c, 1) / r.peer(o + " prefill", c, 1))
    for other in ("SDPA", "cuDNN") for n in (4, 16, 32)]


def table(results):
    """[{"what", "aim", "measured", "met"}] of all aims; met is None where there is nothing to say."""
    found, emulated = Results(results), results.get("device") == "emulated"
    rows = []
    for what, relation, aim, measure in AIMS:
        try:
            value = measure(found)
        except (KeyError, IndexError, StopIteration, TypeError, ValueError, ZeroDivisionError):
            value = None
        met = None
        if value is not None and relation and not emulated:
            met = value <= aim if relation == "<=" else value >= aim
        rows.append({"what": what, "aim": "%s %g" % (relation, aim) if relation else None,
                     "measured": value, "met": met})
    return rows


def show(rows):
    lines = ["%-60s %9s %10s  %s" % ("", "aim", "measured", "met")]
    for r in rows:
        value = "" if r["measured"] is None else "%.3g" % r["measured"]
        met = {True: "yes", False: "NO", None: ""}[r["met"]]
        lines.append("%-60s %9s %10s  %s" % (
            r["what"], r["aim"] or "", value, "not measured" if r["measured"] is None else met))
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as f:
        print(show(table(json.load(f))))
