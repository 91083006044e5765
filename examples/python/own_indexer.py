#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An indexer of one's own: it says which pages a decode step attends to, with arrays and no policy.

The same made-up tokens are decoded four times. The library selects pages by its codes, two bits
per channel. An indexer projects keys to 32 random directions and scores pages by their best
token. A second one knows all keys and chooses as the policy "oracle" does, which must give the same
output to the bit: a page has one token here, so pages are tokens.

usage: own_indexer.py
"""
import numpy as np

import kvferry

QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
GROUP = QUERY_HEADS // KV_HEADS
PROMPT, STEPS, DIRECTIONS = 2048, 16, 32
SETTINGS = dict(layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="fp32",
                tokens_max=PROMPT + STEPS, page_size=1, budget_tokens=256, verify_interval=1)

rng = np.random.default_rng(1)
keys, values = (rng.standard_normal((PROMPT + STEPS, KV_HEADS, HEAD_DIM)).astype(np.float32)
                for _ in range(2))
queries = 2 * rng.standard_normal((STEPS, QUERY_HEADS, HEAD_DIM)).astype(np.float32)
projection = rng.standard_normal((HEAD_DIM, DIRECTIONS)).astype(np.float32)
projected = keys @ projection # an indexer keeps these beside the cache, and nothing else


def logits(q, k):
    """[kv_heads, group, tokens] of one step."""
    return np.einsum("hgd,thd->hgt", q.reshape(KV_HEADS, GROUP, -1), k)


def by_projections(q, tokens):
    """A score for each page and KV head: the best of the group, of DIRECTIONS numbers a key."""
    return logits(q @ projection, projected[:tokens]).max(1)


def as_the_oracle(q, tokens):
    """The pages with the most attention, averaged over the group, the best first."""
    x = logits(q.astype(np.float64), keys[:tokens]) / np.sqrt(HEAD_DIM)
    weights = np.exp(x - x.max(-1, keepdims=True))
    mean = (weights / weights.sum(-1, keepdims=True)).mean(1)
    return np.argsort(-mean, axis=-1, kind="stable")


def run(runtime, select="dynamic", **indexer):
    """Outputs of all steps, and the share of the attention that was caught."""
    with kvferry.Cache(runtime, select=select, **SETTINGS) as cache:
        sequence, out = cache.sequence(), []
        cache.prefill(sequence, None, keys[:PROMPT], values[:PROMPT]) # append only: no queries
        for step in range(STEPS):
            token, now = PROMPT + step, slice(PROMPT + step, PROMPT + step + 1)
            given = {name: np.ascontiguousarray(choose(queries[step], token + 1)[None], dtype)
                     for name, (choose, dtype) in indexer.items()}
            out.append(cache.decode(sequence, queries[step:step + 1], keys[now], values[now], **given))
        stats = cache.stats()
        return np.concatenate(out), stats.recall_sum / stats.verified


with kvferry.Runtime(device="host") as machine:
    results = {
        "the library's codes (dynamic)": run(machine),
        "random projections (ours)": run(machine, page_scores=(by_projections, np.float32)),
        "the oracle": run(machine, select="oracle"),
        "as the oracle (ours)": run(machine, page_ids=(as_the_oracle, np.int32)),
    }
    print("attention caught within %d of %d tokens" % (SETTINGS["budget_tokens"], PROMPT))
    for name, (_, share) in results.items():
        print("  %-30s %6.2f%%" % (name, 100 * share))
    codes, ours, oracle, same = results.values()
    assert np.array_equal(oracle[0], same[0]), "what the oracle chooses has the oracle's bits"
    assert not np.array_equal(codes[0], ours[0]) and ours[1] < codes[1] < oracle[1]
