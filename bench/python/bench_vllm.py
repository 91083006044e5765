#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM with its own attention for CPUs and with kvferry's: time of a prompt and per token, side by side.

Every engine is a process of its own, with the real model in the folder KVF_HF_MODEL in bf16 and
contexts of a text repeated; positions beyond what the model was made for are allowed, since only time is
measured. With --drawn a prompt is not computed: its keys and values are drawn, and written as those of a
prompt are, so that long contexts take seconds. Both read a prompt, and then step, in turns, so that what
else the machine does meets both. With --threads 1 nobody waits for another thread:
on a machine that does other work, CPU time is then that of the work alone. Tokens that fit follow from
the sizes that both reserve.

usage: bench_vllm.py [--tokens N,N...] [--batch N,N...] [--steps N] [--prompts N] [--budget N] [--drawn]
                     [--threads N] [--dtype TYPE] [--out FILE]
       ./dev vllm --run bench/python/bench_vllm.py --out bench/results/vllm.md
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GIB = 1 << 30
HOST = 128 * GIB # for pages, more than a GiB of codes has
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64 # of SmolLM2-135M
BLOCK = 32
TURN = 8 # steps
SPARE = 64 # tokens of a request before the last one has its first


def draw_prompts(llm, rows):
    """Passes of more than `rows` tokens write keys and values that are drawn, in every layer."""
    import torch
    from vllm.model_executor.layers.attention.attention import get_attention_context
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    layers = runner.vllm_config.compilation_config.static_forward_context
    compute = runner.model.forward

    def forward(input_ids=None, positions=None, *given, **named):
        tokens = positions.numel()
        if tokens <= rows:
            return compute(input_ids, positions, *given, **named)
        dtype = runner.model_config.dtype
        k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, dtype=dtype)
        for name, layer in layers.items():
            metadata, _, cache, slots = get_attention_context(name)
            if hasattr(layer.impl, "write"): # ours
                layer.impl.write(k, v, cache, metadata)
                layer.impl.pool.stream().wait()
            else:
                layer.impl.do_kv_cache_update(layer, k, v, cache, slots)
        return torch.zeros(tokens, runner.model_config.get_hidden_size(), dtype=dtype)

    runner.model.forward = forward


def serve(job):
    """In a process of its own, what each line of input says: "prompt", one alone; "begin", those of all
    requests; or how many steps.

    CPU seconds of prompts, and milliseconds of every step as (time, CPU time), go to job["told"].
    """
    import transformers
    from vllm import LLM, SamplingParams
    with open(os.path.join(ROOT, "ARCHITECTURE.md"), encoding="utf-8") as text:
        ids = transformers.AutoTokenizer.from_pretrained(job["model"])(text.read()).input_ids
    ids = (ids * (job["tokens"] // len(ids) + 1))[:job["tokens"]]
    room = job["tokens"] + job["steps"] + 2 * SPARE
    memory = job["batch"] * (room + 256) * bytes_per_token() * (2 if job["dtype"] == "float32" else 1)
    memory += 64 << 20
    ours = {"attention_backend": "CUSTOM", "additional_config": {"kvferry": {
        "budget": job["budget"], "host_memory": memory}}}
    llm = LLM(job["model"], dtype=job["dtype"], max_model_len=room, max_num_seqs=job["batch"],
              max_num_batched_tokens=2048, enable_prefix_caching=False, gpu_memory_utilization=0.1,
              hf_overrides={"max_position_embeddings": max(room, 8192)}, block_size=BLOCK,
              enforce_eager=True, **(ours if job["ours"] else {"kv_cache_memory_bytes": memory}))
    engine = llm.llm_engine
    if job["drawn"]:
        draw_prompts(llm, job["batch"])

    def prompts(names, tokens):
        """Until each has its first token."""
        begin, first = time.process_time(), set()
        for name in names:
            engine.add_request(name, {"prompt_token_ids": ids}, SamplingParams(
                temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens))
        while len(first) < len(names):
            first |= {one.request_id for one in engine.step() if one.outputs[0].token_ids}
        return time.process_time() - begin

    def step():
        wall, cpu = time.perf_counter(), time.process_time()
        engine.step()
        return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3

    with open(job["told"], "w", encoding="utf-8") as told:
        for number, line in enumerate(map(str.strip, sys.stdin)):
            if line == "prompt":
                answer = prompts(["alone %d" % number], 1)
            elif line == "begin":
                answer = prompts([str(row) for row in range(job["batch"])], job["steps"] + SPARE)
            else:
                answer = [step() for _ in range(int(line))]
            print(json.dumps(answer), file=told, flush=True)


def bytes_per_token():
    return LAYERS * KV_HEADS * HEAD_DIM * 2 * 2


class Engine:
    """A process that reads prompts and steps when it is told to."""

    def __init__(self, job, folder):
        told = os.path.join(folder, "ours" if job["ours"] else "theirs")
        os.mkfifo(told)
        threads = {"OMP_NUM_THREADS": str(job["threads"]), "KVFERRY_THREADS": str(job["threads"]),
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if job["threads"] else {}
        env = dict(os.environ, **threads, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_PLUGINS="kvferry",
                   OMP_WAIT_POLICY="passive") # threads that wait take no CPU time
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--job", json.dumps(dict(job, told=told))],
            env=env, stdin=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        self.told = open(told, encoding="utf-8")
        self.prompts, self.steps = [], []

    def _ask(self, line):
        print(line, file=self.process.stdin, flush=True)
        return json.loads(self.told.readline())

    def prompt(self):
        """One, alone."""
        self.prompts.append(self._ask("prompt"))

    def begin(self):
        """Prompts of all its requests."""
        self._ask("begin")

    def step(self, count):
        """So many steps of all its requests."""
        self.steps += self._ask(count)

    def close(self):
        """CPU seconds of a prompt; time and CPU time of a step, in words."""
        self.process.stdin.close()
        self.process.wait()
        self.told.close()
        wall, cpu = ("%.1f ms (%.1f to %.1f)" % (statistics.median(one), cuts[0], cuts[-1])
                     for one in zip(*self.steps) for cuts in [statistics.quantiles(one, n=10)])
        prompt = "%.2f s (%.2f to %.2f)" % (statistics.median(self.prompts), min(self.prompts),
                                            max(self.prompts)) if self.prompts else "drawn"
        return {"prompt": prompt, "wall": wall, "cpu": cpu}


def run(job):
    """vLLM and kvferry in turns: a prompt each, then a few steps each."""
    with tempfile.TemporaryDirectory() as folder:
        both = [Engine(dict(job, ours=ours), folder) for ours in (False, True)]
        for _ in range(0 if job["drawn"] else job["prompts"]):
            for engine in both:
                engine.prompt()
        for engine in both:
            engine.begin()
        for _ in range(0, job["steps"], TURN):
            for engine in both:
                engine.step(TURN)
        return [engine.close() for engine in both]


def admitted(budget, tokens):
    """Tokens in 1 GiB of device memory, in requests of `tokens`: in vLLM's own blocks; with kvferry where
    pages are read in place; and where they are moved, with the windows that there are then.

    As the plug-in divides a GiB with device_memory = 0: as few slots as a call needs.
    """
    import kvferry
    from kvferry.vllm.memory import Asked, Sums, blocks_that_fit, divide_own
    runtime, each = kvferry.Runtime(device="host"), -(-tokens // BLOCK)

    def kept(transfer):
        def plan(blocks, regions, tokens_max):
            return kvferry.Blocks.plan_for(
                runtime, block_count=blocks, block_tokens=BLOCK, layers=LAYERS, query_heads=QUERY_HEADS,
                kv_heads=KV_HEADS, head_dim=HEAD_DIM, tokens_max=tokens_max, sequences_max=regions,
                budget_tokens=budget, dtype="bf16", transfer=transfer, device_bytes=0)
        sums = Sums(Asked(HOST, 1024, tokens, BLOCK, LAYERS * plan(2, 1, BLOCK).code_bytes, GIB, 0), plan)
        blocks = blocks_that_fit(sums)
        requests = (blocks - 1) // each
        return requests * tokens, requests, min(requests, divide_own(sums, blocks).regions)
    in_place, moved = kept("direct"), kept("mapped")
    return GIB // bytes_per_token() // BLOCK * BLOCK, in_place[0], moved


def cpu_name():
    with open("/proc/cpuinfo", encoding="utf-8") as text:
        return next((line.split(":")[1].strip() for line in text if line.startswith("model name")),
                    "unknown")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="1024,5120,24576")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--steps", type=int, default=32, help="a multiple of %d" % TURN)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--drawn", action="store_true", help="do not compute prompts")
    parser.add_argument("--threads", type=int, help="of each; else what they take")
    parser.add_argument("--note", default="", help="a sentence for the head of the file")
    parser.add_argument("--out")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        serve(json.loads(args.job))
        return
    lines = ["# vLLM", "", "Written by `./dev vllm --run bench/python/bench_vllm.py --tokens %s --batch %s "
             "--steps %d --budget %d --dtype %s%s%s`." % (args.tokens, args.batch, args.steps, args.budget, args.dtype,
                                                         " --drawn" if args.drawn else "",
                                                         " --threads %d" % args.threads if args.threads else ""), "",
             "%s, %d cores; SmolLM2-135M in %s, greedy, eager; vllm-cpu 0.32.0; budget %d. A prompt in CPU "
             "seconds, median with the least and the most; a step as time and as CPU time of all threads, median "
             "with the first and last decile.%s" % (cpu_name(), len(os.sched_getaffinity(0)), args.dtype, args.budget,
                             " " + args.note if args.note else ""), "",
             "| context | requests | | prompt | step | CPU time of a step |",
             "|---|---|---|---|---|---|"]
    for tokens in map(int, args.tokens.split(",")):
        for batch in map(int, args.batch.split(",")):
            job = dict(model=os.environ["KVF_HF_MODEL"], tokens=tokens, batch=batch, steps=args.steps,
                       budget=args.budget, dtype=args.dtype, drawn=args.drawn, threads=args.threads,
                       prompts=args.prompts)
            for name, row in zip(("vLLM", "kvferry"), run(job)):
                lines.append("| {:,} | {} | {} | {prompt} | {wall} | {cpu} |".format(tokens, batch, name, **row))
                print(lines[-1], flush=True)
    lines += ["", "Tokens that 1 GiB of device memory admits, with codes, tables and the slots of one call: where pages are "
              "read in place, and where they are moved, as on a GPU (`mapped`). There windows take an eighth of it: "
              "requests beyond these bring their window in every step.", "",
              "| requests of | vLLM | in place | | moved | | requests | of them with a window |",
              "|---|---|---|---|---|---|---|---|"]
    for tokens in map(int, args.tokens.split(",")):
        theirs, mine, (moved, requests, windows) = admitted(args.budget, tokens)
        lines.append("| {:,} | {:,} | {:,} | {:.1f}x | {:,} | {:.1f}x | {:,} | {:,} |".format(
            tokens, theirs, mine, mine / theirs, moved, moved / theirs, requests, windows))
    text = "\n".join(lines) + "\n"
    if args.out:
        with open(args.out, "w", encoding="utf-8") as out:
            out.write(text)
    print(text)


if __name__ == "__main__":
    main()
