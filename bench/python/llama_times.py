# SPDX-License-Identifier: Apache-2.0
"""Times of steps and prompts in one build of llama.cpp: a process of bench_llama.py.

usage: llama_times.py FOLDER MODEL KIND DEPTH STEPS [host]

Without steps, STEPS 0, it is the prompt of so many tokens that is timed, in micro batches of 512. With `host` the
KV cache is in host memory, whatever computes layers.

The KV cache is filled from a state that was made longer, because a prompt of that length would take hours. Prints
JSON: seconds of every step, of the clock and of the process's threads, and MiB that are resident at the end.
"""
import json
import os
import re
import struct
import sys
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "python"))
import llama_api # pylint: disable=wrong-import-position

SEED = 256 # tokens that are computed
WARM = 4   # steps before those that count: the first one brings all tokens


def longer(state, cells, wanted, random):
    """A state of a sequence with so many cells; keys and values of its own, drawn again."""
    at = state.index(struct.pack("<II", 1, cells)) + 8 # one stream
    size = 8 + 4 * struct.unpack_from("<I", state, at + 4)[0]
    rest = bytes(state[at + 8:at + size])
    ids = struct.unpack_from("<I", state, at + 4)[0]
    out = [bytes(state[:at - 4]), struct.pack("<I", wanted)]
    out += [struct.pack("<iI", cell, ids) + rest for cell in range(wanted)]
    at += cells * size
    layers = struct.unpack_from("<I", state, at + 4)[0]
    begin, at = at, at + 8
    while not struct.unpack_from("<i", state, at)[0]: # what newer versions say more, before the first type
        at += 4
    out.append(bytes(state[begin:at]))
    drawn = np.concatenate([np.arange(cells), random.integers(0, cells, wanted - cells)])
    for _ in range(2 * layers):
        row = struct.unpack_from("<Q", state, at + 4)[0]
        rows = np.frombuffer(state, np.uint8, row * cells, at + 12).reshape(cells, row)
        out += [bytes(state[at:at + 12]), rows[drawn].tobytes()]
        at += 12 + row * cells
    return bytearray(b"".join([*out, bytes(state[at:])]))


def timed(call):
    """Seconds that a call takes: of the clock, and of the process's threads."""
    begin, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - used


def steps_after(model, context, random, depth, steps):
    """Times of the steps after so many tokens."""
    context.prompt(random.integers(5, model.tokens, SEED).tolist())
    if depth > SEED:
        state = longer(context.state(), SEED, depth, random)
        context.remove(0)
        if not context.restore(state):
            raise RuntimeError("the longer state does not go in")
        del state

    def step(at):
        context.decode([(int(random.integers(5, model.tokens)), max(depth, SEED) + at, 0, True)])
        context.logits()
    return [timed(lambda at=at: step(at)) for at in range(WARM + steps)][WARM:]


def main():
    folder, path, kind, depth, steps, *more = sys.argv[1:]
    depth, steps = int(depth), int(steps)
    random = np.random.default_rng(1)
    model = llama_api.Model(llama_api.Library(folder), path)
    context = llama_api.Context(model, depth + SEED + steps + WARM + 256, kind=kind,
                                offload_kqv=more != ["host"])
    if steps:
        times = steps_after(model, context, random, depth, steps)
    else:
        context.prompt([5]) # what is done once
        context.remove(0)
        times = [timed(lambda: context.prompt(random.integers(5, model.tokens, depth).tolist()))]
    clock, threads = zip(*times)
    with open("/proc/self/status", encoding="utf-8") as text:
        resident = int(re.search(r"VmRSS:\s+(\d+)", text.read()).group(1)) >> 10
    print(json.dumps({"clock": clock, "threads": threads, "resident": resident}))
    context.close()
    model.close()


if __name__ == "__main__":
    main()
