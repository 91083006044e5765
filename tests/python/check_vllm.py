#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferry in vLLM: tokens of a small random model and of a real one against those of vLLM alone.

Every engine is a process of its own. With a budget for the whole context nothing may differ, whatever
the scheduler does. KVF_HF_MODEL is the folder of the real model, KVF_COMMAND the command of kvferry.

usage: check_vllm.py [--shard I/N] [TEST...]     ./dev vllm makes the environment and runs it
"""
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock

from vllm_case import Case, main, stock, vllm_alone
from vllm_engine import (COMPILED, DRAFTS, FOLDER, FULL, NEW, PER_KIND, Engine, adapters, answer, beginnings, capped_model,
                         drafting_model, linear_model, looped_model, mamba_model, narrow_model, pictured_model,
                         poisoned_model, prompts, sinks_model, three_answers, variant, windowed_model)

MOVED = {"budget": 128, "local_tokens": 32, "transfer": "mapped"} # within a budget, with pages that go to the device


def come_and_go(count=40):
    """So many requests, of which every fourth is dropped while it runs."""
    return "abort", [[prompts()[i % 12] for i in range(count)]], {"every": 4}


def write_mask(path, layers):
    """A file of kinds of heads: of each layer a character per KV head."""
    with open(path, "w", encoding="utf-8") as out:
        out.writelines("\t".join(kinds) + "\n" for kinds in layers)


class SameTokens(Case):
    def test_a_batch_and_equal_beginnings(self):
        """Twelve prompts at once; what was there before and what another one of the same pass has
        comes from the prefix cache; three answers to a prompt share its blocks."""
        twice = prompts()[-3:]
        engine = self.ours([answer(prompts()), answer(twice + twice), three_answers(),
                            answer(beginnings())])
        plain, again, thrice, alike = engine.results
        self.assertEqual(plain["tokens"], stock())
        self.assertEqual(again["tokens"], stock()[-3:] * 2)
        self.assertEqual(again["cached"], [256, 384, 480] * 2)
        self.assertEqual(thrice["tokens"], vllm_alone().results[1]["tokens"])
        self.assertEqual(alike["tokens"], vllm_alone().results[2]["tokens"])
        self.assertEqual(alike["cached"], [0, 288, 288])
        self.assertIn("300 blocks of 32, 9600 tokens fit", engine.log)

    def test_chunks_preemptions_and_aborts(self):
        """Prompts in pieces of 64 tokens, fewer blocks than requests want, requests that go away."""
        engine = self.ours([answer(prompts()), come_and_go(60)], max_num_batched_tokens=64, num_gpu_blocks_override=41, max_model_len=1024)
        self.assertEqual(engine.results[0]["tokens"], stock())
        self.assertGreater(engine.counters["vllm:num_preemptions"], 3)
        told = engine.results[1]["tokens"]
        self.assertGreater(sum(one is None for one in told), 5)
        self.same_that_stay(told, stock())

    def test_prompts_by_a_library(self):
        """Tokens without context are attended by torch here; the rest of a prompt, and prefixes, by kvferry."""
        own = {"budget": FULL, "transfer": "mapped", "host_memory": "64MiB", "prompt_attention": "library"}
        for changes in ({}, {"max_num_batched_tokens": 64}):
            engine = self.ran(Engine([answer(prompts()), answer(prompts()[-3:])], own, **changes))
            self.assertEqual(engine.results[0]["tokens"], stock())
            self.assertEqual(engine.results[1]["tokens"], stock()[-3:])
            self.assertIn("tokens of prompts without context are attended by torch", engine.log)

    def test_drafts(self):
        """Candidates from the prompt: some are taken, the others are taken back."""
        engine = self.ours([answer(prompts(), max_tokens=64)], speculative_config=DRAFTS)
        self.assertEqual([[one[0][:NEW]] for one in engine.results[0]["tokens"]], stock())
        told = engine.counters
        self.assertGreater(told["vllm:spec_decode_num_accepted_tokens"], 0)
        self.assertGreater(told["vllm:spec_decode_num_draft_tokens"],
                           told["vllm:spec_decode_num_accepted_tokens"])

    def test_two_ranks(self):
        """Heads over two processes, then layers."""
        for name, changes in (("tensor_parallel_size", {}), ("pipeline_parallel_size", COMPILED)):
            with self.subTest(name):
                engine = self.ours([answer(prompts())], several=True, **{name: 2}, **changes)
                self.assertEqual(engine.results[0]["tokens"], stock())
                self.assertEqual(engine.log.count("kvferry 0."), 2)

    def test_adapters_over_one_prefix(self):
        """Three prompts that begin alike, without an adapter and under two: a prefix is that of its adapter."""
        import vllm
        calls = [("adapt", [beginnings(), adapters(2)], {})] * 2
        lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        alone, engine = self.ran(Engine(calls, **lora)), self.ours(calls, **lora)
        # On a CPU 0.32 answers those without an adapter by the adapter in the last place, which is either's.
        first = 3 if vllm.__version__.startswith("0.32.") else 0
        for told, wanted in zip(engine.results, alone.results):
            self.assertEqual(told["tokens"][first:], wanted["tokens"][first:])
            self.assertEqual(told["cached"], wanted["cached"])
            for one, other in itertools.combinations([told["tokens"][i:i + 3] for i in range(first, 9, 3)], 2):
                self.assertTrue(all(a != b for a, b in zip(one, other)))
        self.assertEqual([c > 0 for c in engine.results[0]["cached"]], [False, True, True] * 3)
        self.assertTrue(all(engine.results[1]["cached"]))

    def test_as_many_as_keep_their_budget(self):
        """Two ranks, whose scheduler is in a third process: all have one number, and others wait."""
        engine = self.ran(Engine([answer(prompts())], {
            "budget": FULL, "transfer": "mapped", "host_memory": "64MiB", "device_memory": "24MiB", "admit": "resident"},
            several=True, tensor_parallel_size=2, num_gpu_blocks_override=None))
        self.assertEqual(engine.results[0]["tokens"], stock())
        told = re.findall(r"max_num_seqs is (\d+), and was 12", engine.log)
        self.assertEqual(len(set(told)), 1, engine.log[-4000:])
        self.assertTrue(1 < int(told[0]) < 12)
        self.assertEqual(re.findall(r"tokens fit, in (\d+) requests at once", engine.log), [told[0]] * 2)

    def test_other_schedulers(self):
        """One that turns the order of requests round in every pass, and vLLM's own by priorities, of which the last come
        first. Both take blocks away from requests that run."""
        few, many = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 41, "max_model_len": 1024}, prompts()[5:] * 2
        for priorities, changes in ((None, {"scheduler_cls": "vllm_schedulers.Turning"}),
                                    (list(range(len(many), 0, -1)), {"scheduling_policy": "priority"})):
            with self.subTest(**changes):
                engine = self.ours([answer(many, priority=priorities, max_tokens=100)], **few, **changes)
                self.assertEqual([[one[0][:NEW]] for one in engine.results[0]["tokens"]], stock()[5:] * 2)
                self.assertGreater(engine.counters["vllm:num_preemptions"], 0)

    def test_settings_of_the_environment(self):
        """Pages that go to the device and are found there again."""
        for name, value in (("KVFERRY_PAGE_SIZE", "8"), ("KVFERRY_VERIFY_INTERVAL", "2")):
            os.environ[name] = value
            self.addCleanup(os.environ.pop, name)
        engine = self.ran(Engine([answer(prompts())], {
            "budget": FULL, "transfer": "mapped", "host_memory": "64MiB", "log_interval": 0.01}))
        self.assertEqual(engine.results[0]["tokens"], stock())
        self.assertRegex(engine.log, "pages of 8 tokens, select dynamic; 300 blocks")
        self.assertRegex(engine.log, "kvferry: .* tokens attended per KV head and step, .*, recall 100.00%")
        self.assertGreater(engine.summed("heads_verified"), 10 * 12 * 4 * 8) # passes, rows, layers, heads
        self.assertAlmostEqual(engine.summed("recall") / engine.summed("heads_verified"), 1, 5)

    def test_without_custom_nothing_is_kvferry_s(self):
        self.assertNotIn("kvferry 0.", vllm_alone().log)


class PackedPages(Case):
    """With a budget of the whole context tokens follow from what was quantized, whatever the scheduler does."""

    def ask(self, calls, ours, **changes):
        return self.ran(Engine(calls, {"budget": FULL, "host_memory": "32MiB", **ours},
                               **{"num_gpu_blocks_override": None, **changes}))

    def test_what_the_scheduler_does_changes_nothing(self):
        """At once, then in pieces of 64 tokens with preemptions, prefix hits and requests that go away."""
        plain = self.ask([answer(prompts())], {"pages": "k8v4"})
        told = plain.results[0]["tokens"]
        cut = self.ask([answer(prompts()), come_and_go(60)],
                       {"pages": "k8v4", "transfer": "mapped"}, max_num_batched_tokens=64,
                       num_gpu_blocks_override=41, max_model_len=1024)
        self.assertEqual(cut.results[0]["tokens"], told)
        self.assertGreater(cut.counters["vllm:num_preemptions"], 3)
        self.same_that_stay(cut.results[1]["tokens"], told)

    def test_the_same_memory_has_more_tokens(self):
        """Heads of 32 in fp32 and pages of 4: 256 bytes for 1,024."""
        tokens = [int(re.search(r"(\d+) tokens fit", self.ask([answer(prompts()[:1])], {"pages": pages}).log)[1])
                  for pages in ("bf16", "k8v4")]
        self.assertTrue(3.8 < tokens[1] / tokens[0] < 4.1, tokens)


class NotFinite(Case):
    """A value that is not a number: its request is lost, and nothing else."""

    def test_others_go_on(self):
        """Also those that share the blocks before that value."""
        answers = {token for one in stock() for answer in one for token in answer}
        token = min({0, 1} - answers) # neither in a prompt nor in an answer
        bad = prompts()[6][:70] + [token] + prompts()[6][:20]
        engine = self.ours([answer([bad]), ("poison", [prompts(), bad, token], {}), answer(prompts())],
                           model=poisoned_model(token), max_num_batched_tokens=128, max_num_seqs=16)
        _, among, after = engine.results
        self.assertEqual(among["tokens"][:12], stock())
        self.assertEqual([len(one[0]) for one in among["tokens"][12:]], [NEW] * 2)
        self.assertEqual(after["tokens"], stock())
        self.assertGreaterEqual(engine.log.count("a request is lost, others go on"), 1)


class Windows(Case):
    """Layers that see a part of the context are left to vLLM, with groups of blocks of their own."""

    def ask(self, ours, **changes):
        """Chunks, and a prompt of more than a block of ours that comes again."""
        long = (prompts()[-1] * 3)[:1500]
        if ours is not None:
            changes.update(PER_KIND, additional_config={"kvferry": ours})
        return self.ran(Engine([answer(prompts()), answer([long]), answer([long])], model=self.model,
                               max_num_batched_tokens=256, **changes))

    def select(self, **ours):
        """Within a budget, with pages that are copied and with pages that are read in place."""
        told = [self.ask({"budget": 128, "local_tokens": 32, "host_memory": "512MiB", "transfer": transfer, **ours},
                         num_gpu_blocks_override=None) for transfer in ("mapped", "direct")]
        self.assertEqual(told[0].results, told[1].results)
        self.assertGreater(told[0].summed("page_hits"), 1000)
        return told

    def test_other_layers_are_vllm_s(self):
        self.model = windowed_model()
        alone, full = self.ask(None), self.ask({"budget": FULL})
        self.assertEqual(full.tokens, alone.tokens)
        self.assertEqual(full.results[2]["cached"], [1024]) # as long as vLLM's of 32 tokens, in bytes
        self.assertIn("300 blocks of 1024, 307200 tokens fit where other layers take no block", full.log)
        new = [len(ids) for ids in prompts()] + [1500, 1500 - 1024]
        self.assertEqual(full.summed("tokens_put"), 2 * sum(n + NEW - 1 for n in new)) # of two layers
        self.select()

    def test_how_much_of_a_prefix_is_found(self):
        """A gpt-oss: whole blocks of ours are found, which have 32 or 16 times the tokens of vLLM's own."""
        long = (prompts()[-1] * 6)[:2750]
        changes = {"model": sinks_model(), "max_model_len": 4096}
        alone = self.ran(Engine([answer([long])] * 2, **changes))
        told = [self.ran(Engine([answer([long])] * 2, {"budget": 4096}, dtype=dtype, **changes, **PER_KIND)) for dtype in ("float32", "bfloat16")]
        self.assertEqual(told[0].tokens, alone.tokens)
        self.assertEqual([engine.results[1]["cached"] for engine in (alone, *told)], [[2720], [2048], [2560]])

    def test_soft_caps(self):
        """Which bend logits enough that there are other tokens without them, under either runner."""
        told = {}
        for cap, ours, second in ((None, None, False), (2.0, None, False), (2.0, {"budget": FULL}, False),
                                  (2.0, {"budget": FULL}, True)):
            self.model = capped_model(cap)
            told[cap, ours is not None, second] = self.ask(ours, second=second).results
        self.assertNotEqual(told[None, False, False], told[2.0, False, False])
        for second in (False, True):
            self.assertEqual([one["tokens"] for one in told[2.0, True, second]],
                             [one["tokens"] for one in told[2.0, False, False]])
        self.select()

    def test_new_sinks(self):
        """Weights may come in place, which no layer processes."""
        calls = [answer(prompts()), ("new_sinks", [], {}), ("reset", [], {}), answer(prompts())]
        alone = self.ran(Engine(calls, model=sinks_model()))
        ours = self.ours(calls, model=sinks_model(), **PER_KIND)
        self.assertEqual(ours.results, alone.results)
        self.assertNotEqual(*alone.results[::3])

    def test_layers_that_ask_twice(self):
        """Once with keys, and then without, for those that they had."""
        self.model = looped_model()
        alone, full = self.ask(None), self.ask({"budget": FULL})
        self.assertEqual(full.tokens, alone.tokens)
        self.select()

    def test_text_of_a_model_for_images(self):
        """With the option that the refusal names tokens are vLLM's."""
        whole = {"skip_tokenizer_init": False, "model": pictured_model()}
        text = {**whole, "language_model_only": True}
        alone = self.ran(Engine([answer(prompts())], **text))
        engine = self.ran(Engine([answer(prompts())], {"budget": FULL}, refused=[whole, {**whole, **PER_KIND}],
                                 **text, **PER_KIND))
        self.assertEqual(engine.results[0]["tokens"], alone.results[0]["tokens"])
        for told in engine.refused:
            self.assertIn("serve text alone by --language-model-only", told)

    def test_kinds_of_heads(self):
        """Kinds in the layers that see everything, whose lines are the fourth and the eighth; others have none."""
        self.model = windowed_model()
        mask = os.path.join(FOLDER.name, "windowed.tsv")
        write_mask(mask, ["1111"] * 3 + ["1220"] + ["1111"] * 3 + ["0212"])
        told = self.select(head_mask=mask, streaming_recent=64, verify_interval=2)
        self.assertIn("of the heads 25% hot, 50% coarse, 25% streaming", told[0].log)
        verified = told[0].summed("heads_verified") # of each layer three KV heads, which have two each
        self.assertTrue(verified > 0 and verified % (2 * 6) == 0)
        self.assertTrue(0.1 < told[0].summed("recall") / verified < 0.9999)


class Narrow(Case):
    """Values narrower than keys. vLLM alone has no attention for them on a CPU."""

    def test_values_that_are_padded(self):
        """Where a model's layers all see everything, its tokens are those of Transformers."""
        import torch
        folder, model = narrow_model(48, ("full_attention",) * 2)
        ids = [[5 + i % 250 for i in one] for one in prompts()[4:9]]
        engine = self.ours([answer(ids)], model=folder)
        for one, told in zip(ids, engine.results[0]["tokens"]):
            made = model.generate(torch.tensor([one]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
            self.assertEqual(told, [made[0, len(one):].tolist()])


class Linear(Case):
    """Layers without keys are left to vLLM, which makes blocks as large as their states."""

    def ask(self, ours, **changes):
        """Chunks, then requests that come and go, more than have room at once."""
        return self.run_with(ours, [answer(prompts()), come_and_go()], enable_prefix_caching=False,
                             max_model_len=1024, **changes)

    def run_with(self, ours, calls, **changes):
        return self.ran(Engine(calls, ours, **{"model": self.model, "max_num_batched_tokens": 256,
                                               "enable_prefix_caching": True, **changes}))

    def test_prefixes_are_shared(self):
        """Whole blocks, and with a smaller unit blocks in whose middle a request goes on: vLLM copies them, and
        pages follow, under either runner. Texts that go on after one, or after a part of it."""
        self.model, base = linear_model(), (prompts()[-1] * 3)[:1400]
        texts = [base, base[:1300] + base[:50], base + base[:300]]
        calls = [answer(texts[:1]), answer(texts[1:]), answer(texts[::-1])]
        full, small = ({"budget": budget, "local_tokens": 32, "host_memory": "512MiB"} for budget in (FULL, 128))
        alone = self.run_with(None, calls, enable_prefix_caching=False)
        blocks, parts = {"num_gpu_blocks_override": 60}, {"num_gpu_blocks_override": 60, "prefix_match_unit": 32}
        told = [self.run_with(ours, calls, **how) for ours, how in (
            (full, blocks), (full, {**parts, "second": True}), ({**small, "transfer": "direct"}, blocks),
            ({**small, "transfer": "mapped"}, parts))]
        found = [[0], [1248, 1248], [1248, 1248, 1248]], [[0], [1248, 1376], [1696, 1344, 1376]]
        for engine, wanted, cached in zip(told, [alone.results] * 2 + [told[2].results] * 2, found * 2):
            self.assertEqual([one["tokens"] for one in engine.results], [one["tokens"] for one in wanted])
            self.assertEqual([one["cached"] for one in engine.results], cached)
            self.assertEqual(engine.results[0]["tokens"], engine.results[2]["tokens"][-1:])
        self.assertNotEqual(told[2].results, told[0].results)
        self.assertGreater(told[3].summed("page_hits"), 1000)
        self.assertLessEqual(told[3].summed("tokens_attended"), told[3].summed("steps") * 128 * 4)

    def test_other_layers_are_vllm_s(self):
        self.model = linear_model()
        alone = self.ask(None)
        full = self.ask({"budget": FULL, "host_memory": "512MiB"}, num_gpu_blocks_override=30)
        self.assertEqual(full.results[0], alone.results[0])
        self.assertIn("29 blocks of 1248, 36192 tokens fit where other layers take no block", full.log)
        self.same_that_stay(full.results[1]["tokens"], alone.results[0]["tokens"])
        told = [self.ask({"budget": 128, "local_tokens": 32, "host_memory": "512MiB",
                          "transfer": transfer}, num_gpu_blocks_override=blocks)
                for transfer, blocks in (("mapped", None), ("direct", 30))]
        self.assertEqual(told[0].results[0], told[1].results[0])
        self.assertGreater(told[0].summed("page_hits"), 1000)


class Budget(Case):
    def as_the_command(self, mask=None):
        """The tokens of `kvferry run` with the same settings."""
        import transformers
        model = os.environ["KVF_HF_MODEL"]
        ours, option = ({"head_mask": mask, "verify_interval": 13}, ["--head-mask", mask]) if mask else ({}, [])
        with open(os.path.join(os.path.dirname(__file__), "..", "..", "CONTRIBUTING.md"),
                  encoding="utf-8") as text:
            ids = transformers.AutoTokenizer.from_pretrained(model)(text.read()).input_ids[:2000]
        engine = self.ran(Engine([answer([ids], max_tokens=40)], {"budget": 512, **ours}, model=model,
                                 max_num_batched_tokens=512, block_size=64 if mask else 32))
        given, told = (os.path.join(FOLDER.name, name) for name in ("prompt", "told"))
        with open(given, "w", encoding="utf-8") as out:
            out.write(" ".join(map(str, ids)))
        subprocess.run([os.environ["KVF_COMMAND"], "run", "--model", model, "--token-ids", given,
                        "--budget", "512", "--tokens", "40", "--ignore-eos", "--emit-ids", told,
                        *option],
                       capture_output=True, check=True)
        with open(told, encoding="utf-8") as ids_told:
            wanted = [int(line) for line in ids_told]
        self.assertEqual(engine.results[0]["tokens"], [[wanted]])
        return engine

    def test_a_small_budget_is_the_command_s(self):
        self.as_the_command()

    def test_so_are_kinds_of_heads(self):
        """Drawn: a third of the heads hot, most others rank means first, and some stream. Three passes
        of 39 are verified in those that select."""
        mask = os.path.join(FOLDER.name, "hot.tsv")
        with open(os.path.join(os.environ["KVF_HF_MODEL"], "config.json"), encoding="utf-8") as text:
            config = json.load(text)
        heads, draw = config["num_key_value_heads"], random.Random(5)
        kinds = [[draw.choice("112220") for _ in range(heads)] for _ in range(config["num_hidden_layers"])]
        write_mask(mask, kinds)
        engine = self.as_the_command(mask)
        self.assertRegex(engine.log, "select dynamic, of the heads [0-9]+% hot, [0-9]+% coarse, [0-9]+% streaming;")
        verified = 3 * config["num_attention_heads"] // heads * sum(row.count("1") + row.count("2") for row in kinds)
        self.assertEqual(engine.summed("heads_verified"), verified)
        self.assertTrue(0.6 < engine.summed("recall") / verified < 0.9999)

    def both(self, calls, ours=None, **changes):
        """Pages that are copied to the device, which has too little room for all, and found there again,
        then pages that are read in place, under a budget of a tenth, where a model of random weights selects pages at random: the tokens
        are the same, and no row is lost. Every third pass is verified: that changes nothing either."""
        told = [self.ran(Engine(calls, {"budget": 128, "local_tokens": 32, **how, **(ours or {})}, **changes))
                for how in ({"transfer": "mapped", "device_memory": "5MiB", "verify_interval": 3},
                            {"transfer": "direct"})]
        self.assertEqual(told[0].results, told[1].results)
        for name in ("page_hits", "page_misses", "tokens_brought"):
            self.assertGreater(told[0].summed(name), 1000, name)
        self.assertEqual([engine.summed("rows_lost") for engine in told], [0, 0])
        self.assertLessEqual(told[0].summed("tokens_attended"), told[0].summed("steps") * 128 * 4)
        # Keys of random weights are all alike, and requests have 1 to 511 tokens of which 128 are seen.
        self.assertTrue(0.3 < told[0].summed("recall") / told[0].summed("heads_verified") < 0.95)
        return told

    def test_what_is_on_the_device_changes_nothing(self):
        """Pieces of prompts, preemptions, aborts and shared beginnings."""
        calls = [answer(prompts()), come_and_go(), answer(beginnings())]
        told = self.both(calls, max_num_batched_tokens=64, num_gpu_blocks_override=41,
                         max_model_len=1024)
        for engine in told:
            self.assertGreater(engine.counters["vllm:num_preemptions"], 3)
        self.assertGreater(told[0].summed("pages_voided"), 0)

    def test_nor_with_quantized_pages(self):
        """Nor does it where tokens of the window are dequantized on their way to the device."""
        calls = [answer(prompts()), come_and_go(), answer(beginnings())]
        told = self.both(calls, {"pages": "k8v4"}, max_num_batched_tokens=64, num_gpu_blocks_override=41,
                         max_model_len=1024)
        for engine in told:
            self.assertGreater(engine.counters["vllm:num_preemptions"], 3)
            self.assertIn("pages of 4 tokens in k8v4, select dynamic; 40 blocks of 32", engine.log)

    def test_nor_with_drafts(self):
        """Where the prompt has no candidates for a row, it selects."""
        told = self.both([answer(prompts(), max_tokens=64)],
                         speculative_config={**DRAFTS, "prompt_lookup_min": 3})
        self.assertGreater(told[0].counters["vllm:spec_decode_num_accepted_tokens"], 0)

    def test_nor_with_samples_compiled_and_two_ranks(self):
        """Heads over two processes, then layers."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            with self.subTest(name):
                self.both([answer(prompts()), three_answers()], several=True, **{name: 2}, **COMPILED)


class Runners(Case):
    """The second runner sorts the requests of every pass, the first fills the place of one that ended."""

    def test_windows_follow_requests(self):
        """Each brings its window once, and then a token per step, of every layer and head."""
        told = [self.ran(Engine([answer(prompts()), come_and_go()], MOVED, second=second, max_num_batched_tokens=96))
                for second in (False, True)]
        self.assertEqual(told[0].results[0], told[1].results[0])
        for engine in told:
            steps, brought = engine.summed("steps"), engine.summed("tokens_brought")
            self.assertGreater(brought, 4 * steps)
            self.assertLess(brought, 4 * (steps + 4 * (12 + 40) * (4 + 32 + 31)))

    def test_drafts_select(self):
        """Each candidate attends within the budget: the tokens are those of single steps, and whatever the
        second runner fills its rows up with, none of an answer is attended to densely."""
        alone = self.ran(Engine([answer(prompts(), max_tokens=64)], MOVED))
        for second in (False, True):
            with self.subTest(second=second):
                engine = self.ran(Engine([answer(prompts(), max_tokens=64)], MOVED, second=second,
                                         speculative_config=DRAFTS))
                self.assertEqual(engine.results[0]["tokens"], alone.results[0]["tokens"])
                self.assertGreater(engine.counters["vllm:spec_decode_num_accepted_tokens"], 100)
                # An accepted token was a step, like a rejected one: rows of every token of the answers.
                self.assertGreater(engine.summed("steps"), alone.summed("steps"))
                self.assertLessEqual(engine.summed("tokens_attended"), 128 * 4 * engine.summed("steps"))
                self.assertEqual(engine.summed("rows_lost"), 0)

    def test_forgotten_prompts_and_new_weights(self):
        """Blocks get other tokens without a word: of the same prompts in another order, then anew."""
        ids = prompts()[-6:]
        calls = [answer(ids), ("reset", [], {}), answer(ids[::-1]), ("reload", [], {}), ("reset", [], {}), answer(ids)]
        for second in (False, True):
            with self.subTest(second=second):
                engine = self.ran(Engine(calls, {**MOVED, "device_memory": "5MiB"}, second=second,
                                         num_gpu_blocks_override=81, max_model_len=1024))
                first, _, again, _, _, anew = engine.results
                self.assertEqual(again["tokens"], first["tokens"][::-1])
                self.assertEqual(anew["tokens"], first["tokens"])
                self.assertEqual(again["cached"] + anew["cached"], [0] * 12)
                for name in ("page_hits", "page_misses"):
                    self.assertGreater(engine.summed(name), 1000, name)

    def test_sleep(self):
        """Memory goes and comes back, by vLLM's tags as well, and the answers are the same. Its blocks lie where
        they lay, and have nothing: no prompt is found."""
        ids = prompts()[-6:]
        calls = [answer(ids), ("sleep", [1], {}), answer(ids[::-1]),
                 ("sleep", [2], {"tags": [["weights"], ["kv_cache"]]}), answer(ids)]
        for second in (False, True):
            with self.subTest(second=second):
                engine = self.ran(Engine(calls, {**MOVED, "host_memory": "400MiB"}, second=second,
                                         num_gpu_blocks_override=2001))
                first, held, again, *_, anew = engine.results
                self.assertEqual(again["tokens"], first["tokens"][::-1])
                self.assertEqual(anew["tokens"], first["tokens"])
                self.assertEqual(again["cached"] + anew["cached"], [0] * 12)
                host = int(re.search(r"kvferry sleeps: (\d+) MiB of host memory", engine.log)[1])
                self.assertGreater(host, 200)
                self.assertLess(held[1], held[0] - host // 2)
                self.assertEqual(engine.log.count("kvferry is awake"), 2)
                self.assertEqual(engine.summed("steps"), 3 * 6 * (NEW - 1) * 4) # of three times, over sleep
                self.assertEqual(engine.summed("tokens_put"), 3 * 4 * sum(len(one) + NEW - 1 for one in ids))

    def test_more_requests_than_windows(self):
        """They take turns in calls of as many rows as there are windows; the tokens are the same."""
        few, all_ = [self.ran(Engine([answer(prompts())], {**MOVED, **more})) for more in ({"device_memory": "4MiB"}, {})]
        self.assertEqual(few.results, all_.results)
        windows = int(re.search(r"(\d+) of them with a window of their own on the device", few.log)[1])
        self.assertTrue(1 <= windows < 8, windows)
        self.assertGreater(few.summed("tokens_brought"), 2 * all_.summed("tokens_brought"))
        self.assertNotIn("of them with a window", all_.log)


class Replays(Case):
    """Passes of the second runner that are CUDA graphs on a GPU."""

    def replayed(self, calls, ours, sizes=(1, 2, 4, 8, 12), **changes):
        """Answers of passes that are replayed where vLLM has captured such a number of rows."""
        engine = self.ran(Engine([("graphs", [sizes], {}), *calls, ("replays", [], {})],
                                 {"local_tokens": 32, "transfer": "mapped", **ours}, second=True, **changes))
        self.assertEqual(engine.summed("rows_lost"), 0)
        return engine.results[0], engine.results[1:-1], engine.results[-1], engine

    def test_replayed_passes(self):
        """Requests end one after another, and rows of graphs are left over; then requests that come, wait and
        go. With a budget of the whole context the tokens are vLLM's; within a smaller one they are those of
        passes that are not replayed, in an engine with graphs as without."""
        calls = [answer(prompts()), come_and_go(), answer(prompts()[-3:] * 2)]
        mode, full, count, _ = self.replayed(calls, {"budget": FULL})
        self.assertEqual((mode, count > 40), ("FULL_DECODE_ONLY", True), count)
        self.assertEqual(full[0]["tokens"], stock())
        self.assertEqual(full[2]["tokens"], stock()[-3:] * 2)
        calls = [answer(prompts(), lengths=[5, 40, 9, 24, 13, 31, 20])]
        alone = self.ran(Engine(calls, MOVED, second=True))
        _, told, count, engine = self.replayed(calls, {"budget": 128})
        self.assertGreater(count, 30)
        self.assertEqual(told, alone.results)
        self.assertEqual(engine.summed("steps"), alone.summed("steps") + 4) # and a prompt of one token
        captures = 2 * sum((1, 2, 4, 8, 12)) * 4 * 4 # which bring a token of each row, layer and head
        self.assertLessEqual(engine.summed("tokens_brought"), alone.summed("tokens_brought") + captures + 16)

    def test_ends_of_prompts(self):
        """The last token of a prompt that comes alone selects, whether its pass is replayed or not."""
        ids = [(prompts()[-1] * 2)[:n] for n in (65, 129, 193, 257, 513, 577, 400)]
        changes = {"max_num_batched_tokens": 64, "max_num_seqs": 6}
        told = [self.replayed([answer(ids), answer(ids[::-1])], {"budget": 96}, sizes, **changes)
                for sizes in ((1, 2, 4, 6), ())]
        self.assertGreater(told[0][2], 20)
        self.assertEqual(told[1][2], 0)
        self.assertEqual(told[0][1], told[1][1])

    def test_replayed_drafts(self):
        """Every request has as many candidates as there may be."""
        ours, calls = {"budget": 128}, [answer(prompts(), max_tokens=64)]
        alone = self.ran(Engine(calls, MOVED))
        _, told, count, engine = self.replayed(calls, ours, (5, 10, 20, 40, 60), speculative_config=DRAFTS)
        self.assertGreater(count, 20)
        self.assertEqual(told[0]["tokens"], alone.results[0]["tokens"])
        self.assertGreater(engine.counters["vllm:spec_decode_num_accepted_tokens"], 100)

    def test_what_is_not_captured(self):
        """Passes that are verified attend densely as well, with lengths of the host."""
        mode, _, count, engine = self.replayed([answer(prompts()[:2])], {"budget": 128, "verify_interval": 2})
        self.assertEqual((mode, count), ("NONE", 0))
        self.assertIn("attention stays out of CUDA graphs: verify_interval = 2", engine.log)


class Folders(unittest.TestCase):
    """Folders of counters. They go with the first process, and of one that was killed with the next that begins."""

    START = ("from kvferry.vllm import metrics; metrics.announce(); rank = metrics.Written(rank='0'); "
             "print(flush=True); input()")

    def start(self, folder):
        env = {name: value for name, value in os.environ.items() if name != "KVFERRY_METRICS"}
        process = subprocess.Popen([sys.executable, "-c", self.START], env={**env, "TMPDIR": folder}, text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(process.kill)
        process.stdout.readline()
        return process

    def test_nothing_is_left(self):
        with tempfile.TemporaryDirectory(dir=FOLDER.name) as folder:
            killed, other = self.start(folder), self.start(folder)
            killed.kill()
            killed.communicate()
            there = os.listdir(folder)
            self.assertEqual(len(there), 2)
            last = self.start(folder)
            self.assertEqual(len(os.listdir(folder)), 2)
            self.assertEqual(len(set(os.listdir(folder)) & set(there)), 1) # of the one that lives
            for process in (other, last):
                process.communicate("\n")
            self.assertEqual(os.listdir(folder), [])


class Calls(unittest.TestCase):
    """Who sleeps, and who copies blocks. The effect: Runners.test_sleep, Linear.test_prefixes_are_shared."""

    def test_a_runner(self):
        """A copy is followed if it holds tokens of a request that begins."""
        from kvferry.vllm.calls import follow
        told = []

        class Runner:
            vllm_config = object()
            kv_cache_config = types.SimpleNamespace(kv_cache_groups=[
                types.SimpleNamespace(layer_names=names) for names in (["states"], ["ours"])])

            def update_requests(self, output):
                told.append("updated")

        class Pool:
            engine, layers = types.SimpleNamespace(config=Runner.vllm_config), {"ours": None}

            @staticmethod
            def copy(pairs):
                told.extend([pairs] if pairs else [])

        pool, other = Pool(), Pool()
        other.engine = types.SimpleNamespace(config=object())
        for one in (pool, other, pool):
            follow(one, Runner)
        runs = types.SimpleNamespace(new_block_ids=[None, ([], [12])])
        for copies, wanted in ((None, []), ([(1, 2), (3, 4), (5, 12), (6, 13)], [[(3, 4), (5, 12)]])):
            told.clear()
            Runner().update_requests(types.SimpleNamespace(
                kv_cache_block_copies=copies, scheduled_cached_reqs=runs,
                scheduled_new_reqs=[types.SimpleNamespace(block_ids=([0, 2], [7, 4]))]))
            self.assertEqual(told, ["updated", *wanted])

    def test_counters_are_read_without_a_wait(self):
        """An event of one pass, asked in later ones; what it comes after is read once."""
        from kvferry.vllm import pool as module
        told, events = [], []

        class Event:
            is_done = False

            def record(self):
                events.append(self)

            def query(self):
                return self.is_done

        class Pool(module.Pool):
            def __init__(self):
                self._steps, self.names, self._stream, self._mark, self._read = 0, {"a", "b"}, None, None, 0.0

            def _tell(self):
                self._read = time.monotonic()
                told.append(self._steps)

            def stream(self):
                raise AssertionError("waits")

        pool = Pool()
        with unittest.mock.patch.object(module.torch.cuda, "Event", Event):
            for _ in range(3):
                pool.begin(1, 0, 0)
            self.assertEqual((len(events), told), (1, []))
            events[0].is_done = True
            for _ in range(3):
                pool.begin(1, 0, 0)
            self.assertEqual((len(events), told), (1, [8]))
            pool._read -= 2 * module.TELL_SECONDS
            pool.begin(1, 0, 0)
            self.assertEqual((len(events), told), (2, [8]))

    def test_a_mechanism_of_sleep_mode(self):
        """Pages go before or beside vLLM's blocks, and come back after them."""
        from kvferry.vllm.calls import follow
        told = []

        class Theirs:
            def suspend(self, level=1):
                told.append("suspend %d" % level)

            def resume(self, tags=None):
                told.append("resume %s" % tags)

            def discard(self, tags):
                told.append("discard %s" % (tags,))

        class Pool:
            def sleep(self):
                told.append("sleep")

            def wake(self):
                told.append("wake")

        pool, one = Pool(), Theirs
        for _ in range(2):
            follow(pool, one)
        for call, wanted in ((lambda: one().suspend(2), ["sleep", "suspend 2"]),
                             (lambda: one().resume(["weights"]), ["resume ['weights']"]),
                             (lambda: one().resume(["kv_cache"]), ["resume ['kv_cache']", "wake"]),
                             (lambda: one().resume(), ["resume None", "wake"]),
                             (lambda: one().discard(("weights",)), ["discard ('weights',)"]),
                             (lambda: one().discard(("kv_cache",)), ["discard ('kv_cache',)", "sleep"])):
            told.clear()
            call()
            self.assertEqual(told, wanted)
        del pool
        told.clear()
        one().suspend()
        self.assertEqual(told, ["suspend 1"])


class Taken(unittest.TestCase):
    """The names that the plug-in takes of this release; check_vllm_names.py has those of all, by their lists."""

    def test_its_list(self):
        import vllm
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
        import vllm_names
        source = vllm_names.Source(os.path.dirname(os.path.dirname(vllm.__file__)))
        taken = vllm_names.Taken(source, source.version)
        with open(vllm_names.list_of(source.version), encoding="utf-8") as text:
            self.assertEqual(taken.lines(), text.read().splitlines())
        self.assertEqual(taken.missing, [])


class Defaults(unittest.TestCase):
    def test_of_a_card(self):
        """The calculator's numbers of requests and tokens of a pass are vLLM's, by a card's memory and name."""
        from vllm.engine import arg_utils
        from vllm.usage.usage_lib import UsageContext
        from kvferry.vllm.__main__ import defaults_of
        for gib, name in ((180, "NVIDIA B200"), (80, "NVIDIA H100"), (80, "NVIDIA A100-SXM4-80GB"), (40, "NVIDIA A100"), (24, "")):
            with unittest.mock.patch.object(arg_utils, "current_platform", types.SimpleNamespace(
                    get_device_total_memory=lambda: gib << 30, get_device_name=lambda: name, # pylint: disable=cell-var-from-loop
                    is_device_capability=lambda _: False, is_tpu=lambda: False, is_cpu=lambda: False)):
                tokens, requests = arg_utils.EngineArgs.get_batch_defaults(1)
            server = UsageContext.OPENAI_API_SERVER
            self.assertEqual(defaults_of(gib << 30, name), (requests[server], tokens[server]), name)


class Refusals(Case):
    """By name, before the first token. Parts that need no vLLM: check_vllm_parts.py."""

    def test_lengths_of_the_host_must_be_true(self):
        """Adaptive verification trims drafts on the device: vLLM must not take it for this backend."""
        from kvferry.vllm.backend import Backend
        given = dict(head_size=64, dtype=Backend.supported_dtypes[0], kv_cache_dtype="auto", block_size=None,
                     use_mla=False, has_sink=False, use_sparse=False, use_mm_prefix=False,
                     use_per_head_quant_scales=False, device_capability=None, attn_type="decoder")
        for wanted, asked in (([], {}), (["device-cpu query lens mismatch"], {"use_adaptive_verification": True})):
            told = super(Backend, Backend).validate_configuration(**given, **asked)
            self.assertEqual([reason[:30] for reason in told], wanted)

    def test_what_is_not_supported(self):
        wanted = {
            "KV connectors (--kv-transfer-config with ExampleConnector)": {"kv_transfer_config": {
                "kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "--kv-offloading-size 1 (with --kv-offloading-backend native)": {"kv_offloading_size": 1.0},
            "kv_cache_dtype = fp8": {"kv_cache_dtype": "fp8"},
            "a sliding window: leave them to vLLM by --attention-config": {
                "model": windowed_model(), "load_format": "dummy"},
            "that see everything in several groups": {
                "model": windowed_model(1), "load_format": "dummy", **PER_KIND},
            "no disk: a block may be any request's next": {
                "additional_config": {"kvferry": {"disk": "/tmp"}}},
            "select = hybrid: blocks of the caller take dynamic": {
                "additional_config": {"kvferry": {"select": "hybrid"}}},
            "num_gpu_blocks_override = 301: so many blocks take 37.8 MiB of host_memory, which is 16.0 MiB": {
                "additional_config": {"kvferry": {"host_memory": "16MiB"}}},
            "host_memory = 1MiB: a request of max_model_len = 2048 tokens has": {
                "additional_config": {"kvferry": {"host_memory": "1MiB"}}}}
        self.refused(wanted)

    def refused(self, wanted):
        engine = self.ran(Engine([], refused=list(wanted.values())))
        for text, told in zip(wanted, engine.refused):
            with self.subTest(text):
                self.assertIn(text, told)
        return engine

    def test_before_weights_are_loaded(self):
        """There are none to load."""
        mask = os.path.join(FOLDER.name, "coarse.tsv")
        write_mask(mask, ["1222"] * 4)
        kvferry = {"additional_config": {"kvferry": {"budget": FULL}}}
        wanted = {
            "no setting budgets: did you mean budget": {"additional_config": {"kvferry": {"budgets": 5}}},
            "budget_tokens = 5: at least": {"additional_config": {"kvferry": {"budget": 5}}},
            "head_mask = /nowhere: ": {"additional_config": {"kvferry": {"head_mask": "/nowhere"}}},
            "head_dim = 72: ": {"model": variant("head 72", head_dim=72, num_attention_heads=4), **kvferry},
            "query_heads = 256: with kv_heads = 1 a group has 256 heads": {
                "model": variant("group 256", num_attention_heads=256, num_key_value_heads=1), **kvferry},
            "block_size = 48: a block has a multiple of 32 tokens": {"block_size": 48, **kvferry},
            "block_tokens = 32: coarse heads score centroids of 64": {
                "additional_config": {"kvferry": {"head_mask": mask}}},
            "kv_cache_memory_bytes = 1073741824: the number of blocks follows from host_memory": {
                "kv_cache_memory_bytes": 1 << 30, **kvferry}}
        for method in ("draft_model", "eagle", "eagle3"):
            wanted["drafts by %s: take ngram" % method] = {**kvferry, "speculative_config": {
                "method": method, "model": variant(method), "num_speculative_tokens": 2}}
        wanted["drafts by mtp: take ngram"] = {**kvferry, "model": drafting_model(), "load_format": "dummy",
                                               "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
        bare = {"model": variant("bare"), "load_format": "safetensors"}
        engine = self.refused({text: {**bare, **one} for text, one in wanted.items()})
        self.assertNotIn("Loading weights took", engine.log)

    def test_engines_side_by_side(self):
        """The second one says that its memory must be set, also before it loads weights."""
        from kvferry import Invalid
        from kvferry.vllm import options, pool
        engine = types.SimpleNamespace(bytes_of_blocks=None, ranks_in_all=1, number=1)
        with self.assertRaisesRegex(Invalid, "host_memory must be set with data parallelism"):
            pool._try(engine, options.read({}, {}), None, None)

    def test_a_model_without_a_layer_for_it(self):
        """All layers see a window, and are left to vLLM; none has keys; nothing was asked to be kvferry's."""
        narrow, _ = narrow_model(32)
        windows = variant("windows", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64)
        self.refused({
            "models whose layers all have a sliding window: take another model": {"model": windows, "load_format": "dummy"},
            "no layer of this model is kvferry's: CPU_ATTN has some; leave CUSTOM out": {
                "model": windows, "load_format": "dummy", **PER_KIND},
            "no layer of this model is kvferry's: ": {"model": mamba_model(), "load_format": "dummy"},
            "layers with a window on a CPU whose values are narrower than keys: vLLM's own attention for them needs "
            "Triton; take another model": {"model": narrow, "load_format": "dummy"},
            "a CPU whose values are narrower": {"model": narrow, "load_format": "dummy", **PER_KIND},
            "no layer uses it: add --attention-backend CUSTOM": {"attention_backend": None, "load_format": "dummy"}})

    def test_no_advice_leads_to_another_refusal(self):
        """Where layers with a window are beside others that are refused, these are what is named."""
        text = "kv_sharing_fast_prefill: layers that share keys see every token of a prompt"
        asked = {"model": windowed_model(), "load_format": "dummy", "kv_sharing_fast_prefill": True}
        self.refused({text: asked, text[:-1]: {**asked, **PER_KIND}})

    def test_a_checkpoint_says_the_type_of_a_cache(self):
        """`auto` is that type then, and scales per head are no reason against the value that is named."""
        asked = [{"load_format": "dummy", "dtype": "bfloat16", "model": variant(strategy, quantization_config={
            "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "kv_cache_scheme": {
                "num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}})}
                 for strategy in ("tensor", "attn_head")]
        engine = self.ran(Engine([], refused=asked + [{**one, "kv_cache_dtype": "bfloat16"} for one in asked]))
        for told in engine.refused[:2]:
            self.assertIn("kv_cache_dtype = fp8: pages are in the type of the model; give --kv-cache-dtype bfloat16", told)
        self.assertEqual(engine.refused[2:], ["it starts"] * 2)


if __name__ == "__main__":
    main((SameTokens, PackedPages, NotFinite, Windows, Narrow, Linear, Budget, Runners, Replays, Folders, Calls, Taken, Defaults, Refusals))
