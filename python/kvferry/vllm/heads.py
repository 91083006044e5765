# SPDX-License-Identifier: Apache-2.0
"""Kinds of heads from a file, as `kvferry tune --heads` writes it, for the layers and heads of a rank.

A line per layer, a number per KV head: 1 = hot, 2 = coarse, 0 = streaming. Imports nothing of vLLM.
Invariant: a file of another model is refused, whatever part of it the rank has.
"""
from typing import Any, List, NamedTuple, Optional, Sequence

import numpy as np

from .._errors import Invalid

NAMES = ("streaming", "hot", "coarse") # by number


class Share(NamedTuple):
    """A rank's share of a model."""
    layers: Sequence[int] # numbers of its layers in the model
    kv_heads: int # of each layer
    rank: int # among those that share the heads of a layer
    ranks: int


def read(path: Any, layers: int, kv_heads: int, share: Share) -> np.ndarray:
    """[layers, KV heads] of a rank, from the file of a model with so many."""
    try:
        with open(path, encoding="utf-8") as text:
            lines = text.read().rstrip().splitlines()
    except (OSError, TypeError, UnicodeDecodeError) as error:
        raise Invalid("head_mask = %s: %s; name a file that `kvferry tune --heads` wrote"
                      % (path, error)) from error
    if len(lines) != layers:
        raise Invalid("head_mask = %s: %d lines, and the model has %d layers; use the file of this model"
                      % (path, len(lines), layers))
    rows = np.array([_line(path, number, line, kv_heads) for number, line in enumerate(lines)],
                    dtype=np.uint8)
    # Where there are more ranks than heads, several ranks have the same one.
    first = share.rank * kv_heads // share.ranks
    return rows[list(share.layers), first:first + share.kv_heads]


def _line(path: Any, number: int, line: str, kv_heads: int) -> List[int]:
    values = [value.strip() for value in line.split("\t")]
    if len(values) != kv_heads:
        raise Invalid("head_mask = %s: line %d has %d values, and a layer of the model has %d KV heads; "
                      "use the file of this model" % (path, number + 1, len(values), kv_heads))
    for value in values:
        if value not in ("0", "1", "2"):
            raise Invalid("head_mask = %s: line %d has %s: must be 1 (hot), 2 (coarse) or 0 (streaming)"
                          % (path, number + 1, value))
    return [int(value) for value in values]


def that_select(mask: Optional[np.ndarray], layers: int, query_heads: int, kv_heads: int) -> np.ndarray:
    """[layers, query heads] of a rank: which heads do not stream."""
    if mask is None:
        return np.ones((layers, query_heads), dtype=bool)
    return np.repeat(mask != 0, query_heads // kv_heads, axis=1)


def describe(mask: np.ndarray) -> str:
    """Shares of kinds, as "40% of heads hot, 60% coarse"."""
    shares = ["%.0f%% %s" % (100.0 * np.mean(mask == kind), NAMES[kind]) for kind in (1, 2, 0)
              if (mask == kind).any()]
    return "of the heads " + ", ".join(shares)
