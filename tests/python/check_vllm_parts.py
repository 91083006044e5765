#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The parts of the backend for vLLM that need no vLLM: settings, refusals, what a row attends to.

What vLLM does with them is tested by check_vllm.py, under `./dev vllm`.
"""
import os
import random
import tempfile
import types
import unittest

import numpy as np

import kvferry
from kvferry.vllm import heads, options, refusals
from kvferry.vllm.regions import Followed, Regions
from kvferry.vllm.rows import Run, runs_of


class Options(unittest.TestCase):
    def test_both_sources(self):
        got = options.read({"budget": 256}, {
            "KVFERRY_BUDGET_TOKENS": "64", "KVFERRY_PAGE_SIZE": "8", "KVFERRY_HOST_MEMORY": "2GiB",
            "KVFERRY_THREADS": "3", "KVFERRY_LIBRARY": "elsewhere", "HOME": "/",
            "KVFERRY_HEAD_MASK": "hot.tsv"})
        self.assertEqual(got.cache, {"budget_tokens": 256, "page_size": "8"})
        self.assertEqual(got.runtime, {"threads": "3"})
        self.assertEqual(got.host_memory, 2 << 30)
        self.assertEqual(got.head_mask, "hot.tsv")

    def test_nothing_said(self):
        self.assertEqual(options.read({}, {}), ({}, {}, None, 60, 0, None))

    def test_what_means_nothing_is_named(self):
        for text, given in (("no setting budgets: did you mean budget", {"budgets": 5}),
                            ("no setting tokens_max: vLLM and the model decide it", {"tokens_max": 5}),
                            ("budget_tokens and budget are one", {"budget": 5, "budget_tokens": 5}),
                            ("host_bytes = much: must be", {"host_memory": "much"}),
                            ("log_interval = -1: must be seconds", {"log_interval": -1}),
                            ("verify_interval = no: must be a number of passes", {"verify_interval": "no"}),
                            ("verify_interval = 0.5: must be a number of passes", {"verify_interval": 0.5}),
                            ("log_interval = inf: must be seconds", {"log_interval": float("inf")}),
                            ("must be an object", [5])):
            with self.subTest(text), self.assertRaisesRegex(kvferry.Invalid, text):
                options.read(given, {})

    def test_what_has_no_home_is_refused(self):
        for name, why in (("disk", "stays in host memory"), ("disk_path", "stays in host memory"),
                          ("disk_bytes", "stays in host memory"), ("observe_window", "cannot be pruned"),
                          ("phase_times", "vLLM's own profiler")):
            with self.subTest(name), self.assertRaisesRegex(
                    kvferry.Unsupported, "no %s: .*%s.*; leave it out" % (name, why)):
                options.read({name: "any"}, {})

    def test_memory_is_shared_by_ranks(self):
        self.assertGreater(options.default_memory(1), options.default_memory(4))
        for room in (0, 106, 107, 113, 114, 115, 10**9):
            most = options.most_that_fit(lambda blocks: 100 + 7 * blocks, room)
            self.assertEqual(most, max(0, (room - 100) // 7))
        with self.assertRaisesRegex(kvferry.Invalid, "host_memory must be said with data parallelism"):
            options.default_memory(1, 1)


def engine(**changes):
    """A VllmConfig as far as it is read; `part__field` is a field of a part."""
    parts = {
        "": dict(kv_transfer_config=None, speculative_config=None),
        "cache": dict(cache_dtype="auto", enable_prefix_caching=True),
        "parallel": dict(decode_context_parallel_size=1, prefill_context_parallel_size=1,
                         use_ubatching=False),
        "model": dict(dtype="torch.bfloat16", is_hybrid=False, rswa_window=None)}
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        parts[part][field] = value
    made = {name + "_config": types.SimpleNamespace(**fields) for name, fields in parts.items() if name}
    return types.SimpleNamespace(**made, **parts[""])


class Heads(unittest.TestCase):
    """A model of 3 layers with 4 KV heads."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def read(self, text, layers=(0, 1, 2), kv_heads=4, rank=0, ranks=1):
        path = os.path.join(self.folder.name, "hot.tsv")
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
        return heads.read(path, 3, 4, heads.Share(layers, kv_heads, rank, ranks)).tolist()

    def test_a_rank_has_its_own(self):
        text = "1\t2\t2\t2\n2\t1\t1\t2\n2\t2\t2\t1\n"
        self.assertEqual(self.read(text), [[1, 2, 2, 2], [2, 1, 1, 2], [2, 2, 2, 1]])
        self.assertEqual(self.read(text, (1, 2)), [[2, 1, 1, 2], [2, 2, 2, 1]])
        self.assertEqual(self.read(text, (0, 1, 2), 2, 1, 2), [[2, 2], [1, 2], [2, 1]])
        for rank in range(8): # two ranks have each head
            self.assertEqual(self.read(text, (1,), 1, rank, 8), [[(2, 1, 1, 2)[rank // 2]]])

    def test_heads_that_select(self):
        self.assertEqual(heads.that_select(np.array([[1, 0], [2, 1]]), 2, 4, 2).tolist(),
                         [[True, True, False, False], [True] * 4])
        self.assertEqual(heads.that_select(None, 2, 3, 1).tolist(), [[True] * 3] * 2)

    def test_first_line(self):
        self.assertEqual(heads.describe(np.array([[1, 2], [2, 0]])),
                         "of the heads 25% hot, 50% coarse, 25% streaming")
        self.assertEqual(heads.describe(np.array([[1, 1]])), "of the heads 100% hot")

    def test_another_file_is_refused(self):
        line = "1\t2\t2\t2\n"
        for text, given in (("2 lines, and the model has 3 layers", line * 2),
                            ("line 3 has 3 values, and a layer of the model has 4", line * 2 + "1\t2\t2"),
                            ("line 1 has 3: must be", "3" + line[1:] + line * 2),
                            ("line 2 has 0.5: must be", line + line.replace("1", "0.5") + line)):
            with self.subTest(text), self.assertRaisesRegex(kvferry.Invalid, text):
                self.read(given)
        with self.assertRaisesRegex(kvferry.Invalid, "No such file.*tune --heads"):
            heads.read("/nowhere", 3, 4, heads.Share((0,), 4, 0, 1))


class Refusals(unittest.TestCase):
    def refused(self, text, call, *given, **named):
        with self.subTest(text), self.assertRaisesRegex(kvferry.Unsupported, text):
            call(*given, **named)

    def test_engines(self):
        for good in ({}, {"cache__cache_dtype": "bfloat16"},
                     {"speculative_config": types.SimpleNamespace(method="ngram")},
                     {"model__is_hybrid": True, "cache__enable_prefix_caching": False}):
            refusals.check_engine(engine(**good))
        for text, bad in (
                ("KV connectors", {"kv_transfer_config": "any"}),
                ("kv_cache_dtype = fp8", {"cache__cache_dtype": "fp8"}),
                ("context parallelism", {"parallel__decode_context_parallel_size": 2}),
                ("context parallelism", {"parallel__prefill_context_parallel_size": 2}),
                ("micro-batches", {"parallel__use_ubatching": True}),
                ("prefix caching of models with linear or Mamba layers: .*--no-enable-prefix-caching",
                 {"model__is_hybrid": True}),
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


class Runs(unittest.TestCase):
    """Which rows of a pass attend to the budget, and which to everything."""

    def test_answers_then_prompts(self):
        self.assertEqual(
            runs_of([0, 1, 2, 66, 70], [9, 33, 64, 104], [False, False, True, True], 9),
            [Run(0, [0, 1, 2], None), Run(2, [2, 66, 70], [0, 100])])

    def test_a_prompt_of_one_token_and_candidates_are_dense(self):
        self.assertEqual(
            runs_of([0, 1, 2, 3, 7], [8, 40, 9, 64], [False, True, False, False], 9),
            [Run(0, [0, 1], None), Run(1, [1, 2], [39]), Run(2, [2, 3], None), Run(3, [3, 7], [60])])

    def test_rows_without_tokens_are_left_out(self):
        self.assertEqual(runs_of([0, 1, 1, 2, 2], [5, 0, 6, 0], [False] * 4, 9),
                         [Run(0, [0, 1], None), Run(2, [1, 2], None)])
        self.assertEqual(runs_of([0], [], [], 9), [])

    def test_a_call_takes_so_many(self):
        self.assertEqual(runs_of([0, 1, 2, 3], [5, 6, 7], [False] * 3, 2),
                         [Run(0, [0, 1, 2], None), Run(2, [2, 3], None)])
        self.assertEqual(runs_of([0, 4, 6], [4, 6], [True] * 2, 1), [Run(0, [0, 4], [0]), Run(1, [4, 6], [4])])

    def test_every_token_is_in_one_run(self):
        rng = random.Random(7)
        for _ in range(200):
            counts = [rng.choice((0, 1, 1, 1, 5)) for _ in range(rng.randrange(12))]
            starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
            lengths = [count + rng.randrange(90) for count in counts]
            prompts = [rng.random() < 0.3 for _ in counts]
            seen, most = [], rng.randrange(1, 5)
            for run in runs_of(starts, lengths, prompts, most):
                self.assertLessEqual(run.rows, most)
                for i in range(run.rows):
                    row, first, end = run.row + i, run.starts[i], run.starts[i + 1]
                    self.assertEqual((first, end), (starts[row], starts[row + 1]))
                    self.assertEqual(run.contexts is None, end - first == 1 and not prompts[row])
                    if run.contexts is not None:
                        self.assertEqual(run.contexts[i] + end - first, lengths[row])
                    seen += range(first, end)
            self.assertEqual(seen, list(range(starts[-1])))


class Windows(unittest.TestCase):
    """Which region a row has: that of its request, whatever place in the batch it has."""

    def test_a_request_keeps_its_region(self):
        regions = Regions(3)
        first = dict(zip("abc", regions.give("abc")))
        self.assertEqual(sorted(first.values()), [0, 1, 2])
        self.assertEqual(regions.give("cba"), [first[name] for name in "cba"])
        regions.give("c")
        self.assertEqual(regions.give("dca"), [first["b"], first["c"], first["a"]]) # b was used longest ago
        self.assertEqual(regions.give("db"), [first["b"], first["c"]]) # and now c

    def test_more_requests_than_regions(self):
        rng, regions = random.Random(3), Regions(8)
        for _ in range(300):
            call = rng.sample(range(40), rng.randint(1, 8))
            given = regions.give(call)
            self.assertEqual(len(set(given)), len(call))
            self.assertTrue(all(0 <= region < 8 for region in given))

    def test_requests_are_followed_by_their_lengths(self):
        """A batch as vLLM's first runner has it: the last row moves to where one has gone, and rows swap."""
        rng = random.Random(5)
        for passes in (1, 2):
            followed, length, batches = Followed(passes), {}, [[] for _ in range(passes)]
            names, count, wrong, rows = {}, 0, 0, 0
            for number in range(400):
                batch = batches[number % passes]
                if batch and rng.random() < 0.2:
                    gone = rng.randrange(len(batch))
                    batch[gone] = batch[-1]
                    batch.pop()
                while len(batch) < 6:
                    batch.append(count)
                    length[count] = 0
                    count += 1
                if rng.random() < 0.2:
                    a, b = rng.sample(range(6), 2)
                    batch[a], batch[b] = batch[b], batch[a]
                begins = [length[request] for request in batch]
                for request in batch:
                    length[request] += 1 if length[request] else rng.randrange(1, 500)
                got = followed.number(begins, [length[request] for request in batch])
                self.assertEqual(len(set(got)), 6)
                wrong += sum(names.setdefault(r, n) != n for r, n in zip(batch, got))
                names.update(zip(batch, got))
                rows += 6
            self.assertLess(wrong, rows // 100) # equal lengths of rows that moved


if __name__ == "__main__":
    unittest.main()
