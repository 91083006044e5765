#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`kvferry run --draft` from outside: the ids are those without drafts, greedy or drawn, under every
selection that can take tokens back; what drafts were worth is told.

usage: check_draft.py KVFERRY RECALL_MODEL
"""
import json
import sys

from chat_model import DRAWS, FACT, SELECTION, run_checks

PROMPTS = (FACT * 40 + "question the code of", "quiet river quiet river quiet", "the")
DRAWS += ("--seed", "4")


def ids_of(chat, *options):
    """(ids, statistics)."""
    return chat.answer(*SELECTION, "--ignore-eos", *options)[1:]


def check_same(chat):
    chat.write()
    accepted = 0
    for prompt in PROMPTS:
        for options in ((), DRAWS, ("--select", "full"), ("--select", "quest"),
                        ("--select", "hybrid", "--static-ratio", "0", "--digest", "minmax"),
                        ("--transfer", "gather"),
                        ("--threads", "1", "--prune", "snapkv")):
            if "--prune" in options and prompt != PROMPTS[0]:  # shorter than its window
                continue
            one, plain = ids_of(chat, "--prompt", prompt, "-n", "50", *options)
            chat.check("without drafts nothing is told of them", "drafted_tokens" not in plain)
            for draft in ("ngram", "ngram:1", "ngram:15"):
                got, told = ids_of(chat, "--prompt", prompt, "-n", "50", "--draft", draft, *options)
                chat.check("%s gives the same ids with %s, %s" % (draft, prompt[-20:], options),
                           got == one and len(one) == 50, got, one)
                chat.check("figures agree with %s, %s" % (draft, options),
                           0 <= told["accepted_tokens"] <= told["drafted_tokens"] and
                           told["decode_steps"] + told["accepted_tokens"] == plain["decode_steps"],
                           told["decode_steps"], plain["decode_steps"], told["accepted_tokens"])
                accepted += told["accepted_tokens"]
    chat.check("drafts are right at times", accepted > 100, accepted)


def check_questions(chat):
    ask = chat.save("ask.txt", "question the code of alice\nthe code of\nquestion the code of alice\n")
    options = ("--prompt", FACT * 40, "--ask", ask, "-n", "20")
    one, plain = ids_of(chat, *options)
    got, told = ids_of(chat, *options, "--draft", "ngram")
    chat.check("questions have the same answers", got == one and len(one) == 60, got, one)
    chat.check("drafts help", 0 < told["accepted_tokens"] and
               told["decode_steps"] < plain["decode_steps"], told["accepted_tokens"])


def answers_of(chat, *options):
    """({(prompt, sample): ids}, statistics) of a batch."""
    lines, told, _ = chat.answers(*SELECTION, "--ignore-eos", *options)
    return {name: line["ids"] for name, line in lines.items()}, told


def check_batches(chat):
    """Answers beside each other are those without drafts; a step has 16 tokens of them in all."""
    jobs = [{"prompt": p, "tokens": n} for p, n in zip(PROMPTS * 2, (50, 20, 9, 31, 50, 1))]
    path = chat.save_lines("p.jsonl", jobs)
    for options in (("--prompts", path), ("--prompts", path, "--select", "quest", "--threads", "1"),
                    ("--prompt", PROMPTS[0], "-n", "40", "--samples", "5", *DRAWS),
                    ("--prompt", PROMPTS[0], "-n", "40", "--samples", "2", "--prune", "snapkv")):
        wanted, plain = answers_of(chat, *options, "--batch", "4")
        for draft, batch in (("ngram", 1), ("ngram", 3), ("ngram:2", 4), ("ngram", 16)):
            got, told = answers_of(chat, *options, "--draft", draft, "--batch", str(batch))
            name = "%s, %s, --batch %d" % (options[0::2], draft, batch)
            chat.check("same answers: " + name, got == wanted and len(got) > 1, got, wanted)
            chat.check("drafts are told of: " + name,
                       0 < told["accepted_tokens"] <= told["drafted_tokens"] and
                       told["decoded_tokens"] == plain["decoded_tokens"] + told["drafted_tokens"] -
                       told["accepted_tokens"], told["drafted_tokens"], told["accepted_tokens"],
                       told["decoded_tokens"], plain["decoded_tokens"])
            if batch == 4:
                chat.check("fewer steps: " + name, told["decode_steps"] < plain["decode_steps"],
                           told["decode_steps"], plain["decode_steps"])
    out, _ = chat.run(*SELECTION, "--ignore-eos", "--prompts", path, "--draft", "ngram", "--logprobs",
                      "1", "--batch", "3")
    wanted, _ = chat.run(*SELECTION, "--ignore-eos", "--prompts", path, "--logprobs", "1", "--batch", "3")
    values = [[line[key] for key in line if key not in ("ms", "ttft_ms")]
              for text in (out, wanted) for line in sorted(map(json.loads, text.splitlines()),
                                                           key=lambda line: line["id"])]
    chat.check("log-probabilities too", values[:len(jobs)] == values[len(jobs):] and
               len(values) == 2 * len(jobs), values[0], values[len(jobs)])


if __name__ == "__main__":
    sys.exit(run_checks(check_same, check_questions, check_batches))
