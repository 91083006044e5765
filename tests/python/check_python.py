#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package on the host device, with NumPy alone: what it computes, and what it refuses.
Tensors of torch are tried where torch can be imported.
"""
import errno
import gc
import os
import pathlib
import re
import sys
import tempfile
import threading
import unittest

import numpy as np

import kvferry
from python_rig import GROUP, HEAD_DIM, KV_HEADS, QUERY_HEADS, Base, dense


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

    def test_values_narrower_than_keys(self):
        def rows(tokens, heads, width):
            return self.rng.standard_normal((tokens, heads, width)).astype(np.float32)

        cache = self.cache(select="full", head_dim=64, value_dim=32, prefill_chunk_max=100, page_size=8,
                           softmax_scale=0.2)
        sequence = cache.sequence()
        q, k, v = rows(330, QUERY_HEADS, 64), rows(330, KV_HEADS, 64), rows(330, KV_HEADS, 32)
        self.close_to(cache.prefill(sequence, q, k, v), dense(q, k, v, scale=0.2))
        new = rows(1, QUERY_HEADS, 64), rows(1, KV_HEADS, 64), rows(1, KV_HEADS, 32)
        k, v = np.concatenate([k, new[1]]), np.concatenate([v, new[2]])
        self.close_to(cache.decode(sequence, *new), dense(new[0], k, v, scale=0.2))
        lists = cache.select_pages(sequence, *new, cache.page_lists())
        pages = np.zeros((len(lists.indices), 8, 96), np.float32)
        cache.read_pages(sequence, lists, pages)
        np.testing.assert_array_equal(pages[0], np.concatenate([k[:8, 0], v[:8, 0]], 1))
        with self.assertRaisesRegex(kvferry.Invalid, r"v is .*it must be float32\[1, 2, 32\]"):
            cache.decode(sequence, new[0], new[1], new[1])

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
        with self.assertRaisesRegex(kvferry.Invalid, "the sequence ends at position 301"):
            pairs[0][0].truncate(302)
        with self.assertRaisesRegex(kvferry.Invalid, "tokens = -1"):
            pairs[0][0].truncate(-1)
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

    def test_a_selection_of_ones_own(self):
        settings = dict(budget_tokens=128, page_size=4, static_ratio=0)
        whole, given = self.cache(**settings), self.cache(**settings)
        a, b = whole.sequence(), given.sequence()
        prompt, token = self.qkv(400), self.qkv(1)
        whole.prefill(a, *prompt)
        given.prefill(b, *prompt)
        lists, most = given.page_lists(), given.select_pages_max
        ids = np.full((1, KV_HEADS, most), -1, np.int32)
        ids[..., :3] = 9, 7, 9 # and with them the pages of sink and window
        given.select_pages(b, *token, lists, page_ids=ids)
        for head in range(KV_HEADS):
            listed = lists.indices[lists.indptr[head]:lists.indptr[head + 1]]
            np.testing.assert_array_equal(listed[:3], [0, 7, 9])
            np.testing.assert_array_equal(listed[3:], range(listed[3], 101))
        out = whole.decode(a, *token, page_ids=ids)
        self.close_to(given.attend_pages(b, token[0], lists), out)
        scores = np.full((1, KV_HEADS, 10), np.nan, np.float32)
        scores[..., [7, 9]] = 1
        steps = self.qkv(1)
        np.testing.assert_array_equal(given.decode(b, *steps, page_scores=scores),
                                      whole.decode(a, *steps, page_ids=ids))
        plain = self.qkv(1) # nothing of it is left
        np.testing.assert_array_equal(given.decode(b, *plain), whole.decode(a, *plain))
        with self.assertRaisesRegex(kvferry.Invalid, "page_ids is .*int32"):
            whole.decode(a, *steps, page_ids=ids.astype(np.int64))
        with self.assertRaisesRegex(kvferry.Invalid, "both set"):
            whole.decode(a, *steps, page_ids=ids, page_scores=scores)

    def test_quantized_pages_are_read_in_exact_form(self):
        config = dict(static_ratio=0, budget_tokens=128, page_size=8)
        exact, quantized = self.cache(**config), self.cache(pages="k8v8", **config)
        prompt, token = self.qkv(700), self.qkv(1)
        for cache, most in ((exact, 0), (quantized, 0.05)):
            sequence = cache.sequence()
            cache.prefill(sequence, *prompt)
            lists = cache.select_pages(sequence, *token, cache.page_lists())
            pages = np.zeros((len(lists.indices), 8, 2, prompt[1].shape[-1]), np.float32)
            self.assertIs(cache.read_pages(sequence, lists, pages), pages)
            self.assertEqual(cache.attend_pages(sequence, token[0], lists).shape, token[0].shape)
            for head in range(len(lists.last_page_len)):
                first, end = lists.indptr[head:head + 2]
                for i in range(first, end - 1):
                    tokens = slice(lists.indices[i] * 8, lists.indices[i] * 8 + 8)
                    for x, which in ((prompt[1], 0), (prompt[2], 1)):
                        wanted = x[tokens, head][:700 - tokens.start]
                        self.assertLessEqual(np.abs(pages[i, :len(wanted), which] - wanted).max(), most)
            self.assertEqual(sequence.page_address(0) > 0, cache is exact)

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
                    with self.assertRaisesRegex(kvferry.Invalid, "states is 100 bytes long"):
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
        self.refuse("k or v is NULL", k=None)
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

    def test_text_with_a_nul_is_refused(self):
        """The library's texts end there: another file would be read, written or replaced."""
        runtime, sequence = self.runtime, self.sequence
        self.one.prefill(sequence, *self.qkv(3))
        with tempfile.TemporaryDirectory() as folder:
            victim = os.path.join(folder, "victim")
            pathlib.Path(victim).write_text("mine")
            sequence.save(os.path.join(folder, "good"), model="a").wait()
            nul = victim + "\0.kvs"
            calls = {
                "path": [lambda: sequence.save(nul), lambda: sequence.save(os.fsencode(nul)),
                         lambda: sequence.save(pathlib.Path(nul)), lambda: self.one.restore(nul),
                         lambda: kvferry.saved(runtime, os.path.join(folder, "good\0"))],
                "model": [lambda: sequence.save(victim, model="a\0b"),
                          lambda: self.one.restore(os.path.join(folder, "good"), model="a\0b")],
                "folder": [lambda: kvferry.Disk(runtime, folder + "\0/none", 1 << 20)],
                "disk_path": [lambda: kvferry.Hidden(runtime, 192, 9, folder + "\0/none"),
                              lambda: self.cache(disk_path=folder + "\0/none", host_bytes=1 << 20)],
                "device": [lambda: kvferry.Runtime(device="host\0cuda")],
                "select": [lambda: self.cache(select="full\0none")],
                "calibration_path": [lambda: kvferry.Runtime(device="host", calibration_path=nul)],
                "policy": [lambda: kvferry.Pruner(self.one, "fastkv\0")],
                "name": [lambda: kvferry.PrunePolicy("a\0b", lambda view: None)],
            }
            for name, doing in calls.items():
                for call in doing:
                    with self.assertRaisesRegex(kvferry.Invalid, name + r" = .*must have no NUL"):
                        call()
            self.assertEqual(sorted(os.listdir(folder)), ["good", "victim"])
            self.assertEqual(pathlib.Path(victim).read_text(), "mine")

    def test_names_that_are_not_utf8(self):
        """A path is bytes: it is taken as it is, and a message that quotes it is still one."""
        with tempfile.TemporaryDirectory() as folder:
            name = os.path.join(os.fsencode(folder), b"\xff\xfe")
            with self.assertRaisesRegex(kvferry.Error, "No such file or directory"):
                kvferry.saved(self.runtime, name)
            with self.assertRaisesRegex(kvferry.Error, "a file cannot be made there"):
                self.cache(disk_path=name, host_bytes=1 << 24)
            os.mkdir(name)
            self.cache(disk_path=os.fsdecode(name), host_bytes=1 << 24).close()

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

    def test_wide_tensors(self):
        wide = self.cache(dtype="fp16", tensors="fp32", static_ratio=0)
        same = self.cache(dtype="fp16", static_ratio=0)
        a, b = wide.sequence(), same.sequence()
        prompt = self.qkv(700)
        out = wide.prefill(a, *prompt)
        np.testing.assert_array_equal(out.astype(np.float16),
                                      same.prefill(b, *(x.astype(np.float16) for x in prompt)))
        out = wide.decode(a, *self.token.values())
        self.assertEqual(out.dtype, np.float32)
        np.testing.assert_array_equal(
            out.astype(np.float16), same.decode(b, *(x.astype(np.float16) for x in self.token.values())))
        with self.assertRaisesRegex(kvferry.Invalid, "q is .*float16"):
            wide.decode(a, *(x.astype(np.float16) for x in self.token.values()))
        lists = wide.select_pages(a, *self.token.values(), wide.page_lists())
        shape = (len(lists.indices), wide.settings.page_size, 2, HEAD_DIM)
        pages = wide.read_pages(a, lists, np.zeros(shape, np.float16)) # as the cache has them
        first = lists.indices[0] * wide.settings.page_size
        np.testing.assert_array_equal(pages[0, 0, 0], prompt[1][first, 0].astype(np.float16))
        with self.assertRaisesRegex(kvferry.Invalid, "out is .*float32"):
            wide.read_pages(a, lists, np.zeros(shape, np.float32))
        mixed = self.cache(dtype="fp16", tensors="fp32-queries", static_ratio=0)
        c, (q, *kv) = mixed.sequence(), prompt
        mixed.prefill(c, q, *(x.astype(np.float16) for x in kv))
        q, *kv = self.token.values()
        np.testing.assert_array_equal(mixed.decode(c, q, *(x.astype(np.float16) for x in kv)), out)
        with self.assertRaisesRegex(kvferry.Invalid, "k is .*float32"):
            mixed.decode(c, q, *kv)

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


class Installed(unittest.TestCase):
    def test_every_file_of_the_package(self):
        """An installed package has what the folder has."""
        folder = pathlib.Path(kvferry.__file__).parent
        named = re.findall(r"'(kvferry/[\w/]+\.py)'", (folder.parent / "meson.build").read_text())
        there = [str(path.relative_to(folder.parent)) for path in folder.rglob("*.py")]
        self.assertEqual(sorted(named), sorted(there))


if __name__ == "__main__":
    unittest.main()
