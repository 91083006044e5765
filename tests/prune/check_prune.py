#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check the policies that need no state against their published definitions, restated in NumPy.

usage: check_prune.py [SEED]

First from given scores (bits are the same on both sides, so every set must be equal, ties going to
the lower index; sums over heads may round), then from given queries and keys through a real cache,
where only tokens at the border may differ. The definitions here are written from the papers'
formulas and the conditions of their published code; none of the library's code is looked at.
"""
import math
import sys

import numpy as np

from library_policy import OnCache, Policy, Tally

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
    """[Hkv, n - W] of the last W queries."""
    w, n = s["window"], k.shape[0]
    a = attention(q[n - w:], k, n - w)[:, :, :n - w]
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
    order = sorted(range(len(score)), key=lambda j: (-score[j], j))
    return sorted(order[:count])


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


# ------------------------------------------------------------------- given scores


def score_rows(rng, kind, shape):
    """The second: sums over heads are exact, so ties between sums are ties on both sides."""
    if kind == "random":
        return rng.standard_normal(shape).astype(np.float32), False
    if kind == "positive":
        return rng.exponential(size=shape).astype(np.float32) * np.float32(1e-6), False
    if kind == "ties":
        return rng.integers(0, 4, shape).astype(np.float32) / 4, True
    if kind == "signs":
        return rng.choice([-1.0, -0.0, 0.0, 1.0], shape).astype(np.float32), True
    if kind == "zeros":
        return rng.choice([-0.0, 0.0], shape).astype(np.float32), True
    if kind == "rising":
        return np.broadcast_to(np.arange(shape[1], dtype=np.float32), shape).copy(), True
    if kind == "falling":
        return np.broadcast_to(-np.arange(shape[1], dtype=np.float32), shape).copy(), True
    return np.full(shape, 0.25, dtype=np.float32), True  # constant


KINDS = ("random", "positive", "ties", "signs", "zeros", "rising", "falling", "constant")


def compare(what, tally, got, wanted, scores, near):
    if (got.restart, got.chosen) != (wanted["restart"], wanted["chosen"]):
        sys.exit("%s: restart %d, chosen %d; the definition says %d, %d" % (
            what, got.restart, got.chosen, wanted["restart"], wanted["chosen"]))
    kept = wanted["keep"] or [None] * len(got.keep or [0])
    for h, ids in enumerate(got.keep or [None] * len(kept)):
        row = scores[h].astype(np.float64) if scores is not None else None
        tally.sets("%s, KV head %d keeps" % (what, h), ids, kept[h], row, near["keep"])
    tally.sets(what + " propagates", got.propagate, wanted["propagate"], wanted["border"],
               near["propagate"])


def given_scores(rng, tally, name, changes, layers, kv_heads, n, kind):
    define, needs, _ = POLICIES[name]
    s = settings_of(name, changes)
    policy = Policy(name, changes, (layers, kv_heads, kv_heads * 2, max(n, 4096)))
    tokens, turn = n, 0
    for layer in range(layers):
        columns = {NOTHING: 0, SCORES: tokens - s["window"], WEIGHTED: tokens - s["window"],
                   LOGITS: tokens, SUMS: tokens}[needs]
        scores, exact = None, True
        if columns > 0:
            scores, exact = score_rows(rng, kind, (kv_heads, columns))
        view = {"layer": layer, "layers": layers, "tokens": tokens, "prompt": n, "turn": turn,
                "kv_heads": kv_heads}
        got = policy.decide(layer, tokens, n, scores, turn=turn)
        near = {"keep": 0.0, "propagate": 0.0 if exact else 1e-6}
        if needs == LOGITS and not (exact and kind in ("ties", "signs", "zeros", "constant")):
            near["propagate"] = 1e-5
        what = "%s %s n=%d layers=%d %s layer %d" % (name, changes, n, layers, kind, layer)
        compare(what, tally, got, define(s, view, scores), scores, near)
        if got.propagate is not None:
            tokens = len(got.propagate)
        if got.restart:
            break


def lengths(rng, window):
    edges = [window + 1, window + 2, 2 * window + 1, 101, 199, 200, 201, 203, 204, 260, 640]
    return [n for n in edges if n > 0] + [int(n) for n in rng.integers(window + 1, 700, 4)]


def check_given(rng, tally):
    for name, changes in [
            ("full", {}), ("streaming", {}), ("streaming", {"keep_tokens": 40}), ("h2o", {}),
            ("h2o", {"keep": 0.3, "recent_share": 0.25}), ("h2o", {"recent_share": 0}),
            ("h2o", {"sink_tokens": 4}), ("h2o", {"sink_tokens": 3, "recent_share": 0.8}),
            ("snapkv", {"keep": 0.5}), ("snapkv", {"keep_tokens": 108}), ("snapkv", {"keep": 1}),
            ("pyramidkv", {"keep_tokens": 108}), ("pyramidkv", {"keep": 0.3}),
            ("pyramidkv", {"keep_tokens": 64, "beta": 2}), ("pyramidinfer", {}),
            ("pyramidinfer", {"propagate": 0.5}), ("pyramidinfer", {"propagate": 1}),
            ("gemfilter", {}), ("gemfilter", {"layer": 0, "pool": MAX}),
            ("gemfilter", {"keep_tokens": 100}), ("fastkv", {}), ("fastkv", {"propagate": 1}),
            ("fastkv", {"keep": 0.3, "propagate": 0.3}), ("fastkv", {"keep": 1, "propagate": 1}),
            ("fastkv", {"keep": 0.4, "propagate": 0.2}), ("fastkv", {"layer": 0}),
            ("fastkv", {"keep": 1}), ("fastkv", {"keep_tokens": 200, "propagate_tokens": 100}),
            ("fastkv", {"keep_tokens": 60, "propagate_tokens": 200}),
            ("fastkv", {"propagate_tokens": 101})]:
        s = settings_of(name, changes)
        least = max(s["window"], s["sink_tokens"] + 1, 1)
        for n in lengths(rng, s["window"]):
            # Shorter ones are refused before a policy sees them.
            if any(int(n * s[share]) < least for share in ("keep", "propagate")
                   if not s[share + "_tokens"]):
                continue
            kind = KINDS[int(rng.integers(len(KINDS)))]
            for k in dict.fromkeys((kind, "ties", "random")):
                given_scores(rng, tally, name, changes, int(rng.integers(1, 6)),
                             int(rng.integers(1, 4)), n, k)


def check_counts(rng, tally):
    """Shares of n as Python's int(n * share), for every percent."""
    for percent in range(1, 101):
        share = percent / 100
        policy = Policy("snapkv", {"keep": share, "window": 1}, (1, 1, 1, 100000))
        for n in [10, 20, 50, 70, 90, 100] + [int(x) for x in rng.integers(2, 100000, 2)]:
            got = policy.decide(0, n, n, np.zeros((1, n - 1), dtype=np.float32))
            count = n if got.keep is None else len(got.keep[0])
            if count != max(int(n * share), 1):
                sys.exit("%g of %d tokens: %d, Python says %d" % (share, n, count, int(n * share)))
            tally.equal += 1


# ----------------------------------------------------------- given queries and keys

HEAD_DIM = 64


def tensors(rng, kind, tokens, heads, kv_heads):
    q = rng.standard_normal((tokens, heads, HEAD_DIM)).astype(np.float32) * np.float32(1.5)
    k = rng.standard_normal((tokens, kv_heads, HEAD_DIM)).astype(np.float32)
    v = rng.standard_normal((tokens, kv_heads, HEAD_DIM)).astype(np.float32)
    if kind == "same keys":
        k[:] = k[0]
    if kind == "few keys":
        k = k[rng.integers(0, 5, tokens)]
    if kind == "zero queries":
        q[:] = 0
    return q, k, v


def given_tensors(rng, tally, name, changes, shape, n, kind):
    define, needs, _ = POLICIES[name]
    s = settings_of(name, changes)
    layers, kv_heads, heads = shape
    policy = OnCache(name, changes, (layers, kv_heads, heads, 512), HEAD_DIM, 96)
    policy.begin(n)
    positions = np.arange(n)
    for layer in range(layers):
        tokens = len(positions)
        q, k, v = tensors(rng, kind, tokens, heads, kv_heads)
        got = policy.layer(layer, q, k, v, positions)
        measure = {NOTHING: lambda *_: None, SCORES: window_scores, LOGITS: last_logits,
                   WEIGHTED: lambda *a: window_scores(*a, is_weighted=True),
                   SUMS: all_query_sums}[needs]
        scores = measure(q.astype(np.float64), k.astype(np.float64), s)
        view = {"layer": layer, "layers": layers, "tokens": tokens, "prompt": n, "turn": 0,
                "kv_heads": kv_heads}
        what = "%s %s n=%d %s layer %d, through a cache" % (name, changes, n, kind, layer)
        # fp32 sums of up to n terms against fp64 ones; raw products may cancel.
        near = {"keep": 2e-5, "propagate": 1e-3 if needs == LOGITS else 2e-5}
        compare(what, tally, got, define(s, view, scores), scores, near)
        if got.restart:
            break
        if got.propagate is not None:
            positions = positions[np.array(got.propagate)]
    policy.close()


def check_tensors(rng, tally):
    cases = [("full", {}), ("streaming", {}), ("h2o", {}), ("snapkv", {"keep": 0.4}),
             ("snapkv", {"keep": 0.5, "group_reduce": MAXIMUM, "window": 16}),
             ("pyramidkv", {}), ("pyramidkv", {"keep_tokens": 64, "retention": 1}),
             ("pyramidinfer", {}), ("gemfilter", {}), ("fastkv", {}),
             ("fastkv", {"retention": 1, "keep": 0.2, "propagate": 0.5}),
             ("fastkv", {"pool": AVERAGE, "propagate": 1})]
    for name, changes in cases:
        for kind in ("random", "same keys", "few keys", "zero queries"):
            n = int(rng.integers(200, 400))
            given_tensors(rng, tally, name, changes, (3, 2, 4), n, kind)
        given_tensors(rng, tally, name, changes, (2, 1, 3), 161, "random")


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 20240417
    print("check_prune: seed %d" % seed)
    rng = np.random.default_rng(seed)
    for what, check in (("given scores", check_given), ("shares", check_counts),
                        ("given queries and keys", check_tensors)):
        tally = Tally()
        check(rng, tally)
        print("%s: %d sets equal, %d differ at the border" % (what, tally.equal, tally.border))
        if tally.equal < 100 or tally.border > tally.equal // 20:
            sys.exit(what + ": too few were equal to say anything")


if __name__ == "__main__":
    main()
