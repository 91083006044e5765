#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo: facts hidden in a long document, asked for under every selection method.

Makes a document and questions with examples/recall/generate.py, runs the kvferry command once per
method (one prefill, then every question on a fork of the document's sequence), compares the answers
with the expected ones, and prints a table. Everything in it comes from this run: answers from the
command's standard output, figures from its --stats file.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RECALL = os.path.join(ROOT, "examples", "recall")
# Name in the table, and what the command is given besides the budget.
METHODS = [
    ("full", ["--select", "full"]),
    ("codes", []),
    ("boxes", ["--preset", "prkv"]),
    ("static", ["--select", "static"]),
    ("streaming", ["--select", "streaming"]),
]
ANSWER_TOKENS = 2
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


def generate(folder, tokens, questions, seed):
    """The document's path, and [(question, answer)]."""
    subprocess.run([sys.executable, os.path.join(RECALL, "generate.py"), "document",
                    "--tokens", str(tokens), "--questions", str(questions), "--seed", str(seed),
                    "--out", folder], check=True)
    with open(os.path.join(folder, "questions.json"), encoding="utf-8") as f:
        asked = [(q["question"], q["answer"]) for q in json.load(f)]
    with open(os.path.join(folder, "questions.txt"), "w", encoding="utf-8") as f:
        f.writelines(question + "\n" for question, _ in asked)
    return os.path.join(folder, "document.txt"), asked


def run_method(args, method, settings, document, folder):
    """(answers, statistics, seconds) of one run of the command."""
    stats = os.path.join(folder, method + ".json")
    command = [args.kvferry, "run", "--model", os.path.join(RECALL, "model"),
               "--prompt-file", document, "--ask", os.path.join(folder, "questions.txt"),
               "-n", str(ANSWER_TOKENS), *settings, "--budget", str(args.budget),
               "--transfer", args.transfer, "--stats", stats]
    begin = time.monotonic()
    run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.stderr.write("\n%s\n%s" % (" ".join(command), run.stderr))
        sys.exit("demo: kvferry ended with status %d" % run.returncode)
    with open(stats, encoding="utf-8") as f:
        return run.stdout.splitlines(), json.load(f), time.monotonic() - begin


def human_bytes(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return "%.0f %s" % (count, unit) if unit == "B" else "%.1f %s" % (count, unit)
        count /= 1024.0


def row_of(method, right, stats, full_ms):
    steps = stats["decode_steps"]
    chosen = stats["hits"] + stats["misses"]
    ms = stats["tpot_ms"]["p50"]
    return [
        method,
        str(right),
        "{:,.0f}".format(stats["tokens_attended_per_head_step"]),
        "{:,.1f}".format(stats["misses"] / steps),
        human_bytes(stats["bytes_moved"] / steps),
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--tokens", type=int, default=16384, help="length of the document")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--transfer", default="gather", choices=["gather", "each", "direct"])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep", metavar="FOLDER", help="keep document, questions, statistics")
    args = parser.parse_args()
    screen = Screen()
    folder = args.keep or tempfile.mkdtemp(prefix="kvferry-demo-")
    os.makedirs(folder, exist_ok=True)
    try:
        demo(args, screen, folder)
    finally:
        if not args.keep:
            shutil.rmtree(folder)


def demo(args, screen, folder):
    begin = time.monotonic()
    document, asked = generate(folder, args.tokens, args.questions, args.seed)
    print("A document of {:,} tokens hides {} facts; {} are asked for. Budget: {:,} tokens.".format(
        args.tokens, 32, len(asked), args.budget))
    rows, answers_of, full_ms = [], {}, None
    for number, (method, settings) in enumerate(METHODS, 1):
        screen.progress("  %d/%d  %s: reading the document, answering ..."
                        % (number, len(METHODS), method))
        answers, stats, _ = run_method(args, method, settings, document, folder)
        answers_of[method] = answers
        right = sum(given.strip() == answer
                    for given, (_, answer) in zip(answers, asked))
        rows.append(row_of(method, right, stats, full_ms))
        full_ms = full_ms or stats["tpot_ms"]["p50"]
    screen.progress("")
    print("\n  %s ... %s" % (asked[0][0], screen.paint(asked[0][1], "1")))
    for method in ("codes", "streaming"):
        given = answers_of[method][0].strip() if answers_of[method] else ""
        print("    %-10s %s" % (method, given))
    print("\n" + table(screen, rows, len(asked)) + "\n")
    print("attended: tokens per KV head and step, sink and window included. fetched, moved: brought to\n"
          "the device per token, over all layers and heads, with --transfer %s. hit rate: chosen\n"
          "pages that were there already; a question starts with what the document's last token\n"
          "left there. ms: the median."
          % args.transfer)
    print("Took %.0f s." % (time.monotonic() - begin))


if __name__ == "__main__":
    main()
