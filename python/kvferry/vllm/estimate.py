# SPDX-License-Identifier: Apache-2.0
"""The bytes that a model takes on a device, and the shape of its attention, by its config.json alone.

Imports nothing of vLLM. Invariant: what cannot be told from a configuration is refused, not guessed.
"""
import glob
import math
import os
from types import SimpleNamespace
from typing import Any, List, Mapping, NamedTuple, Sequence

from .._errors import Invalid, Unsupported
from .._planner import Model as Attention, Windows
from .refusals import OTHER, check_model, refuse

# Fields of configurations whose layers are linear or Mamba, or have no keys of their own.
OTHERS = ("attn_layer_period", "hybrid_override_pattern", "layers_block_type", "ssm_cfg", "num_kv_shared_layers")
LATENT = "kv_lora_rank"
# Fields that configurations of Gemma leave out, with Transformers' defaults.
DEFAULTS = {"gemma2": {"sliding_window_pattern": 2},
            "gemma3": {"sliding_window_pattern": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                       "vocab_size": 262208, "sliding_window": 4096, "max_position_embeddings": 131072}}
LOGIT_BYTES = 14 # of a token that is sampled: in the model's type, and three times in fp32
GRAPH_BYTES = 256 << 10 # of a layer in a CUDA graph
GRAPH_KINDS = 2 # that a number of tokens has: whole passes of steps, and passes in pieces


class Model(NamedTuple):
    """Numbers of a whole model."""
    attention: Attention
    hidden: int
    widest: int # numbers of a token in the widest layer between two products
    vocabulary: int
    weights: int # numbers


def read(config: Mapping[str, Any]) -> Model:
    """The model of a config.json, in the names that Transformers has for decoders."""
    text = {**config, **(config.get("text_config") or {})}
    text = {**DEFAULTS.get(str(text.get("model_type")).partition("_")[0], {}), **text}
    if text.get(LATENT):
        refuse("multi-head latent attention (MLA), which %s has" % (config.get("model_type") or "this model"), OTHER)
    check_model(SimpleNamespace(**text))
    try:
        layers, hidden = text["num_hidden_layers"], text["hidden_size"]
        query_heads, vocabulary = text["num_attention_heads"], text["vocab_size"]
        kv_heads = text.get("num_key_value_heads") or query_heads
        inner = text.get("moe_intermediate_size") or text["intermediate_size"]
    except KeyError as error:
        raise Unsupported("config.json has no %s: kvferry cannot compute the model's memory" % error) from error
    windowed = _windowed(text)
    head_dim = text.get("head_dim") or hidden // query_heads
    experts = text.get("num_experts") or text.get("num_local_experts") or 1
    tied = 1 if text.get("tie_word_embeddings", config.get("tie_word_embeddings", True)) else 2
    used = text.get("num_experts_per_tok") or 1 if experts > 1 else 1
    attention = hidden * head_dim * (2 * query_heads + 2 * kv_heads)
    weights = layers * (attention + 3 * hidden * inner * experts) + tied * vocabulary * hidden
    windows = Windows(windowed, kv_heads, head_dim, text["sliding_window"]) if windowed else None
    return Model(Attention(layers - windowed, query_heads, kv_heads, head_dim, text.get("max_position_embeddings") or 0,
                           windows=windows),
                 hidden, max(inner * used, head_dim * (query_heads + 2 * kv_heads)), vocabulary, weights)


def _windowed(text: Mapping[str, Any]) -> int:
    """How many layers see a window. Other kinds are refused: what they take is vLLM's, and a configuration does not say
    it."""
    kinds = list(text.get("layer_types") or ())
    layers, every = text["num_hidden_layers"], text.get("sliding_window_pattern")
    if not kinds and text.get("sliding_window") and text.get("use_sliding_window", True):
        first = text.get("max_window_layers") or 0 # of Qwen 2: layers from there on have windows
        kinds = ["sliding_attention" if ((i + 1) % every if every else i >= first) else "full_attention"
                 for i in range(layers)]
    others = set(kinds) - {"full_attention", "sliding_attention"} | {name for name in OTHERS if text.get(name)}
    if text.get("per_layer_config") or text.get("global_head_dim"): # whose heads differ by the kind of a layer
        others.add("several shapes")
    if others:
        raise Unsupported("layers of the kind %s are not counted: start vLLM, whose first line shows the sizes"
                          % ", ".join(sorted(others)))
    if kinds and "full_attention" not in kinds:
        refuse("models whose layers all have a sliding window", OTHER)
    return kinds.count("sliding_attention")


def rank_of(model: Model, ranks: int) -> Model:
    """The shape in one of the ranks that share the heads of every layer."""
    a = model.attention
    if a.query_heads % ranks:
        raise Invalid("tensor_parallel_size = %d: must divide the %d heads of the model" % (ranks, a.query_heads))
    windows = a.windows and a.windows._replace(kv_heads=max(1, a.windows.kv_heads // ranks))
    mine = a._replace(query_heads=a.query_heads // ranks, kv_heads=max(1, a.kv_heads // ranks), windows=windows)
    return model._replace(attention=mine, widest=math.ceil(model.widest / ranks), weights=math.ceil(model.weights / ranks))


def layers_of(model: Model) -> int:
    """With windows and without."""
    windows = model.attention.windows
    return model.attention.layers + (windows.layers if windows else 0)


def size_of_files(folder: str) -> int:
    """Bytes of the weights in a folder, if they are there."""
    return sum(map(os.path.getsize, glob.glob(os.path.join(folder, "*.safetensors"))))


def activations(model: Model, tokens: int, requests: int, element: int = 2) -> int:
    """Bytes that a pass takes beside weights: an estimate that is meant to be too large.

    vLLM must know how many blocks there are before it has measured; what lies beside them is divided by
    what was measured.
    """
    return _between(model, tokens, element) + requests * model.vocabulary * LOGIT_BYTES


def _between(model: Model, tokens: int, element: int) -> int:
    """Bytes between products."""
    return tokens * (4 * model.hidden + 3 * model.widest) * element


def graphs(model: Model, sizes: Sequence[int], layers: int, element: int = 2) -> int:
    """Bytes that CUDA graphs keep, for passes of so many tokens: an estimate likewise.

    vLLM captures them when all memory is divided. Graphs share what they compute in, and logits are not in them.
    """
    if not sizes:
        return 0
    return _between(model, max(sizes), element) + GRAPH_KINDS * len(sizes) * layers * GRAPH_BYTES


def graph_sizes(requests: int) -> List[int]:
    """Tokens of passes for which vLLM captures graphs, if nothing else is said."""
    most = min(2 * requests, 512)
    return [size for size in [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)] if size <= most]


def of_engine(engine: Any) -> Model:
    """The part of an upstream.Engine that activations depend on, for a rank; whatever names its model has."""
    text, hidden, ranks = engine.text, engine.hidden, engine.ranks
    inner = (getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
             or 4 * hidden)
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner
    used = getattr(text, "num_experts_per_tok", None) or 1
    return Model(Attention(0, 0, 0, 0, engine.tokens), hidden, math.ceil(inner * used / ranks), engine.vocabulary, 0)
