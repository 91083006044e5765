#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo: facts hidden in a long document, asked for under several selection methods.

Two models are asked: a real language model about a manual of Perl with numbers between its
paragraphs (real_model.py, eval_texts.py), where the cache of the user or the network has it, and
the recall model about a document of its own language (examples/recall/generate.py). Each method is
one run of the kvferry command, which asks every question on a fork of the document's sequence. The
first run saves that sequence, and others go on from it, unless a method chooses its static set as the
document is read. Everything in the tables comes from these runs: answers from the command's standard
output, figures from its --stats file.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import eval_texts
from judge.tasks import is_answer
import real_model
from results_folder import ROOT, read, write

RECALL = os.path.join(ROOT, "examples", "recall")
# Options of the command besides the budget, by the name in the table.
METHODS = {
    "full": ["--select", "full"],
    "codes": [],
    "boxes": ["--preset", "prkv", "--sink", "4", "--fill", "pages"],
    "static": ["--select", "static"],
    "streaming": ["--select", "streaming"],
}
REAL_METHODS = ("full", "codes", "streaming")  # a prefill takes longer there
READ_AGAIN = ("boxes", "static")  # the document's own queries choose their static set
REAL_DOCUMENT = 0  # of eval_texts
COLUMNS = [
    # title, unit, alignment
    ("method", "", "<"),
    ("right", "of {questions}", ">"),
    ("attended", "tokens", ">"),
    ("fetched", "pages", ">"),
    ("moved", "", ">"),
    ("hit rate", "", ">"),
    ("ms per", "token", ">"),
    ("against", "full", ">"),
]


class Screen:
    """Colours and a line of progress on a terminal; plain text elsewhere."""

    def __init__(self):
        self.color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.live = sys.stderr.isatty()
        encoding = (sys.stdout.encoding or "ascii").lower()
        self.boxes = encoding.startswith("utf")

    def paint(self, text, code):
        return "\033[%sm%s\033[0m" % (code, text) if self.color else text

    def progress(self, text):
        if self.live:
            sys.stderr.write("\r\033[K" + text)
            sys.stderr.flush()


def can_save(command):
    """Whether this build has checksums, without which the library saves nothing."""
    told = subprocess.run([command, "info", "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return any(p["name"] == "xxHash" and p["present"] for p in json.loads(told.stdout)["parts"])


class Scene:
    """A model, a document, and what is asked: [(question, answer)]."""

    def __init__(self, folder, model, text, asked, answer_tokens):
        self.model, self.asked, self.answer_tokens = model, asked, answer_tokens
        self.folder = folder
        os.makedirs(folder, exist_ok=True)
        self.document = self.save("document.txt", text)
        self.questions = self.save("questions.txt", "".join(q + "\n" for q, _ in asked))
        self.saved = os.path.join(folder, "document.kvs")

    def save(self, name, text):
        write(os.path.join(self.folder, name), text)
        return os.path.join(self.folder, name)

    def run(self, args, method):
        """(answers, statistics) of one run of the command."""
        stats = os.path.join(self.folder, method + ".json")
        document = ["--prompt-file", self.document]
        if args.can_save and method not in READ_AGAIN:
            document = ["--load", self.saved, "--reselect"] if os.path.exists(self.saved) \
                else [*document, "--save", self.saved]
        command = [args.kvferry, "run", "--model", self.model, *document,
                   "--ask", self.questions, "-n", str(self.answer_tokens), *METHODS[method],
                   "--budget", str(args.budget), "--transfer", args.transfer, "--stats", stats]
        run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        if run.returncode != 0:
            sys.stderr.write("\n%s\n%s" % (" ".join(command), run.stderr))
            sys.exit("demo: kvferry ended with status %d" % run.returncode)
        return run.stdout.splitlines(), json.loads(read(stats))


def real_scene(folder):
    """FileNotFoundError: the model or the manual is not to be had."""
    model = real_model.fetch()
    document = eval_texts.documents(REAL_DOCUMENT + 1)[REAL_DOCUMENT]
    tasks = [t for t in document.tasks if t.kind in ("number", "facts")]
    return Scene(folder, model, document.text, [(t.text, t.answer) for t in tasks],
                 max(t.tokens for t in tasks))


def recall_scene(folder, tokens, questions, seed):
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([sys.executable, os.path.join(RECALL, "generate.py"), "document",
                        "--tokens", str(tokens), "--questions", str(questions),
                        "--seed", str(seed), "--out", made], check=True)
        asked = [(q["question"], q["answer"]) for q in json.loads(read(os.path.join(made, "questions.json")))]
        text = read(os.path.join(made, "document.txt"))
    return Scene(folder, os.path.join(RECALL, "model"), text, asked, 2)


def human_bytes(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return "%.0f %s" % (count, unit) if unit == "B" else "%.1f %s" % (count, unit)
        count /= 1024.0


def row_of(method, right, stats, full_ms):
    tokens = stats["decoded_tokens"]
    chosen = stats["hits"] + stats["misses"]
    ms = stats["tpot_ms"]["p50"]
    return [
        method,
        str(right),
        "{:,.0f}".format(stats["tokens_attended_per_head_step"]),
        "{:,.1f}".format(stats["misses"] / tokens),
        human_bytes(stats["bytes_moved"] / tokens),
        "%.0f%%" % (100.0 * stats["hits"] / chosen) if chosen else "-",
        "%.2f" % ms,
        "%.1fx" % (full_ms / ms) if full_ms else "1.0x",
    ]


def table(screen, rows, questions):
    """The rows as text, right-aligned numbers under two lines of titles."""
    heads = [[c[0] for c in COLUMNS], [c[1].format(questions=questions) for c in COLUMNS]]
    widths = [max(len(line[i]) for line in heads + rows) for i in range(len(COLUMNS))]
    side, cross = ("│", "─┼─") if screen.boxes else ("|", "-+-")
    rule = cross.join((cross[0] * w) for w in widths)

    def line(cells):
        return (" %s " % side).join(
            "{:{}{}}".format(cell, COLUMNS[i][2], widths[i]) for i, cell in enumerate(cells))

    lines = ["  " + screen.paint(line(h), "1") for h in heads]
    lines.append("  " + rule)
    for row in rows:
        text = line(row)
        if int(row[1]) + 1 >= int(rows[0][1]):
            text = screen.paint(text, "32")
        elif 2 * int(row[1]) < questions:
            text = screen.paint(text, "31")
        lines.append("  " + text)
    return "\n".join(lines)


def play(args, screen, scene, methods):
    """Ask by every method; print a question that the whole cache answers, and the table."""
    rows, answers_of, full_ms, shown = [], {}, None, 0
    for number, method in enumerate(methods, 1):
        screen.progress("  %d/%d  %s: reading the document, answering ..."
                        % (number, len(methods), method))
        answers, stats = scene.run(args, method)
        answers_of[method] = answers
        right = [is_answer(a, wanted) for a, (_, wanted) in zip(answers, scene.asked)]
        shown = right.index(True) if method == "full" and any(right) else shown
        rows.append(row_of(method, sum(right), stats, full_ms))
        full_ms = full_ms or stats["tpot_ms"]["p50"]
    screen.progress("")
    print("\n  %s ... %s" % (scene.asked[shown][0], screen.paint(scene.asked[shown][1], "1")))
    for method in ("full", "codes", "streaming"):
        print("    %-10s %s" % (method, answers_of[method][shown].strip()))
    print("\n" + table(screen, rows, len(scene.asked)) + "\n")


def demo(args, screen, folder):
    begin = time.monotonic()
    try:
        real = None if args.recall_only else real_scene(os.path.join(folder, "real"))
    except FileNotFoundError as missing:
        print("The recall model alone is asked, for there is no real one here: %s.\n" % missing)
        real = None
    if real:
        print("%s, a real language model, reads a manual of Perl with {} numbers\nbetween its "
              "paragraphs; {} are asked for. Budget: {:,} tokens.".format(
                  len(real.asked), len(real.asked), args.budget) % real_model.NAME)
        play(args, screen, real, REAL_METHODS)
    recall = recall_scene(os.path.join(folder, "recall"), args.tokens, args.questions, args.seed)
    print("The recall model, trained for such questions only, reads {:,} tokens that hide {} facts;\n"
          "{} are asked for. Budget: {:,} tokens.".format(
              args.tokens, 32, len(recall.asked), args.budget))
    play(args, screen, recall, METHODS)
    print("attended: tokens per KV head and step, sink and window included. fetched, moved: brought to\n"
          "the device per token, over all layers and heads, with --transfer %s. hit rate: chosen\n"
          "pages that were there already; a question starts with what the document left there.\n"
          "ms: the median."
          % args.transfer)
    print("Took %.0f s." % (time.monotonic() - begin))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--recall-only", action="store_true", help="no real model, no network")
    parser.add_argument("--tokens", type=int, default=16384,
                        help="length of the recall model's document")
    parser.add_argument("--questions", type=int, default=20, help="of the recall model")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--transfer", default="gather", choices=["gather", "each", "direct"])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep", metavar="FOLDER", help="keep documents, questions, statistics")
    args = parser.parse_args()
    args.can_save = can_save(args.kvferry)
    screen = Screen()
    folder = args.keep or tempfile.mkdtemp(prefix="kvferry-demo-")
    try:
        demo(args, screen, folder)
    finally:
        if not args.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
