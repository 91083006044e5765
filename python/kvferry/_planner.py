# SPDX-License-Identifier: Apache-2.0
"""How much of a model's cache fits a card and host memory, what a step brings to the card, and how many requests keep
their budget there: the one function under `kvferry plan`, its table of cards, and what an engine admits.

Knows no engine's configuration and reserves nothing. Invariant: sizes are those of the library's own plans.
"""
import sys
from typing import Any, NamedTuple, Optional

from ._blocks import Blocks
from ._cache import make_config
from ._errors import OutOfMemory, Unsupported
from ._runtime import Runtime
from .capi import BlocksPlan
from .vllm.memory import Asked, Sums, blocks_that_fit, divide_own, most

GIB = 1 << 30
UNSEALED = 16 # tokens that a local window has beyond local_tokens: up to a block of 32, which is sealed as a whole
RATES = (0.0, 0.5, 0.9) # of hits, for which a plan tells bytes of a step


class Windows(NamedTuple):
    """Layers that see a part of the context. They are the engine's, whose blocks for them lie on the card."""
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int # that a layer sees


class Model(NamedTuple):
    """The model, or a rank's share of it. Layers are those that see everything."""
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    tokens: int # that it was made for
    value_dim: int = 0 # 0: as wide as keys
    windows: Optional[Windows] = None
    element: int = 2 # bytes of a number

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in layers that see everything, as the model has them."""
        return self.layers * self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim)) * self.element


class Groups(NamedTuple):
    """Numbers of blocks of an engine that gives all layers blocks of as many bytes."""
    block_tokens: int # of layers that see everything
    block_bytes: int
    others: int = 0 # blocks of other layers under the same numbers, of a request
    window: int = 0 # tokens that these see
    window_block: int = 1 # tokens of such a block

    def blocks_of(self, tokens: int) -> int:
        """Blocks of a request."""
        each = -(-min(tokens, self.window) // self.window_block) + 1 if self.others else 0
        return -(-tokens // self.block_tokens) + self.others * each


def groups_of(model: Model, code_bytes: int, block_tokens: int) -> Groups:
    """As vLLM makes them: groups have as many layers as the kind that has fewest, unless the other kind has few more.

    code_bytes   of a block of kvferry's, with block_tokens, in one layer
    """
    w = model.windows
    if w is None:
        return Groups(block_tokens, model.layers * code_bytes)
    theirs = block_tokens * w.kv_heads * w.head_dim * 2 * model.element
    few, many = sorted((model.layers, w.layers))
    layers = many if many < 1.5 * few else few
    if model.layers > layers:
        raise Unsupported("layers that see everything in several groups of blocks: kvferry does not serve that")
    larger = theirs // code_bytes if theirs % code_bytes == 0 else 1 # else vLLM pads the smaller block
    return Groups(block_tokens * larger, layers * max(theirs, code_bytes), -(-w.layers // layers), w.tokens, block_tokens)


class Budget(NamedTuple):
    """The tokens that a step of a request selects."""
    window: int # tokens: sink and local window
    selected: int # tokens beside these, at most
    token_bytes: float # of a token's keys and values in pages, all layers and heads

    @property
    def bytes(self) -> int:
        """Bytes of the pages that are selected."""
        return int(self.selected * self.token_bytes)


class Plan(NamedTuple):
    """The parts of a card and of host memory, and the load that they carry."""
    model: Model
    load: Asked
    groups: Groups
    there: BlocksPlan
    blocks: int
    windows: int # requests whose sink and local window have room on the card
    by_host: bool # what bounds it: host memory, or the card
    budget: Budget
    admitted: int # requests at once with which all keep their budget on the card, beside as many blocks

    @property
    def code_bytes(self) -> int:
        """In the engine's own blocks, with those of other layers."""
        return self.blocks * self.groups.block_bytes

    @property
    def tokens(self) -> int:
        """Tokens of all requests, where other layers take no block."""
        return (self.blocks - 1) * self.groups.block_tokens

    @property
    def is_whole(self) -> bool:
        """Whether pages are read where they are."""
        return self.load.left is None and self.load.own is None

    @property
    def resident_tokens(self) -> int:
        """Tokens of these whose pages stay on the card."""
        return self.tokens if self.is_whole else min(self.there.resident_tokens, self.tokens)

    @property
    def kept(self) -> int:
        """Requests that keep their budget on the card, whatever their length."""
        if self.is_whole:
            return self.load.requests
        return min(self.load.requests, self.windows, self.resident_tokens // max(1, self.budget.selected))

    def requests_of(self, tokens: int) -> int:
        """That fit at once."""
        return min(self.load.requests, (self.blocks - 1) // self.groups.blocks_of(tokens))

    def step_bytes(self, requests: int, rate: float) -> float:
        """That a step of so many requests brings to the card, where such a share of pages is found there."""
        b = self.budget
        brought = b.window if requests > self.windows else 1 # rows take regions in turn, and all bring their window anew
        return requests * (b.bytes * (1 - rate) + brought * b.token_bytes)


def budget_of(runtime: Runtime, shape: dict, tokens: int, block_tokens: int) -> Budget:
    """By settings of a cache with its shape."""
    config = make_config(shape, [], [])
    window = config.sink_tokens + config.local_tokens + UNSEALED # on average
    budget = min(tokens, max(config.budget_tokens, int(config.budget_share * tokens)))
    few, many = (_sized(runtime, shape, blocks, 1, block_tokens, block_tokens).host_bytes for blocks in (2, 1002))
    return Budget(window, max(0, budget - window), (many - few) / 1000 / block_tokens)


def shape_of(model: Model, settings: dict) -> dict:
    """Settings of a cache for a model, without its memory."""
    return dict(dtype="bf16" if model.element == 2 else "fp32", layers=model.layers, query_heads=model.query_heads,
                kv_heads=model.kv_heads, head_dim=model.head_dim, value_dim=model.value_dim or model.head_dim, **settings)


def plan(runtime: Runtime, model: Model, load: Asked, settings: dict) -> Plan:
    """Plan a load, whose blocks follow from the model; OutOfMemory says what to change where one request does not fit.

    settings   of the cache, as `kvferry.Cache` takes them, without memory
    """
    shape = shape_of(model, {"transfer": "auto" if load.left is None else "mapped", **settings})
    groups = groups_of(model, _sized(runtime, shape, 2, 1, 32, load.block_tokens).code_bytes, load.block_tokens)

    def sized(blocks: int, regions: int, tokens: int, device_bytes: Any = 0) -> BlocksPlan:
        return _sized(runtime, shape, blocks, regions, tokens, groups.block_tokens, device_bytes)
    left = sys.maxsize if load.left is None and load.own is not None else load.left # nothing else bounds it there
    sums = Sums(load._replace(block_tokens=groups.block_tokens, block_bytes=groups.block_bytes, left=left,
                              others=groups.blocks_of(load.tokens) - -(-load.tokens // groups.block_tokens)), sized)
    blocks = blocks_that_fit(sums)
    own = divide_own(sums, blocks)
    there = sized(blocks, own.regions, load.tokens, "auto" if own.device_bytes is None else own.device_bytes)
    budget = budget_of(runtime, shape, load.tokens, groups.block_tokens)

    def keeps(requests: int) -> bool:
        if left is None:
            return True
        try:
            mine = divide_own(sums.with_requests(requests), blocks)
        except OutOfMemory:
            return False
        return mine.regions >= requests and sized(
            blocks, mine.regions, load.tokens, mine.device_bytes).resident_tokens >= requests * budget.selected
    return Plan(model, load, groups, there, blocks, own.regions, blocks == sums.blocks_on_host(load.tokens), budget,
                max(1, most(keeps, load.requests)))


def _sized(runtime: Runtime, shape: dict, blocks: int, regions: int, tokens: int, block_tokens: int,
           device_bytes: Any = 0) -> BlocksPlan:
    return Blocks.plan_for(runtime, block_count=blocks, block_tokens=block_tokens, tokens_max=tokens,
                           sequences_max=regions, device_bytes=device_bytes, **shape)
