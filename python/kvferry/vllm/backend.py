# SPDX-License-Identifier: Apache-2.0
"""The attention backend: vLLM's three classes for it, over the sequences of a `Pool`.

A pass is described once by the builder, which finds the sequence of every request; then each layer
hands over its queries, keys and values. One token of an answer selects pages within the budget; more
tokens at once (a prompt, candidates) attend to everything. vLLM's own blocks stay empty: their ids say
which request is which (requests.py).

Invariant: rows of a pass go into its layers in the same order, each once.
"""
from dataclasses import dataclass, replace
from typing import Any, ClassVar, List, Optional, Tuple

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl,
                                       AttentionMetadata, AttentionMetadataBuilder, AttentionType,
                                       MultipleOf)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from .._cache import Sequence
from .._errors import Error
from .pool import Pool
from .refusals import check_engine, check_layer, check_spec, refuse
from .requests import rows_of


@register_kv_cache_spec(manager_class=FullAttentionManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class TicketSpec(FullAttentionSpec):
    """Blocks that hold nothing, and that no two requests share."""

    @property
    def prefix_cacheable(self) -> bool:
        return False


@dataclass
class Pass(AttentionMetadata):
    """What a pass does with which sequence."""
    steps: List[Sequence] # one token each, within the budget
    step_rows: Any # their tokens: a slice, or a tensor of numbers
    dense: List[Tuple[int, int, Sequence]] # first token, end
    lost: List[Tuple[int, int]] # of requests with a value that was not finite


class Builder(AttentionMetadataBuilder[Pass]):
    """Opens the cache of a rank, and finds the sequences of every pass."""

    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold = 1 # tokens of answers come first, side by side

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any,
                 device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_spec(kv_cache_spec)
        self.pool = pool_of(vllm_config)
        if set(layer_names) != set(self.pool.layers):
            refuse("layers in several groups of blocks", "take a model whose layers are all alike")
        if self.pool.cache is not None: # of an earlier try
            self.pool.cache.close()
        self.pool.open()

    def build(self, common_prefix_len: int, common_attn_metadata: Any,
              fast_build: bool = False) -> Pass:
        m, requests = common_attn_metadata, self.pool.requests
        assert requests is not None
        count = m.num_reqs
        prompts = [False] * count if m.is_prefilling is None else m.is_prefilling.tolist()
        rows = rows_of(m.query_start_loc_cpu.tolist(), m.seq_lens.tolist(),
                       m.block_table_tensor[:count, 0].tolist(), m.slot_mapping.cpu().numpy(),
                       self.kv_cache_spec.block_size, prompts)
        steps: List[Sequence] = []
        at: List[int] = []
        told = Pass(steps, None, [], [])
        for row, sequence in zip(rows, requests.enter(rows)):
            if sequence is None:
                told.lost.append((row.start, row.end))
            elif row.end - row.start == 1 and not row.is_prompt:
                steps.append(sequence)
                at.append(row.start)
            else:
                told.dense.append((row.start, row.end, sequence))
        is_dense = at == list(range(len(at)))
        told.step_rows = slice(0, len(at)) if is_dense else torch.tensor(at, device=self.device)
        return told


class Impl(AttentionImpl[Pass]):
    """A layer."""

    def __init__(self, num_heads: int, head_size: int, scale: float,
                 num_kv_heads: Optional[int] = None, alibi_slopes: Optional[List[float]] = None,
                 sliding_window: Optional[int] = None, kv_cache_dtype: str = "auto",
                 logits_soft_cap: Optional[float] = None, attn_type: str = AttentionType.DECODER,
                 kv_sharing_target_layer_name: Optional[str] = None,
                 sinks: Optional[torch.Tensor] = None) -> None:
        check_layer(attn_type, alibi_slopes=alibi_slopes, sliding_window=sliding_window,
                    logits_soft_cap=logits_soft_cap, sinks=sinks, shares=kv_sharing_target_layer_name)
        self.config = get_current_vllm_config()
        check_engine(self.config)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.pool: Optional[Pool] = None # of this rank, once all its layers are there
        self.index, self.is_last = 0, False # of the layer in it

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """All layers are there, and vLLM has not asked yet how much memory there is."""
        if self.pool is None:
            pool = pool_of(self.config)
            layers = self.config.compilation_config.static_forward_context
            specs = [Backend.customize_spec(layers[name].get_kv_cache_spec(self.config))
                     for name in pool.layers]
            pool.size_blocks(sum(spec.page_size_bytes for spec in specs))

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kv_cache: torch.Tensor, attn_metadata: Optional[Pass], output: torch.Tensor,
                output_scale: Optional[torch.Tensor] = None,
                output_block_scale: Optional[torch.Tensor] = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            refuse("outputs that are quantised by the attention", "leave that fusion out")
        if attn_metadata is None: # a pass that measures memory
            return output.zero_()
        assert self.pool is not None
        if attn_metadata.steps:
            at = attn_metadata.step_rows
            q, k, v = (x[at].contiguous() for x in (query, key, value))
            out = output[at]
            self._step(attn_metadata.steps, q, k, v, out)
            if not isinstance(at, slice):
                output[at] = out
        for first, end, sequence in attn_metadata.dense:
            self._extend(sequence, *(x[first:end].contiguous() for x in (query, key, value)),
                         output[first:end])
        for first, end in attn_metadata.lost:
            output[first:end] = torch.nan
        if self.is_last:
            self.pool.tell()
        return output

    def _step(self, sequences: List[Sequence], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              out: torch.Tensor) -> None:
        """A token of each. If one cannot go on, which nothing shows, they go one by one."""
        assert self.pool is not None and self.pool.cache is not None and self.pool.requests is not None
        try:
            self.pool.cache.decode(sequences, q, k, v, out, layer=self.index)
        except Error as error:
            if len(sequences) == 1:
                self.pool.requests.lose(sequences[0], error)
                out.fill_(torch.nan)
                return
            for i in range(len(sequences)):
                self._step(sequences[i:i + 1], *(x[i:i + 1] for x in (q, k, v, out)))

    def _extend(self, sequence: Sequence, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                out: torch.Tensor) -> None:
        """Several tokens of one, attended densely."""
        assert self.pool is not None and self.pool.cache is not None and self.pool.requests is not None
        try:
            self.pool.cache.prefill(sequence, q, k, v, out, layer=self.index)
        except Error as error:
            self.pool.requests.lose(sequence, error)
            out.fill_(torch.nan)


def pool_of(config: Any) -> Pool:
    """The pool of an engine's rank; made, and given to all its layers, the first time."""
    layers = config.compilation_config.static_forward_context
    ours = {name: layer.impl for name, layer in layers.items()
            if isinstance(getattr(layer, "impl", None), Impl)}
    first = next(iter(ours.values()))
    if first.pool is None:
        pool = Pool(config, ours)
        for index, impl in enumerate(ours.values()):
            impl.pool, impl.index, impl.is_last = pool, index, index == len(ours) - 1
    return first.pool


class Backend(AttentionBackend):
    """What vLLM asks about the backend before it is used."""

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
        return [MultipleOf(32)]

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """An element per token, which is the least that vLLM can do with."""
        if isinstance(spec, TicketSpec):
            return spec
        if type(spec) is not FullAttentionSpec:
            refuse("blocks of the kind %s" % type(spec).__name__, "take another model")
        check_spec(spec)
        fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
        return replace(TicketSpec(**fields), num_head_slots=1,
                       state_content_bytes=spec.dtype.itemsize)
