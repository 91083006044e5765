#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time per output token of a whole model: a long context in host memory against a short one on the
device.

usage: bench_tokens.py --kvferry PROGRAM [--device cuda] [--shape llama-3.1-8b] [--context 131072]
                       [--short 4096] [--tokens 128] [--layers N] [--json FILE]

Runs `kvferry run` on a model of random weights (random_model.py) several times and prints medians and
ratios of one session: dense attention over the short context, all of whose pages stay on the device;
hybrid selection over the long one with each transfer method, and with speculation.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


def run(a, model, ids, options):
    stats = os.path.join(model, "stats.json")
    command = [a.kvferry, "run", "--model", model, "--token-ids", ids, "-n", str(a.tokens), "--ignore-eos",
               "--device", a.device, "--stats", stats] + options
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr else str(done.returncode)}
    with open(stats, encoding="utf-8") as f:
        return json.load(f)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kvferry", required=True)
    p.add_argument("--device", default="cuda")
    p.add_argument("--shape", default="llama-3.1-8b")
    p.add_argument("--layers", type=int)
    p.add_argument("--context", type=int, default=131072)
    p.add_argument("--short", type=int, default=4096)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--json")
    a = p.parse_args()
    a.kvferry = os.path.abspath(a.kvferry)
    with tempfile.TemporaryDirectory() as model:
        make = [sys.executable, os.path.join(HERE, "random_model.py"), model, "--shape", a.shape]
        subprocess.run(make + (["--layers", str(a.layers)] if a.layers else []), check=True)
        files = {}
        for count in (a.short, a.context):
            files[count] = os.path.join(model, "ids-%d" % count)
            with open(files[count], "w", encoding="utf-8") as f:
                f.write("\n".join(str(3 + 7919 * i % 4000) for i in range(count)))
        rows = [("dense, short", a.short, ["--select", "full"])]
        for method in ("auto", "mapped", "gather", "batch", "each"):
            rows.append(("hybrid, " + method, a.context, ["--transfer", method]))
        rows.append(("hybrid, speculative", a.context, ["--speculate", "on"]))
        results, base = [], None
        print("%-22s %9s %9s %9s %8s %9s" % ("", "context", "ms/token", "p95", "/ dense", "MiB/token"))
        for name, context, options in rows:
            s = run(a, model, files[context], options)
            if "failed" in s:
                print("%-22s %9d  %s" % (name, context, s["failed"]))
                results.append({"name": name, "failed": s["failed"]})
                continue
            time = s["tpot_ms"]
            base = base or time["p50"]
            moved = s["bytes_moved"] / max(1, s["decode_steps"]) / 2 ** 20
            print("%-22s %9d %9.3f %9.3f %8.2f %9.2f"
                  % (name, context, time["p50"], time["p95"], time["p50"] / base, moved), flush=True)
            results.append({"name": name, "context": context, "tpot_ms": time, "ratio": time["p50"] / base,
                            "prefill_ms": s["prefill_ms"], "moved_mib_per_token": moved})
        if a.json:
            with open(a.json, "w", encoding="utf-8") as f:
                json.dump({"bench": "tokens", "command": sys.argv, "machine": platform.processor(),
                           "shape": a.shape, "rows": results}, f, indent=1)


if __name__ == "__main__":
    main()
