#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The answers of a real language model that prefill pruning keeps, and what it saves, by policy.

usage: prune_real.py --kvferry PROGRAM [--minutes N] [--documents N] [--tuned FILE] [--out FOLDER]

Documents are those of eval_texts.py in lengths of their own; the model is fetched once
(real_model.py). Every question is put in two ways: at the end of the prompt, as in the papers, so that
the window knows it, and afterwards, on a fork of a pruned document that is kept. Answers are those of
prune_answers.py, which reads a document once for all its questions; what a prompt costs is measured
with the command and the GGUF file, and its tokens with the same weights in fp32 are compared.

Rows that were found are kept in prune_real.json, row by row, and are not run again; --minutes ends the run.
Writes prune_real.md, which alone is in the repository: a machine that has no figures yet needs a folder
of its own, --out. Needs torch:
`./dev python --run bench/runtime/prune_real.py --kvferry build/runner/cli/kvferry`.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
sys.path.insert(0, os.path.join(ROOT, "tests", "python"))
import eval_texts  # noqa: E402
import real_model  # noqa: E402
from eval_report import ASKED, wilson  # noqa: E402
from results_folder import RESULTS, earlier, machine, read, save  # noqa: E402

ANSWER = 7  # tokens
LENGTHS = [2150, 2100, 2300, 4700]  # tokens
NUMBERS = 13  # questions of a document for a number; 7 more are for facts and steps of chains
SNAP = {"window": 32, "pool": "avg", "pool_width": 5}
MAX7 = {"window": 8, "pool": "max", "pool_width": 7}
FAST = dict(MAX7, group_reduce="sum")
STRUCT = dict(MAX7, decay=0.9, mass_share=0.1, weights=[0.2, 0.3, 0.5])
ASL = {"window": 32, "pool": "avg", "pool_width": 7, "group_reduce": "sum"}
RULE = dict(ASL, layers_observed=8, threshold=0.3)
PIVOT = "PIVOT"  # of StructKV's equation 9: measured on the document over all layers
# Published settings: half the depth of 30 layers, 13 of 32 for gemfilter.
ROWS = [
    ("full attention", "full", {}),
    ("fastkv", "fastkv", dict(FAST, keep=0.1, propagate=0.2, layer=14)),
    ("structkv", "structkv", dict(STRUCT, keep=0.1, propagate=0.2)),
    ("structkv, equation 9", "structkv", dict(STRUCT, keep=0.1, propagate=0.2, layer=PIVOT)),
    ("snapkv", "snapkv", dict(SNAP, keep=0.1)),
    ("pyramidkv", "pyramidkv", dict(MAX7, keep=0.1, beta=20)),
    ("h2o", "h2o", {"keep": 0.1, "recent_share": 0.5}),
    ("streaming", "streaming", {"keep": 0.1, "sink_tokens": 4}),
    ("gemfilter", "gemfilter", {"keep": 0.1, "layer": 12, "pool": "avg", "pool_width": 5}),
    ("asl", "asl", dict(RULE, keep_tokens=2048, propagate_tokens=2048)),
    ("asl, half depth", "asl", dict(ASL, keep=0.1, propagate=0.2, layer=14)),
    ("asl, two passes", "asl", dict(RULE, keep=1, propagate_tokens=2048, two_pass=1)),
    ("pyramidinfer", "pyramidinfer", {"propagate": 0.2, "window": 32, "sink_tokens": 4,
                                      "window_mean": 1}),
]
LAST = ("pyramidinfer", "asl, two passes", "asl, half depth")  # dear: questions share little
END, AFTER = "at the end", "afterwards"
COST_OF = 0  # the document whose prompt is measured
COSTS = ["prefill computed", "layer", "CPU to the first token", "footprint"]


class Asked:
    """A document and its questions, as ids of tokens, and what is right."""

    def __init__(self, tokenizer, index):
        d = eval_texts.Document(eval_texts.MANUALS[index], LENGTHS[index], 2000 + index, 100,
                                NUMBERS)
        self.text, self.ids, self.pivot = d.text, tokenizer.encode(d.text), None
        self.tasks = [t for t in d.tasks if t.kind in ASKED]
        self.questions = [tokenizer.encode(t.text) for t in self.tasks]
        self.tokenizer = tokenizer

    def judge(self, answers):
        """The share of them that is kept: which are right, and the tokens of the first."""
        right = [t.is_right(self.tokenizer.decode(ids)) for t, ids in zip(self.tasks, answers)]
        return {"right": "".join(str(int(r)) for r in right), "first": answers[0]}


# ---- the command ----

def options_of(policy, settings, retention):
    if policy == "full":
        return [] if retention == "offload" else ["--select", "full"]
    out = ["--prune", policy, "--retention", retention]
    for name, value in settings.items():
        out += ["--prune-set", "%s=%s" % (name, ",".join(map(str, value)) if isinstance(value, list)
                                          else value)]
    return out + ([] if retention == "offload" else ["--select", "full"])


def run(args, folder, ids, options, model):
    """(tokens, statistics, seconds of all threads)"""
    names = [os.path.join(folder, n) for n in ("prompt.ids", "answer.ids", "stats.json")]
    with open(names[0], "w", encoding="utf-8") as f:
        f.write("\n".join(map(str, ids)) + "\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([args.kvferry, "run", "--model", model, "--device", "host", "--token-ids", names[0],
                    "--ignore-eos", "--emit-ids", names[1], "--stats", names[2], *options],
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(names[1], encoding="utf-8") as out, open(names[2], encoding="utf-8") as stats:
        return ([int(line) for line in out], json.load(stats),
                after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def cost(args, folder, asked, options):
    """Cost of a prompt with the first question; loading and decoding are those of a prompt of a token."""
    options = options + ["-n", str(ANSWER), "--threads", "1"]
    prompt = asked.ids + asked.questions[0]
    tokens, _, _ = run(args, folder, prompt, options, args.exact)
    _, stats, seconds = run(args, folder, prompt, options, args.model)
    if not args.base_s:
        args.base_s = run(args, folder, asked.ids[:1], ["-n", str(ANSWER), "--threads", "1"],
                          args.model)[2]
    prune = stats.get("prune") or {}
    return {"first": tokens, "cpu_s": round(seconds - args.base_s, 2),
            "computed": prune.get("compute_rate", 1.0), "layer": prune.get("chosen_layer"),
            "footprint": stats["footprint"]["footprint"]}


def pivot(args, folder, asked):
    """What `tune` measures on the document, where all layers compete."""
    if asked.pivot is None:
        text, out = os.path.join(folder, "text.txt"), os.path.join(folder, "tuned.json")
        with open(text, "w", encoding="utf-8") as f:
            f.write(asked.text)
        subprocess.run([args.kvferry, "tune", "--model", args.model, "--device", "host", "--text", text,
                        "--method", "structkv", "--questions", "0", "--samples", "1", "--tokens",
                        str(len(asked.ids)), "--prune-set", "layer_min=0", "--prune-set",
                        "layer_max=%d" % (args.answers.model.layers - 1),
                        "--out", out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        asked.pivot = json.loads(read(out))["structkv"]["layer"]
    return asked.pivot


# ---- what is run, the most telling first ----

def jobs(args, made):
    """(kind, row, document)"""
    rows = rows_of(made)
    for is_last in (False, True):
        part = [row for row in rows if (row[0] in LAST) == is_last]
        for d in range(args.documents):
            for row in part:
                yield END, row, d
                yield AFTER, row, d
            if d == COST_OF:
                for row in part:
                    yield "cost, evict", row, d
    for row in rows:
        yield "cost, offload", row, COST_OF


def is_done(found, kind, row, d):
    names = [kind] if kind.startswith("cost") else [kind + ", evict", kind + ", offload"]
    return all(json.dumps([n, row[0], d]) in found for n in names)


def perform(args, folder, asked, kind, row, d):
    """{key: what was found}"""
    _, policy, settings = row
    if settings.get("layer") == PIVOT:
        settings = dict(settings, layer=pivot(args, folder, asked))
    if kind.startswith("cost"):
        options = options_of(policy, settings, kind[6:])
        return {json.dumps([kind, row[0], d]): cost(args, folder, asked, options)}
    ask = args.answers.at_end if kind == END else args.answers.afterwards
    said = ask(asked.ids, asked.questions, policy, settings)
    return {json.dumps([kind + ", " + retention, row[0], d]): asked.judge(answers)
            for retention, answers in said.items()}


def tuned_rows(path):
    """Rows of a file that `kvferry tune` wrote."""
    rows, found = [], json.loads(read(path))
    for policy, own in (("fastkv", FAST), ("structkv", dict(STRUCT, pivot="fixed"))):
        if policy in found:
            settings = found[policy]["settings"]
            rows.append((policy + ", tuned", policy, dict(
                own, layer=found[policy]["layer"], keep=settings["keep"], propagate=settings["propagate"])))
    return rows


def rows_of(made):
    """Tuned settings stand after the published ones."""
    tuned = [tuple(row) for row in made["tuned"]]
    return ROWS[:1] + tuned + ROWS[1:]


# ---- table ----

def answers(found, kind, row):
    """Right ones of a row, those of full attention to the same questions, and how many were asked."""
    mine, full = "", ""
    for d in range(len(LENGTHS)):
        own = found.get(json.dumps([kind, row, d]))
        whole = found.get(json.dumps([kind.split(",")[0] + ", evict", ROWS[0][0], d]))
        if own and whole:
            mine += own["right"]
            full += whole["right"]
    return mine.count("1"), full.count("1"), len(mine)


def cell(found, kind, row):
    mine, full, asked = answers(found, kind, row)
    if not asked:
        return "not measured"
    low, high = wilson(mine, asked)
    return "%d of %d (%.0f–%.0f%%)%s" % (mine, asked, 100 * max(low, 0), 100 * high,
                                         "" if row == ROWS[0][0] else ", full %d" % full)


def costs_of(found, row):
    c, whole = (found.get(json.dumps(["cost, evict", name, COST_OF])) for name in (row, ROWS[0][0]))
    if not c:
        return ["not measured"] * len(COSTS)
    return ["%.0f%%" % (100 * c["computed"]), "-" if c["layer"] is None else str(c["layer"]),
            "%.2f" % (c["cpu_s"] / whole["cpu_s"]), "%.0f%%" % (100 * c["footprint"])]


def compared(found):
    """(equal, compared) runs of the command that gave the tokens of the table, too."""
    pairs = [(found[k]["first"], found.get(json.dumps([END + kind[4:], row, d])))
             for k in found for kind, row, d in [json.loads(k)] if kind.startswith("cost")]
    pairs = [(mine, other["first"]) for mine, other in pairs if other]
    return sum(mine == other for mine, other in pairs), len(pairs)


ABOUT = """%s, %s. 20 questions about each document: for a number, a name or a step of a chain that was
hidden in the text. *at the end*: the question is the end of the prompt, as in the papers, so that the
observation window knows it. *afterwards*: the document alone is pruned and kept, and every question is
asked on a fork of it. *evict*: what a policy does not keep is deleted, and all that is left is attended.
*offload*: it stays in host pages, and the default selection finds it, with a budget of 512 tokens.

Answers are right ones of those that were asked, with Wilson's interval (95%%), beside those of full
attention to the same questions."""
ABOUT_COSTS = """What is measured of `kvferry run` is a prompt of the document of %d tokens and its first
question, with *evict*. *prefill computed*: tokens times layers, of all. *layer*: where the policy
propagates or starts over. *CPU to the first token*: seconds of one thread, without loading, as a share of
full attention's in the same run of the program; one run each. *footprint*: entries of the KV cache, summed
over steps, as a share of full causal attention's. In %d of %d runs of the command with the same weights
in fp32 all %d tokens of the answer are those of the reference, with which the table is made."""


def markdown(made):
    found, rows = made["found"], rows_of(made)
    sizes = [made["tokens"][d] for d in sorted({json.loads(k)[2] for k in found})]
    kinds = [k + ", " + r for k in (END, AFTER) for r in ("evict", "offload")]
    texts = "documents of %s tokens" % ", ".join(map(str, sizes))
    lines = ["# Prefill pruning on a real language model", "", ABOUT % (real_model.NAME, texts), "",
             "| policy | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    lines += ["| %s |" % " | ".join([name] + [cell(found, k, name) for k in kinds]) for name, _, _ in rows]
    if json.dumps(["cost, evict", ROWS[0][0], COST_OF]) in found:
        equal, count = compared(found)
        lines += ["", ABOUT_COSTS % (made["tokens"][COST_OF], equal, count, ANSWER), "",
                  "| policy | " + " | ".join(COSTS) + " |", "|---|" + "---:|" * len(COSTS)]
        lines += ["| %s |" % " | ".join([name] + costs_of(found, name)) for name, _, _ in rows]
    lines += ["", "Machine: %s. Made with `bench/runtime/prune_real.py`, at low priority beside other work, "
              "so that times are CPU seconds." % made["machine"], "",
              "| policy | options after `kvferry run` |", "|---|---|"]
    lines += ["| %s | `%s` |" % (n, " ".join(options_of(p, s, "evict"))) for n, p, s in rows]
    return "\n".join(lines) + "\n"


def begun(args):
    """Rows that were found before, where it was the same that was asked."""
    made = earlier(args.out, "prune_real")
    if made.get("lengths") != LENGTHS:
        made = {"bench": "prune_real", "lengths": LENGTHS, "machine": machine(), "tuned": [], "found": {}}
    if args.tuned:
        made["tuned"] = tuned_rows(args.tuned)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--documents", type=int, default=len(LENGTHS))
    parser.add_argument("--minutes", type=float, default=1e9, help="end after the row that is running then")
    parser.add_argument("--tuned", metavar="FILE", help="rows of what kvferry tune --out wrote")
    parser.add_argument("--table", action="store_true", help="write the table again, and run nothing")
    parser.add_argument("--out", default=RESULTS)
    args = parser.parse_args()
    made = begun(args)
    if not args.table:
        measure(args, made)
    save(args.out, "prune_real", markdown(made), made)


def measure(args, made):
    from transformers import AutoTokenizer
    from prune_answers import Answers
    folder, start = os.environ["KVF_HF_MODEL"], time.monotonic()
    args.model, args.base_s, args.answers = real_model.fetch(), None, Answers(folder)
    args.exact = folder  # the same weights in fp32
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = [Asked(tokenizer, d) for d in range(len(LENGTHS))]
    made["tokens"] = [len(d.ids) for d in documents]
    with tempfile.TemporaryDirectory(prefix="kvferry-prune-") as scratch:
        for kind, row, d in jobs(args, made):
            if is_done(made["found"], kind, row, d):
                continue
            if time.monotonic() - start > 60 * args.minutes:
                return
            before = time.process_time()
            got = perform(args, scratch, documents[d], kind, row, d)
            made["found"].update(got)
            print("%4.0f s" % (time.monotonic() - start), "%5.1f s CPU" % (time.process_time() - before), d,
                  row[0], *("%s: %s" % (json.loads(k)[0], v.get("right", v)) for k, v in got.items()),
                  file=sys.stderr, flush=True)
            save(args.out, "prune_real", markdown(made), made)


if __name__ == "__main__":
    main()
