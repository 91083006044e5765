# SPDX-License-Identifier: Apache-2.0
"""kvferry in Transformers: what an attention is handed, and who asks for its name, is known or refused by name.

Two sweeps read the sources of all models of the installed Transformers. The others try models of one's own, which
hand their attention something that no released model does, or do something else under other names.

usage: check_hf_known.py [TEST...]
"""
import ast
import glob
import linecache
import os
import subprocess
import sys
import tempfile
import unittest

import check_hf  # ends here where there is no torch
import torch
import transformers
from check_hf import SMALL, cache_of, prompt
from tiny_models import fill
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

import kvferry.hf
from kvferry import _hf_known as known

# Arguments of an attention of the interface that are handed by their place.
ARGUMENTS = {"query", "key", "value", "attention_mask", "scaling", "dropout"}


def sources():
    """(module, source) of every model of the installed version."""
    root = os.path.dirname(os.path.dirname(transformers.__file__))
    for path in sorted(glob.glob(os.path.join(root, "transformers", "models", "*", "modeling_*.py"))):
        with open(path, encoding="utf-8") as source:
            yield os.path.relpath(path, root)[:-len(".py")].replace(os.sep, "."), source.read()


class Sweeps(unittest.TestCase):
    """A version that nobody has looked at has nothing that no list has."""

    def test_what_attentions_are_handed(self):
        """By the calls of the interface."""
        found, calls = {}, 0
        for module, source in sources():
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attention_interface":
                    calls += 1
                    found.update((word.arg, module) for word in node.keywords if word.arg)
        self.assertGreater(calls, 300)
        lists = ARGUMENTS | known.HARMLESS | known.ATTENTION_PARAMS | set(known.OTHERS)
        self.assertEqual({name: module for name, module in found.items() if name not in lists}, {})

    def test_who_asks_for_the_name(self):
        found, looked = [], 0
        for module, source in sources():
            if "_attn_implementation" in source:
                looked += 1
                found += [(module, line, text) for line, text in known.comparisons(source)
                          if text not in known.known_comparisons(module)]
        self.assertGreater(looked, 300)
        self.assertEqual(found, [])

    def test_kinds_of_layers(self):
        """Those of the caches that Transformers has for all models."""
        ours = {name: kind.__name__ for name, kind in DYNAMIC_LAYER_TYPE_MAPPING.items()
                if kind.__module__ == "transformers.cache_utils"}
        self.assertLessEqual({name for name in ours if name not in known.KINDS},
                             {"indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"})
        self.assertEqual(set(ours.values()) - known.CACHES, {"DynamicIndexedLayer"})


# Two attentions of one's own: `more` is what they add to scores, and hand over or not.
ATTENTION = '''
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

def eager_attention_forward(module, query, key, value, mask, scaling, dropout=0.0, alibi=None, **kwargs):
    key, value = (llama.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling + module.adds(key) + (0 if alibi is None else alibi)
    weights = (scores + (0 if mask is None else mask)).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights

class Attention(llama.LlamaAttention):
    edits = staticmethod(lambda attention, mask: mask)
    hands = staticmethod(lambda attention, query, key: {})
    adds = staticmethod(lambda key: 0)

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None,
                past_key_values=None, **kwargs):
        x, cache = hidden_states, cache if cache is not None else past_key_values
        query, key, value = (p(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
                             for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        given = self.hands(self, query, key)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, query, key, value, self.edits(self, attention_mask), scaling=self.scaling, **given,
                              **kwargs)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), weights

'''
MODELS = {"OwnForCausalLM": '''
class OwnForCausalLM(llama.LlamaForCausalLM):
    _supports_sdpa = False
''', "ServedForCausalLM": '''
class ServedConfig(llama.LlamaConfig):
    model_type = "served"

class ServedForCausalLM(llama.LlamaForCausalLM):
    config_class = ServedConfig
'''}


class Own(unittest.TestCase):
    """Models of one's own on the interface."""

    def made(self, name="OwnForCausalLM", source=ATTENTION, **does):
        """A model of a file of its own."""
        self.count = getattr(self, "count", 0) + 1
        module = "own_model_%s_%d" % (self.id().rpartition(".")[2], self.count)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, module + ".py")
            with open(path, "w") as out:
                out.write(source + MODELS[name])
            sys.path.insert(0, folder)
            try:
                __import__(module)
            finally:
                sys.path.remove(folder)
            own = sys.modules[module]
            lines = (source + MODELS[name]).splitlines(True)
            linecache.cache[path] = (len(lines), None, lines, path) # the file will be gone
        torch.manual_seed(0)
        kind = getattr(own, name)
        model = fill(kind(kind.config_class(**SMALL)).eval())
        for at, layer in enumerate(model.model.layers):
            weights = layer.self_attn.state_dict()
            layer.self_attn = own.Attention(model.config, at)
            layer.self_attn.load_state_dict(weights)
            for method, what in does.items():
                setattr(own.Attention, method, staticmethod(what))
        return model

    def logits(self, model, name, cache=None, tokens=60):
        model.set_attn_implementation(name)
        with torch.no_grad():
            return model(prompt(1, tokens), past_key_values=cache).logits

    def alone(self, model):
        """By the name alone it answers as by itself, or is refused."""
        wanted = self.logits(model, "eager")
        torch.testing.assert_close(self.logits(model, "kvferry"), wanted, rtol=1e-4, atol=1e-4)

    def refused(self, text, call, *arguments, **more):
        with self.assertRaisesRegex(kvferry.Unsupported, text):
            call(*arguments, **more)

    def test_what_is_plain_is_served(self):
        for name in ("OwnForCausalLM", "ServedForCausalLM"):
            model = self.made(name)
            self.alone(model)
            wanted = self.logits(model, "eager")
            torch.testing.assert_close(self.logits(model, "kvferry", cache_of(model)), wanted, rtol=1e-4, atol=1e-4)

    def test_a_keyword_that_nobody_knows(self):
        """Its own attention takes it; SDPA and pages would drop it."""
        def far(attention, query, key):
            distance = torch.arange(key.shape[2])[None] - torch.arange(key.shape[2])[:, None]
            return {"alibi": 0.1 * distance[None, None].float()}
        model = self.made(hands=far)
        self.alone(model)
        self.refused("OwnForCausalLM, layer 0: its attention is handed alibi", self.logits, model, "kvferry",
                     cache_of(model))
        served = self.made("ServedForCausalLM", hands=far)
        self.refused("Attention, layer 0: its attention is handed alibi, which kvferry does not support", self.logits,
                     served, "kvferry")
        for name, value, word in (("indices", torch.zeros(1, 60, 8, dtype=torch.int), r"selected tokens \(indices\)"),
                                  ("cu_seq_lens_q", torch.tensor([0, 30, 60]), r"packed sequences \(cu_seq_lens_q\)"),
                                  ("chooses", False, "chooses")):
            model = self.made("ServedForCausalLM", hands=lambda *_: {name: value})
            self.refused("its attention is handed " + word, self.logits, model, "kvferry")
            self.refused("its attention is handed " + word, self.logits, model, "kvferry", cache_of(model))
        model = self.made("ServedForCausalLM", hands=lambda *_: {"chooses": None})
        self.logits(model, "kvferry", cache_of(model))

    def test_numbers_of_another_shape(self):
        for given, word in (({"s_aux": torch.zeros(1, 4, 1, 1)}, r"sinks \(s_aux\) of shape \(1, 4, 1, 1\)"),
                            ({"softcap": torch.ones(4)}, "softcap of 4 numbers")):
            model = self.made("ServedForCausalLM", hands=lambda *_: given)
            self.refused(word, self.logits, model, "kvferry", cache_of(model))

    def test_an_attention_that_does_more(self):
        """Nothing is handed over, and SDPA does not serve the model: its own attention is compared."""
        model = self.made(adds=lambda key: 0.1 * torch.arange(key.shape[2]).float())
        self.alone(model)
        self.refused("layer 0: its own attention is not that of pages", self.logits, model, "kvferry", cache_of(model))

    def test_a_mask_that_a_layer_edits(self):
        """In place or not, in all layers or in one. Columns that all layers hide in all passes are padding."""
        def hidden(mask):
            return written(mask.clone())

        def written(mask):
            mask[..., 5:20] = torch.finfo(mask.dtype).min if mask.is_floating_point() else False
            return mask
        causal = torch.ones(61, 61, dtype=torch.bool).tril()[None, None]
        for edit in (hidden, written):
            for layers in ({0, 1, 2, 3}, {2}):
                def edits(attention, mask):
                    return edit(mask) if mask is not None and attention.layer_idx in layers else mask
                for name, mask in (("OwnForCausalLM", None), ("ServedForCausalLM", None), ("ServedForCausalLM", causal)):
                    with self.subTest(edit=edit.__name__, layers=layers, model=name, mask=mask is not None):
                        model = self.made(name, edits=edits)
                        if len(layers) < 4 or name == "ServedForCausalLM" and mask is None:
                            self.refused("the mask of layers in pages goes into|its mask is not that of the first layer",
                                         self.twice, model, "kvferry", mask)
                            continue
                        wanted = self.twice(model, "eager" if mask is None else "sdpa", mask)
                        torch.testing.assert_close(self.twice(model, "kvferry", mask), wanted, rtol=1e-4, atol=1e-4)

    def twice(self, model, name, mask):
        """A prompt and a token."""
        model.set_attn_implementation(name)
        cache = cache_of(model) if name == "kvferry" else transformers.DynamicCache(config=model.config)
        model.set_attn_implementation(name)
        masks = (None, None) if mask is None else (mask[..., :60, :60].clone(), mask[..., 60:, :].clone())
        with torch.no_grad():
            first = model(prompt(1, 60), past_key_values=cache, attention_mask=masks[0]).logits
            then = model(prompt(1, 1), past_key_values=cache, attention_mask=masks[1]).logits
        return torch.cat([first, then], 1)

    def test_a_model_that_asks_for_the_name(self):
        for how in ("self.config._attn_implementation in ('eager', 'sdpa')",
                    "self.config._attn_implementation == 'sdpa'", "'eager' != self.config._attn_implementation",
                    "self.config._attn_implementation in NAMES",
                    "self.config._attn_implementation.startswith('eager')"):
            source = "NAMES = ('eager', 'sdpa')\n" + ATTENTION if "NAMES" in how else ATTENTION
            source = source.replace("        given = self.hands", "        if %s:\n            key = key * 1\n"
                                    "        given = self.hands" % how)
            model = self.made(source=source)
            model.set_attn_implementation("kvferry")
            for call in (kvferry.hf.Cache, kvferry.hf.use):
                self.refused("asks for the name of its attention.*line [0-9]+: ", call, model)

    def test_a_kind_of_layer_that_nobody_knows(self):
        class Sparse(DynamicLayer):
            pass
        for kind in (Sparse, DynamicLayer):
            DYNAMIC_LAYER_TYPE_MAPPING["own_sparse"] = kind
            try:
                config = transformers.Qwen3Config(**SMALL)
                config.layer_types = ["full_attention", "own_sparse"] * 2
                config._attn_implementation = "kvferry"
                self.refused(r"kinds that kvferry does not support: own_sparse \(layer 1\)", kvferry.hf.Cache, config)
            finally:
                del DYNAMIC_LAYER_TYPE_MAPPING["own_sparse"]


class Released(unittest.TestCase):
    """Layers that select tokens or blocks by themselves."""

    def model(self, name, **fields):
        torch.manual_seed(0)
        return fill(getattr(transformers, name + "ForCausalLM")(
            getattr(transformers, name + "Config")(**fields)).eval())

    def test_indices(self):
        """By the name alone they would be dropped."""
        small = {name: value for name, value in SMALL.items() if name not in ("head_dim", "num_key_value_heads")}
        model = self.model("DeepseekV32", **{
            **small, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "index_n_heads": 4, "index_head_dim": 32,
            "index_topk": 8})
        model.set_attn_implementation("kvferry")
        with torch.no_grad(), self.assertRaisesRegex(kvferry.Unsupported, r"selected tokens \(indices\)"):
            model(prompt(1, 60), past_key_values=transformers.DynamicCache(config=model.config))
        with self.assertRaisesRegex(kvferry.Unsupported, "kinds that kvferry does not support: "):
            kvferry.hf.Cache(model)

    def test_block_indices(self):
        from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as minimax
        config = minimax.MiniMaxM3VLTextConfig(**{
            **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 32,
            "index_block_size": 16, "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2})
        model = fill(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
        model.set_attn_implementation("kvferry")
        with torch.no_grad(), self.assertRaisesRegex(kvferry.Unsupported, r"selected blocks \(block_indices\)"):
            model(prompt(1, 60), past_key_values=transformers.DynamicCache(config=config))
        for call in (kvferry.hf.Cache, kvferry.hf.use):
            with self.assertRaisesRegex(kvferry.Unsupported, r"does not support: minimax_m3_sparse \(layer 1\)"):
                call(model)


class Versions(unittest.TestCase):
    def test_transformers_that_are_too_old(self):
        """Said at import, before anything of them is used."""
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "transformers"))
            for version in ("4.57.6", "5.0.0rc1", "5.15.1"):
                with open(os.path.join(folder, "transformers", "__init__.py"), "w") as out:
                    out.write("__version__ = %r\n" % version)
                done = subprocess.run(
                    [sys.executable, "-c", "import kvferry.hf"], capture_output=True, text=True,
                    env=dict(os.environ, PYTHONPATH=os.pathsep.join([folder, *sys.path])))
                self.assertIn("ImportError: kvferry.hf: Transformers %s is installed, and the oldest that it serves "
                              "is %d.%d" % (version, *known.OLDEST), done.stderr)


if __name__ == "__main__":
    check_hf.main("check_hf_known")
