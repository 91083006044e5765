#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The cost of a decode call of the Python package on top of C, in one run:

- `Cache.decode` in which a function that does nothing stands for kvf_decode: all that Python adds;
- `Cache.decode` and kvf_decode with prebuilt arguments, on a tiny cache, in turns.

usage: KVFERRY_LIBRARY=build/runtime/libkvferry.so PYTHONPATH=python bench_call.py
"""
import ctypes
import ctypes.util
import statistics
import time

import numpy as np

import kvferry
from kvferry import _cache
from kvferry.capi import DecodeArgs, lib

CALLS, ROUNDS = 4, 1000 # so few that all fit into the queue of the stream
HEADS, HEAD_DIM = 1, 16
NANOSLEEP = ctypes.cast(ctypes.CDLL(None).nanosleep, ctypes.c_void_p) # (timespec, NULL) as a task
WHILE = (ctypes.c_long * 2)(0, 500000)


def per_call(work, stream):
    """Microseconds per call to enqueue CALLS of them. The stream is busy meanwhile, so that no call
    has to wake it; the wait is not counted."""
    lib.kvf_stream_launch(stream._node.handle, NANOSLEEP, ctypes.byref(WHILE), ctypes.sizeof(WHILE), 1)
    work()
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        work()
    taken = time.perf_counter_ns() - begin
    stream.wait()
    return taken / CALLS / 1e3


def main():
    runtime = kvferry.Runtime(device="host", threads=1)
    stream = kvferry.Stream(runtime)
    caches = [kvferry.Cache(runtime, layers=1, query_heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM,
                            dtype="fp32", tokens_max=2 * CALLS * ROUNDS, select="streaming",
                            phase_times=0) for _ in range(2)]
    sequences = [cache.sequence() for cache in caches]
    q, k, v, out = (np.ones((1, HEADS, HEAD_DIM), np.float32) for _ in range(4))

    args = DecodeArgs(batch=1, sequences=sequences[1]._pointer, q=q.ctypes.data,
                           k=k.ctypes.data, v=v.ctypes.data, out=out.ctypes.data)
    handle, address, native = caches[1]._node.handle, ctypes.addressof(args), stream._node.handle
    decode, size = lib.kvf_decode_sized, ctypes.sizeof(args)
    nothing = ctypes.CDLL(ctypes.util.find_library("m")).fegetround # returns 0
    nothing.argtypes = decode.argtypes

    def whole():
        caches[0].decode(sequences[0], q, k, v, out, stream=stream)

    times = {"Python around nothing": [], "Cache.decode": [], "kvf_decode, prebuilt": []}
    for _ in range(ROUNDS):
        _cache._decode = nothing
        times["Python around nothing"].append(per_call(whole, stream))
        _cache._decode = decode
        times["Cache.decode"].append(per_call(whole, stream))
        times["kvf_decode, prebuilt"].append(per_call(lambda: decode(handle, address, size, native), stream))
    for name, taken in times.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        print("%-22s median %6.2f us, quartiles %6.2f to %.2f" % (name, middle, low, high))


if __name__ == "__main__":
    main()
