# SPDX-License-Identifier: Apache-2.0
"""Pruned prefill and what follows from it, in torch: prompt in, tokens out.

A Llama-like model in fp32, and every prune policy as its paper defines it, with what a policy does not
keep deleted. Written for reading, from the papers' formulas; none of the library's code is used or
looked at. A prompt is prefilled with its last token, and the first token of the answer follows from
that token's hidden state.

Knows models, policies and tokens; no files but a model's. Indexes ascend; ties go to the lower one.
"""
import json
import math
import os
from fractions import Fraction

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

ROWS = 512  # queries that attend at once
TAIL = 128  # queries that a prefix remembers


def share(tokens, of):
    """floor(tokens x share); a share is the decimal number that it is written as."""
    return min(tokens, int(tokens * Fraction(str(of))))


def top(score, count):
    """The best, ascending; of equal ones the lower index."""
    order = torch.sort(score, descending=True, stable=True).indices
    return torch.sort(order[:max(count, 0)]).values


def followed(chosen, first, end):
    """The chosen indexes and all from `first` on."""
    return torch.cat([chosen, torch.arange(first, end)])


# ---- the model ----

class Model:
    """The model of a Hugging Face directory: Llama's layers, no biases, RoPE without scaling."""

    def __init__(self, folder):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
            c = json.load(f)
        w = load_file(os.path.join(folder, "model.safetensors"))
        self.w = {name: t.float() for name, t in w.items()}
        self.layers, self.heads = c["num_hidden_layers"], c["num_attention_heads"]
        self.kv_heads = c.get("num_key_value_heads") or self.heads
        self.d = c.get("head_dim") or c["hidden_size"] // self.heads
        self.eps = c["rms_norm_eps"]
        theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
        self.frequency = 1.0 / theta ** (torch.arange(0, self.d, 2).float() / self.d)
        self.group = self.heads // self.kv_heads

    def norm(self, x, name):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.w[name]

    def of(self, layer, name):
        return self.w["model.layers.%d.%s.weight" % (layer, name)]

    def embed(self, ids):
        return self.w["model.embed_tokens.weight"][torch.as_tensor(ids)]

    def turn(self, x, positions):
        """RoPE; x [heads, t, d]."""
        angle = positions.float()[:, None] * self.frequency[None]
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., :self.d // 2], x[..., self.d // 2:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def project(self, layer, x, positions):
        """q [heads, t, d], k and v [kv_heads, t, d]."""
        x = self.norm(x, "model.layers.%d.input_layernorm.weight" % layer)
        q, k, v = ((x @ self.of(layer, "self_attn.%s_proj" % n).T).view(len(x), -1, self.d)
                   .transpose(0, 1) for n in "qkv")
        return self.turn(q, positions), self.turn(k, positions), v

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
        flat = attended.transpose(0, 1).reshape(len(x), -1)
        return x + flat @ self.of(layer, "self_attn.o_proj").T

    def add_mlp(self, layer, x):
        y = self.norm(x, "model.layers.%d.post_attention_layernorm.weight" % layer)
        gate, up = (y @ self.of(layer, "mlp.%s_proj" % n).T for n in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.of(layer, "mlp.down_proj").T

    def logits(self, row):
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return self.norm(row, "model.norm.weight") @ head.T


def causal(first, rows, n):
    return torch.arange(n)[None, :] <= (first + torch.arange(rows))[:, None]


# ---- what policies look at ----

class View:
    """A layer that holds `n` tokens of a prompt. queries: of the newest tokens, at least the window."""

    def __init__(self, model, layer, queries, keys, prompt, turn, sums=None):
        self.model, self.layer, self.layers = model, layer, model.layers
        self.queries, self.keys, self.n = queries, keys, keys.shape[1]
        self.prompt, self.turn, self.sums = prompt, turn, sums

    def attention(self, w):
        """[heads, w, n] of the newest w queries."""
        q = self.queries[:, -w:].reshape(self.model.kv_heads, -1, self.model.d) / math.sqrt(self.model.d)
        logits = (q @ self.keys.transpose(1, 2)).view(-1, w, self.n)
        return logits.masked_fill(~causal(self.n - w, w, self.n), -math.inf).softmax(-1)

    def scores(self, s, weighted=False):
        """[kv_heads, n - w]: what the window looks at, smoothed, one row for a group of query heads."""
        w = s["window"]
        a = self.attention(w)[:, :, :self.n - w]
        if weighted:
            a = a * ((torch.arange(w) + 1) / w)[None, :, None]
        a = a.mean(1) if s.get("window_mean") else a.sum(1)
        a = smooth(a, s.get("pool", "max"), s.get("pool_width", 1))
        a = a.view(self.model.kv_heads, self.model.group, -1)
        how = s.get("group_reduce", "mean")
        return a.sum(1) if how == "sum" else a.max(1).values if how == "max" else a.mean(1)


def smooth(a, kind, width):
    if kind == "max":
        return F.max_pool1d(a[None], width, 1, width // 2)[0]
    return F.avg_pool1d(a[None], width, 1, width // 2)[0]


class Answer:
    """keep: None = all, or [kv_heads] indexes; propagate: None = all, or indexes."""

    def __init__(self, keep=None, propagate=None, restart=False):
        self.keep, self.propagate, self.restart = keep, propagate, restart


# ---- policies: functions of a view, and of a state that is {} when a prompt begins ----

def count_of(s, name, n):
    tokens = s.get(name + "_tokens")
    return min(tokens, n) if tokens else share(n, s[name])


def keep_top(view, scores, count):
    """Per KV head the best and the window, `count` in all."""
    edge = scores.shape[1]
    return [followed(top(row, count - (view.n - edge)), edge, view.n) for row in scores]


def full(view, s, state):
    return Answer()


def streaming(view, s, state):
    count = count_of(s, "keep", view.n)
    sink = torch.arange(min(s["sink_tokens"], count - 1))
    return Answer([followed(sink, view.n - count + len(sink), view.n)] * view.model.kv_heads)


def h2o(view, s, state):
    count = count_of(s, "keep", view.n)
    recent = share(count, s["recent_share"])
    per_head = view.sums.view(view.model.kv_heads, view.model.group, -1).sum(1)
    return Answer([followed(top(row[:view.n - recent], count - recent), view.n - recent, view.n)
                   for row in per_head])


def snapkv(view, s, state):
    return Answer(keep_top(view, view.scores(s), count_of(s, "keep", view.n)))


def pyramidkv(view, s, state):
    capacity, w, last = count_of(s, "keep", view.n), s["window"], view.layers - 1
    mean = capacity - w
    least = mean // s["beta"]
    most = 2 * mean - least
    if most >= view.n - w:
        most = view.n - w
        least = 2 * mean - most
    own = mean if view.n < 2 * mean else most - view.layer * ((most - least) // last)
    return Answer(keep_top(view, view.scores(s), own + w))


def pyramidinfer(view, s, state):
    following, w, sink = view.layer + 1, s["window"], s["sink_tokens"]
    if following == view.layers:
        return Answer()
    p = float(s["propagate"])
    part = p + (1 - p) * (1 + math.cos(math.pi * following / (view.layers - 1))) / 2
    count = share(view.prompt, s["propagate"]) if following == view.layers - 1 else \
        int(view.prompt * part)
    count = max(count, w + sink)
    if count >= view.n:
        return Answer()
    total = view.scores(s, weighted=True).double().sum(0)
    total[:sink] = math.inf
    return Answer(propagate=followed(top(total, count - w), view.n - w, view.n))


def gemfilter(view, s, state):
    if view.turn or view.layer != s["layer"]:
        return Answer()
    k = view.keys.repeat_interleave(view.model.group, 0)
    raw = (view.queries[:, -1:] @ k.transpose(1, 2))[:, 0].double().sum(0)
    total = smooth(raw[None].float(), s["pool"], s["pool_width"])[0]
    total[-1] = math.inf  # the one that asks
    return Answer(propagate=top(total, count_of(s, "keep", view.n)), restart=True)


def fastkv(view, s, state):
    w, behind = s["window"], view.layer > s["layer"]
    part = Fraction(str(s["keep"])) / (Fraction(str(s["propagate"])) if behind else 1)
    capacity = int(view.n * part)
    if view.n < capacity:
        return Answer()
    scores, propagate = view.scores(s), None
    if view.layer == s["layer"]:
        best = top(scores.double().sum(0), share(view.n, s["propagate"]) - w)
        propagate = followed(best, view.n - w, view.n)
    return Answer(keep_top(view, scores, max(capacity, w)), propagate)


def structkv(view, s, state):
    w, edge = s["window"], view.n - s["window"]
    saliency = view.scores(s).double().mean(0)
    if "past" not in state:
        state["centrality"] = s["decay"] * state.get("centrality", 0) + saliency
    answer = Answer()
    if "past" not in state and is_pivot(view, s, state):
        state["past"] = True
        best = top(state["centrality"], share(view.prompt, s["propagate"]))
        answer.propagate = followed(best, edge, view.n)
    count = share(view.prompt, s["keep"])
    if count < edge:
        answer.keep = [followed(top(saliency, count), edge, view.n)] * view.model.kv_heads
    return answer


def is_pivot(view, s, state):
    """The given layer, or the one that two layers follow which change less, as far as was seen."""
    last = s.get("layer", view.layers - 2)
    if "layer" in s or view.layer >= last:
        return view.layer == last
    w = s["window"]
    a = view.attention(w)[:, :, :view.n - w].double().mean(1)
    a = a / a.sum(1, keepdim=True)
    entropy = -(a * a.clamp_min(1e-300).log()).sum(1).mean()
    mass = a.sort(1, descending=True).values[:, :share(view.n - w, s["mass_share"])].sum(1).mean()
    variance = a.var(1, unbiased=False).mean()
    state.setdefault("measures", []).append((-entropy, mass, variance))
    found = torch.tensor(state["measures"], dtype=torch.float64)
    if len(found) < 2:
        return False
    change = found[1:] - found[:-1]
    low, high = change.min(0).values, change.max(0).values
    scaled = torch.where(high > low, (change - low) / (high - low), torch.zeros_like(change))
    score = torch.cat([torch.zeros(1), scaled @ torch.tensor(s["weights"], dtype=torch.float64)])
    score[:max(view.layers // 3, 1)] = 0
    best = int(torch.argmax(score))
    return bool(score[best] > 0) and len(found) >= best + 3


def asl(view, s, state):
    if view.turn:
        return Answer()
    w, edge, answer = s["window"], view.n - s["window"], Answer()
    scores = view.scores(s)
    kept = count_of(s, "keep", view.prompt)
    if not s.get("two_pass") and kept < view.n:
        answer.keep = keep_top(view, scores, kept)
    budget = count_of(s, "propagate", view.n)
    if "past" in state or budget >= view.n:
        return answer
    ranks = torch.empty(edge, dtype=torch.float64)
    order = torch.sort(scores.double().sum(0), descending=True, stable=True).indices
    ranks[order] = torch.arange(1, edge + 1, dtype=torch.float64)
    rows = state.setdefault("ranks", [])
    rows.append(ranks)
    if not has_settled(view, s, state, budget - w):
        return answer
    state["past"] = True
    answer.propagate = followed(torch.nonzero(ranks <= budget - w)[:, 0], edge, view.n)
    answer.restart = bool(s.get("two_pass"))
    return answer


def has_settled(view, s, state, best):
    if "layer" in s:
        return view.layer == s["layer"]
    if s.get("two_pass") and view.layer == view.layers - 1:
        return True
    observed, last = s["layers_observed"], view.layers - (1 if s.get("two_pass") else 2)
    if view.layer < max(view.layers // 3, observed - 1) or view.layer > last:
        return False
    rows = torch.stack(state["ranks"][-observed:])
    chosen = rows[:, (rows <= best).any(0)]
    variance = float(((chosen - chosen.mean(0)) ** 2).mean())
    first = state.setdefault("variance", variance)
    return first > 0 and len(state["ranks"]) > 0 and variance / first < s["threshold"]


POLICIES = {f.__name__: f for f in (full, streaming, h2o, snapkv, pyramidkv, pyramidinfer, gemfilter,
                                    fastkv, structkv, asl)}


# ---- prefill ----

class Prefix:
    """The beginning of prompts, whole: what it leaves in every layer."""

    def __init__(self, model, ids, sums=False):
        self.ids, self.k, self.v, self.tail, self.sums = list(ids), [], [], [], []
        positions, x = torch.arange(len(ids)), model.embed(ids)
        self.x = [x]
        for layer in range(model.layers):
            q, k, v = model.project(layer, x, positions)
            if sums:
                self.sums.append(sum_attention(model, q, k))
            x = model.add_mlp(layer, model.add_attention(layer, x, model.attend(q, k, v)))
            self.k.append(k)
            self.v.append(v)
            self.tail.append(q[:, -TAIL:])
            self.x.append(x)


class Joined:
    """Layers of two lists, one after the other."""

    def __init__(self, first, second, dim):
        self.first, self.second, self.dim = first, second, dim

    def __getitem__(self, layer):
        return torch.cat([self.first[layer], self.second[layer]], self.dim)


class Longer:
    """A prefix with more after it, which takes little memory of its own."""

    def __init__(self, model, prefix, ids):
        n, x = len(prefix.ids), model.embed(ids)
        positions = n + torch.arange(len(ids))
        self.ids, self.sums = prefix.ids + list(ids), []
        own_k, own_v, own_q, own_x = [], [], [], [x]
        for layer in range(model.layers):
            q, k, v = model.project(layer, x, positions)
            keys, values = torch.cat([prefix.k[layer], k], 1), torch.cat([prefix.v[layer], v], 1)
            if prefix.sums:
                self.sums.append(sum_attention(model, q, keys))
                self.sums[-1][:, :n] += prefix.sums[layer]
            x = model.add_mlp(layer, model.add_attention(layer, x, model.attend(q, keys, values)))
            for to, of in ((own_k, k), (own_v, v), (own_q, q), (own_x, x)):
                to.append(of)
        self.k, self.v = Joined(prefix.k, own_k, 1), Joined(prefix.v, own_v, 1)
        self.tail, self.x = Joined(prefix.tail, own_q, 1), Joined(prefix.x, own_x, 0)


def sum_attention(model, q, k):
    """[heads, n]: attention that every token got from these queries, of the newest tokens."""
    n, t = k.shape[1], q.shape[1]
    keys, out = k.repeat_interleave(model.group, 0), torch.zeros(model.heads, k.shape[1])
    for first in range(0, t, ROWS):
        part = q[:, first:first + ROWS] / math.sqrt(model.d)
        end = n - t + first + part.shape[1]
        logits = part @ keys[:, :end].transpose(1, 2)
        logits.masked_fill_(~causal(n - t + first, part.shape[1], end), -math.inf)
        out[:, :end] += logits.softmax(-1).sum(1)
    return out


class Cache:
    """The keys and values of every layer: k and v [layers] of [kv_heads, tokens, d]."""

    def __init__(self):
        self.k, self.v, self.next, self.computed = [], [], 0, 0

    def add(self, k, v, keep):
        if keep is not None:
            k, v = (torch.stack([x[h][keep[h]] for h in range(len(keep))]) for x in (k, v))
        self.k.append(k)
        self.v.append(v)


def prefill(model, ids, name, s, prefix=None, make=Cache):
    """(cache, logits of the last token). A prefix is all of ids: what it computed is not computed again.
    make: an empty cache."""
    policy, state, n = POLICIES[name], {}, len(ids)
    positions, x = torch.arange(n), None if prefix else model.embed(ids)
    cache, layer, turn = make(), 0, 0
    while layer < model.layers:
        cache.computed += len(positions)
        if x is None:
            q, k, v = prefix.tail[layer], prefix.k[layer], prefix.v[layer]
        else:
            q, k, v = model.project(layer, x, positions)
        sums = None
        if name == "h2o":
            sums = prefix.sums[layer] if x is None else sum_attention(model, q, k)
        answer = policy(View(model, layer, q, k, n, turn, sums), s, state)
        if answer.restart:
            ids = torch.as_tensor(ids)[answer.propagate]
            positions, x = torch.arange(len(ids)), model.embed(ids)
            layer, turn, kept = 0, 1, cache.computed
            cache = make()
            cache.computed = kept
            continue
        cache.add(k, v, answer.keep)
        if x is not None:
            x = model.add_attention(layer, x, model.attend(q, k, v))
            x = model.add_mlp(layer, x if layer + 1 < model.layers else x[-1:])
        if answer.propagate is not None and layer + 1 < model.layers:
            x = (prefix.x[layer + 1] if x is None else x)[answer.propagate]
            positions = positions[answer.propagate]
        layer += 1
    cache.next = int(positions[-1]) + 1 if turn else n
    return cache, model.logits((prefix.x[layer] if x is None else x)[-1])


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
                count = min(count_of(s, "keep", done + len(new)), old + len(new))
                sink = min(s["sink_tokens"], count - 1)
                keep = [followed(torch.arange(sink), old + len(new) - count + sink,
                                 old + len(new))] * model.kv_heads
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
    window = min(queries, tokens)
    view = View(model, layer, q, k, k.shape[1], 0)
    budget = max(count_of(s, "keep", tokens), 0 if patch else window) + len(patch)
    mine = POLICIES[name](view, dict(s, keep=1, keep_tokens=budget, window=window), {}).keep
    return [followed(torch.arange(old), 0, 0) if row is None else
            torch.cat([torch.arange(old), old + row[row < tokens]]) for row in mine]


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
