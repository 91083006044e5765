#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Chats of `kvferry run` from outside: the prompt is what the model's own template makes of the
messages, what cannot be is refused with advice, and an answer ends where it should.

usage: check_chat.py KVFERRY RECALL_MODEL
"""
import json
import sys

from chat_model import run_checks

QUESTION = "the code of alice brown is seven tiger . quiet river guards heavy lantern"


def turn(role, text):
    return "<|im_start|> %s %s <|im_end|> " % (role, text)


def told(chat, *arguments):
    """(what was generated, statistics)."""
    ids, stats = chat.save("ids", ""), chat.save("stats", "")
    out, _ = chat.run(*arguments, "--emit-ids", ids, "--stats", stats, "-n", "8")
    with open(ids, encoding="utf-8") as f, open(stats, encoding="utf-8") as g:
        return out, [int(line) for line in f], json.load(g)


def same(chat, name, arguments, prompt):
    """A chat does what its text does."""
    text = chat.save("prompt", prompt)
    mine, ids, stats = told(chat, *arguments, "--ignore-eos")
    out, expected, theirs = told(chat, "--prompt-file", text, "--ignore-eos")
    chat.check(name, ids == expected and mine == out and len(ids) > 0 and
               stats["prompt_tokens"] == theirs["prompt_tokens"], ids, expected)


def check_prompts(chat):
    chat.write()
    opening = "<|im_start|> assistant "
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
    chat.write(template=None)
    same(chat, "a format by name", ("--chat", "--chat-format", "chatml", "--prompt", QUESTION),
         turn("user", QUESTION) + opening)
    chat.write("{% if enable_thinking is defined %}{{ 'river ' if enable_thinking else 'tiger ' }}"
               "{% endif %}{{ messages[0].content }}")
    for thinking, word in (("default", ""), ("on", "river "), ("off", "tiger ")):
        same(chat, "thinking " + thinking, ("--chat", "--prompt", QUESTION, "--thinking", thinking),
             word + QUESTION)
    chat.write("{{ messages[0].content + ' ' + strftime_now('%Y') }}")
    same(chat, "a date is today's", ("--chat", "--prompt", QUESTION), QUESTION + " unknown")


def refuse(chat, says, *arguments, status=1):
    out, err = chat.run(*arguments, status=status)
    chat.check("'%s' is said" % says, says in err and out == "", err)
    return err


def check_refusals(chat):
    question = ("--chat", "--prompt", "the")
    chat.write(template=None)
    err = refuse(chat, "no chat template", *question)
    chat.check("what to give instead is told", "--chat-format NAME" in err and
               "--prompt-file" in err, err)
    refuse(chat, "'<|begin_of_text|>', which is no token", *question, "--chat-format", "llama3")
    refuse(chat, "'<|im_sep|>'", *question, "--chat-format", "phi4")
    refuse(chat, "chat-format is 'lama'; give model, chatml", *question, "--chat-format", "lama",
           status=2)
    chat.write("{% include 'a' %}")
    err = refuse(chat, "line 1: the statement 'include' is not known here", *question)
    chat.check("what to give instead of it is told", "--chat-format NAME" in err, err)
    chat.write("{{ bos_token }}{% if messages[0].role == 'system' %}"
               "{{ raise_exception('no system prompts') }}{% endif %}")
    refuse(chat, "no system prompts", *question, "--system", "a")
    refuse(chat, "no enable_thinking", *question, "--thinking", "off")
    refuse(chat, "belong to --chat", "--prompt", "the", "--system", "a", status=2)
    refuse(chat, "needs text", "--chat", "--token-ids", "x", status=2)
    chat.write()
    for content, says in (
            ("{}", "must hold a list"), ('{"messages": [], "tools": []}', 'has "tools" beside messages'), ("[", "m.json"), ("[1]", "message 0: it must be an object"),
            ('[{"role": "user"}]', "message 0: it has no content"),
            ('[{"role": "usr", "content": ""}]', 'role is "usr"; give system, developer, user'),
            ('[{"role": "user", "content": 1}]', "content must be a text"),
            ('[{"role": "user", "content": "a\\u0000b"}]', "zero bytes"),
            ('[{"role": "user", "content": "", "text": "x"}]', "the field \"text\"; known are role, content"),
            ('[{"role": "assistant", "content": "a"}]', "end with a question"),
            ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]',
             "only the first may be"), ("[]", "no messages")):
        refuse(chat, says, "--messages", chat.save("m.json", content))
    refuse(chat, "missing.json", "--messages", "missing.json")
    refuse(chat, "the chat template has no tools", *question, "--tools", "missing.json")
    refuse(chat, "belong to --chat", "--prompt", "the", "--tools", "a", status=2)
    chat.write("{{ tools|tojson }}")
    for content, says in (("[]", "must hold a list of tools"), ("{}", "must hold a list of tools"),
                          ("[1]", "must hold a list of tools"), ("[", "tools.json: not valid JSON")):
        refuse(chat, says, *question, "--tools", chat.save("tools.json", content))


def check_tools(chat):
    """Calls, answers of tools, thoughts, parts and descriptions reach the template as they are."""
    tools = chat.save("tools.json", [{"type": "function", "function": {"name": "river"}}])
    chat.write("{% for t in tools or [] %}{{ t.function.name + ' ' }}{% endfor %}"
               "{% for m in messages %}{{ (m.content or 'none') + ' ' }}"
               "{% for c in m.tool_calls or [] %}{{ c.function.arguments.place + ' ' }}{% endfor %}"
               "{% if m.reasoning_content %}{{ m.reasoning_content + ' ' }}{% endif %}{% endfor %}")
    same(chat, "tools", ("--chat", "--prompt", QUESTION, "--tools", tools), "river " + QUESTION)
    call = {"function": {"name": "river", "arguments": {"place": "tiger"}}}
    messages = [{"role": "developer", "content": "the"},
                {"role": "user", "content": [{"type": "text", "text": "code"},
                                             {"type": "text", "text": "of"}]},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "guards"},
                {"role": "tool", "content": "lantern", "tool_call_id": "1"}]
    same(chat, "a call and its answer", ("--messages", chat.save("m.json", messages), "--tools", tools),
         "river the code of none tiger guards lantern ")
    line = chat.save("p.jsonl", json.dumps({"messages": messages}) + "\n")
    out, _ = chat.run("--prompts", line, "--tools", tools, "-n", "1")
    chat.check("of a batch too", json.loads(out)["prompt_tokens"] == 8, out)
    chat.write()
    _, err = chat.run("--messages", chat.save("m.json", [messages[1], dict(messages[2], content="a"),
                                                        messages[3]]), "-n", "1")
    chat.check("calls that a template leaves out are told", "writes no tool_calls" in err, err)


def check_ends(chat):
    words = chat.write()
    question = ("--prompt", QUESTION, "--temperature", "2", "--seed", "2")
    text, ids, stats = told(chat, *question, "--ignore-eos")
    chat.check("it goes on", stats["stop"] == "length" and len(ids) == 8)
    at = next(i for i in range(2, 8) if ids[i] not in ids[:i] and ids[i] > 2)
    for eos in (ids[at], [2, ids[at]]):
        chat.write(eos=eos)
        out, found, stats = told(chat, *question)
        chat.check("an end token of generation_config.json, %s" % eos, found == ids[:at + 1] and
                   stats["stop"] == "eos" and out.split() == text.split()[:at], found, out)
    # The token that the template writes after an answer ends one.
    chat.write("{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ ' " +
               words[ids[at]] + " ' }}{% endif %}{% endfor %}", special=(words[ids[at]],))
    out, found, stats = told(chat, "--chat", *question)
    chat.check("the end of a turn", found == ids[:at + 1] and stats["stop"] == "eos" and
               out.split() == text.split()[:at], found, out)
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
    refuse(chat, "stop is ''", *question, "--stop", "", status=2)
    refuse(chat, "16 times at most", *question, *["--stop", "a"] * 17, status=2)


if __name__ == "__main__":
    sys.exit(run_checks(check_prompts, check_refusals, check_tools, check_ends))
