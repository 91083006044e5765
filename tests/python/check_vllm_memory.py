#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Memory and admission of the backend for vLLM, without vLLM: shares of a card and a host, bytes of a step, requests.

The other parts that need no vLLM are those of check_vllm_parts.py.
"""
import contextlib
import io
import itertools
import json
import os
import re
import tempfile
import types
import unittest

import numpy as np

import kvferry
from kvferry import _planner as planner
from kvferry.vllm import __main__ as calculator
from kvferry.vllm import admit as admission
from kvferry.vllm import estimate, memory, options

GIB = 1 << 30
LLAMA_8B = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                num_hidden_layers=32, vocab_size=128256, max_position_embeddings=131072,
                tie_word_embeddings=False)
QWEN3_06B = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
                 head_dim=128, num_hidden_layers=28, vocab_size=151936, max_position_embeddings=40960,
                 tie_word_embeddings=True)
GPT_OSS = dict(model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
               head_dim=64, num_hidden_layers=24, vocab_size=201088, max_position_embeddings=131072, sliding_window=128,
               num_local_experts=32, num_experts_per_tok=4, layer_types=["sliding_attention", "full_attention"] * 12,
               tie_word_embeddings=False, quantization_config={"quant_method": "mxfp4"})
GEMMA3_4B = dict(model_type="gemma3", text_config=dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text",
                                                       num_hidden_layers=34, sliding_window=1024))
README, PAGE = (os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", *name) for name in (
    ("README.md",), ("docs", "vllm.md")))
CARDS = {"80 GB": 79.1, "24 GB": 23.5} # GiB, as an H100 and an RTX 4090 have them


class Memory(unittest.TestCase):
    """The shares of blocks, windows and the cache in host memory and on a card, by the plans of the library."""

    def setUp(self):
        self.runtime = kvferry.Runtime(device="host")
        self.addCleanup(self.runtime.close)

    def sums(self, config, card, requests, host=64 * GIB, own=None, tokens=None, share=0.92, budget=512):
        """Sums of vLLM's defaults for such a card."""
        model = estimate.read(config)
        a = model.attention
        shape = dict(layers=a.layers, query_heads=a.query_heads, kv_heads=a.kv_heads,
                     head_dim=a.head_dim, dtype="bf16", transfer="mapped", budget_tokens=budget)
        ahead = estimate.activations(model, 8192 if card > 70 else 2048, requests) + estimate.graphs(
            model, estimate.graph_sizes(requests), estimate.layers_of(model))
        left = memory.Card(int(card * GIB), share, int(card * GIB)).left(
            int(card * GIB) - 2 * model.weights, 2 * model.weights, 2 * model.weights, ahead)
        self.assertEqual(left, int(int(card * GIB) * share) - 2 * model.weights - ahead)

        def plan(blocks, regions, tokens_max, device_bytes=0):
            return kvferry.Blocks.plan_for(self.runtime, block_count=blocks, block_tokens=32, tokens_max=tokens_max,
                                           sequences_max=regions, device_bytes=device_bytes, **shape)
        return memory.Sums(memory.Asked(
            host, requests, tokens or a.tokens, 32, a.layers * plan(2, 1, 32).code_bytes, left, own,
            model.vocabulary * estimate.LOGIT_BYTES), plan), plan

    def starts(self, sums, plan):
        """How many blocks, windows and tokens that stay, where all of it has room."""
        a = sums.asked
        blocks = memory.blocks_that_fit(sums)
        own = memory.divide_own(sums, blocks)
        there = plan(blocks, own.regions, a.tokens, own.device_bytes)
        self.assertLessEqual(blocks * a.block_bytes + there.device_bytes, a.left)
        self.assertLessEqual(there.host_bytes, a.host)
        self.assertGreater(blocks * 32, a.tokens)
        self.assertTrue(1 <= own.regions <= a.requests)
        return blocks, own.regions, there.resident_tokens

    def test_the_documented_command_starts(self):
        """With vLLM's defaults, on both cards, with either number of requests and budget."""
        for config, card, requests, budget in itertools.product(
                (LLAMA_8B, QWEN3_06B), CARDS.values(), (256, 1024), (512, 1024)):
            with self.subTest(layers=config["num_hidden_layers"], card=card, requests=requests, budget=budget):
                blocks, regions, resident = self.starts(*self.sums(config, card, requests, budget=budget))
                self.assertGreater(resident, 4096)
                self.assertGreater(regions, 16)
                if card > 70: # all that host memory has, and a window for every request
                    self.assertGreater(blocks * 32, 520_000)
                    self.assertEqual(regions, requests)

    def test_the_cache_takes_what_is_said(self):
        for own in (0, GIB, 3 * GIB // 2, 2 * GIB):
            sums, plan = self.sums(LLAMA_8B, CARDS["24 GB"], 256, own=own)
            blocks, regions, _ = self.starts(sums, plan)
            taken = plan(blocks, regions, sums.asked.tokens, memory.divide_own(sums, blocks).device_bytes)
            if own:
                self.assertTrue(0.95 * own < taken.device_bytes <= own, own)
            else:
                self.assertEqual(taken.device_bytes, sums.own(blocks, regions, sums.asked.tokens))

    def test_a_layer_of_a_prompt_has_room(self):
        """As a GPU needs it, where this is planned: 512 MiB, or chunks of a prompt are slow."""
        sums, plan = self.sums(LLAMA_8B, CARDS["24 GB"], 256)
        room = plan(2, 1, sums.asked.tokens).prompt_bytes
        self.assertEqual(room, sums.asked.tokens * 8 * 128 * 2 * 2)
        for own in (room // 2, room):
            with self.assertRaisesRegex(kvferry.OutOfMemory, "device_memory = %dMiB: .*give " % (own >> 20)):
                memory.blocks_that_fit(self.sums(LLAMA_8B, CARDS["24 GB"], 256, own=own)[0])
        blocks = memory.blocks_that_fit(sums)
        there = plan(blocks, 1, sums.asked.tokens, memory.divide_own(sums, blocks).device_bytes)
        self.assertEqual(there.prompt_bytes, room)

    def test_a_gib_admits_ten_times_vllm_s(self):
        """SmolLM2's shape with as little else as a step needs."""
        config = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
                      num_hidden_layers=30, vocab_size=49152, tie_word_embeddings=True)
        for tokens in (1024, 5120, 24576, 59392):
            sums, plan = self.sums(config, 8, 1024, own=0, tokens=tokens)
            sums.asked = sums.asked._replace(left=GIB)
            blocks, _, _ = self.starts(sums, plan)
            fit = (blocks - 1) // (tokens // 32) * tokens
            self.assertGreater(fit, 10 * (GIB // (30 * 3 * 64 * 4)), tokens)

    def test_a_failure_names_values_that_fit(self):
        """Each of the values that an error names is one with which it starts."""
        changed = {"max_model_len to": "tokens", "max_num_seqs to": "requests", "lower it to": "own"}
        cases = (("host_memory", LLAMA_8B, dict(card=79.1, host=8 * GIB), {"tokens", "host"}),
                 ("device_memory", LLAMA_8B, dict(card=23.5, own=1 << 20), {"own"}),
                 ("device_memory", LLAMA_8B, dict(card=23.5, own=5_500_000_000), {"own", "tokens"}),
                 ("device memory", LLAMA_8B, dict(card=19.8), {"tokens", "requests"}),
                 ("device memory", LLAMA_8B, dict(card=19.9, requests=1024), {"tokens", "requests"}),
                 ("device memory", LLAMA_8B, dict(card=19.2), {"tokens"}),
                 ("device memory", LLAMA_8B, dict(card=12.0), set()))
        for name, config, given, wanted in cases:
            given = {"requests": 256, **given}
            with self.subTest(name, **given), self.assertRaisesRegex(kvferry.OutOfMemory, "^" + name) as caught:
                memory.blocks_that_fit(self.sums(config, **given)[0])
            text, found = str(caught.exception), set()
            for words, field in (*changed.items(), ("give", "host" if name == "host_memory" else "own")):
                for value in re.findall(r"%s (\d+\w*)" % words, text):
                    with self.subTest(text, field=field, value=value):
                        self.starts(*self.sums(config, **{**given, field: options.bytes_of(field, value)}))
                        found.add(field)
            self.assertEqual(found, wanted, text)

    def test_blocks_that_leave_nothing(self):
        """As when activations were larger than estimated."""
        sums, _ = self.sums(LLAMA_8B, CARDS["24 GB"], 256)
        blocks = memory.blocks_that_fit(sums)
        less = memory.Sums(sums.asked._replace(left=blocks * sums.asked.block_bytes + (1 << 20)), sums._plan)
        with self.assertRaisesRegex(kvferry.OutOfMemory, "lower host_memory to (\\w+), max_num_seqs or") as caught:
            memory.divide_own(less, blocks)
        host = options.bytes_of("host", re.search(r"host_memory to (\w+)", str(caught.exception))[1])
        again = memory.Sums(less.asked._replace(host=host), sums._plan)
        memory.divide_own(again, memory.blocks_that_fit(again))

    def test_more_is_never_taken_than_is_left(self):
        """Whatever `device_memory` is, where activations were larger than estimated, or the number of blocks was said;
        and the value that a failure names is one with which it starts."""
        for own in (None, 0, GIB, 2 * GIB):
            sums, plan = self.sums(LLAMA_8B, CARDS["24 GB"], 256, own=own)
            asked, told = sums.asked, set()
            for lost, said in ((0, None), (0, 25_000), (16 << 20, None), (512 << 20, None), (2 * GIB, None)):

                def start(host, said):
                    """Blocks by what was estimated, the rest by what was measured."""
                    blocks = said or memory.blocks_that_fit(memory.Sums(asked._replace(host=host), plan))
                    less = memory.Sums(asked._replace(host=host, left=asked.left - lost), plan) # pylint: disable=cell-var-from-loop
                    there = memory.divide_own(less, blocks, said is not None)
                    taken = plan(blocks, there.regions, asked.tokens, there.device_bytes).device_bytes
                    self.assertLessEqual(blocks * asked.block_bytes + taken, less.asked.left)

                with self.subTest(own=own, lost=lost, said=said):
                    try:
                        start(asked.host, said)
                        told.add("it starts")
                    except kvferry.OutOfMemory as error:
                        self.assertRegex(str(error), "^device_memory = %s: " % memory.said(own) if own else "^device memory: ")
                        name, value = re.search(r"lower (\w+) to (\w+)", str(error)).groups()
                        start(*((asked.host, int(value)) if said else (options.bytes_of(name, value), None)))
                        told.add(name)
            self.assertEqual(told, {"it starts", "host_memory", "num_gpu_blocks_override"})

    def test_calculator(self):
        given = "--gpu", "80GiB", "--host", "512GiB"
        self.told_is_planned(self.calculated(LLAMA_8B, *given, "budget=1024"),
                             self.sums(LLAMA_8B, 80, 1024, host=512 * GIB, budget=1024), 1024)
        for wrong, more in (("device memory", ["--gpu", "12GiB"]), ("did you mean budget", ["buget=3"]),
                            ("must divide the 32 heads", ["--tensor-parallel-size", "3"])):
            with self.assertRaisesRegex(kvferry.Error, wrong):
                self.calculated(LLAMA_8B, *given, *more)

    def calculated(self, config, *given):
        """The text that it prints."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as told:
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as out:
                json.dump(config, out)
            calculator.main([folder, *given])
        return told.getvalue()

    def test_calculator_of_models_with_windows(self):
        """gpt-oss, and Gemma 3 by a configuration that says little. Layers that take numbers of blocks are said, and that
        max_num_seqs ends before memory does."""
        for config, given in ((GPT_OSS, ["--weights", "13GiB"]), (GEMMA3_4B, [])):
            told = self.calculated(config, "--gpu", "24GB", "--host", "64GB", *given)
            self.assertRegex(told, r"vLLM's blocks \d+\.\d, windows, pages \d+\.\d\n\d+ tokens fit where other layers take no block")
            self.assertRegex(told, r"a step of \d+ requests of 4096 tokens brings \d+\.\d [GM]iB, .* at 0%, 50%, 90% hits")
            self.assertNotRegex(told, r"-\d")
        self.assertIn("    256 requests of 1024 tokens, by max_num_seqs\n", self.calculated(
            GPT_OSS, "--gpu", "24GB", "--host", "64GB", "--weights", "13GiB"))
        with self.assertRaisesRegex(kvferry.Invalid, "weights are quantized.*give --weights SIZE"):
            self.calculated(GPT_OSS, "--gpu", "24GB", "--host", "64GB")

    def test_calculator_of_what_does_not_fit(self):
        """In GiB, and without numbers below 0."""
        self.assertRegex(self.calculated(LLAMA_8B, "--gpu", "80GB", "--max-model-len", "1024"), "tokens fit") # of this machine
        for given in (["--gpu", "16GB"], ["--gpu", "18GiB"], ["--gpu", "24GB", "--max-num-seqs", "4096"]):
            with self.assertRaises(kvferry.OutOfMemory) as caught:
                self.calculated(LLAMA_8B, "--host", "64GB", *given)
            self.assertNotRegex(str(caught.exception), r"-\d|\d{9}")
            self.assertRegex(str(caught.exception), r"\d [GM]iB")

    def test_calculator_has_vllm_s_defaults(self):
        """EngineArgs.get_batch_defaults, by memory and name."""
        for card, name, wanted in ((80, "NVIDIA H100", (1024, 8192)), (80, "NVIDIA A100-SXM4-80GB", (256, 2048)),
                                   (40, "NVIDIA A100-PCIE-40GB", (256, 2048)), (180, "NVIDIA B200", (1024, 16384)),
                                   (119, "NVIDIA GB10", (256, 2048)), (24, "", (256, 2048))):
            self.assertEqual(calculator.defaults_of(card * GIB, name), wanted)
        for name, wanted in (("H100", 511), ("A100", 256)):
            self.assertRegex(self.calculated(LLAMA_8B, "--gpu", "80GiB", "--gpu-name", name, "--host", "64GiB"),
                             "%7d requests of 1024 tokens" % wanted)

    def test_readme_s_command_pays(self):
        """By the machine's memory: three quarters of what there is hold more than twice vLLM's own tokens."""
        for card, host in (("80GiB", "512GiB"), ("80GiB", "256GiB"), ("48GB", "256GiB"), ("24GB", "128GiB"), ("141GB", "512GiB")):
            told = self.calculated(LLAMA_8B, "--gpu", card, "--host", "%dGiB" % (int(host[:-3]) * 3 // 4))
            self.assertNotIn("vLLM alone would hold", told, (card, host))
        self.assertIn("host_memory = 64GiB holds 524064 tokens, and vLLM alone would hold",
                      self.calculated(LLAMA_8B, "--gpu", "80GiB", "--host", "64GiB"))
        with open(PAGE, encoding="utf-8") as text:
            rows = re.findall(r"^\| (\d+GB) \| (\d+)GiB \| (.*) \|$", text.read(), re.MULTILINE)
        self.assertEqual([card for card, *_ in rows], ["24GB", "48GB", "80GB", "141GB"])
        for card, host, cells in rows:
            self.row_is_planned(card, int(host) * 3 // 4, cells.replace(",", "").split(" | "))
        with open(README, encoding="utf-8") as text:
            self.assertNotIn("host_memory", text.read().partition("vllm serve")[2].partition("```")[0])

    def row_is_planned(self, card, host, cells):
        """A row of the page."""
        def told(*given):
            return self.calculated(LLAMA_8B, "--gpu", card, *given, "budget=1024")
        tokens, alone, requests, kept, resident, step = cells
        text = told("--host", "%dGiB" % host)
        for wanted in ("\n%s tokens fit" % tokens, " %s requests of 4096 tokens" % requests.replace(" by `max_num_seqs`", ""),
                       "\n%s requests keep their budget on the card; with admit=resident %s run" % (kept, resident),
                       "brings %s GiB at 0%%, 50%%, 90%% hits" % " GiB, ".join(step.split())):
            self.assertIn(wanted, text)
        self.assertEqual("`max_num_seqs`" in requests, "of 4096 tokens, by max_num_seqs" in text)
        self.assertIn("vLLM alone would hold %s on" % alone, told("--host", "1GiB", "--max-model-len", "4096"))

    def told_is_planned(self, text, wanted, requests):
        blocks, regions, resident = self.starts(*wanted)
        self.assertRegex(text, "%d tokens fit, by (host memory|the card); of these %d stay on the card, and windows of "
                         "%d requests" % ((blocks - 1) * 32, resident, regions))
        for tokens in (1024, 4096, 16384):
            self.assertIn("%7d requests of %d tokens" % (min(requests, (blocks - 1) // (tokens // 32)), tokens), text)

    def test_calculator_of_both_models_and_cards(self):
        """With either number of requests it tells what an engine would be given."""
        for config, card, requests in itertools.product((LLAMA_8B, QWEN3_06B), (80, 24), (1024, 256)):
            with self.subTest(layers=config["num_hidden_layers"], card=card, requests=requests):
                told = self.calculated(config, "--gpu", "%dGiB" % card, "--host", "512GiB", "budget=512",
                                       "--max-num-seqs", str(requests))
                self.told_is_planned(told, self.sums(config, card, requests, host=512 * GIB), requests)

    def test_activations_of_any_model(self):
        """An engine starts whatever names the configuration of its model has."""
        def of(**text):
            return estimate.of_engine(types.SimpleNamespace(
                ranks=2, text=types.SimpleNamespace(**text), tokens=9, hidden=64, vocabulary=1000))
        for widest, text in ((128, {}), (50, {"intermediate_size": 100}), (75, {"intermediate_size": [100, 150]}),
                             (80, {"intermediate_size": 100, "moe_intermediate_size": 40, "num_experts_per_tok": 4})):
            self.assertEqual(of(**text).widest, widest)
        self.assertEqual(estimate.activations(of(), 10, 3), 10 * (4 * 64 + 3 * 128) * 2 + 3 * 1000 * 14)

    def test_graphs_have_room(self):
        """For every size two in each layer, and once what the largest computes in; without sizes none."""
        model = estimate.read(LLAMA_8B)
        sizes = estimate.graph_sizes(256)
        self.assertEqual((len(sizes), sizes[:4], sizes[-1]), (51, [1, 2, 4, 8], 512))
        self.assertEqual(estimate.graph_sizes(3), [1, 2, 4])
        self.assertEqual(estimate.graphs(model, sizes, estimate.layers_of(model)),
                         512 * (4 * 4096 + 3 * 14336) * 2 + 2 * 51 * 32 * (256 << 10))
        self.assertEqual(estimate.graphs(model, [], 32), 0)

    def test_layers_with_windows(self):
        """As Transformers reads such configurations: by their kinds, by a pattern, from a layer on, or by the family."""
        for full, windowed, fields in (
                (32, 0, {"sliding_window": 4096, "use_sliding_window": False}), (32, 0, {"sliding_window": None}),
                (16, 16, {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 128}),
                (5, 27, {"sliding_window": 512, "sliding_window_pattern": 6}),
                (5, 27, {"model_type": "gemma3_text"}), (16, 16, {"model_type": "gemma2", "sliding_window": 4096}),
                (28, 4, {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": True})):
            a = estimate.read({**LLAMA_8B, **fields}).attention
            self.assertEqual((a.layers, a.windows.layers if a.windows else 0), (full, windowed), fields)

    def test_models_that_cannot_be_counted(self):
        for text, bad in (("linear_attention are not counted", {"layer_types": ["full_attention", "linear_attention"]}),
                          ("layers all have a sliding window", {"sliding_window": 4096}),
                          ("layers all have a sliding window", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}),
                          (r"\(MLA\), which deepseek_v3 has", {"kv_lora_rank": 512, "model_type": "deepseek_v3"}),
                          ("attn_layer_period", {"attn_layer_period": 8}),
                          ("num_kv_shared_layers", {"text_config": {"num_kv_shared_layers": 15}})):
            with self.subTest(text), self.assertRaisesRegex(kvferry.Unsupported, text):
                estimate.read({**LLAMA_8B, **bad})
        with self.assertRaisesRegex(kvferry.Unsupported, "config.json has no 'num_hidden_layers'"):
            estimate.read({})


class Steps(unittest.TestCase):
    """A plan's figures of steps, beside steps."""

    MODEL = planner.Model(layers=2, query_heads=4, kv_heads=2, head_dim=32, tokens=4096, element=4)
    SETTINGS = {"budget_tokens": 256, "local_tokens": 32, "transfer": "mapped", "page_size": 4}
    REQUESTS, STEPS = 3, 30

    def setUp(self):
        self.runtime = kvferry.Runtime(device="host")
        self.addCleanup(self.runtime.close)

    def plan(self, own):
        host = self.REQUESTS * self.MODEL.tokens * self.MODEL.token_bytes * 5 // 4
        return planner.plan(self.runtime, self.MODEL, memory.Asked(host, self.REQUESTS, self.MODEL.tokens, own=own),
                            self.SETTINGS)

    def test_bytes_of_a_step_at_rates_of_hits(self):
        """Pages of lists of ours, of which such a share was in the list before: the bytes that move are those of the plan,
        within a tenth. Others come from far away in the context."""
        p = self.plan(5 << 20)
        self.assertEqual((p.windows, p.kept, p.admitted), (self.REQUESTS,) * 3)
        for rate in (0.0, 0.5, 0.9, 1.0):
            with self.subTest(rate=rate):
                stats = self.steps(p, rate)
                self.assertAlmostEqual(stats.hits / (stats.hits + stats.misses), rate, delta=0.02)
                moved = stats.bytes_to_device / self.STEPS
                wanted = p.step_bytes(self.REQUESTS, rate)
                self.assertLessEqual(abs(moved - wanted), 0.1 * wanted + 0.02 * p.step_bytes(self.REQUESTS, 0))

    def steps(self, p, rate):
        """Counters of steps of all requests."""
        m, rng, count = self.MODEL, np.random.default_rng(3), self.REQUESTS
        with kvferry.Blocks(self.runtime, block_count=p.blocks, layers=m.layers, query_heads=m.query_heads,
                            kv_heads=m.kv_heads, head_dim=m.head_dim, tokens_max=m.tokens, dtype="fp32",
                            sequences_max=count, device_bytes=p.load.own, **self.SETTINGS) as blocks, \
                kvferry.Stream(self.runtime) as stream:
            codes = [np.zeros((p.blocks, blocks.plan.code_bytes), np.uint8) for _ in range(m.layers)]
            tables = np.arange(count * m.tokens // 32, dtype=np.int32).reshape(count, -1) + 1
            slots = np.concatenate([(table[:, None].astype(np.int64) * 32 + np.arange(32)).ravel() for table in tables])
            k, v = rng.standard_normal((2, len(slots), m.kv_heads, m.head_dim), dtype=np.float32)
            for layer in range(m.layers):
                blocks.bind(layer, codes[layer].ctypes.data)
                blocks.put(layer, len(slots), k.ctypes.data, v.ctypes.data, slots.ctypes.data, stream)
            lengths = np.full(count, m.tokens, np.int32)
            q = rng.standard_normal((count, m.query_heads, m.head_dim), dtype=np.float32)
            pages = p.budget.selected // 4
            ids = np.empty((count, m.kv_heads, pages), np.int32)
            far = 1 # after the sink, and before the window
            for step in range(1 + self.STEPS):
                fresh = pages if step == 0 else round((1 - rate) * pages)
                where = (far + np.arange(fresh)) % (m.tokens // 4 - 32) + 1
                far += fresh
                ids[:, :, :] = np.roll(ids, fresh, axis=2) # the newest are first, and the oldest go
                ids[:, :, :fresh] = where
                for layer in range(m.layers):
                    out = np.empty_like(q)
                    blocks.decode(layer, count, (tables.ctypes.data, tables.shape[1]), lengths.ctypes.data, q.ctypes.data,
                                  out.ctypes.data, stream, page_ids=ids.ctypes.data, page_stride=pages)
                    stream.wait()
                    self.assertTrue(np.isfinite(out).all())
                if step == 0:
                    blocks.reset_stats()
            return blocks.stats()

    def test_what_is_admitted(self):
        """So many budgets have room in the memory that there is, and with one more they have none."""
        for own in (2900 << 10, 3 << 20, 3500 << 10, 5 << 20):
            p = self.plan(own)
            again = planner.plan(self.runtime, self.MODEL, p.load._replace(requests=p.admitted), self.SETTINGS)
            self.assertEqual((again.kept, again.admitted), (p.admitted, p.admitted), own)
        whole = planner.plan(self.runtime, self.MODEL, p.load._replace(own=None), {"budget_tokens": 256})
        self.assertEqual((whole.kept, whole.admitted), (self.REQUESTS, self.REQUESTS)) # pages are read where they are

    def test_a_card(self):
        """An 8B on a card of 24 GB: where few of its requests of 4,096 tokens hit, a step brings 10 GiB."""
        a = estimate.read(LLAMA_8B).attention
        left = int(5 * GIB)
        p = planner.plan(self.runtime, a, memory.Asked(64 * GIB, 256, a.tokens, left=left), {"budget_tokens": 1024})
        requests = p.requests_of(4096)
        self.assertGreater(requests, 80)
        self.assertLess(p.kept, requests // 5)
        each = 32 * 8 * 512 # bytes of a token
        self.assertAlmostEqual(p.step_bytes(p.windows, 0), p.windows * (1024 - p.budget.window) * each, delta=GIB // 100)
        self.assertAlmostEqual(p.step_bytes(p.windows, 0.9), p.step_bytes(p.windows, 0) / 10, delta=GIB // 100)
        self.assertGreater(p.step_bytes(requests, 0), 10 * GIB)
        # With a reserve for their budgets as many blocks remain, and all that are admitted keep theirs.
        shape = dict(layers=a.layers, query_heads=a.query_heads, kv_heads=a.kv_heads, head_dim=a.head_dim, dtype="bf16",
                     transfer="mapped", budget_tokens=1024)

        def sized(blocks, regions, tokens, device_bytes=0):
            return kvferry.Blocks.plan_for(self.runtime, block_count=blocks, tokens_max=tokens, sequences_max=regions,
                                           device_bytes=device_bytes, **shape)
        sums = memory.Sums(memory.Asked(64 * GIB, p.admitted, a.tokens, 32, p.groups.block_bytes, left,
                                        reserve=p.admitted * p.budget.bytes), sized)
        blocks = memory.blocks_that_fit(sums)
        self.assertGreater(blocks, 0.95 * p.blocks)
        own = memory.divide_own(sums, blocks)
        self.assertEqual(own.regions, p.admitted)
        there = sized(blocks, own.regions, a.tokens, own.device_bytes)
        self.assertGreaterEqual(there.resident_tokens, 0.95 * p.admitted * p.budget.selected)

    def test_windows_beside(self):
        """Blocks as vLLM makes them: gpt-oss has as many layers of each kind, Gemma 3 five times as many with windows."""
        for (full, windowed), wanted in (((12, 12), 1), ((10, 52), 6), ((10, 12), 1)):
            windows = planner.Windows(windowed, 8, 64, 128)
            model = planner.Model(full, 64, 8, 64, 131072, windows=windows)
            g = planner.groups_of(model, 32 * 8 * 64 // 4, 32)
            self.assertEqual((g.block_tokens, g.others), (512, wanted))
            self.assertEqual(g.block_bytes, max(full, 12 if full == 10 and windowed == 12 else full) * 32 * 8 * 64 * 4)
            self.assertEqual(g.blocks_of(4096), 8 + wanted * 5)
            self.assertEqual(g.blocks_of(64), 1 + wanted * 3)
        with self.assertRaisesRegex(kvferry.Unsupported, "several groups"):
            planner.groups_of(planner.Model(12, 64, 8, 64, 0, windows=planner.Windows(4, 8, 64, 128)), 4096, 32)

    def test_a_line_where_host_memory_is_short(self):
        each = 131072 # bytes of a token of an 8B
        self.assertIsNone(memory.warning(256 * GIB, 2 << 20, each, 56 * GIB))
        self.assertIsNone(memory.warning(GIB, 8192, each, None))
        self.assertIsNone(memory.warning(GIB, 8192, each, -5))
        told = memory.warning(64 * GIB, 524064, each, 56 * GIB)
        self.assertRegex(told, "^host_memory = 64GiB holds 524064 tokens, and vLLM alone would hold 458752 on this card: "
                               "give 112GiB or more")
        self.assertRegex(memory.warning(64 * GIB, 524064, each, 50 * GIB + 5 * each), "give 101GiB or more")
        self.assertRegex(memory.warning(GIB, 10, each, 100 * each), "give 25MiB or more")


class Admission(unittest.TestCase):
    """admit = resident: max_num_seqs of an engine, settled once and for all ranks."""

    def engine(self, **changes):
        settings = changes.pop("settings", {"kvferry": {"admit": "resident", "device_memory": "64MiB", "budget": 512,
                                                        "host_memory": "1GiB", "transfer": "mapped"}})
        text = types.SimpleNamespace(to_dict=lambda: dict(
            hidden_size=512, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
            num_hidden_layers=8, vocab_size=512, tie_word_embeddings=True))
        return types.SimpleNamespace(**{**dict(
            settings=settings, requests=256, text=text, ranks=1, stages=1, ranks_in_all=1, number=0, card_bytes=None,
            dtype=np.dtype("float32"), tokens=4096, folder="/nowhere", share_of_card=0.9, tokens_of_a_pass=2048,
            block_tokens=32, block_tokens_were_said=True, graph_sizes=None, layers_in_all=8), **changes})

    def settled(self, **changes):
        engine = self.engine(**changes)
        admission.settle(engine)
        return engine

    def test_the_number(self):
        """It is in the settings that every rank gets, and the next look changes nothing."""
        with self.assertLogs("vllm.kvferry", "INFO") as told:
            engine = self.settled()
        self.assertTrue(1 < engine.requests < 100, engine.requests)
        self.assertEqual(engine.settings["kvferry"]["admit"], engine.requests)
        self.assertIn("max_num_seqs is %d, and was 256" % engine.requests, told.output[0])
        before = engine.requests
        admission.settle(engine)
        self.assertEqual(engine.requests, before)
        copy = self.engine(settings=engine.settings)
        admission.settle(copy)
        self.assertEqual(copy.requests, before)
        # Twice the heads over two ranks, each with its own memory: the same number.
        self.assertEqual(self.settled(ranks=2, ranks_in_all=2).requests, self.settled(ranks=2, ranks_in_all=2).requests)
        self.assertGreater(self.settled(ranks=2, ranks_in_all=2).requests, before)

    def test_a_graph_for_it(self):
        before = self.settled().requests
        sizes = [1, 2, 4] + list(range(8, 257, 8))
        self.assertEqual(self.settled(graph_sizes=sizes).requests, max(size for size in sizes if size <= before))

    def test_others_are_as_they_were(self):
        for settings in ({}, {"kvferry": {}}, {"kvferry": {"admit": "all", "device_memory": "64MiB"}}):
            self.assertEqual(self.settled(settings=settings).requests, 256)
        self.assertEqual(self.settled(settings={"kvferry": {"admit": 5}}).requests, 5)
        self.assertEqual(self.settled(settings={"kvferry": {"admit": 500}}).requests, 256)

    def test_on_a_card(self):
        """By the size of a card, without a look at it."""
        text = types.SimpleNamespace(to_dict=lambda: LLAMA_8B)
        engine = self.settled(card_bytes=int(23.5 * GIB), dtype=np.dtype("float16"), text=text, tokens=131072, share_of_card=0.92,
                              layers_in_all=32, settings={"kvferry": {"admit": "resident", "host_memory": "64GiB"}})
        self.assertTrue(4 < engine.requests < 40, engine.requests)

    def test_what_cannot_be_counted(self):
        text = types.SimpleNamespace(to_dict=lambda: {**LLAMA_8B, "layer_types": ["linear_attention", "full_attention"]})
        with self.assertRaisesRegex(kvferry.Unsupported, "admit = resident: layers of the kind linear.* Or say --max-num-seqs"):
            self.settled(text=text)


if __name__ == "__main__":
    unittest.main()
