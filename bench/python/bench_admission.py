#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Requests that run at once in vLLM with `admit` = all and resident, where the device has room for few budgets.

Each is a process of its own, with the real model in the folder KVF_HF_MODEL in bf16. Pages are moved to a small
device memory, as on a GPU, so on a CPU a move costs a copy and no link. Prompts are cut from a text at different
places. Told are tokens a second of CPU time, most requests at once, the hit rate, and bytes of a step beside those of
the plan at that rate.

usage: bench_admission.py [--requests N] [--tokens N] [--new N] [--budget N] [--small]
                          [--host-memory SIZE] [--device-memory SIZE]
       ./dev vllm --run bench/python/bench_admission.py
"""
import argparse
import json
import math
import os
import random
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def serve(args, admit):
    """One engine, in this process; what came of it as a line."""
    from prometheus_client import generate_latest
    from vllm import LLM, SamplingParams
    from kvferry import Runtime, _planner
    from kvferry.vllm import estimate
    if args.small:
        draw = random.Random(3)
        ids = [draw.randrange(2, 160) for _ in range(2 * args.tokens)]
    else:
        from transformers import AutoTokenizer
        with open(os.path.join(ROOT, "CONTRIBUTING.md"), encoding="utf-8") as text:
            ids = AutoTokenizer.from_pretrained(args.model)(text.read()).input_ids
        ids = ids * (2 * args.tokens // len(ids) + 1)
    settings = {"budget": args.budget, "host_memory": args.host_memory, "device_memory": args.device_memory, "transfer": "mapped"}
    llm = LLM(args.model, dtype="bfloat16", max_model_len=args.tokens + args.new, max_num_seqs=args.requests, block_size=32,
              max_num_batched_tokens=2048, enable_prefix_caching=False, gpu_memory_utilization=0.1, enforce_eager=True,
              skip_tokenizer_init=args.small, attention_backend="CUSTOM", additional_config={"kvferry": {**settings, "admit": admit, "log_interval": 0}})
    engine = llm.llm_engine
    config = engine.vllm_config
    for number in range(args.requests):
        begin = 97 * number % args.tokens
        engine.add_request(str(number), {"prompt_token_ids": ids[begin:begin + args.tokens]},
                           SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=args.new))
    scheduler = engine.engine_core.engine_core.scheduler

    def counters():
        told = {}
        for line in generate_latest().decode().splitlines():
            if line.startswith("kvferry:") and "_total{" in line:
                told[line[len("kvferry:"):].partition("_total{")[0]] = float(line.rsplit(" ", 1)[1])
        return told
    most, steps, cpu, sums, layers = 0, 0, 0.0, {}, config.model_config.get_total_num_hidden_layers()
    first = time.process_time()
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
    whole, rows = time.process_time() - first, sums["steps"] / layers
    rate = sums["page_hits"] / (sums["page_hits"] + sums["page_misses"])
    token = 2 * config.model_config.get_head_size() * 2 # bytes, of a KV head
    moved = sums["bytes_to_device"] + sums["tokens_brought"] * token
    with Runtime(device="host") as runtime, open(os.path.join(args.model, "config.json"), encoding="utf-8") as text:
        p = _planner.plan(runtime, estimate.read(json.load(text)).attention, _planner.Load(
            engine_bytes(args.host_memory), None, args.requests, args.tokens + args.new, own=engine_bytes(args.device_memory)),
                          {"budget_tokens": args.budget, "transfer": "mapped"})
    print("@@ " + json.dumps({
        "admit": admit, "admitted": p.admitted, "most": most, "steps": steps, "rows": rows / steps, "rate": rate,
        "tokens per CPU second of steps": rows / cpu, "of all": args.requests * args.new / whole,
        "bytes of a step": moved / steps, "planned": p.step_bytes(math.ceil(rows / steps), rate) * rows / steps / math.ceil(rows / steps)}), flush=True)


def engine_bytes(text):
    from kvferry.vllm import options
    return options.bytes_of("device_memory", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--device-memory", default="96MiB")
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
        told = [line[3:] for line in lines if line.startswith("@@ ")]
        print(told[0] if told else "".join(lines[-40:]), flush=True)


if __name__ == "__main__":
    main()
