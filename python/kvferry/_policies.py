# SPDX-License-Identifier: Apache-2.0
"""Policies written in Python: which pages a step attends to, what of a prompt a layer keeps.

For research: a call from C into Python costs microseconds per KV head and step. A policy sees NumPy
arrays and must not call the library. Invariant: an exception in a policy never crosses C; it is kept
and raised by the call, or by the wait, that comes next.
"""
import ctypes
import math
from typing import Any, Callable, NamedTuple, Optional, Sequence as Many, Union

import numpy as np

from .capi import (CALLBACKS, Check, Decide, NeedsAt, PrunePolicyRow, PruneNeeds, PruneReach,
                    PruneSettings, PruneShape, StateBytes, lib)
from ._errors import Invalid, without_nul
from ._handles import here
from ._settings import rows_of

_log = CALLBACKS["kvf_log_fn"]
_task = CALLBACKS["kvf_task_fn"]
_select = CALLBACKS["kvf_select_fn"]


def guarded(errors: list, failed: Any, work: Callable[[], Any]) -> Any:
    """Run a function of the caller inside the library."""
    before, here.in_policy = getattr(here, "in_policy", False), True
    try:
        return work()
    except BaseException as error: # pylint: disable=broad-except
        errors.append(error)
        return failed
    finally:
        here.in_policy = before


def raise_first(errors: list) -> None:
    """Raise what a function of the caller raised, once."""
    if errors:
        first = errors[0]
        errors.clear()
        raise first


def _array(address: Optional[int], dtype: Any, *shape: int) -> Optional[np.ndarray]:
    """Memory of C as an array that can only be read."""
    if not address:
        return None
    dtype = np.dtype(dtype)
    raw = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(address)
    array = np.frombuffer(raw, dtype=dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _write(address: int, values: np.ndarray) -> None:
    ctypes.memmove(address, values.ctypes.data, values.nbytes)


class SelectView(NamedTuple):
    """One KV head of one layer of one sequence, valid during the call.

    pages        sealed pages: the candidates, 0 to pages - 1
    pages_max    most that may be selected
    scores       float32[pages], reduced over the query heads; -inf = no token left
    static_bits  uint64[blocks]: bit t % block_size of word t // block_size is set if token t is in
                 the sink or the static set. Page p has tokens p * page_size to (p + 1) * page_size - 1
    """
    layer: int
    kv_head: int
    pages: int
    pages_max: int
    scores: np.ndarray
    static_bits: np.ndarray
    page_size: int
    block_size: int


SelectPolicy = Callable[[SelectView], Many[int]]


def select_function(policy: SelectPolicy, errors: list) -> Any:
    """`policy` as a kvf_select_fn. It returns ids of pages in any order."""
    def choose(raw: Any, ids: int) -> int:
        pages, per_block = raw.pages, max(1, raw.block_size // raw.page_size)
        view = SelectView(raw.layer, raw.kv_head, pages, raw.pages_max,
                          _array(raw.scores, np.float32, pages),
                          _array(raw.static_bits, np.uint64, -(-pages // per_block)),
                          raw.page_size, raw.block_size)
        chosen = np.unique(np.asarray(policy(view), dtype=np.int64))
        if chosen.size > view.pages_max:
            raise Invalid("select chose %d pages, at most %d may be chosen (view.pages_max)" % (
                chosen.size, view.pages_max))
        if chosen.size and (chosen[0] < 0 or chosen[-1] >= pages):
            raise Invalid("select chose page %d: pages are 0 to %d" % (
                chosen[0] if chosen[0] < 0 else chosen[-1], pages - 1))
        _write(ids, chosen.astype(np.int32))
        return chosen.size
    return _select(lambda _, view, ids: guarded(
        errors, 0, lambda: choose(view[0], ctypes.cast(ids, ctypes.c_void_p).value)
        if view[0].pages else 0))


def log_function(log: Callable[[int, str], None], errors: list) -> Any:
    """`log(level, line)` as a kvf_log_fn."""
    return _log(lambda _, level, line: guarded(errors, None, lambda: log(level, line.decode(errors="replace"))))


def task_function(fn: Callable[[int], None], errors: list) -> Any:
    """`fn(task)` as a kvf_task_fn."""
    return _task(lambda _, task: guarded(errors, None, lambda: fn(task)))


class PruneView(NamedTuple):
    """One layer of one sequence, valid during the call.

    tokens      that this layer holds; `prompt` of them before anything was propagated
    window      newest tokens whose queries score the others
    scores      float32[kv_heads, candidates], or None if nothing was measured
    profile     float32[query_heads, 3]: entropy, mass, variance; or None
    positions   uint32[tokens], true positions; or None before a prompt
    state       uint8[state_bytes] of the sequence, zero when its prompt begins; or None
    """
    settings: PruneSettings
    layer: int
    layers: int
    kv_heads: int
    query_heads: int
    tokens: int
    prompt: int
    again: int
    window: int
    scores: Optional[np.ndarray]
    profile: Optional[np.ndarray]
    positions: Optional[np.ndarray]
    state: Optional[np.ndarray]


class PruneChoice(NamedTuple):
    """The decision that a policy returns; None is everything.

    keep       [kv_heads, n] indexes of tokens that each KV head keeps, with the observation window
    propagate  [n] indexes of tokens that deeper layers get
    restart    True = start over at layer 0 with the tokens of `propagate`
    is_chosen  True = this is the layer that the policy chose (filter, pivot), for statistics
    measure    what the choice of a layer follows from, for `Pruner.measures`
    """
    keep: Any = None
    propagate: Any = None
    restart: bool = False
    is_chosen: bool = False
    measure: float = math.nan


def _prune_view(raw: Any, state_bytes: int) -> PruneView:
    state = None
    if raw.state and state_bytes:
        state = np.frombuffer((ctypes.c_char * state_bytes).from_address(raw.state), dtype=np.uint8)
    return PruneView(
        PruneSettings.from_address(raw.settings), raw.layer, raw.layers, raw.kv_heads,
        raw.query_heads, raw.tokens, raw.prompt, getattr(raw, "pass"), raw.window,
        _array(raw.scores, np.float32, raw.kv_heads, raw.candidates),
        _array(raw.profile, np.float32, raw.query_heads, 3),
        _array(raw.positions, np.uint32, raw.tokens), state)


def _indexes(name: str, values: Any, tokens: int, *shape: int) -> np.ndarray:
    values = np.sort(np.asarray(values, dtype=np.int64), axis=-1)
    if values.shape[:-1] != shape or not values.size:
        raise Invalid("%s has shape %s: it must be [%s]" % (
            name, values.shape, ", ".join([*map(str, shape), "n > 0"])))
    if values.min() < 0 or values.max() >= tokens or (np.diff(values) == 0).any():
        raise Invalid("%s: indexes are distinct and 0 to %d" % (name, tokens - 1))
    return values.astype(np.uint32)


class PrunePolicy:
    """A prune policy of your own: `Pruner(cache, PrunePolicy("mine", decide))`.

    decide       `decide(view: PruneView)` returns a PruneChoice, or the array `keep` alone, or None
    needs        what is measured for it: PruneNeeds, or a function of the view where layers differ
    reach        whether it propagates to deeper layers, or starts over
    settings     names of the settings that it looks at, with defaults: "keep=0.1 window=32"; None: any
    check        `check(settings, shape)` returns None, or what is wrong (field, value, fix)
    state_bytes  state of a sequence, `view.state`

    It must be a pure function and must not call the library.
    """

    def __init__(self, name: str, decide: Callable[[PruneView], Any], *,
                 needs: Union[PruneNeeds, Callable[[PruneView], int]] = PruneNeeds.SCORES,
                 reach: PruneReach = PruneReach.LAYER, settings: Optional[str] = None,
                 source: str = "", state_bytes: int = 0,
                 check: Optional[Callable[[PruneSettings, PruneShape], Optional[str]]] = None) -> None:
        self.name, self.errors = name, []
        self._decide, self._state_bytes = decide, state_bytes
        row = self.row = PrunePolicyRow(size=ctypes.sizeof(PrunePolicyRow), reach=reach,
                                        name=without_nul("name", name.encode()),
                                        source=without_nul("source", source.encode()),
                                        settings=without_nul("settings", settings.encode())
                                        if settings else None)
        # The row has addresses of these; they live as long as the policy.
        self._functions = [Decide(lambda view, answer: guarded(
            self.errors, None, lambda: self._answer(view[0], answer[0])))]
        row.decide = ctypes.cast(self._functions[0], ctypes.c_void_p)
        if callable(needs):
            self._set("needs_at", NeedsAt(lambda view: guarded(
                self.errors, 0, lambda: int(needs(_prune_view(view[0], state_bytes))))))
        else:
            row.needs = int(needs)
        if state_bytes:
            self._set("state_bytes", StateBytes(lambda *_: state_bytes))
        if check:
            self._set("check", Check(lambda settings, shape, text, capacity: guarded(
                self.errors, None, lambda: _complaint(check(settings[0], shape[0]), text, capacity))))

    def _set(self, field: str, function: Any) -> None:
        self._functions.append(function)
        setattr(self.row, field, ctypes.cast(function, ctypes.c_void_p))

    def _answer(self, raw: Any, answer: Any) -> None:
        choice = self._decide(_prune_view(raw, self._state_bytes))
        if choice is None:
            return
        if not isinstance(choice, PruneChoice):
            choice = PruneChoice(choice)
        keep = propagate = None
        if choice.keep is not None:
            keep = _indexes("keep", choice.keep, raw.tokens, raw.kv_heads)
        if choice.propagate is not None:
            propagate = _indexes("propagate", choice.propagate, raw.tokens)
        if keep is not None:
            _write(answer.keep, keep)
            answer.keep_count = keep.shape[1]
        if propagate is not None:
            _write(answer.propagate, propagate)
            answer.propagate_count = propagate.size
        answer.restart, answer.is_chosen = choice.restart, choice.is_chosen
        answer.measure = choice.measure


def _complaint(said: Optional[str], text: int, capacity: int) -> Optional[int]:
    if not said:
        return None
    raw = said.encode()[:capacity - 1] + b"\0"
    ctypes.memmove(text, raw, len(raw))
    return text


def prune_policies() -> list:
    """Names of the library's own prune policies."""
    return [row.name.decode() for row in rows_of(lib.kvf_prune_policy_at, PrunePolicyRow)]
