#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What prefill pruning keeps of a real language model's answers, and what it saves, by policy.

usage: prune_real.py --kvferry PROGRAM [--documents N] [--cpu] [--rounds N] [--only NAME...]
                     [--out FOLDER]

Documents and questions are those of `./dev eval` (eval_texts.py), each question on a fork of the
document, so that the window does not know it; the model is fetched once (real_model.py). Writes
prune_real.md and prune_real.json. What was run for the same documents is kept in the JSON file, row
by row.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

from prune_table import kvferry, read, shown, write
from recall_table import ROOT, machine

sys.path.insert(0, os.path.join(ROOT, "tools"))
import eval_texts  # noqa: E402
import real_model  # noqa: E402
from eval_report import ASKED, kept  # noqa: E402

MARK = "<!-- by hand: what came out -->"
EVICT, OFFLOAD = ["--retention", "evict", "--select", "full"], ["--retention", "offload"]
# The most telling first, because a run may be cut. What is not said is the policy's default.
POLICIES = [
    ("fastkv", []),
    ("structkv", []),
    ("structkv, all layers compete", ["--prune-set", "layer_min=0"]),
    ("asl", []),
    ("asl, two passes", ["--two-pass"]),
    ("asl, half depth, keep 0.1", ["--prune-layer", "14", "--keep", "0.1", "--propagate", "0.2"]),
    ("snapkv", []),
    ("pyramidkv", []),
    ("pyramidinfer", []),
    ("gemfilter", []),
    ("streaming", []),
    ("h2o", []),
]
# Learnt on other texts of the kind (examples/train_mask/README.md), and drawn at random.
MASKS = [("learnt", "smollm2_mask.tsv"), ("random", "smollm2_random.tsv")]
RING = ["--streaming-sink", "16", "--streaming-recent", "128"]
HEAD = ["policy", "what is not kept", "answers", "answers kept", "prefill computed", "layer",
        "footprint", "first token", "prefill, CPU"]


def rows():
    out = [("no pruning", "full attention", ["--select", "full"]), ("no pruning", "-", [])]
    for name, options in POLICIES:
        policy = ["--prune", name.split(",")[0]] + options
        out += [(name, "evict", policy + EVICT), (name, "offload", policy + OFFLOAD)]
    for name, file in MASKS:
        mask = ["--head-mask", os.path.join("examples", "train_mask", file)] + RING
        out += [("head mask, " + name, "full attention", mask + ["--select", "full"]),
                ("head mask, " + name, "-", mask)]
    return out


class Asked:
    """A document, as files, and what is right."""

    def __init__(self, folder, index, document):
        self.tasks = [t for t in document.tasks if t.kind in ASKED]
        self.prompt = write(document.text, folder, "document%d.txt" % index)
        self.questions = write("".join(t.text + "\n" for t in self.tasks), folder,
                               "questions%d.txt" % index)
        self.tokens = max(t.tokens for t in self.tasks)


def cpu_of_first(args, asked, options):
    """Seconds of all threads up to the first token, loading included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([args.kvferry, "run", "--model", args.model, "--prompt-file", asked.prompt, "-n",
                    "1"] + options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_token(args, folder, asked, options):
    """Seconds to it, without loading."""
    out, stats = kvferry(args, folder, options + ["--prompt-file", asked.prompt, "-n", "1"])
    if out is None:
        sys.exit("prune_real: " + stats["error"])
    return stats["ttft_ms"] / 1e3


def ask(args, folder, asked, options):
    out, stats = kvferry(args, folder, options + ["--prompt-file", asked.prompt, "--ask",
                                                  asked.questions, "-n", str(asked.tokens)])
    if out is None:
        return stats
    lines = out.split("\n")
    return {"right": [t.is_right(line) for t, line in zip(asked.tasks, lines)], "stats": stats}


# ---- table ----

def mean(values):
    return sum(values) / len(values)


def to_first(runs):
    """The median over rounds of times to the first token, each as a share of full attention's."""
    if not all(r.get("first") for r in runs):
        return "-"
    return "%.2f" % statistics.median(mine / full for r in runs for mine, full in r["first"])


def cells(runs, full):
    """Of a row, from its runs by document."""
    mine, theirs = ([x for r in of for x in r["right"]] for of in (runs, full))
    share, (low, high) = kept(mine, theirs)
    stats = [r["stats"] for r in runs]
    prune = [s.get("prune") or {} for s in stats]
    layers = sorted({str(p["chosen_layer"]) for p in prune
                     if p.get("chosen_layer") is not None})
    return ["%d of %d" % (sum(mine), len(mine)), "%.0f%% (%.0f–%.0f)" % (100 * share, 100 * low,
                                                                       100 * high),
            "%.0f%%" % (100 * mean([p.get("compute_rate", 1.0) for p in prune])),
            ", ".join(layers) or "-",
            "%.0f%%" % (100 * mean([s["footprint"]["footprint"] for s in stats])),
            to_first(runs),
            "%.2f" % (mean([r["cpu_s"] for r in runs]) / mean([r["cpu_s"] for r in full]))
            if all("cpu_s" in r for r in runs + full) else "-"]


def markdown(args, results, tokens):
    full = results["no pruning / full attention"]
    lines = ["# Prefill pruning on a real language model", "",
             "%s reads %d of the documents of `./dev eval`, of %s tokens, with %d questions, each on a fork of the pruned "
             "document, so that the window knows none of them. *answers kept*: right answers as a "
             "share of full attention's, with a bootstrap over questions (95%%). *prefill "
             "computed*: tokens times layers, of all. *layer*: where tokens stop to go on, or "
             "from which the prompt starts over. *footprint*: entries of the KV cache, summed over "
             "steps, as a share of full causal attention's. *first token*: time to it without loading, "
             "as a share of full attention's, which runs in turn with it, the median of %d. *prefill, CPU*: seconds "
             "of all threads up to it, loading included, as a share, too." % (
                 real_model.NAME, len(full), " to ".join(str(t) for t in sorted({min(tokens),
                                                                                max(tokens)})),
                 sum(len(r["right"]) for r in full), len(full[0].get("first", []))), "",
             "*evict*: what a policy does not keep is gone, and all that is left is attended. "
             "*offload*: it stays in host pages, and the default selection finds it.", "",
             "| " + " | ".join(HEAD) + " |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    notes = []
    for name, retention, _ in rows():
        runs = results.get(name + " / " + retention)
        error = next((r["error"] for r in runs or [] if "error" in r), None)
        if error:
            notes.append("- %s, %s: `%s`" % (name, retention, error))
        elif runs:
            lines.append("| %s | %s | %s |" % (name, retention, " | ".join(cells(runs, full))))
    if notes:
        lines += ["", "What did not run:", ""] + notes
    lines += ["", "Machine: %s; load average over a minute up to %.1f. Made with "
              "`bench/runtime/prune_real.py --documents %d --cpu --rounds %d`. Options after `kvferry run`:"
              % (machine(), args.load, len(full), len(full[0].get("first", []))), "", "| policy | what is not kept | options |",
              "|---|---|---|"]
    lines += ["| %s | %s | %s |" % (n, r, "`%s`" % shown(o) if o else "-") for n, r, o in rows()]
    path = os.path.join(args.out, "prune_real.md")
    old = read(path) if os.path.exists(path) else ""
    return "\n".join(lines) + "\n" + ("\n" + old[old.index(MARK):] if MARK in old else "")


# ---- main ----

def wanted(args):
    return [row for row in rows() if not args.only or row[0] == "no pruning" or
            any(word in row[0] for word in args.only)]


def save(args, path, made):
    args.load = max(args.load, os.getloadavg()[0])
    made.update(machine=machine(), load_average=args.load)
    write(json.dumps(made, indent=1) + "\n", path)
    tokens = [r["stats"]["prompt_tokens"] for r in
              made["results"]["no pruning / full attention"]]
    write(markdown(args, made["results"], tokens), args.out, "prune_real.md")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--cpu", action="store_true", help="measure what a prefill costs, too")
    parser.add_argument("--rounds", type=int, default=0,
                        help="measure times to the first token, so often")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose name has one of these")
    parser.add_argument("--out", default=os.path.join(ROOT, "bench", "results"))
    args = parser.parse_args()
    args.load = os.getloadavg()[0]
    try:
        args.model = real_model.fetch()
        documents = eval_texts.documents(args.documents)
    except FileNotFoundError as missing:
        sys.exit("prune_real: %s" % missing)
    path = os.path.join(args.out, "prune_real.json")
    made = {"bench": "prune_real", "texts": eval_texts.digest(documents), "results": {}}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            old = json.load(f)
        if old["texts"] == made["texts"]:
            made, args.load = old, max(args.load, old["load_average"])
    results = made["results"]
    with tempfile.TemporaryDirectory(prefix="kvferry-prune-") as folder:
        asked = [Asked(folder, i, d) for i, d in enumerate(documents)]
        for name, retention, options in wanted(args):
            key = name + " / " + retention
            if key not in results:
                results[key] = [ask(args, folder, a, options) for a in asked]
                print(key, [r.get("error") or sum(r["right"]) for r in results[key]],
                      file=sys.stderr, flush=True)
                save(args, path, made)
        # What is kept changes nothing in front of the first token.
        for name, retention, options in wanted(args):
            runs = results[name + " / " + retention]
            if args.cpu and retention != "offload" and not any("cpu_s" in r for r in runs):
                for r, a in zip(runs, asked):
                    r["cpu_s"] = cpu_of_first(args, a, options)
                save(args, path, made)
        for name, retention, options in wanted(args):
            runs = results[name + " / " + retention]
            while retention != "offload" and len(runs[0].setdefault("first", [])) < args.rounds:
                for r, a in zip(runs, asked):
                    pair = [first_token(args, folder, a, o) for o in (options, rows()[0][2])]
                    r.setdefault("first", []).append(pair)
                save(args, path, made)
    save(args, path, made)
    print(read(args.out, "prune_real.md"))


if __name__ == "__main__":
    main()
