#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The answers of the recall model that prefill pruning keeps, and what it saves, by method.

Makes one long document, a few prompts of a document with one question, and one passage with
examples/recall/generate.py, runs the kvferry command over all methods, and writes prune.md and, not
for the repository, every figure in prune.json to bench/results/. Kinds of runs, of which every method has its turn before
the next one begins, so that what else the machine does meets all methods alike:

  ask      the document, then every question on a fork of it: the window does not know the question;
           every fourth decode step is compared with dense attention
  recital  a passage, then cues from several places of it, each on a fork, to be gone on with
  pointed  the document with one question at its end: the window points at the fact

A finished run is kept in the JSON file at once; --resume goes on with those that are missing.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
from results_folder import RESULTS, earlier, machine, save  # noqa: E402

RECALL = os.path.join(ROOT, "examples", "recall")
MASK = os.path.join(ROOT, "examples", "train_mask", "recall_mask.tsv")
EVICT = ["--retention", "evict", "--select", "full"]
BUDGET = 1024
CUE, RECITED = 8, 32  # words
RETRIEVE = ["--retention", "offload", "--select", "hybrid", "--budget", str(BUDGET)]
HALF = ["--prune-layer", "1"]
# This model has four layers: too few for ranks to settle.
ASL = ["--prune-set", "layers_observed=2", "--prune-set", "layer_max=2"]
# Fields of a run's statistics.
KEPT = ["prompt_tokens", "prefill_ms", "ttft_ms", "tpot_ms", "decode_steps", "attention_recall", "hits", "misses",
        "bytes_moved", "tokens_attended_per_head_step", "prune", "footprint"]

# Name and options; each policy has a row with what it does not keep gone, and one with it in host
# pages and found again by hybrid retrieval.
POLICIES = [
    ("streaming", ["--prune", "streaming", "--keep", "0.1"]),
    ("snapkv", ["--prune", "snapkv", "--keep", "0.1"]),
    ("pyramidkv", ["--prune", "pyramidkv", "--keep", "0.1"]),
    ("pyramidinfer", ["--prune", "pyramidinfer", "--propagate", "0.2"]),
    ("gemfilter", ["--prune", "gemfilter", "--keep", "0.1"] + HALF),
    ("fastkv", ["--prune", "fastkv", "--keep", "0.1", "--propagate", "0.2"] + HALF),
    ("fastkv, after layer 0", ["--prune", "fastkv", "--keep", "0.1", "--propagate", "0.2",
                               "--prune-layer", "0"]),
    ("asl", ["--prune", "asl", "--keep", "1"] + ASL),
    ("asl, two passes", ["--prune", "asl", "--keep", "1", "--two-pass"] + ASL),
    ("asl with snapkv", ["--prune", "asl", "--keep", "0.1"] + ASL),
    ("structkv, online", ["--prune", "structkv", "--keep", "0.1", "--propagate", "0.2",
                          "--pivot", "online"]),
    ("structkv, fixed", ["--prune", "structkv", "--keep", "0.1", "--propagate", "0.2"] + HALF),
    ("h2o", ["--prune", "h2o", "--keep", "0.1"]),
]
CHUNKED = ["--prune", "snapkv", "--keep", "0.1", "--chunk", "2048", "--select", "full"]
STREAMING_HEADS = ["--head-mask", MASK, "--streaming-sink", "4", "--streaming-recent", "64"]


def methods():
    """(name, retention, options) of every row."""
    rows = [("full", "-", ["--select", "full"]),
            ("no pruning", "hybrid", ["--select", "hybrid", "--budget", str(BUDGET)])]
    for name, options in POLICIES:
        rows.append((name, "evict", options + EVICT))
        rows.append((name, "offload", options + RETRIEVE))
    rows.append(("snapkv, chunks, naive", "evict", CHUNKED + ["--evict", "naive"]))
    rows.append(("snapkv, chunks, patched", "evict", CHUNKED + ["--evict", "patched"]))
    rows.append(("head mask", "-", STREAMING_HEADS + ["--select", "full"]))
    rows.append(("head mask", "hybrid", STREAMING_HEADS + ["--select", "hybrid", "--budget",
                                                           str(BUDGET)]))
    return rows


# Texts --------------------------------------------------------------------------------------


def generate(folder, kind, *options):
    os.makedirs(folder)
    subprocess.run([sys.executable, os.path.join(RECALL, "generate.py"), kind, "--out", folder]
                   + [str(o) for o in options], check=True)


def read(*parts):
    with open(os.path.join(*parts), encoding="utf-8") as f:
        return f.read()


def write(text, *parts):
    path = os.path.join(*parts)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    return path


class Texts:
    """Prompts and expected words, in a folder of their own."""

    def __init__(self, folder, args):
        generate(os.path.join(folder, "document"), "document", "--tokens", args.tokens,
                 "--questions", max(args.questions, args.pointed), "--seed", args.seed)
        generate(os.path.join(folder, "recital"), "recital", "--tokens", args.recital, "--seed",
                 args.seed)
        prompt = read(folder, "recital", "prompt.txt").split()
        document = read(folder, "document", "document.txt").split()
        asked = json.loads(read(folder, "document", "questions.json"))
        self.document = os.path.join(folder, "document", "document.txt")
        self.answers = [q["answer"].split() for q in asked]
        self.questions = write("".join(q["question"] + "\n" for q in asked[:args.questions]),
                               folder, "questions.txt")
        # As long as the document: words are taken from its end, where no fact lies.
        self.pointed = []
        for i, q in enumerate(asked[:args.pointed]):
            words = q["question"].split()
            self.pointed.append(write(" ".join(document[:len(document) - len(words)] + words)
                                      + "\n", folder, "pointed%d.txt" % i))
        # "passage", its words, "end"; "recite" and a cue are what is asked.
        passage = prompt[1:1 + args.recital]
        self.passage = write(" ".join(["passage"] + passage + ["end"]) + "\n", folder, "passage.txt")
        last = args.recital - CUE - RECITED
        self.cues, self.recited = [], []
        for i in range(args.cues):
            at = last * i // max(args.cues - 1, 1)
            self.cues.append(" ".join(["recite"] + passage[at:at + CUE]))
            self.recited.append(passage[at + CUE:at + CUE + RECITED])
        self.cues = write("\n".join(self.cues) + "\n", folder, "cues.txt")


def right(given, answer):
    return given[:len(answer)] == answer


def words_right(given, expected):
    """Words before the first wrong one."""
    for i, word in enumerate(expected):
        if given[i:i + 1] != [word]:
            return i
    return len(expected)


# Runs ---------------------------------------------------------------------------------------


def kvferry(args, folder, options):
    """(standard output, statistics) of one run, or what went wrong in place of them."""
    stats = os.path.join(folder, "stats.json")
    command = [args.kvferry, "run", "--model", args.model, "--ignore-eos", "--stats", stats] + options
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return None, {"error": (done.stderr.strip().splitlines() or ["no message"])[-1],
                      "status": done.returncode}
    return done.stdout, {k: v for k, v in json.loads(read(stats)).items() if k in KEPT}


def run_ask(args, folder, texts, options):
    out, stats = kvferry(args, folder, options + ["--prompt-file", texts.document, "--ask",
                                                  texts.questions, "-n", "2", "--verify",
                                                  "dense:4"])
    if out is None:
        return stats
    lines = [line.split() for line in out.splitlines()]
    return {"right": sum(map(right, lines, texts.answers)), "of": args.questions, "stats": stats}


def run_pointed(args, folder, texts, options, index):
    out, stats = kvferry(args, folder, options + ["--prompt-file", texts.pointed[index], "-n", "2"])
    if out is None:
        return stats
    return {"right": int(right(out.split(), texts.answers[index])), "of": 1, "stats": stats}


def run_recital(args, folder, texts, options):
    out, stats = kvferry(args, folder, options + ["--prompt-file", texts.passage, "--ask",
                                                  texts.cues, "-n", str(RECITED)])
    if out is None:
        return stats
    lines = [line.split() for line in out.splitlines()]
    return {"right": sum(map(words_right, lines, texts.recited)), "of": args.cues * RECITED,
            "stats": stats}


def run(args, folder, texts, kind, options):
    if kind == "ask":
        return run_ask(args, folder, texts, options)
    if kind == "recital":
        return run_recital(args, folder, texts, options)
    return run_pointed(args, folder, texts, options, int(kind.split()[1]))


# Table --------------------------------------------------------------------------------------

HEAD = ["method", "what is not kept", "facts", "pointed", "recital", "prefill computed",
        "footprint", "peak", "on device", "attention recall", "ttft", "tpot"]


def prefills(runs):
    """Times of all prefills of a prompt as long as the document."""
    return [r["stats"]["prefill_ms"] for kind, r in runs.items()
            if "stats" in r and kind != "recital"]


def first_tokens(runs):
    return [r["stats"]["ttft_ms"] for kind, r in runs.items()
            if "stats" in r and kind != "recital"]


def cells(runs, full, retention, options):
    """The columns of a row, from its runs by kind."""
    error = next((r["error"] for r in runs.values() if "error" in r), None)
    if error:
        return ["-"] * (len(HEAD) - 2), error
    ask, recital = runs["ask"], runs["recital"]
    stats = ask["stats"]
    pointed = [r for kind, r in runs.items() if kind.startswith("pointed")]
    prune = stats.get("prune") or {}
    # Without forks, which count as sequences of their own; their few steps move the peak only.
    footprint = (pointed[0] if pointed else ask)["stats"].get("footprint") or {}
    # A token that is gone counts for nothing there.
    recall = None if retention == "evict" or "--head-mask" in options else stats["attention_recall"]
    return ["%d of %d" % (ask["right"], ask["of"]),
            "%d of %d" % (sum(r["right"] for r in pointed), len(pointed)) if pointed else "-",
            "%.0f%%" % (100 * recital["right"] / recital["of"]),
            "%.0f%%" % (100 * prune.get("compute_rate", 1.0)),
            "%.1f%%" % (100 * footprint["footprint"]) if footprint else "-",
            "%.1f%%" % (100 * footprint["peak"]) if footprint and pointed else "-",
            "%.1f%%" % (100 * footprint["device"]) if footprint else "-",
            "-" if recall is None else "%.3f" % recall,
            "%.2f" % (statistics.median(first_tokens(runs))
                      / statistics.median(first_tokens(full))),
            "%.2f" % (stats["tpot_ms"]["p50"] / full["ask"]["stats"]["tpot_ms"]["p50"])], None


def shown(options):
    return " ".join(os.path.relpath(o, ROOT) if os.path.isabs(o) else o for o in options)


def markdown(args, results):
    by = {(n, r): results.get(n + " / " + r, {}) for n, r, _ in methods()}
    full = by[("full", "-")]
    lines = ["# Prefill pruning on the recall model", "",
             "A document of {:,} tokens (seed {}). *facts*: {} questions, each on a fork of the pruned "
             "document, so that the window knows none of them. *pointed*: {} prompts of the same length "
             "that end with a question. *recital*: words before the first wrong one after {} cues from a "
             "passage of {:,} words, {} words each, as share. *prefill computed*: tokens times layers, of all. *footprint*, *peak* and "
             "*on device*: entries of the KV cache, summed over steps and the most at one, of a prompt of "
             "*pointed* (without one: of *facts*, no peak), as a share of full causal attention's. *attention recall*: share of dense "
             "attention over what the layer got that falls on the attended tokens, over every "
             "fourth decode step of *facts*; left out where some of it is gone. *ttft*, *tpot*: of full attention's; ttft is a median over {} prompts, tpot of the steps of *facts*.".format(
                 args.tokens, args.seed, args.questions, args.pointed, args.cues, args.recital, RECITED,
                 len(prefills(full))), "",
             "*evict*: what a policy does not keep is gone, and all that is left is attended "
             "(`--select full`). *offload*: it stays in host pages, kept tokens seed the static set, and "
             "%d tokens are attended (`--select hybrid`)." % BUDGET, "",
             "| " + " | ".join(HEAD) + " |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    notes = []
    for name, retention, options in methods():
        runs = by[(name, retention)]
        if not all(kind in runs for kind in ("ask", "recital")) and not any(
                "error" in r for r in runs.values()):
            continue
        row, error = cells(runs, full, retention, options)
        lines.append("| %s | %s | %s |" % (name, retention, " | ".join(row)))
        if error:
            notes.append("%s, %s: `%s`" % (name, retention, error))
    if notes:
        lines += ["", "What did not run:", ""] + ["- " + n for n in notes]
    lines += ["", "Machine: %s; load average over a minute from %.1f to %.1f. Made with "
              "`bench/runtime/prune_table.py %s`. Options of each row after `kvferry run --model "
              "examples/recall/model --ignore-eos`:" % (machine(), *args.load,
                                                        " ".join(args.given)), "",
              "| method | what is not kept | options |", "|---|---|---|"]
    lines += ["| %s | %s | `%s` |" % (n, r, shown(o)) for n, r, o in methods()]
    return "\n".join(lines)


# Main ---------------------------------------------------------------------------------------


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--model", default=os.path.join(RECALL, "model"))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--pointed", type=int, default=3)
    parser.add_argument("--recital", type=int, default=2048, help="words of the passage")
    parser.add_argument("--cues", type=int, default=20, help="places where it is gone on with")
    parser.add_argument("--quick", action="store_true", help="5 questions and cues, 1 pointed")
    parser.add_argument("--only", nargs="+", metavar="NAME",
                        help="methods whose name has one of these, next to full")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--resume", action="store_true", help="keep finished runs")
    parser.add_argument("--out", default=RESULTS)
    args = parser.parse_args()
    if args.quick:
        args.questions, args.cues, args.pointed = 5, 5, 1
    args.given = ["--%s %d" % pair for pair in facts_of(args).items()]
    return args


def facts_of(args):
    return {"tokens": args.tokens, "questions": args.questions, "pointed": args.pointed,
            "recital": args.recital, "cues": args.cues, "seed": args.seed}


def keep(args, results):
    load = os.getloadavg()[0]
    args.load = [min(args.load[0], load), max(args.load[1], load)]
    save(args.out, "prune", figures=dict(
        bench="prune", machine=machine(), load_average=args.load,
        command=" ".join(["prune_table.py"] + args.given), **facts_of(args),
        options={n + " / " + r: shown(o) for n, r, o in methods()}, results=results))


def load_results(args):
    """Finished runs of the same texts, with --resume."""
    old = earlier(args.out, "prune") if args.resume else {}
    if not old:
        return {}
    if any(old.get(k) != v for k, v in facts_of(args).items() if k != "pointed"):
        sys.exit("prune_table: prune.json in %s is of other texts; leave --resume out" % args.out)
    args.load = old["load_average"]
    same = {n + " / " + r: shown(o) for n, r, o in methods()}
    return {k: {kind: r for kind, r in runs.items() if "error" not in r}
            for k, runs in old["results"].items() if old["options"].get(k) == same.get(k)}


def wanted(args, name):
    return not args.only or name == "full" or any(o in name for o in args.only)


def main():
    args = parse()
    args.load = [os.getloadavg()[0]] * 2
    os.makedirs(args.out, exist_ok=True)
    results = load_results(args)
    folder = tempfile.mkdtemp(prefix="kvferry-prune-")
    kinds = ["ask", "recital"] + ["pointed %d" % i for i in range(args.pointed)]
    failed = 0
    try:
        texts = Texts(folder, args)
        for kind in kinds:
            for name, retention, options in methods():
                runs = results.setdefault(name + " / " + retention, {})
                if kind in runs or not wanted(args, name):
                    continue
                begin = time.monotonic()
                r = runs[kind] = run(args, folder, texts, kind, options)
                failed += "error" in r
                print("%-9s %-24s %-8s %-40s %5.1f s" % (
                    kind, name, retention, r.get("error") or "%d of %d" % (r["right"], r["of"]),
                    time.monotonic() - begin), file=sys.stderr, flush=True)
                keep(args, results)
    finally:
        shutil.rmtree(folder)
    text = markdown(args, results)
    save(args.out, "prune", text)
    print(text)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
