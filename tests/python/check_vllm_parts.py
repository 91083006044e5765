#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The parts of the backend for vLLM that need no vLLM: settings, refusals, which request is whose.

What vLLM does with them is tested by check_vllm.py, under `./dev vllm`.
"""
import pathlib
import random
import tempfile
import types
import unittest

import numpy as np

import kvferry
from kvferry.vllm import options, refusals
from kvferry.vllm.requests import Requests, Row, rows_of

BLOCK, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 2, 4, 2, 32


class Options(unittest.TestCase):
    def test_both_sources(self):
        got = options.read({"budget": 256, "disk": "/tmp", "disk_bytes": "3GiB"}, {
            "KVFERRY_BUDGET_TOKENS": "64", "KVFERRY_PAGE_SIZE": "8", "KVFERRY_HOST_MEMORY": "2GiB",
            "KVFERRY_THREADS": "3", "KVFERRY_LIBRARY": "elsewhere", "HOME": "/"})
        self.assertEqual(got.cache, {"budget_tokens": 256, "page_size": "8", "disk_path": "/tmp"})
        self.assertEqual(got.runtime, {"threads": "3"})
        self.assertEqual((got.host_memory, got.disk_bytes, got.head_mask), (2 << 30, 3 << 30, None))

    def test_nothing_said(self):
        self.assertEqual(options.read({}, {}), ({}, {}, None, None, None, 60))

    def test_what_means_nothing_is_named(self):
        for text, given in (("no setting budgets: did you mean budget", {"budgets": 5}),
                            ("no setting tokens_max: vLLM and the model decide it", {"tokens_max": 5}),
                            ("budget_tokens and budget are one", {"budget": 5, "budget_tokens": 5}),
                            ("host_bytes = much: must be", {"host_memory": "much"}),
                            ("disk_bytes must say", {"disk": "/tmp"}),
                            ("log_interval = -1: must be", {"log_interval": -1}),
                            ("must be an object", [5])):
            with self.subTest(text), self.assertRaisesRegex(kvferry.Invalid, text):
                options.read(given, {})

    def test_head_mask(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "mask.tsv"
            path.write_text("1\t0\n0\t1\r\n\n", encoding="utf-8")
            self.assertEqual(options.read_mask(path, 2, 2), [[1, 0], [0, 1]])
            for text, wrong in (("2 lines of 2", "1\t0\n"), ("2 lines of 2", "1\t0\n1\n"),
                                ("neither 0 nor 1", "1\t0\n1\t0.5\n")):
                path.write_text(wrong, encoding="utf-8")
                with self.assertRaisesRegex(kvferry.Invalid, text):
                    options.read_mask(path, 2, 2)

    def test_memory_is_shared_by_ranks(self):
        self.assertGreater(options.default_memory(1), options.default_memory(4))
        with self.assertRaisesRegex(kvferry.Invalid, "host_memory must be said with data parallelism"):
            options.default_memory(1, 1)


def engine(**changes):
    """A VllmConfig as far as it is read; `part__field` is a field of a part."""
    parts = {
        "": dict(kv_transfer_config=None, speculative_config=None),
        "cache": dict(cache_dtype="auto"),
        "parallel": dict(decode_context_parallel_size=1, prefill_context_parallel_size=1,
                         use_ubatching=False),
        "model": dict(dtype="torch.bfloat16", is_hybrid=False, rswa_window=None)}
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        parts[part][field] = value
    made = {name + "_config": types.SimpleNamespace(**fields) for name, fields in parts.items() if name}
    return types.SimpleNamespace(**made, **parts[""])


class Refusals(unittest.TestCase):
    def refused(self, text, call, *given, **named):
        with self.subTest(text), self.assertRaisesRegex(kvferry.Unsupported, text):
            call(*given, **named)

    def test_engines(self):
        for good in ({}, {"cache__cache_dtype": "bfloat16"},
                     {"speculative_config": types.SimpleNamespace(method="ngram")}):
            refusals.check_engine(engine(**good))
        for text, bad in (
                ("KV connectors", {"kv_transfer_config": "any"}),
                ("kv_cache_dtype = fp8", {"cache__cache_dtype": "fp8"}),
                ("context parallelism", {"parallel__decode_context_parallel_size": 2}),
                ("context parallelism", {"parallel__prefill_context_parallel_size": 2}),
                ("micro-batches", {"parallel__use_ubatching": True}),
                ("linear or Mamba", {"model__is_hybrid": True}),
                ("reference sliding windows", {"model__rswa_window": 8}),
                ("drafts by eagle",
                 {"speculative_config": types.SimpleNamespace(method="eagle")})):
            self.refused(text, refusals.check_engine, engine(**bad))

    def test_layers(self):
        refusals.check_layer()
        for text, bad in (("type encoder_only", {"attn_type": "encoder_only"}),
                          ("type encoder_decoder", {"attn_type": "encoder_decoder"}),
                          ("ALiBi", {"alibi_slopes": [1.0]}),
                          ("sliding window", {"sliding_window": 128}),
                          ("soft caps", {"logits_soft_cap": 30.0}),
                          ("attention sinks", {"sinks": np.zeros(4)}),
                          ("share the keys", {"shares": "layer 1"})):
            self.refused(text, refusals.check_layer, **bad)

    def test_blocks(self):
        plain = dict(head_size=64, head_size_v=64, sliding_window=None, attention_chunk_size=None,
                     non_causal=False)
        refusals.check_spec(types.SimpleNamespace(**plain))
        for text, bad in (("values of 32 elements", {"head_size_v": 32}),
                          ("part of the context", {"sliding_window": 64}),
                          ("part of the context", {"attention_chunk_size": 64}),
                          ("come later", {"non_causal": True})):
            self.refused(text, refusals.check_spec, types.SimpleNamespace(**{**plain, **bad}))


class Owners(unittest.TestCase):
    """Requests over blocks that are given out and taken back as vLLM does it."""

    def setUp(self):
        self.rng = np.random.default_rng(5)
        self.runtime = kvferry.Runtime(device="host", threads=1)
        self.addCleanup(self.runtime.close)

    def requests(self, limit, blocks, flight=1):
        cache = kvferry.Cache(self.runtime, layers=LAYERS, query_heads=QUERY_HEADS, kv_heads=KV_HEADS,
                              head_dim=HEAD_DIM, tokens_max=256, host_tokens_max=blocks * BLOCK,
                              sequences_max=limit, local_tokens=32, dtype="fp32")
        return Requests(cache, limit, flight)

    def fill(self, requests, sequence, tokens):
        k = self.rng.standard_normal((tokens, KV_HEADS, HEAD_DIM)).astype(np.float32)
        for layer in range(LAYERS):
            requests.cache.prefill(sequence, None, k, k, layer=layer)

    def enter(self, requests, *rows):
        """rows: (context, tokens, table) of requests."""
        made = [Row(0, tokens, context, table[0],
                    table[context // BLOCK:(context + tokens - 1) // BLOCK + 1], False)
                for context, tokens, table in rows]
        sequences = requests.enter(made)
        for sequence, row in zip(sequences, made):
            self.assertEqual(len(sequence), row.context)
            self.fill(requests, sequence, row.end)
        return sequences

    def test_a_request_goes_on(self):
        requests = self.requests(2, 8)
        a, b = self.enter(requests, (0, 40, [3, 1]), (0, 5, [4]))
        self.assertEqual(self.enter(requests, (5, 1, [4]), (40, 1, [3, 1])), [b, a])
        self.assertEqual(self.enter(requests, (43 - 5, 4, [3, 1])), [a]) # candidates taken back
        self.assertEqual(requests.tokens(), 42 + 6)

    def test_a_block_of_another_table_ends_its_request(self):
        requests = self.requests(4, 8)
        a, b = self.enter(requests, (0, 40, [3, 1]), (0, 5, [4]))
        c, = self.enter(requests, (0, 40, [5, 1]))
        self.assertTrue(a.closed and not b.closed)
        self.enter(requests, (40, 30, [5, 1, 4]))
        self.assertTrue(b.closed and not c.closed)
        d, = self.enter(requests, (0, 5, [5])) # preempted, and begun again in its own block
        self.assertTrue(c.closed and not d.closed)
        self.assertEqual(len(requests), 1)

    def test_the_oldest_goes_where_all_are_taken(self):
        requests = self.requests(2, 8)
        a, b = self.enter(requests, (0, 5, [1]), (0, 5, [2]))
        c, _ = self.enter(requests, (0, 5, [3]), (5, 1, [1]))
        self.assertTrue(b.closed and not a.closed and not c.closed)
        with self.assertRaisesRegex(kvferry.Error, "more than 2 requests are alive"):
            self.enter(requests, (6, 1, [1]), (5, 1, [3]), (0, 5, [4]))

    def test_what_was_not_seen_is_an_error(self):
        requests = self.requests(2, 8)
        with self.assertRaisesRegex(kvferry.Error, "7 tokens that were never seen"):
            self.enter(requests, (7, 1, [1]))
        self.enter(requests, (0, 5, [1]))
        with self.assertRaisesRegex(kvferry.Error, "7 tokens, of which 5"):
            self.enter(requests, (7, 1, [1]))

    def test_a_value_that_is_not_finite_is_its_request_s_matter(self):
        requests = self.requests(2, 8)
        a, b = self.enter(requests, (0, 5, [1]), (0, 5, [2]))
        k = np.full((1, KV_HEADS, HEAD_DIM), np.nan, np.float32)
        for layer in range(LAYERS):
            if layer:
                with self.assertRaisesRegex(kvferry.Error, "not finite|NaN") as told:
                    requests.cache.prefill(a, None, k, k, layer=layer)
                with self.assertLogs("vllm.kvferry", "WARNING") as logs:
                    requests.lose(a, told.exception)
                self.assertIn("a request is lost, others go on: layer 0, token 5", logs.output[0])
            else:
                requests.cache.prefill(a, None, k, k, layer=layer)
        rows = [Row(0, 1, 6, 1, (1,), False), Row(1, 2, 5, 2, (2,), False)]
        self.assertEqual(requests.enter(rows), [None, b])
        self.assertEqual(requests.lost, 1)
        with self.assertRaisesRegex(kvferry.Invalid, "nothing of values"):
            requests.lose(b, kvferry.Invalid("nothing of values"))
        c, = self.enter(requests, (0, 5, [1])) # the block is another's, and the sequence a new one
        self.assertTrue(a.closed and not c.closed)

    def test_candidates_that_were_not_finite(self):
        requests = self.requests(2, 8)
        a, = self.enter(requests, (0, 5, [1]))
        k = np.full((2, KV_HEADS, HEAD_DIM), np.inf, np.float32)
        requests.cache.prefill(a, None, k, k, layer=0)
        with self.assertLogs("vllm.kvferry", "WARNING"):
            self.assertEqual(requests.enter([Row(0, 1, 6, 1, (1,), False)]), [None])
        self.assertEqual(requests.lost, 1)

    def test_rows(self):
        slots = np.array([2 * 32 + 31, 5 * 32, 9 * 32 + 3, -1])
        self.assertEqual(rows_of([0, 2, 3, 3, 4], [33, 4, 0, 1], [7, 9, 4, 0], slots, 32,
                                 [True, False, False, False]),
                         [Row(0, 2, 31, 7, {2: None, 5: None}, True), Row(2, 3, 3, 9, (9,), False)])

    def test_a_scheduler_at_random(self):
        """A pool as large as all blocks always has room, and every sequence has its request's tokens."""
        for flight in (1, 2):
            self.schedule(random.Random(flight), flight)

    def schedule(self, rng, flight, blocks=8, most=6, passes=400):
        requests = self.requests(most * flight, blocks, flight)
        free, alive, under_way = list(range(1, blocks + 1)), [], []
        for _ in range(passes):
            busy = [r for batch in under_way for r in batch]
            for request in [r for r in alive if rng.random() < 0.05]: # ended, aborted or preempted
                alive.remove(request)
                free += request["table"]
            batch = []
            if len(alive) < most and free:
                alive.append({"held": 0, "table": []})
            for request in [r for r in alive if r not in busy]:
                tokens = rng.choice((1, 3, 40))
                need = -(-(request["held"] + tokens) // BLOCK) - len(request["table"])
                if need <= len(free) and request["held"] + tokens <= 256:
                    request["table"] += [free.pop(0) for _ in range(need)]
                    batch.append((request, tokens))
                else: # preempted
                    alive.remove(request)
                    free += request["table"]
            rng.shuffle(batch)
            if batch:
                self.enter(requests, *((r["held"], tokens, r["table"]) for r, tokens in batch))
            for request, tokens in batch:
                request["held"] += tokens - (rng.randrange(3) if tokens == 3 else 0)
            under_way = (under_way + [[r for r, _ in batch]])[-flight + 1:] if flight > 1 else []


if __name__ == "__main__":
    unittest.main()
