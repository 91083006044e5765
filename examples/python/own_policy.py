#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A selection policy of one's own: half of the pages are the newest, half have the best scores.

The same made-up tokens are decoded under three policies, and the share of the true attention that each
one caught is printed. Queries ask for old topics, so the newest pages alone catch little, and scores
catch nearly everything.

usage: own_policy.py
"""
import numpy as np

import kvferry

QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
PROMPT_TOKENS, STEPS, TOPIC_TOKENS = 4096, 16, 64


def newest_and_best(view):
    """Runs once per KV head and step, on a thread of the library, which it must not call."""
    count = min(view.pages, view.pages_max)
    newest = np.arange(view.pages - count // 2, view.pages)
    scores = view.scores.copy()
    scores[newest] = np.inf
    return np.argsort(-scores)[:count]


def recall_of(runtime, select):
    """The share of the attention that a policy caught, 0 to 1."""
    rng = np.random.default_rng(1)
    topics = rng.choice([-1.0, 1.0], size=(PROMPT_TOKENS // TOPIC_TOKENS + 1, HEAD_DIM))

    def rows(which, heads):
        return np.repeat(topics[which][:, None, :], heads, axis=1).astype(np.float32)

    with kvferry.Cache(runtime, layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS,
                       head_dim=HEAD_DIM, dtype="fp32", tokens_max=PROMPT_TOKENS + STEPS,
                       prefill_chunk_max=PROMPT_TOKENS, page_size=16, static_ratio=0, select=select,
                       verify_interval=1) as cache:
        sequence = cache.sequence()
        keys = rows(np.arange(PROMPT_TOKENS) // TOPIC_TOKENS, KV_HEADS)
        values = rng.standard_normal(keys.shape).astype(np.float32)
        cache.prefill(sequence, None, keys, values) # append only: no queries
        for step in range(STEPS):
            cache.decode(sequence, rows(np.array([step]), QUERY_HEADS), keys[-1:], values[-1:])
        stats = cache.stats()
        return stats.recall_sum / stats.verified


with kvferry.Runtime(device="host") as machine:
    print("attention caught within 512 of %d tokens" % PROMPT_TOKENS)
    caught = {name: recall_of(machine, select) for name, select in (
        ("the newest (streaming)", "streaming"), ("half newest, half best (ours)", newest_and_best),
        ("the best pages (dynamic)", "dynamic"))}
    for name, share in caught.items():
        print("  %-30s %6.2f%%" % (name, 100 * share))
    newest, ours, _ = caught.values()
    assert newest < ours and ours > 0.9
