# SPDX-License-Identifier: Apache-2.0
"""Every way to call `generate` that Transformers documents, on a model that `kvferry.hf.use` has wrapped:
tokens, scores and hidden states are those of eager attention, or the way is refused by name.

Transformers' own tests of `generate` are in neither its wheel nor its source package, so the ways are
rows here. A way is a row of WAYS, and REFUSED is the whole list of those that are refused.

usage: check_hf_ways.py [TEST...]
"""
import copy
import sys
import unittest

import check_hf  # ends here where there is no torch
import torch
import torch._dynamo.testing
import transformers
from check_hf import VOCABULARY, make, prompt
from tiny_models import fill

import kvferry.hf

NEW = 10
REFUSED = {
    "attention weights": "output_attentions: weights over pages are never in one place; .*'eager'",
    "a prompt that prunes, in chunks": "prune with prefill_chunk_size = 16",
}
BROKEN = {"early exit"}  # in Transformers 5.16 itself


class Ends(transformers.StoppingCriteria):
    """After five tokens, whatever they are."""

    def __call__(self, ids, scores, **kwargs):
        return torch.full((ids.shape[0],), ids.shape[1] >= 45)


class Prefers(transformers.LogitsProcessor):
    def __call__(self, ids, scores):
        scores = scores.clone()
        scores[:, 5:9] += 2
        return scores


def ways(model):
    """name -> arguments of generate."""
    ids, rows = prompt(1, 40), prompt(2, 40)
    mask = torch.ones_like(rows)
    mask[0, :15] = 0
    outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True,
               "output_hidden_states": True}
    sample = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    return {
        "greedy": {"inputs": rows},
        "all outputs": {"inputs": rows, **outputs},
        "attention weights": {"inputs": rows, **outputs, "output_attentions": True},
        "samples": {"inputs": rows, **sample},
        "many samples of a prompt": {"inputs": rows, **sample, "num_return_sequences": 3, **outputs},
        "beams": {"inputs": rows, "num_beams": 3, **outputs},
        "beams, all of them": {"inputs": rows, "num_beams": 3, "num_return_sequences": 3},
        "beams of samples": {"inputs": rows, "num_beams": 2, **sample},
        "beams of a padded batch": {"inputs": rows, "attention_mask": mask, "num_beams": 2},
        "a padded batch": {"inputs": rows, "attention_mask": mask},
        "embeddings": {"inputs_embeds": model.get_input_embeddings()(rows)},
        "embeddings and beams": {"inputs_embeds": model.get_input_embeddings()(rows), "num_beams": 2},
        "prompt lookup": {"inputs": prompt(1, 20).repeat(1, 2), "prompt_lookup_num_tokens": 3},
        "an assistant": {"inputs": ids, "assistant_model": fill(make(num_hidden_layers=1))},
        "early exit": {"inputs": ids, "assistant_early_exit": 2},
        "chunks": {"inputs": rows, "prefill_chunk_size": 16},
        "a prompt that prunes, in chunks": {"inputs": ids, "prefill_chunk_size": 16},
        "no cache": {"inputs": rows, "use_cache": False},
        "a static cache": {"inputs": rows, "cache_implementation": "static", "disable_compile": True},
        "an offloaded cache": {"inputs": rows, "cache_implementation": "dynamic"},
        "a cache of Transformers": {"inputs": rows,
                                    "past_key_values": transformers.DynamicCache(config=model.config)},
        "penalties": {"inputs": rows, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2,
                      "bad_words_ids": [[7]], "min_length": 44},
        "own processors": {"inputs": rows, "logits_processor": transformers.LogitsProcessorList(
            [Prefers()])},
        "own end": {"inputs": rows, "stopping_criteria": transformers.StoppingCriteriaList([Ends()])},
        "guidance": {"inputs": ids, "guidance_scale": 1.5},
        "a bias of words": {"inputs": rows, "sequence_bias": [[[9], 3.0]]},
        "a tokenizer": {"inputs": rows, "tokenizer": object()}, # as servers hand over, for stop strings
        "one token": {"inputs": rows, "max_new_tokens": 1},
        "a prompt of one token": {"inputs": prompt(2, 1)},
    }


def told(model, arguments):
    torch.manual_seed(3)
    arguments = dict({"max_new_tokens": NEW, "do_sample": False}, **arguments)
    if "inputs" in arguments:
        arguments.setdefault("attention_mask", torch.ones_like(arguments["inputs"]))
    with torch.no_grad():
        return model.generate(**arguments)


def tensors(value):
    """All tensors of what generate returned, apart from its cache."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            if name not in ("past_key_values", "cache"):
                yield from tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


class Ways(unittest.TestCase):
    def test_each_is_right_or_refused(self):
        for family in ("llama", "qwen3"):
            model = fill(make(family))
            model.set_attn_implementation("eager")
            wanted = {}
            for name, arguments in ways(model).items():
                try:
                    own = copy.deepcopy(model) if name in BROKEN else model
                    wanted[name] = told(own, arguments) if name not in REFUSED else None
                except TypeError:
                    self.assertIn(name, BROKEN)
            for name in wanted:
                arguments = ways(model)[name]
                more = {"prune": "snapkv", "prune_settings": {"window": 8}} if "prunes" in name else {}
                kvferry.hf.use(model, 256, tokens_max=256, **more)
                with self.subTest(family=family, way=name):
                    if name in REFUSED:
                        with self.assertRaisesRegex(kvferry.Unsupported, REFUSED[name]):
                            told(model, arguments)
                        continue
                    pairs = list(zip(tensors(wanted[name]), tensors(told(model, arguments)), strict=True))
                    self.assertTrue(pairs)
                    for one, other in pairs:
                        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
                del model.generate

    def test_a_cache_comes_back_and_goes_on(self):
        model = fill(make())
        model.set_attn_implementation("eager")
        wanted = told(model, {"inputs": prompt(1, 60), "max_new_tokens": 2 * NEW})
        kvferry.hf.use(model, 256, tokens_max=256)
        first = told(model, {"inputs": prompt(1, 60), "return_dict_in_generate": True})
        cache = getattr(first, "cache", None) or first.past_key_values
        self.assertIsInstance(cache, kvferry.hf.Cache)
        self.assertIsInstance(cache, transformers.DynamicCache)  # as Transformers' own tests want
        got = told(model, {"inputs": first.sequences, "past_key_values": cache})
        self.assertEqual(got.tolist(), wanted.tolist())

    def test_a_compiled_forward_is_compiled_twice_at_most(self):
        """For the prompt, and for all steps."""
        counts = torch._dynamo.testing.CompileCounter()
        model = fill(make())
        wanted = told(model, {"inputs": prompt(2, 40)})
        kvferry.hf.use(model, 256, tokens_max=256)
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, backend=counts)
        for _ in range(2):
            self.assertEqual(told(model, {"inputs": prompt(2, 40)}).tolist(), wanted.tolist())
        self.assertLessEqual(counts.frame_count, 2)


if __name__ == "__main__":
    unittest.main(argv=["check_hf_ways"] + sys.argv[1:])
