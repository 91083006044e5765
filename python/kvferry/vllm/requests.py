# SPDX-License-Identifier: Apache-2.0
"""Which sequence holds the tokens of which request, when all that is known are block ids.

vLLM's blocks hold nothing here: they are tickets. A request is known by the first block of its table.
Without prefix caching no two live requests have a block in common, so a block that turns up in another
request says that the one that had it has ended, was preempted or was aborted. Imports nothing of vLLM.

Invariants: every block belongs to one sequence at most, so that sequences hold no more tokens than
vLLM's blocks have; a sequence holds exactly the tokens that its request had before the pass, unless
a key or value of it was not finite: then the request is lost, until its blocks are given up.
"""
import logging
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

from .._cache import Cache, Sequence
from .._errors import Error
from ..capi import Status

log = logging.getLogger("vllm.kvferry") # vLLM shows what is under its own name


class Row(NamedTuple):
    """A request in a pass: its tokens are start ... end - 1 of the pass, `context` came before."""
    start: int
    end: int
    context: int
    first: int # block of its table
    blocks: Iterable[int] # that it writes in this pass
    is_prompt: bool # tokens of a prompt, even if it is one


class _Held:
    """A sequence, its blocks, the pass that used it last, and whether its values are of any use."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.blocks: set = set()
        self.seen = 0
        self.is_lost = False


class Requests:
    """Sequences of a cache by the requests that they are of.

    limit   how many may be alive
    flight  passes that may be under way at once: a request that lives was in one of them
    """

    def __init__(self, cache: Cache, limit: int, flight: int = 1) -> None:
        self.cache, self.limit, self.flight = cache, limit, flight
        self._by_first: Dict[int, _Held] = {} # least recently used first
        self._of_block: Dict[int, int] = {} # first block of the request that has it
        self._pass = 0
        self.lost = 0 # requests with a value that was not finite

    def __len__(self) -> int:
        return len(self._by_first)

    def tokens(self) -> int:
        """That all sequences hold together."""
        return sum(len(held.sequence) for held in self._by_first.values())

    def enter(self, rows: List[Row]) -> List[Optional[Sequence]]:
        """The sequences of the requests of a pass, each with `context` tokens; None = it is lost."""
        self._pass += 1
        found: Dict[int, Optional[Sequence]] = {}
        # Those that go on come first: then what was not seen for longest is not of this pass.
        for row in sorted(rows, key=lambda row: row.context == 0):
            held = self._begin(row) if row.context == 0 else self._go_on(row)
            held.seen = self._pass
            for block in row.blocks:
                if self._of_block.get(block) != row.first:
                    self._take(block, row.first, held)
            found[row.first] = None if held.is_lost else held.sequence
        return [found[row.first] for row in rows]

    def lose(self, sequence: Sequence, error: Error) -> None:
        """The library refused to go on with a sequence. Raises what is not about its values."""
        if error.status != Status.NOT_FINITE:
            raise error
        held = next(held for held in self._by_first.values() if held.sequence is sequence)
        if not held.is_lost:
            held.is_lost = True
            self.lost += 1
            log.warning("kvferry: a request is lost, others go on: %s", error.text.split(";")[0])

    def _go_on(self, row: Row) -> _Held:
        held = self._by_first.pop(row.first, None)
        if held is None:
            raise Error("kvferry: a request goes on after %d tokens that were never seen here; blocks "
                        "were filled by something else than this model's passes" % row.context)
        self._by_first[row.first] = held
        if held.is_lost:
            return held
        tokens = len(held.sequence)
        if tokens > row.context: # candidates that were not taken
            self._take_back(held, row.context)
        elif tokens < row.context:
            raise Error("kvferry: a request goes on after %d tokens, of which %d were seen here" % (
                row.context, tokens))
        return held

    def _take_back(self, held: _Held, tokens: int) -> None:
        """In the order of the passes."""
        runtime = self.cache.runtime
        try:
            held.sequence.truncate(tokens, runtime.torch_stream() if runtime.on_cuda else None)
        except Error as error:
            self.lose(held.sequence, error)

    def _begin(self, row: Row) -> _Held:
        for block in (row.first, *row.blocks):
            if block in self._of_block:
                self._drop(self._of_block[block])
        if len(self) >= self.limit:
            oldest = next(iter(self._by_first))
            if self._by_first[oldest].seen > self._pass - self.flight:
                raise Error("kvferry: more than %d requests are alive at once; lower max_num_seqs"
                            % self.limit)
            self._drop(oldest)
        held = self._by_first[row.first] = _Held(self.cache.sequence())
        return held

    def _take(self, block: int, first: int, held: _Held) -> None:
        if block in self._of_block:
            self._drop(self._of_block[block])
        self._of_block[block] = first
        held.blocks.add(block)

    def _drop(self, first: int) -> None:
        held = self._by_first.pop(first)
        for block in held.blocks:
            del self._of_block[block]
        held.sequence.close()


def rows_of(starts: List[int], lengths: List[int], firsts: List[int], slots: Any, block_tokens: int,
            prompts: List[bool]) -> List[Row]:
    """Rows of a pass as vLLM describes it; those of padding, without tokens or blocks, are left out.

    slots   NumPy integers, per token the place in its block: block * block_tokens + offset
    """
    rows = []
    for i, first in enumerate(firsts):
        start, end = starts[i], starts[i + 1]
        if start == end or first == 0: # block 0 is nobody's
            continue
        ids = slots[start:end] // block_tokens
        blocks = (int(ids[0]),) if end - start == 1 else dict.fromkeys(ids.tolist())
        rows.append(Row(start, end, lengths[i] - (end - start), first, blocks, prompts[i]))
    return rows
