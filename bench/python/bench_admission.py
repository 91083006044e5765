#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Requests that run at once in vLLM with `admit` = all and resident, where the device has room for few budgets.

Each is a process of its own, with the real model in the folder KVF_HF_MODEL in bf16. Pages are moved to a small
device memory, as on a GPU, so on a CPU a move costs a copy and no link. Prompts are cut from a text at different
places. Told are tokens a second of CPU time, most requests at once, the hit rate, and bytes of a step beside those of
the plan at that rate: the median of several runs of an engine, with the least and the most.

With --stay steps do not choose: they take lists of pages, of which such a share was in the list before. So it is
settled how many pages can be found on the device, and whether they are is a matter of room.

usage: bench_admission.py [--requests N] [--tokens N] [--new N] [--budget N] [--small] [--runs N] [--stay SHARE,...]
                          [--host-memory SIZE] [--device-memory SIZE]
       ./dev vllm --run bench/python/bench_admission.py
"""
import argparse
import ctypes
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHOWN = (("rate", "%.3f"), ("tokens", "%.0f"), ("bytes", "%.0f"), ("planned", "%.0f"), ("of the plan", "%.3f"))


def prompts_of(args):
    """Token ids, twice as many as a prompt has."""
    if args.small:
        draw = random.Random(3)
        return [draw.randrange(2, 160) for _ in range(2 * args.tokens)]
    from transformers import AutoTokenizer
    with open(os.path.join(ROOT, "CONTRIBUTING.md"), encoding="utf-8") as text:
        ids = AutoTokenizer.from_pretrained(args.model)(text.read()).input_ids
    return ids * (2 * args.tokens // len(ids) + 1)


class Lists:
    """Lists of pages in place of what steps choose: where a list begins follows from the length of its row."""

    def __init__(self, pages, tokens, kv_heads):
        self.pages, self.span, self.kv_heads = pages, tokens // 4 - 32, kv_heads # between sink and local window
        self.stay, self.ids = None, None

    def follow(self, blocks):
        """Hand them to all steps of a class of blocks."""
        import numpy as np
        choose = blocks.step

        def step(pool, layer, rows, q, out, stream, lse=None, **given):
            if self.stay is not None:
                lengths = np.ctypeslib.as_array((ctypes.c_int32 * rows.rows).from_address(rows.lengths))
                first = lengths[:, None] * round((1 - self.stay) * self.pages)
                ids = (first + np.arange(self.pages)) % self.span + 1
                self.ids = np.repeat(ids[:, None], self.kv_heads, axis=1).astype(np.int32)
                given = {"page_ids": self.ids.ctypes.data, "page_stride": self.pages}
            choose(pool, layer, rows, q, out, stream, lse, **given)
        blocks.step = step


def counters():
    from prometheus_client import generate_latest
    told = {}
    for line in generate_latest().decode().splitlines():
        if line.startswith("kvferry:") and "_total{" in line:
            told[line[len("kvferry:"):].partition("_total{")[0]] = float(line.rsplit(" ", 1)[1])
    return told


def run(engine, args, ids, layers):
    """All requests, once: most at once, passes of steps alone, their CPU seconds, and what they counted."""
    from vllm import SamplingParams
    for number in range(args.requests):
        begin = 97 * number % args.tokens
        engine.add_request(str(number), {"prompt_token_ids": ids[begin:begin + args.tokens]},
                           SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=args.new))
    scheduler, most, steps, cpu, sums = engine.engine_core.engine_core.scheduler, 0, 0, 0.0, {}
    while engine.has_unfinished_requests():
        before, began = counters(), time.process_time()
        engine.step()
        took = time.process_time() - began
        most = max(most, len(scheduler.running))
        more = {name: value - before.get(name, 0) for name, value in counters().items()}
        made = more.get("steps", 0) / layers
        if made and more["tokens_put"] == more["steps"]: # a pass of steps alone
            steps, cpu = steps + 1, cpu + took
            sums = {name: sums.get(name, 0) + value for name, value in more.items()}
    return most, steps, cpu, sums


def serve(args, admit):
    """One engine, in this process; what came of its runs as lines."""
    from vllm import LLM
    from kvferry import Runtime, _planner
    from kvferry._blocks import Blocks
    from kvferry.vllm import estimate, options
    from kvferry.vllm.memory import Asked
    settings = {"budget": args.budget, "host_memory": args.host_memory, "device_memory": args.device_memory, "transfer": "mapped"}
    llm = LLM(args.model, dtype="bfloat16", max_model_len=args.tokens + args.new, max_num_seqs=args.requests, block_size=32,
              max_num_batched_tokens=2048, enable_prefix_caching=False, gpu_memory_utilization=0.1, enforce_eager=True,
              skip_tokenizer_init=args.small, attention_backend="CUSTOM", additional_config={"kvferry": {**settings, "admit": admit, "log_interval": 0}})
    engine, ids = llm.llm_engine, prompts_of(args)
    model = engine.vllm_config.model_config
    layers, token = model.get_total_num_hidden_layers(), 2 * model.get_head_size() * 2 # bytes, of a KV head
    host, own = (options.bytes_of(name, getattr(args, name)) for name in ("host_memory", "device_memory"))
    with Runtime(device="host") as runtime, open(os.path.join(args.model, "config.json"), encoding="utf-8") as text:
        p = _planner.plan(runtime, estimate.read(json.load(text)).attention, Asked(
            host, args.requests, args.tokens + args.new, own=own), {"budget_tokens": args.budget, "transfer": "mapped"})
    lists = Lists(p.budget.selected // 4, args.tokens, model.get_total_num_kv_heads())
    lists.follow(Blocks)
    for lists.stay in args.stay:
        for _ in range(args.runs):
            most, steps, cpu, sums = run(engine, args, ids, layers)
            rows, rate = sums["steps"] / layers, sums["page_hits"] / (sums["page_hits"] + sums["page_misses"])
            moved, each = (sums["bytes_to_device"] + sums["tokens_brought"] * token) / steps, rows / steps
            planned = p.step_bytes(math.ceil(each), rate) * each / math.ceil(each)
            print("@@ " + json.dumps({"stay": lists.stay, "admit": admit, "admitted": p.admitted, "most": most, "rate": rate,
                                      "tokens": rows / cpu, "bytes": moved, "planned": planned, "of the plan": moved / planned}), flush=True)


def tell(rows):
    """A line of the runs of an engine at a share."""
    first = rows[0]
    told = ", ".join("%s %s (%s to %s)" % (name, *(form % of([row[name] for row in rows]) for of in (statistics.median, min, max)))
                     for name, form in SHOWN)
    print("stay %s, admit %s: %d runs, at most %s requests at once where %d are planned; %s" % (
        first["stay"], first["admit"], len(rows), "/".join(map(str, sorted({row["most"] for row in rows}))), first["admitted"], told), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--device-memory", default="96MiB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--stay", type=lambda text: [None if one == "none" else float(one) for one in text.split(",")], default=[None],
                        help="none: steps choose")
    parser.add_argument("--model", default=os.environ.get("KVF_HF_MODEL"))
    parser.add_argument("--small", action="store_true", help="the random model of the tests, and drawn prompts")
    parser.add_argument("--admit", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.admit:
        return serve(args, args.admit)
    env = dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_PLUGINS="kvferry", OMP_WAIT_POLICY="passive",
               OMP_NUM_THREADS="1", KVFERRY_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    model = []
    if args.small:
        sys.path.insert(0, os.path.join(ROOT, "tests", "python"))
        import vllm_engine
        model = ["--model", vllm_engine.small_model()]
    for admit in ("all", "resident"):
        with subprocess.Popen([sys.executable, os.path.abspath(__file__), *sys.argv[1:], *model, "--admit", admit], env=env,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            lines = list(process.stdout)
        rows = [json.loads(line[3:]) for line in lines if line.startswith("@@ ")]
        for stay in args.stay if rows else ():
            tell([row for row in rows if row["stay"] == stay])
        if not rows:
            print("".join(lines[-40:]))


if __name__ == "__main__":
    main()
