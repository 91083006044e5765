# SPDX-License-Identifier: Apache-2.0
"""vLLM's inside, as far as kvferry takes it: classes, functions and fields, and methods that are followed.

No other file of the package imports vLLM; they see an `Engine` and a `Batch`. The lists in tests/python/vllm/ have
these names in each release that is known, with their signatures, and tools/vllm_names.py reads them from a wheel.
Invariant: a release that lacks a name is met with a line that says which ones are known.
"""
import copy
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
import vllm

from .._errors import Unsupported
from .known import KNOWN, line_of

IS_0_32 = vllm.__version__.startswith("0.32.")

try:
    from vllm.config import CacheConfig, CUDAGraphMode, VllmConfig, get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata,
                                           AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata, MultipleOf)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import get_attn_spec_kind
    from vllm.v1.kv_cache_interface import (AttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec,
                                            KVCacheLayout, UniformTypeKVCacheSpecs)
    from vllm.v1.worker.utils import customize_attention_spec
    if IS_0_32:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    else: # a model, or a platform, may make groups of its own
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups_from_builder
except (ImportError, AttributeError) as error:
    raise Unsupported("%s: %s" % (line_of(vllm.__version__), error)) from error

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

__all__ = ["AttentionBackend", "AttentionCGSupport", "AttentionImpl", "AttentionMetadata", "AttentionMetadataBuilder",
           "AttentionType", "KNOWN", "KVCacheLayout", "MultipleOf"]

CUSTOM: AttentionBackendEnum = AttentionBackendEnum.CUSTOM
Layer = Attention
Platform = type(current_platform)
IS_CPU = current_platform.is_cpu()
# Methods of classes that are followed; see calls.py. The runner of CPUs is the first one.
RUNNERS = {"vllm.v1.worker.gpu_model_runner.GPUModelRunner": ("_update_states", "reset_lora_state", "vllm_config",
                                                              "kv_cache_config"),
           "vllm.v1.worker.gpu.model_runner.GPUModelRunner": ("update_requests", "reset_lora_state", "vllm_config",
                                                              "kv_cache_config")}
SLEEPERS = {"vllm.v1.worker.cpu_worker.CPUWorker": ("sleep", "wake_up"),
            "vllm.device_allocator.sleep_mode_backend.CuMemBackend": ("suspend", "resume", "discard"),
            "vllm.device_allocator.sleep_mode_backend.SleepModeBackendFactory": ("get_backend_class",)}
# Methods of a platform, which is followed in asked.py, admit.py and cpu.py, and of layers, which are of several classes.
OTHERS = {"vllm.platforms.interface.Platform": ("update_block_size_for_backend", "get_attn_backend_cls", "is_cpu",
                                                 "check_and_update_config", "get_device_total_memory"),
          "vllm.model_executor.layers.attention.Attention": ("__init__", "impl", "kv_sharing_target_layer_name"),
          "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase": ("get_attn_backend", "get_kv_cache_spec")}


def announce(backend: str) -> None:
    """Say where the backend CUSTOM is. May be called twice."""
    register_backend(CUSTOM, backend)


_value: Any = property # of a VllmConfig, read when it is asked for: some of them vLLM settles late


class Engine:
    """A VllmConfig."""

    def __init__(self, config: VllmConfig) -> None:
        self.config: VllmConfig = config

    @staticmethod
    def current() -> "Engine":
        """The engine whose layers are being made."""
        return Engine(get_current_vllm_config())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Engine) and self.config is other.config

    def __hash__(self) -> int:
        return id(self.config)

    # -- the model --

    has_model: bool = _value(lambda self: self.config.model_config is not None)
    folder: str = _value(lambda self: self.config.model_config.model) # its files, or a name of them elsewhere
    text: Any = _value(lambda self: self.config.model_config.hf_text_config) # the part of config.json that decoders have
    dtype: torch.dtype = _value(lambda self: self.config.model_config.dtype)
    # The part of config.json about quantization, if there is one.
    quantization: Any = _value(lambda self: getattr(self.config.model_config.hf_config, "quantization_config", None))
    tokens: int = _value(lambda self: self.config.model_config.max_model_len) # of a request, at most
    is_hybrid: bool = _value(lambda self: self.config.model_config.is_hybrid) # linear or Mamba layers are beside attention
    has_reference_windows: bool = _value(lambda self: self.config.model_config.rswa_window is not None)
    layers_in_all: int = _value(lambda self: self.config.model_config.get_total_num_hidden_layers()) # of all ranks
    kv_heads_in_all: int = _value(lambda self: self.config.model_config.get_total_num_kv_heads())
    hidden: int = _value(lambda self: self.config.model_config.get_hidden_size())
    vocabulary: int = _value(lambda self: self.config.model_config.get_vocab_size())

    # -- ranks --

    device_type: str = _value(lambda self: self.config.device_config.device_type)
    ranks: int = _value(lambda self: self.config.parallel_config.tensor_parallel_size) # share the heads of every layer
    stages: int = _value(lambda self: self.config.parallel_config.pipeline_parallel_size) # share the layers
    ranks_in_all: int = _value(lambda self: self.config.parallel_config.world_size)
    rank: int = _value(lambda self: self.config.parallel_config.rank)
    number: int = _value(lambda self: self.config.parallel_config.data_parallel_index) # among engines side by side
    has_micro_batches: bool = _value(lambda self: self.config.parallel_config.use_ubatching)

    @property
    def card_bytes(self) -> Optional[int]:
        """Memory of a card in all; None: there is none."""
        return None if IS_CPU else Platform.get_device_total_memory()

    @property
    def shares_contexts(self) -> bool:
        return self.config.parallel_config.decode_context_parallel_size > 1 or \
            self.config.parallel_config.prefill_context_parallel_size > 1

    # -- what it serves --

    # Tokens of a pass for which there will be CUDA graphs, if there are any.
    graph_sizes: Optional[List[int]] = _value(lambda self: self.config.compilation_config.cudagraph_capture_sizes)
    tokens_of_a_pass: int = _value(lambda self: self.config.scheduler_config.max_num_batched_tokens)
    # Host memory for vLLM's own blocks, of which it makes a connector.
    offload_gib: Optional[float] = _value(lambda self: self.config.cache_config.kv_offloading_size)
    offload_backend: str = _value(lambda self: self.config.cache_config.kv_offloading_backend)
    sleeps: bool = _value(lambda self: self.config.model_config.enable_sleep_mode) # may be put to sleep on a GPU
    settings: Any = _value(lambda self: self.config.additional_config) # --additional-config
    backends_by_kind: Dict[str, Any] = _value(lambda self: self.config.attention_config.backend_per_kind)

    @property
    def requests(self) -> int:
        """At once, at most."""
        return self.config.scheduler_config.max_num_seqs

    @requests.setter
    def requests(self, count: int) -> None:
        self.config.scheduler_config.max_num_seqs = count

    @property
    def drafts(self) -> int:
        """Candidates of a request, at most."""
        return 0 if self.config.speculative_config is None else self.config.speculative_config.num_speculative_tokens

    @property
    def drafts_by(self) -> Optional[str]:
        return None if self.config.speculative_config is None else self.config.speculative_config.method

    @property
    def connector(self) -> Optional[str]:
        """Its name, if there is one."""
        if self.config.kv_transfer_config is None:
            return None
        return self.config.kv_transfer_config.kv_connector or "a connector"

    @property
    def has_graphs(self) -> bool:
        """Whether whole passes of steps are, or may be, CUDA graphs."""
        mode: Optional[CUDAGraphMode] = self.config.compilation_config.cudagraph_mode
        return mode is not None and mode.decode_mode() == CUDAGraphMode.FULL

    @property
    def asks_for_custom(self) -> bool:
        return CUSTOM in (self.config.attention_config.backend, *self.backends_by_kind.values())

    def is_custom(self, has_window: bool, attn_type: Any) -> bool:
        """Whether a layer that takes its backend without a question is to be kvferry's."""
        said = get_attn_spec_kind(False, has_window, attn_type or AttentionType.DECODER)
        return self.backends_by_kind.get(said.value, self.config.attention_config.backend) is CUSTOM

    # -- blocks --

    cache_dtype: str = _value(lambda self: self.config.cache_config.cache_dtype)
    block_tokens: int = _value(lambda self: self.config.cache_config.block_size)
    block_tokens_were_said: bool = _value(lambda self: self.config.cache_config.user_specified_block_size)
    blocks_were_said: bool = _value(lambda self: self.config.cache_config.num_gpu_blocks_override is not None)
    has_fast_prefill: bool = _value(lambda self: self.config.cache_config.kv_sharing_fast_prefill)
    share_of_card: float = _value(lambda self: self.config.cache_config.gpu_memory_utilization)

    @property
    def bytes_of_blocks(self) -> Optional[int]:
        """The limit of vLLM's own tensors, if it was said."""
        return self.config.cache_config.kv_cache_memory_bytes

    @bytes_of_blocks.setter
    def bytes_of_blocks(self, size: int) -> None:
        self.config.cache_config.kv_cache_memory_bytes = size

    @property
    def blocks(self) -> int:
        """Once they are settled."""
        count = self.config.cache_config.num_gpu_blocks
        assert count is not None
        return count

    # -- layers --

    # Layers of a rank, once they are made: those with attention, and others.
    layers: Dict[str, Any] = _value(lambda self: self.config.compilation_config.static_forward_context)

    def implementations(self, kind: type) -> Dict[str, Any]:
        """Implementations of a class, by their layers."""
        return {name: layer.impl for name, layer in self.layers.items()
                if isinstance(getattr(layer, "impl", None), kind)}

    def value_size(self, name: str) -> int:
        """Elements of a value in a layer."""
        layer: Attention = self.layers[name]
        return layer.head_size_v

    def backends(self) -> Set[type]:
        """Backends of all layers."""
        return {layer.get_attn_backend() for layer in self.layers.values() if hasattr(layer, "get_attn_backend")}

    def specs(self) -> Dict[str, Any]:
        """The block of every layer that has blocks of its own."""
        found = {}
        for name, layer in self.layers.items():
            spec = layer.get_kv_cache_spec(self.config) if isinstance(layer, AttentionLayerBase) else None
            if spec is not None and not getattr(layer, "kv_sharing_target_layer_name", None):
                found[name] = (customize_attention_spec(layer.get_attn_backend(), spec)
                               if isinstance(spec, AttentionSpec) else spec)
        return found

    def groups(self, specs: Dict[str, Any], layout: KVCacheLayout) -> List[Dict[str, Any]]:
        """Layers that share numbers of blocks, with what each has in a block.

        layout   any that the backend takes: it is not settled yet
        """
        asked: VllmConfig = copy.copy(self.config)
        asked.cache_config = copy.copy(self.config.cache_config)
        asked.cache_config.kv_cache_layout = layout.name
        if IS_0_32:
            groups = get_kv_cache_groups(asked, specs)
        else:
            groups = get_kv_cache_groups_from_builder(get_kv_cache_config_builder(asked), asked, specs)
        return [_each(group) for group in groups]

    def settle_block_tokens(self) -> None:
        """vLLM does so next: with linear layers it makes blocks as large as their states."""
        Platform.update_block_size_for_backend(self.config)

    def tellers(self) -> List[type]:
        """Classes whose objects make this engine sleep, and copy its blocks: those that are there."""
        found = []
        for name in RUNNERS:
            module, _, member = name.rpartition(".")
            if module in sys.modules:
                found.append(vars(sys.modules[module])[member])
        if IS_CPU:
            from vllm.v1.worker.cpu_worker import CPUWorker # pylint: disable=import-outside-toplevel
            return [CPUWorker, *found]
        if self.sleeps:
            from vllm.device_allocator.sleep_mode_backend import ( # pylint: disable=import-outside-toplevel
                SleepModeBackendFactory)
            found.append(SleepModeBackendFactory.get_backend_class(self.config.model_config.sleep_mode_backend))
        return found


def _each(group: KVCacheGroupSpec) -> Dict[str, Any]:
    """Layers of a group, whose blocks may differ."""
    specs: Any = group.kv_cache_spec
    if isinstance(specs, UniformTypeKVCacheSpecs):
        uniform: UniformTypeKVCacheSpecs = specs
        return {name: uniform.kv_cache_specs[name] for name in group.layer_names}
    return {name: specs for name in group.layer_names}


def window_of(named: Dict[str, Any]) -> Optional[int]:
    """The window of a layer, by the arguments of its class."""
    cache: Optional[CacheConfig] = named.get("cache_config")
    return named.get("per_layer_sliding_window") or (None if cache is None else cache.sliding_window)


def number_of_layer(name: str) -> int:
    """In the model."""
    return extract_layer_index(name)


def flash_attention(config: VllmConfig, head_size: int) -> Optional[Callable]:
    """FlashAttention as vLLM takes it on this GPU, for heads of that size in 16 bits; None where it has none."""
    if not current_platform.is_cuda() or config.model_config.dtype == torch.float32 or head_size % 8 or head_size > 256:
        return None
    from vllm.v1.attention.backends.fa_utils import ( # pylint: disable=import-outside-toplevel
        flash_attn_varlen_func, get_flash_attn_version)
    version = get_flash_attn_version(head_size=head_size)
    return None if version is None else partial(flash_attn_varlen_func, fa_version=version)


class Batch(NamedTuple):
    """Rows of a pass, as vLLM describes them."""
    starts: List[int] # first token of every row, and the end of the last
    lengths: List[int] # tokens of every row with those of this pass
    prompts: Optional[List[bool]] # whether a row has tokens of its prompt, if it was said
    requests: Optional[List[int]] # a number of every row's request, if it was said
    rows: int # without those that fill up the pass
    slots: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor


def batch_of(m: CommonAttentionMetadata) -> Batch:
    """The second of vLLM's two runners numbers requests, except for rows that fill up a pass."""
    assert m.seq_lens_cpu_upper_bound is not None
    starts = m.query_start_loc_cpu.tolist()
    return Batch(starts, m.seq_lens_cpu_upper_bound.tolist(),
                 None if m.is_prefilling is None else m.is_prefilling.tolist(),
                 None if m.req_idx is None else m.req_idx.tolist(), m.num_reqs, m.slot_mapping, m.block_table_tensor, m.seq_lens)


class Spec(NamedTuple):
    """The block of a layer, as far as kvferry looks."""
    has_window: bool
    is_causal: bool


def spec_of(spec: FullAttentionSpec) -> Spec:
    return Spec(spec.sliding_window is not None or spec.attention_chunk_size is not None, not spec.non_causal)


def with_codes(spec: FullAttentionSpec, codes_per_byte: int) -> FullAttentionSpec:
    """Codes alone in a block, as bytes. vLLM clears blocks of bytes that other layers get: read as numbers, codes may
    be none, and layers with a window multiply such by 0."""
    return replace(spec, num_head_slots=spec.num_kv_heads, dtype=torch.uint8,
                   state_content_bytes=spec.head_size // codes_per_byte)


def is_full(spec: Any) -> bool:
    """Whether it is of a layer that sees everything, and nothing else."""
    return type(spec) is FullAttentionSpec


def copies_of(runner: "GPUModelRunner", output: "SchedulerOutput", ours: Set[str]) -> List[Tuple[int, int]]:
    """Copies of blocks before a pass, without those of states: a block with tokens of our layers is copied for a
    request that begins."""
    if not output.kv_cache_block_copies:
        return []
    cache: KVCacheConfig = runner.kv_cache_config
    cached: CachedRequestData = output.scheduled_cached_reqs
    request: NewRequestData
    tables = [table for table in cached.new_block_ids if table is not None]
    for request in output.scheduled_new_reqs:
        tables.append(request.block_ids)
    group: KVCacheGroupSpec
    number = 0
    for place, group in enumerate(cache.kv_cache_groups):
        if set(group.layer_names) & ours:
            number = place
            break
    tokens = {block for table in tables for block in table[number]}
    return [(one, other) for one, other in output.kv_cache_block_copies if other in tokens]
