#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention of kvferry, of PyTorch and of Transformers' offloaded cache on one GPU, in one run.

Layers of Llama-3.1-8B's shape in bf16. A decode step over 32K and 128K tokens, for batches of 1 and 16:
kvferry with its default budget, recorded; SDPA over all keys and values in device memory, as a graph;
DynamicCache(offloading=True), which brings every layer whole. And a prompt's attention at 4K, 16K and 32K,
where all compute the same, which is compared first: kvferry, SDPA by FlashAttention, and on a GPU by cuDNN,
which is the best of PyTorch on Hopper. --rows measures those whose names match. Times are by CUDA events, of
a layer, with L2 emptied before; the floor is bytes over the rate of a copy, or over that of the link. A case
that does not fit or is not installed is a row that says so. Exits with 77 without torch or without a GPU.

usage: bench_gpu.py [--device cuda|cpu] [--small] [--rows REGEX] [--json FILE]
"""
import argparse
import gc
import json
import re
import statistics
import sys
import time

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as missing:
    print("bench_gpu: nothing to compare with: %s" % missing, file=sys.stderr)
    sys.exit(77)

import kvferry
from kvferry.capi import Transfer

LARGE = {"heads": (32, 8, 128), "contexts": (32768, 131072), "batches": (1, 16), "prompts": (4096, 16384, 32768),
         "layers": 4, "repetitions": 21, "copy": 256 << 20}
SMALL = {"heads": (4, 2, 64), "contexts": (256, 1024), "batches": (1, 2), "prompts": (96, 160),
         "layers": 2, "repetitions": 2, "copy": 1 << 20}
WARMUP = 3
CHUNK = 2048
L2_BYTES = 256 << 20  # more than any has
CLOSE = 0.03  # bf16 has 8 bits, and outputs are below 4


class Bench:
    """A device, its clock, its rates, and the rows so far."""

    def __init__(self, device, small, path, rows):
        self.device, self.path, self.rows, self.failed = device, path, rows, False
        self.on_cuda = device == "cuda"
        self.size = SMALL if small else LARGE
        self.heads, self.kv_heads, self.dim = self.size["heads"]
        self.flush = torch.empty(L2_BYTES if self.on_cuda else 1, dtype=torch.uint8, device=device)
        self.runtime = kvferry.Runtime(device="cuda" if self.on_cuda else "host")
        self.said = {"device": torch.cuda.get_device_name() if self.on_cuda else "cpu",
                     "torch": torch.__version__, "results": []}
        count = self.size["copy"]
        near, far = (torch.zeros(count, dtype=torch.uint8, device=where, pin_memory=self.on_cuda and where == "cpu")
                     for where in (device, "cpu"))
        other = torch.empty_like(near)
        self.copy = 2e-3 * count / min(self.times(lambda: other.copy_(near), 7))
        self.link = 1e-3 * count / min(self.times(lambda: other.copy_(far, non_blocking=True), 7))
        self.said.update(copy_gb_per_s=self.copy, link_gb_per_s=self.link)

    def times(self, work, repetitions, before=lambda: None):
        """Microseconds of each."""
        taken = []
        for _ in range(repetitions):
            before()
            taken.append(self.events(work) if self.on_cuda else self.clock(work))
        return taken

    def events(self, work):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.flush.zero_()  # so that what follows is enqueued while the device is busy
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end)

    @staticmethod
    def clock(work):
        begin = time.perf_counter_ns()
        work()
        return 1e-3 * (time.perf_counter_ns() - begin)

    def graph(self, work):
        """The same as one CUDA graph; on the CPU itself."""
        work()
        if not self.on_cuda:
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def random(self, *shape):
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def row(self, what, context, batch, taken, layers=1, near_bytes=0, link_bytes=0, **more):
        """Times of so many layers; bytes of one."""
        taken = [t / layers for t in taken]
        tenths = statistics.quantiles(taken, n=10, method="inclusive")
        floor = max(near_bytes / self.copy, link_bytes / self.link) * 1e-3
        self.add({"what": what, "context": context, "batch": batch, "us": statistics.median(taken),
                  "p10_us": tenths[0], "p90_us": tenths[8], "bytes": near_bytes, "link_bytes": link_bytes,
                  "floor_us": floor, **more})

    def add(self, row):
        self.said["results"].append(row)
        if "us" in row:
            print("%-28s %7d tokens, batch %2d %12.1f us (%.1f to %.1f), floor %.1f%s" % (
                row["what"], row["context"], row["batch"], row["us"], row["p10_us"], row["p90_us"],
                row["floor_us"], "".join(", %s %.3g" % (k, row[k]) for k in ("hits", "tflop_per_s") if k in row)))
        else:
            print("%-28s %7d tokens, batch %2d %s" % (row["what"], row["context"], row["batch"], row["why"]))
        sys.stdout.flush()
        if self.path:
            with open(self.path, "w", encoding="utf-8") as out:
                json.dump(self.said, out, indent=1)

    def attempt(self, what, measure, context, batch):
        """A failure is a row, and the rest goes on."""
        if not self.rows.search(what):
            return
        try:
            measure(self, what, context, batch)
        except (torch.cuda.OutOfMemoryError, kvferry.OutOfMemory, MemoryError):
            self.add({"what": what, "context": context, "batch": batch, "why": "does not fit"})
        except ImportError as error:
            self.add({"what": what, "context": context, "batch": batch, "why": "needs %s" % error.name})
        except Exception as error:  # whatever the other library says
            self.failed = True
            self.add({"what": what, "context": context, "batch": batch,
                      "why": "%s: %s" % (type(error).__name__, str(error).split("\n")[0])})
        gc.collect()
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def flash(q, k, v, causal=False, by=SDPBackend.FLASH_ATTENTION):
    """[batch, heads, tokens, dim]; groups of query heads share a KV head."""
    with sdpa_kernel(by):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def own_choice(q, k, v):
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


# ---- a decode step: each appends one token per sequence, or has it ----


def kv_bytes(b, context, batch):
    return 2 * batch * context * b.kv_heads * b.dim * 2


def step_of_sdpa(attend, repeat=1):
    def measure(b, what, context, batch):
        layers = b.size["layers"]
        q = b.random(batch, b.heads, 1, b.dim)
        held = [[b.random(batch, b.kv_heads, context, b.dim).repeat_interleave(repeat, 1) for _ in range(2)]
                for _ in range(layers)]
        work = b.graph(lambda: [attend(q, k, v) for k, v in held])
        b.times(work, WARMUP)
        b.row(what, context, batch, b.times(work, b.size["repetitions"]), layers,
              repeat * kv_bytes(b, context, batch))
    return measure


def step_of_kvferry(b, what, context, batch):
    layers, steps = b.size["layers"], b.size["repetitions"]
    with kvferry.Cache(b.runtime, layers=layers, query_heads=b.heads, kv_heads=b.kv_heads, head_dim=b.dim,
                       tokens_max=context + steps + WARMUP + 4, sequences_max=batch, dtype="bf16",
                       prefill_chunk_max=CHUNK) as cache:
        sequences = [cache.sequence() for _ in range(batch)]
        for layer in range(layers):
            for sequence in sequences:
                k, v = (b.random(context, b.kv_heads, b.dim) for _ in range(2))
                cache.prefill(sequence, None, k, v, layer=layer)
        q, out = (b.random(batch, b.heads, b.dim) for _ in range(2))
        k, v = (b.random(batch, b.kv_heads, b.dim) for _ in range(2))
        q *= 2

        def enqueue(stream=None):
            for layer in range(layers):
                cache.decode(sequences, q, k, v, out, layer=layer, stream=stream)

        def turn():  # queries drift, as those of `kvferry bench decode`
            q.mul_(0.95).add_(torch.randn_like(q), alpha=0.62)

        enqueue()
        work, nodes = enqueue, None
        if b.on_cuda:
            stream = b.runtime.torch_stream()
            cache.record_begin(sequences, stream)
            enqueue(stream)
            recording = cache.record_end()
            nodes = recording.nodes / layers

            def work():
                recording.replay(stream) if recording.is_possible else enqueue(stream)
        b.times(work, WARMUP, turn)
        cache.stats_reset()
        taken = b.times(work, steps, turn)
        stats = cache.stats()
        near = stats.tokens_attended / steps / layers * 4 * b.dim + batch * context * b.kv_heads * (b.dim / 4 + 2)
        b.row(what, context, batch, taken, layers, near, stats.bytes_to_device / steps / layers,
              hits=stats.hits / max(1, stats.pages_selected), nodes=nodes,
              method=Transfer(cache.plan.transfer).name.lower())


def step_of_offloaded(b, what, context, batch):
    from transformers import DynamicCache
    layers, repetitions = 2, 3  # seconds of copies each; a layer comes while another is attended
    with torch.cuda.stream(torch.cuda.default_stream() if b.on_cuda else None):  # where Transformers waits
        cache = DynamicCache(offloading=b.on_cuda)
        for layer in range(layers):
            cache.update(*(b.random(batch, b.kv_heads, context, b.dim) for _ in range(2)), layer)
        q, token = b.random(batch, b.heads, 1, b.dim), b.random(batch, b.kv_heads, 1, b.dim)

        def work():
            for layer in range(layers):
                flash(q, *cache.update(token, token, layer))
        b.times(work, 1)
        b.row(what, context, batch, b.times(work, repetitions), layers, 0, kv_bytes(b, context, batch))


# ---- a prompt ----


def of_prompt(b, context, taken, what, **more):
    operations = 4 * b.heads * b.dim * context * (context + 1) / 2
    b.row(what, context, 1, taken, 1, 2 * 2 * context * (b.heads + b.kv_heads) * b.dim,
          tflop_per_s=operations / statistics.median(taken) * 1e-6, **more)


def prompt_of_sdpa(by):
    def measure(b, what, context, batch):
        q, k, v = (b.random(batch, n, context, b.dim) for n in (b.heads, b.kv_heads, b.kv_heads))

        def work():
            flash(q, k, v, True, by)
        b.times(work, WARMUP)
        of_prompt(b, context, b.times(work, b.size["repetitions"]), what)
    return measure


def prompt_of_kvferry(b, what, context, batch):
    """With all that comes with it: append, codes, and pages to the host."""
    with kvferry.Cache(b.runtime, layers=1, query_heads=b.heads, kv_heads=b.kv_heads, head_dim=b.dim,
                       tokens_max=context, dtype="bf16", prefill_chunk_max=CHUNK) as cache:
        sequence = cache.sequence()
        q, k, v = (b.random(context, n, b.dim) for n in (b.heads, b.kv_heads, b.kv_heads))
        out = torch.empty_like(q)

        def work():
            cache.prefill(sequence, q, k, v, out)

        def forget():
            sequence.truncate(0)
        b.times(work, WARMUP, forget)
        taken = b.times(work, b.size["repetitions"], forget)
        wanted = flash(*(x.transpose(0, 1)[None] for x in (q, k, v)), True)[0].transpose(0, 1)
        error = (out.float() - wanted.float()).abs().max().item()
        if not error < CLOSE:
            raise ArithmeticError("its output differs from SDPA's by %g" % error)
        of_prompt(b, context, taken, what, error_max=error)


STEPS = [("kvferry", step_of_kvferry), ("SDPA", step_of_sdpa(flash)), ("SDPA, own choice", step_of_sdpa(own_choice)),
         ("offloaded DynamicCache", step_of_offloaded)]
PROMPTS = [("kvferry prefill", prompt_of_kvferry), ("SDPA prefill", prompt_of_sdpa(SDPBackend.FLASH_ATTENTION))]
CUDNN = ("cuDNN prefill", prompt_of_sdpa(SDPBackend.CUDNN_ATTENTION))


def run(b):
    for context in b.size["prompts"]:
        for what, measure in PROMPTS + [CUDNN] * b.on_cuda:
            b.attempt(what, measure, context, 1)
    for batch in b.size["batches"]:
        for context in b.size["contexts"]:
            for what, measure in STEPS:
                b.attempt(what, measure, context, batch)
            if batch == 1:
                b.attempt("SDPA, heads repeated", step_of_sdpa(flash, b.heads // b.kv_heads), context, batch)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="shapes that a CPU has done in seconds")
    parser.add_argument("--rows", type=re.compile, default=re.compile(""), metavar="REGEX", help="measure these alone")
    parser.add_argument("--json", help="write every figure there")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench_gpu: torch sees no GPU; --device cpu --small tries the script", file=sys.stderr)
        return 77
    torch.manual_seed(1)
    if args.small:
        torch.set_num_threads(1)  # more would wait for each other most of the time
    with torch.no_grad():
        b = Bench(args.device, args.small, args.json, args.rows)
        print("%s, torch %s: copies %.1f GB/s, from the host %.1f GB/s" % (
            b.said["device"], torch.__version__, b.copy, b.link))
        with torch.cuda.stream(torch.cuda.Stream() if b.on_cuda else None): # the default one records nothing
            run(b)
    return int(b.failed)


if __name__ == "__main__":
    sys.exit(main())
