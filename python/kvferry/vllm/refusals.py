# SPDX-License-Identifier: Apache-2.0
"""Requests that kvferry cannot serve in vLLM, refused by name before the first token.

Reads configurations of vLLM and imports nothing of it. Invariant: what is not refused gives the
attention that the model was made for, exactly or within the budget.
"""
from typing import Any, Callable, List, Optional

from .._errors import Unsupported

# Drafts that need no layer of attention of their own.
DRAFTS = ("ngram",)
BLOCK_TOKENS = 32 # a block has a multiple of them
HEAD_DIM_MAX, HEAD_DIM_MAX_CPU = 256, 512 # elements
OTHER = "take another model, or vLLM's own attention"


def refuse(what: str, way_out: str) -> None:
    """Raise, with what was asked for and what to do instead."""
    raise Unsupported("kvferry does not support %s: %s" % (what, way_out))


def check_engine(config: Any) -> None:
    """A VllmConfig: what concerns the engine as a whole."""
    parallel, cache = config.parallel_config, config.cache_config
    if config.kv_transfer_config is not None:
        refuse("KV connectors (kv_transfer_config)",
               "they move vLLM's own blocks, which hold no keys; start without one")
    if cache.cache_dtype not in ("auto", _name(config.model_config.dtype)):
        refuse("kv_cache_dtype = %s" % cache.cache_dtype,
               "pages have the type of the model; say %s" % _cache_type(config.model_config))
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        refuse("context parallelism", "take tensor or pipeline parallelism")
    if getattr(cache, "kv_sharing_fast_prefill", False):
        refuse("kv_sharing_fast_prefill", "layers that share keys see every token of a prompt; start without it")
    if parallel.use_ubatching:
        refuse("micro-batches (enable_dbo)", "start without them")
    if getattr(config.model_config, "rswa_window", None) is not None:
        refuse("reference sliding windows", "take another model")
    check_model(config.model_config, config.device_config.device_type)
    drafts = config.speculative_config
    if drafts is not None and drafts.method not in DRAFTS:
        refuse("drafts by %s" % drafts.method, "take %s" % " or ".join(DRAFTS))


def _cache_type(model: Any) -> str:
    """The --kv-cache-dtype with which a ModelConfig is served. vLLM has no name for float32 but auto, and a checkpoint
    may say what that is."""
    name = _name(model.dtype)
    if name != "float32":
        return "--kv-cache-dtype %s" % name
    quantized = getattr(getattr(model, "hf_config", None), "quantization_config", None) or {}
    if any(part.get(field) for part in (quantized, quantized.get("quantization") or {})
           for field in ("kv_cache_scheme", "kv_cache_quant_algo")):
        return "--dtype bfloat16 --kv-cache-dtype bfloat16"
    return "--kv-cache-dtype auto"


def why_not_captured(verify_interval: int, sleeps: bool, machine: dict) -> Optional[str]:
    """Why steps are not in CUDA graphs, on a machine as Runtime.describe() tells it; None: they are."""
    if verify_interval:
        return "verify_interval = %d attends densely in some of the passes" % verify_interval
    if sleeps:
        return "enable_sleep_mode gives memory back whose addresses graphs would have"
    if not machine["devices"][0].get("records_graphs", True): # the host device does not say
        return "the driver of this GPU does not record kvferry's kernels"
    return None


def check_model(model: Any, device: str = "cuda") -> None:
    """Refuse, for a ModelConfig on a type of device, whatever its layers will be refused for, so that no advice leads
    to another refusal."""
    text = model.hf_text_config
    widest, most = _widest(text), HEAD_DIM_MAX_CPU if device == "cpu" else HEAD_DIM_MAX
    if widest > most:
        refuse("heads of %d elements in layers that see everything (%d at most)" % (widest, most), OTHER)


def _widest(text: Any) -> int:
    """The most elements of a head in layers that see everything, where layers of a configuration differ."""
    layers, kinds = getattr(text, "per_layer_config", None), getattr(text, "layer_types", None) or ()
    if layers is None or isinstance(layers, dict): # as a file has it
        return max([one.get("head_dim", 0) for one in (layers or {}).values()], default=0)
    return max([getattr(layers[i], "head_dim", None) or 0 for i, kind in enumerate(kinds)
                if kind == "full_attention"], default=0)


def sees_windows_alone(model: Any) -> bool:
    """Whether no layer of a ModelConfig sees everything, if any has a window."""
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None)
    return "full_attention" not in kinds if kinds else not any(
        getattr(text, name, None) for name in ("sliding_window_pattern", "loop_window_size"))


def reasons(config: Any, choice: dict) -> List[str]:
    """Why vLLM cannot choose the backend for a layer of a VllmConfig, in its words: what no setting helps against, or
    all that settings help against."""
    model, told = config.model_config, _told(check_engine, config)
    for name in ("attn_type", "use_mm_prefix", "block_size", "has_sliding_window"):
        told += _told(check_choice, model=model, **{name: choice[name]} if name in choice else {})
    return _told(check_kind, **choice) or _told(check_model, model, config.device_config.device_type) or told


def _told(check: Callable[..., None], *given: Any, **named: Any) -> List[str]:
    try:
        check(*given, **named)
    except Unsupported as error:
        return [str(error)]
    return []


def check_kind(*, use_mla: bool = False, use_sparse: bool = False, use_non_causal: bool = False, use_rswa: bool = False,
               **_: Any) -> None:
    """The attention of a model, in the words of vLLM when it chooses a backend, as for validate_configuration."""
    if use_mla or use_sparse:
        refuse("multi-head latent attention (MLA)" if use_mla else "sparse attention of the model's own",
               "take another model; for models with an indexer vLLM has HiSparse")
    if use_non_causal:
        refuse("attention to tokens that come later", OTHER)
    if use_rswa:
        refuse("reference sliding windows", OTHER)


def check_choice(*, model: Any, has_sliding_window: bool = False, use_mm_prefix: bool = False, block_size: Any = None,
                 attn_type: Any = "decoder", **_: Any) -> None:
    """A layer of a ModelConfig, likewise."""
    if use_mm_prefix:
        refuse("tokens of an image that attend to each other (partial multimodal full attention)",
               "serve text alone by --language-model-only, or take another model")
    if block_size is not None and block_size % BLOCK_TOKENS:
        refuse("block_size = %d" % block_size,
               "a block has a multiple of %d tokens; leave --block-size out" % BLOCK_TOKENS)
    check_layer(attn_type, model, sliding_window=has_sliding_window or None)


def check_layer(attn_type: Any, model: Any, *, alibi_slopes: Any = None, sliding_window: Any = None) -> None:
    """A layer of a ModelConfig, as vLLM hands it to an attention implementation."""
    kind = getattr(attn_type, "value", attn_type)
    if kind != "decoder":
        refuse("attention of type %s" % kind, "decoders attend to their own keys alone")
    if alibi_slopes is not None:
        refuse("ALiBi", "take a model with rotary positions")
    if sliding_window is not None and sees_windows_alone(model):
        refuse("models whose layers all have a sliding window", OTHER)
    if sliding_window is not None:
        refuse("layers with a sliding window",
               "leave them to vLLM by --attention-config '{\"backend_per_kind\": {\"full_attention\": "
               "\"CUSTOM\"}}', without --attention-backend")


def check_spec(spec: Any) -> None:
    """The KVCacheSpec of a group of layers."""
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        refuse("layers that see a part of the context",
               "take a model whose layers all see everything")
    if spec.non_causal:
        refuse("attention to tokens that come later", "take another model")


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]
