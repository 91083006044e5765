# SPDX-License-Identifier: Apache-2.0
"""What selections cost in the tasks of RULER and MRCR (eval_ruler_texts.py): `eval.py --ruler`.

Every task at every length is a run of its own, so that its rows say how many tokens were attended.
A task in which the model scores below a fifth with full attention tells little of selections: it is
shown and not judged. Knows scores and rows, not prompts. What is told is always of the runs that
are complete.
"""
import json
import os
import shlex
import subprocess
import sys
import tempfile

import eval_ruler_texts
import eval_texts
from eval_report import by_hand, kept
from eval_run import Row, read, run

LENGTHS, SAMPLES = [2048, 4096, 7500], 10
FEW = 2  # documents of a task that full attention cannot do at a shorter length
ROWS = [("full", "select=full"), ("default", "")]
JUDGED = 0.2  # full attention's least score


def count(program, model, documents):
    """Tokens of each document with its longest question."""
    with tempfile.TemporaryDirectory(prefix="kvferry-eval-") as folder:
        tasks = os.path.join(folder, "tasks")
        eval_texts.write(documents, tasks)
        done = subprocess.run([program, "--model", model, "--tasks", tasks], text=True, check=True,
                              stdout=subprocess.PIPE)
    tokens, asked = [0] * len(documents), [0] * len(documents)
    for line in done.stdout.splitlines():
        kind, document, *fields = line.split("\t")
        if kind == "document":
            tokens[int(document)] = int(fields[-1])
        elif kind == "task":
            asked[int(document)] = max(asked[int(document)], int(fields[-1]))
    return [t + a for t, a in zip(tokens, asked)]


def rows_of(extra):
    """full, default, and NAME FIELD=VALUE ..."""
    rows = [Row(name, settings, None) for name, settings in ROWS]
    for text in extra or []:
        name, _, settings = text.partition(" ")
        rows.append(Row(name, settings, None))
    return rows


class Run:
    """A task at a length."""

    def __init__(self, task, tokens, folder, extra):
        self.task, self.tokens, self.rows = task, tokens, rows_of(extra)
        self.path = os.path.join(folder, "%s-%d" % (task, tokens))
        self.documents, self.lengths = [], []

    def read(self):
        """@return whether the row of full attention is there"""
        self.lengths = read(self.path, self.rows)
        return bool(self.rows[0].stats)

    def scores(self, row):
        """Of every question, by document; none where the row was not run."""
        return [[task.score(row.answers[i, t]) for t, task in enumerate(d.tasks)]
                for i, d in enumerate(self.documents)] if row.stats else []

    def is_judged(self):
        return mean(self.scores(self.rows[0])) >= JUDGED


def mean(scores):
    """Over all questions of all documents."""
    return sum(map(sum, scores)) / sum(map(len, scores))


def attended(row):
    s = row.stats
    return s["tokens_attended"] / (s["steps"] * s["kv_heads"])


def figures(one):
    """What is told of a run."""
    full = one.scores(one.rows[0])
    rows = {}
    for row in one.rows:
        mine = one.scores(row)
        if mine:
            rows[row.method] = {"score": mean(mine), "attended": attended(row), "scores": mine}
    return {"task": one.task, "tokens": one.tokens, "samples": len(full),
            "questions": sum(map(len, full)),
            "documents": one.lengths, "judged": one.is_judged(), "rows": rows}


def judged(told, name):
    """(mine, full): scores of all judged questions that the row was asked, by document."""
    mine, full = [], []
    for f in told:
        if f["judged"] and name in f["rows"]:
            mine += f["rows"][name]["scores"]
            full += f["rows"]["full"]["scores"]
    return mine, full


def names_of(told):
    names = []
    for f in told:
        names += [name for name in f["rows"] if name not in names]
    return names


def table(told):
    names = names_of(told)
    lines = ["| task | tokens | documents | questions | judged | " + " | ".join(
        "%s: score | attended" % name for name in names) + " |",
        "|---|" + "---:|" * 3 + "---|" + "---:|" * (2 * len(names))]
    for f in told:
        cells = [f["task"], "%d" % f["tokens"], "%d" % f["samples"], "%d" % f["questions"],
                 "yes" if f["judged"] else "no"]
        for name in names:
            row = f["rows"].get(name)
            cells += ["%.0f" % (100 * row["score"]), "%.0f" % row["attended"]] if row else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def summary(told):
    if not any(f["judged"] for f in told):
        return ["No task is judged."]
    lines = ["| row | judged questions | score | of full's | 95% |", "|---|---:|---:|---:|---:|"]
    for name in names_of(told):
        mine, full = judged(told, name)
        if not mine:
            continue
        share, (low, high) = kept([sum(d) for d in mine], [sum(d) for d in full])
        lines.append("| %s | %d | %.1f | %.1f%% | %.1f–%.1f |" % (
            name, sum(map(len, mine)), 100 * mean(mine), 100 * share, 100 * low, 100 * high))
    return lines


LEGEND = """\
Prompts, answer prefixes, limits of generated tokens and scores are RULER's (`mrcr`: the form of
MRCR, with made-up replies), questions at the end as decode steps; prose and words are of the manuals
of [eval.md](eval.md), keys of lists of its own; no chat template. Of a document that holds more
needles (multikey) or replies, up to four are asked for, each by itself. *score*: share of the expected
strings that are found, times 100; of `mrcr` the likeness of the reply. *attended*: tokens per KV head
and step. A task counts where full attention scores 20 or more. *of full's*: sums of scores over all
judged questions, with the interval of a bootstrap over documents."""


def markdown(facts, told, hand):
    settings = ["`%s`: %s" % (name, settings or "as the library has it")
                for name, settings in facts["rows"].items()]
    return "\n".join(
        ["# Tasks of RULER under selections", "", "Model: %s." % facts["model"], ""] +
        summary(told) + [""] + LEGEND.split("\n") + ["Rows: " + "; ".join(settings) + ".", ""] +
        table(told) + ["", "Machine: %s. Made with `%s`." % (facts["machine"], facts["command"]),
                       ""]) + hand


def quick(args):
    """A first look: one length, the tasks that small models can do, few samples."""
    if args.quick:
        args.lengths = args.lengths or [2048]
        args.tasks = args.tasks or ["niah_single_1", "niah_single_2", "niah_multikey_1"]
        args.samples = args.samples or [2]


def samples_of(args):
    """(length, samples), shortest first."""
    lengths, samples = args.lengths or LENGTHS, args.samples or [SAMPLES]
    if len(samples) not in (1, len(lengths)):
        sys.exit("eval: --samples takes one number, or one for each of %d lengths" % len(lengths))
    return sorted(zip(lengths, samples * (len(lengths) // len(samples))))


def main(args, program, model, folder, results, machine):
    """`folder`: where runs are kept. --report tells of those that are there."""
    quick(args)
    unknown = [t for t in args.tasks or [] if t not in eval_ruler_texts.TASKS]
    if unknown:
        sys.exit("eval: no task %s; there are %s" % (
            unknown[0], ", ".join(eval_ruler_texts.TASKS)))
    os.makedirs(folder, exist_ok=True)
    material, told, too_hard = eval_ruler_texts.Material(), [], set()
    for tokens, most in samples_of(args):
        for task in args.tasks or eval_ruler_texts.TASKS:
            one = Run(task, tokens, folder, args.row)
            if args.report and not os.path.exists(one.path):
                continue
            samples = min(most, FEW) if task in too_hard else most
            if args.report:
                samples = len(read(one.path, one.rows))
            one.documents = eval_ruler_texts.fitted(
                material, task, tokens, samples, lambda d: count(program, model, d))
            if not args.report:
                run(program, model, one.documents, one.rows, one.path, args.lanes)
            if one.read():
                told.append(figures(one))
                if not told[-1]["judged"]:
                    too_hard.add(task)
                print("\n".join(table(told[-1:])[2:]), flush=True)
    if not told:
        sys.exit("eval: no run is complete")
    facts = {"machine": machine, "model": os.path.basename(model),
             "rows": {r.method: " ".join("%s=%s" % s for s in r.settings.items())
                      for r in rows_of(args.row)},
             "command": "eval.py " + shlex.join(a for a in sys.argv[1:] if not os.path.isabs(a))}
    out = args.out or (None if args.quick or args.tasks else results)
    text = markdown(facts, told, by_hand(os.path.join(out, "ruler.md")) if out else "")
    print(text)
    if out:
        os.makedirs(out, exist_ok=True)
        with open(os.path.join(out, "ruler.md"), "w", encoding="utf-8") as f:
            f.write(text)
        with open(os.path.join(out, "ruler.json"), "w", encoding="utf-8") as f:
            json.dump(dict(bench="ruler", **facts, runs=told), f, indent=1)
            f.write("\n")
