#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`kvferry chat` from outside: every answer is what `kvferry run` gives for the whole conversation,
only what is new is read, and on a terminal Ctrl-C ends an answer and not the session.

usage: check_chat_session.py KVFERRY RECALL_MODEL
"""
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

from chat_model import CHATML, run_checks

# Everything is attended and likeliest, so a conversation has one outcome however it was cut.
OPTIONS = ("--select", "full", "-n", "12")
QUESTIONS = ("the code of alice brown is seven tiger . quiet river guards heavy lantern",
             "question the code of alice brown", "quiet river")
WAIT = 60  # seconds until a terminal that says nothing is given up


def statistics(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def talk(chat, lines, *options):
    """(answers, turns of the statistics, standard error)."""
    stats = chat.save("stats", "")
    out, err = chat.run(*OPTIONS, "--stats", stats, *options, command="chat",
                        stdin="".join(line + "\n" for line in lines))
    return out.split("\n")[:-1], statistics(stats)["turns"], err


def expected(chat, questions, answers, *options):
    """What `run` answers to the last question."""
    messages = []
    for i, question in enumerate(questions):
        messages += [{"role": "user", "content": question}]
        if i + 1 < len(questions):
            messages += [{"role": "assistant", "content": answers[i]}]
    out, _ = chat.run(*OPTIONS, "--messages", chat.save("m.json", messages), *options)
    return out.rstrip("\n")


def check_same(chat, name, *options):
    """@return the turns"""
    answers, turns, _ = talk(chat, QUESTIONS, *options)
    chat.check(name + ": all questions are answered", len(answers) == len(turns) == 3, answers)
    for i in range(len(answers)):
        wanted = expected(chat, QUESTIONS[:i + 1], answers, *options)
        chat.check("%s: answer %d" % (name, i), answers[i] == wanted, answers[i], wanted)
    return turns


def check_turns(chat):
    chat.write()
    for turns in (check_same(chat, "plain"), check_same(chat, "system", "--system", "guards")):
        for before, turn in zip(turns, turns[1:]):
            # The last token of an answer was shown, not read.
            held = before["kept_tokens"] + before["prompt_tokens"] + before["generated_tokens"] - 1
            chat.check("only what is new is read", turn["kept_tokens"] == held, turn, held)
    chat.write(CHATML.replace("m.content", "(m.content if m.role == 'user' else 'lantern')"))
    turns = check_same(chat, "answers are rewritten")
    chat.check("it goes on in front of the answer",
               0 < turns[1]["kept_tokens"] < turns[0]["prompt_tokens"], turns)
    chat.write("{% for m in messages %}{{ m.content + ' ' }}{% endfor %}")
    check_same(chat, "nothing opens an answer")
    chat.write("{{ messages|length|string }}" + CHATML)
    turns = check_same(chat, "the beginning changes")
    chat.check("all is read again", turns[1]["kept_tokens"] == 0, turns)
    chat.write()
    free, _, _ = talk(chat, QUESTIONS[:1])
    stop = free[0].split()[3]
    answers, turns, _ = talk(chat, QUESTIONS[:2], "--stop", stop)
    chat.check("a stop ends an answer", answers[0] == free[0][:free[0].index(stop)] and
               turns[0]["stop"] == "text", answers, turns)
    wanted = expected(chat, QUESTIONS[:2], answers, "--stop", stop)
    chat.check("what is after the stop is forgotten", answers[1] == wanted, answers[1], wanted)


def check_draft(chat):
    """Answers are those without drafts, also where the conversation goes back."""
    rewritten = CHATML.replace("m.content", "(m.content if m.role == 'user' else 'lantern')")
    lines = [" ".join(QUESTIONS[:1] * 6)] + list(QUESTIONS[1:]) + ["/clear", QUESTIONS[0]]
    for name, template in (("plain", CHATML), ("rewritten", rewritten),
                           ("begun anew", "{{ messages|length|string }}" + CHATML)):
        chat.write(template)
        wanted, _, _ = talk(chat, lines, "--ignore-eos")
        for how in (("--draft", "ngram"), ("--draft-model", chat.folder)):
            got, _, _ = talk(chat, lines, "--ignore-eos", *how)
            told = statistics(os.path.join(chat.folder, "stats"))
            chat.check("%s, with %s: the same answers" % (name, how[0]),
                       got == wanted and len(got) == 4, got, wanted)
            # The same model, if it has seen the same ids, says the same.
            chat.check("%s, with %s: drafts are counted" % (name, how[0]),
                       0 < told["accepted_tokens"] <= told["drafted_tokens"] and
                       (how[0] == "--draft" or told["accepted_tokens"] == told["drafted_tokens"]),
                       told["accepted_tokens"], told["drafted_tokens"])
    chat.write()


def check_pruned(chat):
    """The prompt of an empty sequence is pruned with its last token; later turns are not."""
    chat.write()
    document = " ".join(QUESTIONS[:1] * 20)
    for how in (("snapkv", "--keep", "0.5"), ("fastkv", "--keep", "0.5", "--propagate", "0.5"),
                ("streaming", "--keep", "0.5"),
                ("snapkv", "--keep", "0.5", "--chunk", "64", "--evict", "naive",
                 "--chunk-queries", "8")):
        window = () if how[0] == "streaming" else ("--prune-window", "8")
        options = ("--prune", *how, *window) + (
            () if "--evict" in how else ("--retention", "evict"))
        lines = [document] + list(QUESTIONS[1:]) + ["/clear", document]
        answers, turns, err = talk(chat, lines, *options)
        chat.check("pruned: all are answered", len(answers) == len(turns) == 4, err)
        wanted = expected(chat, lines[:1], [], *options)
        chat.check("the first answer of a pruned chat, %s" % (how,), answers[0] == wanted, answers,
                   wanted)
        chat.check("as after /clear", answers[3] == answers[0], answers)
        chat.check("only what is new is read after it", turns[1]["kept_tokens"] ==
                   turns[0]["prompt_tokens"] + turns[0]["generated_tokens"] - 1, turns)
        chat.check("it is pruned twice", "pruning   %s" % how[0] in err, err)
    chat.write("{{ messages|length|string }}" + CHATML)
    options = ("--prune", "snapkv", "--keep", "0.5", "--prune-window", "8")
    answers, turns, _ = talk(chat, [document, QUESTIONS[1]], *options)
    wanted = expected(chat, [document, QUESTIONS[1]], answers, *options)
    chat.check("all is read and pruned again where the beginning changes", answers[1] == wanted and
               turns[1]["kept_tokens"] == 0, answers, wanted, turns)
    chat.write()
    answers, _, err = talk(chat, ["quiet"], "--prune", "snapkv", "--keep", "0.5", "--prune-window",
                           "32")
    chat.check("what is too short is read whole", answers == [expected(chat, ["quiet"], [])] and
               "tokens is not pruned: --prune snapkv: " in err, answers, err)


def check_completed(chat):
    """From the second answer on the conversation is one that was never pruned."""
    chat.write()
    document = " ".join(QUESTIONS[:1] * 20)
    lines = [document] + list(QUESTIONS[1:])
    for how in (("fastkv",), ("structkv",), ("fastkv", "--complete-share", "0.5")):
        options = ("--prune", *how, "--keep", "0.5", "--propagate", "0.5", "--retention", "complete")
        answers, turns, err = talk(chat, lines + ["/clear", document], *options)
        chat.check("completed: all are answered", len(answers) == len(turns) == 4, err)
        for i in (1, 2):
            wanted = expected(chat, lines[:i + 1], answers)
            chat.check("completed with %s: answer %d" % (how, i), answers[i] == wanted, answers,
                       wanted)
        chat.check("/clear prunes again", answers[3] == answers[0], answers)
    chat.write(CHATML.replace("m.content", "(m.content if m.role == 'user' else 'lantern')"))
    answers, _, err = talk(chat, lines, *options)
    chat.check("completed where answers are rewritten", len(answers) == 3, err)
    chat.write()
    session = Terminal(chat, "-n", "5", "--ignore-eos", *options)
    session.until("a prompt of a chat that completes", lambda text: text.endswith("> "))
    for name, line in (("an answer to a document", document + "\r"), ("Ctrl-C meanwhile", "\x03"),
                       ("an answer after it", QUESTIONS[1] + "\r"), ("one more", "the code\r")):
        session.send(line)
        session.until(name, lambda text: text.endswith("\n> "))
    session.send("\x04")
    chat.check("a chat that completes ends", session.wait() == 0, session.text)


def check_words(chat):
    chat.write()
    answers, turns, _ = talk(chat, [QUESTIONS[0], "/clear", QUESTIONS[0], "", "/exit", "never"])
    chat.check("/clear begins anew, /exit ends", len(turns) == 2 and answers[0] == answers[1] and
               turns[1]["kept_tokens"] < turns[0]["prompt_tokens"], turns)
    answers, turns, err = talk(chat, ["the code", "/quit", " /quit", "/a/b", "/ quit"])
    chat.check("what looks like a command is no message", len(turns) == 4 and
               "/quit is no command: /clear begins anew, /exit ends" in err, turns, err)
    answers, turns, _ = talk(chat, ["the code \\", "of alice"])
    chat.check("a line goes on in the next one", len(turns) == 1 and
               answers[0] == expected(chat, ["the code \nof alice"], []), answers)
    chat.write("{% if 'tiger' in messages[-1].content %}{{ raise_exception('no tigers') }}"
               "{% endif %}" + CHATML)
    answers, turns, err = talk(chat, ["the code", "a tiger", "quiet river"])
    chat.check("a message that the template refuses is forgotten", len(turns) == 2 and
               "no tigers" in err, turns, err)
    chat.write()
    answers, turns, err = talk(chat, [QUESTIONS[0], " ".join(QUESTIONS * 3), "the code"],
                               "--context", "64")
    chat.check("a message that has no room is forgotten", len(turns) == 2 and
               "there is room for 64; /clear begins anew" in err, turns, err)
    _, turns, err = talk(chat, [QUESTIONS[0]] * 3, "--context", "64", "-n", "200",
                          "--ignore-eos")
    chat.check("an answer ends with the context", turns[0]["generated_tokens"] > 20 and
               "the context of 64 tokens is full" in err, turns, err)
    _, err = chat.run("--context", "40000", command="chat")
    chat.check("more than the model's positions is told", "32768 positions" in err, err)
    chat.write(template=None)
    _, err = chat.run(command="chat", status=1)
    chat.check("a model without a template is refused", "no chat template" in err, err)
    chat.check("a folder is needed", subprocess.run(
        [chat.kvferry, "chat"], stderr=subprocess.DEVNULL, check=False).returncode == 2)


class Terminal:
    """A session on a terminal."""

    def __init__(self, chat, *options):
        self.text, self.chat = "", chat
        pid, self.fd = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "vt100"
            os.execv(chat.kvferry, [chat.kvferry, "chat", "--model", chat.folder, "--device", "host",
                                    "--select", "full"] + list(options))
        self.pid = pid

    def send(self, text):
        os.write(self.fd, text.encode())

    def read(self):
        """@return whether more came"""
        try:
            data = os.read(self.fd, 65536) if select.select([self.fd], [], [], 0.1)[0] else b""
        except OSError:
            return False
        # Without what moves the cursor.
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", data.decode("utf-8", "replace"))
        return True

    def until(self, name, condition):
        """Until the condition holds of what came since the last call."""
        end = time.monotonic() + WAIT
        while not condition(self.text) and time.monotonic() < end and self.read():
            pass
        self.chat.check("on a terminal: " + name, condition(self.text), repr(self.text[-500:]))
        text, self.text = self.text, ""
        return text

    def wait(self):
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            self.read()
        os.kill(self.pid, 9)
        return None


def check_terminal(chat):
    """The same whether lines are edited or not; Ctrl-C while one is typed, and in an answer."""
    chat.write()
    session = Terminal(chat, "-n", "30000", "--context", "32000", "--ignore-eos")
    prompt = lambda text: text.endswith("> ")
    session.until("a prompt", prompt)
    session.send("never")
    session.until("what is typed is shown", lambda text: "never" in text)
    session.send("\x03")
    session.until("Ctrl-C gives a new prompt", prompt)
    session.send("the coda\x7fe\r")
    session.until("a long answer begins", lambda text: text.count(" ") > 60)
    session.send("\x03")
    session.until("Ctrl-C ends it", lambda text: text.endswith("\n> "))
    session.send("quiet river\n")
    session.until("another one begins", lambda text: text.count(" ") > 60)
    session.send("\x03")
    session.until("Ctrl-C ends that too", lambda text: text.endswith("\n> "))
    session.send("\x04")
    result = session.wait()
    chat.check("on a terminal: Ctrl-D ends the session", result == 0, result, session.text)
    session = Terminal(chat, "-n", "3", "--ignore-eos")
    session.until("a prompt again", prompt)
    session.send("the code\r\x04")
    result = session.wait()
    chat.check("on a terminal: Ctrl-D typed ahead ends it too", result == 0, result, session.text)


def check_ended(chat):
    """A signal that ends jobs and containers ends a session, not an answer: while it waits, and while it
    writes. Its statistics are written."""
    chat.write()
    for begins in (False, True):
        stats = os.path.join(chat.folder, "ended")
        command = [chat.kvferry, "chat", "--model", chat.folder, "--device", "host", "-n", "30000",
                   "--context", "32000", "--ignore-eos", "--stats", stats]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:
            process.stdin.write(b"the code\n/clear\nthe code\n" if begins else b"/clear\n")
            process.stdin.flush()
            if begins:
                process.stdout.read(64)
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)  # its input stays open
            except subprocess.TimeoutExpired:
                process.kill()
        chat.check("SIGTERM ends a session that %s" % ("writes" if begins else "waits"),
                   process.returncode == 128 + signal.SIGTERM, process.returncode)
        chat.check("and its statistics are written", os.path.exists(stats))
        if os.path.exists(stats):
            os.remove(stats)


if __name__ == "__main__":
    sys.exit(run_checks(check_turns, check_draft, check_pruned, check_completed, check_words, check_terminal,
                       check_ended))
