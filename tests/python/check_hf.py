# SPDX-License-Identifier: Apache-2.0
"""kvferry in Transformers: tokens of small random models of every family against those of SDPA.

With a budget for the whole context nothing may differ. Two tests need more: a real model in the folder
KVF_HF_MODEL, and the command KVF_COMMAND, whose tokens must be the same. `./dev python` has both.

usage: check_hf.py [TEST...]
"""
import collections
import copy
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
import warnings

try:
    import torch
    import transformers
except ImportError as error:
    print("skipped: %s; ./dev python makes an environment that has it" % error)
    sys.exit(77)

import kvferry.hf

transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")
torch.set_num_threads(1) # more of them wait for each other where others work, too

VOCABULARY = 160
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
         "max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4,
          "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
DENSE_MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
             "shared_expert_intermediate_size": 32, "mlp_only_layers": [0, 1, 2, 3]}
# family: configuration, model, fields, layers of full attention
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, 4),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}, 4),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}, 4),
    "qwen2 with windows": ("Qwen2Config", "Qwen2ForCausalLM", {
        "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}, 2),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}, 4),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**HYBRID, **DENSE_MOE}, 2),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", HYBRID, 2),
}
FULL = 2048
NEW = 24
EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "python",
                       "custom_generate", "generate.py")


def make(family="llama", seed=7, **fields):
    config, model, own, _ = FAMILIES[family]
    torch.manual_seed(seed)
    made = getattr(transformers, config)(**{**SMALL, **own, **fields})
    return getattr(transformers, model)(made).eval()


def prompt(*shape, seed=3):
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def generate(model, ids, cache=None, **settings):
    """Greedy, with SDPA where there is no cache of kvferry."""
    model.set_attn_implementation("kvferry" if isinstance(cache, kvferry.hf.Cache) else "sdpa")
    settings = dict({"max_new_tokens": NEW, "do_sample": False}, **settings)
    settings.setdefault("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        return model.generate(ids, past_key_values=cache, **settings)


def cache_of(model, budget=FULL, **settings):
    """With a budget of the whole context, or with budget=None the library's own budget."""
    model.set_attn_implementation("kvferry")
    return kvferry.hf.Cache(model, **({} if budget is None else {"budget": budget}), **settings)


def both(model, call, own="sdpa", **settings):
    """call(cache) with Transformers' attention of that name, and with kvferry."""
    told = []
    for name in (own, "kvferry"):
        cache = cache_of(model, **settings) if name == "kvferry" else transformers.DynamicCache(config=model.config)
        model.set_attn_implementation(name)
        with torch.no_grad():
            told.append(call(cache))
    return told


class Case(unittest.TestCase):
    def same(self, model, ids, **settings):
        """Tokens with kvferry are those of SDPA; returns the cache."""
        cache = cache_of(model)
        wanted = generate(model, ids, **settings)
        self.assertEqual(generate(model, ids, cache, **settings).tolist(), wanted.tolist())
        return cache


class Families(Case):
    def test_tokens_are_those_of_sdpa(self):
        for family, (_, _, _, layers) in FAMILIES.items():
            with self.subTest(family):
                model = make(family)
                cache = self.same(model, prompt(2, 150))
                self.assertEqual(cache.get_seq_length(), 150 + NEW - 1)
                self.assertEqual(cache.stats()["steps"], 2 * layers * (NEW - 1))

    def test_types(self):
        for dtype in (torch.bfloat16, torch.float16):
            self.same(make().to(dtype), prompt(1, 80))


class Use(Case):
    def setUp(self):
        self.model = make()

    def test_rows_of_different_lengths(self):
        ids, mask = prompt(3, 90), torch.ones(3, 90, dtype=torch.long)
        mask[0, :60], mask[1, :1] = 0, 0
        for settings in ({}, {"prefill_chunk_size": 32}):
            cache = self.same(self.model, ids, attention_mask=mask, **settings)
            self.assertEqual([len(row) for row in cache._rows], [30 + NEW - 1, 89 + NEW - 1,
                                                                 90 + NEW - 1])

    def test_without_a_cache_of_kvferry(self):
        wanted = generate(self.model, prompt(2, 60))
        self.model.set_attn_implementation("kvferry")
        for settings in ({}, {"prefill_chunk_size": 16}, {"use_cache": False}):
            got = self.model.generate(prompt(2, 60), max_new_tokens=NEW, do_sample=False, **settings)
            self.assertEqual(got.tolist(), wanted.tolist())

    def test_use_gives_every_generate_a_cache(self):
        ids = prompt(2, 70)
        wanted = generate(self.model, ids)
        self.assertIs(kvferry.hf.use(self.model, FULL, tokens_max=256), self.model)
        settings = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        config = copy.deepcopy(self.model.generation_config)
        config.cache_implementation = "static"
        for more in ({"cache_implementation": "static"}, {"generation_config": config}):
            told = self.model.generate(ids, **settings, **more, return_dict_in_generate=True)
            self.assertEqual(told.sequences.tolist(), wanted.tolist())
            self.assertIsInstance(told.past_key_values, transformers.StaticCache)
        self.model.generation_config.cache_implementation = "static"
        told = self.model.generate(ids, **settings, return_dict_in_generate=True)
        self.assertEqual(told.past_key_values.stats()["steps"], 2 * 4 * (NEW - 1))
        told.past_key_values.close()
        with self.assertRaisesRegex(kvferry.Invalid, "budget_tokens"):
            kvferry.hf.use(self.model, 0).generate(ids, **settings)
        del self.model.generate
        self.assertIs(self.model.generate.__func__, type(self.model).generate)

    def test_prompts_by_torch(self):
        """A first pass without padding is attended by SDPA, but for queries that are kept; all else is as ever."""
        ids, mask = prompt(2, 150), torch.ones(2, 150, dtype=torch.long)
        asked = []
        before = kvferry.Cache.prefill
        def prefill(cache, row, q, k, v, *rest, **named):
            asked.append((0 if q is None else len(q), len(k)))
            return before(cache, row, q, k, v, *rest, **named)
        kvferry.Cache.prefill = prefill
        self.addCleanup(setattr, kvferry.Cache, "prefill", before)
        padded = mask.clone()
        padded[0, :60] = 0
        for mask, chunk, own, wanted in ((mask, None, {}, [(0, 150)]), (mask, 100, {}, [(0, 100), (50, 50)]),
                                         (mask, None, {"observe_window": 16}, [(0, 134), (16, 16)]),
                                         (padded, None, {}, [(90, 90), (150, 150)])):
            asked.clear()
            settings = {"attention_mask": mask, **({"prefill_chunk_size": chunk} if chunk else {})}
            cache = cache_of(self.model, prompt_attention="library", **own)
            self.assertEqual(generate(self.model, ids, cache, **settings).tolist(),
                             generate(self.model, ids, **settings).tolist())
            self.assertEqual(sorted(set(asked)), wanted)
            self.assertEqual([len(row) for row in cache._rows], (mask.sum(1) + NEW - 1).tolist())
        with self.assertRaisesRegex(kvferry.Invalid, "prompt_attention = flash: must be own or library"):
            cache_of(self.model, prompt_attention="flash")

    def test_rows_by_flash_attention(self):
        """A function with the signature of FlashAttention's for rows gives the results of torch."""
        from kvferry._prompt_attention import attend_rows
        q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
        def varlen(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale, causal):
            self.assertEqual((max_seqlen_q, max_seqlen_k, causal), (5, 5, True))
            self.assertEqual((cu_seqlens_q.tolist(), cu_seqlens_k.dtype), ([0, 3, 8], torch.int32))
            made = torch.empty_like(q)
            for first, end in ((0, 3), (3, 8)):
                x, y, z = (t[first:end].transpose(0, 1) for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
                scores = (x @ y.transpose(1, 2) * softmax_scale).masked_fill(
                    torch.ones(end - first, end - first).triu(1).bool(), -torch.inf)
                made[first:end] = (scores.softmax(2) @ z).transpose(0, 1)
            return made
        begins, outs = torch.tensor([0, 3, 8], dtype=torch.int32), [torch.zeros(12, 4, 16) for _ in range(2)]
        for out, function in zip(outs, (varlen, None)):
            attend_rows(q, k, v, [2, 5, 10], begins, 0.3, out, function)
            self.assertFalse(out[:2].any() or out[10:].any())
        torch.testing.assert_close(*outs)

    def test_save_and_restore(self):
        ids, mask = prompt(2, 90), torch.ones(2, 90, dtype=torch.long)
        mask[0, :30] = 0
        for budget, rows in ((FULL, 1), (None, 1), (60, 2)):
            settings = {"local_tokens": 16} if budget == 60 else {}
            first = cache_of(self.model, budget, **settings)
            said = generate(self.model, ids[:rows], first, attention_mask=mask[:rows])
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "cache.kvs")
                first.save(path, "a model")
                further = torch.cat([said, prompt(rows, 20)], 1)
                ones = torch.cat([mask[:rows], torch.ones(rows, NEW + 20, dtype=torch.long)], 1)
                wanted = generate(self.model, further, first, attention_mask=ones)
                again = cache_of(self.model, budget, **settings)
                again.restore(path, "a model")
                self.assertEqual(again.get_seq_length(), 90 + NEW - 1)
                got = generate(self.model, further, again, attention_mask=ones)
                self.assertEqual(got.tolist(), wanted.tolist())
                other = cache_of(self.model, budget, **settings)
                other.restore(path, "another")
                with self.assertRaisesRegex(kvferry.Error, "another"):
                    generate(self.model, further, other, attention_mask=ones)
                with self.assertRaisesRegex(kvferry.Error, "restore into a new one"):
                    first.restore(path)
        with self.assertRaisesRegex(kvferry.Error, "nothing to save"):
            cache_of(self.model).save("nowhere")
        with self.assertRaisesRegex(kvferry.Error, "cannot be saved"):
            cache_of(make("qwen3-next")).save("nowhere")

    def test_turns_on_one_cache(self):
        def turns(cache):
            ids = prompt(1, 60)
            for turn in range(3):
                ids = generate(self.model, torch.cat([ids, prompt(1, 20, seed=turn)], 1), cache)
            return ids.tolist()

        self.assertEqual(*both(self.model, turns))

    def test_candidates_select(self):
        """With a small budget tokens are those of decoding without candidates, and few are attended."""
        ids = prompt(1, 45).repeat(1, 8)
        near = copy.deepcopy(self.model)
        with torch.no_grad():
            near.lm_head.weight += 0.02 * torch.randn_like(near.lm_head.weight)
        near.generation_config.num_assistant_tokens = 19
        near.generation_config.assistant_confidence_threshold = 0
        for settings in ({}, {"select": "quest", "page_size": 16}, {"tokens_per_step_max": 1}):
            cache = cache_of(self.model, budget=96, local_tokens=32, **settings)
            wanted = generate(self.model, ids, cache)
            single = cache.stats()
            for how in ({"prompt_lookup_num_tokens": 19}, {"assistant_model": near}):
                cache = cache_of(self.model, budget=96, local_tokens=32, **settings)
                passes = []
                hook = self.model.register_forward_pre_hook(
                    lambda module, args, kwargs: passes.append(kwargs["logits_to_keep"]), with_kwargs=True)
                told = generate(self.model, ids, cache, **how)
                hook.remove()
                self.assertEqual(told.tolist(), wanted.tolist(), (settings, how))
                self.assertGreater(max(passes), 16)
                self.assertLess(len(passes), NEW)
                stats = cache.stats()
                for told in (single, stats):
                    self.assertLessEqual(told["tokens_attended"] / told["steps"] / 2, 96)
                # Candidates of the first pass are steps, too.
                self.assertEqual(stats["steps"], 4 * (sum(passes) - 1))
        with_static = cache_of(self.model, budget=96, local_tokens=32, select="hybrid")
        generate(self.model, ids, with_static, prompt_lookup_num_tokens=4)
        self.assertGreater(with_static.stats()["static_tokens"], 0)

    def test_crop_takes_columns_back(self):
        mask = torch.ones(2, 90, dtype=torch.long)
        mask[0, 70:85] = 0
        cache = cache_of(self.model)
        with torch.no_grad():
            first = self.model(prompt(2, 80), attention_mask=mask[:, :80], past_key_values=cache)
            self.model(prompt(2, 10, seed=9), attention_mask=mask, past_key_values=cache)
            cache.crop(-15)
            self.assertEqual(cache.get_seq_length(), 75)
            self.assertEqual([len(row) for row in cache._rows], [70, 75])
            mask[0, 75:] = 1
            again = cache_of(self.model)
            logits = [self.model(prompt(2, 5, seed=5), attention_mask=mask[:, :80],
                                 past_key_values=cache).logits]
            self.model(prompt(2, 80)[:, :75], attention_mask=mask[:, :75], past_key_values=again)
            logits.append(self.model(prompt(2, 5, seed=5), attention_mask=mask[:, :80],
                                     past_key_values=again).logits)
        torch.testing.assert_close(*logits, rtol=0, atol=0)
        self.assertEqual(first.logits.shape[1], 80)
        cache.reset()
        self.assertEqual(cache.get_seq_length(), 0)
        self.assertEqual(generate(self.model, prompt(2, 50), cache).tolist(),
                         generate(self.model, prompt(2, 50)).tolist())

    def test_a_crop_that_is_refused_changes_nothing(self):
        cache = cache_of(self.model, prune="snapkv", prune_settings=dict(
            keep=0.5, window=16, retention="evict"))
        with torch.no_grad():
            self.model(prompt(1, 80), past_key_values=cache)
            with self.assertRaisesRegex(kvferry.Unsupported, "what a prune policy chose"):
                cache.crop(-5)
            self.assertEqual(cache.get_seq_length(), 80)
            self.model(prompt(1, 3, seed=9), past_key_values=cache)
            cache.crop(-3) # after the prompt
        self.assertEqual(cache.get_seq_length(), 80)
        self.assertEqual(cache._held, [80])

    def test_streamer(self):
        class Streamer:
            seen = []

            def put(self, value):
                self.seen += value.flatten().tolist()

            def end(self):
                self.seen.append(None)

        ids = generate(self.model, prompt(1, 40), cache_of(self.model), streamer=Streamer())
        self.assertEqual(Streamer.seen, ids[0].tolist() + [None])

    def test_compiled(self):
        wanted = generate(self.model, prompt(1, 60))
        cache = cache_of(self.model)
        self.model.forward = torch.compile(self.model.forward, backend="aot_eager", fullgraph=True)
        self.assertEqual(generate(self.model, prompt(1, 60), cache).tolist(), wanted.tolist())
        self.assertEqual(len(cache._rows[0]), 60 + NEW - 1)
        mask = torch.ones(2, 60, dtype=torch.long)
        mask[1, :20] = 0
        cache = cache_of(self.model)
        self.assertEqual(generate(self.model, prompt(2, 60), cache, attention_mask=mask).tolist(),
                         generate(make(), prompt(2, 60), attention_mask=mask).tolist())
        self.assertEqual(cache._gaps.sum(1).tolist(), [60 + NEW - 1, 40 + NEW - 1])

    def test_a_small_budget_selects(self):
        cache = cache_of(self.model, budget=128)
        generate(self.model, prompt(1, 600), cache)
        stats = cache.stats()
        attended = stats["tokens_attended"] / stats["steps"] / 2
        self.assertLessEqual(attended, 128)
        self.assertGreater(attended, 100)
        self.assertGreater(stats["host_kv_bytes"], 1024 * 4 * 2 * 2 * 32 * 4 - 1)

    def test_prune_policies(self):
        for policy in kvferry.hf.PRUNE_POLICIES:
            settings = {} if policy == "full" else {"prune_settings": {"keep": 0.25,
                                                                      "retention": "evict"}}
            if policy not in ("full", "streaming", "h2o"):
                settings["prune_settings"]["window"] = 16
            cache = cache_of(self.model, prune=policy, **settings)
            generate(self.model, prompt(2, 300), cache)
            held = len(cache._rows[0])
            self.assertEqual(held == 300 + NEW - 1, policy == "full", policy)
            self.assertGreater(cache.get_seq_length(), held - 1)

    def test_pruned_prompts_come_whole(self):
        ids, why = prompt(1, 300), "prefill_chunk_size = 64 would choose at the end of the first chunk"
        used = kvferry.hf.use(make(), prune="snapkv", prune_settings={"keep": 0.25, "window": 16})
        with torch.no_grad():
            wanted = used.generate(ids, max_new_tokens=2)
            config = copy.deepcopy(used.generation_config)
            config.prefill_chunk_size = 64
            for given in ({"prefill_chunk_size": 64}, {"generation_config": config}):
                with self.assertRaisesRegex(kvferry.Unsupported, why):
                    used.generate(ids, max_new_tokens=2, **given)
            self.assertEqual(used.generate(ids, max_new_tokens=2).tolist(), wanted.tolist())
        chunked = make()
        chunked.generation_config.prefill_chunk_size = 64
        with self.assertRaisesRegex(kvferry.Unsupported, why):
            cache_of(chunked, prune="snapkv")
        cache_of(chunked)


class Refusals(Case):
    def setUp(self):
        self.model = make()

    def test_what_does_not_fit_is_named(self):
        with self.assertRaisesRegex(kvferry.Invalid, "attn_implementation = sdpa"):
            self.model.set_attn_implementation("sdpa")
            kvferry.hf.Cache(self.model)
        with self.assertRaisesRegex(kvferry.Unsupported, "gemfilter hands fewer tokens"):
            cache_of(self.model, prune="gemfilter")
        with self.assertRaisesRegex(kvferry.Invalid, "tokens_to_remove = 5"):
            cache_of(self.model).crop(5)
        cache = cache_of(self.model)
        generate(self.model, prompt(1, 40), cache)
        with self.assertRaisesRegex(kvferry.Invalid, "2 rows came to a cache of 1"):
            generate(self.model, prompt(2, 80), cache)
        with self.assertRaisesRegex(kvferry.Full, "tokens_max = 50"):
            generate(self.model, prompt(1, 60), cache_of(self.model, tokens_max=50))


class BenchOnAGpu(unittest.TestCase):
    """Its cases run on the CPU, too, whose times say nothing."""

    def run_it(self, *words):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench",
                              "python", "bench_gpu.py")
        return subprocess.run([sys.executable, script, *words], capture_output=True, text=True)

    def test_every_case_is_measured(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "figures")
            done = self.run_it("--device", "cpu", "--small", "--json", path)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            with open(path) as figures:
                rows = json.load(figures)["results"]
        self.assertEqual([row for row in rows if "us" not in row], [])
        counts = collections.Counter(row["what"] for row in rows)
        self.assertEqual(counts, {"kvferry": 4, "SDPA": 4, "SDPA, own choice": 4,
                                  "SDPA, heads repeated": 2, "offloaded DynamicCache": 4,
                                  "kvferry prefill": 2, "SDPA prefill": 2})
        for row in rows:
            self.assertGreater(row["us"], 0)
            self.assertGreater(row["floor_us"], 0)
            self.assertLessEqual(row["p10_us"], row["p90_us"])
        self.assertTrue(all(row["error_max"] > 0 for row in rows if row["what"] == "kvferry prefill"))

    @unittest.skipIf(torch.cuda.is_available(), "there is a GPU")
    def test_no_gpu(self):
        done = self.run_it()
        self.assertEqual((done.returncode, done.stdout), (77, ""))
        self.assertIn("torch sees no GPU", done.stderr)


@unittest.skipUnless(os.environ.get("KVF_HF_MODEL") and os.environ.get("KVF_COMMAND"),
                     "needs a model and the command: KVF_HF_MODEL, KVF_COMMAND")
class RealModel(Case):
    """SmolLM2-135M-Instruct, as Transformers reads it and as the command does."""

    def setUp(self):
        self.path = os.environ["KVF_HF_MODEL"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.path,
                                                                       dtype=torch.float32)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.path)
        with io.open(os.path.join(os.path.dirname(__file__), "..", "..", "ARCHITECTURE.md")) as text:
            self.text = text.read()

    def test_full_budget(self):
        ids = self.tokenizer(self.text, return_tensors="pt").input_ids[:, :1500]
        self.same(self.model, ids, max_new_tokens=40)

    def test_use_in_a_pipeline(self):
        told = []
        for ours in (False, True):
            if ours:
                kvferry.hf.use(self.model, FULL, tokens_max=512)
            pipe = transformers.pipeline("text-generation", model=self.model,
                                         tokenizer=self.tokenizer)
            told.append(pipe([{"role": "user", "content": "What is the capital of France?"}],
                             max_new_tokens=16, do_sample=False)[0]["generated_text"])
        self.assertEqual(told[0], told[1])
        self.assertIn("Paris", told[1][-1]["content"])

    def folder_that_generates(self, folder, **settings):
        """The model's folder beside the example's custom_generate/generate.py, with more settings."""
        for name in os.listdir(self.path):
            os.symlink(os.path.join(self.path, name), os.path.join(folder, name))
        os.mkdir(os.path.join(folder, "custom_generate"))
        with open(EXAMPLE, encoding="utf-8") as text, \
                open(os.path.join(folder, "custom_generate", "generate.py"), "w") as out:
            more = "".join(", %s=%r" % setting for setting in settings.items())
            out.write(text.read().replace("budget=1024", "budget=1024" + more))
        return folder

    def test_transformers_serve(self):
        """The server as it is: chat, a stream, and a refusal that only a cache of kvferry has."""
        if not transformers.utils.import_utils.is_serve_available():
            self.skipTest("needs fastapi, uvicorn, pydantic and openai")
        with tempfile.TemporaryDirectory() as folder, socket.socket() as s:
            self.folder_that_generates(folder, tokens_max=256)
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
            s.close()
            server = subprocess.Popen(
                [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--host",
                 "127.0.0.1", "--port", str(port), "--trust-remote-code"],
                env=dict(os.environ, HF_MODULES_CACHE=os.path.join(folder, "modules")),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                import openai
                self.ask(openai.OpenAI(base_url="http://127.0.0.1:%d/v1" % port, api_key="none",
                                       timeout=600, max_retries=120), server, folder)
            finally:
                server.terminate()
                server.wait()

    def ask(self, client, server, model):
        import openai
        def chat(text, **fields):
            self.assertIsNone(server.poll(), "the server ended")
            return client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": text}], max_tokens=12,
                temperature=0, **fields)
        question = "What is the capital of France?"
        told = chat(question).choices[0].message.content
        self.assertIn("Paris", told)
        parts = [part.choices[0].delta.content or "" for part in chat(question, stream=True)]
        self.assertGreater(len(parts), 3)
        self.assertEqual("".join(parts), told)
        with self.assertRaises(openai.APIError) as refused:
            list(chat("One and one make two. " * 80, stream=True))
        self.assertIn("tokens_max = 256: the sequence holds 0 tokens", str(refused.exception.body))
        self.assertEqual(chat(question).choices[0].message.content, told)

    def test_pipeline_of_a_folder_that_generates(self):
        with tempfile.TemporaryDirectory() as folder:
            pipe = transformers.pipeline("text-generation", model=self.folder_that_generates(folder),
                                         trust_remote_code=True)
            self.assertEqual(pipe.model.config._attn_implementation, "sdpa")
            told = pipe([{"role": "user", "content": "What is the capital of France?"}],
                        max_new_tokens=12, do_sample=False)
            self.assertEqual(pipe.model.config._attn_implementation, "kvferry")
        self.assertIn("Paris", told[0]["generated_text"][-1]["content"])

    def test_default_budget_is_the_command_s(self):
        ids = self.tokenizer(self.text, return_tensors="pt").input_ids[:, :2000]
        got = generate(self.model, ids, cache_of(self.model, budget=None), max_new_tokens=40,
                       eos_token_id=None)
        with tempfile.TemporaryDirectory() as folder:
            given, told = os.path.join(folder, "prompt"), os.path.join(folder, "told")
            with open(given, "w") as out:
                out.write(" ".join(map(str, ids[0].tolist())))
            subprocess.run([os.environ["KVF_COMMAND"], "run", "--model", self.path, "--token-ids",
                            given, "--tokens", "40", "--ignore-eos", "--emit-ids", told],
                           capture_output=True, check=True)
            with open(told) as ids_told:
                wanted = [int(line) for line in ids_told]
        self.assertEqual(got[0, ids.shape[1]:].tolist(), wanted)


def main(name):
    unittest.main("__main__", argv=[name] + sys.argv[1:])


if __name__ == "__main__":
    main("check_hf")
