# SPDX-License-Identifier: Apache-2.0
"""Rows of an evaluation: what is asked of eval_selection, and what it said.

Knows settings of a cache and lines of eval_selection, not tasks or tables. Invariant: a row that
has stats is complete.
"""
import os
import subprocess
import sys
import tempfile

import eval_texts

VERIFY = 32  # every N-th step is compared with dense attention


class Row:
    """A method under one budget: what is asked of the library, and what came out."""

    def __init__(self, method, settings, budget):
        self.method, self.budget = method, budget
        self.settings = dict(word.split("=") for word in settings.split())
        if budget:
            self.settings["budget_tokens"] = str(budget)
        self.name = " ".join([method, settings] + ([str(budget)] if budget else []))
        self.refused, self.is_same = None, False
        self.answers, self.losses, self.stats = {}, {}, {}  # by (document, task)

    def config(self):
        settings = dict(self.settings, verify_interval=str(VERIFY))
        return self.name + "\t" + " ".join("%s=%s" % s for s in settings.items())


def run(program, model, documents, rows, out, lanes):
    """Let `out` be written, row by row."""
    with tempfile.TemporaryDirectory(prefix="kvferry-eval-") as folder:
        tasks, configs = (os.path.join(folder, n) for n in ("tasks", "configs"))
        eval_texts.write(documents, tasks)
        with open(configs, "w", encoding="utf-8") as f:
            f.writelines(row.config() + "\n" for row in rows)
        done = subprocess.run([program, "--model", model, "--tasks", tasks, "--configs", configs,
                               "--out", out, "--lanes", str(lanes)])
    if done.returncode != 0:
        sys.exit("eval: eval_selection ended with %d; the same command with --report tells of the "
                 "rows that are done" % done.returncode)


def read(path, rows):
    """Fill the rows; others that are there are passed over. What was cut has no stats.
    @return tokens of the documents, with the last token of each"""
    lengths, row, by_name = [], None, {r.name: r for r in rows}
    if not os.path.exists(path):
        return lengths
    with open(path, encoding="utf-8") as f:
        lines = f.read().split("\n")[:-1]  # the last one may be cut
    for line in lines:
        kind, *fields = line.split("\t")
        if kind == "document":
            lengths.append(int(fields[1]))
        elif kind == "config":
            row = by_name.get(fields[0]) or Row("", "", None)
        elif kind == "refused":
            row.refused = fields[0]
        elif kind == "same":
            same, row.is_same = by_name.get(fields[0]) or Row("", "", None), True
            row.answers, row.losses, row.stats = same.answers, same.losses, same.stats
        elif kind == "answer":
            row.answers[int(fields[0]), int(fields[1])] = eval_texts.unescaped(fields[2])
        elif kind == "loss":
            row.losses[int(fields[0]), int(fields[1])] = (
                int(fields[2]), float(fields[3]), int(fields[4]))
        elif kind == "stats":
            row.stats = {k: float(v) for k, v in (f.split("=") for f in fields)}
    return lengths


def spent(rows, what):
    """Seconds until the last row was done."""
    return max((r.stats["all_" + what] for r in rows if r.stats), default=0.0)
