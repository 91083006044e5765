#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The parts of the backend for vLLM that need no vLLM: settings, refusals, what a row attends to.

vLLM's use of them is tested by check_vllm.py, under `./dev vllm`.
"""
import os
import random
import subprocess
import sys
import tempfile
import threading
import types
import unittest

import numpy as np

import kvferry
from kvferry._cache import width_in_pages
from kvferry.vllm import known as releases
from kvferry.vllm import heads, memory, metrics, options, progress, refusals
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
        self.assertEqual(options.read({}, {}), ({}, {}, None, 60, 0, None, None, "all", "own"))

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
                            ("prompt_attention = flash: must be own or library", {"prompt_attention": "flash"}),
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
        with self.assertRaisesRegex(kvferry.Invalid, "host_memory must be set with data parallelism"):
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
        with self.assertRaisesRegex(kvferry.OutOfMemory, "host_memory = 9GiB: 8GiB is the limit of this container"):
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
            self.refused("kv_cache_dtype = fp8_e4m3: pages are in the type of the model; give %s$" % wanted,
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

    def test_rows_without_context_apart(self):
        given = [0, 1, 4, 6, 9, 12], [9, 3, 2, 40, 3], [False] + [True] * 4, 9
        self.assertEqual(runs_of(*given), [Run(0, [0, 1], None), Run(1, [1, 4, 6, 9, 12], [0, 0, 37, 0])])
        apart = runs_of(*given, apart=True)
        self.assertEqual(apart, [Run(0, [0, 1], None), Run(1, [1, 4, 6], [0, 0]), Run(3, [6, 9], [37]), Run(4, [9, 12], [0])])
        self.assertEqual([run.is_first for run in apart], [False, True, False, True])

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
