#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""examples/train_mask with a few steps on the recall model: the gates are what attention is, the mask
has the share that was asked for, the same seed gives it again, and the command takes it.

usage: check_train_mask.py KVFERRY EXAMPLES (needs torch and transformers)
"""
import glob
import json
import os
import re
import subprocess
import sys
import tempfile

TOKENS, LAYERS, HEADS = 512, 4, 2


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("%s: %s" % (" ".join(command), done.stderr))
    return done.stdout


def train(examples, texts, mask, *options):
    """(mask, held-out loss by name)"""
    said = run(sys.executable, os.path.join(examples, "train_mask", "train_mask.py"), "--model",
               os.path.join(examples, "recall", "model"), "--text", *texts, "--out", mask, "--sink",
               "4", "--recent", "64", "--length", str(TOKENS), "--hold-out", "2", "--threads", "1",
               "--tail", "160", *options)
    with open(mask, encoding="utf-8") as f:
        rows = [[int(z) for z in line.split("\t")] for line in f.read().splitlines()]
    return rows, {name: float(loss) for name, loss in
                  re.findall(r"held-out loss, ([^:]+): +(\S+)", said)}


def main():
    kvferry, examples = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, os.path.join(examples, "train_mask", "recall_text.py"), "--documents",
            "5", "--tokens", str(TOKENS), "--out", folder)
        texts = sorted(glob.glob(os.path.join(folder, "*.txt")))
        mask = os.path.join(folder, "mask.tsv")
        options = ("--steps", "3", "--rate", "0.5", "--sparsity", "0.25")
        rows, loss = train(examples, texts, mask, *options)
        assert [len(row) for row in rows] == [HEADS] * LAYERS, rows
        assert sum(map(sum, rows)) == LAYERS * HEADS * 3 // 4, rows
        assert set(loss) == {"all heads", "mask", "its opposite", "no head"}, loss
        # This model looks facts up far away, so it needs heads that do.
        assert loss["all heads"] + 1 < loss["no head"], loss
        assert (rows, loss) == train(examples, texts, mask, *options), "a seed repeats"
        stats = os.path.join(folder, "stats.json")
        run(kvferry, "run", "--model", os.path.join(examples, "recall", "model"), "--prompt",
            "quiet river", "-n", "2", "--head-mask", mask, "--stats", stats)
        with open(stats, encoding="utf-8") as f:
            told = json.load(f)["head_mask"]
        assert told["streaming_heads"] == LAYERS * HEADS // 4, told
    print("a mask of %s, losses %s" % (rows, loss))


if __name__ == "__main__":
    main()
