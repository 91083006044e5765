#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Questions that only a GPU can answer, in calls that fit into ten minutes each; `./dev gpu`.

usage: gpu.py [A|B|C|D|PART...] [--jobs REGEX] [--out DIR] [--built DIR|FILE] [--seconds N] [--total N]
       gpu.py pack [--into DIR] [--built DIR]

A is uses, facts and kernels: does code work that no GPU has run, and what does each kernel cost. B is decode,
runner and peers: whole steps, a model, PyTorch beside them. A machine's start, A and B fit into a quarter
of an hour. C has tests that passed before, and slow ones: operations, suite, sanitizer, offloaded and link. D is
llama, llama.cpp with its CUDA backend and the plug-in, which tools/llama_cuda.py builds. Parts may be named one
by one; all of them if none is. Each ends within --seconds (520), all together within
--total (270, 510, 540 and 540 for A to D); every job has a limit of its own; what is missing or fails stops
nothing else. --jobs runs those whose names match, for a machine that is lent for minutes. A job that failed
runs again alone, with launches that wait, then for a minute under memcheck, and its first report is printed.

--out (gpu-out/) gets results.json, written after every job: it keeps what earlier calls brought, job by
job; and a log per part. The end is what was measured, and the aims that it meets. Programs come from
build-gpu/, built here for this GPU, or from a tree that `pack` made elsewhere. No network, no package
manager. Nothing beyond Python is needed, but `peers` compares only with what is there. The status is 0
if nothing failed, 1 if something did, 77 if there is no GPU.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import sys
import tempfile
import threading
import time

import gpu_aims
import gpu_figures
import gpu_parts
import gpu_tree
from gpu_job import TIME_OVER, find_gpu, look_at, say

# The parts, in the order in which they run, and what each may have of a call's time beside others; what it
# leaves is theirs.
PARTS = {"uses": 3, "facts": 2, "kernels": 3, "decode": 2, "runner": 3, "peers": 2, "operations": 3, "suite": 3,
         "sanitizer": 2, "offloaded": 2, "link": 3, "llama": 5}
CALLS = {"A": ["uses", "facts", "kernels"], "B": ["decode", "runner", "peers"],
         "C": ["operations", "suite", "sanitizer", "offloaded", "link"], "D": ["llama"]}
CALL_SECONDS = {"A": 270, "B": 510, "C": 540, "D": 540}
LOOKS = 0.15 # of a part's time: for what failed
NAMED = 3 # of the jobs that the time was over for
# Jobs at once: where time is measured, one.
TOGETHER = {"facts": 4, "uses": 5, "operations": 6, "suite": 8, "sanitizer": 4}
BAD = ("failed", "timeout")
EVERY = re.compile("")  # job


def write_log(path, done):
    with open(path, "w", encoding="utf-8") as log:
        for result, text in done:
            log.write("==== %s: %s (%s s)\n%s\n%s\n" % (
                result["name"], result["status"], result.get("seconds", 0), result["command"], text))


class Kept:
    """results.json: written whole after every job, which takes the place of its namesake."""

    def __init__(self, path):
        self.path, self.lock = path, threading.Lock()
        self.results = json.loads(path.read_text()) if path.exists() else {}

    def write(self):
        self.results["aims"] = gpu_aims.table(self.results)
        other = self.path.with_suffix(".part")
        other.write_text(json.dumps(self.results, indent=1))
        other.replace(self.path)

    def add(self, part, result):
        with self.lock:
            jobs = self.results.setdefault(part, {"jobs": []})["jobs"]
            at = next((i for i, j in enumerate(jobs) if j["name"] == result["name"]), len(jobs))
            if result["status"] != "not run" or at == len(jobs): # what was measured is not lost
                jobs[at:at + 1] = [result]
            self.write()


def end_of_first(parts, now, end):
    """When the first of the parts that are left ends, so that none of the others gets nothing."""
    return now + (end - now) * PARTS[parts[0]] / sum(PARTS[p] for p in parts)


def jobs_of(part, tree, scratch, kept, wanted=EVERY):
    make = getattr(gpu_parts, part + "_jobs")
    made = make(tree, scratch, kept.results) if part == "sanitizer" else make(tree, scratch)
    return [job for job in made if wanted.search(job.name)]


def run_part(part, tree, kept, until, wanted=EVERY):
    """[result]: jobs side by side, a look at what failed, then those that measure alone. A part of the
    time is for looks."""
    begin, done, results, late = time.monotonic(), [], [], []
    jobs_until = until - LOOKS * (until - begin)

    def run(job):
        result, text = job.run(until if job.is_alone else jobs_until)
        if part == "facts":
            result["said"] = text.split("\n")
        kept.add(part, result)
        return job, result, text

    def tell(job, result, text):
        done.append((result, text))
        results.append(result)
        if result.get("why") == TIME_OVER:
            late.append(job.name)
        elif result["status"] in BAD + ("not run",):
            say("%s: %s: %s%s" % (part, job.name, result["status"],
                                  ": " + result["why"] if "why" in result else ""))
        if result["status"] in BAD and part not in ("facts", "sanitizer"):
            done.extend(look_at(job, result, text, until))
            kept.add(part, result)
    with tempfile.TemporaryDirectory(prefix="kvferry-gpu-") as folder:
        jobs = jobs_of(part, tree, pathlib.Path(folder), kept, wanted)
        with concurrent.futures.ThreadPoolExecutor(TOGETHER.get(part, 1)) as pool:
            ran = list(pool.map(run, [j for j in jobs if not j.is_alone]))
        for found in ran:
            tell(*found)
        for job in jobs:
            if job.is_alone:
                tell(*run(job))
    write_log(kept.path.parent / (part + ".txt"), done)
    if late:  # they may be a hundred
        say("%s: not run, %s: %s%s" % (part, TIME_OVER, ", ".join(late[:NAMED]),
                                       " and %d more" % (len(late) - NAMED) if late[NAMED:] else ""))
    counts = {s: sum(r["status"] == s for r in results) for s in ("ok",) + BAD + ("skipped", "not run")}
    say("%s: %s (%d s)" % (part, ", ".join("%d %s" % (n, s) for s, n in counts.items() if n),
                           time.monotonic() - begin))
    return results


def pattern(text):
    try:
        return re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError("'%s' is no regular expression: %s" % (text, e))


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="A, B, C, D, %s; or pack" % ", ".join(PARTS))
    parser.add_argument("--jobs", type=pattern, default=EVERY, metavar="REGEX", help="only jobs whose names it matches")
    parser.add_argument("--out", default="gpu-out", help="folder of the results (gpu-out)")
    parser.add_argument("--built", help="a tree of `pack`, that tree as one file, or a build folder; of pack: a build folder")
    parser.add_argument("--seconds", type=int, default=520, help="of one part (520)")
    parser.add_argument("--total", type=int, help="seconds of this call (%s; else no limit)"
                        % ", ".join("%s %d" % call for call in CALL_SECONDS.items()))
    parser.add_argument("--into", default="gpu-tree", help="of pack: the folder that it makes, and its .tar.xz (gpu-tree)")
    a = parser.parse_args()
    unknown = [p for p in a.parts if p not in PARTS and p not in CALLS]
    if unknown and a.parts != ["pack"]:
        parser.error("unknown part '%s'; parts are A B C D %s" % (unknown[0], " ".join(PARTS)))
    if a.total is None:
        a.total = sum(CALL_SECONDS.get(p, 0) for p in a.parts) or None
    return a


def main():
    a = options()
    end = time.monotonic() + (a.total or 1e9)
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/local/cuda/bin:/opt/cuda/bin:/usr/local/nvidia/bin"
    if a.parts == ["pack"]:
        return gpu_tree.pack(a.into, a.built)
    gpu, why = find_gpu()
    tree = gpu_tree.tree_of_pack(a.built) if a.built else None
    if not gpu and not (tree and tree.emulated):
        say(why)
        return 77
    tree = tree or gpu_tree.build_here()
    say(gpu or "%s; the emulator stands in, and its times say nothing" % why)
    out = pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    kept = Kept(out / "results.json")
    kept.results.update(device=gpu or "emulated", built=a.built or "build-gpu", commit=tree.commit)
    results = []
    parts = [p for name in a.parts or PARTS for p in CALLS.get(name, [name])]
    while parts:
        now = time.monotonic()
        results += run_part(parts[0], tree, kept, min(now + a.seconds, end_of_first(parts, now, end)), a.jobs)
        parts.pop(0)
    print(gpu_figures.show(kept.results))
    print(gpu_aims.show([r for r in kept.results["aims"] if r["measured"] is not None]))
    return 1 if any(r["status"] in BAD for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
