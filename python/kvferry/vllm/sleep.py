# SPDX-License-Identifier: Apache-2.0
"""Sleep: pages go when vLLM gives the memory of its blocks back, and room for them comes back with it.

vLLM tells no attention of it. So whoever does it for vLLM is followed: on a GPU the mechanism of sleep mode,
on a CPU the worker, which has nothing of vLLM's to give back. Imports nothing of vLLM. Invariant: where vLLM
has the memory of its blocks, there are pages for them.
"""
import functools
import weakref
from typing import Any, Callable, List

BLOCKS = "kv_cache" # vLLM's tag of that memory

_pools: Any = weakref.WeakSet() # of this process


def follow(pool: Any, teller: type) -> None:
    """From now on a pool sleeps and wakes when an object of that class makes it so. May be called twice."""
    _pools.add(pool)
    if "is_followed" in vars(teller):
        return
    teller.is_followed = True # type: ignore[attr-defined]
    for name, wrap in (("sleep", _sleeps), ("suspend", _sleeps), ("discard", _discards),
                       ("wake_up", _wakes), ("resume", _wakes)):
        if hasattr(teller, name):
            setattr(teller, name, wrap(getattr(teller, name)))


def _pools_of(teller: Any) -> List[Any]:
    """A worker is of one engine; a mechanism of sleep mode there is one in a process."""
    config = getattr(teller, "vllm_config", None)
    return [pool for pool in _pools if config is None or pool.config is config]


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
