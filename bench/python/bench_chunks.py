#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A prompt that goes chunk by chunk, layer by layer: what it reads in host memory, and its time.

On the host device, where pages are moved as on a GPU. Layers take turns, so that every chunk attends to
earlier blocks that are not where it attends. Prints a row per share of the slots that pages could use.

usage: bench_chunks.py [TOKENS [CHUNK [QUERY_HEADS [KV_HEADS]]]]
"""
import sys
import time

import numpy as np

import kvferry

LAYERS, HEAD_DIM = 2, 64
TOKENS, CHUNK, QUERY_HEADS, KV_HEADS = [int(a) for a in sys.argv[1:5]] + [8192, 2048, 4, 1][len(sys.argv) - 1:]

rng = np.random.default_rng(1)
keys = rng.standard_normal((CHUNK, KV_HEADS, HEAD_DIM)).astype(np.float16)
queries = rng.standard_normal((CHUNK, QUERY_HEADS, HEAD_DIM)).astype(np.float16)
SHAPE = dict(layers=LAYERS, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="fp16",
             tokens_max=TOKENS + 64, prefill_chunk_max=CHUNK, transfer="gather")


def total(plan):
    return plan.device_kv_bytes + plan.device_digest_bytes + plan.device_table_bytes


def read(runtime, device_bytes):
    """Seconds by the clock and of CPU, and bytes read in host memory."""
    cache = kvferry.Cache(runtime, device_bytes=device_bytes, **SHAPE)
    sequence, out = cache.sequence(), np.empty_like(queries)
    begin, cpu = time.perf_counter(), time.process_time()
    for first in range(0, TOKENS, CHUNK):
        count = min(CHUNK, TOKENS - first)
        for layer in range(LAYERS):
            cache.prefill(sequence, queries[:count], keys[:count], keys[:count], out[:count], layer=layer)
    took = time.perf_counter() - begin, time.process_time() - cpu
    answer = *took, getattr(cache.stats(), "bytes_prompt", -1)
    sequence.close()
    cache.close()
    return answer


with kvferry.Runtime(device="host") as made:
    least, most = [total(kvferry.Cache.plan_for(made, device_bytes=size, **SHAPE)) for size in (0, 1 << 60)]
    for share, size in (("least", 0), ("half", (least + most) // 2), ("all", most)):
        clock, cpu, read_bytes = read(made, size)
        print("%-6s %8.2f s %8.2f s CPU %12d bytes" % (share, clock, cpu, read_bytes))
