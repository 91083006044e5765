# SPDX-License-Identifier: Apache-2.0
"""Results of measurements in a folder: NAME.md, a table for readers, and NAME.json, all its figures.

bench/results/ keeps tables in the repository and figures on the machine that measured them. Invariant: text
of a table from MARK on was written by a person and stays.
"""
import json
import os
import platform
import shutil
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "bench", "results")
MARK = "<!-- by hand -->"


def machine():
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            for line in f:
                if line.startswith("model name"):
                    name = line.split(":", 1)[1].strip()
                    break
    except OSError:
        pass
    return "%s, %d cores" % (name, os.cpu_count() or 1)


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def by_hand(folder, name):
    """Text of the table that a person wrote, or ""."""
    path = os.path.join(folder, name + ".md")
    old = read(path) if os.path.exists(path) else ""
    return old[old.index(MARK):] if MARK in old else ""


def gnuplot(script):
    """Draw by these lines, if it is there."""
    if not shutil.which("gnuplot"):
        print("eval: no picture: gnuplot is not installed")
        return
    subprocess.run(["gnuplot"], input="\n".join(script) + "\n", text=True, check=True)


def write(path, text):
    """The file appears whole, or stays as it was."""
    with open(path + ".partial", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(path + ".partial", path)


def save(folder, name, table=None, figures=None):
    """Write what is given."""
    os.makedirs(folder, exist_ok=True)
    if figures is not None:
        write(os.path.join(folder, name + ".json"), json.dumps(figures, indent=1) + "\n")
    if table is not None:
        hand = by_hand(folder, name)
        write(os.path.join(folder, name + ".md"), table.rstrip("\n") + "\n" + (hand and "\n" + hand))
