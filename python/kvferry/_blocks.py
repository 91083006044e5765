# SPDX-License-Identifier: Apache-2.0
"""Pages under block tables of the caller (kvferry/blocks.h), for engines.

Knows no arrays: memory comes as addresses, and whoever calls keeps it alive until the work is done.
Invariant: a call but `get` enqueues and returns; nothing is copied or kept.
"""
import ctypes
from ctypes import addressof, byref
from typing import Any, Optional, Sequence as Many, Tuple

from .capi import (BlocksRows, BlocksConfig, BlocksDecodeArgs, BlocksExtendArgs, BlocksGetArgs, BlocksPlan,
                   BlocksStats, CacheConfig, BlocksPutArgs, lib, sized)
from ._cache import make_config, make_attention_params
from ._errors import Invalid, checked, raise_last
from ._handles import Handle, Node
from ._runtime import Runtime, Stream, behind_work

_ROWS_BYTES = ctypes.sizeof(BlocksRows)


def _config(block_count: int, block_tokens: int, settings: dict, keep: list) -> BlocksConfig:
    config = BlocksConfig()
    lib.kvf_blocks_config_init_sized(*sized(config))
    config.cache = make_config(settings, keep, [])
    config.block_count, config.block_tokens = block_count, block_tokens
    return config


def _ids(values: Many[int]) -> ctypes.Array:
    return (ctypes.c_uint32 * len(values))(*values)


class Blocks(Handle):
    """Keys and values of numbered blocks in host memory; see kvferry/blocks.h for what holds.

    block_count   ids are 0 to block_count - 1
    block_tokens  tokens of a block: a multiple of 32 and of page_size
    settings      of the cache, as `kvferry.Cache` takes them; sequences_max is the number of regions

    Addresses are whole numbers: `tensor.data_ptr()`, `array.ctypes.data`.
    """

    def __init__(self, runtime: Runtime, *, block_count: int, block_tokens: int = 32,
                 **settings: Any) -> None:
        keep: list = []
        config = _config(block_count, block_tokens, settings, keep)
        out, parent = ctypes.c_void_p(), runtime._node
        checked(lib.kvf_blocks_open, parent.check(), byref(config), byref(out))
        super().__init__(Node("blocks", out.value, behind_work(parent, lib.kvf_blocks_close), parent))
        self._node.keep += keep
        self.runtime = runtime
        self.settings: CacheConfig = config.cache # as they were given
        self.layers: int = config.cache.layers

    @staticmethod
    def plan_for(runtime: Runtime, *, block_count: int, block_tokens: int = 32,
                 **settings: Any) -> BlocksPlan:
        """The memory that such blocks would take; nothing is reserved."""
        keep: list = []
        config, plan = _config(block_count, block_tokens, settings, keep), BlocksPlan()
        checked(lib.kvf_blocks_plan_make_sized, runtime._node.check(), byref(config), *sized(plan))
        return plan

    @property
    def plan(self) -> BlocksPlan:
        """The memory that it takes."""
        row = BlocksPlan.from_address(lib.kvf_blocks_memory(self._node.check()))
        return BlocksPlan.from_buffer_copy(row)

    def bind(self, layer: int, codes: int, block_stride: Optional[int] = None) -> None:
        """Codes of a layer lie at `codes`, `block_stride` bytes from block to block."""
        stride = self.plan.code_bytes if block_stride is None else block_stride
        self._must(lib.kvf_blocks_bind(self._node.check(), layer, codes, stride))

    def attention_params(self, layer: int, *, scale: float = 0.0, sinks: Any = None, soft_cap: float = 0.0) -> None:
        """How a layer attends: as `Cache.attention_params`."""
        made = make_attention_params(self.settings, scale, sinks, soft_cap)
        self._must(lib.kvf_blocks_attention_params(self._node.check(), layer, byref(made[0])))

    def put(self, layer: int, tokens: int, k: int, v: int, slots: int, stream: Stream, *,
            k_stride: int = 0, v_stride: int = 0) -> None:
        """Write tokens; `slots` are int64 on the device, strides elements from token to token."""
        self.write(BlocksPutArgs(layer=layer, tokens=tokens, k=k, v=v, k_stride=k_stride, v_stride=v_stride,
                           slots=slots), stream)

    def write(self, args: BlocksPutArgs, stream: Stream) -> None:
        """`put` with arguments that the caller uses again."""
        self._must(lib.kvf_blocks_put_sized(self._node.check(), *sized(args), stream._node.check()))

    def get(self, layer: int, tokens: int, k: Optional[int], v: Optional[int], slots: int, stream: Stream, *,
            k_stride: int = 0, v_stride: int = 0, fp32: bool = False) -> None:
        """Read tokens back, into host memory, after all work of the stream; `slots` lie there, too.

        fp32  rows are in fp32, and not in `dtype` of the cache
        """
        args = BlocksGetArgs(layer=layer, tokens=tokens, k=k, v=v, k_stride=k_stride, v_stride=v_stride,
                             slots=slots, fp32=fp32)
        self._must(lib.kvf_blocks_get_sized(self._node.check(), *sized(args), stream._node.check()))

    def decode(self, layer: int, rows: int, table: Tuple[int, int], lengths: int, q: int, out: int,
               stream: Stream, *, regions: Optional[int] = None, lse: Optional[int] = None,
               page_scores: Optional[int] = None, page_ids: Optional[int] = None,
               page_stride: int = 0) -> None:
        """One query per row. `table` is an address of int32 and the ids from row to row.

        page_scores, page_ids  the caller's own selection, as `Cache.decode` takes it: addresses of
                               [rows, kv_heads, page_stride]
        """
        self.step(layer, self.describe(rows, table, lengths, regions), q, out, stream, lse,
                  page_scores=page_scores, page_ids=page_ids, page_stride=page_stride)

    def step(self, layer: int, rows: BlocksRows, q: int, out: int, stream: Stream,
             lse: Optional[int] = None, **given: Any) -> None:
        """`decode` of rows that `describe` describes once, for all layers of a pass."""
        args = BlocksDecodeArgs(layer=layer, rows=addressof(rows), q=q, out=out, lse=lse, **given)
        self._must(lib.kvf_blocks_decode_sized(self._node.check(), *sized(args), _ROWS_BYTES,
                                               stream._node.check()))

    def extend(self, layer: int, table: Tuple[int, int], lengths: int, starts: Many[int],
               contexts: Many[int], q: int, out: int, stream: Stream, *,
               lse: Optional[int] = None) -> None:
        """Row i has queries starts[i] to starts[i + 1] - 1, after contexts[i] tokens."""
        if len(starts) != len(contexts) + 1:
            raise Invalid("starts has %d numbers: one more than the %d of contexts"
                          % (len(starts), len(contexts)))
        rows, first, before = self.describe(len(contexts), table, lengths), _ids(starts), _ids(contexts)
        args = BlocksExtendArgs(layer=layer, rows=addressof(rows), starts=addressof(first),
                                contexts=addressof(before), q=q, out=out, lse=lse)
        self._must(lib.kvf_blocks_extend_sized(self._node.check(), *sized(args), _ROWS_BYTES,
                                               stream._node.check()))

    def copy(self, pairs: Many[Tuple[int, int]], stream: Stream) -> None:
        """Blocks onto others, (from, to); codes are the caller's to copy."""
        self._must(lib.kvf_blocks_copy(self._node.check(), _ids([a for a, _ in pairs]),
                                       _ids([b for _, b in pairs]), len(pairs),
                                       stream._node.check()))

    def stats(self) -> BlocksStats:
        """Totals since open or the last reset; read them after `stream.wait()`."""
        with self._node.lock:
            row = BlocksStats()
            lib.kvf_blocks_stats_get_sized(self._node.check(), *sized(row))
            return row

    def reset_stats(self) -> None:
        """Begin to count anew."""
        with self._node.lock:
            lib.kvf_blocks_stats_reset(self._node.check())

    @staticmethod
    def describe(rows: int, table: Tuple[int, int], lengths: int,
                 regions: Optional[int] = None) -> BlocksRows:
        """Rows of a call, as `decode` takes them."""
        address, stride = table
        return BlocksRows(rows=rows, table_stride=stride, table=address, lengths=lengths,
                         regions=regions)

    def _must(self, status: int) -> None:
        if status:
            raise_last(self.runtime._node.handle, status)
