# SPDX-License-Identifier: Apache-2.0
"""The memory that blocks, windows and the cache of pages take: divided before any of it is reserved.

Blocks follow host memory, and what vLLM has of them lies on the device: codes. Beside them is what is
kvferry's own there: windows of requests (regions.py), tables, room for a layer of a prompt, and the cache of
pages, which gets what is left. Imports nothing of vLLM. Invariant: what fits by these sums fits; what does not is refused with values
that would.
"""
import sys
from typing import Any, Callable, NamedTuple, Optional

from .._errors import OutOfMemory

# Shares of the device memory that vLLM leaves: windows have an eighth before blocks are counted, and
# the cache of pages an eighth after them.
PART = 8


class Asked(NamedTuple):
    """The load that an engine is to serve, in bytes and tokens of a rank."""
    host: int # memory for pages
    requests: int # at once
    tokens: int # of a request, with its answer
    block_tokens: int = 32
    block_bytes: int = 0 # of a block in vLLM's own tensors: codes, and what other layers have
    left: Optional[int] = None # of the device, beside weights and activations; None: it has none of its own
    own: Optional[int] = None # device_memory: what of it kvferry may take beside the blocks; None: what is left
    request_bytes: int = 0 # what activations have less of with a request less
    rows_each: int = 1 # of a request in a pass: its token, and candidates of a draft
    rows_max: int = sys.maxsize # of a call
    reserve: int = 0 # of the device, for budgets of all requests that are to stay there
    others: int = 0 # blocks that a request takes for layers of other kinds

    @property
    def rows(self) -> int:
        """Rows of a call, at most."""
        return min(self.requests * self.rows_each, self.rows_max)


class Sums:
    """Bytes that blocks and regions take.

    plan   (blocks, regions, tokens of a request) -> BlocksPlan, with as few slots as a step needs
    """

    def __init__(self, asked: Asked, plan: Callable[[int, int, int], Any]) -> None:
        self.asked, self._plan = asked, plan

    def with_requests(self, requests: int) -> "Sums":
        """Sums of an engine that serves fewer at once."""
        a = self.asked
        assert a.left is not None
        return Sums(a._replace(requests=requests, left=a.left + (a.requests - requests) * a.request_bytes), self._plan)

    def host(self, blocks: int, tokens: int) -> int:
        """Host memory of so many blocks."""
        return self._plan(blocks, self.asked.rows, tokens).host_bytes

    def own(self, blocks: int, regions: int, tokens: int) -> int:
        """Device memory of kvferry's own, at least."""
        return self._plan(blocks, regions, tokens).device_bytes

    def prompt(self, tokens: int) -> int:
        """The room in it for a layer of a prompt, which is there once."""
        return self._plan(2, 1, tokens).prompt_bytes

    def regions_within(self, room: int, blocks: int, tokens: int) -> int:
        """Regions that fit, at least one."""
        room += self.prompt(tokens)
        return max(1, most(lambda regions: self.own(blocks, regions, tokens) <= room, self.asked.rows))

    def first_regions(self, tokens: int) -> int:
        """Regions that there are in any case."""
        a = self.asked
        return a.rows if a.left is None else self.regions_within((a.own or a.left) // PART, 2, tokens)

    def blocks_on_host(self, tokens: int) -> int:
        """The most blocks whose pages fit in host memory."""
        return most(lambda blocks: self.host(blocks, tokens) <= self.asked.host)

    def blocks_on_device(self, tokens: int) -> Optional[int]:
        """The most blocks that fit on the device; None: any number does."""
        a = self.asked
        if a.left is None:
            return None
        left, regions = a.left, self.first_regions(tokens)

        def fits(blocks: int) -> bool:
            theirs, own = blocks * a.block_bytes, self.own(blocks, regions, tokens)
            if a.own:
                return theirs + a.own <= left and own <= a.own
            return theirs + own <= (left if a.own == 0 else left - max(left // PART, a.reserve))
        return most(fits)

    def blocks(self, tokens: int) -> int:
        """The most blocks, for requests of so many tokens."""
        on_host, on_device = self.blocks_on_host(tokens), self.blocks_on_device(tokens)
        return on_host if on_device is None else min(on_host, on_device)

    def needed(self, tokens: int) -> int:
        """Blocks that a request takes; vLLM keeps one that is nobody's."""
        return -(-tokens // self.asked.block_tokens) + self.asked.others + 1


def blocks_that_fit(sums: Sums) -> int:
    """How many blocks there are; OutOfMemory says what to change where one request does not fit."""
    a, tokens = sums.asked, sums.asked.tokens
    blocks, need = sums.blocks(tokens), sums.needed(tokens)
    if blocks >= need:
        return blocks
    fit = most(lambda some: sums.blocks(some * a.block_tokens) > some + a.others) * a.block_tokens
    ways = ["set max_model_len to %d" % fit] if fit else []
    if sums.blocks_on_host(tokens) < need:
        ways.insert(0, "give %s" % said(sums.host(need, tokens)))
        raise OutOfMemory("host_memory = %s: a request of max_model_len = %d tokens has %s of pages; %s"
                          % (said(a.host), tokens, shown(sums.host(need, tokens)), ", or ".join(ways)))
    assert a.left is not None
    if a.left <= 0:
        raise OutOfMemory("device memory: weights and activations alone take more than vLLM's share of the card, by %s; "
                          "raise gpu_memory_utilization, or share the model by tensor_parallel_size" % shown(-a.left))
    theirs, own = need * a.block_bytes, _with_spare(sums.own(need, 1, tokens))
    if a.own:
        if a.own < own:
            ways.insert(0, "give %s" % said(own))
        elif a.left - theirs >= own:
            ways.insert(0, "lower it to %s" % said(a.left - theirs, up=False))
        raise OutOfMemory(
            "device_memory = %s: %sa request of max_model_len = %d tokens takes %s in vLLM's blocks and %s of "
            "device_memory; %s" % (
                said(a.own), "" if a.left == sys.maxsize else "of %s beside weights and activations " % shown(a.left), tokens, shown(theirs), shown(own), ", or ".join(ways or ["raise gpu_memory_utilization"])))
    fewer = most(lambda requests: sums.with_requests(requests).blocks(tokens) >= need, a.requests)
    if fewer:
        ways.append("set max_num_seqs to %d, which makes activations smaller" % fewer)
    raise OutOfMemory(
        "device memory: vLLM's share less weights and activations is %s, and a request of max_model_len = %d "
        "tokens takes %s; %s" % (shown(a.left), tokens, shown(theirs + own), ", or ".join(
            ways + ["raise gpu_memory_utilization, or share the model by tensor_parallel_size"])))


def _with_spare(size: int) -> int:
    """So much that a part of it may go to windows."""
    return size * PART // (PART - 1) + 1


class Own(NamedTuple):
    """kvferry's own memory on the device."""
    regions: int
    device_bytes: Optional[int] # None: as the library decides


def divide_own(sums: Sums, blocks: int, were_said: bool = False) -> Own:
    """Windows beside so many blocks: of all requests, or half of what is left; the cache gets the rest. Less may be
    left than when blocks were counted, or num_gpu_blocks_override said how many there are."""
    a = sums.asked
    if a.left is None:
        return Own(a.rows, a.own)
    left, least = a.left - blocks * a.block_bytes, sums.own(blocks, 1, a.tokens)
    room = a.own or left
    if not least <= room <= left:
        raise OutOfMemory(_too_many(sums, blocks, were_said, left, max(least, a.own or 0)))
    room -= sums.prompt(a.tokens)
    if a.own == 0:
        return Own(min(sums.first_regions(a.tokens), sums.regions_within(room, blocks, a.tokens)), 0)
    return Own(sums.regions_within(room // 2, blocks, a.tokens), a.own or left)


def _too_many(sums: Sums, blocks: int, were_said: bool, left: int, own: int) -> str:
    """The refusal of so many blocks, with changes after which it starts."""
    a, lower = sums.asked, ""
    fit = sums.blocks_on_device(a.tokens) or 0
    if fit >= sums.needed(a.tokens):
        lower = "num_gpu_blocks_override to %d, " % fit if were_said else "host_memory to %s, " % said(
            sums.host(fit, a.tokens))
    there = "%s are left" % shown(left) if left > 0 else "nothing is left"
    return ("%s: beside weights, activations and %s of vLLM's blocks %s, and kvferry takes %s at "
            "least; lower %smax_num_seqs or max_model_len, or raise gpu_memory_utilization" % (
                "device_memory = %s" % said(a.own) if a.own else "device memory", shown(blocks * a.block_bytes), there,
                shown(own), lower))


PAYS = 2 # times what vLLM alone would hold: with less, budgets are attended to for little


def warning(host: int, tokens: int, token_bytes: int, left: Optional[int]) -> Optional[str]:
    """A line where host memory holds too little.

    token_bytes   of keys and values, in the type of the model
    left          of the card, beside weights and activations; None: it has none of its own
    """
    alone = 0 if left is None else max(0, left) // token_bytes
    if tokens >= PAYS * alone:
        return None
    pays = PAYS * alone * token_bytes
    if pays >= 1 << 30: # in whole GiB
        pays = -(-pays >> 30) << 30
    return ("host_memory = %s holds %d tokens, and vLLM alone would hold %d on this card: give %s or more, if there is as "
            "much, or serve without kvferry" % (said(host, up=False), tokens, alone, said(pays)))


class Card(NamedTuple):
    """A device, and what of it an engine may take."""
    total: int
    share: float # gpu_memory_utilization
    free: int # before the model was there

    def left(self, free: int, reserved: int, held: int, ahead: int = 0) -> int:
        """Bytes beside weights and activations.

        free       now
        reserved   of what is not free: what torch keeps
        held       the most of it that was in use at once
        ahead      what will be in use beyond that
        """
        return min(int(self.total * self.share), self.free) - (self.free - free - reserved) - held - ahead


UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))


def shown(size: float) -> str:
    """To read."""
    for unit, shift in UNITS:
        if size >= 1 << shift:
            return "%.1f %s" % (size / (1 << shift), unit)
    return "%d bytes" % size


def said(size: int, up: bool = True) -> str:
    """As a setting takes it, in a unit of which it has at least a thousand, if not a whole number of a larger one."""
    for unit, shift in UNITS:
        if size >= 1000 << shift or size and not size % (1 << shift):
            return "%d%s" % (-(-size >> shift) if up else size >> shift, unit)
    return str(size)


def most(fits: Callable[[int], bool], limit: Optional[int] = None) -> int:
    """The most, up to `limit`, that fits; 0 = none. More never takes less."""
    low, high = 0, 1
    while (limit is None or high <= limit) and fits(high):
        low, high = high, high * 2
    high = high if limit is None else min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
