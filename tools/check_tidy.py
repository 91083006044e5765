#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run clang-tidy over the C files of a compile database, as many at a time as there are cores.

usage: check_tidy.py --tidy CLANG_TIDY --build FOLDER

What is looked at is a file as the compiler sees it: one that is compiled several times into the same text
is looked at once, and one whose text has passed before, with the same checks, is not looked at again. The
texts that passed are known by their hashes, in the cache folder of the user.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time

import real_model


def flags(entry):
    """Flags of the compiler that bear on the text: no outputs, no folder of the target."""
    words, kept = shlex.split(entry["command"]), []
    while words and words[0] != "clang" and not os.path.basename(words[0]).startswith("clang"):
        words.pop(0)  # ccache and its like
    skip = False
    for word in words:
        if skip or word in ("-c", "-MD", "-o", "-MF", "-MQ"):
            skip = word in ("-o", "-MF", "-MQ")
        elif not (word.startswith("-I") and word.endswith(".p")):
            kept.append(word)
    return kept


def text_hash(entry, command, rules):
    """Comments and macros are part of the text: checks and exceptions are told by them."""
    text = subprocess.run(command + ["-E", "-CC", "-dD"], cwd=entry["directory"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if text.returncode:
        return None  # clang-tidy will say why
    return hashlib.sha256(rules + b"\0" + shlex.join(command).encode() + b"\0" + text.stdout).hexdigest()


def tidy(program, entry):
    """clang-tidy looks at a file once for each of its entries, so it gets a database with one."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "compile_commands.json"), "w", encoding="utf-8") as f:
            json.dump([entry], f)
        run = subprocess.run([program, "-p", folder, "--quiet",
                              os.path.join(entry["directory"], entry["file"])],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    return run.returncode, run.stdout


def forget_old(folder):
    """Texts that nobody has met for a month."""
    for entry in os.scandir(folder):
        if entry.stat().st_mtime < time.time() - 30 * 86400:
            os.unlink(entry.path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tidy", required=True)
    parser.add_argument("--build", required=True)
    args = parser.parse_args()
    with open(os.path.join(args.build, "compile_commands.json"), encoding="utf-8") as f:
        entries = [e for e in json.load(f) if e["file"].endswith(".c")]
    rules = subprocess.run([args.tidy, "--version"], stdout=subprocess.PIPE, check=True).stdout
    with open(".clang-tidy", "rb") as f:
        rules += f.read()
    known = os.path.join(real_model.cache_folder(), "tidy")
    os.makedirs(known, exist_ok=True)
    commands = {(shlex.join(flags(e)), e["file"]): e for e in entries}
    entries = [commands[key] for key in sorted(commands)]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        hashes = list(pool.map(lambda e: text_hash(e, flags(e), rules), entries))
        texts = {h or "unknown " + str(i): e for i, (h, e) in enumerate(zip(hashes, entries))}
        new = [h for h in texts if not os.path.exists(os.path.join(known, h))]
        for h in set(texts) - set(new):
            os.utime(os.path.join(known, h))
        failed = 0
        for h, (code, output) in zip(new, pool.map(lambda h: tidy(args.tidy, texts[h]), new)):
            if code:
                failed += 1
                print(output.strip())
            elif h in hashes:
                with open(os.path.join(known, h), "w", encoding="utf-8"):
                    pass
    forget_old(known)
    print("clang-tidy: %d texts, %d of them known" % (len(texts), len(texts) - len(new)))
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
