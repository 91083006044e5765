# SPDX-License-Identifier: Apache-2.0
"""Logits of an unmodified llama.cpp with kvferry's plug-in, beside those of the same build without it.

Both feed the same tokens, which the build without it drew. The truth is that build with a KV cache of fp32; the
distance is KL. At a budget of the context the plug-in must be no farther from the truth than llama.cpp itself is,
and must have attended to 95% of what it serves. A run with one wrong cell shows that the test can fail.

Keys and values are rounded alike in both, and only their sums differ, so of two runs that are equally exact either
may be the nearer one. All runs of a family and a type of cache are judged together, in blocks of 32 positions:
  - the mean, and the largest of a block, are no larger than llama.cpp's; or larger by no more than if each block
    had been given to one or the other by a coin (p >= 0.01);
  - the largest of all is at most twice llama.cpp's.
A token whose router is at a tie gets other experts from any rounding; its keys then differ for all that come after
it, and distances tell nothing of attention any more. So a sequence is compared up to the first such token of either
run; kvferry's is at a tie, and by the same coin not the earlier one too often. At a tie the router's margin is no
more than some times what llama.cpp's own rounding moves margins by. Layouts of a sequence are one toss.

usage: check_llama_logits.py [--quick] [--versions NAME,...] [--families NAME,...] [--seeds N] [--table FILE]
           [--keep FOLDER]

The whole takes hours. It goes seed by seed, and with --keep rows stay in files: a run that was cut goes on.
"""
import argparse
import itertools
import json
import os
import pickle
import sys
import tempfile

import numpy as np

import llama_case

SHARE = 0.95
BLOCK, COIN, FLOOR, TIMES = 32, 0.01, 1e-8, 2 # positions, probability, KL that is none, the largest of all
TIE = 8 # times the largest change of a margin
FAMILIES = ("llama", "mistral", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gemma3", "gemma4", "gptoss", "glm4moe",
            "phi", "granite")
REFUSED = ("b8468",) # older than the interface that the plug-in knows
ALONE = ("deepseek",) # left to llama.cpp, by name
OTHER_VERSIONS = ("llama", "qwen35", "gemma3")
OLDER = {"b8468": ("llama", "granite", "gemma3"), "b9445": ("llama", "granite", "gemma3")} # whose Qwen3.5 is another file
KINDS = ("f16", "bf16", "q8_0")
LAYOUTS = ((1, False), (4, False), (4, True))
EXPERTS = ("qwen3moe", "qwen35moe", "gptoss", "glm4moe", "granite")


def kl(truth, other):
    """KL divergences [step][slot] of distributions that are given as logits."""
    def logs(x):
        x = x.astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))
    p, q = logs(truth), logs(other)
    return (np.exp(p) * (p - q)).sum(-1)


class Run:
    """Logits [step][slot][token] of a run, and the experts of its tokens, [] where it has none."""

    def __init__(self, path):
        self.logits, self.chosen, self.margins = np.load(path), np.empty(0), np.empty(0)
        if os.path.exists(path + ".routes.npz"):
            with np.load(path + ".routes.npz") as routes:
                self.chosen, self.margins = routes["chosen"], routes["margins"]
            os.remove(path + ".routes.npz")

    def others(self, truth):
        """Positions [step][slot] with other experts than the truth has."""
        steps, slots = self.logits.shape[:2]
        if not self.chosen.size:
            return np.zeros((steps, slots), bool)
        return (self.chosen != truth.chosen).reshape(steps, slots, -1).any(-1)

    def margin_of_other(self, truth, step, slot):
        """The truth's margin in the first layer that has other experts."""
        layers = truth.margins.shape[-1]
        differ = (self.chosen[step, slot] != truth.chosen[step, slot]).reshape(layers, -1).any(-1)
        return truth.margins[step, slot, int(np.argmax(differ))]


class Family:
    """Runs of one model file in one version with one seed."""

    def __init__(self, version, name, seed, folder, steps):
        self.version, self.name, self.seed, self.folder = version, name, seed, folder
        path = llama_case.MODEL if name == "smollm2" else os.path.join(llama_case.PLACE, "models", name + ".gguf")
        self.job = {"model": path, "seed": seed, "prompt": 64, "steps": steps, "context": 512,
                    "routes": name in EXPERTS}
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
        return [Run(layout["out"]) for layout in job["layouts"]], said

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


def first(others):
    """The first position with other experts, the length where there is none."""
    return int(np.argmax(others)) if others.any() else len(others)


def row_of(truth, stock, mine, said):
    """Numbers of one row."""
    ours, theirs = kl(truth.logits, mine.logits), kl(truth.logits, stock.logits)
    others, their_others = mine.others(truth), stock.others(truth)
    at = others | their_others
    margins = truth.margins.min(-1).reshape(at.shape)[at] if at.any() else np.empty(0)
    ties, moved = [], 0.0
    for slot in range(at.shape[1] if truth.chosen.size else 0):
        end, own = first(at[:, slot]), first(others[:, slot])
        if end:
            moved = max(moved, np.abs(stock.margins - truth.margins)[:end, slot].max())
        if own < len(at):
            ties.append(mine.margin_of_other(truth, own, slot))
    return {"stock mean": theirs.mean(), "stock largest": theirs.max(), "mean": ours.mean(), "largest": ours.max(),
            "share": llama_case.summary(said).get("share", 0), "positions": (ours, theirs), "others": (others, their_others),
            "margins": (margins, truth.margins), "ties": ties, "moved": moved}


def wrong(row, name):
    """A fault of a row, "" where nothing is."""
    if name in ALONE or row["version"] in REFUSED:
        return "" if row["share"] == 0 and row["mean"] == row["stock mean"] else "not left to llama.cpp"
    return "share served %.3f" % row["share"] if row["share"] < SHARE else ""


def key(row):
    """Rows that are judged together."""
    return row["version"], row["family"], row["kind"]


def by_a_coin(differences):
    """How often a sum is as large if each difference has the sign that a coin gives it."""
    random, each = np.random.default_rng(1), np.asarray(differences)
    sums = random.choice((-1.0, 1.0), (10000, len(each))) @ each
    return (1 + (sums >= each.sum() * (1 - 1e-12)).sum()) / (1 + len(sums))


def sequences(rows):
    """Per sequence, the rows of its layouts with its slot."""
    found = {}
    for row in rows:
        for slot in range(row["positions"][0].shape[1]):
            found.setdefault((row["seed"], slot), []).append((row, slot))
    return found.values()


def blocks_of(rows):
    """Pairs of ours and theirs, of every block: means and largest, averaged over the layouts of a sequence."""
    means, largest = [], []
    for layouts in sequences(rows):
        end = min(first(each[:, slot]) for row, slot in layouts for each in row["others"])
        for begin in range(0, end, BLOCK):
            pairs = [[each[begin:min(end, begin + BLOCK), slot] for each in row["positions"]] for row, slot in layouts]
            means.append(np.mean([[each.sum() / BLOCK for each in pair] for pair in pairs], 0))
            largest.append(np.mean([[each.max() for each in pair] for pair in pairs], 0))
    return np.array(means), np.array(largest)


def earlier(rows):
    """Per sequence, 1 where ours has other experts first, -1 where theirs has."""
    def ahead(row, slot):
        ours, theirs = (first(each[:, slot]) for each in row["others"])
        return theirs - ours
    return [np.sign(np.mean([ahead(*layout) for layout in layouts])) for layouts in sequences(rows)]


def bound(means):
    """The ratio of both means, and what it is below in 95% of draws of as many blocks."""
    if not len(means):
        return np.nan, np.nan
    random = np.random.default_rng(1)
    drawn = means[random.integers(0, len(means), (2000, len(means)))].sum(1)
    ours, theirs = means.sum(0)
    return (ours + 1e-300) / (theirs + 1e-300), np.quantile((drawn[:, 0] + 1e-300) / (drawn[:, 1] + 1e-300), 0.95)


def too_far(rows):
    """A fault in the distances of rows that are judged together, "" where nothing is."""
    if rows[0]["family"] in ALONE:
        return ""
    ties, moved = [each for row in rows for each in row["ties"]], max(row["moved"] for row in rows)
    if ties and max(ties) > TIE * moved:
        return "other experts at a margin of %.2g, where rounding moves margins by %.2g" % (max(ties), moved)
    means, largest = blocks_of(rows)
    if not len(means):
        return "every sequence begins with other experts"
    top, their_top = largest.max(0)
    if top > TIMES * their_top + FLOOR:
        return "largest KL %.2e, llama.cpp's %.2e" % (top, their_top)
    for which, differences in (("mean", means[:, 0] - means[:, 1]),
                               ("largest of a block", np.log(largest[:, 0] + FLOOR) - np.log(largest[:, 1] + FLOOR))):
        if differences.mean() > FLOOR and by_a_coin(differences) < COIN:
            return "%s: larger than llama.cpp's, p %.4f" % (which, by_a_coin(differences))
    first_ones = earlier(rows)
    if sum(first_ones) > 0 and by_a_coin(first_ones) < COIN:
        return "other experts come earlier than llama.cpp's"
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
            if kind == "f16" and (slots, unified) == layouts[0]:
                alike = min(first(each[:, slot]) for each in row["others"] for slot in range(slots))
    if name not in ALONE and version not in REFUSED and kinds[0] == "f16" and seed == 1:
        slots, unified = layouts[0]
        # Half of the way to the first position with other experts, after which nothing is compared.
        mine, said = family.served(slots, unified, "f16", wrong=alike // 2)
        truth, runs = family.stock(slots, unified, ("f16",))
        row = dict(row_of(truth, runs[0], mine, said), version=version, family=name, seed=seed, kind="one wrong cell",
                   slots=slots, unified=unified)
        yield dict(row, wrong="" if too_far([row]) else "a wrong cell is not seen")


def kept(keep, plan, folder):
    """Rows of a plan; those that an earlier run kept are not made again."""
    path = os.path.join(keep or folder, "%s-%s-%d-%d.rows" % plan[:4])
    if os.path.exists(path):
        with open(path, "rb") as rows:
            return pickle.load(rows)
    rows = list(check(*plan[:3], folder, *plan[3:]))
    with open(path + ".part", "wb") as out:
        pickle.dump(rows, out)
    os.rename(path + ".part", path)
    return rows


def groups(rows):
    """Rows that are judged together, with their key."""
    return [(name, list(group)) for name, group in itertools.groupby(sorted(rows, key=key), key)]


def table(rows):
    """Rows as Markdown, per version, family and kind; ratios with what they are below by 95%."""
    rows = [row for row in rows if row["kind"] in KINDS]
    lines = ["| version | family | cache | runs | KL mean: llama.cpp / kvferry | largest | other experts | before them: "
             "positions, ratio of means (95%) | larger in | least share served |", "|---|---|---|---|---|---|---|---|---|---|"]
    for name, group in groups(rows):
        mean = {which: np.mean([row[which] for row in group]) for which in ("stock mean", "mean")}
        others = [sum(int(row["others"][at].sum()) for row in group) for at in (1, 0)]
        before = sum(min(first(each[:, slot]) for each in row["others"]) for row in group
                     for slot in range(row["others"][0].shape[1]))
        lines.append("| %s | %s | %s | %d | %.1e / %.1e | %.1e / %.1e | %s | %d, %.2f (%.2f) | %d | %.3f |" % (
            *name, len(group), mean["stock mean"], mean["mean"], max(row["stock largest"] for row in group),
            max(row["largest"] for row in group), "%d / %d" % tuple(others) if name[1] in EXPERTS else "", before,
            *bound(blocks_of(group)[0]), sum(row["mean"] > row["stock mean"] for row in group),
            min(row["share"] for row in group)))
    margins = [np.concatenate([row["margins"][at].ravel() for row in rows]) for at in (0, 1)]
    if margins[0].size:
        ties = [each for row in rows for each in row["ties"]]
        lines += ["", "Of %d sequences with other experts, the largest margin there: %.2g." % (len(ties), max(ties, default=0))]
        lines += ["", "Margins of routers, median: %.2f where either has other experts, %.2f everywhere." % (
            np.median(margins[0]), np.median(margins[1]))]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--versions")
    parser.add_argument("--families")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--table")
    parser.add_argument("--keep")
    args = parser.parse_args()
    llama_case.require()
    rows, versions = [], args.versions.split(",") if args.versions else llama_case.versions()
    if args.quick:
        plans = [(versions[0], "smollm2", 1, 32, ("f16",), LAYOUTS[:1])]
    else:
        llama_case.require(os.path.join(llama_case.PLACE, "models"))
        whole = "native" if "native" in versions and not args.versions else versions[0]
        plans = [(version, name, seed, args.steps, KINDS if version == whole else KINDS[:1],
                  LAYOUTS if version == whole else LAYOUTS[:1])
                 for seed in range(1, args.seeds + 1) for version in versions
                 for name in (args.families.split(",") if args.families else
                              (*FAMILIES, *ALONE) if version == whole else OLDER.get(version, OTHER_VERSIONS))]
    with tempfile.TemporaryDirectory() as folder:
        for plan in plans:
            for row in kept(args.keep, plan, folder):
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
