#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write goldens/chat.json anew: what Transformers renders for its chats by its templates.

usage: make_chat_goldens.py                  needs transformers and tokenizers, no network
       make_chat_goldens.py COMMAND FOLDER   compare templates of your own with COMMAND, which prints
                                             what it renders; see tests/model/render_chat.c

What is rendered is in that file, a line each, and is changed or added there:
  chats           turns: S system, U user, A assistant
  templates       with `named`, the formats known by name that equal it for chats of the command
  ids             template, tokenizer and chat, of which the ids of the text follow
  talks, tools    messages with calls, answers of tools, thoughts and lists of parts, and what describes
                  the tools: every kind of value that JSON has
  tool_templates  those for talks
  snippets        the language itself, with the fourth chat: what each writes, or null if it is refused

Templates are restated in the shapes of the published ones: how each family builds its text, with
system prompts of their own. They were not copied, so the goldens show that templates of such shapes are
rendered as Transformers does. FOLDER may hold any number of *.jinja files, such as a model's own.
"""
import datetime
import glob
import json
import os
import subprocess
import sys

import jinja2
from transformers.utils import chat_template_utils

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "goldens")
PATH = os.path.join(HERE, "chat.json")
with open(PATH, encoding="utf-8") as f:
    GOLDENS = json.load(f)
DAY = datetime.datetime(*GOLDENS["day"])


class FixedDay(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DAY


chat_template_utils.datetime = FixedDay

CHATS, TALKS, TOOLS = GOLDENS["chats"], GOLDENS["talks"], GOLDENS["tools"]
ROLES = {"S": "system", "U": "user", "A": "assistant"}


def messages_of(chat):
    return [{"role": ROLES[m[0]], "content": m[2:]} for m in chat]


def render(source, chat, generate, thinking, specials, tools=None):
    """The text, or None if it is refused. @chat: messages."""
    extra = {} if thinking is None else {"enable_thinking": thinking}
    for name, value in zip(("bos_token", "eos_token"), specials):
        if value is not None:
            extra[name] = value
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[json.loads(json.dumps(chat))], chat_template=source,
            tools=json.loads(json.dumps(tools)), add_generation_prompt=generate, **extra)
        return rendered[0]
    except (jinja2.TemplateError, TypeError, ZeroDivisionError, IndexError, ValueError):
        return None


def cases_of(source, chats, specials):
    """[chat, generate, thinking, text] of all chats and what may be told."""
    tells = (None, True, False) if "enable_thinking" in source else (None,)
    return [[i, generate, thinking, render(source, messages_of(chat), generate, thinking, specials)]
            for i, chat in enumerate(chats) for generate in (False, True) for thinking in tells]


def has_parts(talk):
    return any(isinstance(message.get("content"), list) for message in talk)


def text_of_talk(source, talk, tools):
    """As Transformers; where a template writes no lists, as if parts were lines of one text."""
    specials = ("<s>", "</s>")
    probe = [{"role": "user", "content": [{"type": "text", "text": "\x02"}]}]
    if has_parts(talk) and "\x02" not in (render(source, probe, False, None, specials) or ""):
        talk = [dict(m, content="\n".join(p["text"] for p in m["content"]))
                if isinstance(m["content"], list) else m for m in talk]
    return render(source, talk, True, None, specials, tools)


def write_goldens():
    from tokenizers import Tokenizer
    out, by_name = GOLDENS, {t["name"]: t for t in GOLDENS["templates"]}
    for t in out["templates"]:
        t["cases"] = cases_of(t["source"], CHATS, (t["bos"], t["eos"]))
    for row in out["ids"]:
        tokenizer = Tokenizer.from_file(os.path.join(HERE, row[1] + ".tokenizer.json"))
        t = by_name[row[0]]
        text = render(t["source"], messages_of(CHATS[row[2]]), True, None, (t["bos"], t["eos"]))
        row[3:] = [tokenizer.encode(text, add_special_tokens=False).ids]
    out["of_talks"] = [[t, i, bool(tools), text_of_talk(source, talk, tools)]
                       for t, source in enumerate(out["tool_templates"])
                       for i, talk in enumerate(TALKS) for tools in (None, TOOLS)]
    out["snippets"] = [[row[0], render(row[0], messages_of(CHATS[3]), True, None, ("<s>", "</s>"))]
                       for row in out["snippets"]]
    with open(PATH, "w", encoding="utf-8", newline="\n") as f:
        f.write("{\n" + ",\n".join(json.dumps(k) + ": " + (
            "[\n" + ",\n".join(json.dumps(x, separators=(",", ":")) for x in v) + "\n]"
            if isinstance(v, list) else json.dumps(v)) for k, v in out.items()) + "\n}\n")
    print("%d templates, %d snippets, %d bytes" % (
        len(by_name), len(out["snippets"]), os.path.getsize(PATH)))
    return 0


def all_of(source):
    """Every chat and every talk."""
    for i, generate, thinking, text in cases_of(source, CHATS, ("<s>", "</s>")):
        yield i, messages_of(CHATS[i]), None, generate, thinking, text
    for i, talk in enumerate(TALKS):
        for tools in (None, TOOLS):
            yield len(CHATS) + i, talk, tools, True, None, text_of_talk(source, talk, tools)


def compare(command, folder):
    """Every template of the folder, every chat, through the command."""
    equal = refused = wrong = unknown = 0
    for path in sorted(glob.glob(os.path.join(folder, "*.jinja"))):
        with open(path, encoding="utf-8", newline="") as f:
            source = f.read()
        for chat, messages, tools, generate, thinking, text in all_of(source):
            run = subprocess.run(
                [command, path, "1" if generate else "0",
                 {None: "default", True: "on", False: "off"}[thinking],
                 "%d-%d-%d" % (DAY.year, DAY.month, DAY.day), json.dumps(messages), json.dumps(tools)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            mine = run.stdout.decode("utf-8") if run.returncode == 0 else None
            equal += mine is not None and mine == text
            refused += mine is None and text is None
            if mine is None and text is not None:
                unknown += 1
                print("%s: %s" % (os.path.basename(path), run.stderr.decode().strip()))
                break
            if mine is not None and mine != text:
                wrong += 1
                print("%s: chat %d\n  %r\n  not %r" % (os.path.basename(path), chat, mine, text))
    print("%d equal, %d refused by both, %d templates refused by the command only, %d wrong" % (
        equal, refused, unknown, wrong))
    return wrong > 0


if __name__ == "__main__":
    sys.exit(compare(*sys.argv[1:]) if len(sys.argv) == 3 else write_goldens())
