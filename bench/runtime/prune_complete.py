#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `--retention complete` costs and keeps on a real language model, beside a full prefill.

usage: prune_complete.py --kvferry PROGRAM [--documents N] [--rounds N] [--out FOLDER]

Documents and questions are those of prune_real.md; the model is fetched once (real_model.py). Times
are CPU seconds of all threads, since other work on a machine changes them little, of runs that answer
two questions of one word with one token, by turns, less those of such a run on a document of one word.
So what completing costs is their difference. A first question meets the pruned document; a later one
the complete one. Answers of both are judged over the same questions: the run with `complete` has one
more in front, after which the document is completed. Answers of the complete document and of the one
that was never pruned are compared token for token. Writes prune_complete.md.
"""
import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import eval_texts  # noqa: E402
import real_model  # noqa: E402
from eval_report import ASKED, wilson  # noqa: E402
from results_folder import RESULTS, machine, save  # noqa: E402

LENGTHS, NUMBERS = [2150, 2100, 2300, 4700], 13  # as in prune_real.py
ANSWER = 7  # tokens
PRUNE = ["--prune", "fastkv", "--prune-layer", "14", "--keep", "0.1", "--propagate", "0.2"]
FULL, FIRST, LATER = "full prefill", "first question, pruned", "second question, complete"
OPTIONS = {FULL: [], FIRST: PRUNE, LATER: PRUNE + ["--retention", "complete"]}


def cpu():
    r = resource.getrusage(resource.RUSAGE_CHILDREN)
    return r.ru_utime + r.ru_stime


class Runner:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder

    def path(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        return path

    def run(self, text, options):
        """(lines of the output, CPU seconds)"""
        before = cpu()
        done = subprocess.run(
            [self.args.kvferry, "run", "--model", self.args.model, "--device", "host", "--select", "full",
             "--ignore-eos", "--prompt-file", self.path("prompt.txt", text), *options],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
        return done.stdout.split("\n"), cpu() - before

    def ask(self, text, questions, tokens, options):
        path = self.path("questions.txt", "".join(q + "\n" for q in questions))
        return self.run(text, [*options, "--ask", path, "-n", str(tokens)])

    def answers(self, text, questions, options):
        """(lines of the output, ids of the tokens of each answer)"""
        path = os.path.join(self.folder, "answer.ids")
        lines, _ = self.ask(text, questions, ANSWER, [*options, "--emit-ids", path])
        with open(path, encoding="utf-8") as f:
            ids = f.read().split()
        if len(ids) != ANSWER * len(questions):
            raise RuntimeError("%d tokens for %d questions" % (len(ids), len(questions)))
        return lines, [ids[i:i + ANSWER] for i in range(0, len(ids), ANSWER)]

    def cost(self, text, options):
        return self.ask(text, ["The", "The"], 1, options)[1]


def measure_document(runner, index, rounds, idle):
    """A dictionary of CPU seconds, and of how many questions were right."""
    d = eval_texts.Document(eval_texts.MANUALS[index], LENGTHS[index], 2000 + index, 100, NUMBERS)
    tasks = [t for t in d.tasks if t.kind in ASKED]
    tasks.insert(0, tasks[-1])
    work = {name: [] for name in OPTIONS}
    for _ in range(rounds):
        for name, options in OPTIONS.items():
            work[name].append(runner.cost(d.text, options) - idle)
    print(index, work, file=sys.stderr)
    found = {"tokens": LENGTHS[index], "questions": len(tasks) - 1, "right": {}}
    ids = {}
    for name, options in OPTIONS.items():
        lines, ids[name] = runner.answers(d.text, [t.text for t in tasks], options)
        found["right"][name] = sum(t.is_right(line) for t, line in zip(tasks[1:], lines[1:]))
        print(index, name, found["right"][name], file=sys.stderr)
    found["same"] = sum(a == b for a, b in zip(ids[LATER][1:], ids[FULL][1:]))
    found["work"] = {name: statistics.median(times) for name, times in work.items()}
    return found


def share(found, name):
    """Share of full prefill, over all documents."""
    return sum(f["work"][name] for f in found) / sum(f["work"][FULL] for f in found)


def markdown(args, found):
    asked = sum(f["questions"] for f in found)
    first = share(found, FIRST)
    costs = {FULL: (1.0, 1.0), FIRST: (first, first), LATER: (first, share(found, LATER))}
    lines = ["# First token early, nothing lost", "",
             "Written by `bench/runtime/prune_complete.py --kvferry PROGRAM --documents %d --rounds %d`: %s, "
             "%s, `%s`, everything that is held is attended (`--select full`)." % (
                 len(found), args.rounds, real_model.NAME, machine(), " ".join(PRUNE)),
             "", "Documents of %s tokens, %d questions that are asked afterwards, of %d tokens each. CPU "
             "seconds of all threads relative to a full prefill (%s s)." % (
                 ", ".join(str(f["tokens"]) for f in found), asked, ANSWER,
                 ", ".join("%.1f" % f["work"][FULL] for f in found)),
             "", "| | right, of %d | 95%% interval | first token | all work on the prompt |" % asked,
             "|---|---|---|---|---|"]
    for name, cost in costs.items():
        right = sum(f["right"][name] for f in found)
        low, high = wilson(right, asked)
        lines.append("| %s | %d | %.0f%% to %.0f%% | %.2f | %.2f |" % (
            name, right, 100 * low, 100 * high, *cost))
    lines += ["", "Of %d answers of the complete documents %d are those of the full prefill, token for token."
              % (asked, sum(f["same"] for f in found))]
    return "\n".join(lines) + "\n\n"


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--kvferry", required=True)
    p.add_argument("--documents", type=int, default=3, choices=range(1, len(LENGTHS) + 1))
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--out", default=RESULTS)
    args = p.parse_args()
    args.kvferry, args.model = os.path.abspath(args.kvferry), real_model.fetch()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(args, folder)
        idle = statistics.median(runner.cost("Word", []) for _ in range(args.rounds))
        found = []
        for i in range(args.documents):
            found.append(measure_document(runner, i, args.rounds, idle))
            save(args.out, "prune_complete", markdown(args, found))


if __name__ == "__main__":
    main()
