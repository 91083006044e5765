#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention of a chunk of a prompt: vLLM's kernel for CPUs beside kvferry's, and torch's SDPA.

One process, one thread, one layer of SmolLM2's shape with drawn keys and values, by turns; writing them
to the cache is apart. Milliseconds of CPU time, median with the least and the most.

usage: ./dev vllm --run bench/python/bench_vllm_chunk.py [ROUNDS]
"""
import functools
import statistics
import sys
import time

import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform

import kvferry

QUERY_HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64 # of SmolLM2-135M
BLOCK = 32
CHUNKS = ((512, 0), (1024, 0), (2048, 0), (2048, 2048), (512, 3584)) # tokens, after so many
SAME = {"isa": "vec", "kv_cache_dtype": "auto"}


class Layer:
    """Keys and values of a row in both caches; block 0 is nobody's."""

    def __init__(self, dtype, tokens, context):
        self.dtype, self.context, self.length = dtype, context, tokens + context
        count = -(-self.length // BLOCK) + 1
        rows = torch.randn(self.length, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
        q, self.k, self.v = (part.unflatten(1, (-1, HEAD_DIM)) for part in rows.split(
            [heads * HEAD_DIM for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)], 1))
        self.q = q[context:].contiguous()
        self.slots = torch.arange(BLOCK, BLOCK + self.length)
        self.table = torch.arange(1, count, dtype=torch.int32)[None]
        self.lengths = torch.tensor([self.length], dtype=torch.int32)
        self.starts = torch.tensor([0, tokens], dtype=torch.int32)
        runtime = kvferry.Runtime(device="host", threads=1)
        self.stream = kvferry.Stream(runtime)
        self.blocks = kvferry.Blocks(
            runtime, block_count=count, block_tokens=BLOCK, layers=1, query_heads=QUERY_HEADS,
            kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, tokens_max=self.length, sequences_max=1)
        self.codes = torch.zeros(count * self.blocks.plan.code_bytes // 16 + 1, 2, dtype=torch.int64)
        self.blocks.bind(0, self.codes.data_ptr())
        self.cache = torch.zeros(count, KV_HEADS, 2 * BLOCK, HEAD_DIM, dtype=dtype).chunk(2, dim=2)
        self.out = [torch.empty_like(self.q) for _ in range(2)]
        self.write_theirs(0)
        self.write_ours(0)

    def write_theirs(self, first):
        ops.cpu_attn_reshape_and_cache(self.k[first:], self.v[first:], *self.cache, self.slots[first:],
                                       k_scale=1.0, v_scale=1.0, **SAME)

    def write_ours(self, first):
        self.blocks.put(0, self.length - first, self.k[first:].data_ptr(), self.v[first:].data_ptr(),
                        self.slots[first:].data_ptr(), self.stream, k_stride=self.k.stride(0),
                        v_stride=self.v.stride(0))
        self.stream.wait()

    def attend_theirs(self):
        shape = {"causal": True, "dynamic_causal": None, "kv_cache_dtype": "auto"}
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=QUERY_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            seq_lens=self.lengths, dtype=self.dtype, query_start_loc=self.starts,
            sliding_window_size=-1, isa=SAME["isa"], enable_kv_split=True, **shape)
        ops.cpu_attention_with_kv_cache(
            query=self.q, key_cache=self.cache[0], value_cache=self.cache[1], output=self.out[0],
            query_start_loc=self.starts, seq_lens=self.lengths, scale=HEAD_DIM ** -0.5,
            alibi_slopes=None, sliding_window=-1, block_table=self.table, softcap=0,
            scheduler_metadata=plan, s_aux=None, k_scale=1.0, v_scale=1.0, **shape)

    def attend_ours(self):
        self.blocks.extend(0, (self.table.data_ptr(), self.table.stride(0)), self.lengths.data_ptr(),
                           self.starts.tolist(), [self.context], self.q.data_ptr(),
                           self.out[1].data_ptr(), self.stream)
        self.stream.wait()

    def attend_torch(self):
        """Where nothing is in front."""
        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (self.q, self.k, self.v)), is_causal=True, enable_gqa=True)


def told(times):
    return "%.1f (%.1f to %.1f)" % (statistics.median(times), min(times), max(times))


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    torch.set_num_threads(1)
    torch.manual_seed(1)
    current_platform.import_kernels()
    print("| | chunk | behind | vLLM writes | kvferry writes | vLLM | kvferry | | torch |\n|---|---|---|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, context in CHUNKS:
            layer = Layer(dtype, tokens, context)
            calls = [functools.partial(layer.write_theirs, context),
                     functools.partial(layer.write_ours, context), layer.attend_theirs, layer.attend_ours]
            calls += [] if context else [layer.attend_torch]
            times = [[] for _ in calls]
            for _ in range(rounds):
                for call, mine in zip(calls, times):
                    begin = time.process_time()
                    call()
                    mine.append((time.process_time() - begin) * 1e3)
            torch.testing.assert_close(*layer.out, rtol=0.02, atol=0.02)
            ratio = statistics.median(times[2]) / statistics.median(times[3])
            print("| %s | %d | %d | %s | %.1fx | %s |" % (
                str(dtype)[6:], tokens, context, " | ".join(map(told, times[:4])), ratio,
                "" if context else told(times[4])), flush=True)


if __name__ == "__main__":
    main()
