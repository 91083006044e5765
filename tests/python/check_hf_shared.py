# SPDX-License-Identifier: Apache-2.0
"""Models of Transformers whose layers attend with keys of another layer: Gemma 3n and Gemma 4.

With a budget for the whole context tokens and logits are those of eager attention, in every way that
prompts come; with a small one a layer that shares keys gives the bits of a layer that has copies of them.

usage: check_hf_shared.py [TEST...]
"""
import copy
import os
import tempfile

import check_hf  # ends here where there is no torch
import torch
import transformers
from check_hf import SMALL, VOCABULARY, both, cache_of, prompt
from check_hf_guard import WINDOWS, Case, peaky, steps

import kvferry.hf

GEMMA3N = {**SMALL, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY,
           "hidden_size_per_layer_input": 16, "laurel_rank": 8, "altup_num_inputs": 2,
           "activation_sparsity_pattern": [0.0] * 4, **WINDOWS}
# Layers 4 and 5 share: the last one has the keys of layer 3.
GEMMA4 = {**SMALL, "sliding_window": 24, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
          "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
          "layer_types": ["sliding_attention", "full_attention"] * 3, "global_head_dim": 64}
# More of them, and the first layer is an owner.
EARLY = {**GEMMA4, "num_kv_shared_layers": 4,
         "layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 3 + ["sliding_attention"]}
MODELS = {"Gemma 4": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4, (1, 3, 3)),
          "Gemma 4 whose first layer lends": ("Gemma4ForCausalLM", "Gemma4TextConfig", EARLY, (0, 0, 0, 0, 0)),
          "Gemma 3n": ("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N, (1, 1))}
NEW = 8


def made(name, **fields):
    model, config, own, _ = MODELS[name]
    return peaky(model, config, **{**own, **fields})


class Equal(Case):
    """To eager attention."""

    def each(self):
        for name in MODELS:
            with self.subTest(name):
                yield name, made(name)

    def logits(self, model, calls, **more):
        """Logits of forward passes on one cache are eager's; calls: arguments of each."""
        told = both(model, lambda cache: [model(past_key_values=cache, **call).logits for call in calls], "eager",
                    tokens_max=2048, **more)
        for call, wanted, got in zip(calls, *told):
            mask = call.get("attention_mask")
            seen = slice(None) if not isinstance(mask, torch.Tensor) else mask[:, -wanted.shape[1]:].bool()
            off = (got - wanted)[seen].abs().max() / wanted[seen].std()
            self.assertLess(float(off), 1e-3)

    def test_prompts_and_steps(self):
        for name, model in self.each():
            cache = self.equal(model, prompt(2, 80), new=NEW)
            self.assertEqual([turn.at for turn in cache._order if turn.shared],
                             [i for i, mode in enumerate(model.config.kv_sharing_modes) if mode == "reuse" and
                              model.config.layer_types[i] == "full_attention"])
            self.assertEqual(tuple(cache._paged[turn.layer].at for turn in cache._order), MODELS[name][3])
            for more in ({"prefill_chunk_size": 37}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
                self.equal(model, prompt(1, 40).repeat(1, 3), new=NEW, **more)

    def test_padding(self):
        for _, model in self.each():
            mask = torch.ones(3, 70, dtype=torch.long)
            mask[0, :50], mask[1, :69] = 0, 0
            right = torch.ones(3, 70, dtype=torch.long)
            right[0, 30:] = 0
            step = {"input_ids": prompt(3, 1), "attention_mask": torch.cat([mask, torch.ones(3, 1).long()], 1)}
            turn = {"input_ids": prompt(3, 5), "attention_mask": torch.cat([mask, torch.ones(3, 5).long()], 1)}
            for further in (step, turn):
                for keep in (0, 1, 5):
                    self.logits(model, [{"input_ids": prompt(3, 70), "attention_mask": mask,
                                         "logits_to_keep": keep}, further])
            self.logits(model, [{"input_ids": prompt(3, 70), "attention_mask": right}])

    def test_long_prompts_and_turns(self):
        for name, model in self.each():
            first, turn = {"input_ids": prompt(1, 1100)}, {"input_ids": prompt(1, 600)}
            self.logits(model, [first, {"input_ids": prompt(1, 1)}, {"input_ids": prompt(1, 300)}])
            self.logits(model, [first, turn], prefill_chunk_max=1024)
            self.logits(model, [first, {**turn, "logits_to_keep": 1}], prefill_chunk_max=1024)
            self.refused("take 512 queries at once .*, and 600 came; .*prefill_chunk_max = 600",
                         self.logits, model, [first, turn])

    def test_masks_of_four_dimensions(self):
        """A model may cut them, too; one query that stands for all of them is not causal."""
        causal = torch.ones(1, 1, 40, 40).tril().bool()
        masks = {name: torch.zeros(1, 1, 40, 40).masked_fill(~seen, torch.finfo(torch.float32).min)
                 for name, seen in (("full_attention", causal),
                                    ("sliding_attention", causal & ~causal.tril(-24)))}
        for _, model in self.each():
            for keep in (0, 1, 3):
                self.logits(model, [{"input_ids": prompt(1, 40), "logits_to_keep": keep,
                                     "attention_mask": masks}])
            with torch.no_grad():
                self.refused("the mask is not causal", model, prompt(1, 40), logits_to_keep=3,
                             attention_mask={**masks, "full_attention": causal[:, :, -1:]},
                             past_key_values=cache_of(model, tokens_max=256))

    def test_copies(self):
        for _, model in self.each():
            model.set_attn_implementation("kvferry")
            cache = cache_of(model, tokens_max=256)
            said = steps(model, prompt(1, 60), cache, NEW)[0]
            further = torch.cat([said, prompt(1, 9)], 1)
            other = copy.deepcopy(cache)
            self.assertTrue(torch.equal(*(steps(model, further, each, NEW)[1] for each in (cache, other))))

    def test_a_file_and_an_interrupted_pass(self):
        """Where all layers have full attention."""
        model = made("Gemma 4", layer_types=["full_attention"] * 6)
        cache, ids = self.equal(model, prompt(1, 60)), prompt(1, 9)
        prefill = cache._cache.prefill

        def stops(row, q, k, v, *arguments, layer):
            if k is None:
                raise KeyboardInterrupt
            return prefill(row, q, k, v, *arguments, layer=layer)

        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            cache.save(os.path.join(folder, "cache.kvs"))
            again = cache_of(model, tokens_max=512)
            again.restore(os.path.join(folder, "cache.kvs"))
            wanted = model(ids, past_key_values=again).logits
            cache._cache.prefill = stops
            with self.assertRaises(KeyboardInterrupt):
                model(ids, past_key_values=cache)
            cache._cache.prefill = prefill
            self.assertTrue(torch.equal(model(ids, past_key_values=cache).logits, wanted))

    def test_compiled(self):
        for name, model in self.each():
            wanted = steps(model, prompt(1, 60), cache_of(model, tokens_max=256), NEW)[1]
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="aot_eager", dynamic=True)
            cache, ids, got = cache_of(model, tokens_max=256), prompt(1, 60), []
            with torch.no_grad():
                for _ in range(NEW):
                    got.append(compiled(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].float())
                    ids = got[-1].argmax(-1, keepdim=True)
            torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-4, atol=1e-4)

    def test_the_name_alone(self):
        """Queries that are cut are the newest ones, also where there is no mask."""
        for name, model in self.each():
            for tokens, keep in ((60, 5), (20, 5), (20, 1)):
                with torch.no_grad():
                    model.set_attn_implementation("eager")
                    wanted = model(prompt(2, tokens), logits_to_keep=keep).logits
                    model.set_attn_implementation("kvferry")
                    got = model(prompt(2, tokens), logits_to_keep=keep).logits
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


class Small(Case):
    """With a budget that is less than the context."""

    def test_bits_of_a_layer_of_copies(self):
        for name in MODELS:
            with self.subTest(name):
                model = made(name)
                cache = cache_of(model, 64, tokens_max=512, local_tokens=16)
                compared = self.watched(cache)
                mask = torch.ones(2, 200, dtype=torch.long)
                mask[0, :50] = 0
                model.generate(prompt(2, 200), attention_mask=mask, max_new_tokens=NEW, do_sample=False,
                               min_new_tokens=NEW, past_key_values=cache)
                shared = sum(turn.shared for turn in cache._order)
                self.assertEqual(compared, [True] * (NEW - 1) * shared)
                attended = cache.stats()["tokens_attended"] / cache.stats()["steps"]
                self.assertLess(attended, 2 * 70) # of two KV heads

    def watched(self, cache):
        """Another cache gets a layer for each layer of the model that attends to pages: the list says whether
        its bits are the same."""
        compared, opens = [], cache._open

        def opens_both(q, k, v, scale):
            opens(q, k, v, scale)
            pages, order, last = cache._cache, cache._order, {}
            other = kvferry.Cache(cache._runtime, **{**cache._geometry, "layers": len(order)})
            rows = {row: other.sequence() for row in cache._rows}
            prefill, decode = pages.prefill, pages.decode

            def prefill_both(row, q, k, v, out, *, layer):
                for i, turn in enumerate(order if k is not None else ()):
                    if turn.layer == layer:
                        other.attention_params(i, **cache._params[layer])
                        other.prefill(rows[row], None, k, v, layer=i)
                return prefill(row, q, k, v, out, layer=layer)

            def decode_both(batch, q, k, v, *, layer):
                told = decode(batch, q, k, v, layer=layer)
                last[layer] = last[layer] if k is None else (k, v)
                got = other.decode([rows[row] for row in batch], q, *last[layer], layer=cache._turn)
                if k is None:
                    compared.append(torch.equal(got, told))
                return told

            pages.prefill, pages.decode = prefill_both, decode_both

        cache._open = opens_both
        return compared


class Refused(Case):
    def test_by_name(self):
        model = made("Gemma 4")
        self.refused("would be pruned by that layer's attention; leave prune out", cache_of, model,
                     prune="snapkv")
        for text, settings in (("select", {"select": "oracle"}), ("streaming", {"head_mask": [[0, 1]] * 2})):
            self.refused(text, steps, model, prompt(1, 40), cache_of(model, tokens_max=256, **settings),
                         error=kvferry.Error)
        cache = cache_of(model, tokens_max=1024, budget=64, local_tokens=16, pages="k8v8")
        said = steps(model, prompt(1, 400), cache)[0] # the first prompt has its keys at hand
        self.refused("quantized", steps, model, torch.cat([said, prompt(1, 9)], 1), cache, error=kvferry.Error)

    def test_what_is_not_of_this_pass(self):
        """Keys of an earlier pass, keys that are changed, queries that are not the newest, a layer that asks
        once more or not at all."""
        attend = kvferry.hf._attention._attention
        old = []

        def changed(change):
            def attention(module, q, k, v, mask, **more):
                if module.layer_idx == 5:
                    q, k, v = change(q, k, v)
                return None if q is None else attend(module, q, k, v, mask, **more)
            return attention

        def stale(q, k, v):
            old.append((k, v))
            return q, *old[0]

        for text, change in (("layer 3: what the cache hands out goes into .*clone", lambda q, k, v: (q, k.clone(), v)),
                             ("layer 3: its keys are attended with other values", lambda q, k, v: (q, k, q)),
                             ("layer 3: its keys are attended twice in a pass, or with other values",
                              lambda q, k, v: (q, v, k)),
                             ("layer 3: its keys are attended twice", stale),
                             ("layer 5: 2 queries come to 40 new keys", lambda q, k, v: (q.repeat(1, 1, 2, 1), k, v))):
            with self.subTest(text):
                model = made("Gemma 4")
                transformers.AttentionInterface.register("kvferry", changed(change))
                try:
                    self.refused("Gemma4ForCausalLM, " + text, steps, model, prompt(1, 40),
                                 cache_of(model, tokens_max=256))
                finally:
                    transformers.AttentionInterface.register("kvferry", attend)

    def test_a_layer_that_attends_elsewhere(self):
        model = made("Gemma 4")
        model.model.layers[5].self_attn.forward = lambda hidden_states, **more: (hidden_states, None)
        self.refused("Gemma4ForCausalLM, layer 5: it did not attend to pages", steps, model, prompt(1, 40),
                     cache_of(model, tokens_max=256))
        model = made("Gemma 4")
        model.model.layers[5].self_attn.scaling = 0.5
        self.refused("Gemma4ForCausalLM, layer 5: .*with a scale, a soft cap or sinks of its own", steps, model,
                     prompt(1, 40), cache_of(model, tokens_max=256))


if __name__ == "__main__":
    check_hf.main("check_hf_shared")
