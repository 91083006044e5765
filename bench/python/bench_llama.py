# SPDX-License-Identifier: Apache-2.0
"""Steps and prompts of an unmodified llama.cpp with kvferry's plug-in and without it, by turns.

usage: ./dev llama --run python3 bench/python/bench_llama.py [--depths N,...] [--budget N] [--steps N] [--turns N]
           [--model FILE] [--version NAME] [--prompts] [--settings TEXT] [--out FILE]

With --prompts depths are lengths of prompts. bench/python/llama_shape.py makes a file of the shape of an 8B model
for --model. One thread each. The processor time of the process is told beside the clock: on a machine with other
work only that one says something.
"""
import argparse
import json
import os
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "python"))
import llama_case # pylint: disable=wrong-import-position


def times(version, model, depth, steps, settings):
    """Milliseconds of a step: medians of the threads' time and of the clock."""
    out, said = llama_case.run(version, os.path.join(HERE, "llama_times.py"), model, "f16", depth, steps,
                               settings=settings, limit=10000)
    got = json.loads(out.splitlines()[-1])
    if settings is not None and llama_case.summary(said).get("share", 0) < 0.95:
        sys.exit("kvferry did not serve: %s" % llama_case.reasons(said))
    return [statistics.median(got[name]) * 1e3 for name in ("threads", "clock")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--depths", default="256,2048,7168")
    parser.add_argument("--budget", default="1024")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--model", default=llama_case.MODEL)
    parser.add_argument("--version", default=(llama_case.versions() or [""])[0])
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--settings", default="", help="more of the plug-in's settings")
    parser.add_argument("--out")
    args = parser.parse_args()
    llama_case.require(args.model)
    lines = ["| tokens | llama.cpp, ms a %s | budget %s | times as fast | clock: llama.cpp / kvferry |" % (
        "prompt" if args.prompts else "step", args.budget),
             "|---|---|---|---|---|"]
    for depth in map(int, args.depths.split(",")):
        turns = [[times(args.version, args.model, depth, 0 if args.prompts else args.steps, settings)
                  for settings in (None, ("budget=%s threads=1 " % args.budget) + args.settings)]
                 for _ in range(args.turns)]
        stock, mine = ([turn[at][0] for turn in turns] for at in (0, 1))
        ratios = [a / b for a, b in zip(stock, mine)]
        clocks = ["%.1f" % statistics.median(turn[at][1] for turn in turns) for at in (0, 1)]
        def spread(values):
            return "%.1f (%.1f to %.1f)" % (statistics.median(values), min(values), max(values))
        lines.append("| %s | %s | %s | %.2f (%.2f to %.2f) | %s |" % (
            format(depth, ","), spread(stock), spread(mine), statistics.median(ratios), min(ratios), max(ratios),
            " / ".join(clocks)))
        print(lines[-1], flush=True)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
