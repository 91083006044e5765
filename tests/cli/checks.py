# SPDX-License-Identifier: Apache-2.0
"""Checks that are counted, the command, and documents of the recall model, for tests of the command."""
import json
import os
import subprocess
import sys

OUTCOMES = []


def check(name, fine, *told):
    OUTCOMES.append(bool(fine))
    if not fine:
        print("not ok: " + name, *told)


def ended():
    """The exit status of a test, whose checks are counted on standard output."""
    print("%d checks, %d failed" % (len(OUTCOMES), OUTCOMES.count(False)))
    return OUTCOMES.count(False) > 0


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def write(path, text):
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    return path


def command(*arguments, stdin=""):
    """A command that has ended."""
    return subprocess.run(list(map(str, arguments)), input=stdin, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, check=False)


def output(*arguments):
    """Standard output of a command that must succeed."""
    done = command(*arguments)
    if done.returncode != 0:
        sys.exit("%s\nended with %d\n%s" % (" ".join(map(str, arguments)), done.returncode, done.stderr))
    return done.stdout


def generate(examples, folder, seed, tokens):
    """(document, its questions), of the recall model's generator."""
    output(sys.executable, os.path.join(examples, "recall", "generate.py"), "document", "--tokens", tokens,
           "--questions", 6, "--seed", seed, "--out", folder)
    questions = json.loads(read(os.path.join(folder, "questions.json")))
    return read(os.path.join(folder, "document.txt")), [q["question"] for q in questions]
