#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The worth of a head mask on the recall model, against its opposite and masks drawn at random.

  evaluate_mask.py --kvferry build/runner/cli/kvferry --mask recall_mask.tsv

Runs `kvferry run --ask` on documents of ../recall/generate.py with full attention in the heads that
the mask keeps, and prints how many questions each mask answers.
"""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
RECALL = os.path.join(HERE, "..", "recall")


def read_mask(path):
    with open(path, encoding="utf-8") as f:
        return [[int(z) for z in line.split("\t")] for line in f.read().splitlines()]


def write_mask(folder, mask):
    path = os.path.join(folder, "mask.tsv")
    with open(path, "w", encoding="utf-8") as f:
        f.writelines("\t".join(map(str, row)) + "\n" for row in mask)
    return path


def reshape(flat, like):
    columns = len(like[0])
    return [flat[i:i + columns] for i in range(0, len(flat), columns)]


def masks_of(learnt, count, seed):
    """(name, mask): learnt, opposite, random ones with as many heads, all and none."""
    flat = [z for row in learnt for z in row]
    masks = [("learnt", learnt), ("opposite", reshape([1 - z for z in flat], learnt))]
    draw = random.Random(seed)
    seen = {tuple(flat)}
    while len(masks) < 2 + count:
        draw.shuffle(flat)
        if tuple(flat) not in seen:
            seen.add(tuple(flat))
            masks.append(("random %d" % (len(masks) - 1), reshape(list(flat), learnt)))
    return masks + [("all heads", reshape([1] * len(flat), learnt)),
                    ("no head", reshape([0] * len(flat), learnt))]


def document(folder, args, seed):
    """Options of the run, and the answers."""
    subprocess.run([sys.executable, os.path.join(RECALL, "generate.py"), "document", "--tokens",
                    str(args.tokens), "--questions", str(args.questions), "--seed", str(seed),
                    "--out", folder], check=True)
    with open(os.path.join(folder, "questions.json"), encoding="utf-8") as f:
        asked = json.load(f)
    questions = os.path.join(folder, "questions.txt")
    with open(questions, "w", encoding="utf-8") as f:
        f.writelines(q["question"] + "\n" for q in asked)
    return (["--prompt-file", os.path.join(folder, "document.txt"), "--ask", questions],
            [q["answer"].split() for q in asked])


def right(args, mask_path, text, answers):
    command = [args.kvferry, "run", "--model", args.model, "--head-mask", mask_path,
               "--streaming-sink", str(args.sink), "--streaming-recent", str(args.recent),
               "--select", "full", "-n", "2"] + text
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("%s\n%s" % (" ".join(command), done.stderr))
    return sum(given.split()[:2] == answer
               for given, answer in zip(done.stdout.splitlines(), answers))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--mask", required=True)
    parser.add_argument("--model", default=os.path.join(RECALL, "model"))
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--recent", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--questions", type=int, default=20, help="per document")
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7, help="of the first document")
    parser.add_argument("--random", type=int, default=5, help="masks drawn at random")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="kvferry-mask-")
    learnt = read_mask(args.mask)
    total = {}
    try:
        for seed in range(args.seed, args.seed + args.documents):
            text, answers = document(folder, args, seed)
            for name, mask in masks_of(learnt, args.random, args.seed):
                got = right(args, write_mask(folder, mask), text, answers)
                total[name] = (mask, total.get(name, (mask, 0))[1] + got)
    finally:
        shutil.rmtree(folder)
    asked = args.documents * args.questions
    print("| mask | rows | right of %d |\n|---|---|---:|" % asked)
    for name, (mask, got) in total.items():
        rows = " ".join("".join(map(str, row)) for row in mask)
        print("| %s | `%s` | %d |" % (name, rows, got))


if __name__ == "__main__":
    main()
