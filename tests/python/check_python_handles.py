#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package on the host device, with NumPy alone: when it closes, files, blocks, and settings.
"""
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest

import numpy as np

import kvferry
from python_rig import HEAD_DIM, KV_HEADS, QUERY_HEADS, Base, dense

# A child that ends as Python ends, and its parent too.
END = """
import os, signal, sys, kvferry
cache = kvferry.Cache(kvferry.Runtime(device="host"), layers=1, query_heads=2, kv_heads=1, head_dim=32,
                      tokens_max=512)
sequence = cache.sequence()
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    sys.exit(0)
sys.exit(os.waitpid(pid, 0)[1])
"""


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

    def child(self, body):
        """The exit status of a forked child that runs `body`; 14 if it hangs."""
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            code = 1
            try:
                body()
                code = 0
            except SystemExit: # Python's own end, with all that it collects
                raise
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        return os.waitpid(pid, 0)[1]

    def test_a_child_finds_its_handles_dead(self):
        cache, stream = self.cache(), kvferry.Stream(self.runtime)
        sequence, rows = cache.sequence(), self.qkv(64)
        cache.prefill(sequence, *rows)
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        save = sequence.save(os.path.join(folder, "a.kvs")) # its thread is not in a child
        holds, ends = threading.Event(), threading.Event()

        def hold(): # a lock that no thread of a child gives back
            with cache._node.lock:
                holds.set()
                ends.wait()

        def refuse():
            one = self.qkv(1)
            for call in (lambda: cache.decode(sequence, *one), lambda: len(sequence), cache.sequence,
                         cache.stats, stream.wait, self.runtime.describe, lambda: self.runtime.memory(64),
                         lambda: kvferry.Stream(self.runtime), lambda: sequence.fork()):
                with self.assertRaisesRegex(kvferry.Invalid, "fork"):
                    call()

        def close():
            for handle in (save, stream, sequence, cache, self.runtime):
                handle.close()
                self.assertTrue(handle.closed)

        def collect():
            nonlocal cache, stream, sequence, save
            cache = stream = sequence = save = self.runtime = None
            gc.collect()

        def leave():
            with cache, self.runtime:
                pass

        def own():
            with kvferry.Runtime(device="host", threads=1) as runtime:
                kvferry.Cache(runtime, layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS,
                              head_dim=HEAD_DIM, tokens_max=1024, dtype="fp32").close()

        thread = threading.Thread(target=hold)
        thread.start()
        holds.wait()
        try:
            for body in (refuse, close, collect, leave, own):
                with self.subTest(body.__name__):
                    self.assertEqual(self.child(body), 0)
        finally:
            ends.set()
            thread.join()
        save.wait()
        cache.decode(sequence, *self.qkv(1))
        self.assertEqual(len(sequence), 65)

    def test_a_process_of_multiprocessing_ends(self):
        cache = self.cache()
        cache.prefill(cache.sequence(), *self.qkv(64))
        process = multiprocessing.get_context("fork").Process(target=cache.close)
        process.start()
        process.join(30)
        self.addCleanup(process.kill)
        self.assertEqual(process.exitcode, 0)
        # Python's own end: whatever is left is collected.
        code = subprocess.run([sys.executable, "-c", END], timeout=60, check=False).returncode
        self.assertEqual(code, 0)

    def test_a_cache_closes_while_work_is_under_way(self):
        cache, stream = self.cache(prefill_chunk_max=1024), kvferry.Stream(self.runtime)
        cache.prefill(cache.sequence(), *self.qkv(1000), stream=stream)
        cache.close()
        stream.wait()

    def slow(self):
        """A stream whose work takes a while, and what that appends to at its end."""
        stream, done = kvferry.Stream(self.runtime), []
        stream.launch(lambda _: (time.sleep(0.1), done.append(True)))
        return stream, done

    def test_blocks_close_behind_the_work_that_is_under_way(self):
        blocks = kvferry.Blocks(self.runtime, block_count=4, layers=1, query_heads=2, kv_heads=1,
                                head_dim=32, tokens_max=64, budget_tokens=256)
        _, done = self.slow()
        blocks.close()
        self.assertEqual(done, [True])

    def test_hidden_states_close_behind_the_work_that_is_under_way(self):
        hidden, rows = kvferry.Hidden(self.runtime, 64, 9), np.ones((9, 16), np.float32)
        stream, done = self.slow()
        hidden.put(0, rows, stream)
        hidden.close()
        self.assertEqual(done, [True])

    def test_a_pruner_closes_behind_the_work_that_is_under_way(self):
        """By itself, and with its cache: what it seeds is enqueued."""
        for closes_cache in (False, True):
            cache = self.cache(select="hybrid", budget_tokens=256)
            pruner, sequence = kvferry.Pruner(cache, "streaming", keep=0.5), cache.sequence()
            stream, done = self.slow()
            pruner.begin(sequence, 400)
            pruner.prefill(sequence, *self.qkv(400), stream=stream)
            pruner.layer(sequence, 0, stream)
            (cache if closes_cache else pruner).close()
            self.assertEqual(done, [True])

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
            back = [np.zeros_like(keys), np.zeros_like(values)]
            blocks.get(0, len(own), back[0].ctypes.data, back[1].ctypes.data, slots.ctypes.data, stream)
            self.assertEqual((back[0].tobytes(), back[1].tobytes()), (keys.tobytes(), values.tobytes()))
        with self.assertRaisesRegex(kvferry.Invalid, r"slots, or both k and v, are NULL"):
            blocks.get(0, 1, None, None, slots.ctypes.data, stream)
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

    def near_what_was_put(self, blocks, k, v, slots, stream):
        """Tokens come back near them: keys in eight bits, values in four."""
        keys, values = np.zeros_like(k), np.zeros_like(v)
        blocks.get(0, len(k), keys.ctypes.data, values.ctypes.data, slots.ctypes.data, stream, fp32=True)
        for got, put, most in ((keys, k, 0.1), (values, v, 0.4)):
            lost = np.abs(got - put).max()
            self.assertTrue(1e-4 < lost < most, lost)

    def test_quantized_pages(self):
        """A step and a chunk attend to the same tokens, which are near those that were put, and a block
        takes less host memory."""
        shape = dict(block_count=8, layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                     tokens_max=256, dtype="fp32", budget_tokens=256)
        blocks, stream = kvferry.Blocks(self.runtime, pages="k8v4", **shape), kvferry.Stream(self.runtime)
        self.assertEqual(blocks.settings.pages, kvferry.Pages.K8V4)
        codes = np.zeros((8, blocks.plan.code_bytes), np.uint8)
        blocks.bind(0, codes.ctypes.data)
        ids, lengths = np.array([[5, 2, 7, 0]], np.int32), np.array([110], np.int32)
        slots = ids[0][np.arange(110) // 32].astype(np.int64) * 32 + np.arange(110) % 32
        k, v, q = self.rows(110, KV_HEADS), self.rows(110, KV_HEADS), self.rows(1, QUERY_HEADS)
        step, chunk = self.rows(1, QUERY_HEADS), self.rows(1, QUERY_HEADS)
        blocks.put(0, 110, k.ctypes.data, v.ctypes.data, slots.ctypes.data, stream)
        self.near_what_was_put(blocks, k, v, slots, stream)
        blocks.decode(0, 1, (ids.ctypes.data, 4), lengths.ctypes.data, q.ctypes.data, step.ctypes.data, stream)
        blocks.extend(0, (ids.ctypes.data, 4), lengths.ctypes.data, [0, 1], [109], q.ctypes.data,
                      chunk.ctypes.data, stream)
        stream.wait()
        self.close_to(step, chunk)
        lost = np.abs(step - dense(q, k, v)).max()
        self.assertTrue(1e-4 < lost < 0.2, lost)
        exact, quantized = (kvferry.Blocks.plan_for(self.runtime, pages=pages, **dict(shape, block_count=4096)).host_bytes
                         for pages in ("bf16", "k8v4"))
        self.assertGreater(exact, 3.9 * quantized) # in bf16 half of that

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
                (r"layer_windows has shape \(2,\): it must have a number for each of 1 layers",
                 dict(head_mask=[[1, 0]], layer_windows=[8, 9])),
                (r"layer_windows\[0\] = 0: must be from 1", dict(head_mask=[[1, 0]], layer_windows=[0])),
                ("preset = fast: must be one of default, prkv", dict(preset="fast"))):
            with self.assertRaisesRegex(kvferry.Invalid, text):
                self.cache(**settings)
        with self.assertRaises(ValueError):
            kvferry.Runtime(device="abacus")

    def test_windows_of_layers(self):
        """Each layer of streaming heads takes room by its own window."""
        shape = dict(layers=2, query_heads=2, kv_heads=1, head_dim=64, tokens_max=4096, dtype="fp32",
                     head_mask=[[0], [0]], streaming_sink=0)
        short, mixed, long = (kvferry.Cache.plan_for(self.runtime, layer_windows=w, **shape).device_kv_bytes
                              for w in ([33, 33], [33, 1025], [1025, 1025]))
        self.assertEqual(long - short, 2 * (mixed - short))
        self.assertEqual(mixed - short, (1025 - 33) * 2 * 64 * 4)
        same = kvferry.Cache.plan_for(self.runtime, streaming_recent=33, **shape)
        self.assertEqual(same.device_kv_bytes, short)

    def test_settings_arrive(self):
        cache = self.cache(preset="prkv", budget_tokens=np.int64(256), static_ratio="auto",
                           digest=kvferry.Digest.MINMAX, phase_times=1, head_mask=[[1, 0]])
        got = cache.settings
        self.assertEqual((got.page_size, got.budget_tokens, got.static_ratio, got.phase_times),
                         (32, 256, -1.0, 1))
        self.assertEqual(cache.plan.as_dict(), kvferry.Cache.plan_for(
            self.runtime, layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            tokens_max=1024, dtype="fp32", preset="prkv", budget_tokens=256, static_ratio="auto",
            digest="minmax", phase_times=1, head_mask=[[1, 0]]).as_dict())
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
