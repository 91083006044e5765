#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`--extend` from outside: tokens after a saved prompt are read as the steps that a question is, or
as a prompt; both ways give the same where everything is attended.

usage: check_extend.py KVFERRY RECALL_MODEL
"""
import json
import sys

from chat_model import SELECTION, run_checks

DOCUMENT = "the code of alice brown is seven tiger . quiet river guards heavy lantern . " * 25
QUESTION = "heavy lantern guards quiet river . " * 5 + "question the code of alice"
SELECTION += ("-n", "20", "--ignore-eos")


def ids_of(chat, *options):
    """(ids, statistics)."""
    return chat.answer(*SELECTION, *options)[1:]


def check_loaded(chat):
    chat.write()
    ask, saved = chat.save("ask.txt", QUESTION + "\n" + QUESTION[:12] + "\n"), chat.folder + "/saved"
    ids_of(chat, "--prompt", DOCUMENT, "--save", saved)
    for options in ((), ("--select", "hybrid"), ("--digest", "minmax"), ("--threads", "1")):
        if options:
            ids_of(chat, "--prompt", DOCUMENT, "--save", saved, *options)
        asked, told = ids_of(chat, "--prompt", DOCUMENT, "--ask", ask, *options)
        chat.check("a step of several given tokens is none of an answer's, %s" % (options,),
                   told["questions"][0]["prompt_tokens"] > 32 and told["decode_steps"] < 50, told)
        chat.check("each token that a step had is counted, %s" % (options,),
                   all(q["decoded_tokens"] == q["prompt_tokens"] + 19 for q in told["questions"]), told)
        chat.check("a static set is chosen once for all questions, %s" % (options,),
                   told["refreshes"] == (4 if "hybrid" in options else 0), told)
        rest = ("--load", saved, "--prompt", DOCUMENT + " " + QUESTION)
        # A static set is chosen where the document ends only if questions are known to follow it.
        loaded = rest if "hybrid" not in options else ("--load", saved, "--prompt", DOCUMENT, "--ask", ask)
        sparse, told = ids_of(chat, *loaded, "--extend", "sparse", *options)
        chat.check("what is loaded goes on as it does after a question, %s" % (options,),
                   sparse[:20] == asked[:20] and told["loaded_tokens"] > 300, sparse, asked, told)
        dense, _ = ids_of(chat, *rest, *options)
        other, _ = ids_of(chat, *rest, "--extend", "dense", *options)
        chat.check("densely is the default after --load", dense == other, dense, other)
    full = ("--select", "full", "--ask", ask, "--prompt", DOCUMENT)
    chat.check("everything attended, both ways are the same", ids_of(chat, *full)[0] ==
               ids_of(chat, *full, "--extend", "dense")[0])


def check_reselected(chat):
    """A prompt that was saved under one selection goes on under another as if read under it."""
    chat.write()
    ask, saved = chat.save("ask.txt", QUESTION + "\n" + QUESTION[:12] + "\n"), chat.folder + "/full"
    ids_of(chat, "--prompt", DOCUMENT, "--save", saved, "--select", "full")
    _, told = chat.run(*SELECTION, "--load", saved, "--ask", ask, status=1)
    chat.check("other settings are refused by name, with what to do", "select" in told and
               "--reselect" in told, told)
    for options in ((), ("--page-size", "32", "--digest", "minmax"), ("--select", "streaming")):
        read, _ = ids_of(chat, "--prompt", DOCUMENT, "--ask", ask, *options)
        loaded, told = ids_of(chat, "--load", saved, "--reselect", "--ask", ask, *options)
        chat.check("--reselect is as reading, %s" % (options,), read == loaded and
                   told["loaded_tokens"] > 300 and told["prefilled_tokens"] == 1, read, loaded, told)


def check_questions(chat):
    """Questions as JSON may have line breaks; how many tokens prompts have is told without a step."""
    chat.write()
    questions = (QUESTION, QUESTION[:12])
    plain = chat.save("ask.txt", "".join(q + "\n" for q in questions))
    lines = chat.save_lines("ask.jsonl", [{"prompt": q} for q in questions])
    document = ("--prompt", DOCUMENT)
    asked = ids_of(chat, *document, "--ask", plain)[0]
    chat.check("questions as JSON", asked == ids_of(chat, *document, "--ask", lines)[0])
    broken = chat.save_lines("broken.jsonl", [{"prompt": QUESTION.replace(". ", ".\n")}])
    _, told = ids_of(chat, *document, "--ask", broken)
    chat.check("a question with line breaks is one", len(told["questions"]) == 1, told)
    out, _ = chat.run("--prompts", lines, "--dry-run")
    counted = [json.loads(line) for line in out.splitlines()]
    _, told = ids_of(chat, *document, "--ask", plain)
    chat.check("tokens of prompts", [c["id"] for c in counted] == [1, 2] and counted[1]["prompt_tokens"] ==
               told["questions"][1]["prompt_tokens"], counted, told)


if __name__ == "__main__":
    sys.exit(run_checks(check_loaded, check_reselected, check_questions))
