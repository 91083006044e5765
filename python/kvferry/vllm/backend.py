# SPDX-License-Identifier: Apache-2.0
"""The attention backend: vLLM's three classes for it, over the blocks of a `Pool`.

A block of vLLM holds what selection reads of its tokens, two bits per channel of every key; keys and
values are in host memory under the same block id (kvferry/blocks.h). So requests share what vLLM's
prefix cache lets them share, and nothing is told when a block changes hands. Each layer writes the
tokens of a pass and then attends, run by run (rows.py).

Invariant: no answer depends on which request a row or a block belongs to.
"""
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Dict, List, Optional, Set, Tuple

import torch

from .._blocks import Blocks
from .._cache import width_in_pages
from .._errors import Unsupported
from .._prompt_attention import attend_rows
from .._settings import LIBRARY
from ..capi import BlocksRows, BlocksPutArgs
from .arrays import Arrays
from .metrics import Answers
from .pool import Heads, Pool, ground_of, look
from .refusals import (BLOCK_TOKENS, check_engine, check_layer, check_spec, reasons, refuse, why_not_captured)
from .regions import Followed, Regions
from .rows import Rows as PassRows, Run, part, runs_of
from .upstream import (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder,
                       AttentionType, Batch, Engine, KVCacheLayout, MultipleOf, batch_of, flash_attention, is_full,
                       spec_of, with_codes)
from .verify import Rows

log = logging.getLogger("vllm.kvferry")

CODES_PER_BYTE = 4
SEVERAL_GROUPS = ("layers that see everything in several groups of blocks",
                  "take a model with as many windowed layers as others, or more, or none")


@dataclass
class Pass(AttentionMetadata):
    """Where the rows of a pass are, and what they attend to."""
    tokens: int
    slots: torch.Tensor # int64[tokens], where their keys and values go; below 0: nowhere
    table: torch.Tensor # int32[rows, *], block ids
    lengths: torch.Tensor # int32[rows], with the tokens of this pass
    regions: torch.Tensor # int32[rows]
    runs: List[Run]
    contexts: Optional[List[int]] # tokens before the newest of every row, if this pass is verified
    # The same in every layer, so said once: each layer of a step of one request takes microseconds.
    steps: List[Optional[BlocksRows]] # of each run, for the library; None = it is a prompt's
    stepping: int # rows of all these
    requests: List[int] # a number of every row of the batch
    prompts: List[bool] # whether it has tokens of its prompt
    put: BlocksPutArgs # but for the layer, its keys and its values
    begins: Dict[int, torch.Tensor] # int32, by the first row of a run that a library attends: first tokens, from 0

    def rows_at(self, run: Run) -> Tuple[Tuple[int, int], int]:
        """Where the table and the lengths of a run are."""
        width = self.table.stride(0)
        return (self.table.data_ptr() + 4 * run.row * width, width), self.lengths.data_ptr() + 4 * run.row


class Builder(AttentionMetadataBuilder[Pass]):
    """Opens the blocks of a rank, and describes every pass once for all layers.

    Runs outside of CUDA graphs, which read what it leaves in `Arrays` and what vLLM leaves in its own.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 1 # tokens of answers come first, side by side

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any,
                 device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_spec(spec_of(kv_cache_spec))
        self.engine = Engine(vllm_config)
        self.pool = pool_of(self.engine)
        if set(layer_names) != self.pool.names:
            refuse(*SEVERAL_GROUPS)
        self.pool.open(kv_cache_spec.block_size)
        self.regions = Regions(self.pool.regions)
        self.drafts = self.pool.rows_each - 1
        self.followed = Followed(self.engine.stages, self.drafts)
        self.answers = Answers(self.pool.budget, self.engine.stages, self.drafts)
        self.arrays = Arrays(self.engine.requests * self.pool.rows_each, device)
        self.by_library = self.pool.options.prompt_attention == LIBRARY
        if self.by_library:
            log.info("kvferry: tokens of prompts without context are attended by %s", " and ".join(sorted({
                impl.take_library() for impl in self.engine.implementations(Impl).values()})))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Passes of steps alone, each request with as many tokens; said before vLLM settles on graphs."""
        engine = Engine(vllm_config)
        pool = pool_of(engine)
        why = why_not_captured(pool.options.verify_interval, engine.sleeps, pool.runtime.describe())
        if why is None:
            return cls._cudagraph_support
        if engine.has_graphs:
            log.warning("kvferry: attention stays out of CUDA graphs: %s", why)
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any,
              fast_build: bool = False) -> Pass:
        batch = batch_of(common_attn_metadata)
        p = self.describe(batch)
        tokens = [end - start for start, end in zip(batch.starts, batch.starts[1:])]
        begins = [length - count for length, count in zip(batch.lengths, tokens)]
        for selected in self.answers.follow(p.requests, begins, batch.lengths, [not prompt for prompt in p.prompts]):
            self.pool.counters.ended(selected)
        self.pool.begin(p.stepping, sum(batch.lengths), self.regions.used)
        return p

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Pass:
        """The description of a pass that is captured, or has nobody's tokens."""
        return self.describe(batch_of(common_attn_metadata))

    def describe(self, batch: Batch) -> Pass:
        """Rows, what they attend to, and where."""
        prompts, requests = self.prompts_of(batch), self.requests_of(batch)
        rows = part(batch.starts, batch.lengths, prompts, self.drafts)
        runs = runs_of(rows.starts, rows.lengths, rows.prompts, self.pool.regions, self.by_library)
        is_verified = any(run.contexts is None for run in runs) and self.pool.recall.begin()
        regions = self.arrays.put_regions(self.regions_of(runs, rows, requests))
        table, seq_lens = batch.table, batch.seq_lens
        if self.drafts: # candidates are rows of their request's table
            table, seq_lens = self.arrays.put_rows(table, seq_lens, rows)
        tokens = runs[-1].starts[-1] if runs else 0
        p = Pass(tokens, batch.slots, table, seq_lens, regions, runs,
                 [length - 1 for length in rows.lengths] if is_verified else None, [], 0, requests, prompts,
                 BlocksPutArgs(tokens=tokens, slots=batch.slots.data_ptr()), {})
        for run in runs:
            is_step = run.contexts is None
            p.steps.append(Blocks.describe(run.rows, *p.rows_at(run), regions.data_ptr() + 4 * run.row)
                           if is_step else None)
            p.stepping += run.rows if is_step else 0
            if self.by_library and run.is_first:
                p.begins[run.row] = torch.tensor([start - run.starts[0] for start in run.starts], dtype=torch.int32,
                                                 device=regions.device)
        return p

    def prompts_of(self, batch: Batch) -> List[bool]:
        """Whether a row has tokens of its prompt, which attend to everything.

        A graph has steps alone, and vLLM takes it for a piece of a prompt as well, where that has no more
        tokens than a step. So in engines with graphs such a piece selects, whether its pass is replayed or
        not.
        """
        most = 1 if batch.prompts is None else 0 # it was not said what is a prompt
        if self.engine.has_graphs:
            most = 1 + self.drafts
        if most:
            return [end - start > most for start, end in zip(batch.starts, batch.starts[1:])][:batch.rows]
        assert batch.prompts is not None
        return batch.prompts

    def requests_of(self, batch: Batch) -> List[int]:
        """A number per row."""
        if batch.requests is not None:
            return batch.requests
        starts, lengths = batch.starts, batch.lengths
        return self.followed.number([length - (end - start) for length, start, end
                                     in zip(lengths, starts, starts[1:])], lengths[:len(starts) - 1])

    def regions_of(self, runs: List[Run], rows: PassRows, requests: List[int]) -> List[int]:
        """Regions of every row; those of prompts have none."""
        given = [0] * len(rows.of)
        for run in runs:
            if run.contexts is None:
                given[run.row:run.row + run.rows] = self.regions.give([
                    requests[rows.of[row]] * (1 + self.drafts) + rows.number[row]
                    for row in range(run.row, run.row + run.rows)])
        return given


class Impl(AttentionImpl[Pass]):
    """A layer."""

    def __init__(self, num_heads: int, head_size: int, scale: float,
                 num_kv_heads: Optional[int] = None, alibi_slopes: Optional[List[float]] = None,
                 sliding_window: Optional[int] = None, kv_cache_dtype: str = "auto",
                 logits_soft_cap: Optional[float] = None, attn_type: str = AttentionType.DECODER,
                 kv_sharing_target_layer_name: Optional[str] = None,
                 sinks: Optional[torch.Tensor] = None, value_size: Optional[int] = None) -> None:
        self.engine = Engine.current()
        check_layer(attn_type, self.engine.text, alibi_slopes=alibi_slopes, sliding_window=sliding_window)
        check_engine(self.engine)
        look()
        self.value_size = value_size or head_size
        width = width_in_pages(head_size, self.value_size, self.engine.device_type)
        self.heads = Heads(num_heads, num_kv_heads or num_heads, head_size, width, float(scale))
        ground_of(self.engine, self.heads)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.sinks = sinks # a weight: a logit of each query head
        self.soft_cap = float(logits_soft_cap or 0) # of logits; 0: none
        self.owner = kv_sharing_target_layer_name # the layer whose keys it attends to, unless they are its own
        self.pool: Optional[Pool] = None # of this rank, once all its layers are there
        self.index, self.is_last = 0, False # of the layer, or its owner, in it
        self.is_plain = sinks is None and not self.soft_cap and self.owner is None # so that any attention serves
        self.varlen: Any = None # what attends tokens without context, if a library may; None: torch
        self.bound: tuple = () # the blocks, where their codes of this layer are, and from block to block

    def take_library(self) -> str:
        """From now on a library attends tokens without context, where it serves. Whose kernels these are."""
        if self.is_plain and self.value_size == self.head_size:
            self.varlen = flash_attention(self.engine.config, self.head_size)
        return "kvferry" if not self.is_plain else "FlashAttention" if self.varlen else "torch"

    def params(self) -> tuple:
        """How it attends; layers of one owner do so alike."""
        return self.heads, self.value_size, self.soft_cap, None if self.sinks is None else id(self.sinks)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """All layers are there, and vLLM has not asked yet how much memory there is. Or weights came anew."""
        if self.pool is not None:
            self.pool.set_params(self.index)
        else:
            pool = pool_of(self.engine)
            self.engine.settle_block_tokens()
            pool.size_blocks(*blocks_of(self.engine, set(pool.layers)))

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kv_cache: torch.Tensor, attn_metadata: Optional[Pass], output: torch.Tensor,
                output_scale: Optional[torch.Tensor] = None,
                output_block_scale: Optional[torch.Tensor] = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            refuse("outputs that are quantised by the attention", "leave that fusion out")
        if attn_metadata is None: # a pass that measures memory
            return output.zero_()
        assert self.pool is not None and self.pool.blocks is not None
        blocks, stream, p = self.pool.blocks, self.pool.stream(), attn_metadata
        q, out, lacks = query.contiguous(), output, self.heads.values - self.value_size
        if lacks:
            out = torch.nn.functional.pad(output, (0, lacks))
        if self.owner is None and key is not None: # without keys it asks those again that it had in this pass
            v = torch.nn.functional.pad(value, (0, lacks)) if lacks else value
            self.write(_packed(key), _packed(v), kv_cache, p)
        q_bytes, out_bytes = q.stride(0) * q.element_size(), out.stride(0) * out.element_size()
        q_at, out_at = q.data_ptr(), out.data_ptr()
        for run, step in zip(p.runs, p.steps):
            if step is not None:
                first, lse = run.starts[0], None
                if p.contexts is not None:
                    table, lengths = p.rows_at(run)
                    lse = torch.empty(run.rows, self.num_heads, dtype=torch.float32, device=q.device)
                    self.pool.recall.compare(blocks, self.index, Rows(
                        table, lengths, p.contexts[run.row:run.row + run.rows],
                        q_at + first * q_bytes, out[first:first + run.rows]), lse, stream)
                blocks.step(self.index, step, q_at + first * q_bytes, out_at + first * out_bytes,
                            stream, None if lse is None else lse.data_ptr())
            elif run.row in p.begins and self.is_plain and key is not None:
                attend_rows(query, key, value, run.starts, p.begins[run.row], self.scale, out[..., :self.value_size],
                            self.varlen)
            else:
                assert run.contexts is not None
                blocks.extend(self.index, *p.rows_at(run), run.starts, run.contexts, q_at, out_at, stream)
        self.pool.done(stream, self.is_last)
        return output.copy_(out[..., :self.value_size]) if lacks else output

    def write(self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, p: Pass) -> None:
        """Enqueue the tokens of a pass, whose rows are packed."""
        assert self.pool is not None and self.pool.blocks is not None
        self._bind(kv_cache)
        put = p.put
        put.layer, put.k, put.v = self.index, k.data_ptr(), v.data_ptr()
        put.k_stride, put.v_stride = k.stride(0), v.stride(0)
        self.pool.blocks.write(put, self.pool.stream())

    def _bind(self, kv_cache: torch.Tensor) -> None:
        """vLLM may give a layer other memory, and after sleep there are other blocks."""
        assert self.pool is not None and self.pool.blocks is not None
        at = self.pool.blocks, kv_cache.data_ptr(), kv_cache.stride(0) * kv_cache.element_size()
        if at != self.bound:
            last = sum((n - 1) * s for n, s in zip(kv_cache.shape[1:], kv_cache.stride()[1:]))
            if last + 1 != kv_cache[0].numel():
                refuse("blocks of a layer that do not lie in one piece",
                       "take the default of VLLM_KV_CACHE_LAYOUT")
            self.pool.blocks.bind(self.index, *at[1:])
            self.bound = at


def _packed(x: torch.Tensor) -> torch.Tensor:
    """With rows of [kv_heads, head_dim] in one piece; they may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def blocks_of(engine: Engine, ours: Set[str]) -> Tuple[int, int, bool]:
    """Bytes of a block in vLLM's tensors of a rank, its tokens in our layers, and whether all are ours.

    Layers of other kinds may be there, which have blocks of their own under the same numbers: vLLM
    makes the blocks of all layers equal in bytes, so that ours have more tokens then.
    """
    specs = engine.specs()
    groups = engine.groups(specs, Backend.supported_kv_cache_layouts()[0]) # any of ours makes the same groups
    mine = [group for group in groups if ours & set(group)]
    if len(mine) > 1:
        refuse(*SEVERAL_GROUPS)
    are_all_ours = set(specs) == ours
    if not are_all_ours and engine.stages > 1:
        refuse("pipeline parallelism for layers of several kinds", "take tensor parallelism")
    return (max(sum(spec.page_size_bytes for spec in group.values()) for group in groups),
            next(spec.block_size for name, spec in mine[0].items() if name in ours), are_all_ours)


def pool_of(engine: Engine) -> Pool:
    """The pool of an engine's rank; made, and given to all its layers, the first time."""
    ours = engine.implementations(Impl)
    owners = {name: impl for name, impl in ours.items() if impl.owner is None}
    first = next(iter(ours.values()))
    for name, impl in ours.items():
        if engine.value_size(name) != impl.value_size:
            refuse("values of %d elements beside keys of %d in a layer of its own kind" % (
                engine.value_size(name), impl.head_size), "take another model")
    if first.pool is None:
        pool = Pool(engine, owners, set(ours))
        for index, impl in enumerate(owners.values()):
            impl.index = index
        for impl in ours.values():
            owner = impl if impl.owner is None else owners.get(impl.owner)
            if owner is None or owner.params() != impl.params():
                refuse("layers that share the keys of a layer that attends in another way", "take another model")
            impl.pool, impl.index, impl.is_last = pool, owner.index, False
        list(ours.values())[-1].is_last = True
    return first.pool


class Backend(AttentionBackend):
    """Answers to vLLM about the backend before it is used."""

    supported_dtypes: ClassVar[list] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        return [MultipleOf(BLOCK_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> Tuple[KVCacheLayout, ...]:
        """Blocks of a layer after each other, each in one piece."""
        return KVCacheLayout.LBHNC, KVCacheLayout.LBNHC

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """A checkpoint may have them; pages, which have the type of the model, have no use for them."""
        return True

    @classmethod
    def validate_configuration(cls, *given: Any, **named: Any) -> List[str]:
        """In our words, with the way out; then what vLLM itself finds."""
        return reasons(Engine.current(), named) or super().validate_configuration(*given, **named)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Launches are sized by the lengths that the host knows; where a row has others it has no answer."""
        return False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Codes alone: in bf16 a sixteenth of keys and values."""
        if not is_full(spec):
            refuse("blocks of the kind %s" % type(spec).__name__, "take another model")
        check_spec(spec_of(spec))
        return with_codes(spec, CODES_PER_BYTE)
