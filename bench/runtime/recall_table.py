#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention recall of the recall model by method and budget, and what the answers are worth.

Makes one long document with examples/recall/generate.py, runs the kvferry command over methods and
budgets with `--verify dense:N`, and writes recall.md and, not for the repository, every figure in
recall.json to bench/results/. Recall is the share of dense attention on the tokens that a method attended to, mean
over query heads, layers and verified steps, as the command's --stats file reports it.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
from results_folder import RESULTS, machine, save  # noqa: E402

RECALL = os.path.join(ROOT, "examples", "recall")
METHODS = ["full", "hybrid", "dynamic", "static", "streaming", "quest", "arkvale", "oracle"]
BUDGETS = [256, 512, 1024, 2048, 4096]


def generate(folder, args):
    """Paths of the document and of the questions, and the expected answers."""
    subprocess.run([sys.executable, os.path.join(RECALL, "generate.py"), "document",
                    "--tokens", str(args.tokens), "--questions", str(args.questions),
                    "--seed", str(args.seed), "--out", folder], check=True)
    with open(os.path.join(folder, "questions.json"), encoding="utf-8") as f:
        asked = json.load(f)
    questions = os.path.join(folder, "questions.txt")
    with open(questions, "w", encoding="utf-8") as f:
        f.writelines(q["question"] + "\n" for q in asked)
    return os.path.join(folder, "document.txt"), questions, [q["answer"] for q in asked]


def run(args, folder, paths, method, budget):
    """One row: method, budget, recall, answers right, and the figures of the run."""
    document, questions, answers = paths
    stats_path = os.path.join(folder, "stats.json")
    command = [args.kvferry, "run", "--model", args.model, "--prompt-file", document,
               "--ask", questions, "-n", str(args.generate), "--select", method,
               "--verify", "dense:%d" % args.every, "--stats", stats_path]
    if method != "full":
        command += ["--budget", str(budget)]
    begin = time.monotonic()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("%s\n%s\nkvferry ended with status %d" % (" ".join(command), done.stderr,
                                                            done.returncode))
    with open(stats_path, encoding="utf-8") as f:
        stats = json.load(f)
    # An answer is the first words of what was generated for its question.
    right = sum(given.split()[:len(answer.split())] == answer.split()
                for given, answer in zip(done.stdout.splitlines(), answers))
    return {"method": method, "budget": None if method == "full" else budget,
            "recall": stats["attention_recall"], "right": right, "questions": len(answers),
            "tokens_attended": stats.get("tokens_attended_per_head_step"),
            "hits": stats["hits"], "misses": stats["misses"], "bytes_moved": stats["bytes_moved"],
            "tpot_ms_p50": stats["tpot_ms"]["p50"], "seconds": round(time.monotonic() - begin, 1),
            "command": " ".join(os.path.basename(c) if os.path.isabs(c) else c for c in command)}


def markdown(args, rows):
    by = {(r["method"], r["budget"]): r for r in rows}
    full = by.get(("full", None))
    lines = ["# Attention recall of the recall model", "",
             "A document of {:,} tokens (seed {}), {} questions, each on a fork of the document; every "
             "{} decode step is compared with dense attention. Share of dense attention that falls on "
             "the attended tokens, mean over query heads, layers and steps; behind it the answers "
             "that were right.".format(args.tokens, args.seed, args.questions,
                                       "" if args.every == 1 else "%d-th" % args.every).replace(
                                           "every  decode", "every decode"), ""]
    budgets = sorted({r["budget"] for r in rows if r["budget"]})
    lines.append("| method | " + " | ".join("budget %d" % b for b in budgets) + " |")
    lines.append("|---|" + "---:|" * len(budgets))
    for method in args.methods:
        if method == "full":
            continue
        cells = []
        for b in budgets:
            r = by.get((method, b))
            cells.append("%.4f (%d)" % (r["recall"], r["right"]) if r else "-")
        lines.append("| %s | %s |" % (method, " | ".join(cells)))
    if full:
        lines += ["", "Full attention: %d of %d answers right." % (full["right"],
                                                                   full["questions"])]
    lines += ["", "Machine: %s. Made with `bench/runtime/recall_table.py %s`." % (
        machine(), " ".join(args.given)), ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--model", default=os.path.join(RECALL, "model"))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--generate", type=int, default=2, help="tokens after each question")
    parser.add_argument("--every", type=int, default=1, help="verify every N-th step")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", default=RESULTS)
    args = parser.parse_args()
    given = sys.argv[1:]
    args.given = [os.path.basename(a) if os.path.isabs(a) else a for a in given]
    folder = tempfile.mkdtemp(prefix="kvferry-recall-")
    rows = []
    try:
        paths = generate(folder, args)
        for method in args.methods:
            for budget in args.budgets if method != "full" else [None]:
                rows.append(run(args, folder, paths, method, budget))
                r = rows[-1]
                print("%-10s %6s  recall %.4f  right %d of %d  %.1f s" % (
                    method, budget or "-", r["recall"], r["right"], r["questions"], r["seconds"]),
                    file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    save(args.out, "recall", markdown(args, rows),
         {"bench": "recall", "machine": machine(), "tokens": args.tokens,
          "questions": args.questions, "seed": args.seed, "verify_every": args.every,
          "command": " ".join(["recall_table.py"] + args.given), "rows": rows})
    print(markdown(args, rows))


if __name__ == "__main__":
    main()
