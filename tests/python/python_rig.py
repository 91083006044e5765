# SPDX-License-Identifier: Apache-2.0
"""Helpers of tests of the Python package: a small geometry, random rows, and dense attention by NumPy.

Knows nothing of what is tested. KVF_TEST_LOCALE in the environment is the locale that tests run in.
"""
import locale
import os
import unittest

import numpy as np

import kvferry

if "KVF_TEST_LOCALE" in os.environ:
    locale.setlocale(locale.LC_ALL, os.environ["KVF_TEST_LOCALE"])

QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
GROUP = QUERY_HEADS // KV_HEADS


def dense(q, k, v, sinks=None, cap=0.0, scale=None):
    """Causal attention of the last tokens, q [t, query_heads, d] over k and v [n, kv_heads, d], in double
    precision; sinks [query_heads] join the denominator, cap bends logits."""
    k, v = (np.repeat(a.astype(np.float64), q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    logits = np.einsum("thd,shd->hts", q.astype(np.float64), k) * (scale or q.shape[2] ** -0.5)
    if cap:
        logits = cap * np.tanh(logits / cap)
    n, t = len(k), len(q)
    logits[:, np.arange(n)[None, :] > np.arange(n - t, n)[:, None]] = -np.inf
    if sinks is not None:
        logits = np.concatenate([logits, np.broadcast_to(np.reshape(sinks, (-1, 1, 1)), (q.shape[1], t, 1))], 2)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", (weights / weights.sum(-1, keepdims=True))[:, :, :n], v)


class Base(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(20)
        self.runtime = kvferry.Runtime(device="host", threads=1)
        self.addCleanup(self.runtime.close)

    def cache(self, **settings):
        return kvferry.Cache(self.runtime, **dict(
            dict(layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                 tokens_max=1024, dtype="fp32"), **settings))

    def rows(self, tokens, heads):
        return self.rng.standard_normal((tokens, heads, HEAD_DIM)).astype(np.float32)

    def qkv(self, tokens):
        return self.rows(tokens, QUERY_HEADS), self.rows(tokens, KV_HEADS), self.rows(tokens, KV_HEADS)

    # fp32 sums of at most 1,024 terms of size 1: an error of 1e-5 is an order above rounding.
    def close_to(self, got, wanted, error=1e-5):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=error)
