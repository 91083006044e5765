# SPDX-License-Identifier: Apache-2.0
"""Random edits of sequences and steps in one build of llama.cpp, attentions beside a plain loop.

usage: llama_fuzz.py FOLDER MODEL SEED ACTIONS KIND SLOTS UNIFIED

The plain loop is in NumPy, on the tensors that llama.cpp itself hands to FLASH_ATTN_EXT, as its callback for
debugging shows them: it knows nothing of kvferry. It looks at every attention in half of the actions, and at none in
the others, because a look brings pages of llama.cpp's back that kvferry has put away. Prints a line of JSON: counts
of actions, the worst error relative to the largest value, and how many operations were wrong.
"""
import collections
import ctypes
import json
import sys

import numpy as np

import llama_api

WRONG = 0.05 # of the largest value: rounding of fp16 sums is below, a cell too much or too little above
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    """struct ggml_tensor, alike from 0.13 to 0.27 of ggml."""
    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4),
                ("nb", ctypes.c_size_t * 4), ("op", ctypes.c_int), ("params", ctypes.c_float * 16),
                ("flags", ctypes.c_int32), ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p),
                ("view_offs", ctypes.c_size_t), ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64)]

    def numbers(self):
        """Its values in fp32, [ne3][ne2][ne1][ne0]."""
        size = int(sum((n - 1) * step for n, step in zip(self.ne[1:], self.nb[1:])) + self._row())
        raw = np.frombuffer((ctypes.c_uint8 * size).from_address(self.data), np.uint8)
        shape, steps = tuple(self.ne)[::-1], tuple(self.nb)[::-1]
        if self.type == llama_api.Q8_0:
            rows = np.lib.stride_tricks.as_strided(raw, (*shape[:3], self.ne[0] // 32, 34), (*steps[:3], 34, 1))
            scales = rows[..., :2].copy().view(np.float16).astype(np.float32)
            return (rows[..., 2:].view(np.int8).astype(np.float32) * scales).reshape(shape)
        kind = {llama_api.F32: np.float32, llama_api.F16: np.float16, llama_api.BF16: np.uint16}[self.type]
        out = np.lib.stride_tricks.as_strided(raw[:size // kind().nbytes * kind().nbytes].view(kind), shape, steps)
        if self.type == llama_api.BF16:
            return (out.astype(np.uint32) << 16).view(np.float32)
        return out.astype(np.float32)

    def _row(self):
        return self.ne[0] // 32 * 34 if self.type == llama_api.Q8_0 else self.ne[0] * self.nb[0]


def at(address):
    """The tensor at an address."""
    return Tensor.from_address(address)


def plain(node):
    """The result of FLASH_ATTN_EXT, [stream][token][head][channel]."""
    q, k, v, mask = (at(node.src[i]).numbers() for i in range(4))
    sinks = at(node.src[4]).numbers().ravel() if node.src[4] else None
    scale, _, cap = node.params[:3]
    streams, heads, tokens, _ = q.shape
    group = heads // k.shape[1]
    out = np.empty((streams, tokens, heads, v.shape[3]), np.float32)
    for stream in range(streams):
        allowed = mask[stream % mask.shape[0], 0, :tokens]
        for head in range(heads):
            logits = q[stream, head] @ k[stream, head // group].T * scale
            if cap:
                logits = cap * np.tanh(logits / cap)
            logits += allowed
            top = logits.max(-1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, sinks[head])
            weights = np.exp(logits - top)
            total = weights.sum(-1, keepdims=True) + (np.exp(sinks[head] - top) if sinks is not None else 0)
            out[stream, :, head] = weights / total @ v[stream, head // group]
    return out


class Watch:
    """Compares every attention that llama.cpp computes."""

    def __init__(self, library):
        library.base.ggml_op_name.restype = ctypes.c_char_p
        self.op = next(op for op in range(200) if library.base.ggml_op_name(op) == b"FLASH_ATTN_EXT")
        self.ops, self.wrong, self.worst, self.looks = 0, 0, 0.0, True
        self.callback = CALLBACK(self._seen)

    def _seen(self, address, ask, _):
        node = at(address)
        if node.op == self.op and not ask and self.looks:
            want, have = plain(node), node.numbers()
            error = float(np.abs(want - have).max() / max(np.abs(want).max(), 1e-9))
            self.ops += 1
            self.worst = max(self.worst, error if np.isfinite(error) else 1e9)
            self.wrong += not error <= WRONG
        return node.op == self.op or not ask


class Fuzz:
    """Sequences of one context."""

    def __init__(self, context, random, room, watch):
        self.context, self.random, self.room, self.watch = context, random, room, watch
        self.counts = collections.Counter()

    def tokens(self, count):
        """Random ids."""
        return self.random.integers(5, min(280, self.context.model.tokens), count).tolist()

    def step(self, one, most):
        """A pass of some slots, each with 1 to `most` tokens: several are a draft."""
        rows, count = [], int(self.random.integers(1, most + 1))
        for slot in range(self.context.slots):
            length = self.context.length(slot)
            if (slot == one or self.random.integers(2)) and length + count < self.room:
                rows += [(token, length + i, slot, True) for i, token in enumerate(self.tokens(count))]
        if rows:
            self.context.decode(rows)
            self.counts["steps" if most == 1 else "drafts"] += 1

    def prompt(self, slot):
        """A longer pass."""
        length, count = self.context.length(slot), int(self.random.integers(8, 48))
        if length + count < self.room:
            self.context.prompt(self.tokens(count), slot, length)
            self.counts["prompts"] += 1

    def cut(self, slot):
        """Positions at the end go."""
        length = self.context.length(slot)
        if length > 4:
            self.context.remove(slot, length - int(self.random.integers(1, length // 2 + 1)))
            self.counts["cuts"] += 1

    def hole(self, slot):
        """Positions in the middle go, and those after them may close up."""
        length = self.context.length(slot)
        if length > 24:
            first, count = 5 + int(self.random.integers(length // 2)), int(self.random.integers(1, 9))
            if first + count < length - 2 and self.context.remove(slot, first, first + count):
                self.counts["holes"] += 1
                if self.random.integers(2) and self.context.lib.llama_memory_can_shift(self.context.memory):
                    self.context.shift(slot, first + count, -count)
                    self.counts["shifts"] += 1

    def copy(self, slot, other):
        """A slot goes on from another one's tokens."""
        if slot != other and self.context.length(other) > 0:
            self.context.remove(slot)
            self.context.copy(other, slot)
            self.counts["copies"] += 1

    def state(self, slot, other):
        """A state out, and into another slot or the same."""
        if self.context.length(slot) > 0:
            state = self.context.state(slot)
            self.context.remove(other)
            self.context.restore(state, other)
            self.counts["states"] += 1

    def go(self, actions):
        """Random actions."""
        for _ in range(actions):
            slot, other = map(int, self.random.integers(0, self.context.slots, 2))
            what = int(self.random.integers(24))
            self.watch.looks = bool(self.random.integers(2))
            if what < 10:
                self.step(slot, 1)
            elif what < 14:
                self.step(slot, 5)
            elif what < 15:
                self.prompt(slot)
            elif what < 18:
                self.cut(slot)
            elif what < 20:
                self.hole(slot)
            elif what < 22:
                self.copy(slot, other)
            elif what < 23:
                self.state(slot, other)
            elif not self.random.integers(3):
                self.context.remove(slot)
                self.counts["emptied"] += 1


def main():
    folder, path, seed, actions, kind, slots, unified = sys.argv[1:]
    library = llama_api.Library(folder)
    watch = Watch(library)
    model, slots = llama_api.Model(library, path), int(slots)
    context = llama_api.Context(model, 256 * slots, slots=slots, kind=kind, unified=unified == "True",
                                cb_eval=ctypes.cast(watch.callback, ctypes.c_void_p).value)
    fuzz = Fuzz(context, np.random.default_rng(int(seed)), 240, watch)
    fuzz.go(int(actions))
    context.close()
    model.close()
    print(json.dumps(dict(fuzz.counts, operations=watch.ops, wrong=watch.wrong, worst=watch.worst)))


if __name__ == "__main__":
    main()
