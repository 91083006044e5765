#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The parts of the backend for vLLM that need no vLLM: settings, refusals, what a row attends to.

vLLM's use of them is tested by check_vllm.py, under `./dev vllm`.
"""
import contextlib
import io
import json
import os
import random
import re
import tempfile
import types
import unittest

import numpy as np

import kvferry
from kvferry._cache import width_in_pages
from kvferry.vllm import __main__ as calculator
from kvferry.vllm import estimate, heads, memory, options, refusals
from kvferry.vllm.regions import Followed, Regions
from kvferry.vllm.rows import Run, Rows, part, runs_of


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
        self.assertEqual(options.read({}, {}), ({}, {}, None, 60, 0, None, None))

    def test_variables_that_are_no_settings(self):
        """Of Kubernetes for a Service named kvferry or kvferry-NAME, and of other doors; typos are none of them."""
        port = "tcp://10.0.0.1:80"
        passed = {"KVFERRY_SERVICE_HOST": "10.0.0.1", "KVFERRY_SERVICE_PORT": "80", "KVFERRY_SERVICE_PORT_HTTP": "80",
                  "KVFERRY_PORT": port, "KVFERRY_PORT_80_TCP": port, "KVFERRY_PORT_80_TCP_ADDR": "10.0.0.1",
                  "KVFERRY_PORT_53_UDP_PROTO": "udp", "KVFERRY_CHAT_SERVICE_HOST": "10.0.0.2", "KVFERRY_CHAT_PORT": port,
                  "KVFERRY_CHAT_PORT_8000_TCP_PORT": "8000", "KVFERRY_LLAMA": "budget=512", "KVFERRY_LLAMA_REPORT": "3",
                  "KVFERRY_LIBRARY": "elsewhere", "KVFERRY_METRICS": "/tmp/there"}
        self.assertEqual(options.read({"budget": 512}, passed), options.read({"budget": 512}, {}))
        for row in kvferry.settings("cache") + kvferry.settings("runtime"):
            self.assertIsNone(options.NOT_OURS.fullmatch(row.name.upper()), row.name)
        for name, text in (("BUDGT", "no setting budgt: did you mean budget"), ("PORTS", "no setting ports"),
                           ("LLAMAS", "no setting llamas"), ("PORT_80", "no setting port_80"),
                           ("SERVICE", "no setting service"), ("HOST_MEMRY", "did you mean host_memory")):
            with self.subTest(name), self.assertRaisesRegex(kvferry.Invalid, text):
                options.read({}, {"KVFERRY_" + name: "5"})

    def test_memory_of_the_device(self):
        for said, wanted in (("2GiB", 2 << 30), (0, 0), ("auto", None)):
            self.assertEqual(options.read({"device_memory": said}, {}).device_memory, wanted)
            self.assertEqual(options.read({}, {"KVFERRY_DEVICE_BYTES": str(said)}).device_memory, wanted)

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
        with self.assertRaisesRegex(kvferry.Invalid, "host_memory must be said with data parallelism"):
            options.default_memory(1, 1)

    def test_memory_of_a_node_or_a_cgroup(self):
        """Which is less than the machine has: the library refuses more."""
        for wanted, ranks, limit, near in ((1 << 20, 1, 2 << 20, None), (1 << 19, 2, 2 << 20, 9 << 20),
                                           (3 << 20, 1, None, 4 << 20), (3 << 18, 4, 8 << 20, 4 << 20)):
            machine = {"cgroup_headroom_bytes": limit, "available_bytes": near}
            self.assertEqual(options.default_memory(ranks, 0, machine), wanted)
        with kvferry.Runtime(device="host") as runtime:
            self.assertLessEqual(set(machine), set(runtime.describe()["memory"]))


def engine(**changes):
    """A VllmConfig as far as it is read; `part__field` is a field of a part."""
    parts = {
        "": dict(kv_transfer_config=None, speculative_config=None),
        "device": dict(device_type="cuda"),
        "cache": dict(cache_dtype="auto", enable_prefix_caching=True),
        "parallel": dict(decode_context_parallel_size=1, prefill_context_parallel_size=1,
                         use_ubatching=False),
        "model": dict(dtype="torch.bfloat16", is_hybrid=False, rswa_window=None,
                      hf_text_config=types.SimpleNamespace(num_kv_shared_layers=15))}
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


GIB = 1 << 30
LLAMA_8B = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                num_hidden_layers=32, vocab_size=128256, max_position_embeddings=131072,
                tie_word_embeddings=False)
QWEN3_06B = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
                 head_dim=128, num_hidden_layers=28, vocab_size=151936, max_position_embeddings=40960,
                 tie_word_embeddings=True)
CARDS = {"80 GB": 79.1, "24 GB": 23.5} # GiB, as an H100 and an RTX 4090 have them


class Memory(unittest.TestCase):
    """The shares of blocks, windows and the cache in host memory and on a card, by the plans of the library."""

    def setUp(self):
        self.runtime = kvferry.Runtime(device="host")
        self.addCleanup(self.runtime.close)

    def sums(self, config, card, requests, host=64 * GIB, own=None, tokens=None, share=0.92, budget=512):
        """Sums of vLLM's defaults for such a card."""
        model = estimate.read(config)
        shape = dict(layers=model.layers, query_heads=model.query_heads, kv_heads=model.kv_heads,
                     head_dim=model.head_dim, dtype="bf16", transfer="mapped", budget_tokens=budget)
        ahead = estimate.activations(model, 8192 if card > 70 else 2048, requests)
        left = memory.Card(int(card * GIB), share, int(card * GIB)).left(
            int(card * GIB) - 2 * model.weights, 2 * model.weights, 2 * model.weights, ahead)
        self.assertEqual(left, int(int(card * GIB) * share) - 2 * model.weights - ahead)

        def plan(blocks, regions, tokens_max, device_bytes=0):
            return kvferry.Blocks.plan_for(self.runtime, block_count=blocks, block_tokens=32, tokens_max=tokens_max,
                                           sequences_max=regions, device_bytes=device_bytes, **shape)
        return memory.Sums(memory.Asked(
            host, requests, tokens or model.tokens, 32, model.layers * plan(2, 1, 32).code_bytes, left, own,
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
        for config in (LLAMA_8B, QWEN3_06B):
            for name, card in CARDS.items():
                for requests in (256, 1024):
                    for budget in (512, 1024):
                        with self.subTest("%d layers, %s, %d requests, %d" % (
                                config["num_hidden_layers"], name, requests, budget)):
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
            with self.assertRaisesRegex(kvferry.OutOfMemory, "device_memory = %d: .*give " % own):
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
                 ("device memory", LLAMA_8B, dict(card=18.9), {"tokens", "requests"}),
                 ("device memory", LLAMA_8B, dict(card=19.0, requests=1024), {"tokens", "requests"}),
                 ("device memory", LLAMA_8B, dict(card=18.3), {"tokens"}),
                 ("device memory", LLAMA_8B, dict(card=12.0), set()))
        for name, config, given, wanted in cases:
            given = {"requests": 256, **given}
            with self.subTest(name, **given), self.assertRaisesRegex(kvferry.OutOfMemory, "^" + name) as caught:
                memory.blocks_that_fit(self.sums(config, **given)[0])
            text, found = str(caught.exception), set()
            for words, field in (*changed.items(), ("give", "host" if name == "host_memory" else "own")):
                for value in re.findall(r"%s (\d+)" % words, text):
                    with self.subTest(text, field=field, value=value):
                        self.starts(*self.sums(config, **{**given, field: int(value)}))
                        found.add(field)
            self.assertEqual(found, wanted, text)

    def test_blocks_that_leave_nothing(self):
        """As when activations were larger than estimated."""
        sums, _ = self.sums(LLAMA_8B, CARDS["24 GB"], 256)
        blocks = memory.blocks_that_fit(sums)
        less = memory.Sums(sums.asked._replace(left=blocks * sums.asked.block_bytes + (1 << 20)), sums._plan)
        with self.assertRaisesRegex(kvferry.OutOfMemory, "lower host_memory to (\\d+), max_num_seqs or") as caught:
            memory.divide_own(less, blocks)
        host = int(re.search(r"host_memory to (\d+)", str(caught.exception))[1])
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
                        self.assertRegex(str(error), "^device_memory = %d: " % own if own else "^device memory: ")
                        name, value = re.search(r"lower (\w+) to (\d+)", str(error)).groups()
                        start(*((asked.host, int(value)) if said else (int(value), None)))
                        told.add(name)
            self.assertEqual(told, {"it starts", "host_memory", "num_gpu_blocks_override"})

    def test_calculator(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as told:
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as out:
                json.dump(LLAMA_8B, out)
            calculator.main([folder, "--gpu", "80GiB", "--host", "512GiB", "budget=1024"])
            self.told_is_planned(told.getvalue(), self.sums(LLAMA_8B, 80, 1024, host=512 * GIB, budget=1024), 1024)
            for wrong, given in (("device memory", ["--gpu", "12GiB"]), ("did you mean budget", ["buget=3"]),
                                 ("must divide the 32 heads", ["--tensor-parallel-size", "3"])):
                with self.assertRaisesRegex(kvferry.Error, wrong):
                    calculator.main([folder, "--gpu", "80GiB", "--host", "512GiB", *given])

    def told_is_planned(self, text, wanted, requests):
        blocks, regions, resident = self.starts(*wanted)
        self.assertRegex(text, "%d tokens fit, by (host memory|the card); of these %d stay on the card, and windows of "
                         "%d requests" % ((blocks - 1) * 32, resident, regions))
        for tokens in (1024, 4096, 16384):
            self.assertIn("%7d requests of %d tokens" % (min(requests, (blocks - 1) // (tokens // 32)), tokens), text)

    def test_calculator_of_both_models_and_cards(self):
        """With either number of requests it tells what an engine would be given."""
        with tempfile.TemporaryDirectory() as folder:
            for config in (LLAMA_8B, QWEN3_06B):
                with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as out:
                    json.dump(config, out)
                for card in (80, 24):
                    for requests in (1024, 256):
                        with self.subTest(card=card, requests=requests), \
                                contextlib.redirect_stdout(io.StringIO()) as told:
                            calculator.main([folder, "--gpu", "%dGiB" % card, "--host", "512GiB", "budget=512",
                                             "--max-num-seqs", str(requests)])
                            self.told_is_planned(told.getvalue(), self.sums(config, card, requests, host=512 * GIB),
                                                 requests)

    def test_activations_of_any_model(self):
        """An engine starts whatever names the configuration of its model has."""
        def of(**text):
            return estimate.of_engine(types.SimpleNamespace(
                parallel_config=types.SimpleNamespace(tensor_parallel_size=2), model_config=types.SimpleNamespace(
                    hf_text_config=types.SimpleNamespace(**text), max_model_len=9, get_hidden_size=lambda: 64,
                    get_vocab_size=lambda: 1000)))
        for widest, text in ((128, {}), (50, {"intermediate_size": 100}), (75, {"intermediate_size": [100, 150]}),
                             (80, {"intermediate_size": 100, "moe_intermediate_size": 40, "num_experts_per_tok": 4})):
            self.assertEqual(of(**text).widest, widest)
        self.assertEqual(estimate.activations(of(), 10, 3), 10 * (4 * 64 + 3 * 128) * 2 + 3 * 1000 * 14)

    def test_models_that_cannot_be_counted(self):
        for good in (LLAMA_8B, QWEN3_06B, {"sliding_window": 4096, "use_sliding_window": False}, {"sliding_window": None}):
            estimate.layers_of_all(good)
        for text, bad in (("sliding_attention are not counted", {"layer_types": ["full_attention", "sliding_attention"]}),
                          ("sliding_window = 4096", {"sliding_window": 4096}),
                          ("kv_lora_rank", {"kv_lora_rank": 512}), ("attn_layer_period", {"attn_layer_period": 8}),
                          ("num_kv_shared_layers", {"text_config": {"num_kv_shared_layers": 15}})):
            with self.subTest(text), self.assertRaisesRegex(kvferry.Unsupported, text):
                estimate.layers_of_all(bad)
        with self.assertRaisesRegex(kvferry.Unsupported, "config.json has no 'num_hidden_layers'"):
            estimate.read({})


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
                ("reference sliding windows", {"model__rswa_window": 8}),
                ("kv_sharing_fast_prefill", {"cache__kv_sharing_fast_prefill": True}),
                ("heads of 512 elements", {"model__hf_text_config": types.SimpleNamespace(
                    per_layer_config={"5": {"head_dim": 512}})}),
                ("heads of 512 elements", {"model__hf_text_config": types.SimpleNamespace(
                    layer_types=["sliding_attention", "full_attention"],
                    per_layer_config=[types.SimpleNamespace(head_dim=n) for n in (1024, 512)])}),
                ("drafts by eagle",
                 {"speculative_config": types.SimpleNamespace(method="eagle")})):
            self.refused(text, refusals.check_engine, engine(**bad))
        wide = {"model__hf_text_config": types.SimpleNamespace(per_layer_config={"5": {"head_dim": 512}})}
        refusals.check_engine(engine(device__device_type="cpu", **wide))

    def test_types_of_a_cache(self):
        """The value that is named is one that vLLM takes, and means the type of the model: auto may not."""
        scheme = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
        inner = {"quantization_config": {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}}
        plain = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": None}}
        for wanted, dtype, config in (
                ("--kv-cache-dtype bfloat16", "bfloat16", {}), ("--kv-cache-dtype float16", "float16", scheme),
                ("--kv-cache-dtype auto", "float32", {}), ("--kv-cache-dtype auto", "float32", plain),
                ("--dtype bfloat16 --kv-cache-dtype bfloat16", "float32", scheme),
                ("--dtype bfloat16 --kv-cache-dtype bfloat16", "float32", inner)):
            bad = engine(cache__cache_dtype="fp8_e4m3", model__dtype="torch." + dtype,
                         model__hf_config=types.SimpleNamespace(**config))
            self.refused("kv_cache_dtype = fp8_e4m3: pages have the type of the model; say %s$" % wanted,
                         refusals.check_engine, bad)

    def test_reasons(self):
        """A reason that no setting helps against comes alone; others come at once, so that no advice leads to the next one."""
        asked = engine(cache__cache_dtype="fp8", model__hf_text_config=types.SimpleNamespace(
            layer_types=["sliding_attention", "full_attention"]))
        plain = dict(head_size=64, use_mla=False, attn_type="decoder", block_size=None)
        self.assertEqual(refusals.reasons(engine(), plain), [])
        for wanted, changed in (
                (["kv_cache_dtype = fp8"], {}), (["MLA"], {"use_mla": True}),
                (["kv_cache_dtype = fp8", "by --language-model-only", "block_size = 16", "leave them to vLLM by"],
                 {"has_sliding_window": True, "use_mm_prefix": True, "block_size": 16})):
            told = refusals.reasons(asked, {**plain, **changed})
            self.assertEqual(len(told), len(wanted), told)
            for text, reason in zip(wanted, told):
                self.assertIn(text, reason)
        asked.model_config.hf_text_config.per_layer_config = {"1": {"head_dim": 512}}
        self.assertRegex("; ".join(refusals.reasons(asked, plain)), "^[^;]*heads of 512 elements[^;]*$")

    @staticmethod
    def model(**fields):
        return types.SimpleNamespace(hf_text_config=types.SimpleNamespace(**fields))

    def test_layers(self):
        mixed = self.model(layer_types=["sliding_attention", "full_attention"])
        refusals.check_layer("decoder", mixed)
        for text, bad in (("type encoder_only", {"attn_type": "encoder_only"}),
                          ("type encoder_decoder", {"attn_type": "encoder_decoder"}),
                          ("ALiBi", {"alibi_slopes": [1.0]}),
                          ("sliding window", {"sliding_window": 128})):
            self.refused(text, refusals.check_layer, **{"attn_type": "decoder", "model": mixed, **bad})

    def test_what_vllm_says_when_it_chooses(self):
        """Words of ours, and of several reasons the one that has no way out by settings."""
        plain = dict(head_size=64, use_mla=False, has_sink=False, block_size=None,
                     model=self.model(layer_types=["sliding_attention", "full_attention"]))
        alone = [self.model(**fields) for fields in ({}, {"layer_types": ["sliding_attention"] * 4})]
        refusals.check_choice(**plain)
        refusals.check_choice(**{**plain, "block_size": 64, "has_sink": True})
        refusals.check_kind(**plain)
        for text, bad in (("MLA.*HiSparse", {"use_mla": True, "use_sparse": True}),
                          ("sparse attention", {"use_sparse": True}),
                          ("come later", {"use_non_causal": True}),
                          ("reference sliding", {"use_rswa": True})):
            self.refused(text, refusals.check_kind, **{**plain, **bad})
        for text, bad in (("tokens of an image.*--language-model-only", {"use_mm_prefix": True, "has_sliding_window": True}),
                          ("block_size = 16: a block has a multiple of 32", {"block_size": 16}),
                          ("type encoder", {"attn_type": "encoder"}),
                          ("sliding window: leave them to vLLM by", {"has_sliding_window": True}),
                          ("sliding window: leave", {"has_sliding_window": True, "model": self.model(sliding_window_pattern=6)}),
                          ("sliding window: leave", {"has_sliding_window": True, "model": self.model(loop_window_size=64)}),
                          *(("layers all have a sliding window: take another model",
                             {"has_sliding_window": True, "model": model}) for model in alone)):
            self.refused(text, refusals.check_choice, **{**plain, **bad})

    def test_what_is_not_captured(self):
        with kvferry.Runtime(device="host") as runtime:
            machine = runtime.describe()
        self.assertIsNone(refusals.why_not_captured(0, False, machine))
        self.assertRegex(refusals.why_not_captured(2, False, machine), "verify_interval = 2")
        self.assertRegex(refusals.why_not_captured(0, True, machine), "enable_sleep_mode")
        for records, text in ((True, "None"), (False, "driver of this GPU")):
            told = refusals.why_not_captured(
                0, False, {"devices": [{**machine["devices"][0], "records_graphs": records}]})
            self.assertIn(text, str(told))

    def test_values_narrower_than_keys(self):
        for wanted, *given in ((128, 192, 128, "cpu"), (64, 64, 48, "cpu"), (64, 64, 64, "cpu"), (80, 64, 80, "cpu"),
                               (128, 192, 128, "cuda"), (128, 192, 96, "cuda"), (160, 192, 160, "cuda"),
                               (64, 64, 32, "cuda"), (128, 128, 128, "cuda")):
            self.assertEqual(width_in_pages(*given), wanted, given)

    def test_blocks(self):
        plain = dict(sliding_window=None, attention_chunk_size=None, non_causal=False)
        refusals.check_spec(types.SimpleNamespace(**plain))
        for text, bad in (("part of the context", {"sliding_window": 64}),
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

    def test_candidates_are_rows(self):
        """Rows of answers, not more than there are of a draft; what belongs to prompts stays as it is."""
        self.assertEqual(
            part([0, 3, 4, 9, 13, 13], [30, 7, 50, 4, 9], [False, False, False, True, False], 3),
            Rows([0, 1, 2, 3, 4, 9, 13, 13], [28, 29, 30, 7, 50, 4, 9],
                 [False, False, False, False, False, True, False], [0, 0, 0, 1, 2, 3, 4],
                 [0, 1, 2, 0, 0, 0, 0], [2, 1, 0, 0, 0, 0, 0]))
        self.assertEqual(part([0, 2], [9], [False], 0), Rows([0, 2], [9], [False], [0], [0], [0]))

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

    def test_candidates_that_are_taken_back(self):
        followed = Followed(drafts=3)
        first = followed.number([0, 0], [90, 40])
        self.assertEqual(followed.number([90, 40], [94, 44]), first)
        self.assertEqual(followed.number([91, 44], [95, 48]), first) # three of the first one's were not right
        self.assertEqual(followed.number([46, 0], [50, 70])[:1], first[1:]) # the first is gone

    def test_candidates_have_windows(self):
        """A rank has as many rows of a request as there may be."""
        asked = memory.Asked(host=1 << 40, requests=8, tokens=64, block_tokens=32, block_bytes=64, rows_each=5)
        self.assertEqual(memory.divide_own(memory.Sums(asked, None), 9).regions, 40)
        few = asked._replace(rows_max=30) # a launch of a GPU takes so many
        self.assertEqual(memory.divide_own(memory.Sums(few, None), 9).regions, 30)


if __name__ == "__main__":
    unittest.main()
