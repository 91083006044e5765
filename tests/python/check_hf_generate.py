# SPDX-License-Identifier: Apache-2.0
"""kvferry in Transformers: a cache that was asked for is used, or somebody says why not; settings are given once,
and refused where the cache is made.

usage: check_hf_generate.py [TEST...]
"""
import unittest
import warnings

import check_hf  # ends here where there is no torch
import torch
import transformers
from check_hf import SMALL, cache_of, make, prompt
from check_hf_guard import peaky, steps
from tiny_models import fill

import kvferry.hf

LONG = {"original_max_position_embeddings": 96, "sliding_window": None, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16,
                            "long_factor": [2.0] * 16, "original_max_position_embeddings": 96}}
FIELDS = {name: value for name, value in SMALL.items() if name != "head_dim"}
FIELDS.update(hidden_size=128)


class LongRope(unittest.TestCase):
    """Past a length all keys turn by other factors: the text is read again, into the same cache. Wanted is what
    passes over the whole text say: with a cache of its own Transformers 5.16 reads the newest token alone there."""

    def models(self):
        yield peaky("Phi3ForCausalLM", "Phi3Config", **{**FIELDS, **LONG})
        yield peaky("PhimoeForCausalLM", "PhimoeConfig", **{
            **FIELDS, **LONG, "num_local_experts": 2, "num_experts_per_tok": 1,
            "rope_parameters": {**LONG["rope_parameters"], "short_mscale": 1.0, "long_mscale": 1.1}})

    def test_prompts_and_answers_past_it(self):
        for model in self.models():
            for tokens in (60, 92, 96, 97, 200):
                with self.subTest(type(model).__name__, tokens=tokens):
                    model.set_attn_implementation("eager")
                    wanted = steps(model, prompt(1, tokens), new=12, use_cache=False)
                    model.set_attn_implementation("kvferry")
                    cache = cache_of(model, tokens_max=512)
                    got = steps(model, prompt(1, tokens), cache, new=12)
                    self.assertEqual(got[0].tolist(), wanted[0].tolist())
                    self.assertLess(float((got[1] - wanted[1]).abs().max() / wanted[1].std()), 1e-3)
                    self.assertEqual(cache.get_seq_length(), tokens + 11)
                    self.assertGreater(cache.stats()["steps"], 0)

    def test_use_selects_past_it(self):
        model = next(self.models())
        kvferry.hf.use(model, 64, tokens_max=512, local_tokens=16)
        with torch.no_grad():
            told = model.generate(prompt(1, 200), max_new_tokens=12, min_new_tokens=12, do_sample=False,
                                  return_dict_in_generate=True)
        stats = (getattr(told, "cache", None) or told.past_key_values).stats()
        self.assertEqual(stats["steps"], 4 * 11)
        self.assertLessEqual(stats["tokens_attended"] / stats["steps"] / 2, 64)

    def answers(self, model, own, rows, **settings):
        model.set_attn_implementation("kvferry")
        cache = {"past_key_values": cache_of(model, tokens_max=512)} if own == "kvferry" else {}
        model.set_attn_implementation(own)
        settings = {"attention_mask": torch.ones_like(rows), **settings}
        return model.generate(rows, max_new_tokens=12, do_sample=False, **cache, **settings).tolist()

    def test_rows_and_beams(self):
        model, rows = next(self.models()), prompt(2, 92)
        mask = torch.ones_like(rows)
        mask[0, :20] = 0
        for how in ({"attention_mask": mask}, {"num_beams": 3}):
            self.assertEqual(self.answers(model, "sdpa", rows, use_cache=False, **how),
                             self.answers(model, "kvferry", rows, **how), how)

    def test_candidates(self):
        """Which tokens turn by which factors depends on candidates, so wanted is what Transformers says to them."""
        model, rows = next(self.models()), prompt(1, 23).repeat(1, 4)
        if self.answers(model, "sdpa", rows) != self.answers(model, "sdpa", rows, use_cache=False):
            self.skipTest("Transformers %s reads the newest token alone" % transformers.__version__)
        self.assertEqual(self.answers(model, "sdpa", rows, prompt_lookup_num_tokens=4),
                         self.answers(model, "kvferry", rows, prompt_lookup_num_tokens=4))

    def test_what_cannot_be_read_again_is_refused(self):
        """Tokens of an earlier turn that are not handed over again."""
        model = next(self.models())
        cache = cache_of(model, tokens_max=512)
        model.generate(prompt(1, 60), past_key_values=cache, max_new_tokens=2, do_sample=False)
        held, mask = cache.get_seq_length(), torch.ones(1, 61 + 110, dtype=torch.long)
        with self.assertRaisesRegex(kvferry.Unsupported, "Phi3ForCausalLM drops the Cache.* holds 61 tokens.* and 110 tokens of it are"):
            model.generate(prompt(1, 110), attention_mask=mask, past_key_values=cache, max_new_tokens=2)
        self.assertEqual(cache.get_seq_length(), held)


class PassedOver(unittest.TestCase):
    def setUp(self):
        self.model = fill(make())

    def test_a_generate_of_somebody_s_own(self):
        def own(model, input_ids, **kwargs):
            return model(input_ids, use_cache=False).logits[:, -1:].argmax(-1)
        for give in (lambda: {"past_key_values": cache_of(self.model)},
                     lambda: kvferry.hf.use(self.model, tokens_max=256) and {}):
            given = give()
            with warnings.catch_warnings(record=True) as told: # assertWarns imports all that Transformers could
                warnings.simplefilter("always")
                self.model.generate(prompt(1, 40), custom_generate=own, max_new_tokens=2, **given)
            self.assertRegex("\n".join(str(each.message) for each in told if each.category is RuntimeWarning),
                             "LlamaForCausalLM.generate passed over the Cache that it was given.*custom_generate = "
                             ".* has passes of its own")

    def test_a_cache_that_is_used_is_no_news(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            self.model.generate(prompt(1, 40), past_key_values=cache_of(self.model), max_new_tokens=2)

    def test_a_model_that_hands_out_another_cache(self):
        def other(module, args, kwargs, result):
            result["cache" if "cache" in result else "past_key_values"] = transformers.DynamicCache()
            return result
        self.model.set_attn_implementation("kvferry")
        cache = cache_of(self.model)
        self.model.model.register_forward_hook(other, with_kwargs=True, prepend=True)
        with self.assertRaisesRegex(kvferry.Unsupported, "LlamaModel hands out a DynamicCache"):
            self.model.generate(prompt(1, 40), past_key_values=cache, max_new_tokens=2)

    def test_continuous_batching(self):
        kvferry.hf.use(self.model, tokens_max=256)
        with self.assertRaisesRegex(kvferry.Unsupported, "continuous batching .* call generate"):
            self.model.generate_batch([[5, 6, 7]])

    def test_keys_outside_a_pass(self):
        """Nobody would attend to them, and the next pass would drop them."""
        cache = cache_of(self.model)
        keys = torch.ones(1, 2, 5, 32)
        for update in (lambda: cache.update(keys, keys, 0), lambda: cache.layers[0].update(keys, keys)):
            with self.assertRaisesRegex(kvferry.Unsupported, "layer 0: keys come outside a forward pass"):
                update()
        wanted = steps(self.model, prompt(1, 40), cache_of(self.model))
        self.assertEqual(steps(self.model, prompt(1, 40), cache)[0].tolist(), wanted[0].tolist())
        class Taker(torch.nn.Module): # nobody knows of its passes
            def forward(self, cache):
                cache.update(keys, keys, 0)
        other = cache_of(self.model)
        Taker()(other)
        for use in (lambda: steps(self.model, prompt(1, 40), other), lambda: other.crop(-1)):
            with self.assertRaisesRegex(kvferry.Unsupported, "layer 0: keys come outside .*; call reset"):
                use()
        other.reset()
        self.assertEqual(steps(self.model, prompt(1, 40), other)[0].tolist(), wanted[0].tolist())
        with self.assertRaisesRegex(kvferry.Unsupported, "layer 0: keys come outside a forward pass"):
            cache.update(keys, keys, 0)


class Settings(unittest.TestCase):
    def setUp(self):
        self.model = fill(make())

    def test_a_setting_counts_once(self):
        for settings in ({"budget": 96}, {"budget_tokens": 96}):
            cache = kvferry.hf.Cache(self.named(), tokens_max=512, local_tokens=32, **settings)
            steps(self.model, prompt(1, 300), cache)
            self.assertLessEqual(cache.stats()["tokens_attended"] / cache.stats()["steps"] / 2, 96)
            self.assertEqual(cache._cache.settings.budget_tokens, 96)
        cache = cache_of(self.model, budget=None, tokens_max=2048)
        steps(self.model, prompt(1, 40), cache)
        self.assertEqual(cache._cache.settings.budget_tokens, 1024)
        for call in (kvferry.hf.Cache, kvferry.hf.use):
            for budget in (96, 128):
                with self.assertRaisesRegex(kvferry.Invalid, "budget = %d and budget_tokens = 128 are one" % budget):
                    call(self.named(), budget, budget_tokens=128)

    def named(self):
        self.model.set_attn_implementation("kvferry")
        return self.model

    def test_what_follows_from_the_model(self):
        for name, value in (("layers", 3), ("query_heads", 4), ("kv_heads", 1), ("head_dim", 64), ("value_dim", 32),
                            ("dtype", "fp16"), ("softmax_scale", 0.5)):
            with self.assertRaisesRegex(kvferry.Invalid, "%s = .*: it follows from the model" % name):
                kvferry.hf.Cache(self.named(), **{name: value})

    def test_what_the_first_pass_would_refuse(self):
        """Is refused where the cache is made."""
        for call in (kvferry.hf.Cache, kvferry.hf.use):
            for dim in (72, 100):
                model = make(head_dim=dim)
                model.set_attn_implementation("kvferry")
                with self.assertRaisesRegex(kvferry.Invalid, "head_dim = %d: must be a multiple of 16" % dim):
                    call(model)
            for settings, text in (({"page_sizes": 16}, "no setting page_sizes: did you mean page_size"),
                                   ({"budget": 0}, "budget_tokens = 0"), ({"page_size": 17}, "page_size = 17"),
                                   ({"select": "nobody"}, "select = nobody"), ({"sink_tokens": 5000}, "sink_tokens")):
                with self.assertRaisesRegex(kvferry.Invalid, text):
                    call(self.named(), **settings)
        odd = peaky("GPT2LMHeadModel", "GPT2Config", n_embd=144, n_head=2, n_layer=2, vocab_size=160, n_positions=512)
        with self.assertRaisesRegex(kvferry.Invalid, "head_dim = 72: must be a multiple of 16"):
            kvferry.hf.Cache(odd)


if __name__ == "__main__":
    check_hf.main("check_hf_generate")
