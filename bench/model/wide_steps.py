#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The cost of steps of many rows: answers at once, drafts, and turns that follow, on a real language model.

usage: wide_steps.py --kvferry PROGRAM [--llama-batched-bench PROGRAM] [--rounds N] [--parts LIST]
                     [--types LIST] [--files FOLDER] [--out FOLDER]

A figure is CPU milliseconds per token of one thread: the user time of a run less that of the same run
with fewer tokens, over the tokens between. So other work on the machine, loading and prefill are not
in it, and what was measured by turns can be compared. Parts:

  batch   1, 4, 8 and 16 answers at once to a prompt of 32 tokens, three types of weights, beside
          llama.cpp's batched bench where it is given
  shared  1 and 16 answers to one prompt of 7,000 tokens, beside llama.cpp where it is given
  draft   a text that is said again, after 5,000 and 7,000 tokens, without drafts and with them
  drafts  the same by several answers at once to one prompt
  turn    200 tokens after 7,000, read densely and as steps; and facts of documents that are asked for
          in questions that are read both ways

Files of other types than the model's own are made as in against_llama.py. Writes wide_steps.json, of which
parts and types that are not measured now are kept, and wide_steps.md. In the repository is only the table,
so a machine that has not measured the other parts needs a folder of its own, --out.
"""
import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile

from against_llama import ROOT, model_file, prompt_file, real_model

sys.path.insert(0, os.path.join(ROOT, "tools"))
import eval_texts  # noqa: E402
from eval_report import ASKED  # noqa: E402
from results_folder import RESULTS, earlier, machine, save  # noqa: E402

PARTS = ("batch", "shared", "draft", "drafts", "turn")
ROWS = (1, 4, 8, 16)
TYPES = ("Q4_1", "Q8_0", "BF16")
SHORT, LONG = 32, 7000  # tokens of prompts
TURN = 200
QUOTED = (4870, 4900, LONG)  # the model says the middle one again in part only
DRAFTS = (("none", []), ("up to 7", ["--draft", "ngram:7"]), ("up to 15", ["--draft", "ngram"]))
DRAFTED = (1, 4, 8)  # answers at once
ASKED_OF = ((0, 3000), (2, 4000), (9, 3000))  # manual, tokens


def cpu_of(command, **options):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True,
                          **options)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, done.stdout


class Runner:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.model = model_file(args.files or folder, "Q4_1")

    def path(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        return path

    def run(self, model, *options):
        """(CPU seconds, standard output)"""
        return cpu_of([self.args.kvferry, "run", "--model", model, "--device", "host", "--threads", "1",
                       "--ignore-eos", *options])

    def between(self, run, few, many, rows=1):
        """CPU milliseconds per token. run(count) gives the seconds of a run with so many tokens a row."""
        return 1e3 * (run(many) - run(few)) / (rows * (many - few))

    def saved(self, name, text):
        """A prompt that is read once, and kept where files are. @return its options"""
        prompt = self.path(name, text)
        saved = os.path.join(self.args.files or self.folder, name + ".kvs")
        if not os.path.exists(saved):
            self.run(self.model, "--prompt-file", prompt, "--save", saved, "-n", "1")
        return ["--prompt-file", prompt, "--load", saved]

    def llama_command(self, model, prompt, rows):
        return [self.args.llama_batched_bench, "-m", model, "-t", "1", "-tb", "1", "-fa", "on", "-npl",
                str(rows), "-npp", str(prompt)]

    def llama(self, model, prompt, rows):
        command = self.llama_command(model, prompt, rows) + ["-c", str((prompt + 64) * rows)]
        return self.between(lambda n: cpu_of(command + ["-ntg", str(n)])[0], 4, 4 + per_row(rows), rows)

    def llama_shared(self, model, prompt, rows):
        """By its own clock: beside a prompt of minutes a difference of two runs says nothing."""
        command = self.llama_command(model, prompt, rows) + ["-c", "8192", "-kvu", "-pps", "-ntg", "16"]
        last = cpu_of(command)[1].strip().splitlines()[-1].split("|")
        return 1e3 * float(last[7]) / (rows * int(last[2]))


def per_row(rows):
    """Tokens of an answer that a figure is of."""
    return max(24, 96 // rows)


def note(found, name, value):
    found.setdefault(name, []).append(value)
    print(name, "%.2f" % value, file=sys.stderr, flush=True)


# ---- parts: each adds to lists of figures by name ----

def measure_batch(runner, found):
    for kind in runner.args.types.split(","):
        model = model_file(runner.args.files or runner.folder, kind)
        ids = prompt_file(runner.folder, SHORT)
        for rows in ROWS:
            def ours(n, model=model, rows=rows):
                return runner.run(model, "--token-ids", ids, "--samples", str(rows), "--batch", str(rows),
                                  "--temperature", "1", "-n", str(n))[0]
            note(found, "%s %d kvferry" % (kind, rows),
                 runner.between(ours, 4, 4 + per_row(rows), rows))
            if runner.args.llama_batched_bench:
                note(found, "%s %d llama.cpp" % (kind, rows), runner.llama(model, SHORT, rows))


def long_text(tokens):
    parts = eval_texts.prose("Math/BigInt.pm") + eval_texts.prose("Getopt/Long.pm") + \
        eval_texts.prose("JSON/PP.pm")
    return "\n\n".join(parts)[:tokens * 4]


def measure_shared(runner, found):
    prompt = runner.saved("quote%d" % LONG, quoting(LONG))
    for rows in (1, 16):
        note(found, "%d kvferry" % rows, runner.between(
            lambda n, rows=rows: runner.run(
                runner.model, *prompt, "--samples", str(rows), "--batch", str(rows), "--temperature", "1",
                "-n", str(n))[0], 4, 4 + per_row(rows), rows))
        if runner.args.llama_batched_bench:
            note(found, "%d llama.cpp" % rows, runner.llama_shared(runner.model, LONG, rows))


def quoting(tokens):
    """A text, and the beginning of a part of it: what follows is to be said again."""
    text = long_text(tokens)
    at = text.index(". ", len(text) // 3) + 2
    return text + "\n\nThe same section once more, word for word:\n\n" + " ".join(
        text[at:at + 400].split(" ")[:30])


def measure_draft(runner, found):
    for tokens in QUOTED:
        prompt = runner.saved("quote%d" % tokens, quoting(tokens))
        said = {}
        for name, options in DRAFTS:
            stats = os.path.join(runner.folder, "stats.json")

            def run(n, key="%d %s" % (tokens, name), options=options):
                seconds, text = runner.run(runner.model, *prompt, *options, "-n", str(n), "--stats", stats)
                with open(stats, encoding="utf-8") as f:
                    told = json.load(f)
                if n > 1:
                    said[key] = text
                    if "drafted_tokens" in told:
                        found[key + ", right"] = [told["accepted_tokens"], told["drafted_tokens"]]
                return seconds
            note(found, "%d %s" % (tokens, name), runner.between(run, 1, 257))
        if len(set(said.values())) != 1:
            raise RuntimeError("drafts changed the text: %s" % said)


def measure_drafts(runner, found):
    prompt = runner.saved("quote%d" % QUOTED[0], quoting(QUOTED[0]))
    for rows in DRAFTED:
        said = {}
        for name, options in (DRAFTS[0], DRAFTS[-1]):
            stats, key = os.path.join(runner.folder, "stats.json"), "%d %s" % (rows, name)

            def run(n, key=key, options=options, rows=rows):
                seconds, text = runner.run(
                    runner.model, *prompt, *options, "--samples", str(rows), "--batch", str(rows),
                    "--temperature", "0.3", "--seed", "1", "-n", str(n), "--stats", stats)
                with open(stats, encoding="utf-8") as f:
                    told = json.load(f)
                if n == 1:
                    return seconds
                said[key] = sorted(json.loads(line)["ids"] for line in text.splitlines())
                if "drafted_tokens" in told:
                    found[key + ", right"] = [told["accepted_tokens"], told["drafted_tokens"]]
                return seconds
            note(found, key, runner.between(run, 1, 129, rows))
        if len(set(map(str, said.values()))) != 1:
            raise RuntimeError("drafts changed an answer: %s" % said)


def measure_turn(runner, found):
    prompt = runner.saved("long", long_text(LONG))
    text = " ".join("\n\n".join(eval_texts.prose("Locale/Maketext.pod")).split())
    files = {words: runner.path("turn%d" % words, long_text(LONG) + " end .\n\n" +
                                " ".join(text.split()[:words])) for words in (1, 1 + TURN * 2 // 3)}
    stats = os.path.join(runner.folder, "stats.json")
    for how in ("dense", "sparse"):
        seconds, tokens = [], []
        for path in files.values():
            seconds.append(runner.run(runner.model, "--prompt-file", path, *prompt[2:], "--extend", how,
                                      "-n", "1", "--stats", stats)[0])
            with open(stats, encoding="utf-8") as f:
                tokens.append(json.load(f)["prefilled_tokens"])
        found["tokens"] = [tokens[1] - tokens[0]]
        note(found, how, 1e3 * (seconds[1] - seconds[0]) / (tokens[1] - tokens[0]))


def ask_turns(runner, found):
    """Facts that are right, read both ways; once, because nothing is drawn."""
    for index, tokens in ASKED_OF:
        d = eval_texts.Document(eval_texts.MANUALS[index], tokens, 3000 + index, 100, 13)
        tasks = [t for t in d.tasks if t.kind in ASKED]
        prompt = runner.saved("asked%d" % index, d.text)
        # The text before the question makes it a turn, and is no hint.
        lead = "Here is one more question about the text above, which has to be answered in few words. "
        ask = runner.path("ask", "".join(lead + t.text + "\n" for t in tasks))
        for how in ("dense", "sparse"):
            lines = runner.run(runner.model, *prompt[2:], "--ask", ask, "--extend", how, "-n", "7",
                               )[1].split("\n")
            right = sum(t.is_right(line) for t, line in zip(tasks, lines))
            found.setdefault("right " + how, []).append(right)
            print(index, how, right, "of", len(tasks), file=sys.stderr, flush=True)
        found.setdefault("asked", []).append(len(tasks))


# ---- table ----

def middle(found, name):
    return statistics.median(found[name])


def shown(found, name):
    values = found[name]
    return "%.2f (%.2f–%.2f)" % (middle(found, name), min(values), max(values))


def rounds(found, name):
    return "1 round" if len(found[name]) == 1 else "%d rounds" % len(found[name])


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"] + \
        ["| " + " | ".join(row) + " |" for row in rows] + [""]


def rows_of(found, keys, counts):
    """Answers at once: one key after the other, each with its own figure of one answer."""
    for key in keys:
        for n in counts:
            ours, one = "%s%d kvferry" % (key, n), "%s%d kvferry" % (key, counts[0])
            theirs = "%s%d llama.cpp" % (key, n)
            row = [key.strip() or "Q4_1", str(n), shown(found, ours),
                   "%.2f" % (middle(found, one) / middle(found, ours))]
            row += [shown(found, theirs), "%.2f" % (middle(found, theirs) / middle(found, ours))] \
                if theirs in found else ["", ""]
            yield row


HEAD = ["weights", "at once", "kvferry", "times one", "llama.cpp", "ratio"]


def markdown(made):
    lines = ["# Steps of many rows", "", re.sub(r"\s+", " ", """
        Written by `bench/model/wide_steps.py --kvferry PROGRAM`: %s, %s. CPU milliseconds per token of
        one thread: medians of rounds by turns, with the least and the most. *ratio*: llama.cpp's to
        kvferry's.""" % (real_model.NAME, made["machine"])).strip(), ""]
    if "batch" in made:
        lines += ["## Answers at once", "", "A prompt of %d tokens, answers drawn at temperature 1; %s." % (
            SHORT, rounds(made["batch"], "Q4_1 1 kvferry")), ""]
        lines += table(HEAD, rows_of(made["batch"], [k + " " for k in TYPES], ROWS))
    if "shared" in made:
        lines += ["## One prompt of %d tokens" % LONG, "", "Q4_1, the default selection; llama.cpp attends "
                  "to everything, milliseconds of one thread by its own clock; %s." % rounds(made["shared"], "1 kvferry"), ""]
        lines += table(HEAD, rows_of(made["shared"], [""], (1, 16)))
    if "draft" in made:
        lines += ["## Drafts", "", "A text of so many tokens and the first words of a part of it, Q4_1: "
                  "256 tokens more, the same without drafts and with them; %s." % rounds(
                      made["draft"], "%d none" % LONG), ""]
        found, rows = made["draft"], []
        for tokens in QUOTED:
            for name, _ in DRAFTS:
                key = "%d %s" % (tokens, name)
                rows.append([str(tokens), name, shown(found, key),
                             "%.2f" % (middle(found, "%d none" % tokens) / middle(found, key)),
                             "%d of %d" % tuple(found[key + ", right"]) if key + ", right" in found
                             else ""])
        lines += table(["tokens in front", "drafts", "CPU ms per token", "times none", "right"], rows)
    if "drafts" in made:
        found, rows, none = made["drafts"], [], DRAFTS[0][0]
        lines += ["## Drafts of several answers", "", "%d tokens in front, as above; each answer draws at "
                  "temperature 0.3, 128 tokens more; %s." % (
                      QUOTED[0], rounds(found, "1 %s" % none)), ""]
        for n in DRAFTED:
            for name, _ in (DRAFTS[0], DRAFTS[-1]):
                key = "%d %s" % (n, name)
                rows.append([str(n), name, shown(found, key),
                             "%.2f" % (middle(found, "%d %s" % (n, none)) / middle(found, key)),
                             "%d of %d" % tuple(found[key + ", right"]) if key + ", right" in found
                             else ""])
        lines += table(["at once", "drafts", "CPU ms per token", "times none", "right"], rows)
    if "turn" in made:
        found = made["turn"]
        lines += ["## A turn after %d tokens" % LONG, "", "%d tokens, Q4_1; %s." % (
            found["tokens"][0], rounds(found, "dense")), ""]
        lines += table(["read", "CPU ms per token", "facts that were right"],
                       [[how, shown(found, how), "%d of %d" % (sum(found["right " + how]),
                                                               sum(found["asked"]))]
                        for how in ("dense", "sparse")])
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--llama-batched-bench", help="of llama.cpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--types", default=",".join(TYPES), help="of weights, for batch")
    parser.add_argument("--files", help="folder that keeps converted files")
    parser.add_argument("--out", default=RESULTS)
    args = parser.parse_args()
    made = earlier(args.out, "wide_steps")
    made["machine"] = machine()
    measures = {"batch": measure_batch, "shared": measure_shared, "draft": measure_draft,
                "drafts": measure_drafts, "turn": measure_turn}
    with tempfile.TemporaryDirectory(prefix="kvferry-wide-") as folder:
        runner = Runner(args, folder)
        for part in args.parts.split(","):
            found = {}
            for _ in range(args.rounds):
                measures[part](runner, found)
            if part == "turn":
                ask_turns(runner, found)
            made[part] = {**made.get(part, {}), **found}
            save(args.out, "wide_steps", markdown(made), made)
    print(markdown(made))


if __name__ == "__main__":
    main()
