#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Text for learning a head mask of the recall model: documents with questions, and recitals.

  recall_text.py --documents 48 --tokens 1024 --seed 1 --out DIR

Writes DIR/000.txt, 001.txt, ... of exactly --tokens words each, which are tokens of that model. Two
of three are a document that is followed by questions and their answers; every third is a passage
that is followed by its recital.
"""
import argparse
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "recall"))
import generate as gen  # noqa: E402

FACTS = 16
ASKED = 16


def document(rng, tokens):
    asked_words = ASKED * (len(gen.question_words("abcd")) + gen.ANSWER_WORDS + 1)
    words, facts, _ = gen.make_document(rng, tokens - asked_words, FACTS)
    for fact in rng.sample(facts, ASKED):
        words += gen.question_words(fact) + [fact[2], fact[3], "."]
    return words


def recital(rng, tokens):
    prompt, expected = gen.make_recital(rng, tokens // 2)
    return (prompt + expected)[:tokens]


def text_of(index, args):
    words = (recital if index % 3 == 2 else document)(gen.Rng(args.seed * 1000003 + index), args.tokens)
    if len(words) != args.tokens:
        raise ValueError("--tokens %d does not work out; take an even number" % args.tokens)
    return " ".join(words) + "\n"


def main(about, make, documents, tokens):
    """Write make(index, args) for each document; so many of so many tokens, unless options say otherwise."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--documents", type=int, default=documents)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True, help="folder to write to")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    for i in range(args.documents):
        try:
            gen.write(args.out, "%03d.txt" % i, make(i, args))
        except ValueError as why:
            parser.error(str(why))


if __name__ == "__main__":
    main(__doc__, text_of, 48, 1024)
