# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/papers.md, run: `eval.py --papers [WORD...]`.

Each row of a table there names tables or figures of a paper, in its first cell, and in its second the
command that makes them small. A command finds in its environment

    MODEL  the real model (real_model.py)
    LONG   a manual of some 2,900 tokens with hidden numbers, and a question at its end
    TEXT   another manual, without questions
    OUT    a folder for what it writes

and `kvferry` and `./dev eval` of the build. Figures of statistics (--stats json) are shown where the
row's third cell names them, and the last lines of any other output. Knows the page and how to run it, not what
must come out: the page says what came out.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time

import eval_texts
import real_model
from results_folder import ROOT, read, write

PAGE = os.path.join(ROOT, "docs", "papers.md")
STARTS = ("kvferry ", "./dev eval ", "for ")
LINES, WIDTH = 40, 200  # shown of a command
LIMIT = 3600  # seconds


def rows(page):
    """[(paper, tables and figures, command, [figure])] of a page's text, each command once."""
    found, paper = [], ""
    for line in page.split("\n"):
        if line.startswith("## "):
            paper = line[3:].split(",")[0]
        cells = [c.strip() for c in line.strip("|").split(" | ")] if line.startswith("| ") else []
        for command in re.findall(r"`([^`]+)`", cells[1]) if len(cells) == 4 else []:
            if command.startswith(STARTS) and "FOLDER" not in command:
                figures = re.findall(r"`([^`]+)`", cells[2]) if "--stats json" in command else []
                if command not in (c for _, _, c, _ in found):
                    found.append((paper, cells[0], command, figures))
    return found


def picked(statistics, name):
    """A figure by its path; with [] that of every layer."""
    for word in name.split("."):
        if isinstance(statistics, list):
            statistics = [s.get(word) for s in statistics]
        else:
            statistics = (statistics or {}).get(word.removesuffix("[]"))
    if isinstance(statistics, float):
        return "%.4g" % statistics
    if isinstance(statistics, list):
        return " ".join("%.2f" % x if isinstance(x, float) else "-" if x is None else str(x)
                        for x in statistics)
    return str(statistics)


def shown(said, figures):
    lines = []
    for line in said.rstrip("\n").split("\n"):
        if figures and line.startswith('{"kvferry"'):
            statistics = json.loads(line)
            lines.append("; ".join("%s %s" % (f, picked(statistics, f)) for f in figures))
        elif not figures:
            lines.append(line if len(line) <= WIDTH else line[:WIDTH] + " ...")
    return lines[-LINES:]


def environment(build, folder):
    texts = eval_texts.documents(2)
    paths = {"LONG": texts[0].text + texts[0].tasks[0].text, "TEXT": "\n\n".join(eval_texts.prose(
        eval_texts.MANUALS[1]))}
    for name, text in paths.items():
        paths[name] = os.path.join(folder, name + ".txt")
        write(paths[name], text)
    return dict(os.environ, MODEL=real_model.fetch(), OUT=folder, **paths, PATH=os.pathsep.join(
        [os.path.join(ROOT, build, "runner", "cli"), os.environ["PATH"]]))


def main(build, words):
    wanted = [r for r in rows(read(PAGE))
              if not words or any(w.lower() in (r[0] + " " + r[1]).lower() for w in words)]
    if not wanted:
        sys.exit("eval: no row of docs/papers.md has %s" % " or ".join(words))
    failed = []
    with tempfile.TemporaryDirectory(prefix="kvferry-papers-") as folder:
        around = environment(build, folder)
        for paper, what, command, figures in wanted:
            print("== %s, %s\n   %s" % (paper, what, command), flush=True)
            line = command.replace("./dev eval", "%s tools/eval.py --build %s" % (sys.executable, build))
            begin = time.monotonic()
            done = subprocess.run(["timeout", str(LIMIT), "bash", "-o", "errexit", "-c", line], cwd=ROOT,
                                  env=around, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode:
                failed.append(what)
            lines = shown(done.stdout, [] if done.returncode else figures)
            print("\n".join("   " + text for text in lines))
            print("   %s, %.0f s" % ("failed" if done.returncode else "ok",
                                     time.monotonic() - begin), flush=True)
    print("%d commands of docs/papers.md ran, %d failed" % (len(wanted), len(failed)))
    return 1 if failed else 0
