#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write goldens/chat.json: what Transformers renders for some chats by some templates.

usage: make_chat_goldens.py                  needs transformers and tokenizers, no network
       make_chat_goldens.py COMMAND FOLDER   compare templates of your own with COMMAND, which prints
                                             what it renders; see tests/model/render_chat.c

The templates below are restated in the shapes of the published ones: how each family builds its
text, with system prompts of their own; those for tools are apart, with talks that have them. They were not copied, so the
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
# With tools, calls, answers of tools, thoughts and lists of parts.
TOOL_TEMPLATES = {
    "llama31-tools": """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- "<|start_header_id|>user<|end_header_id|>\\n\\nCall one of these.\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one call at once") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" + "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
""",
    "qwen3-tools": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{% endif %}
                {%- if call.function %}{% set call = call.function %}{% endif %}
                {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}{% else %}{{- call.arguments | tojson }}{% endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
""",
    "mistral-tools": """{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val | tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{% else %}{{- "]" }}{% endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if message.content is string %}
            {{- "[INST] " + message.content + "[/INST]" }}
        {%- else %}
            {{- "[INST] " }}
            {%- for block in message.content %}
                {%- if block.type == "text" %}{{- block.text }}{% else %}{{- raise_exception("text only") }}{% endif %}
            {%- endfor %}
            {{- "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception("ids have 9 letters") }}{% endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{% else %}{{- "]" + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content | trim + eos_token }}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
""",
    "deepseek-tools": """{% set ns = namespace(is_first=false, is_tool=false) %}{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{% set ns.is_tool = false %}{{ '<\uff5cUser\uff5c>' + message['content'] }}{% elif message['role'] == 'assistant' and message['content'] is none %}{% set ns.is_tool = false %}{% for tool in message['tool_calls'] %}{% if not ns.is_first %}{{ '<\uff5cAssistant\uff5c>' + tool['type'] + '\\n' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```' }}{% set ns.is_first = true %}{% else %}{{ '\\n' + tool['function']['name'] }}{% endif %}{% endfor %}{% elif message['role'] == 'assistant' %}{{ '<\uff5cAssistant\uff5c>' + message['content'] }}{% elif message['role'] == 'tool' %}{% set ns.is_tool = true %}{{ '\\n<result>' + message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt and not ns.is_tool %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}""",
    "harmony": """{%- macro kind_of(spec) -%}
    {%- if spec.type == "array" -%}
        {{- kind_of(spec['items']) + "[]" if spec['items'] else "any[]" }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping and spec.type[0] is defined -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.type == "string" and spec.enum -%}
        {{- '"' + spec.enum | join('" | "') + '"' }}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{" }}{% for name, inner in spec.properties.items() %}{{- name + ": " + kind_of(inner) }}{% if not loop.last %}, {% endif %}{% endfor %}{{- "}" }}
    {%- else -%}
        {{- spec.type }}
    {%- endif -%}
{%- endmacro -%}
{%- macro describe(tools) -%}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: {\\n" }}
        {%- for name, spec in tool.parameters.properties.items() %}
            {{- name + ("" if name in (tool.parameters.required or []) else "?") + ": " + kind_of(spec) }}
            {%- if spec.default is defined %}{{- " // default: " + (spec.default if spec.default is string else spec.default | tojson) }}{% endif %}
            {{- ",\\n" }}
        {%- endfor %}
        {{- "}) => any;\\n" }}
    {%- endfor %}
{%- endmacro -%}
{{- "<|start|>system<|message|>Date: " + strftime_now("%Y-%m-%d") + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set given = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set given = "" %}
    {%- set rest = messages %}
{%- endif %}
{%- if given or tools %}
    {{- "<|start|>developer<|message|>" + given }}
    {%- if tools %}{{- "\\n" + describe(tools) }}{% endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- if "tool_calls" in message %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.thinking %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{% endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|message|>" + call.arguments | tojson + "<|call|>" }}
            {%- set last.name = call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none %}{{- raise_exception("a result without a call") }}{% endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|message|>" + message.content | tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
""",
    "gemma-parts": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- if tools -%}
    {%- for tool in tools -%}
        {%- for key, value in tool['function']['parameters']['properties'] | dictsort -%}
            {{ key }}:{{ value['type'] }},
        {%- endfor -%}
    {%- endfor -%}
{%- endif -%}
{%- for message in rest -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
""",
}
SPECIALS = {"llama3": ("<|begin_of_text|>", "<|eot_id|>"),
            "deepseek": ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
            "phi3": (None, "<|end|>")}
# Whose ids are checked, by which of the small tokenizers.
TOKENIZERS = {"llama3": "llama3", "llama31": "llama3", "tekken": "tekken", "qwen2": "qwen2",
              "qwen3": "qwen2"}
# The templates that those known by name equal, for chats that the command makes.
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
# The description of a tool: every kind of value that JSON has.
TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "Of a \"place\" <b> & \u00e9.", "parameters": {
            "type": "object", "properties": {
                "place": {"type": "string", "description": "Where?"},
                "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                "days": {"type": "integer", "minimum": -1, "maximum": 9007199254740992},
                "p": {"type": "number", "default": 0.5, "less": [1.0, -2.5e-7, 1e16, 123456789.125]},
                "q": {"type": ["string", "null"], "default": None},
                "l": {"type": "array", "items": {"type": "string"}},
                "Map": {"type": "object", "properties": {"a": {"type": "boolean", "default": True}}}},
            "required": ["place"]},
        "return": {"type": "string"}}},
    {"type": "function", "function": {"name": "now", "description": "Time.\t\u0007\u007f\U0001f600",
                                      "parameters": {"type": "object", "properties": {}}}}]


def called(arguments, name="weather", key="call12345"):
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(role, content, **more):
    return dict({"role": role, "content": content}, **more)


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


ARGUMENTS = {"place": "Paris, \u00e9 'n' \"q\"", "days": 3, "p": 1.5, "ok": True, "n": None, "l": [1, "a"], "o": {}}
RESULT = said("tool", "{\"t\": 20}", tool_call_id="call12345", name="weather")
TALKS = [
    [said("user", "Hi")],
    [said("user", "Weather?"), said("assistant", "", tool_calls=[called(ARGUMENTS)]), RESULT,
     said("assistant", "20."), said("user", "And?")],
    [said("system", "s"), said("user", "Weather?"), said("assistant", None, tool_calls=[called(ARGUMENTS)]), RESULT],
    [said("user", "Weather?"), {"role": "assistant", "tool_calls": [called({"place": "x"})]}, RESULT],
    [said("user", "Weather?"),
     said("assistant", "Both.", tool_calls=[called(ARGUMENTS), called({}, "now", "abcdefghi")]),
     RESULT, said("tool", "noon", tool_call_id="abcdefghi", name="now"), said("assistant", "ok"), said("user", "x")],
    [said("user", "q"), said("assistant", None, tool_calls=[called("{\"place\": \"x\"}")]), RESULT],
    [said("user", "q"), said("assistant", "a", reasoning_content="\nbecause\nof\n"), said("user", "r")],
    [said("user", "q"), said("assistant", "", thinking="hm", tool_calls=[called({"days": -7})]), RESULT],
    [said("developer", "Do so."), said("user", "q")],
    [said("user", parts("one ", "two")), said("assistant", "x"), said("user", parts("three"))],
    [said("system", parts("be")), said("user", parts("one"))],
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
    # mappings by number, formats, numbers out of text, filters of nothing
    "{{ {1: 'a', true: 'b', -2: 'c', 'x': 'd'}[1] }}{{ {1: 'a', 'x': 2}.get(1) }}{{ {-12: 'c'}[-12] }}{{ 1 in {1: 2} }}{{ '1' in {1: 2} }}{{ {0: 'z'}[false] }}",
    "{% for k, v in {7: 'a', 'b': 1}.items() %}{{ k }}{{ k is number }}{{ v }}{% endfor %}{% for k in {3: 4} %}{{ k + 1 }}{% endfor %}{{ {1: {2: 3}} }}{{ {1: 2}|tojson }}",
    "{{ {}[1] is defined }} {{ messages[0][0] is defined }} {{ {'a': 1}.values()|list }} {{ {'a': 1}.keys()|list }}",
    "{{ '{} of {}'.format(1, 'b') }} {{ '{1}{0}{{}}'.format('a', true) }} {{ '{a}-{b}'.format(b=none, a='x') }}", "{{ '{}'.format() }}", "{{ '}'.format() }}",
    "{{ '42'|int }} {{ ' -7 '|int }} {{ '4.9'|int }} {{ 'x'|int }} {{ 'x'|int(5) }} {{ none|int }} {{ true|int }} {{ ''|int }} {{ '1e3'|int }} {{ [1]|int(2) }}", "{{ nothing|int }}",
    "{{ none|selectattr('a')|list }} {{ nothing|rejectattr('a')|list }} {{ none|map(attribute='x')|list }}", "{% for x in none %}{% endfor %}", "{{ none|list }}", "{% for x in 3 %}{% endfor %}",
    # what Python writes of lists and mappings, and JSON
    "{{ messages }}", "{{ [1, 'a', none, true, {'k': [\"it's\", 'a\\n\\t\\\\', '\\u00e9\\u200b\\x07\\U000e0001', '\\'\\\"']}] }}", "{{ []|string }}{{ {}|string }}{{ [[]] ~ 1 }}{{ ['a']|join }}",
    "{{ messages|tojson }}", "{{ messages|tojson(indent=2) }}", "{{ {'b': [], 'a': {}, 'c': [1, {'x': none}]}|tojson(indent=4) }}", "{{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }} {{ [1, 2]|tojson(separators=(',', ':')) }} {{ '\\u00e9\\U0001f600\\x7f</\\x01'|tojson(ensure_ascii=true) }}",
    "{{ '\\u00e9\\U0001f600\\x7f</\\x01\\b\\f'|tojson }} {{ none|tojson }} {{ 1|tojson }} {{ 'a\"b'|tojson|length }}", "{{ nothing|tojson }}", "{{ (1, 'a') }} {{ (1,) }} {{ () }} {{ (1, 2)|tojson }} {{ (1, 2) == [1, 2] }} {{ (1, 2)[:1] }} {{ (1,) + (2,) }} {{ {'a': 1}.items()|list }}",
    "{% if []|selectattr('a') %}full{% else %}empty{% endif %}{% if {}.items() %}full{% else %}empty{% endif %}", "{{ [1] + (2,) }}", "{{ messages|map(attribute='role')|length }}", "{{ none|items|list }}", "{{ nothing|items|list }}", "{{ range(2)|tojson }}", "{{ {'b': 1, 'A': 2, 'a0': 3}|dictsort }}{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{% endfor %}",
    # broken
    "{% if true %}", "{{ 'a }}", "{{ 1 + }}", "{% endif %}", "{% for %}{% endfor %}", "{{ (1 }}", "{{ a b }}", "{# never", "{{ ", "{% blue %}", "{{ [1, }}", "{% if %}{% endif %}", "{{ 1 2 }}", "{% else %}", "{{ ] }}", "{% set %}", "{{ x. }}", "{{ 'a'|}}",
]


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
    probe = render(source, [said("user", parts("\x02"))], False, None, specials) or ""
    if has_parts(talk) and "\x02" not in probe:
        talk = [dict(m, content="\n".join(p["text"] for p in m["content"]))
                if isinstance(m["content"], list) else m for m in talk]
    return render(source, talk, True, None, specials, tools)


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
                text = render(source, messages_of(CHATS[i]), True, None, specials)
                out["ids"].append([name, TOKENIZERS[name], i, tokenizer.encode(
                    text, add_special_tokens=False).ids])
    out["talks"], out["tools"] = TALKS, TOOLS
    out["tool_templates"] = list(TOOL_TEMPLATES.values())
    out["of_talks"] = [[t, i, bool(tools), text_of_talk(source, talk, tools)]
                       for t, source in enumerate(TOOL_TEMPLATES.values())
                       for i, talk in enumerate(TALKS) for tools in (None, TOOLS)]
    out["snippets"] = [[s, render(s, messages_of(CHATS[3]), True, None, ("<s>", "</s>"))] for s in SNIPPETS]
    path = os.path.join(HERE, "chat.json")
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.write("{\n" + ",\n".join(json.dumps(k) + ": " + (
            "[\n" + ",\n".join(json.dumps(x, separators=(",", ":")) for x in v) + "\n]"
            if isinstance(v, list) else json.dumps(v)) for k, v in out.items()) + "\n}\n")
    print("%d templates, %d snippets, %d bytes" % (
        len(TEMPLATES), len(SNIPPETS), os.path.getsize(path)))
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
