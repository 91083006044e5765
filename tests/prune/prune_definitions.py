# SPDX-License-Identifier: Apache-2.0
"""The prune policies as their papers define them, in NumPy: from scores to what is kept and passed on.

Written from the papers' formulas and the conditions of their published code; none of the library's code
is used or looked at. Ties go to the lower index. The policies that need no state are functions of
their settings, a view and the scores; ASL and StructKV, which look back over layers, are objects of one
prompt.
"""
import math

import numpy as np

MAX, AVERAGE = 0, 1  # pool
MEAN, MAXIMUM, SUM = 0, 1, 2  # group_reduce
AUTO = 2**32 - 1

# ------------------------------------------------------------ definitions: scores


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(q, k, first):
    """[H, queries, n]: queries are of tokens first, first + 1, ...; causal."""
    group = q.shape[1] // k.shape[1]
    keys = np.repeat(k, group, axis=1)
    logits = np.einsum("qhd,nhd->hqn", q, keys) / math.sqrt(q.shape[2])
    later = np.arange(k.shape[0])[None, :] > (first + np.arange(q.shape[0]))[:, None]
    return softmax(np.where(later, -np.inf, logits))


def pooled(s, kind, width):
    half = width // 2
    edge = -np.inf if kind == MAX else 0.0
    wide = np.pad(s, [(0, 0)] * (s.ndim - 1) + [(half, half)], constant_values=edge)
    n = s.shape[-1]
    shifted = np.stack([wide[..., i:i + n] for i in range(width)])
    return shifted.max(axis=0) if kind == MAX else shifted.sum(axis=0) / width


def over_group(s, kv_heads, how):
    s = s.reshape(kv_heads, -1, s.shape[-1])
    return {MEAN: s.mean(axis=1), MAXIMUM: s.max(axis=1), SUM: s.sum(axis=1)}[how]


def window_scores(q, k, s, is_weighted=False):
    """[Hkv, n - W] of the last W queries; q has these at least."""
    w, n = s["window"], k.shape[0]
    a = attention(q[-w:], k, n - w)[:, :, :n - w]
    if is_weighted:
        a = a * ((np.arange(w) + 1) / w)[None, :, None]
    sums = a.mean(axis=1) if s["window_mean"] else a.sum(axis=1)
    return over_group(pooled(sums, s["pool"], s["pool_width"]), k.shape[1], s["group_reduce"])


def all_query_sums(q, k, s):
    return over_group(attention(q, k, 0).sum(axis=1), k.shape[1], s["group_reduce"])


def last_logits(q, k, s):
    keys = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return over_group(np.einsum("hd,nhd->hn", q[-1], keys), k.shape[1], s["group_reduce"])


# ---------------------------------------------------------- definitions: choices


def best(score, count):
    """Equal scores: the lower index; ascending."""
    return sorted(np.argsort(-score, kind="stable")[:count].tolist())


def with_window(score, count, n, w):
    return best(score, max(count - w, 0)) + list(range(n - w, n))


def say(keep=None, propagate=None, restart=0, chosen=0, border=None):
    """border: the scores that decided what is propagated."""
    return {"keep": keep, "propagate": propagate, "restart": restart, "chosen": chosen,
            "border": border}


def full(s, view, scores):
    return say()


def streaming(s, view, scores):
    n = view["tokens"]
    count = s["keep_tokens"] or int(n * s["keep"])
    if count >= n:
        return say()
    sink = s["sink_tokens"]
    ids = list(range(sink)) + list(range(n - (count - sink), n))
    return say(keep=[ids] * view["kv_heads"])


def h2o(s, view, scores):
    n = view["tokens"]
    count = s["keep_tokens"] or int(n * s["keep"])
    if count >= n:
        return say()
    recent = int(count * s["recent_share"])
    keep = []
    for row in scores:
        older = row[:n - recent].astype(np.float64)
        older[:s["sink_tokens"]] = np.inf  # kept first, out of the heavy half
        keep.append(best(older, count - recent) + list(range(n - recent, n)))
    return say(keep=keep)


def snapkv(s, view, scores):
    n, w = view["tokens"], s["window"]
    capacity = s["keep_tokens"] or int(n * s["keep"])
    if n < capacity or n <= w or capacity >= n:
        return say()
    return say(keep=[with_window(row, capacity, n, w) for row in scores])


def pyramidkv(s, view, scores):
    n, w, layers = view["tokens"], s["window"], view["layers"]
    capacity = s["keep_tokens"] or int(n * s["keep"])
    if n < capacity or n <= w:
        return say()
    c = capacity - w
    if n < 2 * c or layers == 1:
        count = c
    else:
        mn = c // s["beta"]
        mx = 2 * c - mn
        if mx >= n - w:
            mx = n - w
            mn = 2 * c - mx
        count = mx - view["layer"] * ((mx - mn) // (layers - 1))
    if count + w >= n:
        return say()
    return say(keep=[best(row, count) + list(range(n - w, n)) for row in scores])


def pyramidinfer(s, view, scores):
    n, w, layers, prompt = view["tokens"], s["window"], view["layers"], view["prompt"]
    following = view["layer"] + 1
    if following == layers or n <= w:
        return say()
    p = s["propagate"]
    share = p + (1 - p) * (1 + math.cos(math.pi * following / (layers - 1))) / 2
    count = int(prompt * (p if following == layers - 1 else share))
    count = max(count, w + s["sink_tokens"])
    if count >= n:
        return say()
    total = scores.astype(np.float64).sum(axis=0)
    total[:s["sink_tokens"]] = np.inf
    return say(propagate=with_window(total, count, n, w), border=total)


def gemfilter(s, view, scores):
    n = view["tokens"]
    layer = view["layers"] * 13 // 32 if s["layer"] == AUTO else s["layer"]
    if view["turn"] or view["layer"] != layer:
        return say()
    count = s["keep_tokens"] or int(n * s["keep"])
    if count >= n:
        return say(chosen=1)
    total = pooled(scores.astype(np.float64).sum(axis=0), s["pool"], s["pool_width"])
    total[n - max(s["window"], 1):] = np.inf  # whose logits the answer begins with
    return say(propagate=best(total, count), restart=1, chosen=1, border=total)


def fastkv(s, view, scores):
    n, w, layer = view["tokens"], s["window"], view["layer"]
    tsp = max(view["layers"] // 2 - 1, 0) if s["layer"] == AUTO else s["layer"]
    chosen = int(layer == tsp)
    if s["keep_tokens"]:
        capacity = s["keep_tokens"]
    elif layer <= tsp:
        capacity = int(n * s["keep"])
    elif s["propagate_tokens"]:  # in no published mode: what a layer before would keep
        capacity = int(view["prompt"] * s["keep"])
    else:
        capacity = min(int(n * (s["keep"] / s["propagate"])), n)
    if n < capacity or n <= w:
        return say(chosen=chosen)
    keep = propagate = total = None
    if capacity < n:
        keep = [with_window(row, capacity, n, w) for row in scores]
    passed = s["propagate_tokens"] or int(n * s["propagate"])
    if layer == tsp and n > passed:
        total = scores.astype(np.float64).sum(axis=0)
        propagate = with_window(total, passed, n, w)
    return say(keep=keep, propagate=propagate, chosen=chosen, border=total)


NOTHING, SCORES, WEIGHTED, LOGITS, SUMS = range(5)
COMMON = {"keep": 1.0, "propagate": 1.0, "keep_tokens": 0, "propagate_tokens": 0, "layer": AUTO,
          "window": 0, "pool": MAX, "pool_width": 1, "group_reduce": MEAN, "window_mean": 0,
          "sink_tokens": 0, "recent_share": 0.5, "beta": 20}
POLICIES = {
    "full": (full, NOTHING, {}),
    "streaming": (streaming, NOTHING, {"keep": 0.1, "sink_tokens": 4}),
    "h2o": (h2o, SUMS, {"keep": 0.1, "group_reduce": SUM}),
    "snapkv": (snapkv, SCORES, {"keep": 0.1, "window": 32, "pool": AVERAGE, "pool_width": 5}),
    "pyramidkv": (pyramidkv, SCORES, {"keep": 0.1, "window": 8, "pool_width": 7}),
    "pyramidinfer": (pyramidinfer, WEIGHTED, {"propagate": 0.2, "window": 32, "window_mean": 1,
                                              "sink_tokens": 4}),
    "gemfilter": (gemfilter, LOGITS, {"keep": 0.1, "window": 1, "pool": AVERAGE, "pool_width": 5,
                                      "group_reduce": SUM}),
    "fastkv": (fastkv, SCORES, {"keep": 0.1, "propagate": 0.2, "window": 8, "pool_width": 7,
                                "group_reduce": SUM}),
}


def settings_of(name, changes):
    """The published ones, which must also be the library's: it is told only the changes."""
    return {**COMMON, **POLICIES[name][2], **changes}


def measured(name, q, k, s):
    """The scores that a policy without a state decides by; None = it needs none."""
    measure = {NOTHING: lambda *_: None, SCORES: window_scores, LOGITS: last_logits,
               WEIGHTED: lambda *a: window_scores(*a, is_weighted=True),
               SUMS: all_query_sums}[POLICIES[name][1]]
    return measure(q.astype(np.float64), k.astype(np.float64), s)


# ------------------------------------------------------- policies with a state


def share_of(n, share):
    return int(n * share)


class Asl:
    """One prompt. The published code, line by line, but ties and the latest layer."""

    def __init__(self, s, layers):
        self.s, self.layers = s, layers
        self.ranks, self.initial, self.done = {}, None, False
        self.ratios = {}
        self.observed = s["layers_observed"] or min(max(layers // 3, 2), 8)
        self.falls_back = bool(s["two_pass"]) or s["layer_max"] != AUTO
        self.latest = (s["layer_max"] if s["layer_max"] != AUTO else
                       layers - 1 if s["two_pass"] else max(layers - 2, 0))
        self.prompt = None
        self.earliest = s["layer_min"] if s["layer_min"] != AUTO else layers // 3

    def budget(self, n):
        s = self.s
        return min(s["propagate_tokens"] or share_of(n, s["propagate"]), n)

    def keeps(self, n):
        """How many of n tokens."""
        s = self.s
        return n if s["two_pass"] else min(s["keep_tokens"] or share_of(self.prompt, s["keep"]), n)

    def keep(self, scores, n):
        s, capacity = self.s, self.keeps(n)
        if s["two_pass"] or max(capacity, s["window"]) >= n:
            return None
        m = scores.shape[1]
        return [best(row, max(capacity - s["window"], 0)) + list(range(m, n)) for row in scores]

    def ratio(self, layer, k):
        """Ranks of the last layers; the union of their best; variance over layers, mean of it."""
        back = range(layer - self.observed + 1, layer + 1)
        r = np.stack([self.ranks[x] for x in back]).astype(np.float64)
        x = r[:, (r <= k).any(axis=0)]
        variance = np.mean((x - x.mean(axis=0)) ** 2) if x.size else 0.0
        if self.initial is None:
            self.initial = variance
            return 1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.float64(variance) / np.float64(self.initial))

    def step(self, layer, scores):
        s, m = self.s, scores.shape[1]
        n = m + s["window"]
        self.prompt = self.prompt or n
        keep = self.keep(scores, n)
        if self.done:
            return say(keep)
        k = min(max(self.budget(n), s["window"]) - s["window"], m)
        if self.budget(n) >= n:
            return say(keep)
        total = scores.astype(np.float64).sum(axis=0).astype(np.float32)
        order = np.argsort(-total, kind="stable")
        self.ranks[layer] = np.empty(m, np.int64)
        self.ranks[layer][order] = np.arange(1, m + 1)
        chosen = layer == s["layer"] or (s["layer"] == AUTO and layer == self.latest and
                                         self.falls_back)
        if (s["layer"] == AUTO and not chosen and self.earliest <= layer <= self.latest
                and layer + 1 >= self.observed):
            self.ratios[layer] = self.ratio(layer, k)
            chosen = self.ratios[layer] < np.float64(np.float32(s["threshold"]))
        if not chosen:
            return say(keep)
        self.done = True
        selected = sorted(order[:k].tolist()) + list(range(m, n))
        return say(keep, selected, int(bool(s["two_pass"])), 1)


ASL = {"keep": 1.0, "keep_tokens": 0, "propagate": 1.0, "propagate_tokens": 64, "window": 16,
       "layer": AUTO, "layer_min": AUTO, "layer_max": AUTO, "layers_observed": 4,
       "threshold": 0.3, "two_pass": 0}


def profile(vectors, top):
    """Per head: entropy, mass on the top, variance, of attention over the tokens."""
    rows = []
    for a in vectors.astype(np.float64):
        if a.sum() == 0.0:
            rows.append((0.0, 0.0, 0.0))
            continue
        a = a / a.sum()
        some = a[a > 0.0]
        rows.append((-(some * np.log(some)).sum(), np.sort(a)[::-1][:top].sum(), a.var()))
    return np.array(rows, np.float32)


def transition(measures, weights):
    """measures [layers, (H, rho, V)]; one score per layer, 0 for the first."""
    score = np.zeros(len(measures))
    if len(measures) < 2:
        return score
    change = np.diff(np.asarray(measures, np.float64) * [-1.0, 1.0, 1.0], axis=0)
    for column, weight in zip(change.T, weights):
        spread = column.max() - column.min()
        if spread > 0.0:
            score[1:] += weight * ((column - column.min()) / spread)
    return score


def highest(score, first):
    first = max(first, 1)
    if first >= len(score) or score[first:].max() <= 0.0:
        return None
    return first + int(np.argmax(score[first:]))


def calibrated_pivot(score, layer_min, layer_max):
    top = highest(score, layer_min)
    return layer_max if top is None else min(top + 1, layer_max)


def fires(measures, weights, layer_min):
    """The highest so far, scaled by what was seen so far, has two after it."""
    score = transition(measures, weights)
    top = highest(score, layer_min)
    return top is not None and len(score) - 1 - top >= 2


ONLINE, CALIBRATED, FIXED = 0, 1, 2  # kvf_pivot
STRUCTKV = {"keep": 0.1, "keep_tokens": 0, "propagate": 0.2, "propagate_tokens": 0, "window": 8,
            "layer": AUTO, "layer_min": 0, "layer_max": AUTO, "decay": 0.9, "mass_share": 0.1,
            "pivot": ONLINE, "block_tokens": 0}
WEIGHTS = [np.float64(np.float32(x)) for x in (0.2, 0.3, 0.5)]


class StructKv:
    """One prompt."""

    def __init__(self, s, layers, prompt):
        self.s, self.layers, self.prompt = s, layers, prompt
        self.centrality = np.zeros(prompt - s["window"], np.float32)
        self.measures, self.pivot = [], None
        self.latest = s["layer_max"] if s["layer_max"] != AUTO else max(layers - 2, 0)
        self.earliest = s["layer_min"] if s["layer_min"] != AUTO else layers // 3
        if s["layer"] != AUTO:
            self.latest = s["layer"]

    def count(self, tokens, share):
        return min(self.s[tokens] or share_of(self.prompt, self.s[share]), self.prompt)

    def choose(self, score, budget, n):
        block = self.s["block_tokens"]
        m = len(score)
        if not block:
            return None if budget >= m else best(score, budget) + list(range(m, n))
        whole = m // block
        if budget // block >= whole:
            return None
        sums = score[:whole * block].reshape(whole, block).astype(np.float64).sum(axis=1)
        kept = best(sums.astype(np.float32), budget // block)
        return [b * block + i for b in kept for i in range(block)] + list(range(whole * block, n))

    def step(self, layer, scores, measured):
        """scores [kv_heads, m]; measured [query_heads, 3] or None."""
        m = scores.shape[1]
        n = m + self.s["window"]
        saliency = (scores.astype(np.float64).sum(axis=0) / len(scores)).astype(np.float32)
        propagate, chosen = None, False
        budget = self.count("propagate_tokens", "propagate")
        if self.pivot is None and budget < m and layer <= self.latest:
            decay = np.float64(np.float32(self.s["decay"]))
            self.centrality = (decay * self.centrality + saliency).astype(np.float32)
            if measured is not None:
                self.measures.append([sum(float(x) for x in column) / len(measured)
                                      for column in measured.T])
            chosen = layer == self.latest or (
                self.s["layer"] == AUTO and fires(self.measures, WEIGHTS, self.earliest))
            if chosen:
                self.pivot = layer
                propagate = self.choose(self.centrality, budget, n)
        keep = self.choose(saliency, self.count("keep_tokens", "keep"), n)
        return say(None if keep is None else [keep] * len(scores), propagate, 0, int(chosen))
