#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Text for learning a head mask of the real language model of `./dev eval`.

  real_text.py --documents 64 --tokens 700 --seed 1 --out DIR

Writes DIR/000.txt, 001.txt, ...: prose, then a document with hidden lines as that of the evaluation
(tools/eval_texts.py), then its questions with their answers. `train_mask.py --last` takes the end
of each. The manual that the table of prune policies asks about is left out, and seeds are others.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
import eval_texts  # noqa: E402
import recall_text  # noqa: E402

LEAD_CHARS = 4000  # in front of the document: --last cuts it


def text_of(index, args):
    manuals = eval_texts.MANUALS[1:]
    d = eval_texts.Document(manuals[index % len(manuals)], args.tokens,
                            args.seed * 1000003 + index, LEAD_CHARS)
    asked = [t for t in d.tasks if t.tokens]
    order = eval_texts.Random(args.seed + index).shuffled(asked)
    lead = d.tasks[-1].text
    return lead + "\n\n" + d.text + "".join("%s %s.\n\n" % (t.text, t.answer) for t in order)


if __name__ == "__main__":
    recall_text.main(__doc__, text_of, 64, 700)
