# SPDX-License-Identifier: Apache-2.0
"""Sleep, copies of blocks and new weights, which vLLM tells no attention of. So whoever does it for vLLM is followed.

Pages go when vLLM gives the memory of its blocks back, and room for them comes back with it: on a GPU the mechanism
of sleep mode does so, on a CPU the worker, which has nothing of vLLM's to give back. Blocks are copied by a runner,
where a request goes on in the middle of a block of another one. Weights that come in place, as they are, are no
layer's to process; but a runner forgets adapters after any. Invariant: where vLLM has
the memory of its blocks there are pages for them, and of a block that is copied they are those of the other one.
"""
import functools
import weakref
from typing import Any, Callable, List

from .upstream import copies_of

BLOCKS = "kv_cache" # vLLM's tag of that memory

_pools: Any = weakref.WeakSet() # of this process


def follow(pool: Any, teller: type) -> None:
    """From now on a pool sleeps, wakes and copies when an object of that class does so. May be called twice."""
    _pools.add(pool)
    if "is_followed" in vars(teller):
        return
    teller.is_followed = True # type: ignore[attr-defined]
    for name, wrap in (("sleep", _sleeps), ("suspend", _sleeps), ("discard", _discards),
                       ("wake_up", _wakes), ("resume", _wakes),
                       ("_update_states", _copies), ("update_requests", _copies),
                       ("reset_lora_state", _has_weights)):
        if hasattr(teller, name):
            setattr(teller, name, wrap(getattr(teller, name)))


def _pools_of(teller: Any) -> List[Any]:
    """A worker and a runner are of one engine; a mechanism of sleep mode there is one in a process."""
    config = getattr(teller, "vllm_config", None)
    return [pool for pool in _pools if config is None or pool.engine.config is config]


def _sleeps(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def sleep(self: Any, *given: Any, **named: Any) -> Any:
        for pool in _pools_of(self):
            pool.sleep()
        return theirs(self, *given, **named)
    return sleep


def _discards(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def discard(self: Any, tags: Any) -> None:
        theirs(self, tags)
        if BLOCKS in tags:
            for pool in _pools_of(self):
                pool.sleep()
    return discard


def _wakes(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def wake(self: Any, tags: Any = None) -> None:
        theirs(self, tags)
        if tags is None or BLOCKS in tags:
            for pool in _pools_of(self):
                pool.wake()
    return wake


def _copies(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def update(self: Any, output: Any) -> Any:
        told = theirs(self, output)
        for pool in _pools_of(self):
            pool.copy(copies_of(self, output, set(pool.layers)))
        return told
    return update


def _has_weights(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def reset(self: Any) -> None:
        theirs(self)
        for pool in _pools_of(self):
            pool.set_all_params()
    return reset
