# SPDX-License-Identifier: Apache-2.0
"""What kvferry cannot do in vLLM, refused by name before the first token.

Reads configurations of vLLM and imports nothing of it. Invariant: what is not refused gives the
attention that the model was made for, exactly or within the budget.
"""
from typing import Any

from .._errors import Unsupported

# Drafts that need no layer of attention of their own.
DRAFTS = ("ngram",)


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
               "pages have the type of the model; take auto")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        refuse("context parallelism", "take tensor or pipeline parallelism")
    if parallel.use_ubatching:
        refuse("micro-batches (enable_dbo)", "start without them")
    if config.model_config.is_hybrid and cache.enable_prefix_caching:
        refuse("prefix caching of models with linear or Mamba layers",
               "it copies blocks, and keys are not in them; start with --no-enable-prefix-caching")
    if getattr(config.model_config, "rswa_window", None) is not None:
        refuse("reference sliding windows", "take another model")
    drafts = config.speculative_config
    if drafts is not None and drafts.method not in DRAFTS:
        refuse("drafts by %s" % drafts.method, "take %s" % " or ".join(DRAFTS))


def check_layer(attn_type: Any = "decoder", *, alibi_slopes: Any = None, sliding_window: Any = None,
                logits_soft_cap: Any = None, sinks: Any = None, shares: Any = None) -> None:
    """What concerns a layer, as vLLM hands it to an attention implementation."""
    kind = getattr(attn_type, "value", attn_type)
    if kind != "decoder":
        refuse("attention of type %s" % kind, "decoders attend to their own keys alone")
    if alibi_slopes is not None:
        refuse("ALiBi", "take a model with rotary positions")
    if sliding_window is not None:
        refuse("layers with a sliding window",
               "leave them to vLLM by --attention-config '{\"backend_per_kind\": {\"full_attention\": "
               "\"CUSTOM\"}}', without --attention-backend")
    if logits_soft_cap:
        refuse("soft caps of logits", "take another model")
    if sinks is not None:
        refuse("attention sinks", "take another model")
    if shares is not None:
        refuse("layers that share the keys of another layer", "take another model")


def check_spec(spec: Any) -> None:
    """The KVCacheSpec of a group of layers."""
    if spec.head_size_v != spec.head_size:
        refuse("values of %d elements beside keys of %d" % (spec.head_size_v, spec.head_size),
               "take another model")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        refuse("layers that see a part of the context",
               "take a model whose layers all see everything")
    if spec.non_causal:
        refuse("attention to tokens that come later", "take another model")


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]
