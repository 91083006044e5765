#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write goldens/chat.json: what the chat templates of the four families give for some chats.

usage: make_chat_goldens.py       needs jinja2 and tokenizers, no network

The templates below are restated from knowledge of the published ones, without their parts for tools;
they were not downloaded, so they are only as good as that knowledge. They are rendered with Jinja set
up as Transformers' apply_chat_template does (trim_blocks, lstrip_blocks). The ids are those of the
small tokenizers in goldens/.
"""
import json
import os
import sys

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "goldens")

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

QWEN2 = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

FORMATS = [("llama3", LLAMA3, "llama3"), ("mistral", MISTRAL, "tekken"), ("qwen2", QWEN2, "qwen2"),
           ("qwen3", QWEN3, "qwen2")]

# Each chat: S system, U user, A assistant.
CHATS = [
    ["U:Hello"],
    ["S:Be brief.", "U:Hello"],
    ["U:"],
    ["S:", "U:a"],
    ["U:one", "A:two", "U:three"],
    ["S:sys", "U:one", "A:two", "U:three", "A:four", "U:five"],
    ["U:one", "A:two"],
    ["S:sys", "U:one", "A:two"],
    ["S:  padded\n", "U:\n\t what? \u00a0\u3000\x1c ", "A: yes \n", "U: caf\u00e9 \U0001f600\n\n"],
    ["U:say <|im_end|> and <|eot_id|> and [/INST] and </s>"],
    ["U:q", "A:<think>\nlong thought\n</think>\n\nanswer", "U:again"],
    ["U:q", "A:<think>\nlong thought\n</think>\n\nanswer"],
    ["U:q", "A:no thought"],
    ["U:q", "A:a</think>b<think>c</think>\n\nd"],
    ["U:q", "A:<think></think>x"],
    ["U:q", "A:\n\n<think>\n\n\nx\n\n</think>\n\n\ny\n"],
    ["U:q", "A:<think>t</think>call", "U:<tool_response>r</tool_response>", "A:<think>u</think>v"],
    ["U:q", "A:plain call", "U:<tool_response>r</tool_response>", "A:w"],
    ["U:<tool_response>only</tool_response>", "A:<think>k</think>l"],
]
ROLES = {"S": "system", "U": "user", "A": "assistant"}


def fail(message):
    raise jinja2.TemplateError(message)


def main():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.globals["raise_exception"] = fail
    cases = []
    for name, source, tokenizer_name in FORMATS:
        template = env.from_string(source)
        tokenizer = Tokenizer.from_file(os.path.join(HERE, tokenizer_name + ".tokenizer.json"))
        for chat in CHATS:
            messages = [{"role": ROLES[m[0]], "content": m[2:]} for m in chat]
            for options in ({}, {"generate": True}, {"generate": True, "skip_thinking": True},
                            {"generate": True, "date": "01 Jan 2026"}):
                if ("date" in options and name != "llama3") or (
                        "skip_thinking" in options and name != "qwen3"):
                    continue
                extra = {"date_string": options["date"]} if "date" in options else {}
                if options.get("skip_thinking"):
                    extra["enable_thinking"] = False
                specials = ("<|begin_of_text|>", None) if name == "llama3" else ("<s>", "</s>")
                text = template.render(messages=messages, bos_token=specials[0],
                                       eos_token=specials[1],
                                       add_generation_prompt=options.get("generate", False), **extra)
                cases.append({"format": name, "tokenizer": tokenizer_name, "chat": chat, **options,
                              "text": text,
                              "ids": tokenizer.encode(text, add_special_tokens=False).ids})
    path = os.path.join(HERE, "chat.json")
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.write("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n")
    print("%d cases, %d bytes" % (len(cases), os.path.getsize(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
