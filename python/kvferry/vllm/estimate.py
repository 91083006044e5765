# SPDX-License-Identifier: Apache-2.0
"""The bytes that a model takes on a device, and the shape of its attention, by its config.json alone.

Imports nothing of vLLM. Invariant: what cannot be told from a configuration is refused, not guessed.
"""
import math
from types import SimpleNamespace
from typing import Any, Mapping, NamedTuple

from .._errors import Invalid, Unsupported
from .refusals import check_model

# Fields of configurations whose layers are latent, linear or Mamba, or have no keys of their own.
OTHERS = ("kv_lora_rank", "attn_layer_period", "hybrid_override_pattern", "layers_block_type", "ssm_cfg",
          "num_kv_shared_layers")
LOGIT_BYTES = 14 # of a token that is sampled: in the model's type, and three times in fp32


class Model(NamedTuple):
    """Numbers of a whole model."""
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    widest: int # numbers of a token in the widest layer between two products
    vocabulary: int
    tokens: int # that it was made for
    weights: int # numbers


def read(config: Mapping[str, Any]) -> Model:
    """The model of a config.json, in the names that Transformers has for decoders."""
    text = {**config, **(config.get("text_config") or {})}
    try:
        layers, hidden = text["num_hidden_layers"], text["hidden_size"]
        query_heads, vocabulary = text["num_attention_heads"], text["vocab_size"]
        kv_heads = text.get("num_key_value_heads") or query_heads
        inner = text.get("moe_intermediate_size") or text["intermediate_size"]
    except KeyError as error:
        raise Unsupported("config.json has no %s: kvferry cannot tell what the model takes" % error) from error
    head_dim = text.get("head_dim") or hidden // query_heads
    experts = text.get("num_experts") or text.get("num_local_experts") or 1
    tied = 1 if text.get("tie_word_embeddings", config.get("tie_word_embeddings", True)) else 2
    used = text.get("num_experts_per_tok") or 1 if experts > 1 else 1
    attention = hidden * head_dim * (2 * query_heads + 2 * kv_heads)
    weights = layers * (attention + 3 * hidden * inner * experts) + tied * vocabulary * hidden
    return Model(layers, query_heads, kv_heads, head_dim, hidden,
                 max(inner * used, head_dim * (query_heads + 2 * kv_heads)), vocabulary,
                 text.get("max_position_embeddings") or 0, weights)


def layers_of_all(config: Mapping[str, Any]) -> None:
    """Refuse a model whose layers are not all kvferry's, or not all alike: what others take is vLLM's."""
    text = {**config, **(config.get("text_config") or {})}
    check_model(SimpleNamespace(hf_text_config=SimpleNamespace(**text)))
    kinds = set(text.get("layer_types") or ()) - {"full_attention"}
    if not text.get("layer_types") and text.get("sliding_window") and text.get("use_sliding_window", True):
        kinds.add("sliding_window = %s" % text["sliding_window"])
    kinds |= {name for name in OTHERS if text.get(name)}
    if kinds:
        raise Unsupported("layers of the kind %s are not counted: start vLLM, whose first line has the sizes"
                          % ", ".join(sorted(kinds)))


def rank_of(model: Model, ranks: int) -> Model:
    """The shape in one of the ranks that share the heads of every layer."""
    if model.query_heads % ranks:
        raise Invalid("tensor_parallel_size = %d: must divide the %d heads of the model" % (
            ranks, model.query_heads))
    return model._replace(query_heads=model.query_heads // ranks, kv_heads=max(1, model.kv_heads // ranks),
                          widest=math.ceil(model.widest / ranks), weights=math.ceil(model.weights / ranks))


def activations(model: Model, tokens: int, requests: int, element: int = 2) -> int:
    """Bytes that a pass takes beside weights: an estimate that is meant to be too large.

    vLLM must know how many blocks there are before it has measured; what lies beside them is divided by
    what was measured.
    """
    return (tokens * (4 * model.hidden + 3 * model.widest) * element
            + requests * model.vocabulary * LOGIT_BYTES)


def of_engine(config: Any) -> Model:
    """The part of a VllmConfig that activations depend on, for a rank; whatever names its model has."""
    model, text = config.model_config, config.model_config.hf_text_config
    hidden, ranks = model.get_hidden_size(), config.parallel_config.tensor_parallel_size
    inner = (getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
             or 4 * hidden)
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner
    used = getattr(text, "num_experts_per_tok", None) or 1
    return Model(0, 0, 0, 0, hidden, math.ceil(inner * used / ranks), model.get_vocab_size(), model.max_model_len, 0)
