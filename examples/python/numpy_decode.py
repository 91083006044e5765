#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The smallest embedding in Python: a prompt goes in layer by layer, then tokens come out one by one.

A made-up model stands in for yours. Its keys come in topics of 64 neighbouring tokens, and every query
asks for one topic. Each step attends densely as well (verify_interval=1), to show how much of the true
attention was caught; leave that setting at 0 in earnest.

usage: numpy_decode.py
"""
import numpy as np

import kvferry

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 64
PROMPT_TOKENS, STEPS, TOPIC_TOKENS = 2048, 32, 64

rng = np.random.default_rng(1)
topics = rng.choice([-1.0, 1.0], size=(PROMPT_TOKENS // TOPIC_TOKENS + 1, HEAD_DIM))


def model(tokens, asked, heads):
    """float32[tokens, heads, head_dim]: every head points along the topic that is asked for."""
    rows = topics[asked] + 0.2 * rng.standard_normal((tokens, HEAD_DIM))
    return np.repeat(rows[:, None, :], heads, axis=1).astype(np.float32)


with kvferry.Runtime(device="host") as runtime:
    cache = kvferry.Cache(runtime, layers=LAYERS, query_heads=QUERY_HEADS, kv_heads=KV_HEADS,
                          head_dim=HEAD_DIM, dtype="fp32", tokens_max=PROMPT_TOKENS + STEPS,
                          verify_interval=1)
    sequence = cache.sequence()

    own = np.arange(PROMPT_TOKENS) // TOPIC_TOKENS
    for layer in range(LAYERS):
        cache.prefill(sequence, model(PROMPT_TOKENS, own, QUERY_HEADS),
                      model(PROMPT_TOKENS, own, KV_HEADS), model(PROMPT_TOKENS, own, KV_HEADS),
                      layer=layer)

    # With a stream, calls return at once; a whole step is enqueued before anybody waits.
    stream = kvferry.Stream(runtime)
    for step in range(STEPS):
        asked = np.array([step // 8])
        for layer in range(LAYERS):
            out = cache.decode(sequence, model(1, asked, QUERY_HEADS), model(1, asked, KV_HEADS),
                               model(1, asked, KV_HEADS), layer=layer, stream=stream)
        stream.wait()

    stats = cache.stats()
    print("%d tokens in the cache, %.0f attended per KV head and step" % (
        len(sequence), stats.tokens_attended / stats.steps / KV_HEADS))
    print("attention caught: %.2f%%" % (100 * stats.recall_sum / stats.verified))
    assert out.shape == (1, QUERY_HEADS, HEAD_DIM)
    assert stats.recall_sum / stats.verified > 0.9
