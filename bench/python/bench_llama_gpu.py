# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on a GPU by turns: its KV cache on the card, in host memory (-nkvo), and kvferry's plug-in.

usage: bench_llama_gpu.py MODEL [--depths N,...] [--steps N] [--turns N] [--layers N] [--version NAME] [--json FILE]

First logits: with the budget of the context kvferry may be twice as far from llama.cpp as that is from itself with
-nkvo, or else must be three times nearer than a run with one wrong cell. Then steps. At the first depth the budget is the context, so that what a step takes more than llama.cpp's is
the way to kvferry and back; after it the budget is 1024. The environment is that of tests/python/llama_case.py.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "python"))
import check_llama_logits # pylint: disable=wrong-import-position
import llama_case # pylint: disable=wrong-import-position

WAYS = {"on the card": (None, []), "-nkvo": (None, ["host"]), "kvferry": ("budget=%s", [])}
FARTHER, NEARER = 2, 3


def require_served(said):
    """End if the plug-in left rows to llama.cpp."""
    if llama_case.summary(said).get("share", 0) < 0.95:
        sys.exit("kvferry did not serve: %s" % llama_case.reasons(said))


def logits(version, model):
    """Largest KL from llama.cpp's logits: of itself with -nkvo, of kvferry, and of kvferry with one wrong cell."""
    job = {"model": model, "seed": 1, "context": 1024, "prompt": 300, "steps": 24}
    with tempfile.TemporaryDirectory() as folder:
        def run(name, settings, **more):
            path = os.path.join(folder, name)
            layout = {"slots": 1, "unified": False, "kind": "f16", "out": path + ".npy", **more}
            with open(path + ".json", "w", encoding="utf-8") as out:
                json.dump(dict(job, layouts=[layout], draws=os.path.join(folder, "drawn.npy"),
                               **({} if name == "stock" else {"tokens": os.path.join(folder, "drawn.npy")})), out)
            _, said = llama_case.run(version, "llama_steps.py", path + ".json", settings=settings)
            if settings:
                require_served(said)
            return np.load(path + ".npy")
        stock = run("stock", None)
        return [float(check_llama_logits.kl(stock, run(name, settings, **more)).max()) for name, settings, more in (
            ("host", None, {"fields": {"offload_kqv": False}}), ("own", "budget=full", {}),
            ("wrong", "budget=full", {"wrong": 4}))]


def run_steps(version, model, depth, steps, way, budget):
    """Median of the clock of a step; MiB that are resident at the end; tensors that kvferry copied from the card for a
    layer and step."""
    settings, words = WAYS[way]
    out, said = llama_case.run(version, os.path.join(HERE, "llama_times.py"), model, "f16", depth, steps, *words,
                               settings=settings and settings % budget, limit=10000)
    if settings:
        require_served(said)
    found, counts = json.loads(out.splitlines()[-1]), llama_case.summary(said)
    return {"ms": statistics.median(found["clock"]) * 1e3, "resident": found["resident"],
            "copied": counts.get("copied", 0) / max(counts.get("served", 0), 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--depths", default="256,32768,131072")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--version", default="native")
    parser.add_argument("--json")
    args = parser.parse_args()
    llama_case.require(args.model)
    host, own, wrong = logits(args.version, args.model)
    print("largest KL from llama.cpp's logits %.2e, of -nkvo %.2e, with one wrong cell %.2e" % (
        own, host, wrong), flush=True)
    found = {"kl": own, "kl_host": host, "kl_wrong": wrong, "layers": args.layers, "results": []}
    for at, depth in enumerate(map(int, args.depths.split(","))):
        budget = "1024" if at else "full"
        turns = [{way: run_steps(args.version, args.model, depth, args.steps, way, budget) for way in WAYS}
                 for _ in range(args.turns)]
        for way in WAYS:
            ms = sorted(turn[way]["ms"] for turn in turns)
            last = turns[-1][way]
            found["results"].append({"depth": depth, "way": way, "budget": budget, "ms": statistics.median(ms),
                                     "least_ms": ms[0], "most_ms": ms[-1], "resident": last["resident"],
                                     "copied": last["copied"]})
            print("%7d %-12s %8.2f ms (%.2f to %.2f), %.1f tokens a second, %d MiB resident, %.2f tensors copied a "
                  "layer and step" % (depth, way, statistics.median(ms), ms[0], ms[-1], 1e3 / statistics.median(ms),
                                      last["resident"], last["copied"]), flush=True)
        if not at:
            found["boundary_us"] = 1e3 / args.layers * statistics.median(
                turn["kvferry"]["ms"] - turn["on the card"]["ms"] for turn in turns)
            print("boundary, us a layer, with its attention: %.1f more" % found["boundary_us"], flush=True)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as out:
                json.dump(found, out)
    sys.exit(own > FARTHER * host and own * NEARER > wrong)


if __name__ == "__main__":
    main()
