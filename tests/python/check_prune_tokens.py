# SPDX-License-Identifier: Apache-2.0
"""Pruned prompts end to end: tokens of `kvferry run` against those of the reference in torch.

Prompt in, tokens out, for every policy, on a small random model that is made here and on the real one
in the folder KVF_HF_MODEL, where there is one. Tokens that a policy does not keep are deleted and all
others are attended, so that nothing but the policy decides. Needs torch, Transformers and the command
KVF_COMMAND. `./dev python` has all of it.

usage: check_prune_tokens.py [TEST...]
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    import transformers
except ImportError as error:
    print("skipped: %s; ./dev python makes an environment that has it" % error)
    sys.exit(77)
if not os.path.exists(os.environ.get("KVF_COMMAND", "")):
    print("skipped: KVF_COMMAND names no kvferry command; ./dev python sets it")
    sys.exit(77)

import prune_reference as reference
import tiny_models

LAYERS, HEADS, KV_HEADS, D, HIDDEN, INNER, VOCABULARY = 9, 4, 2, 32, 96, 160, 256
TOKENS = 10
MAX7 = {"pool": "max", "pool_width": 7}
ASL = {"window": 8, "pool": "avg", "pool_width": 7, "group_reduce": "sum", "layers_observed": 3,
       "threshold": 0.98}
# A run, its policy and its settings, as --prune-set has them. `real`: instead, for 30 layers.
RUNS = {
    "full": ("full", {}),
    "streaming": ("streaming", {"keep": 0.2, "sink_tokens": 4}),
    "h2o": ("h2o", {"keep": 0.2, "recent_share": 0.5}),
    "snapkv": ("snapkv", {"keep": 0.3, "window": 16, "pool": "avg", "pool_width": 5}),
    "snapkv, counts": ("snapkv", {"keep_tokens": 70, "window": 32, "group_reduce": "max", **MAX7}),
    "pyramidkv": ("pyramidkv", {"keep": 0.2, "window": 8, "beta": 20, **MAX7}),
    "pyramidinfer": ("pyramidinfer", {"propagate": 0.2, "window": 16, "sink_tokens": 4,
                                      "window_mean": 1}),
    "gemfilter": ("gemfilter", {"keep": 0.2, "layer": 4, "pool": "avg", "pool_width": 5}),
    "fastkv": ("fastkv", {"keep": 0.1, "propagate": 0.2, "layer": 4, "window": 8,
                          "group_reduce": "sum", **MAX7}),
    "fastkv, keeps all": ("fastkv", {"keep": 1, "propagate": 0.5, "layer": 2, "window": 16,
                                     "group_reduce": "sum", **MAX7}),
    "structkv, fixed": ("structkv", {"keep": 0.1, "propagate": 0.2, "window": 8, "layer": 5,
                                     "decay": 0.9, **MAX7}),
    "structkv, online": ("structkv", {"keep": 0.1, "propagate": 0.2, "window": 8, "decay": 0.9,
                                      "mass_share": 0.1, "weights": [0.2, 0.3, 0.5], **MAX7}),
    "asl": ("asl", {"keep_tokens": 60, "propagate_tokens": 80, **ASL}),
    "asl, given": ("asl", {"keep_tokens": 60, "propagate_tokens": 80, "layer": 3, **ASL}),
    "asl, two passes": ("asl", {"propagate_tokens": 80, "keep": 1, "two_pass": 1, **ASL}),
    "asl, two passes, given": ("asl", {"propagate_tokens": 80, "keep": 1, "two_pass": 1, "layer": 4,
                                       **ASL}),
}
CHUNKED = {
    "snapkv": {"keep": 0.3, "window": 16, "pool": "avg", "pool_width": 5},
    "pyramidkv": {"keep": 0.3, "window": 16, "beta": 20, **MAX7},
    "streaming": {"keep": 0.3, "sink_tokens": 4},
}
CHUNK, QUERIES = 100, 16


def make_model(folder):
    """A random model that looks around: weights are large, so that attention is uneven."""
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=D, vocab_size=VOCABULARY, max_position_embeddings=4096)
    tiny_models.fill(transformers.LlamaForCausalLM(config), 3).save_pretrained(folder)


def options_of(settings):
    out = []
    for name, value in settings.items():
        out += ["--prune-set", "%s=%s" % (name, ",".join(map(str, value)) if isinstance(value, list)
                                          else value)]
    return out


class Tokens(unittest.TestCase):
    """Tokens of a random model."""

    prompts = [(331, 5), (260, 6)]  # tokens, seed
    layers = LAYERS

    @classmethod
    def setUpClass(cls):
        cls.held = tempfile.TemporaryDirectory()
        cls.folder = cls.held.name
        cls.path = cls.find_model()
        cls.model = reference.Model(cls.path)
        cls.given = [torch.randint(3, cls.words(), (n,), generator=torch.Generator().manual_seed(seed))
                     .tolist() for n, seed in cls.prompts]

    @classmethod
    def tearDownClass(cls):
        cls.held.cleanup()

    @classmethod
    def find_model(cls):
        make_model(cls.folder)
        return cls.folder

    @classmethod
    def words(cls):
        return VOCABULARY

    def run_kvferry(self, ids, options, evict=("--retention", "evict")):
        names = [os.path.join(self.folder, n) for n in ("prompt.ids", "answer.ids", "stats.json")]
        with open(names[0], "w", encoding="utf-8") as f:
            f.write("\n".join(map(str, ids)) + "\n")
        done = subprocess.run(
            [os.environ["KVF_COMMAND"], "run", "--model", self.path, "--token-ids", names[0], "-n",
             str(TOKENS), "--ignore-eos", "--emit-ids", names[1], "--stats", names[2], "--select",
             "full", "--device", "host", *options, *(evict if "--prune" in options else ())],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(names[1], encoding="utf-8") as out, open(names[2], encoding="utf-8") as stats:
            return [int(line) for line in out], json.load(stats)

    def settings(self, name):
        policy, s = RUNS[name]
        return policy, dict(s, layer=s["layer"] * self.layers // LAYERS) if "layer" in s else s

    def check(self, name):
        policy, s = self.settings(name)
        for ids in self.given:
            with self.subTest(name=name, tokens=len(ids)), torch.no_grad():
                got, stats = self.run_kvferry(ids, ["--prune", policy, *options_of(s)])
                cache, logits = reference.prefill(self.model, ids, policy, s)
                self.assertEqual(stats["prune"]["tokens_held"], [k.shape[1] for k in cache.k])
                self.assertEqual(stats["prune"]["tokens_computed"], cache.computed)
                self.assertEqual(got, reference.answer(self.model, cache, logits, TOKENS))

    def test_a_mask_that_masks_nothing(self):
        mask = os.path.join(self.folder, "ones.tsv")
        with open(mask, "w", encoding="utf-8") as f:
            f.write("\n".join(["\t".join(["1"] * self.model.kv_heads)] * self.layers) + "\n")
        for name in ("snapkv", "fastkv", "gemfilter"):
            policy, s = self.settings(name)
            options = ["--prune", policy, *options_of(s)]
            self.assertEqual(self.run_kvferry(self.given[0], options + ["--head-mask", mask])[0],
                             self.run_kvferry(self.given[0], options)[0])

    def test_streaming_heads(self):
        sink, recent = 4, 40
        mask = [[(layer + h) % 2 for h in range(self.model.kv_heads)] for layer in range(self.layers)]
        path = os.path.join(self.folder, "mask.tsv")
        with open(path, "w", encoding="utf-8") as f:
            f.write("".join("\t".join(map(str, row)) + "\n" for row in mask))
        ids = self.given[0]
        got, _ = self.run_kvferry(ids, ["--head-mask", path, "--streaming-sink", str(sink),
                                        "--streaming-recent", str(recent)])
        with torch.no_grad():
            cache, logits = reference.prefill_streaming_heads(self.model, ids, mask, sink, recent)

            def sees(layer, first, rows):
                return reference.head_mask(self.model, mask[layer], sink, recent, first, rows,
                                           first + rows)
            self.assertEqual(got, reference.answer(self.model, cache, logits, TOKENS, sees))

    def test_chunks(self):
        for policy, s in CHUNKED.items():
            for how in ("naive", "patched"):
                for ids in self.given:
                    with self.subTest(policy=policy, how=how, tokens=len(ids)), torch.no_grad():
                        got, stats = self.run_kvferry(
                            ids, ["--prune", policy, *options_of(s), "--chunk", str(CHUNK), "--evict",
                                  how, "--chunk-queries", str(QUERIES)], evict=())
                        cache, logits = reference.prefill_chunked(self.model, ids, policy, s, CHUNK,
                                                                  QUERIES, how == "patched")
                        self.assertEqual(stats["prune"]["tokens_held"],
                                         [k.shape[1] for k in cache.k])
                        self.assertEqual(got, reference.answer(self.model, cache, logits, TOKENS))

    def test_the_pivot_is_found(self):
        """Otherwise the runs above would say nothing of it."""
        for name in ("structkv, online", "asl"):
            policy, s = self.settings(name)
            stats = [self.run_kvferry(ids, ["--prune", policy, *options_of(s)])[1]["prune"]
                     for ids in self.given]
            self.assertTrue(any(p["chosen_layer"] not in (None, self.layers - 2) for p in stats),
                            (name, [p["chosen_layer"] for p in stats]))


for _name in RUNS:
    def _test(self, name=_name):
        self.check(name)
    setattr(Tokens, "test_" + "".join(c if c.isalnum() else "_" for c in _name), _test)


@unittest.skipUnless(os.path.exists(os.environ.get("KVF_HF_MODEL", "")),
                     "KVF_HF_MODEL names no folder with the real model")
class RealTokens(Tokens):
    """Tokens of a language model, on ids that are no text."""

    prompts = [(360, 8)]
    layers = 30

    @classmethod
    def find_model(cls):
        return os.environ["KVF_HF_MODEL"]

    @classmethod
    def words(cls):
        return 40000

    test_the_pivot_is_found = None  # in this model ranks do not settle


if __name__ == "__main__":
    torch.set_num_threads(1)  # others wait for each other where a machine is busy
    unittest.main(verbosity=2)
