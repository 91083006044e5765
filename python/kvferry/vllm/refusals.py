# SPDX-License-Identifier: Apache-2.0
"""Requests that kvferry cannot serve in vLLM, refused by name before the first token.

Imports nothing of vLLM. Invariant: what is not refused gives the
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


def without_cuda(why: str) -> str:
    """Why there is no CUDA device, and what to install; for whoever installed the package beside vLLM."""
    if "no CUDA device" not in why:
        return why
    return ("kvferry was built where there was no nvcc, so it has no kernels for this GPU (%s): install the CUDA toolkit, 12.4 "
            "or later, put nvcc into PATH, and install kvferry again: pip install --force-reinstall --no-cache-dir .[vllm]" % why)


def check_engine(engine: Any) -> None:
    """An upstream.Engine: what concerns it as a whole."""
    if engine.offload_gib is not None:
        refuse("--kv-offloading-size %g (with --kv-offloading-backend %s)" % (engine.offload_gib, engine.offload_backend),
               "it moves vLLM's own blocks, which hold no keys; leave it out: pages are in host memory already, as many "
               "bytes as host_memory")
    if engine.connector is not None:
        refuse("KV connectors (--kv-transfer-config with %s)" % engine.connector,
               "they move vLLM's own blocks, which hold no keys; start without one")
    if engine.cache_dtype not in ("auto", _name(engine.dtype)):
        refuse("kv_cache_dtype = %s" % engine.cache_dtype,
               "pages are in the type of the model; give %s" % _cache_type(engine.dtype, engine.quantization))
    if engine.shares_contexts:
        refuse("context parallelism", "take tensor or pipeline parallelism")
    if engine.has_fast_prefill:
        refuse("kv_sharing_fast_prefill", "layers that share keys see every token of a prompt; start without it")
    if engine.has_micro_batches:
        refuse("micro-batches (enable_dbo)", "start without them")
    if engine.has_reference_windows:
        refuse("reference sliding windows", "take another model")
    check_model(engine.text, engine.device_type)
    if engine.drafts_by not in (None, *DRAFTS):
        refuse("drafts by %s" % engine.drafts_by, "take %s" % " or ".join(DRAFTS))


def _cache_type(dtype: Any, quantization: Any) -> str:
    """The --kv-cache-dtype with which a model is served. vLLM has no name for float32 but auto, and a checkpoint may
    say what that is."""
    name, quantized = _name(dtype), quantization or {}
    if name != "float32":
        return "--kv-cache-dtype %s" % name
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


def check_model(text: Any, device: str = "cuda") -> None:
    """Refuse, for the configuration of a decoder on a type of device, whatever its layers will be refused for, so that
    no advice leads to another refusal."""
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


def sees_windows_alone(text: Any) -> bool:
    """Whether no layer sees everything, if any has a window."""
    kinds = getattr(text, "layer_types", None)
    return "full_attention" not in kinds if kinds else not any(
        getattr(text, name, None) for name in ("sliding_window_pattern", "loop_window_size"))


def reasons(engine: Any, choice: dict) -> List[str]:
    """Why vLLM cannot choose the backend for a layer of an engine, in its words: what no setting helps against, or all
    that settings help against."""
    told = _told(check_engine, engine)
    for name in ("attn_type", "use_mm_prefix", "block_size", "has_sliding_window"):
        told += _told(check_choice, text=engine.text, **{name: choice[name]} if name in choice else {})
    return _told(check_kind, **choice) or _told(check_model, engine.text, engine.device_type) or told


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


def check_choice(*, text: Any, has_sliding_window: bool = False, use_mm_prefix: bool = False, block_size: Any = None,
                 attn_type: Any = "decoder", **_: Any) -> None:
    """A layer of a model, likewise."""
    if use_mm_prefix:
        refuse("tokens of an image that attend to each other (partial multimodal full attention)",
               "serve text alone by --language-model-only, or take another model")
    if block_size is not None and block_size % BLOCK_TOKENS:
        refuse("block_size = %d" % block_size,
               "a block has a multiple of %d tokens; leave --block-size out" % BLOCK_TOKENS)
    check_layer(attn_type, text, sliding_window=has_sliding_window or None)


def check_layer(attn_type: Any, text: Any, *, alibi_slopes: Any = None, sliding_window: Any = None) -> None:
    """A layer of a model, as vLLM hands it to an attention implementation."""
    kind = getattr(attn_type, "value", attn_type)
    if kind != "decoder":
        refuse("attention of type %s" % kind, "decoders attend to their own keys alone")
    if alibi_slopes is not None:
        refuse("ALiBi", "take a model with rotary positions")
    if sliding_window is not None and sees_windows_alone(text):
        refuse("models whose layers all have a sliding window", OTHER)
    if sliding_window is not None:
        refuse("layers with a sliding window",
               "leave them to vLLM by --attention-config '{\"backend_per_kind\": {\"full_attention\": "
               "\"CUSTOM\"}}', without --attention-backend")


def check_spec(spec: Any) -> None:
    """The block of a group of layers, as upstream.spec_of tells it."""
    if spec.has_window:
        refuse("layers that see a part of the context",
               "take a model whose layers all see everything")
    if not spec.is_causal:
        refuse("attention to tokens that come later", "take another model")


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]
