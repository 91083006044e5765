#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`kvferry score` on the recall model against the logits of a run that drew the text.

usage: check_score.py KVFERRY RECALL_MODEL

A run draws tokens and writes the logits of each; scored as the text that follows the same prompt under
the same selection, a token has the loss that follows from these. That logits are those of the model,
densely and under each selection, other tests show (test_logits.c, test_select.c).
"""
import json
import os
import sys
import tempfile

import numpy as np

from checks import check, ended, output, read, write

KVFERRY, MODEL = sys.argv[1], sys.argv[2]
DRAWN = 60


def command(name, *options):
    """Standard output."""
    return output(KVFERRY, name, "--model", MODEL, "--device", "host", *options)


def draw(vocabulary, *options):
    """(words, losses, whether each is the likeliest) of tokens that a run drew."""
    command("run", "--prompt-file", "prompt", "-n", str(DRAWN), "--temperature", "2", "--top-k", "20",
            "--seed", "3", "--ignore-eos", "--emit-ids", "ids", "--dump-logits", "logits", *options)
    ids = np.loadtxt("ids", dtype=int)
    logits = np.fromfile("logits", np.float32).reshape(len(ids), -1).astype(np.float64)
    top = logits.max(-1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return ([vocabulary[i] for i in ids], total - logits[np.arange(len(ids)), ids],
            logits.argmax(-1) == ids)


def score(text, *options):
    """(losses of all tokens, whether each is the likeliest)."""
    write("text", " ".join(text))
    result = json.loads(command("score", "--prompt-file", "prompt", "--text", "text", "--stats", "stats", *options))
    told = json.loads(read("stats"))
    check("one figure in both", result["loss"] == told["loss"])
    check("as many losses as tokens",
          len(told["tokens"]) == len(text) == result["scored_tokens"] == told["scored_tokens"])
    of_tokens = np.array([t["loss"] for t in told["tokens"]])
    check("the loss is the mean", abs(of_tokens.mean() - result["loss"]) < 1e-6)
    check("tokens are the text", [t["text"].strip() for t in told["tokens"]] == text)
    check("counters are of the text alone", result["decoded_tokens"] == len(text) - 1)
    check("every token but the first has its share of a step's time",
          told["decode_steps"] == len(text) - 1 and told["tpot_ms"]["p50"] > 0)
    return of_tokens, np.array([t["likeliest"] for t in told["tokens"]])


def score_answer(ids):
    """Losses of a finished answer to the prompt, which is read densely."""
    write("answers", json.dumps({"id": 1, "ids": ids}))
    return -np.array(json.loads(command("score", "--prompt-file", "prompt", "--answers", "answers",
                                        "--logprobs", "0"))["logprobs"])


def main():
    vocab = json.loads(read(os.path.join(MODEL, "tokenizer.json")))["model"]["vocab"]
    words = sorted(vocab, key=vocab.get)
    rng = np.random.Generator(np.random.PCG64(7))
    write("prompt", " ".join(words[i] for i in rng.integers(3, len(words), size=300)))
    of_selection = {}
    for options in (("--select", "full"), ("--select", "streaming", "--budget", "160", "--page-size", "32")):
        text, losses, is_likeliest = draw(words, *options)
        of_text, likeliest = score(text, *options)
        print("%s: %.4f, of logits %.4f, largest difference %.1e" % (
            options[1], of_text.mean(), losses.mean(), abs(of_text - losses).max()))
        check("losses are those of the logits, %s" % (options,), abs(of_text - losses).max() < 1e-5)
        check("and the likeliest tokens, %s" % (options,),
              0 < likeliest.sum() < len(text) and (likeliest == is_likeliest).all())
        of_selection[options[1]] = text, of_text
    text, full = of_selection["full"]
    check("an answer is scored as the text that it is",
          abs(score_answer([vocab[word] for word in text]) - full).max() < 1e-5)
    gather, _ = score(text, "--select", "full", "--transfer", "gather")
    check("a transfer changes no bit", (gather == full).all())
    large, _ = score(text, "--select", "dynamic", "--budget", "1024")
    check("a budget that holds all is full", abs(large - full).max() < 2e-3)
    few, _ = score(text, "--select", "streaming", "--budget", "160", "--page-size", "32")
    check("the first token follows from dense attention", few[0] == full[0])
    check("streaming is not full", abs(few - full).max() > 0.1)
    return ended()


if __name__ == "__main__":
    KVFERRY, MODEL = os.path.abspath(KVFERRY), os.path.abspath(MODEL)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        ENDED = main()
        os.chdir("/")
    sys.exit(ENDED)
