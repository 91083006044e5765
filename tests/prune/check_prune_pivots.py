#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check ASL and StructKV, which look back over layers, against their definitions
(prune_definitions.py).

usage: check_prune_pivots.py [SEED]

Sets must be equal, ties going to the lower index. ASL's ratio of variances is checked from both
sides: a threshold a hair above it chooses the layer, one a hair below does not. Several prompts run at
once, each with its own state. At the end both run on a real cache from given queries and keys, where
only tokens at the border may differ.
"""
import math
import sys

import numpy as np

import kvferry
from check_prune import compare
from library_policy import OnCache, Policy, Tally
from prune_definitions import (
    ASL, AUTO, AVERAGE, CALIBRATED, FIXED, MAX, MEAN, STRUCTKV, WEIGHTS, Asl, StructKv, attention,
    calibrated_pivot, fires, over_group, pooled, profile, say, share_of, transition)

SCORES, PROFILE = 1, 2  # kvf_prune_needs


def exactly(what, got, wanted):
    compare(what, Tally(), got, wanted, None, {"keep": 0.0, "propagate": 0.0})


# ------------------------------------------------------------ ASL


def asl_scores(random, kind, layers, kv_heads, m):
    """[layers, kv_heads, m] float32. Order settles with depth, or something adversarial."""
    base = random.gumbel(size=m)
    settle = random.uniform(0.3, 0.9)
    out = np.empty((layers, kv_heads, m), np.float32)
    for layer in range(layers):
        noise = random.gumbel(size=(kv_heads, m)) * 3.0 * settle ** layer
        out[layer] = np.exp(base + noise - 8.0)
        if kind == 1:  # ties everywhere
            out[layer] = random.integers(0, 4, (kv_heads, m))
        elif kind == 2:  # nothing to choose from
            out[layer] = 0.25
        elif kind == 3:  # most are 0
            out[layer] *= random.random((kv_heads, m)) < 0.05
        elif kind == 4:  # the order turns round in every layer
            out[layer] = np.arange(1, m + 1)[::1 if layer % 2 else -1]
    return out


def run_asl(what, s, prompts, layers, kv_heads):
    """prompts: [layers, kv_heads, m] each. Returns their models."""
    room = max(p.shape[2] for p in prompts) + s["window"]
    policy = Policy("asl", s, (layers, kv_heads, 2 * kv_heads, room), len(prompts))
    held = policy.state_bytes
    models = [Asl(s, layers) for _ in prompts]
    rows = models[0].observed if s["layer"] == AUTO else 1
    if held > (rows + 2) * room * 4 + 64:
        sys.exit("%s: %d bytes of state" % (what, held))
    tokens = [p.shape[2] + s["window"] for p in prompts]
    count = [0]
    for layer in range(layers):
        for i, (prompt, model) in enumerate(zip(prompts, models)):
            n = prompt.shape[2] + s["window"]
            wants = policy.needs(i, layer)
            if model.done and bool(wants) != (model.keeps(tokens[i]) < tokens[i]):
                sys.exit("%s: layer %d measures %d behind the choice" % (what, layer, wants))
            if not wants and s["keep_tokens"] and not s["two_pass"] and not model.done:
                sys.exit("%s: layer %d measures nothing" % (what, layer))
            scores = prompt[layer][:, :max(tokens[i] - s["window"], 0)]
            got = policy.decide(layer, tokens[i], n, scores if wants and scores.size else None,
                                state=i)
            wanted = model.step(layer, scores)
            exactly("%s prompt %d layer %d" % (what, i, layer), got, wanted)
            ratio = model.ratios.get(layer, math.nan)
            if not (math.isclose(got.measure, ratio, rel_tol=1e-9) or math.isnan(got.measure) and math.isnan(ratio)):
                sys.exit("%s prompt %d layer %d: relative variance %r, the definition says %r" % (
                    what, i, layer, got.measure, ratio))
            count[0] += 1
            if wanted["propagate"] is not None:
                tokens[i] = len(wanted["propagate"])
                if wanted["restart"]:
                    if policy.needs(i, 0, 1):
                        sys.exit(what + ": the second pass measures")
                    again = policy.decide(0, tokens[i], n, None, turn=1, state=i)
                    exactly(what + " second pass", again, say())
    return models


def check_asl(random):
    cases, ratios = 0, 0
    for kind in range(5):
        for layers, observed in ((3, 2), (12, 4), (24, 8), (5, 8), (4, 0), (15, 0), (40, 0)):
            for extra in ({}, {"two_pass": 1, "keep_tokens": 48}, {"keep_tokens": 48}, {"keep": 0.2},
                          {"propagate_tokens": 0, "propagate": 0.25}, {"layer": layers - 2},
                          {"layer_min": 1, "layer_max": layers - 1}, {"propagate_tokens": 17},
                          {"propagate_tokens": 10**6, "keep": 0.5}, {"threshold": 1.5}):
                s = dict(ASL, layers_observed=observed, **{k: v for k, v in extra.items()})
                kv_heads = int(random.integers(1, 4))
                lengths = [1, 49, 300]
                prompts = [asl_scores(random, kind, layers, kv_heads, m) for m in lengths]
                run_asl("asl data=%d layers=%d %s" % (kind, layers, extra), s, prompts,
                        layers, kv_heads)
                cases += len(prompts)
    for _ in range(20):  # the ratio itself, between two thresholds
        layers, observed = 20, int(random.integers(2, 9))
        prompt = asl_scores(random, 0, layers, 2, 200)
        s = dict(ASL, layers_observed=observed, threshold=0.0)
        model = run_asl("asl ratios", s, [prompt], layers, 2)[0]
        for layer, ratio in model.ratios.items():
            above = np.nextafter(np.float32(ratio), np.float32(9))
            below = np.nextafter(np.float32(ratio), np.float32(0))
            for threshold in (above, below):
                run_asl("asl ratio %.9g at layer %d" % (ratio, layer),
                        dict(s, threshold=float(threshold)),
                        [prompt], layers, 2)
            ratios += 1
    print("asl: %d prompts, %d ratios from both sides" % (cases, ratios))


# ------------------------------------------------------------ StructKV


def attention_like(random, kind, layer, heads, m):
    a = np.exp(random.normal(size=(heads, m)) * (1.0 + 0.2 * layer) - 5.0)
    if kind == 1:  # ties and zeros
        a = random.integers(0, 3, (heads, m)) / 8.0
    elif kind == 2:
        a = np.full((heads, m), 0.125)
    elif kind == 3:  # one token has it all
        a = np.zeros((heads, m))
        a[:, random.integers(m)] = 8.0
    elif kind == 4:
        a = np.zeros((heads, m))
    return a.astype(np.float32)


def run_structkv(what, s, kind, layers, kv_heads, group, prompts, random):
    room = max(prompts)
    policy = Policy("structkv", s, (layers, kv_heads, kv_heads * group, room), len(prompts))
    held = policy.state_bytes
    if held > 2 * room * 4 + layers * 32 + 64:
        sys.exit("%s: %d bytes of state" % (what, held))
    models = [StructKv(s, layers, n) for n in prompts]
    tokens = list(prompts)
    for layer in range(layers):
        for i, model in enumerate(models):
            m = tokens[i] - s["window"]
            wants = policy.needs(i, layer)
            if m == 0:
                exactly(what, policy.decide(layer, tokens[i], prompts[i], None, state=i), say())
                continue
            vectors = attention_like(random, kind, layer, kv_heads * group, m)
            scores = vectors.reshape(kv_heads, group, m).mean(axis=1, dtype=np.float64)
            scores = scores.astype(np.float32)
            measured = profile(vectors, share_of(tokens[i], s["mass_share"]))
            got = policy.decide(layer, tokens[i], prompts[i], scores if wants & SCORES else None,
                                measured if wants & PROFILE else None, state=i)
            if not wants & SCORES:
                scores = np.zeros_like(scores)
            expected = model.step(layer, scores, measured if wants & PROFILE else None)
            if not wants & SCORES:
                expected["keep"] = None
            exactly("%s prompt %d layer %d" % (what, i, layer), got, expected)
            if expected["propagate"] is not None:
                tokens[i] = len(expected["propagate"])
    return models


def check_structkv(random):
    cases, pivots = 0, set()
    for kind in range(5):
        for extra in ({}, {"layer": 4}, {"pivot": FIXED, "layer": 0},
                      {"pivot": CALIBRATED, "layer": 6}, {"keep": 1.0}, {"propagate": 1.0},
                      {"keep": 1.0, "propagate": 1.0}, {"keep_tokens": 30, "propagate_tokens": 45},
                      {"block_tokens": 16}, {"block_tokens": 7, "propagate": 0.5},
                      {"block_tokens": 16, "layer": 3, "keep": 0.5}, {"layer_min": 4},
                      {"layer_max": 3}, {"decay": 0.0}, {"decay": 1.0}, {"mass_share": 0.5},
                      {"layer_min": AUTO}):
            s = dict(STRUCTKV, **extra)
            kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 5))
            prompts = [8, 9, 80, 200, 333]
            models = run_structkv("structkv data=%d %s" % (kind, extra), s, kind, 9,
                                  kv_heads, group, prompts, random)
            pivots |= {x.pivot for x in models if not extra}
            cases += len(prompts)
    if len(pivots) < 3:
        sys.exit("prompts of one batch should have different pivots: %s" % pivots)
    print("structkv: %d prompts, pivots online %s" % (cases, sorted(x for x in pivots if x)))


def check_transition(random):
    for case in range(400):
        layers = int(random.integers(1, 40))
        measures = random.normal(size=(layers, 3)) * [1.0, 0.1, 1e-6]
        if case % 4 == 1:
            measures = random.integers(0, 3, (layers, 3)).astype(np.float64)
        elif case % 4 == 2:
            measures[:, random.integers(3)] = 0.5  # one measure says nothing
        elif case % 4 == 3:
            measures = np.outer(np.arange(layers), [-1.0, 2.0, 0.25])  # none does
        measures = measures.astype(np.float32).astype(np.float64)  # as a policy gets them
        layer_min = int(random.integers(0, layers)) if case % 5 == 0 else 0
        layer_max = int(random.integers(0, layers)) if case % 7 == 0 else layers - 1
        if layer_min > layer_max:
            layer_min, layer_max = 0, layers - 1
        score = kvferry.structkv_transition(WEIGHTS, measures)
        wanted = transition(measures, WEIGHTS)
        if not np.allclose(score, wanted, rtol=1e-12, atol=1e-12):
            sys.exit("transition: %s, the definition says %s" % (score, wanted))
        pivot = kvferry.structkv_pivot(score, layer_min, layer_max)
        if pivot != calibrated_pivot(wanted, layer_min, layer_max):
            sys.exit("pivot %d of %s" % (pivot, wanted))
        policy = Policy("structkv", dict(STRUCTKV, layer_min=layer_min, layer_max=layers - 1),
                        (layers, 1, 1, 100))
        seen = [policy.decide(layer, 100, 100, np.zeros((1, 92)), row[None]).chosen
                for layer, row in enumerate(measures)]
        first = next((n - 1 for n in range(1, layers)
                      if fires(measures[:n], WEIGHTS, layer_min)), layers - 1)
        if np.flatnonzero(seen).tolist() != [first]:
            sys.exit("fires at %s, the definition says %d: %s" % (seen, first, measures))
    print("transition: 400 sequences of layers")


# ------------------------------------------------------------ on a cache


def observed(random, layer, n, window, heads, kv_heads, pool, width):
    """Queries, keys and values; scores [kv_heads, m] and profile of them by definition."""
    q, k, v = (random.normal(size=(n, h, 64)).astype(np.float32)
               for h in (heads, kv_heads, kv_heads))
    k *= 0.3 if layer < 3 else 1.2
    m = n - window
    sums = attention(q[m:].astype(np.float64), k.astype(np.float64), m)[:, :, :m].sum(axis=1)
    scores = over_group(pooled(sums, pool, width), kv_heads, MEAN)
    return (q, k, v), scores.astype(np.float32), profile(sums, share_of(n, 0.1))


def check_cache(random):
    tally, pivots = Tally(), set()
    layers, kv_heads, heads = 8, 2, 6
    for name, base, pool, extra in (
            ("structkv", STRUCTKV, MAX, {}), ("structkv", STRUCTKV, MAX, {}),
            ("structkv", STRUCTKV, MAX, {"layer": 3}),
            ("structkv", STRUCTKV, MAX, {"block_tokens": 8, "propagate": 0.5}),
            ("asl", ASL, AVERAGE, {"threshold": 0.9}), ("asl", ASL, AVERAGE, {"two_pass": 1}),
            ("asl", ASL, AVERAGE, {"keep_tokens": 48, "layer": 2})):
        n, s = 203, dict(base, **extra)
        policy = OnCache(name, dict(s, group_reduce=MEAN), (layers, kv_heads, heads, 256), 64, 64)
        policy.begin(n)
        model = StructKv(s, layers, n) if name == "structkv" else Asl(s, layers)
        tokens, layer, turn = n, 0, 0
        while layer < layers:
            data, scores, measured = observed(random, layer, tokens, s["window"], heads, kv_heads,
                                              pool, 7)
            what = "%s %s on a cache, layer %d" % (name, extra, layer)
            policy.profile = None
            got = policy.layer(layer, *data, np.arange(tokens))
            if policy.profile is not None and not np.allclose(policy.profile, measured, rtol=1e-4):
                sys.exit("%s: profile %s, the definition says %s"
                         % (what, policy.profile, measured))
            if turn:
                wanted = say()
            elif name == "structkv":
                wanted = model.step(layer, scores, measured if model.pivot is None else None)
            else:
                wanted = model.step(layer, scores)
            mean = scores.mean(axis=0)
            rank = model.centrality if name == "structkv" else mean
            if s.get("block_tokens"):  # a block counts as one
                rank, mean = (np.repeat(x[:len(x) // 8 * 8].reshape(-1, 8).sum(axis=1), 8)
                              for x in (rank, mean))
            decided = [mean] * kv_heads if name == "structkv" else scores
            compare(what, tally, got, dict(wanted, border=rank), decided,
                    {"keep": 1e-4, "propagate": 1e-4})
            if wanted["chosen"]:
                pivots.add(layer)
            tokens = tokens if wanted["propagate"] is None else len(wanted["propagate"])
            layer, turn = (0, 1) if wanted["restart"] else (layer + 1, turn)
        policy.close()
    print("on a cache: %d sets equal, %d but for the border, chosen layers %s"
          % (tally.equal, tally.border, sorted(pivots)))


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print("seed %d" % seed)
    random = np.random.default_rng(seed)
    check_transition(random)
    check_structkv(random)
    check_asl(random)
    check_cache(random)


if __name__ == "__main__":
    main()
