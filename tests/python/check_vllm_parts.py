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
import subprocess
import sys
import tempfile
import threading
import types
import unittest

import numpy as np

import kvferry
from kvferry._cache import width_in_pages
from kvferry import _planner as planner
from kvferry.vllm import __main__ as calculator
from kvferry.vllm import admit as admission
from kvferry.vllm import known as releases
from kvferry.vllm import estimate, heads, memory, metrics, options, progress, refusals
from kvferry.vllm.regions import Followed, Regions
from kvferry.vllm.rows import Run, Rows, part, runs_of


class Releases(unittest.TestCase):
    """Beside a vLLM that is not known."""

    PROGRAM = ("import logging; logging.basicConfig(format='%(message)s'); import kvferry, kvferry.vllm\n"
               "kvferry.vllm.register()\n"
               "try:\n    import kvferry.vllm.backend\n"
               "except kvferry.Unsupported as error:\n    print(error)")

    def test_a_line(self):
        """An engine that does not ask for kvferry goes on, and one that does gets the line."""
        known = "kvferry knows vLLM 0.32 and 0.33, and this is vLLM 0.99.1"
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, "vllm"))
            for name, text in (("vllm/__init__.py", "__version__ = '0.99.1'"), ("torch.py", "def __getattr__(name): return object")):
                with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
                    out.write(text)
            paths = [folder, os.path.dirname(os.path.dirname(kvferry.__file__))]
            done = subprocess.run([sys.executable, "-c", self.PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(known, done.stderr)
        self.assertRegex(done.stdout, "^%s: .*: No module named 'vllm.config'" % known)

    def test_known(self):
        for version, wanted in (("0.32.0", True), ("0.32.1+cpu", True), ("0.33.0", True), ("0.34.0", False), ("0.3.2", False),
                                ("0.331.0", False), ("1.0", False)):
            self.assertEqual(releases.is_known(version), wanted, version)


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
        self.assertEqual(options.read({}, {}), ({}, {}, None, 60, 0, None, None, "all"))

    def test_variables_that_are_no_settings(self):
        """Those of Kubernetes for a Service named kvferry or kvferry-NAME, and of other plug-ins; typos are none of them."""
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
                            ("host_bytes = much: must be a size, as 64GiB or 64GB", {"host_memory": "much"}),
                            ("device_bytes = 5GBs: must be a size", {"device_memory": "5GBs"}),
                            ("admit = some: must be all, resident, or how many", {"admit": "some"}),
                            ("admit = 0: must be", {"admit": 0}), ("admit = 2.5: must be", {"admit": 2.5}),
                            ("log_interval = -1: must be seconds", {"log_interval": -1}),
                            ("verify_interval = no: must be a number of passes", {"verify_interval": "no"}),
                            ("verify_interval = 0.5: must be a number of passes", {"verify_interval": 0.5}),
                            ("log_interval = inf: must be seconds", {"log_interval": float("inf")}),
                            ("must be an object", [5])):
            with self.subTest(text), self.assertRaisesRegex(kvferry.Invalid, text):
                options.read(given, {})

    def test_sizes(self):
        """In powers of two, or of ten as memory is sold."""
        for text, size in (("64GiB", 64 << 30), ("64G", 64 << 30), ("64GB", 64 * 10 ** 9), ("1.5 TB", 1500 * 10 ** 9),
                           ("512MB", 512 * 10 ** 6), ("7kB", 7000), (4096, 4096)):
            self.assertEqual(options.read({"host_memory": text}, {}).host_memory, size)

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
        for wanted, ranks, limit, near, has_card in (
                (2 << 20, 1, 4 << 20, None, False), (1 << 20, 2, 4 << 20, 9 << 20, False),
                (3 << 20, 1, None, 4 << 20, False), (3 << 18, 4, 8 << 20, 4 << 20, False),
                (3 << 20, 1, 4 << 20, None, True), (3 << 20, 1, None, 4 << 20, True), (3 << 18, 4, 4 << 20, 8 << 20, True)):
            machine = {"cgroup_headroom_bytes": limit, "available_bytes": near}
            self.assertEqual(options.default_memory(ranks, 0, machine, has_card), wanted)
        with kvferry.Runtime(device="host") as runtime:
            self.assertLessEqual(set(machine), set(runtime.describe()["memory"]))


    def test_more_than_there_is(self):
        """Said before weights are loaded: the container's limit."""
        machine = {"cgroup_headroom_bytes": 8 << 30}
        with self.assertRaisesRegex(kvferry.OutOfMemory, "host_memory = 9GiB: 8GiB is all that this container may have, by "
                                                         "its memory.max; give that or less"):
            options.check_memory(9 << 30, machine)
        for size in (8 << 30, None):
            options.check_memory(size, machine)
        options.check_memory(1 << 50, {"cgroup_headroom_bytes": None})


def engine(**changes):
    """An upstream.Engine as far as refusals read it."""
    return types.SimpleNamespace(**{**dict(
        connector=None, offload_gib=None, offload_backend="native", drafts_by=None, device_type="cuda", cache_dtype="auto", has_fast_prefill=False,
        shares_contexts=False, has_micro_batches=False, dtype="torch.bfloat16", quantization=None,
        has_reference_windows=False, text=types.SimpleNamespace(num_kv_shared_layers=15)), **changes})


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
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as told:
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as out:
                json.dump(LLAMA_8B, out)
            calculator.main([folder, "--gpu", "80GiB", "--host", "512GiB", "budget=1024"])
            self.told_is_planned(told.getvalue(), self.sums(LLAMA_8B, 80, 1024, host=512 * GIB, budget=1024), 1024)
            for wrong, given in (("device memory", ["--gpu", "12GiB"]), ("did you mean budget", ["buget=3"]),
                                 ("must divide the 32 heads", ["--tensor-parallel-size", "3"])):
                with self.assertRaisesRegex(kvferry.Error, wrong):
                    calculator.main([folder, "--gpu", "80GiB", "--host", "512GiB", *given])

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
        with self.assertRaisesRegex(kvferry.Invalid, "weights are quantized.*say --weights SIZE"):
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
        return planner.plan(self.runtime, self.MODEL, planner.Load(host, None, self.REQUESTS, self.MODEL.tokens, own=own),
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
        p = planner.plan(self.runtime, a, planner.Load(64 * GIB, left, 256, a.tokens), {"budget_tokens": 1024})
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


class Answered(unittest.TestCase):
    """How many tokens of a request selected, told when it ends."""

    def test_a_request(self):
        """A prompt in two chunks, then tokens within the budget and beyond it."""
        answers = metrics.Answers(100)
        for begin, end, is_step in ((0, 64, False), (64, 98, False), (98, 99, True), (99, 100, True), (100, 101, True),
                                    (101, 102, True)):
            self.assertEqual(answers.follow([7], [begin], [end], [is_step]), [])
        self.assertEqual(answers.follow([8], [0], [30], [False]), [2])
        self.assertEqual(answers.follow([], [], [], []), [0])

    def test_another_with_its_number(self):
        answers = metrics.Answers(10)
        answers.follow([0, 1], [0, 0], [40, 50], [False, False])
        self.assertEqual(answers.follow([0, 1], [40, 50], [41, 51], [True, True]), [])
        self.assertEqual(answers.follow([0, 1], [32, 51], [60, 52], [False, True]), [1]) # a prefix hit of 32
        self.assertEqual(answers.follow([0, 1], [60, 0], [61, 9], [True, False]), [2])
        self.assertEqual(answers.follow([0, 1], [61, 9], [61, 9], [True, True]), [1, 0]) # rows that fill up a pass

    def test_candidates_that_are_taken_back(self):
        answers = metrics.Answers(10, drafts=3)
        answers.follow([5], [0], [20], [False])
        answers.follow([5], [20], [24], [True]) # three of the four are wrong
        answers.follow([5], [21], [25], [True])
        self.assertEqual(answers.follow([], [], [], []), [5])

    def test_passes_at_once(self):
        answers = metrics.Answers(10, passes=2)
        answers.follow([1], [0], [20], [False])
        answers.follow([2], [0], [30], [False])
        self.assertEqual(answers.follow([1], [20], [21], [True]), [])
        self.assertEqual(answers.follow([3], [0], [9], [False]), [0])
        self.assertEqual(answers.follow([3], [9], [10], [True]), [1])


class Progress(unittest.TestCase):
    def test_lines(self):
        """A reservation that takes long has some, another one none."""
        sizes, told = iter(range(0, 100 << 30, 1 << 30)), threading.Event()

        def measure():
            size = next(sizes)
            if size == 3 << 30:
                told.set()
            return size
        with self.assertLogs("vllm.kvferry", "INFO") as lines:
            with progress.Progress(2 << 30, 0.001, measure):
                self.assertTrue(told.wait(60))
        self.assertIn("reserves host memory: 1.0 GiB of 2.0 GiB after 0 s", lines.output[0])
        self.assertIn("2.0 GiB of 2.0 GiB", lines.output[2])
        with self.assertNoLogs("vllm.kvferry", "INFO"), progress.Progress(2 << 30):
            self.assertGreater(progress.held(), 1 << 20)


class Refusals(unittest.TestCase):
    def refused(self, wanted, call, /, *given, **named):
        with self.subTest(wanted), self.assertRaisesRegex(kvferry.Unsupported, wanted):
            call(*given, **named)

    def test_engines(self):
        for good in ({}, {"cache_dtype": "bfloat16"}, {"drafts_by": "ngram"}):
            refusals.check_engine(engine(**good))
        for text, bad in (
                ("KV connectors \\(--kv-transfer-config with NixlConnector\\)", {"connector": "NixlConnector"}),
                ("--kv-offloading-size 8 \\(with --kv-offloading-backend native\\): .*host_memory",
                 {"offload_gib": 8.0, "connector": "OffloadingConnector"}),
                ("kv_cache_dtype = fp8", {"cache_dtype": "fp8"}),
                ("context parallelism", {"shares_contexts": True}),
                ("micro-batches", {"has_micro_batches": True}),
                ("reference sliding windows", {"has_reference_windows": True}),
                ("kv_sharing_fast_prefill", {"has_fast_prefill": True}),
                ("heads of 512 elements", {"text": types.SimpleNamespace(per_layer_config={"5": {"head_dim": 512}})}),
                ("heads of 512 elements", {"text": types.SimpleNamespace(
                    layer_types=["sliding_attention", "full_attention"],
                    per_layer_config=[types.SimpleNamespace(head_dim=n) for n in (1024, 512)])}),
                *(("drafts by %s: take ngram" % name, {"drafts_by": name}) for name in (
                    "mtp", "eagle", "eagle3", "dflash", "dspark", "draft_model", "medusa", "suffix", "ngram_gpu"))):
            self.refused(text, refusals.check_engine, engine(**bad))
        wide = types.SimpleNamespace(per_layer_config={"5": {"head_dim": 512}})
        refusals.check_engine(engine(device_type="cpu", text=wide))

    def test_a_library_without_cuda(self):
        """As `pip install .[vllm]` makes one where there is no nvcc."""
        with self.assertRaises(kvferry.Unsupported) as caught:
            kvferry.Runtime(device="cuda")
        if "no CUDA device" in str(caught.exception):
            self.assertRegex(refusals.without_cuda(str(caught.exception)), "no nvcc.*this build.*pip install --force-reinstall")
        self.assertEqual(refusals.without_cuda("the driver is too old"), "the driver is too old")

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
            bad = engine(cache_dtype="fp8_e4m3", dtype="torch." + dtype, quantization=config.get("quantization_config"))
            self.refused("kv_cache_dtype = fp8_e4m3: pages have the type of the model; say %s$" % wanted,
                         refusals.check_engine, bad)

    def test_reasons(self):
        """A reason that no setting helps against comes alone; others come at once, so that no advice leads to the next one."""
        asked = engine(cache_dtype="fp8", text=types.SimpleNamespace(
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
        asked.text.per_layer_config = {"1": {"head_dim": 512}}
        self.assertRegex("; ".join(refusals.reasons(asked, plain)), "^[^;]*heads of 512 elements[^;]*$")

    def test_layers(self):
        mixed = types.SimpleNamespace(layer_types=["sliding_attention", "full_attention"])
        refusals.check_layer("decoder", mixed)
        for text, bad in (("type encoder_only", {"attn_type": "encoder_only"}),
                          ("type encoder_decoder", {"attn_type": "encoder_decoder"}),
                          ("ALiBi", {"alibi_slopes": [1.0]}),
                          ("sliding window", {"sliding_window": 128})):
            self.refused(text, refusals.check_layer, **{"attn_type": "decoder", "text": mixed, **bad})

    def test_what_vllm_says_when_it_chooses(self):
        """Words of ours, and of several reasons the one that has no way out by settings."""
        plain = dict(head_size=64, use_mla=False, has_sink=False, block_size=None,
                     text=types.SimpleNamespace(layer_types=["sliding_attention", "full_attention"]))
        alone = [types.SimpleNamespace(**fields) for fields in ({}, {"layer_types": ["sliding_attention"] * 4})]
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
                          ("sliding window: leave", {"has_sliding_window": True, "text": types.SimpleNamespace(sliding_window_pattern=6)}),
                          ("sliding window: leave", {"has_sliding_window": True, "text": types.SimpleNamespace(loop_window_size=64)}),
                          *(("layers all have a sliding window: take another model",
                             {"has_sliding_window": True, "text": text}) for text in alone)):
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
        plain = dict(has_window=False, is_causal=True)
        refusals.check_spec(types.SimpleNamespace(**plain))
        for text, bad in (("part of the context", {"has_window": True}), ("come later", {"is_causal": False})):
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
