# SPDX-License-Identifier: Apache-2.0
"""Layers whose values are narrower than keys, for which a model takes a backend without asking vLLM's settings.

vLLM's layer is followed where it is made. Invariant: a layer that is not to be kvferry's gets the backend that its
model took.
"""
import functools
from typing import Any

from .refusals import OTHER, refuse
from .upstream import HAS_TRITON, IS_CPU, Engine, window_of


def follow(layer: type) -> None:
    """Let the class of layers ask, too. May be called twice."""
    theirs = layer.__init__ # type: ignore[misc]
    if getattr(theirs, "asks", False):
        return

    @functools.wraps(theirs)
    def init(self: Any, num_heads: int, head_size: int, *given: Any, **named: Any) -> None:
        values = named.get("head_size_v") or head_size
        if type(self) is layer and values != head_size and is_ours(named):
            named.update(attn_backend=None, value_size=values)
        theirs(self, num_heads, head_size, *given, **named)

    init.asks = True # type: ignore[attr-defined]
    layer.__init__ = init # type: ignore[misc]


def is_ours(named: Any) -> bool:
    """Whether such a layer, with these arguments of its class, is to be kvferry's."""
    engine, window = Engine.current(), window_of(named)
    if not engine.asks_for_custom:
        return False
    if window is not None and IS_CPU and not HAS_TRITON:
        refuse("layers with a window on a CPU whose values are narrower than keys", "vLLM's own attention for them needs "
               "Triton; " + OTHER.partition(",")[0])
    return engine.is_custom(window is not None, named.get("attn_type"))
