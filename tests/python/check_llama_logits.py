# SPDX-License-Identifier: Apache-2.0
"""Logits of an unmodified llama.cpp with kvferry's plug-in, beside those of the same build without it.

Both feed the same tokens, which the build without it drew. The truth is that build with a KV cache of fp32; the
distance is KL. At a budget of the context the plug-in must be as near to the truth as llama.cpp itself is, and
must have attended to 95% of what it serves. A run with one wrong cell shows that the test can fail.

usage: check_llama_logits.py [--quick] [--versions NAME,...] [--families NAME,...] [--seeds N] [--table FILE]
"""
import argparse
import itertools
import json
import os
import sys
import tempfile

import numpy as np

import llama_case

SHARE = 0.95
# Rounding of keys and values is the same with both; sums differ in their order, which routes of experts and a few
# tokens near a tie make much of. So runs of a family and a type of cache are judged together.
SLACK, FLOOR = {"mean": 1.1, "largest": 2}, 1e-8
FAMILIES = ("llama", "mistral", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gemma3", "gemma4", "gptoss", "glm4moe",
            "phi", "granite")
REFUSED = ("b8468",) # older than the interface that the plug-in knows
ALONE = ("deepseek",) # left to llama.cpp, by name
OTHER_VERSIONS = ("llama", "qwen35", "gemma3")
KINDS = ("f16", "bf16", "q8_0")
LAYOUTS = ((1, False), (4, False), (4, True))


def kl(truth, other):
    """KL divergences [step][slot] of distributions that are given as logits."""
    def logs(x):
        x = x.astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))
    p, q = logs(truth), logs(other)
    return (np.exp(p) * (p - q)).sum(-1)


class Family:
    """Runs of one model file in one version with one seed."""

    def __init__(self, version, name, seed, folder, steps):
        self.version, self.name, self.seed, self.folder = version, name, seed, folder
        path = llama_case.MODEL if name == "smollm2" else os.path.join(llama_case.PLACE, "models", name + ".gguf")
        self.job = {"model": path, "seed": seed, "prompt": 64, "steps": steps, "context": 512}
        self.tokens = {}

    def file(self, *parts):
        """A file of this run."""
        return os.path.join(self.folder, "-".join(map(str, (self.version, self.name, self.seed, *parts))))

    def go(self, layouts, settings, **more):
        """Logits of layouts, one process."""
        job = dict(self.job, layouts=[dict(layout, out=self.file(at, "out.npy")) for at, layout in enumerate(layouts)],
                   **more)
        with open(self.file("job.json"), "w", encoding="utf-8") as out:
            json.dump(job, out)
        _, said = llama_case.run(self.version, "llama_steps.py", self.file("job.json"), settings=settings)
        return [np.load(layout["out"]) for layout in job["layouts"]], said

    def stock(self, slots, unified, kinds):
        """The truth, then logits per kind; tokens are drawn once per layout."""
        draws = self.file(slots, unified, "tokens.npy")
        runs, _ = self.go([{"kind": kind, "slots": slots, "unified": unified} for kind in ("f32", *kinds)], None,
                          draws=draws)
        self.tokens[slots, unified] = draws
        return runs[0], runs[1:]

    def served(self, slots, unified, kind, **more):
        """Logits with the plug-in, and what it said."""
        runs, said = self.go([dict({"kind": kind, "slots": slots, "unified": unified}, **more)], "budget=full",
                             tokens=self.tokens[slots, unified])
        return runs[0], said


def row_of(truth, stock, mine, said):
    """Numbers of one row."""
    ours, theirs = kl(truth, mine), kl(truth, stock)
    return {"stock mean": theirs.mean(), "stock largest": theirs.max(), "mean": ours.mean(), "largest": ours.max(),
            "share": llama_case.summary(said).get("share", 0)}


def wrong(row, name):
    """A fault of a row, "" where nothing is."""
    if name in ALONE or row["version"] in REFUSED:
        return "" if row["share"] == 0 and row["mean"] == row["stock mean"] else "not left to llama.cpp"
    return "share served %.3f" % row["share"] if row["share"] < SHARE else ""


def key(row):
    """Rows that are judged together."""
    return row["version"], row["family"], row["kind"]


def too_far(rows):
    """A fault in the distances of rows that are judged together, "" where nothing is."""
    if rows[0]["family"] in ALONE:
        return ""
    for which, sums in (("mean", np.mean), ("largest", np.max)):
        ours, theirs = (sums([row[name + which] for row in rows]) for name in ("", "stock "))
        if ours > SLACK[which] * theirs + FLOOR:
            return "%s KL %.2e, stock's %.2e" % (which, ours, theirs)
    return ""


def check(version, name, seed, folder, steps, kinds, layouts):
    """Rows of a family, each with what is wrong."""
    family = Family(version, name, seed, folder, steps)
    for slots, unified in layouts:
        truth, runs = family.stock(slots, unified, kinds)
        for kind, stock in zip(kinds, runs):
            mine, said = family.served(slots, unified, kind)
            row = dict(row_of(truth, stock, mine, said), version=version, family=name, seed=seed, kind=kind,
                       slots=slots, unified=unified)
            row["wrong"] = wrong(row, name)
            if row["wrong"]:
                print("\n".join(llama_case.reasons(said)))
            yield row
    if name not in ALONE and version not in REFUSED and kinds[0] == "f16" and seed == 1:
        slots, unified = layouts[0]
        mine, said = family.served(slots, unified, "f16", wrong=steps // 2)
        truth, runs = family.stock(slots, unified, ("f16",))
        row = dict(row_of(truth, runs[0], mine, said), version=version, family=name, seed=seed, kind="one wrong cell",
                   slots=slots, unified=unified)
        yield dict(row, wrong="" if too_far([row]) else "a wrong cell is not seen")


def groups(rows):
    """Rows that are judged together, with their key."""
    return [(name, list(group)) for name, group in itertools.groupby(sorted(rows, key=key), key)]


def table(rows):
    """Rows as Markdown, the worst of seeds and layouts per version, family and kind."""
    rows = [row for row in rows if row["kind"] in KINDS]
    lines = ["| version | family | cache | runs | KL mean: stock / kvferry | largest | least share served |",
             "|---|---|---|---|---|---|---|"]
    for name, group in groups(rows):
        mean = {which: np.mean([row[which] for row in group]) for which in ("stock mean", "mean")}
        lines.append("| %s | %s | %s | %d | %.1e / %.1e | %.1e / %.1e | %.3f |" % (
            *name, len(group), mean["stock mean"], mean["mean"], max(row["stock largest"] for row in group),
            max(row["largest"] for row in group), min(row["share"] for row in group)))
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--versions")
    parser.add_argument("--families")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--table")
    args = parser.parse_args()
    llama_case.require()
    rows, versions = [], args.versions.split(",") if args.versions else llama_case.versions()
    if args.quick:
        plans = [(versions[0], "smollm2", 1, 32, ("f16",), LAYOUTS[:1])]
    else:
        llama_case.require(os.path.join(llama_case.PLACE, "models"))
        whole = "native" if "native" in versions else versions[0]
        plans = [(version, name, seed, args.steps, KINDS if version == whole else KINDS[:1],
                  LAYOUTS if version == whole else LAYOUTS[:1])
                 for version in versions
                 for name in (args.families.split(",") if args.families else
                              (*FAMILIES, *ALONE) if version == whole else OTHER_VERSIONS)
                 for seed in range(1, args.seeds + 1)]
    with tempfile.TemporaryDirectory() as folder:
        for version, name, seed, steps, kinds, layouts in plans:
            for row in check(version, name, seed, folder, steps, kinds, layouts):
                rows.append(row)
                print("%-7s %-9s seed %d %-5s slots %d%s KL mean %.2e / %.2e largest %.2e / %.2e share %.3f %s" % (
                    row["version"], row["family"], row["seed"], row["kind"], row["slots"], " unified" * row["unified"],
                    row["stock mean"], row["mean"], row["stock largest"], row["largest"], row["share"],
                    "WRONG: " + row["wrong"] if row["wrong"] else ""), flush=True)
    if args.table:
        with open(args.table, "w", encoding="utf-8") as out:
            out.write(table(rows))
    bad = sum(bool(row["wrong"]) for row in rows)
    for name, group in groups(row for row in rows if row["kind"] in KINDS):
        text = too_far(group)
        bad += bool(text)
        if text:
            print("WRONG: %s: %s" % (" ".join(name), text))
    print("%d passed, %d failed" % (len(rows) - bad, bad))
    sys.exit(bool(bad) or not rows)


if __name__ == "__main__":
    main()
