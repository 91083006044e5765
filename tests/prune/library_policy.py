# SPDX-License-Identifier: Apache-2.0
"""The library's prune policies as functions of arrays, alone and on a cache, and how sets of tokens
are compared.

Knows no right answer. A policy is called as the library calls it, by its row of functions; what it
must not write is guarded: the end of its state, and the room after what it may answer. Sets are
equal, or they differ only in tokens whose scores are so close to the border that rounding may decide;
the caller says how close, and 0 where the numbers are the same bits on both sides.
"""
import ctypes
import sys
from ctypes import addressof, byref

import numpy as np

import kvferry
from kvferry import capi
from kvferry.capi import lib

GUARD = 0xa5a5a5a5


def ids_at(address, *shape):
    raw = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint32))
    return np.ctypeslib.as_array(raw, shape).tolist()


class Answer:
    """A policy's answer for a layer; None stands for all tokens."""

    def __init__(self, view, answer):
        kept, passed = answer.keep_count, answer.propagate_count
        self.keep = ids_at(answer.keep, view.kv_heads, kept) if kept < view.tokens else None
        self.propagate = ids_at(answer.propagate, passed) if passed < view.tokens else None
        self.restart, self.chosen = answer.restart, answer.is_chosen
        self.measure = answer.measure


class Policy:
    """One of the library's. shape: layers, KV heads, query heads, the longest prompt."""

    def __init__(self, name, settings, shape, states=1):
        self.row = capi.PrunePolicyRow.from_address(lib.kvf_prune_policy_find(name.encode()))
        self.config, self.shape = capi.PruneConfig(), capi.PruneShape(*shape)
        lib.kvf_prune_config_init_sized(byref(self.config), addressof(self.row),
                                        ctypes.sizeof(self.config))
        for field, value in settings.items():
            setattr(self.config.settings, field, value)
        error = capi.ErrorText()
        if lib.kvf_prune_config_check_sized(byref(self.config), *capi.sized(self.shape),
                                            byref(error)):
            sys.exit("%s %s: %s" % (name, settings, error.text.decode()))
        self._decide = capi.Decide(self.row.decide)
        self.state_bytes = capi.StateBytes(self.row.state_bytes)(
            addressof(self.config.settings), addressof(self.shape)) if self.row.state_bytes else 0
        self._states = [np.zeros(self.state_bytes + 8, np.uint8) for _ in range(states)]

    def _view(self, state, layer, turn, **rest):
        shape = self.shape
        return capi.PruneView(
            settings=addressof(self.config.settings), layers=shape.layers, kv_heads=shape.kv_heads,
            query_heads=shape.query_heads, layer=layer, state=self._states[state].ctypes.data,
            **{"pass": turn}, **rest)

    def needs(self, state, layer, turn=0):
        if not self.row.needs_at:
            return self.row.needs
        return capi.NeedsAt(self.row.needs_at)(
            byref(self._view(state, layer, turn, window=self.config.settings.window)))

    def decide(self, layer, tokens, prompt, scores, profile=None, *, turn=0, state=0):
        """scores [kv_heads, candidates], profile [query_heads, 3]; None = not measured."""
        if layer == turn == 0:
            self._states[state][:self.state_bytes] = 0
        self._states[state][self.state_bytes:] = 0xa5
        arrays = [None if x is None else np.ascontiguousarray(x, np.float32)
                  for x in (scores, profile)]
        room = [np.full(n + 1, GUARD, np.uint32) for n in (self.shape.kv_heads * tokens, tokens)]
        positions = np.arange(tokens, dtype=np.uint32)
        at = [None if x is None else x.ctypes.data for x in (*arrays, *room, positions)]
        view = self._view(state, layer, turn, tokens=tokens, prompt=prompt, scores=at[0],
                          profile=at[1], positions=at[4],
                          candidates=0 if scores is None else scores.shape[1],
                          window=min(self.config.settings.window, tokens))
        answer = capi.PruneAnswer(keep=at[2], keep_count=tokens, propagate=at[3],
                                  propagate_count=tokens, measure=np.nan)
        self._decide(byref(view), byref(answer))
        if ((self._states[state][self.state_bytes:] != 0xa5).any() or
                any(x[-1] != GUARD for x in room) or [answer.keep, answer.propagate] != at[2:4]):
            sys.exit("%s wrote where it must not" % self.row.name.decode())
        return Answer(view, answer)


class OnCache:
    """A policy of the library under a pruner, watched, and whether the pruner does what it said."""

    def __init__(self, name, settings, shape, head_dim, chunk):
        inner = capi.PrunePolicyRow.from_address(lib.kvf_prune_policy_find(name.encode()))
        decide = capi.Decide(inner.decide)

        def watch(view, answer):
            decide(view, answer)
            self.said = Answer(view[0], answer[0])
            if view[0].profile:
                raw = ctypes.cast(view[0].profile, ctypes.POINTER(ctypes.c_float))
                self.profile = np.array(np.ctypeslib.as_array(raw, (view[0].query_heads, 3)))

        layers, kv_heads, query_heads, tokens_max = shape
        watched = kvferry.PrunePolicy("watched", None)
        watched.row = capi.PrunePolicyRow.from_buffer_copy(inner)
        watched._set("decide", capi.Decide(watch))
        self.said = self.profile = None
        self.runtime = kvferry.Runtime(device="host", threads=2, calibrate=0)
        self.cache = kvferry.Cache(
            self.runtime, layers=layers, query_heads=query_heads, kv_heads=kv_heads,
            head_dim=head_dim, dtype="fp32", tokens_max=tokens_max, prefill_chunk_max=chunk,
            observe_window=max(1, kvferry.Pruner.window(watched, **settings)))
        self.pruner = kvferry.Pruner(self.cache, watched, **settings)
        self.sequence = self.cache.sequence()

    def begin(self, tokens):
        self.pruner.begin(self.sequence, tokens)

    def layer(self, layer, q, k, v, positions):
        tokens = len(q)
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        self.pruner.prefill(self.sequence, q, k, v, layer=layer, positions=positions)
        step, said = self.pruner.layer(self.sequence, layer), self.said
        passed = None if step.propagate is None else step.propagate.tolist()
        if (step.restart, passed) != (bool(said.restart), said.propagate):
            sys.exit("the pruner hands on something else than the policy said")
        evicts = self.pruner.config.retention == kvferry.capi.Retention.EVICT
        held = len(said.keep[0]) if evicts and said.keep else tokens
        if self.sequence.length(layer) != (0 if said.restart else held):
            sys.exit("the pruner leaves a layer of another length than the policy said")
        return said

    def close(self):
        self.runtime.close()


class Tally:
    """Counts comparisons; the first difference ends the test."""

    def __init__(self):
        self.equal = 0
        self.border = 0

    def sets(self, what, got, wanted, score, near):
        """got, wanted: ascending ids or None; score: of every token that could be left out."""
        if (got is None) != (wanted is None):
            sys.exit("%s: %s, the definition says %s" % (what, short(got), short(wanted)))
        if got is None or got == wanted:
            self.equal += 1
            return
        if len(got) != len(wanted):
            sys.exit("%s: %d tokens, the definition says %d" % (what, len(got), len(wanted)))
        if any(b <= a for a, b in zip(got, got[1:])):
            sys.exit("%s: %s does not ascend" % (what, short(got)))
        if score is None:
            sys.exit("%s: %s, the definition says %s" % (what, short(got), short(wanted)))
        only_got, only_wanted = set(got) - set(wanted), set(wanted) - set(got)
        for a, b in zip(sorted(score[list(only_got)]), sorted(score[list(only_wanted)])):
            if not near or not abs(a - b) <= near * max(abs(a), abs(b)):
                sys.exit("%s: takes %s, the definition %s; scores %.9g and %.9g"
                         % (what, sorted(only_got), sorted(only_wanted), a, b))
        self.border += 1


def short(ids):
    if ids is None:
        return "all tokens"
    return "%d tokens %s" % (len(ids), ids if len(ids) < 20 else ids[:20] + ["..."])
