#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The cost of selections to a real language model: answers and losses under every row of ROWS.

usage: eval.py --build FOLDER [--quick] [--only WORD...] [--out FOLDER] [--report]
       eval.py --build FOLDER --ruler [--model DIR] [--lengths N...] [--samples N...]
               [--tasks NAME...] [--row 'NAME FIELD=VALUE...']...
               [--first-row 'NAME FIELD=VALUE...']... [--sweep 'NAME FIELD=VALUE FIELD=A,B...']...
               [--quick] [--out FOLDER] [--report]
       eval.py --build FOLDER --data FOLDER [--draws K] [the options of --ruler]
       eval.py --build FOLDER --niah [--model DIR] [--lengths N...] [--depths N] [--samples N]
               [--row 'NAME FIELD=VALUE...']... [--out FOLDER]
       eval.py --build FOLDER --papers [WORD...]

Fetches a real model once (real_model.py), makes documents with fixed seeds (eval_texts.py), asks the
kvferry command under all rows (eval_run.py), and writes eval.md and, not for the repository, every
figure in eval.json to bench/results/. A row that the library refuses is left out and named.
Findings are kept in FOLDER/eval/: --report tells of them, also of a run that was cut. With --ruler other
tasks are asked (judge/tasks.py) of any model, and ruler.md and ruler.json are written.
"""
import argparse
import json
import os
import sys

import eval_niah
import eval_papers
import eval_ruler
import eval_texts
import real_model
from eval_report import write_results
from eval_run import VERIFY, Row, read, run, spent
from results_folder import RESULTS, ROOT, machine, read as read_file, write

QUICK_CHARS = 400  # of a continuation

# ---- rows: method, settings of the cache, budgets ----
# The settings are those of kvf_cache_config, by name. A setting that a row does not have is the library's
# default; transfer is gather, and the device has room for a step only, so that bytes are moved. The order is that of
# a run, the most telling first, because a run may be cut; the table is in the order of its columns.
BOX, CODES = "digest=minmax", "digest=codes"
ROWS = [
    ("full", "select=full", [None]),
    ("dynamic", "select=dynamic page_size=4 " + CODES, [512, 256, 1024]),
    ("full k8v4", "select=full pages=k8v4", [None]),
    ("k8v4", "select=dynamic page_size=4 pages=k8v4 " + CODES, [512]),
    ("full k8v8", "select=full pages=k8v8", [None]),
    ("k8v8", "select=dynamic page_size=4 pages=k8v8 " + CODES, [512]),
    ("dynamic", "select=dynamic page_size=1 " + CODES, [256, 128, 512]),
    ("oracle", "select=oracle", [256]),
    ("dynamic", "select=dynamic page_size=32 " + BOX, [512, 1024, 2048]),
    ("streaming", "select=streaming", [512]),
    ("dynamic", "select=dynamic page_size=8 " + CODES, [512, 1024]),
    ("dynamic", "select=dynamic page_size=2 " + CODES, [256]),
    ("dynamic", "select=dynamic page_size=32 " + CODES, [512]),
    ("hybrid", "select=hybrid page_size=4 static_ratio=0.25 " + CODES, [512]),
    ("hybrid", "select=hybrid page_size=4 static_ratio=0.1 " + CODES, [256]),
    ("hybrid", "select=hybrid page_size=32 static_ratio=0.25 " + BOX, [1024]),
    ("dynamic", "select=dynamic page_size=8 " + BOX, [1024]),
    ("quest", "select=quest page_size=32", [1024]),
    ("arkvale", "select=arkvale page_size=32", [1024]),
    ("static", "select=static", [1024]),
    ("oracle", "select=oracle", [512]),
    ("defaults", "", [None]),
]
QUICK = [
    ("full", "select=full", [None]),
    ("streaming", "select=streaming", [512]),
    ("dynamic", "select=dynamic page_size=32 " + BOX, [512, 1024]),
    ("oracle", "select=oracle", [256]),
    ("dynamic", "select=dynamic page_size=1 " + CODES, [256, 512]),
    ("dynamic", "select=dynamic page_size=4 " + CODES, [256, 512]),
    ("dynamic", "select=dynamic page_size=8 " + CODES, [512]),
    ("defaults", "", [None]),
]

def rows_of(table, only):
    rows = [Row(method, settings, b) for method, settings, budgets in table for b in budgets]
    return [r for r in rows if r.method == "full" or not only or any(w in r.name for w in only)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", required=True, help="a build folder, for speed")
    parser.add_argument("--quick", action="store_true", help="3 documents, few rows: a first look")
    parser.add_argument("--only", nargs="+", metavar="WORD",
                        help="rows whose name has one of these, and full")
    parser.add_argument("--out", help="folder of the results (bench/results; with --quick or "
                        "--only, nothing is written without it)")
    parser.add_argument("--report", action="store_true",
                        help="run nothing: tell of the last run, as far as it came")
    parser.add_argument("--ruler", action="store_true", help="tasks of RULER and MRCR instead")
    parser.add_argument("--data", metavar="FOLDER", help="data sets of this folder instead: files of "
                        "LongBench, InfiniteBench, HELMET, MATH500, AIME and the like (eval_sets.py)")
    parser.add_argument("--draws", type=int, default=1, metavar="K",
                        help="with --data: answers to each problem, for rows with a temperature")
    parser.add_argument("--niah", action="store_true", help="a needle by depth and length instead")
    parser.add_argument("--papers", nargs="*", metavar="WORD", help="the commands of docs/papers.md "
                        "instead: all, or those of papers, tables and figures with one of these words")
    parser.add_argument("--depths", type=int, default=eval_niah.DEPTHS, help="with --niah: how many")
    parser.add_argument("--model", help="with --ruler or --niah: a Hugging Face folder or GGUF file")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS",
                        help="with --ruler: of prompts with what is generated (%s)"
                        % " ".join(map(str, eval_ruler.LENGTHS)))
    parser.add_argument("--samples", type=int, nargs="+", metavar="N",
                        help="with --ruler: documents of a task and length, or of each length (%d)"
                        % eval_ruler.SAMPLES)
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="with --ruler: only these")
    parser.add_argument("--row", action="append", metavar="'NAME FIELD=VALUE...'",
                        help="with --ruler: one more row, such as 'third head_mask=FILE' or 'fastkv "
                        "prune=fastkv prune_config=FILE retention=evict select=full'")
    parser.add_argument("--sweep", action="append", metavar="'NAME FIELD=VALUE FIELD=A,B...'",
                        help="with --ruler: a row for each value, such as 'snapkv prune=snapkv "
                        "retention=evict select=full keep=0.1,0.3', and the critical footprint of all")
    parser.add_argument("--first-row", action="append", metavar="'NAME FIELD=VALUE...'",
                        help="likewise, of the first %d documents of a task and length"
                        % eval_ruler.PART)
    args = parser.parse_args()
    args.ruler = args.ruler or bool(args.data)
    if not args.ruler and not args.niah and (args.model or args.lengths or args.samples or args.tasks or args.row or
                           args.first_row or args.sweep):
        parser.error("--model, --lengths, --samples, --tasks and rows go with --ruler or --niah")
    if args.niah and (args.ruler or args.tasks or args.first_row or args.sweep or args.report):
        parser.error("--niah takes --model, --lengths, --depths, --samples, --row and --out")
    program = os.path.join(ROOT, args.build, "runner", "cli", "kvferry")
    if not args.report and not os.access(program, os.X_OK):
        sys.exit("eval: %s was not built" % program)
    if args.papers is not None:
        sys.exit(eval_papers.main(args.build, args.papers))
    if args.ruler or args.niah:
        try:
            name = "niah" if args.niah else "sets" if args.data else "ruler"
            return (eval_niah if args.niah else eval_ruler).main(
                args, program, args.model or real_model.fetch(),
                os.path.join(ROOT, args.build, "eval", name))
        except FileNotFoundError as missing:
            sys.exit("eval: %s" % missing)
    try:
        documents = eval_texts.documents(*([3, QUICK_CHARS] if args.quick else []))
        model = None if args.report else real_model.fetch()
    except FileNotFoundError as missing:
        sys.exit("eval: %s" % missing)
    rows = rows_of(QUICK if args.quick else ROWS, args.only)
    said = os.path.join(ROOT, args.build, "eval")
    path, facts_path = (os.path.join(said, name) for name in ("model", "facts.json"))
    if not args.report:
        os.makedirs(said, exist_ok=True)
        facts = {"machine": machine(), "load_average": [round(os.getloadavg()[0], 1)],
                 "command": "eval.py " + " ".join(a for a in sys.argv[1:] if not os.path.isabs(a))}
        write(facts_path, json.dumps(facts))
        run(program, model, documents, rows, path)
    elif not os.path.exists(facts_path):
        sys.exit("eval: %s is not there; run the same command without --report first" % facts_path)
    facts = json.loads(read_file(facts_path))
    lengths = read(path, rows)
    facts["load_average"].append(round(os.getloadavg()[0], 1))
    facts.update(minutes=round(spent(rows, "seconds") / 60, 1),
                 cpu_seconds=round(spent(rows, "cpu_seconds")),
                 verify_every=VERIFY, texts=eval_texts.digest(documents), document_tokens=lengths)
    out = args.out or (None if args.quick or args.only else RESULTS)
    return write_results(facts, documents, rows, out)


if __name__ == "__main__":
    main()
