# SPDX-License-Identifier: Apache-2.0
"""The blocks of a rank: how many there are, and the pages under them.

Knows the engine, but neither passes nor tensors of vLLM. Invariant: vLLM has as many blocks as
have pages in host memory and codes on the device, so what its scheduler admits has room.
"""
import functools
import logging
import sys
import time
from typing import Any, List, NamedTuple, Optional, Set, Tuple

import torch

from .. import __version__
from .._blocks import Blocks
from .._errors import OutOfMemory, Unsupported
from .._planner import budget_of
from .._runtime import Runtime, Stream
from ..capi import BlocksPlan, BlocksStats, Pages, Select
from . import estimate as _estimate
from . import heads as _heads
from . import options as _options
from .calls import follow
from .progress import Progress
from .memory import Asked, Card, Sums, blocks_that_fit, divide_own, shown, warning
from .metrics import Written, values_of
from .refusals import refuse, without_cuda
from .upstream import IS_CPU, Engine, number_of_layer
from .verify import Recall

log = logging.getLogger("vllm.kvferry") # vLLM shows what is under its own name

MIB = 1 << 20
GPU_LISTS = 65535 # of a call: a launch takes so many
COUNTED = [name for name, *_ in BlocksStats._fields_]
TELL_SECONDS = 1.0 # between readings of a GPU's counters


class Pool:
    """One per engine and process.

    layers  our attention layers of this rank that have keys, by name, in the order of the model
    names   of these and of those that attend to keys of one of them
    """

    def __init__(self, engine: Engine, layers: dict, names: Set[str]) -> None:
        self.layers, self.names, self.engine = layers, names, engine
        first = next(iter(layers.values()))
        ground = ground_of(engine, first.heads)
        self.options, self.runtime = ground.options, ground.runtime
        self._shape = self._settings()
        self.blocks: Optional[Blocks] = None # once it is open, but while it sleeps
        self.rows_each = 1 + engine.drafts # of a request
        self.regions = 0 # of the device: most rows of a call, once it is open
        self._sums: Optional[Sums] = None # once blocks are sized
        self._block_tokens, self._are_all_ours = 0, True
        self._stream: Optional[Stream] = None # of a host device
        self._make: Any = None # makes the blocks, once their number is known
        self.counters = Written(engine=str(engine.number), rank=str(engine.rank))
        self.recall = Recall(self.options.verify_interval, _heads.that_select(
            self._shape["head_mask"], *(self._shape[n] for n in ("layers", "query_heads", "kv_heads"))))
        self._steps = 0
        self._read, self._told = 0.0, time.monotonic()
        self._gauged, self._hit_rate = (self._told, BlocksStats()), 1.0
        self._held, self._windows = 0, 0 # of the latest pass
        self._mark: Any = None # an event after passes that are read once they are done
        self._before = self._latest = (0, BlocksStats(), (0, 0.0))
        self._counted = BlocksStats() # before it slept
        self._is_poisoned = False # the last pass had a row without an answer

    def _settings(self) -> dict:
        """Settings of the blocks, without their number."""
        engine, impl = self.engine, next(iter(self.layers.values()))
        shapes = {i.heads._replace(scale=0.0) for i in self.layers.values()}
        if len(shapes) > 1:
            refuse("layers of different shapes", "take another model")
        mask = None
        if self.options.head_mask is not None:
            mask = _heads.read(
                self.options.head_mask, engine.layers_in_all, engine.kv_heads_in_all,
                _heads.Share([number_of_layer(name) for name in self.layers], impl.num_kv_heads,
                             engine.rank % engine.ranks, engine.ranks))
        return dict(
            self.options.cache, head_mask=mask, layers=len(self.layers), query_heads=impl.num_heads,
            kv_heads=impl.num_kv_heads, head_dim=impl.head_size, value_dim=impl.heads.values,
            dtype=engine.dtype, softmax_scale=impl.scale)

    # -- how many blocks --

    def _plan(self, blocks: int, regions: int, tokens: int) -> BlocksPlan:
        """With as few slots as a step needs."""
        return Blocks.plan_for(self.runtime, block_count=blocks, block_tokens=self._block_tokens, device_bytes=0,
                               tokens_max=tokens, sequences_max=regions, **self._shape)

    def size_blocks(self, bytes_of_vllm: int, block_tokens: int, are_all_ours: bool) -> None:
        """Tell vLLM how many blocks there are, each with `bytes_of_vllm` bytes of its own tensors."""
        self._block_tokens, self._are_all_ours = block_tokens, are_all_ours
        engine = self.engine
        room = self.options.host_memory or _options.default_memory(
            engine.ranks_in_all, engine.number, self.runtime.describe()["memory"], self.runtime.on_cuda)
        own = self.options.device_memory # on a CPU, which moves no page by itself, nothing bounds it
        asked = Asked(room, engine.requests, engine.tokens, block_tokens, bytes_of_vllm,
                      None if own is None else sys.maxsize, own, rows_each=self.rows_each)
        if self.runtime.on_cuda:
            rank = _estimate.of_engine(engine)
            asked = asked._replace(
                left=_left(engine, torch.cuda.memory_allocated(), _graphs(engine) + _estimate.activations(
                    rank, engine.tokens_of_a_pass, engine.requests)),
                request_bytes=rank.vocabulary * _estimate.LOGIT_BYTES,
                rows_max=GPU_LISTS // self._shape["kv_heads"],
                reserve=0 if self.options.admit == _options.ALL else engine.requests * budget_of(
                    self.runtime, self._shape, engine.tokens, block_tokens).bytes)
        self._sums = Sums(asked, self._plan)
        blocks = blocks_that_fit(self._sums)
        told = warning(room, blocks * block_tokens, self._token_bytes(), asked.left if self.runtime.on_cuda else None)
        if told is not None:
            log.warning("kvferry: %s", told)
        engine.bytes_of_blocks = blocks * bytes_of_vllm

    def _token_bytes(self) -> int:
        """Keys and values of a token as vLLM alone would have them, in our layers of this rank."""
        s = self._shape
        return s["layers"] * s["kv_heads"] * (s["head_dim"] + s["value_dim"]) * self.engine.dtype.itemsize

    def open(self, block_tokens: int) -> None:
        """Reserve all memory, when vLLM has settled on blocks and has measured its activations."""
        assert self._sums is not None
        self._block_tokens = block_tokens
        if self.blocks is not None: # of an earlier try
            self.blocks.close()
        count, limit, tokens = self.engine.blocks, self.options.host_memory, self.engine.tokens
        need = self._sums.host(count, tokens)
        if limit is not None and need > limit:
            raise OutOfMemory("num_gpu_blocks_override = %d: so many blocks take %s of host_memory, "
                              "which is %s; lower it, or give more" % (count, shown(need), shown(limit)))
        if self.runtime.on_cuda:
            asked = self._sums.asked._replace(left=_left(
                self.engine, torch.cuda.max_memory_allocated(), _graphs(self.engine)))
            self._sums = Sums(asked, self._plan)
        own = divide_own(self._sums, count, self.engine.blocks_were_said)
        self.regions = own.regions
        self._make = functools.partial(
            Blocks, self.runtime, block_count=count, block_tokens=block_tokens, tokens_max=tokens,
            sequences_max=own.regions, device_bytes="auto" if own.device_bytes is None else own.device_bytes,
            **self._shape)
        self._reserve()
        for teller in self.engine.tellers():
            follow(self, teller)
        self._stream = None if self.runtime.on_cuda else Stream(self.runtime)
        log.info("%s", self.describe())

    def _reserve(self) -> None:
        with Progress(self._sums.host(self.engine.blocks, self.engine.tokens) if self._sums else 0):
            self.blocks = self._make()
        self.set_all_params()

    def set_all_params(self) -> None:
        """Say it of every layer: blocks or weights are new."""
        for index in range(len(self.layers)):
            self.set_params(index)

    def set_params(self, index: int) -> None:
        """Say what a layer attends with beside keys and values."""
        impl = list(self.layers.values())[index]
        is_plain = impl.sinks is None and not impl.soft_cap and impl.scale == self._shape["softmax_scale"]
        if self.blocks is not None and not is_plain:
            sinks = None if impl.sinks is None else impl.sinks.detach().float().cpu().numpy()
            self.blocks.attention_params(index, scale=impl.scale, sinks=sinks, soft_cap=impl.soft_cap)

    def copy(self, pairs: List[Tuple[int, int]]) -> None:
        """Pages of blocks onto those of others, as vLLM does it with their codes."""
        if pairs:
            assert self.blocks is not None
            stream = self.stream()
            self.blocks.copy(pairs, stream)
            if self._stream is not None:
                stream.wait()

    def describe(self) -> str:
        """Settings in force, in a line."""
        assert self.blocks is not None
        s, plan, mask = self.blocks.settings, self.blocks.plan, self._shape["head_mask"]
        blocks, requests = self.engine.blocks - 1, self.engine.requests
        return ("kvferry %s on %s: budget %d, pages of %d tokens%s, select %s%s; %d blocks of %d, %d tokens fit%s, "
                "in %d requests at once of up to %d%s; host memory %d MiB, device memory %d MiB and %d MiB "
                "in vLLM's blocks" % (
                    __version__, self.runtime.device_name, s.budget_tokens, s.page_size,
                    "" if s.pages == Pages.NATIVE else " in " + Pages(s.pages).name.lower(),
                    Select(s.select).name.lower(),
                    "" if mask is None else ", " + _heads.describe(mask), blocks, self._block_tokens,
                    blocks * self._block_tokens,
                    "" if self._are_all_ours else " where other layers take no block",
                    requests, s.tokens_max,
                    ", %d of them with a window of their own on the device" % (self.regions // self.rows_each)
                    if self.regions < requests * self.rows_each else "",
                    plan.host_bytes // MIB, plan.device_bytes // MIB,
                    (blocks + 1) * len(self.layers) * plan.code_bytes // MIB))

    # -- while it serves --

    def stream(self) -> Stream:
        """Where the work of a layer goes: torch's own stream, or one that is waited for."""
        return self._stream or self.runtime.torch_stream()

    def begin(self, steps: int, held: int, windows: int) -> None:
        """A pass comes; where layers are in a graph nothing else is called of it.

        steps     rows of steps
        held      tokens of all rows
        windows   regions that a request has
        """
        self._held, self._windows = held, windows
        self._steps += steps * len(self.names)
        if self._stream is not None:
            return
        if self._mark is None and time.monotonic() - self._read >= TELL_SECONDS:
            self._mark = torch.cuda.Event()
            self._mark.record()
        elif self._mark is not None and self._mark.query(): # in a later pass, and nobody waits
            self._mark = None
            self._tell()

    def done(self, stream: Stream, is_last: bool) -> None:
        """A layer is enqueued; on the host device, what it wrote is read next."""
        if self._stream is not None:
            stream.wait()
        self.recall.settle()
        if is_last and self._stream is not None:
            self._tell()

    def _tell(self) -> None:
        """After a pass: counters, and now and then a line, if there was something to do."""
        assert self.blocks is not None
        self._read = now = time.monotonic()
        stats, last = self._stats(), self._latest[1]
        self._latest = self._steps, stats, self.recall.read()
        self.counters.write(values_of(*self._latest))
        if now - self._gauged[0] >= TELL_SECONDS:
            self._write_gauges(now)
        is_poisoned = stats.bad_rows > last.bad_rows
        if is_poisoned and not self._is_poisoned:
            log.warning("kvferry: a request is lost, others go on: a key or value of it is not finite")
        self._is_poisoned = is_poisoned
        if self.options.log_interval and now - self._told >= self.options.log_interval:
            if self._steps != self._before[0]:
                log.info("%s", self._line())
            self._told, self._before = now, self._latest

    def _write_gauges(self, now: float) -> None:
        """Since the last ones."""
        assert self.blocks is not None
        (when, before), stats, plan = self._gauged, self._latest[1], self.blocks.plan
        came, had = (s.bytes_to_device + s.bytes_prompt for s in (stats, before))
        hits, misses = stats.hits - before.hits, stats.misses - before.misses
        if hits + misses:
            self._hit_rate = hits / (hits + misses)
        each = plan.host_bytes / (self.engine.blocks * self._block_tokens)
        self.counters.write_gauges([plan.host_bytes, min(plan.host_bytes, self._held * each), self.regions, self._windows,
                                    self._hit_rate, (came - had) / (now - when)])
        self._gauged = now, stats

    @property
    def budget(self) -> int:
        """Tokens of a step."""
        assert self.blocks is not None
        return self.blocks.settings.budget_tokens

    def _line(self) -> str:
        """Counters since the last line."""
        assert self.blocks is not None
        (steps, now, recall), (steps_before, before, recall_before) = self._latest, self._before
        verified, share = (a - b for a, b in zip(recall, recall_before))
        hits, misses = now.hits - before.hits, now.misses - before.misses
        return ("kvferry: %.0f tokens attended per KV head and step, %.1f%% of pages were on the device, "
                "%d MiB fetched%s" % (
                    (now.tokens_attended - before.tokens_attended) / (steps - steps_before)
                    / self.blocks.settings.kv_heads,
                    100.0 * hits / (hits + misses) if hits + misses else 100.0,
                    (now.bytes_to_device - before.bytes_to_device) // MIB,
                    ", recall %.2f%%" % (100.0 * share / verified) if verified else ""))

    def sleep(self) -> None:
        """Give pages back. Nobody asks for them again: vLLM forgets what its blocks held."""
        if self.blocks is not None:
            self.stream().wait()
            self._counted = self._stats()
            plan = self.blocks.plan
            self.blocks.close()
            self.blocks = None
            log.info("kvferry sleeps: %d MiB of host memory and %d MiB of device memory are given back",
                     plan.host_bytes // MIB, plan.device_bytes // MIB)

    def wake(self) -> None:
        """Reserve what was there, empty."""
        if self.blocks is None:
            self._reserve()
            log.info("kvferry is awake")

    def _stats(self) -> BlocksStats:
        """Since the engine began."""
        assert self.blocks is not None
        now = self.blocks.stats()
        for name in COUNTED:
            setattr(now, name, getattr(now, name) + getattr(self._counted, name))
        return now

    def close(self) -> None:
        """Give all memory back."""
        self.runtime.close()


class Heads(NamedTuple):
    """Heads of a layer of a rank."""
    query: int
    kv: int
    size: int
    values: int # elements of a value in pages
    scale: float


class Ground(NamedTuple):
    """The runtime that a pool stands on, there before weights are loaded."""
    engine: Engine
    options: _options.Options
    runtime: Runtime


_ground: List[Ground] = [] # of the newest engine of this process


def ground_of(engine: Engine, heads: Heads) -> Ground:
    """Settings and the runtime of an engine's rank. The first time, with its first layer, settings are
    tried: what they contradict is refused before weights are loaded."""
    if not _ground or _ground[0].engine != engine:
        options = _options.of_engine(engine)
        runtime = _runtime(options)
        try:
            _try(engine, options, runtime, heads)
        except Exception:
            runtime.close()
            raise
        _ground[:] = [Ground(engine, options, runtime)]
    return _ground[0]


def _try(engine: Any, options: _options.Options, runtime: Runtime, heads: Heads) -> None:
    """Where memory comes from; and a plan of all layers and heads of the model, if they are of different kinds, else of
    one layer."""
    if engine.bytes_of_blocks is not None:
        refuse("kv_cache_memory_bytes = %d" % engine.bytes_of_blocks,
               "the number of blocks follows from host_memory, and on a GPU device_memory and gpu_memory_utilization: set "
               "these, and leave --kv-cache-memory-bytes and VLLM_CPU_KVCACHE_SPACE out")
    if options.host_memory is None:
        _options.default_memory(engine.ranks_in_all, engine.number)
    else:
        _options.check_memory(options.host_memory, runtime.describe()["memory"])
    mask, layers, kv, query = None, 1, heads.kv, heads.query
    # Beside layers of other kinds vLLM makes our blocks larger than was said.
    is_said = engine.block_tokens_were_said and not (engine.backends_by_kind or engine.is_hybrid)
    if options.head_mask is not None:
        layers, kv = engine.layers_in_all, engine.kv_heads_in_all
        query = kv * (heads.query // heads.kv)
        mask = _heads.read(options.head_mask, layers, kv, _heads.Share(range(layers), kv, 0, 1))
    Blocks.plan_for(runtime, block_count=2, device_bytes=0, sequences_max=1, tokens_max=engine.tokens,
                    block_tokens=engine.block_tokens if is_said else 64, head_mask=mask,
                    layers=layers, query_heads=query, kv_heads=kv, head_dim=heads.size, value_dim=heads.values,
                    dtype=engine.dtype, softmax_scale=heads.scale, **options.cache)


@functools.lru_cache(maxsize=None)
def look() -> tuple:
    """Memory of a GPU, free and in all, when this is first asked: before weights are loaded."""
    if IS_CPU:
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved(), total


def _left(engine: Engine, held: int, ahead: int = 0) -> int:
    free, total = look()
    card = Card(total, engine.share_of_card, free)
    return card.left(torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved(), held, ahead)


def _graphs(engine: Engine) -> int:
    """Bytes of CUDA graphs, which come when all is open."""
    return _estimate.graphs(_estimate.of_engine(engine), engine.graph_sizes or (),
                            -(-engine.layers_in_all // engine.stages))


def _runtime(options: _options.Options) -> Runtime:
    def line(level: int, text: str) -> None:
        log.info("kvferry: %s", text)
    if IS_CPU:
        return Runtime(device="host", log=line, **options.runtime)
    try:
        return Runtime(device="cuda", device_ordinal=torch.cuda.current_device(), log=line, **options.runtime)
    except Unsupported as error:
        raise Unsupported(without_cuda(str(error))) from error
