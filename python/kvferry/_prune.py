# SPDX-License-Identifier: Apache-2.0
"""Pruner: what of a prompt enters the cache, and what goes on to deeper layers.

Knows the order of calls, and neither policies nor models. Invariant: a policy of the caller lives as
long as the pruner that calls it.
"""
import ctypes
import os
from ctypes import addressof, byref
from typing import Any, List, NamedTuple, Optional, Union

import numpy as np

from ._cache import Cache, Sequence, make_config
from .capi import (HiddenPlan, PrefillArgs, PruneConfig, PrunePlan, PruneResult, PruneShape,
                    PruneStats, StructkvMeasures, lib, sized)
from ._errors import Invalid, checked, without_nul
from ._handles import Handle, Node
from ._policies import PrunePolicy, prune_policies, raise_first
from ._runtime import Runtime, Stream, _opened, _raw, behind_work
from ._settings import fill

Policy = Union[str, PrunePolicy]


def _policy_address(policy: Policy) -> int:
    if isinstance(policy, PrunePolicy):
        return addressof(policy.row)
    found = lib.kvf_prune_policy_find(without_nul("policy", str(policy).encode()))
    if not found:
        raise Invalid("policy = %s: must be one of %s, or a PrunePolicy" % (
            policy, ", ".join(prune_policies())))
    return found


def policy_takes(policy: Policy, setting: str) -> bool:
    """Whether a prune policy looks at a setting."""
    return bool(lib.kvf_prune_policy_takes(_policy_address(policy),
                                           without_nul("setting", setting.encode())))


class PruneStep(NamedTuple):
    """What `Pruner.layer` decided.

    keep_count  tokens that a KV head of this layer kept
    propagate   uint32[n], tokens of this layer that the next one gets; None = all
    restart     True = the sequence is empty again: start over with the tokens of `propagate`
    """
    keep_count: int
    propagate: Optional[np.ndarray]
    restart: bool


class Pruner(Handle):
    """Prunes prompts of a cache by a policy: a name of `prune_policies()`, or a PrunePolicy.

    settings  see `kvferry.settings("prune")`: keep, propagate, window, retention, eviction, ...

    The cache's observe_window must be at least the policy's window, `Pruner.window(policy)`.

    >>> pruner.begin(sequence, tokens)
    >>> for layer in range(layers):
    ...     pruner.prefill(sequence, q, k, v, layer=layer)
    ...     step = pruner.layer(sequence, layer)
    """

    def __init__(self, cache: Cache, policy: Policy = "full", **settings: Any) -> None:
        keep: list = [policy]
        self._config = _make_config(policy, settings, keep)
        self._errors = policy.errors if isinstance(policy, PrunePolicy) else []
        out = ctypes.c_void_p()
        with cache._node.lock:
            checked(lib.kvf_prune_open, cache._node.check(), byref(self._config), byref(out))
        super().__init__(Node("pruner", out.value,
                              behind_work(cache.runtime._node, lib.kvf_prune_close), cache._node,
                              cache._node.lock))
        self._node.keep += [self._config, *keep]
        if self._errors:
            self.close()
            raise_first(self._errors)
        self.cache = cache

    @staticmethod
    def window(policy: Policy, **settings: Any) -> int:
        """Newest queries that the policy scores with: what observe_window must be at least."""
        config = _make_config(policy, settings, [])
        return config.chunk_queries if config.eviction else config.settings.window

    @staticmethod
    def check(policy: Policy, *, layers: int, kv_heads: int, query_heads: int, tokens_max: int,
              **settings: Any) -> None:
        """Raise Invalid if a policy refuses these settings. Needs no cache."""
        config = _make_config(policy, settings, [])
        shape = PruneShape(layers=layers, kv_heads=kv_heads, query_heads=query_heads,
                           tokens_max=tokens_max)
        checked(lib.kvf_prune_config_check_sized, byref(config), *sized(shape))
        raise_first(policy.errors if isinstance(policy, PrunePolicy) else [])

    @staticmethod
    def plan_for(runtime: Runtime, cache: dict, policy: Policy, **settings: Any) -> PrunePlan:
        """Memory of a pruner, in bytes, for a cache that `Cache(runtime, **cache)` would open."""
        plan, keep = PrunePlan(), []
        config, of_cache = _make_config(policy, settings, keep), make_config(cache, keep, [])
        checked(lib.kvf_prune_plan_make_sized, runtime._node.check(), byref(of_cache), byref(config),
                *sized(plan))
        return plan

    @property
    def config(self) -> PruneConfig:
        """The settings in force."""
        return PruneConfig.from_buffer_copy(
            PruneConfig.from_address(lib.kvf_prune_config_get(self._node.check())))

    def begin(self, sequence: Sequence, tokens: int) -> None:
        """A prompt of so many tokens begins in an empty sequence."""
        with self._node.lock:
            self._must(lib.kvf_prune_begin(self._node.check(), sequence._of(self.cache), tokens))

    def prefill(self, sequence: Sequence, q: Any, k: Any, v: Any, out: Any = None, *, layer: int = 0,
                tokens: Optional[int] = None, positions: Any = None,
                stream: Optional[Stream] = None) -> Any:
        """`Cache.prefill`, seen by the pruner. Returns out."""
        def append(args: int, stream_handle: int) -> int:
            return lib.kvf_prune_append_sized(self._node.check(), args, ctypes.sizeof(PrefillArgs),
                                              stream_handle)
        return self.cache._prefill(sequence, q, k, v, out, layer, tokens, positions, stream, append)

    def layer(self, sequence: Sequence, layer: int, stream: Optional[Stream] = None) -> PruneStep:
        """A layer holds the whole prompt: measure, decide, and keep."""
        result = PruneResult()
        stream, waits = self.cache.runtime._stream_for(stream, None)
        with self._node.lock:
            self._must(lib.kvf_prune_layer_sized(self._node.check(), sequence._of(self.cache), layer,
                                                 stream._node.check(), *sized(result)))
            propagate = None
            if result.propagate:
                raw = (ctypes.c_uint32 * result.propagate_count).from_address(result.propagate)
                propagate = np.array(raw, dtype=np.uint32)
        step = PruneStep(result.keep_count, propagate, bool(result.restart))
        return self.cache._done(stream, waits, step)

    def chunk(self, sequence: Sequence, layer: int, tokens: int, patch: int = 0,
              stream: Optional[Stream] = None) -> None:
        """Chunked eviction: a layer got `tokens` tokens of a chunk, then `patch` of the end."""
        stream, waits = self.cache.runtime._stream_for(stream, None)
        with self._node.lock:
            self._must(lib.kvf_prune_chunk(self._node.check(), sequence._of(self.cache), layer, tokens,
                                           patch, stream._node.check()))
        self.cache._done(stream, waits, None)

    def stats(self) -> PruneStats:
        """Totals; times in ns. Read them after `stream.wait()`."""
        stats = PruneStats()
        with self._node.lock:
            lib.kvf_prune_stats_get_sized(self._node.check(), *sized(stats))
        return stats

    def measures(self) -> List[float]:
        """Values that a policy that chooses a layer looked at, by layer, in the prompt that was there last
        (asl: the relative variance of ranks); nan where it looked at nothing."""
        out = (ctypes.c_double * self.cache.settings.layers)()
        with self._node.lock:
            lib.kvf_prune_measures(self._node.check(), out, len(out))
        return list(out)

    def _must(self, status: int) -> None:
        raise_first(self._errors)
        self.cache._must(status)


class Hidden(Handle):
    """Hidden states that wait until a pruned sequence is completed, one per token.

    disk_path  a folder: they are in a private file there, read and written through a small buffer. None = all
               are in host memory

    >>> hidden.put(0, states)                       # of all tokens, at the pivot
    >>> whole = sequence.complete_begin(pivot + 1, tokens)
    >>> hidden.get(first, states)                   # later, chunk by chunk
    """

    def __init__(self, runtime: Runtime, state_bytes: int, states_max: int, disk_path: Any = None) -> None:
        handle = runtime._node.check()
        folder = None if disk_path is None else without_nul("disk_path", os.fsencode(disk_path))
        super().__init__(Node("hidden", _opened(handle, lib.kvf_hidden_open, handle, state_bytes, states_max,
                                                folder),
                              behind_work(runtime._node, lib.kvf_hidden_close), runtime._node))
        self.runtime, self.state_bytes = runtime, state_bytes

    @staticmethod
    def plan_for(state_bytes: int, states_max: int, on_disk: bool = False) -> HiddenPlan:
        """Bytes that so many states reserve."""
        plan = HiddenPlan()
        lib.kvf_hidden_plan_make_sized(state_bytes, states_max, on_disk, *sized(plan))
        return plan

    def put(self, first: int, states: Any, stream: Optional[Stream] = None) -> None:
        """Store states, the first as number `first`."""
        self._move(lib.kvf_hidden_put, first, states, "source", stream)

    def get(self, first: int, states: Any, stream: Optional[Stream] = None) -> None:
        """Bring states back, from number `first` on, as many as fit `states`."""
        self._move(lib.kvf_hidden_get, first, states, "to", stream)

    def _move(self, call: Any, first: int, states: Any, name: str, stream: Optional[Stream]) -> None:
        address, size = _raw(states, name)
        if size % self.state_bytes:
            raise Invalid("states is %d bytes long: it must hold whole states of %d" % (size, self.state_bytes))
        stream, waits = self.runtime._stream_for(stream, states)
        with self._node.lock:
            self.runtime._must(call(self._node.check(), first, size // self.state_bytes, address,
                                    stream._node.check()))
        stream._keep(states)
        if waits:
            stream.wait()


def _make_config(policy: Policy, settings: dict, keep: list) -> PruneConfig:
    config = PruneConfig()
    lib.kvf_prune_config_init_sized(byref(config), _policy_address(policy), ctypes.sizeof(config))
    fill(config, "prune", settings, keep)
    return config


def structkv_measure(profile: Any) -> StructkvMeasures:
    """Means over query heads of `PruneView.profile`, float32[query_heads, 3]."""
    rows = np.ascontiguousarray(profile, dtype=np.float32).reshape(-1, 3)
    return lib.kvf_structkv_measure(rows.ctypes.data, len(rows))


def structkv_transition(weights: Any, measures: Any) -> np.ndarray:
    """StructKV's transition score, float64[layers], of measures [layers, 3] and three weights."""
    weights = np.ascontiguousarray(weights, dtype=np.float32).reshape(3)
    rows = np.ascontiguousarray(measures, dtype=np.float64).reshape(-1, 3)
    score = np.zeros(len(rows))
    lib.kvf_structkv_transition(weights.ctypes.data, rows.ctypes.data, len(rows), score.ctypes.data)
    return score


def structkv_pivot(score: Any, layer_min: int, layer_max: int) -> int:
    """The calibrated pivot: the layer after the one with the highest score, at most layer_max."""
    score = np.ascontiguousarray(score, dtype=np.float64).reshape(-1)
    return lib.kvf_structkv_pivot(score.ctypes.data, score.size, layer_min, layer_max)
