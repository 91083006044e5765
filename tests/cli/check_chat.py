#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Chats of `kvferry run` from outside: the prompt is what the chat format makes of the messages, what
cannot be is refused with advice, and an answer ends where it should.

usage: check_chat.py KVFERRY RECALL_MODEL
"""
import json
import sys

from chat_model import CHATML, run_checks

QUESTION = "the code of alice brown is seven tiger . quiet river guards heavy lantern"


def turn(role, text):
    return "<|im_start|>%s\n%s<|im_end|>\n" % (role, text)


def told(chat, *arguments):
    """(what was generated, ids, statistics)."""
    return chat.answer(*arguments, "-n", "8")


def same(chat, name, arguments, prompt):
    """A chat does what its text does."""
    text = chat.save("prompt", prompt)
    mine, ids, stats = told(chat, *arguments, "--ignore-eos")
    out, expected, theirs = told(chat, "--prompt-file", text, "--ignore-eos")
    chat.check(name, ids == expected and mine == out and len(ids) > 0 and
               stats["prompt_tokens"] == theirs["prompt_tokens"], ids, expected)


def check_prompts(chat):
    chat.write()
    opening = "<|im_start|>assistant\n"
    same(chat, "a question", ("--chat", "--prompt", QUESTION), turn("user", QUESTION) + opening)
    same(chat, "a system prompt", ("--chat", "--prompt", QUESTION, "--system", "quiet river"),
         turn("system", "quiet river") + turn("user", QUESTION) + opening)
    messages = [{"role": "user", "content": "the code"}, {"role": "assistant", "content": "river"},
                {"role": "user", "content": QUESTION}]
    turns = turn("user", "the code") + turn("assistant", "river")
    same(chat, "messages of a file", ("--messages", chat.save("m.json", messages)),
         turns + turn("user", QUESTION) + opening)
    same(chat, "messages of an object, a system prompt and a question",
         ("--messages", chat.save("m.json", {"messages": messages[:2]}), "--prompt", QUESTION,
          "--system", "guards"), turn("system", "guards") + turns + turn("user", QUESTION) + opening)
    parts = [{"role": "user", "content": [{"type": "text", "text": "code"},
                                          {"type": "text", "text": QUESTION}]}]
    same(chat, "parts of a text", ("--messages", chat.save("m.json", parts)),
         turn("user", "code\n" + QUESTION) + opening)
    line = chat.save("p.jsonl", json.dumps({"messages": messages}) + "\n")
    out, _ = chat.run("--prompts", line, "-n", "1")
    whole = chat.save("prompt", turns + turn("user", QUESTION) + opening)
    _, _, stats = told(chat, "--prompt-file", whole)
    chat.check("of a batch too", json.loads(out)["prompt_tokens"] == stats["prompt_tokens"], out)
    chat.write(template=None)
    same(chat, "a format by name", ("--chat", "--chat-format", "mistral", "--prompt", QUESTION),
         "<s> [INST] " + QUESTION + " [/INST]")
    chat.write(CHATML + "</think>")
    for thinking, thought in (("default", ""), ("on", ""), ("off", "<think>\n\n</think>\n\n")):
        same(chat, "thinking " + thinking, ("--chat", "--prompt", QUESTION, "--thinking", thinking),
             turn("user", QUESTION) + opening + thought)


def check_refusals(chat):
    chat.write()
    chat.refusals("chat")


def check_ends(chat):
    chat.write()
    question = ("--prompt", QUESTION, "--temperature", "2", "--seed", "2")
    text, ids, stats = told(chat, *question, "--ignore-eos")
    chat.check("it goes on", stats["stop"] == "length" and len(ids) == 8)
    at = next(i for i in range(2, 8) if ids[i] not in ids[:i] and ids[i] > 2)
    for eos in (ids[at], [2, ids[at]]):
        chat.write(eos=eos)
        out, found, stats = told(chat, *question)
        chat.check("an end token of generation_config.json, %s" % eos, found == ids[:at + 1] and
                   stats["stop"] == "eos" and out.split() == text.split()[:at], found, out)
    # The token that follows an answer in the format ends one.
    chat.write()
    question_of = ("--chat", "--chat-format", "mistral", *question)
    text_of, ids_of, _ = told(chat, *question_of, "--ignore-eos")
    last = next(i for i in range(2, 8) if ids_of[i] not in ids_of[:i] and ids_of[i] > 2)
    chat.write(end=ids_of[last])
    out, found, stats = told(chat, *question_of)
    chat.check("the end of a turn", found == ids_of[:last + 1] and stats["stop"] == "eos" and
               out.split() == text_of.split()[:last], found, out)
    chat.write()
    line = text.rstrip("\n")
    border = line.index(" ", 1)
    stop = line[border - 1:border + 2]
    for others in ((), ("--stop", "nowhere"), ("--stop", line + "!")):
        out, found, stats = told(chat, *question, "--ignore-eos", "--stop", stop, *others)
        chat.check("a stop across tokens, " + " ".join(others), out == line[:border - 1] + "\n" and
                   stats["stop"] == "text" and len(found) < 8, repr(out), found)
    out, found, stats = told(chat, *question, "--ignore-eos", "--stop", line[-1] + "!")
    chat.check("what only might have been a stop is shown", out == text and found == ids and
               stats["stop"] == "length", repr(out))


if __name__ == "__main__":
    sys.exit(run_checks(check_prompts, check_refusals, check_ends))
