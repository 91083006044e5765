# SPDX-License-Identifier: Apache-2.0
"""kvferry in Transformers: no model answers wrongly without a word. A call that cannot be right is refused by
name before a logit leaves, and what can be is compared with the model's own attention.

Random weights are larger than usual here, so that attention shows in the logits.

usage: check_hf_guard.py [TEST...]
"""
import copy
import os
import pickle
import tempfile
import threading
import unittest

import check_hf # ends here where there is no torch
import torch
import transformers
from check_hf import SMALL, VOCABULARY, both, cache_of, generate, make, prompt
from tiny_models import fill

import kvferry.hf

DENSE = {k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads")}
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
       "topk_group": 1}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
          "qk_rope_head_dim": 16, "v_head_dim": 32}
JETMOE = {**DENSE, "kv_channels": 16, "num_key_value_heads": 2, "num_local_experts": 2,
          "num_experts_per_tok": 2}
REBUILT = "what the cache hands out goes into"
NO_INTERFACE = "does not attend through the attention interface"


def peaky(model, config, seed=5, **fields):
    """A model by name, whose weights make attention matter."""
    made = getattr(transformers, config)(**fields)
    made._attn_implementation = "kvferry"
    torch.manual_seed(0)
    return fill(getattr(transformers, model)(made).eval(), seed)


def steps(model, ids, cache=None, new=8, **more):
    """Tokens and logits of a greedy answer."""
    told = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                          min_new_tokens=new, do_sample=False, return_dict_in_generate=True,
                          output_logits=True, past_key_values=cache, **more)
    return told.sequences, torch.stack(told.logits)


class Case(unittest.TestCase):
    def equal(self, model, ids=None, own="eager", **more):
        """Tokens and logits with pages are those of the model's own attention."""
        ids = prompt(1, 80) if ids is None else ids
        model.set_attn_implementation(own)
        wanted = steps(model, ids, **more)
        cache = cache_of(model, tokens_max=512)
        got = steps(model, ids, cache, **more)
        self.assertEqual(got[0].tolist(), wanted[0].tolist())
        self.assertLess(float((got[1] - wanted[1]).abs().max() / wanted[1].std()), 1e-3)
        return cache

    def refused(self, text, call, *arguments, error=kvferry.Unsupported, **more):
        with self.assertRaisesRegex(error, text):
            call(*arguments, **more)


class Models(Case):
    def test_refused_in_the_first_pass(self):
        """Rebuilt keys, keys attended twice."""
        for name, fields, why in (
                ("JetMoe", JETMOE, REBUILT),
                ("DiffLlama", SMALL, REBUILT),
                ("Doge", DENSE, REBUILT)):
            with self.subTest(name):
                model = peaky(name + "ForCausalLM", name + "Config", **fields)
                self.refused("%sForCausalLM, layer [01]: .*%s" % (name, why), steps, model, prompt(1, 40),
                             cache_of(model, tokens_max=256))

    def test_refused_before_the_first_pass(self):
        """Refusals by the class or the configuration."""
        for model, config, fields, why in (
                ("MptForCausalLM", "MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 2,
                                                 "vocab_size": VOCABULARY}, NO_INTERFACE),
                ("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", DENSE, NO_INTERFACE),
                ("BloomForCausalLM", "BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4,
                                                     "vocab_size": VOCABULARY}, NO_INTERFACE),
                ("MiniMaxForCausalLM", "MiniMaxConfig", {
                    **SMALL, "num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"] * 2},
                 "keeps a cache of its own kind"),
                ("FalconH1ForCausalLM", "FalconH1Config", {
                    **SMALL, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
                    "mamba_n_groups": 1}, "but LinearAttentionAndFullAttentionLayer"),
                ("MambaForCausalLM", "MambaConfig", {"hidden_size": 64, "num_hidden_layers": 2,
                                                     "vocab_size": VOCABULARY}, "no layer of full att")):
            with self.subTest(model):
                made = peaky(model, config, **fields)
                self.refused("%s.*%s" % (model, why), kvferry.hf.Cache, made)
                self.refused("%s.*%s" % (model, why), kvferry.hf.use, made)
        compiled = torch.compile(make())
        self.refused("OptimizedModule has no generate; .*before torch.compile", kvferry.hf.use, compiled)
        wide = make(head_dim=1024)
        self.refused("head_dim = 1024: must be .* to 512", cache_of, wide, error=kvferry.Invalid)

    def test_refused_when_compiled(self):
        """There keys are rebuilt without a sign, but the layer has not attended when the pass ends."""
        for whole in (False, True): # of the module, what watches its passes included
            torch._dynamo.reset()
            model = peaky("JetMoeForCausalLM", "JetMoeConfig", **JETMOE)
            if whole:
                model.compile(backend="aot_eager")
            else:
                model.forward = torch.compile(model.forward, backend="aot_eager")
            with torch.no_grad():
                self.refused("JetMoeForCausalLM, layer 0: it did not attend to pages", model,
                             prompt(1, 40), past_key_values=cache_of(model, tokens_max=256))

    def with_params(self, **more):
        """Models whose layers have sinks or a soft cap that bends their scores."""
        for name, fields in (("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 2}),
                             ("Gemma2", {"attn_logit_softcapping": 2.0}),
                             ("VaultGemma", {"attn_logit_softcapping": 2.0})):
            yield peaky(name + "ForCausalLM", name + "Config", **{**SMALL, **WINDOWS, **fields, **more})

    def test_sinks_and_soft_caps(self):
        """In layers of full attention; those with a window stay with Transformers. Padding has them, too."""
        for model in self.with_params():
            with self.subTest(type(model).__name__):
                self.equal(model)
                small = cache_of(model, budget=128, tokens_max=512)
                self.assertTrue(bool(torch.isfinite(steps(model, prompt(1, 200), small)[1]).all()))
                mask = torch.ones(2, 60, dtype=torch.long)
                mask[0, 40:], mask[1, :20] = 0, 0
                with torch.no_grad():
                    got = model(prompt(2, 60), attention_mask=mask, past_key_values=cache_of(model)).logits
                    model.set_attn_implementation("eager")
                    wanted = model(prompt(2, 60), attention_mask=mask).logits
                    of_padding = torch.stack([got[0, 40:], wanted[0, 40:]])
                torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(*of_padding, rtol=1e-4, atol=1e-4)

    def test_attention_params_are_saved(self):
        """Copies into memory of their own and files go on; another model's layers do not take them."""
        full = ["full_attention"] * 4
        for model, changed in zip(self.with_params(layer_types=full), ("sinks", "soft_cap", "soft_cap")):
            with self.subTest(type(model).__name__), tempfile.TemporaryDirectory() as folder:
                ids, further = prompt(1, 50), prompt(1, 9, seed=8)
                first, again, other = (cache_of(model, tokens_max=256) for _ in range(3))
                with torch.no_grad():
                    model(ids, past_key_values=first)
                    first.save(os.path.join(folder, "cache"))
                    again.restore(os.path.join(folder, "cache"))
                    other.restore(os.path.join(folder, "cache"))
                    moved = copy.copy(first)
                    logits = [model(further, past_key_values=cache).logits for cache in (first, moved, again)]
                    self.assertTrue(torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2]))
                    for layer in model.model.layers:
                        if changed == "sinks":
                            layer.self_attn.sinks += 1
                        else:
                            layer.self_attn.attn_logit_softcapping = 3.0
                    self.refused("layer = 0: a sequence has 50 tokens in it under other attention parameters", model,
                                 further, past_key_values=other, error=kvferry.Invalid)

    def test_a_scale_per_layer(self):
        self.equal(peaky("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_head=4, n_layer=4, n_positions=512,
                         vocab_size=VOCABULARY, scale_attn_by_inverse_layer_idx=True, eos_token_id=None))

    def test_sinks_in_layers_with_a_window(self):
        self.equal(peaky("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", **{
            **SMALL, **MOE, **WINDOWS, "v_head_dim": 32,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 3}))

    def test_values_narrower_than_keys(self):
        self.values(peaky("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", **{
            **SMALL, **MOE, **WINDOWS, "head_dim": 64, "v_head_dim": 32,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 3}), (64, 32))

    def values(self, model, widths):
        settings = self.equal(model)._cache.settings
        self.assertEqual((settings.head_dim, settings.value_dim), widths)

    def test_latent_keys(self):
        """MLA: pages have what it attends to. Values of any width: 48 - 32 is no multiple of 32."""
        latent = {**DENSE, **LATENT, **MOE, "n_shared_experts": 1, "first_k_dense_replace": 1}
        for name, fields, widths in (
                ("DeepseekV3", {}, (48, 48)), ("DeepseekV3", {"v_head_dim": 16}, (48, 16)),
                ("DeepseekV2", {"v_head_dim": 16, "topk_method": "greedy"}, (48, 16)),
                ("Glm4MoeLite", {"v_head_dim": 16}, (48, 16))):
            with self.subTest(name, **fields):
                self.values(peaky(name + "ForCausalLM", name + "Config", **{**latent, **fields}), widths)

    def latent(self):
        return peaky("DeepseekV3ForCausalLM", "DeepseekV3Config", **{
            **DENSE, **LATENT, **MOE, "n_shared_experts": 1, "first_k_dense_replace": 1, "v_head_dim": 16})

    def test_latent_keys_of_batches_and_turns(self):
        model, ids = self.latent(), prompt(3, 60)
        for side in ("left", "right"):
            mask = torch.ones_like(ids)
            mask[1, :17 if side == "left" else 0] = 0
            mask[2, 41 if side == "right" else 60:] = 0
            further = torch.cat([mask, torch.ones(3, 12, dtype=mask.dtype)], 1)

            def logits(cache):
                first = model(ids, attention_mask=mask, past_key_values=cache).logits
                then = model(prompt(3, 12, seed=3), attention_mask=further, past_key_values=cache).logits
                return torch.cat([first[mask.bool()], then.flatten(0, 1)])

            wanted, got = both(model, logits, "eager", tokens_max=512)
            self.assertLess(float((got - wanted).abs().max() / wanted.std()), 1e-3, side)

    def test_latent_keys_compiled(self):
        torch._dynamo.reset()
        model, ids = self.latent(), prompt(1, 40)
        wanted = steps(model, ids, cache_of(model, tokens_max=256))
        model.forward = torch.compile(model.forward, backend="aot_eager")
        got = steps(model, ids, cache_of(model, tokens_max=256))
        self.assertEqual(got[0].tolist(), wanted[0].tolist())
        self.assertLess(float((got[1] - wanted[1]).abs().max() / wanted[1].std()), 1e-3)

    def test_latent_keys_expanded_with_others(self):
        model = self.latent()
        layer = model.model.layers[0].self_attn
        own = layer.expand_kv
        layer.expand_kv = lambda latent, rotary: own(latent, rotary.clone())
        self.refused("what the cache hands out goes into clone", steps, model, prompt(1, 20), cache_of(model))
        layer.expand_kv = lambda latent, rotary: own(latent, torch.zeros(1, 1, 20, 16))
        self.refused("expanded twice in a pass, or with others", steps, model, prompt(1, 20), cache_of(model))

    def test_token_types_of_text(self):
        model = peaky("Gemma3ForConditionalGeneration", "Gemma3Config", text_config={**SMALL, **WINDOWS},
                      vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                                     "num_attention_heads": 2, "image_size": 28, "patch_size": 7},
                      mm_tokens_per_image=4, boi_token_index=150, eoi_token_index=151, image_token_id=149)
        ids = prompt(1, 40)
        self.equal(model, ids, own="sdpa", token_type_ids=torch.zeros_like(ids))
        types = torch.zeros_like(ids)
        types[0, 5:9] = 1 # an image, whose tokens see each other
        with torch.no_grad():
            self.refused("the mask is not causal", model.model.language_model, inputs_embeds=torch.ones(
                1, 40, 64), attention_mask=self.seen_by_each_other(40, 5, 9),
                past_key_values=cache_of(model))

    def seen_by_each_other(self, columns, first, end):
        mask = torch.ones(columns, columns, dtype=torch.bool).tril()
        mask[first:end, first:end] = True
        return {"full_attention": mask[None, None], "sliding_attention": mask[None, None]}


class EncoderDecoders(Case):
    """Layers of the decoder attend to pages; keys of the encoder stay where they are."""

    def made(self, name, **fields):
        return peaky(name + "ForConditionalGeneration", name + "Config", **{
            "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
            "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 2, **fields})

    def test_bart_and_whisper(self):
        for model, inputs in (
                (self.made("Bart", max_position_embeddings=256), prompt(2, 50)),
                (self.made("Whisper", num_mel_bins=8, max_source_positions=40, max_target_positions=128,
                           suppress_tokens=None, begin_suppress_tokens=None),
                 torch.randn(2, 8, 80, generator=torch.Generator().manual_seed(1)))):
            how = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
            for beams in (1, 3):
                model.set_attn_implementation("eager")
                wanted = model.generate(inputs, num_beams=beams, **how).tolist()
                cache = cache_of(model, tokens_max=256)
                both = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
                got = model.generate(inputs, num_beams=beams, past_key_values=both, **how).tolist()
                self.assertEqual(got, wanted)
                self.assertGreater(cache.stats()["steps"], 2 * 2 * beams * 30)
            self.refused("also has keys of its encoder; pass EncoderDecoderCache", model.generate, inputs,
                         past_key_values=cache_of(model, tokens_max=256), **how)
            self.assertEqual(kvferry.hf.use(model, tokens_max=256).generate(
                inputs, num_beams=3, **how).tolist(), wanted)

    def test_biases_and_keys_that_are_read(self):
        t5 = peaky("T5ForConditionalGeneration", "T5Config", d_model=64, d_kv=16, d_ff=96, num_layers=2,
                   num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0)
        both = transformers.EncoderDecoderCache(cache_of(t5, tokens_max=256), transformers.DynamicCache())
        self.refused("T5.*, layer 0: its attention is handed a bias of positions", t5.generate, prompt(1, 40),
                     past_key_values=both)
        cache = cache_of(make())
        for use in (lambda: cache.layers[1].keys[0], lambda: list(cache)[0],
                    lambda: setattr(cache.layers[1], "values", torch.ones(1))):
            self.refused("LlamaForCausalLM, layer [01]: somebody reads or sets the keys", use)

    def test_an_assistant_of_an_encoder_decoder(self):
        model, assistant = self.made("Bart", max_position_embeddings=256), self.made(
            "Bart", max_position_embeddings=256, decoder_layers=1)
        how = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
        wanted = model.generate(prompt(1, 50), **how).tolist()
        kvferry.hf.use(model, 256, tokens_max=256)
        self.assertEqual(model.generate(prompt(1, 50), assistant_model=assistant, **how).tolist(), wanted)


class WithoutOurCache(Case):
    """The name alone answers as Transformers does."""

    def test_static_cache(self):
        model = fill(make())
        for own in ("sdpa", "kvferry"):
            model.set_attn_implementation(own)
            got = steps(model, prompt(2, 60), cache_implementation="static", disable_compile=True)
            wanted = got if own == "sdpa" else wanted
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-4)

    def test_sinks_and_capped_scores(self):
        for name, fields in (("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 2}), ("Gemma2", {})):
            model = peaky(name + "ForCausalLM", name + "Config", **{**SMALL, **WINDOWS, **fields})
            mask = torch.ones(2, 60, dtype=torch.long)
            mask[0, :20] = 0
            with torch.no_grad():
                got = model(prompt(2, 60), attention_mask=mask).logits
                model.set_attn_implementation("eager")
                wanted = model(prompt(2, 60), attention_mask=mask).logits
            torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)


class Passes(Case):
    def setUp(self):
        self.model = fill(make())

    def test_attention_that_was_switched(self):
        cache = cache_of(self.model)
        self.model.set_attn_implementation("sdpa")
        self.refused("attn_implementation = sdpa", steps, self.model, prompt(1, 40), cache,
                     error=kvferry.Invalid)
        self.model.set_attn_implementation("kvferry")
        other = fill(make())
        for own in ("sdpa", "eager"): # of a model that has never seen a Cache
            other.set_attn_implementation(own)
            self.refused("LlamaForCausalLM, layer 0: .*" + REBUILT, steps, other, prompt(1, 40),
                         cache_of(self.model))

    def test_a_compiled_model(self):
        """Its passes are watched as others are: candidates, one that is interrupted, a switch."""
        ids = prompt(1, 40).repeat(1, 6)
        how = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 30}
        wanted = generate(self.model, ids, cache_of(self.model, 128), **how).tolist()
        torch._dynamo.reset()
        self.model.compile(backend="aot_eager", dynamic=True)
        self.assertEqual(generate(self.model, ids, cache_of(self.model, 128), **how).tolist(), wanted)
        cache, again = cache_of(self.model), cache_of(self.model)
        compiled = torch.compile(self.model, backend="aot_eager", dynamic=True)
        with torch.no_grad():
            for each in (cache, again):
                compiled(ids, past_key_values=each)
            prefill, layers = cache._cache.prefill, []

            def stops(*arguments, layer):
                layers.append(layer)
                if layer == 2:
                    raise KeyboardInterrupt
                return prefill(*arguments, layer=layer)
            cache._cache.prefill = stops
            with self.assertRaises(KeyboardInterrupt):
                compiled(prompt(1, 10, seed=4), past_key_values=cache)
            self.assertEqual(layers, [0, 1, 2])
            del cache._cache.prefill
            logits = [compiled(prompt(1, 10, seed=9), past_key_values=each).logits for each in (cache, again)]
            torch.testing.assert_close(*logits, rtol=0, atol=0)
            self.model.set_attn_implementation("sdpa")
            self.refused("attn_implementation = sdpa", compiled, prompt(1, 1), past_key_values=cache,
                         error=kvferry.Invalid)

    def test_one_thread_at_a_time(self):
        """A pass is of one thread; a thread that has ended leaves none."""
        cache, other, said = cache_of(self.model), cache_of(self.model), []
        ids, further = prompt(1, 60), prompt(1, 5, seed=9)

        def another():
            with torch.no_grad():
                try:
                    self.model(further, past_key_values=cache)
                except kvferry.Unsupported as error:
                    said.append(str(error))

        def in_a_thread():
            thread = threading.Thread(target=another)
            thread.start()
            thread.join()

        def meanwhile(*arguments):
            hook.remove()
            in_a_thread()
        with torch.no_grad():
            wanted = self.model(ids, past_key_values=other).logits
            hook = self.model.model.layers[2].register_forward_pre_hook(meanwhile)
            got = self.model(ids, past_key_values=cache).logits
            self.assertRegex(said.pop(), "two threads call a model with one Cache; .*deepcopy.*reset")
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
            hook = self.model.model.layers[2].register_forward_pre_hook(self.stopper(SystemExit))
            in_a_thread() # ends in its pass
            hook.remove()
            logits = [self.model(further, past_key_values=each).logits for each in (cache, other)]
        torch.testing.assert_close(*logits, rtol=0, atol=0)
        self.assertEqual(said, [])

    def test_a_model_of_other_layers(self):
        self.model.set_attn_implementation("kvferry")
        with torch.no_grad():
            self.refused("LlamaForCausalLM has 2 layers: .*layer 2; make one of that model", self.model,
                         prompt(1, 40), past_key_values=cache_of(make(num_hidden_layers=2)))

    def test_autocast(self):
        """Types as SDPA has them there."""
        ids = prompt(1, 60)
        with torch.autocast("cpu", torch.bfloat16):
            wanted, got = both(self.model, lambda cache: torch.cat([
                self.model(x, past_key_values=cache).logits for x in (ids, ids[:, :1])], 1).float())
        self.assertLess(float((got - wanted).abs().max() / wanted.std()), 0.2)

    def test_masks_that_change(self):
        ids, further = prompt(2, 40), prompt(2, 5, seed=8)
        mask = torch.ones(2, 45, dtype=torch.long)
        mask[0, :10] = 0
        changed, short = torch.ones(2, 45, dtype=torch.long), mask[:, -5:]
        for then, why in ((changed, "attention_mask changes"), (None, "attention_mask changes"),
                          (short, "attention_mask has 5 columns")):
            cache = cache_of(self.model)
            with torch.no_grad():
                self.model(ids, attention_mask=mask[:, :40], past_key_values=cache)
                self.refused(why, self.model, further, attention_mask=then, past_key_values=cache,
                             error=kvferry.Error)

    def test_masks_of_four_dimensions(self):
        causal = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
        padded = causal.clone()
        padded[..., :10] = False
        for mask in (causal, padded, torch.zeros(1, 1, 40, 40).masked_fill(~padded, -torch.inf)):
            torch.testing.assert_close(*both(self.model, lambda cache: self.model(
                prompt(1, 40), attention_mask=mask, past_key_values=cache).logits[:, 10:]), rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for mask in (torch.ones(1, 1, 40, 40), torch.ones_like(causal), causal[..., :30, :]):
                self.refused("not causal|columns", self.model, prompt(1, 40), attention_mask=mask,
                             past_key_values=cache_of(self.model), error=kvferry.Error)

    def test_padding_on_the_right(self):
        ids, mask = prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
        mask[0, 45:] = 0
        self.assertEqual(*both(self.model, lambda cache: self.model.generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, past_key_values=cache).tolist()))
        cache = cache_of(self.model)
        mask = torch.ones(2, 70, dtype=torch.long)
        mask[1, 65:] = 0
        with torch.no_grad():
            self.model(ids, past_key_values=cache)
            self.refused("row 1 ends in padding.*pad on the left", self.model, prompt(2, 10),
                         attention_mask=mask, past_key_values=cache)

    def test_gradients(self):
        cache = cache_of(self.model)
        logits = self.model(prompt(1, 40), past_key_values=cache).logits
        self.refused("gradients do not go through pages", logits.sum().backward)

    def test_a_pass_that_was_interrupted(self):
        """By an error or by a key: the next pass goes on as if it had not begun."""
        for stop in (RuntimeError, KeyboardInterrupt):
            for at in (0, 2):
                ids, cache = prompt(1, 60), cache_of(self.model)
                with torch.no_grad():
                    self.model(ids, past_key_values=cache)
                    handle = self.model.model.layers[at].mlp.register_forward_pre_hook(self.stopper(stop))
                    with self.assertRaises(stop):
                        self.model(prompt(1, 10, seed=4), past_key_values=cache)
                    handle.remove()
                    self.assertEqual([cache.get_seq_length(i) for i in range(4)], [60] * 4)
                    got = self.model(prompt(1, 10, seed=9), past_key_values=cache).logits
                    again = cache_of(self.model)
                    self.model(ids, past_key_values=again)
                    wanted = self.model(prompt(1, 10, seed=9), past_key_values=again).logits
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
                self.assertEqual([cache._rows[0].length(i) for i in range(4)], [70] * 4)

    def test_a_pass_after_a_pruned_prompt_that_was_interrupted(self):
        for held in (0, 80): # in the prompt, after it
            said = []
            for interrupted in (False, True):
                cache = cache_of(self.model, prune="snapkv", prune_settings={"keep": 0.5, "window": 16})
                with torch.no_grad():
                    if held:
                        self.model(prompt(1, 80), past_key_values=cache)
                    if interrupted:
                        hook = self.model.model.layers[2].mlp.register_forward_pre_hook(
                            self.stopper(RuntimeError))
                        with self.assertRaises(RuntimeError):
                            self.model(prompt(1, 30, seed=4), past_key_values=cache)
                        hook.remove()
                    said.append(self.model(prompt(1, 40, seed=9), past_key_values=cache).logits)
            torch.testing.assert_close(*said, rtol=0, atol=0)

    def test_an_interrupted_pass_with_layers_of_other_kinds(self):
        for family in ("qwen2 with windows", "qwen3-next"):
            model = make(family)
            cache = cache_of(model)
            with torch.no_grad():
                model(prompt(1, 60), past_key_values=cache)
                handle = model.model.layers[3].mlp.register_forward_pre_hook(self.stopper(RuntimeError))
                with self.assertRaises(RuntimeError):
                    model(prompt(1, 10), past_key_values=cache)
                handle.remove()
                self.refused("a pass was interrupted.*reset", model, prompt(1, 10), past_key_values=cache)
                cache.reset()
                self.assertEqual(model(prompt(1, 10), past_key_values=cache).logits.shape[1], 10)

    def stopper(self, error):
        def stop(*arguments):
            raise error("stop")
        return stop

    def test_one_compiled_forward_serves_all_caches(self):
        """A graph for a prompt, one for prompts of other lengths, one for a token."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.model.forward = torch.compile(self.model.forward, backend="aot_eager", fullgraph=True)
        kept = []
        for length in range(40, 50):
            kept.append(cache_of(self.model, tokens_max=128))
            generate(self.model, prompt(1, length), kept[-1], max_new_tokens=6)
        self.assertLessEqual(torch._dynamo.utils.counters["stats"]["unique_graphs"], 3)

    def test_beams(self):
        """Rows are forks of each other; also with padding, and in layers of other kinds."""
        for model in (self.model, make("qwen2 with windows")):
            ids, mask = prompt(2, 70), torch.ones(2, 70, dtype=torch.long)
            mask[1, :30] = 0
            how = {"num_beams": 3, "attention_mask": mask, "num_return_sequences": 2}
            cache = cache_of(model)
            wanted = generate(model, ids, **how)
            self.assertEqual(generate(model, ids, cache, **how).tolist(), wanted.tolist())


class Copies(Case):
    def setUp(self):
        self.model = fill(make())

    def test_a_copy_is_a_fork(self):
        """A copy of an unused cache, and of a prefix: inside the same memory or in memory of its own."""
        ids = prompt(1, 90)
        mine, other = torch.cat([ids, prompt(1, 7, seed=5)], 1), torch.cat([ids, prompt(1, 9, seed=6)], 1)
        wanted = [steps(self.model, x, cache_of(self.model))[0].tolist() for x in (mine, other)]
        for copied in (copy.copy, copy.deepcopy):
            first = cache_of(self.model)
            second = copied(first)
            said = [steps(self.model, x, c)[0].tolist() for x, c in ((mine, first), (other, second))]
            self.assertEqual(said, wanted)
            for settings in ({}, {"sequences_max": 3}):
                prefix = cache_of(self.model, **settings)
                with torch.no_grad():
                    self.model(ids, past_key_values=prefix)
                for _ in range(2):
                    second = copied(prefix)
                    self.assertEqual(second._cache is prefix._cache, bool(settings))
                    said = [steps(self.model, mine, copied(prefix))[0].tolist(),
                            steps(self.model, other, second)[0].tolist()]
                    self.assertEqual(said, wanted)
                    second.close()
                self.assertEqual(prefix.get_seq_length(), 90)
                self.assertEqual(steps(self.model, mine, prefix)[0].tolist(), wanted[0])

    def test_layers_of_other_kinds_and_padding_are_copied(self):
        model, ids, mask = make("qwen2 with windows"), prompt(2, 80), torch.ones(2, 80, dtype=torch.long)
        mask[0, :25] = 0
        cache = cache_of(model)
        with torch.no_grad():
            model(ids[:, :60], attention_mask=mask[:, :60], past_key_values=cache)
        second = copy.deepcopy(cache)
        wanted = generate(model, ids, attention_mask=mask).tolist()
        self.assertEqual(generate(model, ids, cache, attention_mask=mask).tolist(), wanted)
        self.assertEqual(generate(model, ids, second, attention_mask=mask).tolist(), wanted)

    def test_rows_of_a_prefix_are_repeated_and_chosen(self):
        ids = prompt(1, 90)
        rows = torch.cat([ids.repeat(4, 1), prompt(4, 5, seed=5)], 1)
        wanted = generate(self.model, rows).tolist()
        for settings in ({}, {"sequences_max": 4}):
            cache = cache_of(self.model, **settings)
            with torch.no_grad():
                self.model(ids, past_key_values=cache)
            second = copy.deepcopy(cache)
            for repeated in (cache, second):
                repeated.batch_repeat_interleave(4)
                self.assertEqual(generate(self.model, rows, repeated).tolist(), wanted)
            with self.assertRaises(IndexError): # before a row is given back
                cache.reorder_cache(torch.tensor([1, 4, 1, 1]))
            cache.batch_select_indices(torch.tensor([2, 1]))
            self.assertEqual([len(row) for row in cache._rows], [95 + check_hf.NEW - 1] * 2)
            further = torch.cat([torch.tensor(wanted)[[2, 1]], prompt(2, 3)], 1)
            self.assertEqual(generate(self.model, further, cache).tolist(),
                             generate(self.model, further).tolist())

    def test_a_restored_cache_is_cut_and_its_rows_are_chosen(self):
        """Before its files are read."""
        ids, mask = prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
        mask[0, :20] = 0
        first = cache_of(self.model)
        with torch.no_grad():
            self.model(ids, attention_mask=mask, past_key_values=first)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "cache")
            first.save(path)
            for cut in (lambda cache: cache.batch_select_indices(torch.tensor([True, False])),
                        lambda cache: cache.batch_repeat_interleave(2), lambda cache: cache.crop(-8),
                        lambda cache: cache.reset(), lambda cache: copy.copy(cache)):
                caches = [cache_of(self.model), copy.deepcopy(first)]
                caches[0].restore(path)
                caches = [cut(cache) or cache for cache in caches]
                rows, columns = max(caches[1].batch_size, 1), caches[1].get_seq_length()
                seen = torch.ones(rows, columns + 5, dtype=torch.long)
                if columns:
                    seen[:, :columns] = caches[1]._gaps
                with torch.no_grad():
                    logits = [self.model(prompt(rows, 5), attention_mask=seen, past_key_values=cache).logits
                              for cache in caches]
                torch.testing.assert_close(*logits, rtol=0, atol=0)

    def test_pickle_is_refused(self):
        self.refused("cannot be pickled.*save", pickle.dumps, cache_of(self.model))

    def test_a_copy_of_a_model_answers_with_its_own_weights(self):
        ids = prompt(1, 40)
        used = kvferry.hf.use(self.model, tokens_max=256)
        wanted = used.generate(ids, max_new_tokens=8, do_sample=False).tolist()
        copied = copy.deepcopy(used)
        with torch.no_grad():
            copied.lm_head.weight.neg_()
        own = fill(make())
        with torch.no_grad():
            own.lm_head.weight.neg_()
        self.assertEqual(copied.generate(ids, max_new_tokens=8, do_sample=False).tolist(),
                         own.generate(ids, max_new_tokens=8, do_sample=False).tolist())
        self.assertEqual(used.generate(ids, max_new_tokens=8, do_sample=False).tolist(), wanted)


if __name__ == "__main__":
    check_hf.main("check_hf_guard")
