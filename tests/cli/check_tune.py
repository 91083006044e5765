#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`kvferry tune` on the recall model, by what its settings do to documents that it has not seen.

usage: check_tune.py KVFERRY EXAMPLES

Facts of one document are hidden in its own plain text; then `kvferry run` asks for those of another one,
with the settings that were found and with worse ones. What the file has, how it is printed, and what the
command line refuses is in check_prune.sh.
"""
import json
import os
import re
import shutil
import struct
import sys
import tempfile

from checks import check, command, ended, generate, read, write

KVFERRY, EXAMPLES = sys.argv[1], sys.argv[2]
MODEL = os.path.join(EXAMPLES, "recall", "model")
FACT = r"the code of (\w+ \w+) is (\w+ \w+) \."


def kvferry(*arguments):
    """Exit status, standard output and standard error."""
    done = command(KVFERRY, *arguments)
    return done.returncode, done.stdout, done.stderr


def make_texts():
    text, _ = generate(EXAMPLES, "seen", 3, 1000)
    generate(EXAMPLES, "unseen", 11, 1000)
    write("lines.tsv", "".join("%s\tquestion the code of %s is\t%s\n" % (m[0], m[1], m[2])
                               for m in re.finditer(FACT, text)))
    write("plain.txt", re.sub(FACT + " ?", "", text))


def tune(*arguments):
    """The settings file, as text, and standard error."""
    status, _, err = kvferry("tune", "--model", MODEL, "--text", "plain.txt", "--hide", "lines.tsv", "--questions", 6,
                             "--samples", 1, "--tokens", 400, "--asked", "after", *arguments, "--out", "tuned.json")
    check("tune %s ends with 0" % " ".join(map(str, arguments)), status == 0, err)
    return read("tuned.json")


def right(*arguments):
    """How many questions of the document that was not seen are answered."""
    codes = dict(re.findall(FACT, read("unseen/document.txt")))
    asked = re.findall(r"code of (\w+ \w+) is", read("unseen/questions.txt"))
    status, out, err = kvferry("run", "--model", MODEL, "--prompt-file", "unseen/document.txt", "--ask",
                               "unseen/questions.txt", "-n", 2, "--select", "full", *arguments)
    check("run %s ends with 0" % " ".join(map(str, arguments)), status == 0, err)
    said = [line.strip() for line in out.splitlines()]
    return sum(codes[name] in line for name, line in zip(asked, said))


def settings_keep_what_was_asked():
    full = right()
    check("full attention answers most questions", full >= 4, full)
    worse = right("--prune", "fastkv", "--retention", "evict", "--prune-layer", 0, "--propagate", 0.1)
    for method in ("fastkv", "asl"):
        found = json.loads(tune("--method", method, "--goal", 1))[method]["answers"]
        check("%s: every answer of the text is kept" % method, found["kept"] == found["full"] > 0, found)
        check("%s: less is computed" % method, 0 < found["computed"] < 1, found)
        kept = right("--prune", method, "--prune-config", "tuned.json", "--retention", "evict")
        check("%s: and most of another document" % method, kept >= full - 1, (kept, full))
        check("%s: where a setting that was not found keeps few" % method, worse < kept, (worse, kept))


def a_lower_goal_computes_no_more():
    shares = [json.loads(tune("--method", "fastkv", "--goal", goal))["fastkv"]["answers"] for goal in (1, 0.3)]
    check("the goal is met", all(a["kept"] >= goal * a["full"] for a, goal in zip(shares, (1, 0.3))), shares)
    check("a lower goal computes no more", shares[1]["computed"] <= shares[0]["computed"], shares)


def threads_change_nothing():
    def settings(threads):
        found = json.loads(tune("--method", "both", "--threads", threads))
        for method in ("fastkv", "structkv"):  # a time is no figure of the text
            found[method]["answers"].pop("first_share", None)
        return found
    check("threads change nothing", settings(1) == settings(3))


def another_model_refuses_the_file():
    """One weight of a copy is another one."""
    tune("--method", "fastkv")
    shutil.copytree(MODEL, "other")
    with open("other/model.safetensors", "r+b") as f:
        header = 8 + struct.unpack("<Q", f.read(8))[0]
        f.seek(header + 1)
        byte = f.read(1)
        f.seek(header + 1)
        f.write(bytes([byte[0] ^ 1]))
    run = ["--prompt-file", "unseen/document.txt", "-n", 1, "--prune", "fastkv", "--prune-config", "tuned.json"]
    status, _, err = kvferry("run", "--model", MODEL, *run)
    check("its own model takes it", status == 0, err)
    status, out, err = kvferry("run", "--model", "other", *run)
    check("another model refuses it", status == 1 and not out, (status, out))
    check("and says why", "tuned.json" in err and "weights is" in err and "another model" in err, err)


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_texts()
        settings_keep_what_was_asked()
        a_lower_goal_computes_no_more()
        threads_change_nothing()
        another_model_refuses_the_file()
        os.chdir("/")
    return ended()


if __name__ == "__main__":
    sys.exit(main())
