# SPDX-License-Identifier: Apache-2.0
"""Arrays of the rows of a pass on the device beside vLLM's own: at the same place in every pass.

A CUDA graph has the addresses of the pass with which it was captured, and reads there what later passes
put. Imports nothing of vLLM. Invariant: rows after those of a pass, which a graph may have, have no
tokens.
"""
from typing import Any, List, Optional, Tuple

import torch

from .rows import Rows


class Arrays:
    """Arrays of one rank.

    rows   of a pass, at most
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._regions, self._lengths = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        self._table: Optional[torch.Tensor] = None # as wide as vLLM's, once it was seen
        self._last: List[int] = [] # the regions that are there

    def put_regions(self, regions: List[int]) -> torch.Tensor:
        """One of every row."""
        count = len(regions)
        if regions != self._last[:count]:
            self._regions[:count].copy_(self._near(regions), non_blocking=True)
            self._last[:count] = regions
        return self._regions[:count]

    def put_rows(self, table: torch.Tensor, lengths: torch.Tensor, rows: Rows) -> Tuple[torch.Tensor, torch.Tensor]:
        """Tables and lengths of rows that come from those of the batch."""
        count = len(rows.of)
        if self._table is None:
            self._table = torch.zeros(len(self._lengths), table.shape[1], dtype=torch.int32, device=table.device)
        of, behind = self._near([rows.of, rows.behind]).to(table.device, non_blocking=True)
        torch.index_select(table, 0, of, out=self._table[:count])
        self._lengths.zero_()
        torch.sub(lengths.index_select(0, of), behind, out=self._lengths[:count])
        return self._table[:count], self._lengths[:count]

    def _near(self, numbers: List[Any]) -> torch.Tensor:
        """In host memory, from where it is copied."""
        return torch.tensor(numbers, dtype=torch.int32, pin_memory=self._regions.is_cuda)
