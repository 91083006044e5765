#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check the policies that need no state against their definitions (prune_definitions.py).

usage: check_prune.py [SEED]

First from given scores (bits are the same on both sides, so every set must be equal, ties going to
the lower index; sums over heads may round), then from given queries and keys through a real cache,
where only tokens at the border may differ.
"""
import sys

import numpy as np

from library_policy import OnCache, Policy, Tally
from prune_definitions import (
    AVERAGE, LOGITS, MAX, MAXIMUM, NOTHING, POLICIES, SCORES, SUMS, WEIGHTED, measured,
    settings_of)

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
        scores = measured(name, q, k, s)
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
