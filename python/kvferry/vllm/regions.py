# SPDX-License-Identifier: Apache-2.0
"""Which region of the device (kvferry/blocks.h) has the window of which request.

A row that keeps its region keeps its window, wherever in the batch it is. Imports nothing of vLLM.
Invariant: rows of one call have different regions. A wrong guess costs misses, and never an answer.
"""
from collections import defaultdict
from typing import Dict, List, Sequence, Tuple


class Regions:
    """Regions 0 to count - 1, each of the request that used it last."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._of: Dict[int, int] = {} # of requests, in the order of their last use

    @property
    def used(self) -> int:
        """How many a request has."""
        return len(self._of)

    def give(self, requests: Sequence[int]) -> List[int]:
        """Regions of the rows of a call, which are not more than there are regions."""
        for request in requests:
            if request in self._of:
                self._of[request] = self._of.pop(request)
        for request in requests:
            if request not in self._of:
                free = len(self._of)
                self._of[request] = free if free < self.count else self._of.pop(next(iter(self._of)))
        return [self._of[request] for request in requests]


class Followed:
    """Numbers of requests, where the runner says none: whoever begins where a row ended is its request.

    Most rows stay where they were; of those that moved, equal lengths may be taken for each other.

    passes   how many may be under way at once, each with other requests
    drafts   candidates of a row at most: so many tokens may be taken back
    """

    def __init__(self, passes: int = 1, drafts: int = 0) -> None:
        self.passes, self.drafts, self._pass, self._next = passes, drafts, 0, 0
        self._rows: Dict[int, Tuple[int, int, int]] = {} # by number: place, tokens, pass

    def number(self, begins: Sequence[int], ends: Sequence[int]) -> List[int]:
        """For rows that had `begins` tokens before this pass and have `ends` after it."""
        self._pass += 1
        places = {(place, end): number for number, (place, end, _) in self._rows.items()}
        stayed = [next((places[row, begin + back] for back in range(self.drafts + 1)
                        if (row, begin + back) in places), None) for row, begin in enumerate(begins)]
        moved, kept = defaultdict(list), set(stayed)
        for number, (_, end, _) in self._rows.items():
            if number not in kept:
                moved[end].append(number)
        numbers = [self._find(moved, begin) if number is None else number
                   for begin, number in zip(begins, stayed)]
        rows = {number: row for number, row in self._rows.items() if row[2] > self._pass - self.passes}
        self._rows = {**rows, **{number: (place, end, self._pass)
                                 for place, (number, end) in enumerate(zip(numbers, ends))}}
        return numbers

    def _find(self, moved: Dict[int, List[int]], begin: int) -> int:
        for back in range(self.drafts + 1):
            if moved[begin + back]:
                return moved[begin + back].pop()
        self._next += 1
        return self._next
