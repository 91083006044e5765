#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package on the host device, with NumPy alone: what it computes, what it refuses, when it
closes. Tensors of torch are tried where torch can be imported.
"""
import errno
import gc
import os
import pathlib
import sys
import tempfile
import threading
import unittest

import numpy as np

import kvferry

QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
GROUP = QUERY_HEADS // KV_HEADS


def dense(q, k, v):
    """Causal attention of the last tokens, q [t, query_heads, d] over k, v [n, kv_heads, d]."""
    k, v = (np.repeat(a.astype(np.float64), GROUP, axis=1) for a in (k, v))
    logits = np.einsum("thd,shd->hts", q.astype(np.float64), k) / np.sqrt(HEAD_DIM)
    n, t = len(k), len(q)
    logits[:, np.arange(n)[None, :] > np.arange(n - t, n)[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


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


class Attention(Base):
    def test_full_budget_is_dense_attention(self):
        cache = self.cache(select="full", prefill_chunk_max=100)
        sequence = cache.sequence()
        q, k, v = self.qkv(330)
        self.close_to(cache.prefill(sequence, q, k, v), dense(q, k, v))
        for _ in range(3):
            new = self.qkv(1)
            k, v = np.concatenate([k, new[1]]), np.concatenate([v, new[2]])
            lse = np.zeros((1, QUERY_HEADS), np.float32)
            self.close_to(cache.decode(sequence, *new, lse=lse), dense(new[0], k, v))
            logits = np.einsum("hd,shd->hs", new[0][0], np.repeat(k, GROUP, 1)) / np.sqrt(HEAD_DIM)
            self.close_to(lse[0], np.log(np.exp(logits).sum(-1)), 1e-4)
        self.assertEqual(len(sequence), 333)

    def test_default_budget_finds_a_needle(self):
        cache = self.cache(tokens_max=4096, budget_tokens=256)
        sequence = cache.sequence()
        _, k, v = self.qkv(3000)
        needle = self.rng.choice([-1.0, 1.0], HEAD_DIM).astype(np.float32)
        k[777], v[777] = 8 * needle, 5
        cache.prefill(sequence, None, k, v)
        q = np.tile(8 * needle, (1, QUERY_HEADS, 1))
        out = cache.decode(sequence, q, *self.qkv(1)[1:])
        self.close_to(out, np.full_like(out, 5), 1e-3)
        stats = cache.stats()
        self.assertLessEqual(stats.tokens_attended, 256 * KV_HEADS)

    def test_several_tokens_are_as_many_calls(self):
        cache = self.cache(sequences_max=4, tokens_per_step_max=5, budget_tokens=160)
        pairs = [[cache.sequence(), cache.sequence()] for _ in range(2)]
        for sequence, other in pairs:
            prompt = self.qkv(300)
            cache.prefill(sequence, *prompt)
            cache.prefill(other, *prompt)
        tokens = [5, 2]
        q, k, v = self.qkv(7)
        out = cache.decode([pair[0] for pair in pairs], q, k, v, tokens=tokens)
        row = 0
        for (_, other), count in zip(pairs, tokens):
            for _ in range(count):
                one = [a[row:row + 1] for a in (q, k, v)]
                np.testing.assert_array_equal(cache.decode(other, *one)[0], out[row])
                row += 1
        pairs[0][0].truncate(301)
        self.assertEqual([len(pair[0]) for pair in pairs], [301, 302])
        with self.assertRaisesRegex(kvferry.Invalid, "tokens_per_step_max = 5"):
            cache.decode(pairs[0][0], *self.qkv(6), tokens=[6])
        with self.assertRaisesRegex(kvferry.Invalid, "tokens has shape"):
            cache.decode(pairs[0][0], *self.qkv(6), tokens=[3, 3])

    def test_fork_goes_on_alone(self):
        cache = self.cache(sequences_max=2, select="full")
        first = cache.sequence()
        q, k, v = self.qkv(200)
        cache.prefill(first, q, k, v)
        second = first.fork()
        a, b = self.qkv(1), self.qkv(1)
        for sequence, new in ((first, a), (second, b)):
            wanted = dense(new[0], np.concatenate([k, new[1]]), np.concatenate([v, new[2]]))
            self.close_to(cache.decode(sequence, *new), wanted)
        with self.assertRaises(kvferry.Full):
            first.fork()
        second.close()
        first.fork().close()

    def test_a_saved_sequence_goes_on_bit_for_bit(self):
        parts = {part["name"]: part["present"] for part in self.runtime.describe()["parts"]}
        if not parts["xxHash"]:
            self.skipTest("a build without xxHash saves nothing")
        settings = dict(budget_tokens=128, select="hybrid", sequences_max=2, refresh_interval=3)
        cache, other = self.cache(**settings), self.cache(**settings)
        sequence = cache.sequence()
        cache.prefill(sequence, *self.qkv(300))
        steps = [self.qkv(1) for _ in range(8)]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "sequence"
            save = sequence.save(path, model="a model", note=b"ids")
            wanted = [cache.decode(sequence, *step) for step in steps]
            save.wait()
            self.assertTrue(save.is_done)
            row, note = kvferry.saved(self.runtime, path, verify=True)
            self.assertEqual((row.tokens, row.model, note), (300, b"a model", b"ids"))
            restored = other.restore(path, "a model")
            for step, out in zip(steps, wanted):
                np.testing.assert_array_equal(other.decode(restored, *step), out)
            with self.assertRaisesRegex(kvferry.Invalid, "another"):
                other.restore(path, "another")
            with self.assertRaises(kvferry.Error) as caught:
                sequence.save(pathlib.Path(folder) / "none" / "file").wait()
            self.assertEqual(caught.exception.foreign, errno.ENOENT)

    def test_tokens_are_taken_back(self):
        cache = self.cache()
        sequence = cache.sequence()
        kept, dropped = self.qkv(300), self.qkv(40)
        cache.prefill(sequence, *kept)
        cache.prefill(sequence, *dropped)
        sequence.truncate(300)
        self.assertEqual(len(sequence), 300)
        token, other = self.qkv(1), self.cache()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "sequence"
            sequence.save(path).wait()
            restored = other.restore(path)
        got = cache.decode(sequence, *token)
        np.testing.assert_array_equal(got, other.decode(restored, *token))
        sequence.truncate(0)
        cache.prefill(sequence, *kept)
        np.testing.assert_array_equal(got, cache.decode(sequence, *token))
        with self.assertRaisesRegex(kvferry.Invalid, "the sequence ends at position 301"):
            sequence.truncate(302)
        with self.assertRaisesRegex(kvferry.Invalid, "tokens = -1"):
            sequence.truncate(-1)

    def test_batch_of_different_lengths_equals_single_runs(self):
        alone, together = self.cache(), self.cache(sequences_max=3)
        prompts = [self.qkv(n) for n in (40, 300, 131)]
        tokens = self.qkv(3)
        sequences = [together.sequence() for _ in prompts]
        for sequence, prompt in zip(sequences, prompts):
            together.prefill(sequence, *prompt)
        out = together.decode(sequences, *tokens)
        for i, prompt in enumerate(prompts):
            with alone.sequence() as sequence:
                alone.prefill(sequence, *prompt)
                one = alone.decode(sequence, *(a[i] for a in tokens)) # without the batch dimension
                self.assertEqual(one.shape, (QUERY_HEADS, HEAD_DIM))
                np.testing.assert_array_equal(one, out[i])
        self.assertEqual([len(s) for s in sequences], [41, 301, 132])

    def test_a_stream_waits_when_told(self):
        cache, stream = self.cache(select="full"), kvferry.Stream(self.runtime)
        q, k, v = self.qkv(64)
        sequence = cache.sequence()
        order = []
        stream.launch(lambda task: order.append(task), 3)
        out = cache.prefill(sequence, q.copy(), k.copy(), v.copy(), stream=stream) # kept alive
        gc.collect()
        stream.wait()
        self.close_to(out, dense(q, k, v))
        self.assertEqual(sorted(order), [0, 1, 2])

    def test_other_threads_run_while_the_library_waits(self):
        stream, passed = kvferry.Stream(self.runtime), threading.Event()
        stream.launch(lambda _: passed.wait(10) or order.append("nobody ran"))
        order = []
        threading.Timer(0.01, passed.set).start()
        stream.wait()
        self.assertEqual(order, [])

    def test_lists_then_attention_is_decode(self):
        config = dict(static_ratio=0, budget_tokens=128)
        whole, halves = self.cache(**config), self.cache(**config)
        prompt, token = self.qkv(700), self.qkv(1)
        a, b = whole.sequence(), halves.sequence()
        whole.prefill(a, *prompt)
        halves.prefill(b, *prompt)
        lists = halves.select_pages(b, *token, halves.page_lists())
        self.assertTrue((np.diff(lists.indptr) > 0).all())
        self.close_to(halves.attend_pages(b, token[0], lists), whole.decode(a, *token))
        self.assertGreater(b.page_address(0), 0)
        self.assertEqual(b.position(700), 700)

    def test_positions(self):
        cache = self.cache(select="full")
        sequence = cache.sequence()
        cache.prefill(sequence, *self.qkv(4), positions=[0, 2, 5, 9])
        cache.decode(sequence, *self.qkv(1), positions=[20])
        self.assertEqual([sequence.position(i) for i in range(5)], [0, 2, 5, 9, 20])


class Policies(Base):
    def decode(self, tokens=5, **settings):
        self.rng = np.random.default_rng(4)
        cache = self.cache(static_ratio=0, budget_tokens=128, **settings)
        sequence = cache.sequence()
        cache.prefill(sequence, *self.qkv(600))
        return np.concatenate([cache.decode(sequence, *self.qkv(1)) for _ in range(tokens)])

    def test_best_pages_in_python_is_dynamic(self):
        seen = []

        def best(view):
            seen.append((view.layer, view.kv_head))
            count = min(view.pages_max, int((view.scores > -np.inf).sum()))
            return np.argsort(-view.scores, kind="stable")[:count] # ties: the lower id

        np.testing.assert_array_equal(self.decode(select=best), self.decode(select="dynamic"))
        self.assertEqual(set(seen), {(0, 0), (0, 1)})

    def test_errors_of_a_policy_reach_the_caller(self):
        def broken(view):
            raise ZeroDivisionError("mine")
        with self.assertRaisesRegex(ZeroDivisionError, "mine"):
            self.decode(select=broken)
        with self.assertRaisesRegex(kvferry.Invalid, "at most .* may be chosen"):
            self.decode(select=lambda view: range(view.pages))
        with self.assertRaisesRegex(kvferry.Invalid, "select chose page -3"):
            self.decode(select=lambda view: [-3])

    def prune(self, policy, **settings):
        self.rng = np.random.default_rng(5)
        cache = self.cache(observe_window=16, select="full", prefill_chunk_max=128)
        pruner = kvferry.Pruner(cache, policy, window=16, keep=0.25, retention="evict", **settings)
        sequence = cache.sequence()
        pruner.begin(sequence, 300)
        pruner.prefill(sequence, *self.qkv(300))
        step = pruner.layer(sequence, 0)
        kept = [sequence.position(i) for i in range(len(sequence))]
        return step, kept, cache.decode(sequence, *self.qkv(1)), pruner.stats()

    def test_a_pruned_sequence_becomes_whole(self):
        cache = self.cache(layers=2, observe_window=16, select="full", prefill_chunk_max=512,
                           sequences_max=3)
        pruner = kvferry.Pruner(cache, "fastkv", window=16, keep=0.25, propagate=0.25, layer=0,
                                retention="complete")
        prompts, step = [self.qkv(300) for _ in range(2)], self.qkv(1)
        pruned, plain = cache.sequence(), cache.sequence()
        pruner.begin(pruned, 300)
        pruner.prefill(pruned, *prompts[0])
        propagated = pruner.layer(pruned, 0).propagate
        pruner.prefill(pruned, *(x[propagated] for x in prompts[1]), layer=1, positions=propagated)
        pruner.layer(pruned, 1)
        whole = pruned.complete_begin(1, 300)
        with self.assertRaisesRegex(kvferry.Invalid, "layer 1 of the whole sequence holds 0 tokens"):
            pruned.complete_end(whole)
        self.assertEqual((pruned.length(1), whole.length(0), whole.length(1)), (75, 300, 0))
        cache.prefill(whole, *prompts[1], layer=1)
        pruned.complete_end(whole)
        self.assertTrue(whole.closed)
        for layer in range(2):
            cache.prefill(plain, *prompts[layer], layer=layer)
            np.testing.assert_array_equal(cache.decode(pruned, *step, layer=layer),
                                          cache.decode(plain, *step, layer=layer))

    def test_hidden_states_wait(self):
        rows = self.rng.standard_normal((9, 48)).astype(np.float32)
        plan = kvferry.Hidden.plan_for(192, 9, on_disk=True)
        self.assertEqual((plan.host_bytes, plan.disk_bytes), (9 * 192, 9 * 192))
        self.assertEqual(kvferry.Hidden.plan_for(192, 9).disk_bytes, 0)
        with tempfile.TemporaryDirectory() as folder:
            for disk_path in (None, folder):
                with kvferry.Hidden(self.runtime, 192, 9, disk_path) as hidden:
                    back = np.zeros((4, 48), np.float32)
                    hidden.put(0, rows)
                    hidden.get(3, back)
                    np.testing.assert_array_equal(back, rows[3:7])
                    self.assertEqual(os.listdir(folder), [])
                    with self.assertRaisesRegex(kvferry.Invalid, "first = 6, count = 4: there is room for 9"):
                        hidden.get(6, back)
                    with self.assertRaisesRegex(kvferry.Invalid, "rows has 100 bytes"):
                        hidden.put(0, back.reshape(-1)[:25])
        with self.assertRaisesRegex(kvferry.Error, "none: a file cannot be made there"):
            kvferry.Hidden(self.runtime, 192, 9, "none")

    def test_prune_policy_in_python_is_snapkv(self):
        def decide(view):
            count = int(view.tokens * view.settings.keep) - view.window
            best = np.argsort(-view.scores, axis=-1, kind="stable")[:, :count]
            newest = np.tile(np.arange(view.tokens - view.window, view.tokens), (view.kv_heads, 1))
            return np.concatenate([best, newest], axis=-1)

        mine = kvferry.PrunePolicy("mine", decide, needs=kvferry.PruneNeeds.SCORES)
        scores = dict(pool="max", pool_width=5, group_reduce="max", window_mean=0)
        ours, theirs = self.prune(mine, **scores), self.prune("snapkv", **scores)
        self.assertEqual(ours[0], theirs[0])
        self.assertEqual(ours[0].keep_count, 75)
        self.assertEqual(ours[1], theirs[1])
        np.testing.assert_array_equal(ours[2], theirs[2])
        self.assertEqual(ours[3].kept, 75)

    def test_prune_policy_with_everything(self):
        states = []

        def decide(view):
            states.append(view.state.copy())
            view.state[:] = 7
            return kvferry.PruneChoice(propagate=range(100, view.tokens), is_chosen=True)

        def complain(settings, shape):
            return "keep = %g: mine wants less" % settings.keep if settings.keep > 0.5 else None

        policy = kvferry.PrunePolicy("mine", decide, needs=lambda view: kvferry.PruneNeeds.NOTHING,
                                     reach=kvferry.PruneReach.PROPAGATE, state_bytes=3, check=complain)
        step = self.prune(policy)[0]
        self.assertEqual(step.propagate.tolist(), list(range(100, 300)))
        self.assertEqual(states[0].tolist(), [0, 0, 0])
        with self.assertRaisesRegex(kvferry.Invalid, "keep = 0.75: mine wants less"):
            kvferry.Pruner.check(policy, layers=1, kv_heads=2, query_heads=4, tokens_max=64, keep=0.75)

    def test_errors_of_a_prune_policy_reach_the_caller(self):
        with self.assertRaises(ZeroDivisionError):
            self.prune(kvferry.PrunePolicy("mine", lambda view: 1 // 0))
        with self.assertRaisesRegex(kvferry.Invalid, r"keep has shape \(3,\)"):
            self.prune(kvferry.PrunePolicy("mine", lambda view: [1, 2, 3]))
        with self.assertRaisesRegex(kvferry.Invalid, "policy = snap: must be one of .*snapkv"):
            kvferry.Pruner.window("snap")
        self.assertIn("fastkv", kvferry.prune_policies())
        self.assertTrue(kvferry.policy_takes("snapkv", "window"))


class Arrays(Base):
    def setUp(self):
        super().setUp()
        self.one = self.cache(select="full")
        self.sequence = self.one.sequence()
        self.token = dict(zip("qkv", self.qkv(1)))

    def refuse(self, text, **changed):
        with self.assertRaisesRegex(kvferry.Invalid, text) as caught:
            self.one.decode(self.sequence, **dict(self.token, **changed))
        self.assertEqual(caught.exception.status, kvferry.Status.INVALID)
        self.assertEqual(len(self.sequence), 0)

    def test_what_does_not_fit_is_named(self):
        q, k = self.token["q"], self.token["k"]
        self.refuse(r"q is ndarray of float64 \(1, 4, 32\): it must be float32\[1, 4, 32\]",
                    q=q.astype(np.float64))
        self.refuse(r"k is .*it must be float32\[1, 2, 32\]", k=k[:, :1])
        self.refuse("v is .*contiguous", v=np.zeros((1, 32, 2), np.float32).transpose(0, 2, 1))
        self.refuse("q is .*contiguous", q=np.zeros((1, 8, 32), np.float32)[:, ::2])
        self.refuse("out is .*writable", out=np.frombuffer(bytes(512), np.float32).reshape(1, 4, 32))
        self.refuse("k is int: it must be", k=3)
        self.refuse("k is NoneType", k=None)
        self.refuse("lse is .*float64", lse=np.zeros((1, 4)))
        self.refuse("positions has 2 numbers", positions=[1, 2])
        for wrong in (-1, 0.5, 2**32):
            self.refuse(r"positions\[0\] = %s: must be a whole number from 0" % wrong, positions=[wrong])
        self.refuse("layer = 4294967296: must be 0 to", layer=2**32)
        with self.assertRaisesRegex(kvferry.Invalid, "tokens = 4294967296: must be from 0"):
            self.sequence.truncate(2**32)
        self.refuse("k is .*float32", k=k.astype(">f4"))
        other = kvferry.Stream(kvferry.Runtime(device="host", threads=1))
        self.refuse("stream is of another runtime", stream=other)
        with self.assertRaisesRegex(kvferry.Invalid, "q has 3 tokens: it must have as many as k, 2"):
            self.one.prefill(self.sequence, self.qkv(3)[0], *self.qkv(2)[1:])
        with self.assertRaisesRegex(kvferry.Invalid, "tokens = 0"):
            self.one.prefill(self.sequence, *self.qkv(0))
        with self.assertRaisesRegex(kvferry.Error, "layer"):
            self.one.decode(self.sequence, **self.token, layer=7)

    def test_arrays_that_cannot_be_written_are_read(self):
        for array in self.token.values():
            array.flags.writeable = False
        self.close_to(self.one.decode(self.sequence, **self.token),
                      np.repeat(self.token["v"], GROUP, 1))

    def test_dlpack_goes_in_without_a_copy(self):
        class Foreign:
            def __init__(self, array):
                self.__dlpack__ = array.__dlpack__
                self.shape, self.dtype = array.shape, array.dtype

            def __dlpack__(self):
                raise AssertionError("replaced")

        out = np.empty((1, QUERY_HEADS, HEAD_DIM), np.float32)
        self.one.decode(self.sequence, out=Foreign(out),
                        **{name: Foreign(a) for name, a in self.token.items()})
        self.close_to(out, np.repeat(self.token["v"], GROUP, 1))
        before = sys.getrefcount(out)
        gc.collect()
        self.assertLessEqual(sys.getrefcount(out), before) # nobody holds it after the wait

    def test_buffers(self):
        bytes_ = 4 * QUERY_HEADS * HEAD_DIM
        with self.runtime.pinned(bytes_) as out, self.runtime.memory(bytes_) as small:
            self.one.decode(self.sequence, out=out, **self.token)
            got = out.numpy(np.float32, (QUERY_HEADS, HEAD_DIM))
            self.close_to(got, np.repeat(self.token["v"][0], GROUP, 0))
            stream = kvferry.Stream(self.runtime)
            stream.copy(small, out)
            stream.wait()
            np.testing.assert_array_equal(small.numpy(np.float32), got.ravel())
            with self.assertRaisesRegex(kvferry.Invalid, "source has 4 bytes"):
                stream.copy(small, np.zeros(1, np.float32))
            with self.assertRaisesRegex(kvferry.Invalid, "q is a Buffer of 64 bytes"):
                self.one.decode(self.sequence, **dict(self.token, q=self.runtime.memory(64)), out=out)
        with self.assertRaisesRegex(kvferry.Invalid, "this buffer is closed"):
            self.one.decode(self.sequence, **self.token, out=out)

    def test_bf16_and_fp16(self):
        def bits(array):
            return (array.view(np.uint32) >> 16).astype(np.uint16)

        for dtype, narrow in (("bf16", bits), ("fp16", lambda a: a.astype(np.float16))):
            cache = self.cache(dtype=dtype, select="full")
            sequence = cache.sequence()
            out = cache.decode(sequence, *map(narrow, self.token.values()))
            np.testing.assert_array_equal(out, np.repeat(narrow(self.token["v"]), GROUP, 1))
            with self.assertRaisesRegex(kvferry.Invalid, "q is .*float32"):
                cache.decode(sequence, *self.token.values())

    def test_torch(self):
        try:
            import torch
        except ImportError:
            self.skipTest("no torch")
        out = self.one.decode(self.sequence, *map(torch.from_numpy, self.token.values()))
        self.close_to(out.numpy(), np.repeat(self.token["v"], GROUP, 1))
        cache = self.cache(dtype=torch.bfloat16, select="full")
        narrow = [torch.from_numpy(a).bfloat16() for a in self.token.values()]
        out = cache.decode(cache.sequence(), *narrow)
        self.assertTrue(torch.equal(out, narrow[2].repeat_interleave(GROUP, 1)))
        with self.assertRaisesRegex(kvferry.Invalid, "k is .*contiguous"):
            cache.decode(cache.sequence(), narrow[0], torch.zeros(1, 32, 2).bfloat16().transpose(1, 2),
                         narrow[2])


class OnCuda(Base):
    """The CUDA device, a GPU or the emulator's, with pinned memory that NumPy sees."""

    def setUp(self):
        super().setUp()
        try:
            self.runtime = kvferry.Runtime(device="cuda", calibrate=False)
        except kvferry.Error as error:
            self.skipTest("no CUDA device: %s" % error)
        self.addCleanup(self.runtime.close)

    def pinned(self, tokens, heads):
        buffer = self.runtime.pinned(4 * tokens * heads * HEAD_DIM)
        array = buffer.numpy(np.float32, (tokens, heads, HEAD_DIM))
        array[:] = self.rng.standard_normal(array.shape)
        return buffer, array

    def test_prompt_step_and_replay_are_dense_attention(self):
        cache = self.cache(select="full", transfer="mapped")
        own = kvferry.Stream(self.runtime)
        stream, sequence = kvferry.Stream(self.runtime, own.native), cache.sequence()
        tokens = 300
        (q, q_), (k, k_), (v, v_), (out, out_) = (self.pinned(tokens, n) for n in (
            QUERY_HEADS, KV_HEADS, KV_HEADS, QUERY_HEADS))
        cache.prefill(sequence, q, k, v, out, tokens=tokens, stream=stream)
        stream.wait()
        self.close_to(out_, dense(q_, k_, v_))
        (q, q_), (k1, k1_), (v1, v1_), (out, out_) = (self.pinned(1, n) for n in (
            QUERY_HEADS, KV_HEADS, KV_HEADS, QUERY_HEADS))

        def after(steps):
            stream.wait()
            self.assertEqual(len(sequence), tokens + steps)
            self.close_to(out_, dense(q_, np.concatenate([k_] + [k1_] * steps),
                                      np.concatenate([v_] + [v1_] * steps)))

        cache.decode(sequence, q, k1, v1, out, stream=stream)
        after(1)
        cache.record_begin([sequence], stream)
        cache.decode(sequence, q, k1, v1, out, stream=stream)
        recording = cache.record_end()
        self.assertTrue(recording.is_possible)
        recording.replay(stream)
        after(2)
        with self.assertRaisesRegex(kvferry.Invalid, "q is ndarray .* on the CUDA device"):
            cache.decode(sequence, q_, k1, v1, out)
        with self.assertRaisesRegex(kvferry.Invalid, "memory of the device"):
            self.runtime.memory(64).numpy(np.float32)
        self.runtime.close()
        self.assertTrue(recording.closed)


class Handles(Base):
    def test_closing_twice_and_out_of_order(self):
        cache = self.cache()
        sequence, stream = cache.sequence(), kvferry.Stream(self.runtime)
        self.runtime.close()
        for handle in (self.runtime, cache, sequence, stream):
            self.assertTrue(handle.closed)
            handle.close()
        for call in (lambda: len(sequence), cache.sequence, stream.wait, cache.stats,
                     lambda: cache.decode(sequence, *self.qkv(1), stream=stream),
                     lambda: self.runtime.threads):
            with self.assertRaisesRegex(kvferry.Invalid, "closed"):
                call()

    def test_with_closes(self):
        with self.cache() as cache, cache.sequence() as sequence:
            self.assertFalse(sequence.closed)
        self.assertTrue(cache.closed and sequence.closed)

    def test_what_is_collected_is_closed(self):
        cache = self.cache(sequences_max=1)
        for _ in range(3): # there is room for one
            sequence = cache.sequence()
            cache.prefill(sequence, *self.qkv(64))
            del sequence
        loop = [cache.sequence()]
        loop.append(loop)
        del loop
        gc.collect()
        node = cache._node
        self.assertEqual(node.children, {})
        del cache
        gc.collect()
        self.assertIsNone(node.handle)

    def test_a_cache_closes_while_work_is_under_way(self):
        cache, stream = self.cache(prefill_chunk_max=1024), kvferry.Stream(self.runtime)
        cache.prefill(cache.sequence(), *self.qkv(1000), stream=stream)
        cache.close()
        stream.wait()

    def test_threads_share_a_cache(self):
        cache = self.cache(sequences_max=4, select="full")
        prompts = [self.qkv(20) for _ in range(4)]
        outs = [None] * 4

        def work(i):
            with cache.sequence() as sequence, kvferry.Stream(self.runtime) as stream:
                got = [cache.decode(sequence, *(a[t] for a in prompts[i]), stream=stream)
                       for t in range(20)]
                stream.wait()
                outs[i] = np.stack(got)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for out, prompt in zip(outs, prompts):
            self.close_to(out, dense(*prompt))


class Blocks(Base):
    def test_two_rows_share_blocks(self):
        blocks = kvferry.Blocks(self.runtime, block_count=16, layers=1, query_heads=QUERY_HEADS,
                                kv_heads=KV_HEADS, head_dim=HEAD_DIM, tokens_max=256, dtype="fp32",
                                sequences_max=2, budget_tokens=256)
        codes = np.zeros((16, blocks.plan.code_bytes), np.uint8)
        blocks.bind(0, codes.ctypes.data)
        stream = kvferry.Stream(self.runtime)
        ids = np.array([[7, 3, 9, 0], [7, 3, 4, 12]], np.int32) # 64 tokens are both rows'
        lengths = np.array([110, 97], np.int32)
        k, v, out = self.rows(300, KV_HEADS), self.rows(300, KV_HEADS), self.rows(2, QUERY_HEADS)
        tokens = [np.arange(110), np.r_[np.arange(64), 200:233]]
        for own, table in zip(tokens, ids):
            slots = table[np.arange(len(own)) // 32].astype(np.int64) * 32 + np.arange(len(own)) % 32
            keys, values = np.ascontiguousarray(k[own]), np.ascontiguousarray(v[own])
            blocks.put(0, len(own), keys.ctypes.data, values.ctypes.data, slots.ctypes.data, stream)
            stream.wait()
        q = self.rows(2, QUERY_HEADS)
        blocks.decode(0, 2, (ids.ctypes.data, 4), lengths.ctypes.data, q.ctypes.data,
                      out.ctypes.data, stream)
        stream.wait()
        for row, own in enumerate(tokens):
            self.close_to(out[row:row + 1], dense(q[row:row + 1], k[own], v[own]))
        blocks.extend(0, (ids.ctypes.data, 4), lengths.ctypes.data, [0, 1, 2], [109, 96],
                      q.ctypes.data, out.ctypes.data, stream)
        stream.wait()
        self.close_to(out[1:], dense(q[1:], k[tokens[1]], v[tokens[1]]))
        self.assertEqual((blocks.stats().tokens_put, blocks.stats().bad_rows), (207, 0))
        blocks.copy([(7, 1)], stream)
        codes[1] = codes[7]
        ids[0, 0] = 1
        ids[1, 0] = 16 # there is none
        blocks.decode(0, 2, (ids.ctypes.data, 4), lengths.ctypes.data, q.ctypes.data,
                      out.ctypes.data, stream)
        stream.wait()
        self.close_to(out[:1], dense(q[:1], k[tokens[0]], v[tokens[0]]))
        self.assertTrue(np.isnan(out[1]).all())
        self.assertEqual(blocks.stats().bad_rows, 1)
        blocks.reset_stats()
        self.assertEqual(blocks.stats().bad_rows, 0)
        with self.assertRaisesRegex(kvferry.Unsupported, "select = hybrid: blocks of the caller"):
            kvferry.Blocks.plan_for(self.runtime, block_count=4, layers=1, query_heads=2, kv_heads=1,
                                    head_dim=32, tokens_max=64, select="hybrid")

    def test_kinds_of_heads(self):
        """A coarse head has a mean of head_dim + 2 bytes for every 64 tokens of a block."""
        shape = dict(block_count=32, block_tokens=128, layers=2, query_heads=4, kv_heads=2, head_dim=64,
                     tokens_max=256, budget_tokens=128)
        hot, coarse = (kvferry.Blocks.plan_for(self.runtime, head_mask=mask, **shape).device_block_bytes
                       for mask in (None, [[1, 2], [2, 2]]))
        self.assertEqual(coarse - hot, 2 * (3 * (64 + 2) + 2 * 4)) # and a word per layer
        with self.assertRaisesRegex(kvferry.Invalid, "block_tokens = 96: coarse heads"):
            kvferry.Blocks.plan_for(self.runtime, head_mask=[[1, 2], [2, 2]], **dict(shape, block_tokens=96))


class Settings(Base):
    def test_errors_name_the_field(self):
        for text, settings in (
                ("budget_tokens = -1: must be a whole number from 1", dict(budget_tokens=-1)),
                ("select = best: must be hybrid, full", dict(select="best")),
                ("page_size = 3: must be", dict(page_size=3)),
                ("head_dim = 24: must be a multiple of 16", dict(head_dim=24)),
                ("dtype = int8: must be one of bf16", dict(dtype="int8")),
                ("no setting budget_token: did you mean budget_tokens", dict(budget_token=5)),
                (r"head_mask has shape \(3,\): it must be \[layers, kv_heads\] = \[1, 2\]",
                 dict(head_mask=[1, 0, 1])),
                ("preset = fast: must be one of default, prkv", dict(preset="fast"))):
            with self.assertRaisesRegex(kvferry.Invalid, text):
                self.cache(**settings)
        with self.assertRaises(ValueError):
            kvferry.Runtime(device="abacus")

    def test_settings_arrive(self):
        cache = self.cache(preset="prkv", budget_tokens=np.int64(256), static_ratio="auto",
                           digest=kvferry.Digest.MINMAX, speculate=True, head_mask=[[1, 0]])
        got = cache.settings
        self.assertEqual((got.page_size, got.budget_tokens, got.static_ratio, got.speculate),
                         (32, 256, -1.0, 1))
        self.assertEqual(cache.plan.as_dict(), kvferry.Cache.plan_for(
            self.runtime, layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            tokens_max=1024, dtype="fp32", preset="prkv", budget_tokens=256, static_ratio="auto",
            digest="minmax", speculate=True, head_mask=[[1, 0]]).as_dict())
        with cache.sequence() as sequence:
            cache.prefill(sequence, *self.qkv(64))
            cache.decode(sequence, *self.qkv(1))
        self.assertGreater(cache.footprint().footprint, 0)
        cache.stats_reset()
        self.assertEqual(cache.stats(layer=0).steps, 0)

    def test_sequences_share_the_tokens_of_the_host(self):
        shape = dict(tokens_max=256, sequences_max=4, local_tokens=32)
        whole, cache = (self.cache(**shape, **settings) for settings in ({}, {"host_tokens_max": 256}))
        self.assertEqual(whole.plan.host_kv_bytes, 4 * cache.plan.host_kv_bytes)
        first, second = cache.sequence(), cache.sequence()
        cache.prefill(first, *self.qkv(256))
        with self.assertRaisesRegex(kvferry.Full, "host_tokens_max"):
            cache.prefill(second, *self.qkv(256))
        first.close()
        cache.prefill(second, *self.qkv(256))

    def test_every_setting_is_described(self):
        for of in ("runtime", "cache", "prune", "link", "disk"):
            rows = kvferry.settings(of)
            self.assertTrue(all(row.name and row.range and row.meaning for row in rows))

    def test_machine(self):
        lines = []
        with kvferry.Runtime(device="host", threads=2, log=lambda level, line: lines.append(line)) as r:
            self.assertEqual((r.device, r.threads), (kvferry.Device.HOST, 2))
            self.assertIn("numa", str(r.describe()).lower())
            self.assertIsInstance(r.numa_nodes, list)
            r.calibrate()
            self.assertTrue(r.device_name)
            stream = kvferry.Stream(r)
            self.assertIsNone(stream.native)
            with self.assertRaises(kvferry.Unsupported):
                kvferry.Stream(r, native=8)

    def test_recording_needs_cuda(self):
        cache = self.cache()
        with self.assertRaises(kvferry.Unsupported):
            cache.record_begin([cache.sequence()], kvferry.Stream(self.runtime))

    def test_link(self):
        with kvferry.Link(self.runtime) as link:
            result, samples = link.measure(what="gather", page_bytes=4096, pages=16, repetitions=4,
                                           pool_bytes="1M", warmup=0)
        self.assertEqual(result.bytes, 16 * 4096)
        self.assertEqual(len(samples), 4)
        self.assertEqual(result.total.max_ns, samples.max())
        line = kvferry.Link.fit([1, 2, 3], [5, 7, 9], weighted=False)
        self.assertAlmostEqual(line.slope, 2)
        with self.assertRaises(kvferry.Invalid):
            kvferry.Link.fit([1, 1], [2, 3])

    def test_disk(self):
        with tempfile.TemporaryDirectory() as folder, \
                kvferry.Disk(self.runtime, folder, 16 << 20) as disk:
            self.assertEqual(os.listdir(folder), [])
            result = disk.measure(engine="preadv", direct=False, extent_bytes="16K", extents=32)
            self.assertEqual((result.bytes, result.align), (32 << 14, 1))
            with self.assertRaisesRegex(kvferry.Invalid, "extents = 2000: the file has 1024"):
                disk.measure(engine="preadv", extent_bytes="16K", extents=2000)

    def test_structkv_pivot(self):
        flat = kvferry.structkv_measure([[1, 0.5, 0.25], [3, 0.5, 0.75]])
        self.assertEqual((flat.entropy, flat.sparsity, flat.variance), (2, 0.5, 0.5))
        score = kvferry.structkv_transition([1, 1, 1], [[3, 0, 0], [3, 0, 0], [1, 1, 1], [1, 1, 1]])
        self.assertEqual(int(np.argmax(score)), 2)
        self.assertEqual(kvferry.structkv_pivot(score, 0, 3), 3)

    def test_help(self):
        for name in kvferry.__all__:
            self.assertTrue(getattr(kvferry, name).__doc__, name)
        for kind in (kvferry.Runtime, kvferry.Cache, kvferry.Sequence, kvferry.Stream, kvferry.Pruner,
                     kvferry.Recording, kvferry.Link, kvferry.Disk, kvferry.Buffer):
            for name in dir(kind):
                if not name.startswith("_"):
                    self.assertTrue(getattr(kind, name).__doc__, "%s.%s" % (kind.__name__, name))


if __name__ == "__main__":
    unittest.main()
