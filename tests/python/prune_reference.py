# SPDX-License-Identifier: Apache-2.0
"""Pruned prefill and what follows from it, in torch: prompt in, tokens out.

A Llama of Transformers in fp32, and every prune policy as prune_definitions.py has it, with what a policy
does not keep deleted. Written for reading; none of the library's code is used or looked at. A prompt is
prefilled with its last token, and the first token of the answer follows from that token's hidden state.

Knows models and tokens; no files but a model's.
"""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "prune"))
import prune_definitions as definitions  # noqa: E402

ROWS = 512  # queries that attend at once


# ---- the model ----

class Model:
    """A Llama of Transformers, layer by layer."""

    def __init__(self, folder):
        self.llama = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        self.body, c = self.llama.model, self.llama.config
        self.layers, self.kv_heads, self.d = c.num_hidden_layers, c.num_key_value_heads, c.head_dim
        self.group = c.num_attention_heads // c.num_key_value_heads

    def embed(self, ids):
        return self.body.embed_tokens(torch.as_tensor(ids))

    def project(self, layer, x, positions):
        """q [heads, t, d], k and v [kv_heads, t, d]."""
        at = self.body.layers[layer]
        x = at.input_layernorm(x)
        q, k, v = (project(x).view(1, len(x), -1, self.d).transpose(1, 2) for project in (
            at.self_attn.q_proj, at.self_attn.k_proj, at.self_attn.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *self.body.rotary_emb(x, positions[None]))
        return q[0], k[0], v[0]

    def attend(self, q, k, v, sees=None):
        """[heads, t, d]. The queries are of the newest tokens; sees(first, count) is a mask [.., rows, n]
        of what such queries look at, where that is not everything before them."""
        n, t = k.shape[1], q.shape[1]
        k, v = (x.repeat_interleave(self.group, 0) for x in (k, v))
        out = []
        for first in range(0, t, ROWS):
            rows = min(ROWS, t - first)
            end = n - t + first + rows
            mask = causal(n - t + first, rows, end) if sees is None else \
                sees(n - t + first, rows)[..., :end]
            out.append(F.scaled_dot_product_attention(
                q[:, first:first + rows], k[:, :end], v[:, :end], attn_mask=mask))
        return torch.cat(out, 1)

    def add_attention(self, layer, x, attended):
        return x + self.body.layers[layer].self_attn.o_proj(attended.transpose(0, 1).reshape(len(x), -1))

    def add_mlp(self, layer, x):
        at = self.body.layers[layer]
        return x + at.mlp(at.post_attention_layernorm(x))

    def logits(self, row):
        return self.llama.lm_head(self.body.norm(row))


def causal(first, rows, n):
    return torch.arange(n)[None, :] <= (first + torch.arange(rows))[:, None]


# ---- policies ----

# Settings as --prune-set has them.
CHOICES = {"pool": {"max": definitions.MAX, "avg": definitions.AVERAGE},
           "group_reduce": {"mean": definitions.MEAN, "max": definitions.MAXIMUM, "sum": definitions.SUM}}


class Policy:
    """A policy by its definition, for one prompt."""

    def __init__(self, model, name, s, prompt):
        s = {key: CHOICES[key][value] if key in CHOICES else value for key, value in s.items()}
        self.model, self.name, self.prompt, self.state = model, name, prompt, None
        if name == "asl":
            self.s = {**definitions.COMMON, **definitions.ASL, **s}
            self.state = definitions.Asl(self.s, model.layers)
        elif name == "structkv":
            self.s = {**definitions.COMMON, **definitions.STRUCTKV, "layer_min": definitions.AUTO, **s}
            self.state = definitions.StructKv(self.s, model.layers, prompt)
        else:
            self.s = definitions.settings_of(name, s)

    def answer(self, layer, q, k, turn=0):
        """Tokens of a layer that are kept per KV head and those that are propagated (None = all), and
        whether the prompt starts over. q: of the newest tokens, at least the window."""
        q, k = (x.transpose(0, 1).double().numpy() for x in (q, k))
        if self.state and turn:
            said = definitions.say()
        elif self.state:
            said = self.look_back(layer, q, k)
        else:
            view = {"layer": layer, "layers": self.model.layers, "tokens": len(k), "prompt": self.prompt,
                    "turn": turn, "kv_heads": self.model.kv_heads}
            said = definitions.POLICIES[self.name][0](
                self.s, view, definitions.measured(self.name, q, k, self.s))
        propagate = said["propagate"]
        return (said["keep"], None if propagate is None else torch.tensor(propagate), said["restart"])

    def look_back(self, layer, q, k):
        scores = definitions.window_scores(q, k, self.s).astype(np.float32)
        if self.name == "asl":
            return self.state.step(layer, scores)
        edge = len(k) - self.s["window"]
        sums = definitions.attention(q[edge - len(k):], k, edge)[:, :, :edge].sum(axis=1)
        top = definitions.share_of(len(k), self.s["mass_share"])
        return self.state.step(layer, scores, definitions.profile(sums, top))


# ---- prefill ----

class Cache:
    """The keys and values of every layer: k and v [layers] of [kv_heads, tokens, d]."""

    def __init__(self):
        self.k, self.v, self.next, self.computed = [], [], 0, 0

    def add(self, k, v, keep):
        if keep is not None:
            k, v = (torch.stack([x[h][keep[h]] for h in range(len(keep))]) for x in (k, v))
        self.k.append(k)
        self.v.append(v)


def prefill(model, ids, name, s):
    """(cache, logits of the last token)."""
    policy, n = Policy(model, name, s, len(ids)), len(ids)
    positions, x = torch.arange(n), model.embed(ids)
    cache, layer, turn = Cache(), 0, 0
    while layer < model.layers:
        cache.computed += len(positions)
        q, k, v = model.project(layer, x, positions)
        keep, propagate, restart = policy.answer(layer, q, k, turn)
        if restart:
            ids = torch.as_tensor(ids)[propagate]
            positions, x = torch.arange(len(ids)), model.embed(ids)
            layer, turn, kept = 0, 1, cache.computed
            cache = Cache()
            cache.computed = kept
            continue
        cache.add(k, v, keep)
        x = model.add_attention(layer, x, model.attend(q, k, v))
        x = model.add_mlp(layer, x if layer + 1 < model.layers else x[-1:])
        if propagate is not None and layer + 1 < model.layers:
            x = x[propagate]
            positions = positions[propagate]
        layer += 1
    cache.next = int(positions[-1]) + 1 if turn else n
    return cache, model.logits(x[-1])


def prefill_chunked(model, ids, name, s, chunk, queries, patched):
    """Chunk by chunk through all layers; after each, a layer keeps the best of that chunk."""
    cache, n = Cache(), len(ids)
    cache.k = cache.v = None
    k_all = [torch.zeros(model.kv_heads, 0, model.d)] * model.layers
    v_all = list(k_all)
    for done in range(0, n, chunk):
        new = ids[done:done + chunk]
        is_last = done + chunk >= n
        patch = [] if is_last or not patched else list(ids[-queries:])
        x, positions = model.embed(list(new) + patch), done + torch.arange(len(new) + len(patch))
        for layer in range(model.layers):
            q, k, v = model.project(layer, x, positions)
            old = k_all[layer].shape[1]
            keys, values = torch.cat([k_all[layer], k], 1), torch.cat([v_all[layer], v], 1)
            x = model.add_attention(layer, x, model.attend(q, keys, values))
            if name == "streaming":  # by place alone: of all that is there
                count = definitions.share_of(done + len(new), s["keep"])
                here = keys[:, :old + len(new)]
                keep = Policy(model, name, dict(s, keep_tokens=count), n).answer(layer, q, here)[0]
                keep = keep or [list(range(here.shape[1]))] * model.kv_heads
            else:
                keep = keep_of_chunk(model, layer, name, s, q, k, len(new), queries, patch, old)
            k_all[layer] = torch.stack([keys[h][keep[h]] for h in range(model.kv_heads)])
            v_all[layer] = torch.stack([values[h][keep[h]] for h in range(model.kv_heads)])
            x = model.add_mlp(layer, x)
        row = x[len(new) - 1]
    cache.k, cache.v, cache.next = k_all, v_all, n
    return cache, model.logits(row)


def keep_of_chunk(model, layer, name, s, q, k, tokens, queries, patch, old):
    """Indexes of the layer per KV head. Tokens that earlier chunks kept stay; its queries score the chunk."""
    window, n = min(queries, tokens), k.shape[1]
    budget = max(definitions.share_of(tokens, s["keep"]), 0 if patch else window) + len(patch)
    policy = Policy(model, name, dict(s, keep_tokens=budget, window=window), n)
    mine = policy.answer(layer, q, k)[0] or [list(range(n))] * model.kv_heads
    return [list(range(old)) + [old + i for i in row if i < tokens] for row in mine]


def prefill_streaming_heads(model, ids, mask, sink, recent):
    """(cache, logits): KV heads whose mask [layers, kv_heads] is 0 only see first and newest tokens."""
    n, cache = len(ids), Cache()
    positions, x = torch.arange(n), model.embed(ids)
    for layer in range(model.layers):
        q, k, v = model.project(layer, x, positions)

        def sees(first, rows, layer=layer):
            return head_mask(model, mask[layer], sink, recent, first, rows, n)
        x = model.add_mlp(layer, model.add_attention(layer, x, model.attend(q, k, v, sees)))
        cache.add(k, v, None)
    cache.next = n
    return cache, model.logits(x[-1])


def head_mask(model, mask, sink, recent, first, rows, n):
    """[heads, rows, n]"""
    query, key = first + torch.arange(rows)[:, None], torch.arange(n)[None]
    all_before = key <= query
    ring = all_before & ((key < sink) | (key > query - recent))
    one = torch.stack([all_before if m else ring for m in mask])
    return one.repeat_interleave(model.group, 0)


# ---- answers ----

def step(model, cache, token, sees=None):
    """Append a token; its logits."""
    positions, x = torch.tensor([cache.next]), model.embed([token])
    for layer in range(model.layers):
        q, k, v = model.project(layer, x, positions)
        cache.k[layer] = torch.cat([cache.k[layer], k], 1)
        cache.v[layer] = torch.cat([cache.v[layer], v], 1)
        own = None if sees is None else lambda first, rows, layer=layer: sees(layer, first, rows)
        attended = model.attend(q, cache.k[layer], cache.v[layer], own)
        x = model.add_mlp(layer, model.add_attention(layer, x, attended))
    cache.next += 1
    return model.logits(x[-1])


def answer(model, cache, logits, tokens, sees=None):
    """Greedy tokens."""
    out = [int(logits.argmax())]
    while len(out) < tokens:
        out.append(int(step(model, cache, out[-1], sees).argmax()))
    return out
