# SPDX-License-Identifier: Apache-2.0
"""Recall: which share of the attention weights is on the tokens that steps attend to.

Every so many passes the rows that select are attended to densely as well, in every layer: a chunk of
one query, whose sum of weights stands beside that of the step. Streaming heads are left out: they
select nothing, in a chunk neither. Imports nothing of vLLM. Invariant: the answer is that of the step.
"""
from typing import Any, List, NamedTuple, Tuple

import torch

from .._blocks import Blocks
from .._runtime import Stream


class Rows(NamedTuple):
    """Rows of a step, as `Blocks.decode` takes them."""
    table: Tuple[int, int]
    lengths: int
    contexts: List[int] # tokens before the newest
    q: int
    out: torch.Tensor # [rows, query_heads, head_dim], of the step


class Recall:
    """The verifier of one rank.

    interval   passes with steps from one that is verified to the next; 0 = none is
    selects    [layers, query heads] whether a head selects
    """

    def __init__(self, interval: int, selects: Any) -> None:
        self.interval, self._passes = interval, 0
        self._selects = torch.as_tensor(selects)
        self._under_way: List[tuple] = []
        self._total = torch.zeros(2, dtype=torch.float64)

    def begin(self) -> bool:
        """A pass that has steps: whether it is verified."""
        self._passes += 1
        return self.interval > 0 and self._passes % self.interval == 0

    def compare(self, blocks: Blocks, layer: int, rows: Rows, lse: torch.Tensor, stream: Stream) -> None:
        """Enqueue dense attention beside a step whose sums of weights go to `lse`."""
        dense, out = torch.empty_like(lse), torch.empty_like(rows.out)
        blocks.extend(layer, rows.table, rows.lengths, range(len(rows.contexts) + 1), rows.contexts,
                      rows.q, out.data_ptr(), stream, lse=dense.data_ptr())
        self._under_way.append((layer, lse, dense, out)) # which must live until then

    def settle(self) -> None:
        """Add what was compared, after the work or after it."""
        for layer, lse, dense, _ in self._under_way:
            share = torch.exp(lse.double() - dense.double())
            self._total, self._selects = self._total.to(lse.device), self._selects.to(lse.device)
            is_answer = torch.isfinite(share) & self._selects[layer] # a row that is lost has none
            self._total += torch.stack((is_answer.sum().double(),
                                        torch.where(is_answer, share, 0.0).sum()))
        self._under_way.clear()

    def read(self) -> Tuple[int, float]:
        """Query heads that were compared, and the sum of their shares; waits for the device."""
        verified, total = self._total.tolist()
        return int(verified), total
