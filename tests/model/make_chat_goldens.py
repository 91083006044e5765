#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write goldens/chat.json: what Transformers renders for some chats by some templates.

usage: make_chat_goldens.py                  needs transformers and tokenizers, no network
       make_chat_goldens.py COMMAND FOLDER   compare templates of your own with COMMAND, which prints
                                             what it renders; see tests/model/render_chat.c

The templates below are restated in the shapes of the published ones: how each family builds its
text, without the parts for tools and with system prompts of their own. They were not copied, so the
goldens show that templates of such shapes are rendered as Transformers does. FOLDER may hold any
number of *.jinja files, such as a model's own.
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
DAY = datetime.datetime(2026, 3, 9)


class FixedDay(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DAY


chat_template_utils.datetime = FixedDay

TEMPLATES = {
    "chatml": """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "smollm2": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe small.<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "smollm3": """{# ---- defaults ---- #}
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}
{%- if enable_thinking -%}
  {%- set mode = "/think" -%}
{%- else -%}
  {%- set mode = "/no_think" -%}
{%- endif -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}
  {%- set given = messages[0].content -%}
  {%- if "/no_think" in given -%}
    {%- set mode = "/no_think" -%}
  {%- elif "/think" in given -%}
    {%- set mode = "/think" -%}
  {%- endif -%}
  {%- set wishes = given.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "Today: " ~ today ~ "\\n" -}}
{{- "Mode: " + mode + "\\n\\n" -}}
{%- if wishes -%}
  {{- wishes + "\\n\\n" -}}
{%- elif mode == "/think" -%}
  {{- "Think, then answer.\\n\\n" -}}
{%- else -%}
  {{- "Answer.\\n\\n" -}}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if mode == "/think" -%}
        {{ "<|im_start|>assistant\\n" }}
    {%- else -%}
        {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" }}
    {%- endif -%}
{%- endif -%}
""",
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "llama31": """{{- bos_token }}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
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
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- message.tool_calls[0].function | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "llama32": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
""",
    "mistral1": """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('turns must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token}}
    {%- else %}
        {{- raise_exception('a role is not known') }}
    {%- endif %}
{%- endfor %}
""",
    "tekken": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("turns must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- for key, val in tool.items() if key != "return" %}
                    {{- '"' + key + '": ' + val|tojson }}
                {%- endfor %}
            {%- endfor %}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "mistral3": """{%- set system_message = messages[0].content if messages[0].role == "system" else none %}
{%- set loop_messages = messages[1:] if system_message is not none else messages %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("turns must alternate") }}
    {%- endif %}
    {%- if message.role == "user" %}
        {{- "[INST] " + (system_message + "\\n\\n" if loop.last and system_message is not none else "") + message.content + "[/INST]" }}
    {%- else %}
        {{- " " + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "mistral7": """{%- set today = strftime_now("%Y-%m-%d") %}
{%- set by_default = "You are small.\\
The date is " + today + " (e.g. \\"now\\")." %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system_message = by_default %}
    {%- set rest = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- set kept = [] %}
{%- for message in rest %}
    {%- if message["role"] not in ["tool", "tool_results"] and not message.get("tool_calls") %}
        {%- set kept = kept + [message] %}
    {%- endif %}
{%- endfor %}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- else %}
        {{- message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
{{- kept | length }}
""",
    "qwen2": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "qwen3": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
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
""",
    "deepseek": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_tool=false, system_prompt='', is_first_sp=true) %}{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<\uff5cUser\uff5c>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<\uff5cAssistant\uff5c>' + content + '<\uff5cend\u2581of\u2581sentence\uff5c>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<\uff5cAssistant\uff5c><think>\\n'}}{% endif %}""",
    "phi3": """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "phi4": """{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|><|im_start|>assistant<|im_sep|>'}}{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
}
SPECIALS = {"llama3": ("<|begin_of_text|>", "<|eot_id|>"),
            "deepseek": ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
            "phi3": (None, "<|end|>")}
# Whose ids are checked, by which of the small tokenizers.
TOKENIZERS = {"llama3": "llama3", "llama31": "llama3", "tekken": "tekken", "qwen2": "qwen2",
              "qwen3": "qwen2"}
# What the templates that are known by name equal, for chats that the command makes.
NAMED = {"chatml": "chatml", "qwen3": "qwen3", "llama3": "llama3", "mistral": "mistral1",
         "mistral-v3": "mistral3", "mistral-tekken": "tekken", "deepseek-r1": "deepseek",
         "phi3": "phi3", "phi4": "phi4", "zephyr": "zephyr"}

# Each chat: S system, U user, A assistant.
CHATS = [
    ["U:Hello"],
    ["S:Be brief.", "U:Hello"],
    ["U:"],
    ["U:one", "A:two", "U:three"],
    ["S:sys", "U:one", "A:two", "U:three", "A:four", "U:five"],
    ["S:sys", "U:one", "A:two"],
    ["S:  padded\n", "U:\n\t what? \u00a0\u3000\x1c ", "A: yes \n", "U: caf\u00e9 \U0001f600\n\n"],
    ["U:say <|im_end|> and <|eot_id|> and [/INST] and </s>"],
    ["U:q", "A:<think>\nlong thought\n</think>\n\nanswer", "U:again"],
    ["U:q", "A:a</think>b<think>c</think>\n\nd"],
    ["U:q", "A:\n\n<think>\n\n\nx\n\n</think>\n\n\ny\n"],
    ["U:q", "A:<think>t</think>call", "U:<tool_response>r</tool_response>", "A:<think>u</think>v"],
    ["S:/no_think and /system_override", "U:a", "A:\nb"],
    ["U:a", "U:b"],
    ["S:one", "S:two", "U:q"],
]
ROLES = {"S": "system", "U": "user", "A": "assistant"}

# The language itself: what each writes, or that it is refused. The chat is the fourth above.
SNIPPETS = [
    # white space
    "  {% if true %}  a  {% endif %}\n  b\n", "a\n  {%+ if true %}b{% endif %}\n", "a {%- if true -%} \n b {%- endif %} c",
    "{{ 1 }}\n{{ 2 }}\n\n", "{# x #}\n y {#- z -#} w", "a\r\nb\r\n{% if true %}\r\nc{% endif %}", "x  {{- 'a' -}}  y",
    "{% for m in messages %}\n  {{ m.role }}\n{% endfor %}\n.", "\n\n", "", "{%- set a = 1 -%}\n\n{{ a }}",
    # values
    "{{ 'a' 'b' }}{{ \"it's\" }}{{ 'a\\n\\t\\\\\\'\\x41\\u00e9' }}{{ '\\d' }}", "{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 * 3 - 1 }} {{ 7 % -3 }}",
    "{{ none }} {{ true }} {{ False }} {{ nothing }}", "{{ 1 + 'a' }}", "{{ 'a' + 1 }}", "{{ 'a' ~ 1 ~ none }}", "{{ [1] + [2] == [1, 2] }}", "{{ 1 // 0 }}",
    "{{ {'a': 1}['a'] }} {{ {'a': {'b': 2}}.a.b }}", "{{ (1, 2)[1] }} {{ ()|length }} {{ (3) }}", "{{ nothing.more }}", "{{ 'x'.more is defined }}",
    # order of operators
    "{{ 'a' + ' b '|trim + 'c' }}", "{{ not true or true }} {{ not (true and true) }}", "{{ 1 if 0 else 2 if 0 else 3 }}", "{{ 'x' if nothing }}",
    "{{ messages[9].role if messages|length > 9 else 'few' }}", "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }}", "{{ 1 < 'a' }}", "{{ '' or 'b' }} {{ 'a' and '' }}|",
    "{{ 'a' in 'cat' }} {{ 'x' not in 'cat' }} {{ 2 in [1, 2] }} {{ 'role' in messages[0] }}", "{{ not 1 in [2] }} {{ -1|string }}",
    # slices and items
    "{% for m in messages[::-1] %}{{ m.content }}{% endfor %} {{ messages[1:]|length }} {{ messages[-1].content }} {{ messages[:-1]|length }} {{ messages[5] is defined }}",
    "{{ 'h\u00e9llo'[1:3] }} {{ 'h\u00e9llo'[::-1] }} {{ 'h\u00e9llo'[-1] }} {{ 'h\u00e9llo'|length }} {{ 'abc'[5:] }}|", "{{ [1,2,3,4][1:9:2]|length }}{{ [1,2,3][3:0:-1]|join(',') }}",
    # tests
    "{{ x is defined }} {{ messages is defined }} {{ x is undefined }} {{ none is none }} {{ tools is none }} {{ 'a' is string }} {{ messages[0] is mapping }} {{ messages is iterable }} {{ 1 is number }} {{ messages is mapping }}",
    "{{ 3 is odd }} {{ 3 is even }} {{ 'a' is equalto 'a' }} {{ 1 is not eq(2) }} {{ 1 is in [1] }} {{ true is true }} {{ 1 is boolean }}", "{{ 1 is blue }}",
    # filters and methods
    "{{ ' a '|trim }}|{{ 'aXa'|trim('a') }}|{{ 'ab'|upper }}|{{ 'a b'|title }}|{{ 'aB'|capitalize }}|{{ 'aXb'|replace('X', '-') }}", "{{ nothing|default('d') }} {{ ''|default('e', true) }} {{ 'x'|d('f') }}",
    "{{ [1, 2]|join('-') }} {{ ['a']|first }} {{ 'abc'|last }} {{ []|first is defined }} {{ {'a': 1}|items|list|length }}", "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|length }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ messages|rejectattr('role', 'equalto', 'user')|list|length }}", "{{ 'a'|blue }}", "{{ false and ('a'|upper) }}",
    "{{ 'xxaxx'.strip('x') }} {{ 'a.b.c'.split('.')[-1] }} {{ 'a.b.c'.split('.', 1)|join('+') }} {{ '  a'.lstrip() }}|{{ 'a\\n\\n'.rstrip('\\n') }}|", "{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith('ab') }} {{ 'Ab'.lower() }} {{ 'a'.upper() }}",
    "{{ {'a': 1}.get('b') }} {{ {'a': 1}.get('b', 2) }} {% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "{{ 'a'.blue() }}", "{{ nothing.strip() }}", "{{ nothing() }}", "{{ ''.split('x')|length }}{{ 'x'.split('x')|length }}",
    # statements
    "{% if 0 %}a{% elif 1 %}b{% elif nothing.more %}c{% else %}d{% endif %}", "{% for x in [] %}a{% else %}b{% endfor %}{% for x in nothing %}a{% else %}c{% endfor %}", "{% for x in 'ab' %}{{ x }}{{ loop.index }}{{ loop.last }}{% endfor %}",
    "{% for x in [1,2,3,4] if x % 2 == 0 %}{{ x }}{{ loop.length }}{% endfor %}", "{% for a, b in [[1, 2], [3, 4]] %}{{ a + b }}{% endfor %}", "{% for x in range(5) %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{{ x }}{% endfor %}{{ x }}", "{% set ns = namespace(x=1) %}{% for i in [1] %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}", "{% set messages.x = 1 %}", "{% set x %}a{{ 1 }}{% endset %}[{{ x }}]",
    "{% macro f(a, b='z') %}<{{ a }}{{ b }}>{% endmacro %}{{ f('x') }}{{ f('x', 'y') }}{{ f(b='1', a='2') }}", "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "{% for x in [1,2] %}{% for y in [1,2] %}{{ x }}{{ y }}{{ loop.index0 }} {% endfor %}{{ loop.first }}{{ loop.revindex }}{% endfor %}",
    "{% for x in 'abc' %}{{ loop.previtem }}{{ loop.nextitem }},{% endfor %}", "{{ raise_exception('no') }}", "{{ strftime_now('%Y-%m-%d %d %b %B %y') }}", "{% generation %}a{% endgeneration %}", "{{ range(3)|list|length }}{{ range(1, 9, 3)|join(' ') }}{{ range(3, 0, -1)|join }}",
    "{{ range is defined }} {{ strftime_now is defined }} {{ raise_exception is defined }} {{ blue is defined }}", "{{ messages[0] == messages[0] }} {{ messages[0] == messages[2] }} {{ messages[-1] == (messages|last) }}",
    # broken
    "{% if true %}", "{{ 'a }}", "{{ 1 + }}", "{% endif %}", "{% for %}{% endfor %}", "{{ (1 }}", "{{ a b }}", "{# never", "{{ ", "{% blue %}", "{{ [1, }}", "{% if %}{% endif %}", "{{ 1 2 }}", "{% else %}", "{{ ] }}", "{% set %}", "{{ x. }}", "{{ 'a'|}}",
]


def messages_of(chat):
    return [{"role": ROLES[m[0]], "content": m[2:]} for m in chat]


def render(source, chat, generate, thinking, specials):
    """The text, or None if it is refused."""
    extra = {} if thinking is None else {"enable_thinking": thinking}
    for name, value in zip(("bos_token", "eos_token"), specials):
        if value is not None:
            extra[name] = value
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[messages_of(chat)], chat_template=source,
            add_generation_prompt=generate, **extra)
        return rendered[0]
    except (jinja2.TemplateError, TypeError, ZeroDivisionError):
        return None


def cases_of(source, chats, specials):
    """[chat, generate, thinking, text] of all chats and what may be told."""
    tells = (None, True, False) if "enable_thinking" in source else (None,)
    return [[i, generate, thinking, render(source, chat, generate, thinking, specials)]
            for i, chat in enumerate(chats) for generate in (False, True) for thinking in tells]


def write_goldens():
    from tokenizers import Tokenizer
    out = {"chats": CHATS, "day": [DAY.year, DAY.month, DAY.day], "templates": [], "ids": []}
    for name, source in TEMPLATES.items():
        specials = SPECIALS.get(name, ("<s>", "</s>"))
        out["templates"].append({
            "name": name, "source": source, "bos": specials[0], "eos": specials[1],
            "named": [n for n, of in NAMED.items() if of == name],
            "cases": cases_of(source, CHATS, specials)})
        if name in TOKENIZERS:
            tokenizer = Tokenizer.from_file(
                os.path.join(HERE, TOKENIZERS[name] + ".tokenizer.json"))
            for i in (4, 6, 7):
                text = render(source, CHATS[i], True, None, specials)
                out["ids"].append([name, TOKENIZERS[name], i, tokenizer.encode(
                    text, add_special_tokens=False).ids])
    out["snippets"] = [[s, render(s, CHATS[3], True, None, ("<s>", "</s>"))] for s in SNIPPETS]
    path = os.path.join(HERE, "chat.json")
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.write("{\n" + ",\n".join(json.dumps(k) + ": " + (
            "[\n" + ",\n".join(json.dumps(x, separators=(",", ":")) for x in v) + "\n]"
            if isinstance(v, list) else json.dumps(v)) for k, v in out.items()) + "\n}\n")
    print("%d templates, %d snippets, %d bytes" % (
        len(TEMPLATES), len(SNIPPETS), os.path.getsize(path)))
    return 0


def compare(command, folder):
    """Every template of the folder, every chat, through the command."""
    equal = refused = wrong = unknown = 0
    for path in sorted(glob.glob(os.path.join(folder, "*.jinja"))):
        with open(path, encoding="utf-8", newline="") as f:
            source = f.read()
        for chat, generate, thinking, text in cases_of(source, CHATS, ("<s>", "</s>")):
            run = subprocess.run(
                [command, path, "1" if generate else "0",
                 {None: "default", True: "on", False: "off"}[thinking],
                 "%d-%d-%d" % (DAY.year, DAY.month, DAY.day)] + CHATS[chat],
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
