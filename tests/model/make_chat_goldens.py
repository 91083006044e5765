#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write goldens/chat.json anew: what Jinja renders for the chats of that file by the templates below,
set up as in Transformers. Each is a chat format that kvferry has as code (chat_formats.c), in the shape
of the family's published template without its parts for tools, dates and system prompts of its own.

usage: make_chat_goldens.py [--check]     needs jinja2; --check compares and writes nothing

Chats have turns: S system, U user, A assistant. A case is [format, chat, whether the text ends with the
opening of an answer, enable_thinking or null, text], or has {"refused": why} for a text.
"""
import json
import os
import sys

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "goldens", "chat.json")
ROLES = {"S": "system", "U": "user", "A": "assistant"}
ANSWER = "{% endfor %}{% if add_generation_prompt %}"


def turns(start, role_end, close, content="m.content"):
    """One turn after the other, each between the same markers."""
    return ("{% for m in messages %}{{ '" + start + "' + m.role + '" + role_end + "' + " + content +
            " + '" + close + "' }}" + ANSWER + "{{ '" + start + "assistant" + role_end + "' }}{% endif %}")


def without_thoughts(then=""):
    """Earlier answers are given without their thoughts."""
    return ("{% for m in messages %}{% set text = m.content %}"
            "{% if m.role == 'assistant' and '</think>' in text %}"
            "{% set text = text.split('</think>')[-1]" + then + " %}{% endif %}")


def mistral(where, start, close, answer):
    """The system prompt stands before the first (or last) question."""
    return ("{% set s = namespace(text='') %}{% if messages[0].role == 'system' %}"
            "{% set s.text = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}"
            "{{ '<s>' }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
            "{% if m.role == 'user' %}{{ '" + start + "' + (s.text if loop." + where +
            " else '') + m.content + '" + close + "' }}{% else %}{{ '" + answer +
            "' + m.content + '</s>' }}{% endif %}{% endfor %}")


FORMATS = {
    "chatml": turns("<|im_start|>", "\\n", "<|im_end|>\\n"),
    "deepseek-r1": "{{ '<｜begin▁of▁sentence｜>' }}" + without_thoughts() +
                   "{% if m.role == 'system' %}{{ text }}"
                   "{% elif m.role == 'user' %}{{ '<｜User｜>' + text }}"
                   "{% else %}{{ '<｜Assistant｜>' + text + '<｜end▁of▁sentence｜>' }}{% endif %}" +
                   ANSWER + "{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
    "llama3": "{{ '<|begin_of_text|>' }}" + turns("<|start_header_id|>", "<|end_header_id|>\\n\\n",
                                                  "<|eot_id|>", "m.content | trim"),
    "mistral": mistral("first", " [INST] ", " [/INST]", " "),
    "mistral-v3": mistral("last", "[INST] ", "[/INST]", " "),
    "mistral-tekken": mistral("last", "[INST]", "[/INST]", ""),
    "phi3": turns("<|", "|>\\n", "<|end|>\\n"),
    "phi4": turns("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "qwen3": without_thoughts(".lstrip('\\n')") +
             "{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}" + ANSWER +
             "{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}"
             "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    "zephyr": turns("<|", "|>\\n", "</s>\\n"),
}


def refuse(why):
    raise jinja2.TemplateError(why)


def render(template, chat, generate, thinking):
    told = {} if thinking is None else {"enable_thinking": thinking}
    try:
        return template.render(messages=[{"role": ROLES[m[0]], "content": m[2:]} for m in chat],
                               add_generation_prompt=generate, raise_exception=refuse, **told)
    except jinja2.TemplateError as why:
        return {"refused": str(why)}


def cases_of(chats):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for name, source in FORMATS.items():
        template = environment.from_string(source)
        for i, chat in enumerate(chats):
            for generate in (False, True):
                for thinking in (None, True, False) if "enable_thinking" in source else (None,):
                    yield [name, i, generate, thinking, render(template, chat, generate, thinking)]


def main():
    with open(PATH, encoding="utf-8") as f:
        there = f.read()
    chats = json.loads(there)["chats"]
    made = "{\n" + ",\n".join('"%s": [\n%s\n]' % (key, ",\n".join(
        json.dumps(one, separators=(",", ":")) for one in rows)) for key, rows in
        (("chats", chats), ("cases", list(cases_of(chats))))) + "\n}\n"
    if sys.argv[1:] == ["--check"]:
        return made != there
    with open(PATH, "w", encoding="utf-8", newline="\n") as f:
        f.write(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
