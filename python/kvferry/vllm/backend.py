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
        steps, at, dense = [], [], []
        for row, sequence in zip(rows, requests.enter(rows)):
            if row.end - row.start == 1 and not row.is_prompt:
                steps.append(sequence)
                at.append(row.start)
            else:
                dense.append((row.start, row.end, sequence))
        self.pool.tell()
        is_dense = at == list(range(len(at)))
        return Pass(steps, slice(0, len(at)) if is_dense else torch.tensor(at, device=self.device),
                    dense)


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
        self.index = 0 # of the layer in it

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
        assert self.pool is not None and self.pool.cache is not None
        cache, index = self.pool.cache, self.index
        if attn_metadata.steps:
            at = attn_metadata.step_rows
            q, k, v = (x[at].contiguous() for x in (query, key, value))
            if isinstance(at, slice):
                cache.decode(attn_metadata.steps, q, k, v, output[at], layer=index)
            else:
                output[at] = cache.decode(attn_metadata.steps, q, k, v, layer=index)
        for first, end, sequence in attn_metadata.dense:
            q, k, v = (x[first:end].contiguous() for x in (query, key, value))
            cache.prefill(sequence, q, k, v, output[first:end], layer=index)
        return output


def pool_of(config: Any) -> Pool:
    """The pool of an engine's rank; made, and given to all its layers, the first time."""
    layers = config.compilation_config.static_forward_context
    ours = {name: layer.impl for name, layer in layers.items()
            if isinstance(getattr(layer, "impl", None), Impl)}
    first = next(iter(ours.values()))
    if first.pool is None:
        pool = Pool(config, ours)
        for index, impl in enumerate(ours.values()):
            impl.pool, impl.index = pool, index
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
