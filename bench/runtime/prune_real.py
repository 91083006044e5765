#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What prefill pruning keeps of a real language model's answers, and what it saves, by policy.

usage: prune_real.py --kvferry PROGRAM [--minutes N] [--documents N] [--tuned FILE] [--out FOLDER]

Documents are those of eval_texts.py in lengths of their own; the model is fetched once
(real_model.py). Every question is put in two ways: at the end of the prompt, as in the papers, so that
the window knows it, and afterwards, on a fork of a pruned document that is kept.

With the question at the end every question is a prefill. So rows whose rest is deleted are answered by
the reference of tests/python, which reads a document once for all its questions and gives the tokens of
the command (check_prune_tokens.py); all else is measured with the command itself. What was found is
kept in prune_real.json, row by row, and is not run again; --minutes ends the run. Writes prune_real.md.
Needs torch: `./dev python --run bench/runtime/prune_real.py --kvferry build/runtime/cli/kvferry`.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

from recall_table import ROOT, machine

sys.path.insert(0, os.path.join(ROOT, "tools"))
sys.path.insert(0, os.path.join(ROOT, "tests", "python"))
import eval_texts  # noqa: E402
import real_model  # noqa: E402
from eval_report import ASKED, wilson  # noqa: E402

MARK = "<!-- by hand: what came out -->"
LENGTHS = [2000, 3000, 4000, 6500]  # tokens
ANSWER = 7  # tokens
SNAP = {"window": 32, "pool": "avg", "pool_width": 5}
MAX7 = {"window": 8, "pool": "max", "pool_width": 7}
FAST = dict(MAX7, group_reduce="sum")
STRUCT = dict(MAX7, decay=0.9, mass_share=0.1, weights=[0.2, 0.3, 0.5])
ASL = {"window": 32, "pool": "avg", "pool_width": 7, "group_reduce": "sum"}
RULE = dict(ASL, layers_observed=8, threshold=0.3)
# Published settings: half the depth of 30 layers, 13 of 32 for gemfilter. Then wider ones.
ROWS = [
    ("full attention", "full", {}),
    ("fastkv", "fastkv", dict(FAST, keep=0.1, propagate=0.2, layer=14)),
    ("snapkv", "snapkv", dict(SNAP, keep=0.1)),
    ("structkv", "structkv", dict(STRUCT, keep=0.1, propagate=0.2)),
    ("gemfilter", "gemfilter", {"keep": 0.1, "layer": 12, "pool": "avg", "pool_width": 5}),
    ("asl", "asl", dict(RULE, keep_tokens=2048, propagate_tokens=2048)),
    ("asl, half depth", "asl", dict(ASL, keep=0.1, propagate=0.2, layer=14)),
    ("pyramidkv", "pyramidkv", dict(MAX7, keep=0.1, beta=20)),
    ("h2o", "h2o", {"keep": 0.1, "recent_share": 0.5}),
    ("streaming", "streaming", {"keep": 0.1, "sink_tokens": 4}),
    ("snapkv, keep 0.5", "snapkv", dict(SNAP, keep=0.5)),
    ("fastkv, layer 19", "fastkv", dict(FAST, keep=0.2, propagate=0.5, layer=19)),
    ("fastkv, layer 24", "fastkv", dict(FAST, keep=0.5, propagate=0.5, layer=24)),
    ("structkv, layer 24", "structkv", dict(STRUCT, keep=0.5, propagate=0.5, layer=24)),
    ("pyramidinfer", "pyramidinfer", {"propagate": 0.2, "window": 32, "sink_tokens": 4,
                                      "window_mean": 1}),
    ("asl, two passes", "asl", dict(RULE, keep=1, propagate_tokens=2048, two_pass=1)),
]
DEAR = ("pyramidinfer", "asl, two passes", "h2o")  # nothing of a document is shared by its questions
END, AFTER = "at the end", "afterwards"
COSTS = ["prefill computed", "layer", "CPU", "footprint"]


class Asked:
    """A document and its questions, as ids of tokens, and what is right."""

    def __init__(self, tokenizer, index):
        d = eval_texts.Document(eval_texts.MANUALS[index], LENGTHS[index], 2000 + index, 100)
        self.ids = tokenizer.encode(d.text)
        self.tasks = [t for t in d.tasks if t.kind in ASKED]
        self.questions = [tokenizer.encode(t.text) for t in self.tasks]
        self.tokenizer = tokenizer

    def judge(self, answers):
        return [int(t.is_right(self.tokenizer.decode(ids))) for t, ids in zip(self.tasks, answers)]


# ---- the reference ----

class Reference:
    """Answers where what is not kept is deleted."""

    def __init__(self):
        import prune_reference
        import torch
        self.lib, self.torch = prune_reference, torch
        torch.set_grad_enabled(False)
        self.model = prune_reference.Model(os.environ["KVF_HF_MODEL"])
        self.prefix = self.of = None

    def read(self, asked, policy):
        sums = policy == "h2o"
        if self.of is not asked or sums and not self.prefix.sums:
            self.prefix = None
            self.prefix, self.of = self.lib.Prefix(self.model, asked.ids, sums), asked
        return self.prefix

    def forks(self, cache, count):
        out = []
        for _ in range(count):
            c = self.lib.Cache()
            c.k, c.v, c.next = list(cache.k), list(cache.v), cache.next
            out.append(c)
        return out

    def extend(self, caches, tokens):
        """Logits behind the tokens of each sequence; rows of all of them go through a layer together."""
        torch, m = self.torch, self.model
        sizes = [len(t) for t in tokens]
        x = m.embed([i for t in tokens for i in t])
        positions = torch.cat([c.next + torch.arange(s) for c, s in zip(caches, sizes)])
        for layer in range(m.layers):
            q, k, v = (y.split(sizes, 1) for y in m.project(layer, x, positions))
            out = []
            for i, c in enumerate(caches):
                c.k[layer] = torch.cat([c.k[layer], k[i]], 1)
                c.v[layer] = torch.cat([c.v[layer], v[i]], 1)
                out.append(m.attend(q[i], c.k[layer], c.v[layer]))
            x = m.add_mlp(layer, m.add_attention(layer, x, torch.cat(out, 1)))
        for c, s in zip(caches, sizes):
            c.next += s
        last = torch.tensor(sizes).cumsum(0) - 1
        return m.logits(x[last])

    def decode(self, caches, logits):
        answers = [[int(row.argmax())] for row in logits]
        while len(answers[0]) < ANSWER:
            logits = self.extend(caches, [[a[-1]] for a in answers])
            for a, row in zip(answers, logits):
                a.append(int(row.argmax()))
        return answers

    def afterwards(self, asked, policy, settings):
        prefix = self.read(asked, policy)
        if policy == "full":
            cache = self.lib.Cache()
            cache.k, cache.v, cache.next = list(prefix.k), list(prefix.v), len(asked.ids)
        else:
            cache, _ = self.document(asked, prefix, policy, settings)
        caches = self.forks(cache, len(asked.questions))
        return self.decode(caches, self.extend(caches, asked.questions))

    def document(self, asked, prefix, policy, settings):
        """The document alone is the prompt: its last token is what the prefix lacks."""
        short = self.shortened(prefix)
        return self.lib.prefill(self.model, asked.ids, policy, settings, short)

    def shortened(self, prefix):
        """The prefix without its last token."""
        p = self.lib.Prefix.__new__(self.lib.Prefix)
        p.ids, p.k, p.v = prefix.ids[:-1], [k[:, :-1] for k in prefix.k], [v[:, :-1] for v in prefix.v]
        p.tail, p.x = [t[:, :-1] for t in prefix.tail], [x[:-1] for x in prefix.x]
        p.sums = [s[:, :-1] - last[:, :-1] for s, last in zip(prefix.sums, prefix.last)]
        return p

    def at_end(self, asked, policy, settings, count):
        if policy == "full":
            return self.afterwards(asked, policy, settings)
        prefix, caches, logits = self.read(asked, policy), [], []
        for question in asked.questions[:count]:
            cache, row = self.lib.prefill(self.model, asked.ids + question, policy, settings, prefix)
            caches.append(cache)
            logits.append(row)
        return self.decode(caches, logits)


# ---- the command ----

def options_of(policy, settings, retention):
    if policy == "full":
        return [] if retention == "offload" else ["--select", "full"]
    out = ["--prune", policy, "--retention", retention]
    for name, value in settings.items():
        out += ["--prune-set", "%s=%s" % (name, ",".join(map(str, value)) if isinstance(value, list)
                                          else value)]
    return out + ([] if retention == "offload" else ["--select", "full"])


def run(args, folder, ids, options):
    """(tokens, statistics, seconds of all threads)"""
    names = [os.path.join(folder, n) for n in ("prompt.ids", "answer.ids", "stats.json")]
    with open(names[0], "w", encoding="utf-8") as f:
        f.write("\n".join(map(str, ids)) + "\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([args.kvferry, "run", "--model", args.model, "--device", "host", "--token-ids", names[0],
                    "--ignore-eos", "--emit-ids", names[1], "--stats", names[2], *options],
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(names[1], encoding="utf-8") as out, open(names[2], encoding="utf-8") as stats:
        return ([int(line) for line in out], json.load(stats),
                after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def ask_command(args, folder, asked, options):
    path = os.path.join(folder, "questions.txt")
    with open(path, "w", encoding="utf-8") as f:
        f.write("".join(t.text + "\n" for t in asked.tasks))
    ids, _, _ = run(args, folder, asked.ids, options + ["--ask", path, "-n", str(ANSWER)])
    return [ids[i:i + ANSWER] for i in range(0, len(ids), ANSWER)]


def cost(args, folder, asked, options):
    ids = asked.ids + asked.questions[0]
    tokens, stats, seconds = run(args, folder, ids, options + ["-n", str(ANSWER)])
    prune = stats.get("prune") or {}
    return {"tokens": tokens, "cpu_s": seconds, "computed": prune.get("compute_rate", 1.0),
            "layer": prune.get("chosen_layer"), "footprint": stats["footprint"]["footprint"],
            "ttft_s": stats["ttft_ms"] / 1e3}


# ---- what is run, the most telling first ----

def jobs(args):
    """(key, document, function): key is [kind of job, row, document]."""
    rows = rows_of(args)
    plain = [r for r in rows if r[0] not in DEAR]
    for d in range(args.documents):
        if d == 1:
            for r in rows:
                yield ["cost", r[0], d], r
        for r in plain:
            yield [END + ", evict", r[0], d], r
            yield [AFTER + ", evict", r[0], d], r
        if d < 2:
            for r in plain[:10]:
                yield [AFTER + ", offload", r[0], d], r
        if d == 1:
            for r in plain[1:6]:
                yield [END + ", offload", r[0], 0], r
    for r in rows:
        if r[0] in DEAR:
            yield [END + ", evict", r[0], 0], r
            yield [AFTER + ", evict", r[0], 0], r


def perform(args, folder, reference, asked, kind, policy, settings):
    if kind == "cost":
        return cost(args, folder, asked, options_of(policy, settings, "evict"))
    if kind == END + ", evict":
        return asked.judge(reference.at_end(asked, policy, settings, len(asked.tasks)))
    if kind == AFTER + ", evict":
        return asked.judge(reference.afterwards(asked, policy, settings))
    options = options_of(policy, settings, "offload")
    if kind == AFTER + ", offload":
        return asked.judge(ask_command(args, folder, asked, options))
    said = [run(args, folder, asked.ids + q, options + ["-n", str(ANSWER)])[0]
            for q in asked.questions[:args.few]]
    return asked.judge(said)


def rows_of(args):
    if not args.tuned:
        return ROWS
    with open(args.tuned, encoding="utf-8") as f:
        return ROWS + [tuple(row) for row in json.load(f)]


# ---- table ----

def answers(found, kind, row, like=None):
    """What was asked of a row, and of full attention where both were."""
    mine, full = [], []
    for d in range(len(LENGTHS)):
        own = found.get(json.dumps([kind, row, d]))
        whole = found.get(json.dumps([kind.split(",")[0] + ", evict", ROWS[0][0], d]))
        if own and whole:
            mine += own
            full += whole[:len(own)]
    return mine, full


def cell(found, kind, row):
    mine, full = answers(found, kind, row)
    if not mine:
        return "-"
    low, high = wilson(sum(mine), len(mine))
    return "%d of %d (%.0f–%.0f%%)%s" % (sum(mine), len(mine), 100 * low, 100 * high,
                                         "" if row == ROWS[0][0] else ", full %d" % sum(full))


def costs_of(c, whole):
    if not c:
        return ["-"] * len(COSTS)
    return ["%.0f%%" % (100 * c["computed"]), "-" if c["layer"] is None else str(c["layer"]),
            "%.2f" % (c["cpu_s"] / whole["cpu_s"]), "%.0f%%" % (100 * c["footprint"])]


def markdown(args, made):
    found = made["found"]
    whole = found.get(json.dumps(["cost", ROWS[0][0], 1]))
    kinds = [k + ", " + r for k in (END, AFTER) for r in ("evict", "offload")]
    lines = ["# Prefill pruning on a real language model", "",
             "%s, %d of the documents, of %s tokens, with 16 questions each: a number, a name or a step of a "
             "chain that was hidden in the text. *at the end*: the question is the end of the prompt, as "
             "in the papers, so that the observation window knows it. *afterwards*: the document alone is "
             "pruned and kept, and every question is asked on a fork of it. *evict*: what a policy does not "
             "keep is deleted, and all that is left is attended. *offload*: it stays in host pages, and "
             "the default selection finds it." % (
                 real_model.NAME, len({json.loads(k)[2] for k in found}),
                 ", ".join(str(made["tokens"][d]) for d in sorted({json.loads(k)[2] for k in found}))), "",
             "Answers are right ones of those that were asked, with Wilson's interval (95%), beside those "
             "of full attention to the same questions."]
    if whole:
        lines[-1] += (" *prefill computed*: tokens times layers, of all. *CPU*: seconds of all threads for a "
                      "prompt of %d tokens and %d tokens of answer, loading included, as a share of full "
                      "attention's. *footprint*: entries of the KV cache, summed over steps, as a share of "
                      "full causal attention's." % (made["tokens"][1], ANSWER))
    costs = COSTS if whole else []
    lines += ["", "| " + " | ".join(["policy"] + costs + kinds) + " |",
              "|---|" + "---:|" * len(costs) + "---|" * len(kinds)]
    for name, _, _ in rows_of(args):
        answered = [cell(found, k, name) for k in kinds]
        if any(a != "-" for a in answered):
            cost_of = costs_of(found.get(json.dumps(["cost", name, 1])), whole) if whole else []
            lines.append("| %s |" % " | ".join([name] + cost_of + answered))
    lines += ["", "Machine: %s. Made with `bench/runtime/prune_real.py`, at low priority beside other work, "
              "so that times are CPU seconds." % machine(), "",
              "| policy | options after `kvferry run` |", "|---|---|"]
    lines += ["| %s | `%s` |" % (n, " ".join(options_of(p, s, "evict"))) for n, p, s in rows_of(args)
              if any(json.loads(k)[1] == n for k in found)]
    path = os.path.join(args.out, "prune_real.md")
    old = open(path, encoding="utf-8").read() if os.path.exists(path) else ""
    return "\n".join(lines) + "\n" + ("\n" + old[old.index(MARK):] if MARK in old else "")


def save(args, path, made):
    with open(path, "w", encoding="utf-8") as f:
        f.write(json.dumps(made, indent=1) + "\n")
    text = markdown(args, made)  # reads the part that was written by hand
    with open(os.path.join(args.out, "prune_real.md"), "w", encoding="utf-8") as f:
        f.write(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--documents", type=int, default=len(LENGTHS))
    parser.add_argument("--few", type=int, default=8,
                        help="questions of a row in which each is a run of the command")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after the row that is running then")
    parser.add_argument("--tuned", metavar="FILE", help="more rows, as JSON: [[name, policy, settings], ...]")
    parser.add_argument("--only", help="kinds of runs that have this in their name")
    parser.add_argument("--table", action="store_true", help="write the table again, and run nothing")
    parser.add_argument("--out", default=os.path.join(ROOT, "bench", "results"))
    args = parser.parse_args()
    path, start = os.path.join(args.out, "prune_real.json"), time.monotonic()
    made = {"bench": "prune_real", "lengths": LENGTHS, "found": {}}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            old = json.load(f)
        made = old if old.get("lengths") == LENGTHS else made
    if not args.table:
        measure(args, path, made, start)
    save(args, path, made)


def measure(args, path, made, start):
    from transformers import AutoTokenizer
    args.model = real_model.fetch()
    tokenizer = AutoTokenizer.from_pretrained(os.environ["KVF_HF_MODEL"])
    documents, reference = [Asked(tokenizer, d) for d in range(len(LENGTHS))], None
    made.update(machine=machine(), tokens=[len(d.ids) for d in documents])
    with tempfile.TemporaryDirectory(prefix="kvferry-prune-") as folder:
        for key, (name, policy, settings) in jobs(args):
            if json.dumps(key) in made["found"] or (args.only and args.only not in key[0]):
                continue
            if time.monotonic() - start > 60 * args.minutes:
                return
            reference = reference or (Reference() if key[0].endswith("evict") else None)
            before = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
            found = perform(args, folder, reference, documents[key[2]], key[0], policy, settings)
            made["found"][json.dumps(key)] = found
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            print(key, sum(found) if isinstance(found, list) else found, "%.1f s" % (
                time.process_time() - before[0] + children.ru_utime - before[1].ru_utime),
                "%.0f s" % (time.monotonic() - start), file=sys.stderr, flush=True)
            save(args, path, made)


if __name__ == "__main__":
    main()
