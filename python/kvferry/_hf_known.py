# SPDX-License-Identifier: Apache-2.0
"""Facts about the models of Transformers: arguments of an attention besides queries, keys and values,
kinds of layers, and models that ask for the name of their attention.

Whatever is on no list here is refused by name. The lists hold for the versions that OLDEST begins; the test
check_hf_known.py compares them with the sources of the installed one, and fails on names that nobody listed.
Knows no pages.
"""
import ast
import functools
import inspect
import re
import sys
import textwrap
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import transformers

OLDEST = (5, 16)
if tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2]) < OLDEST:
    raise ImportError("kvferry.hf: Transformers %s is installed, and the oldest that it serves is %d.%d; "
                      "pip install -U 'transformers>=%d.%d'" % (transformers.__version__, *OLDEST, *OLDEST))

# Keywords that change nothing about attention, or nothing that a mask does not say, too.
HARMLESS = frozenset((
    "cache", "past_key_values", "use_cache", "return_dict", "num_items_in_batch", "logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "is_causal", "position_ids",
    "sliding_window", "deterministic",
    "tokenizer", "assistant_tokenizer")) # generate hands on what only its stop strings and candidates need
ATTENTION_PARAMS = frozenset(("s_aux", "softcap")) # of an attention, which pages have
# Arguments that SDPA and the attentions of models take besides. Pages have none of them.
OTHERS = {"position_bias": "a bias of positions", "indices": "selected tokens", "block_indices": "selected blocks",
          "sinks": "sinks that each query has", "cu_seq_lens_q": "packed sequences",
          "cu_seq_lens_k": "packed sequences", "max_length_q": "packed sequences",
          "max_length_k": "packed sequences"}

# Kinds of layers by the names of configurations, and by the classes of their caches.
KINDS = frozenset(("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "hybrid",
                   "hybrid_sliding", "dummy", "moe", "mlp"))
CACHES = frozenset(("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer",
                    "LinearAttentionAndFullAttentionLayer",
                    "LinearAttentionAndSlidingWindowAttentionLayer", "DummyLayer"))

_INDICES = ("the tokens that an indexer selects go into the mask under these names, and come as indices under "
            "others, which are refused")
_AS_SDPA = "self.config._attn_implementation == 'sdpa'"
_AS_EAGER = "self.config._attn_implementation == 'eager'"
_DENSE = "self.config._attn_implementation in ('eager', 'sdpa')"
# Comparisons with the name of an attention, by the file of a model: why they change no answer.
NAMED: Dict[str, Dict[str, str]] = {
    **{name: {_DENSE: _INDICES} for name in ("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "hy_v4_vl",
                                             "minimax_m3_vl", "mistral_large4")},
    **{name: {_AS_SDPA: "whether masks may be cut, with which both are right"} for name in (
        "gemma4", "gemma4_unified")},
    **{name: {_AS_EAGER: "products in fp32, which differ by rounding"} for name in ("decision_transformer", "gpt2")},
    **{name: {_AS_EAGER: "an encoder of pictures"} for name in ("timm_backbone", "timm_wrapper")},
    "falcon": {_AS_SDPA: "its attention is not that of the interface"},
    "glm5_next": {_AS_SDPA: "a mask of bits, or one that is added"},
    "qwen2_5_omni": {"config._attn_implementation == 'eager'": "speech, which has an attention of its own"},
}
_NAMES = ("eager", "sdpa")


def unknown(given: Dict[str, Any], known: Iterable[str]) -> List[str]:
    """Names of what an attention is handed and nobody knows."""
    return [name for name, value in given.items() if value is not None and name not in HARMLESS and
            name not in known]


def unknown_kinds(config: Any, layers: list) -> str:
    """Layers of a model, by number, whose kind is on no list; empty = there are none."""
    names = getattr(config, "layer_types", None) or [None] * len(layers)
    found = [(at, name or type(layer).__name__) for at, (name, layer) in enumerate(zip(names, layers))
             if name is not None and name not in KINDS or type(layer).__name__ not in CACHES]
    return ", ".join("%s (layer %d)" % (kind, min(at for at, other in found if other == kind))
                     for kind in sorted({kind for _, kind in found}))


def words(names: List[str]) -> str:
    """Names, with what is known about them."""
    return ", ".join("%s (%s)" % (OTHERS[name], name) if name in OTHERS else name for name in names)


@functools.lru_cache(maxsize=None)
def parameters(function: Any) -> frozenset:
    """Names of the parameters of an attention."""
    return frozenset(inspect.signature(function).parameters)


# ---- models that ask for the name of their attention ----

def _constants(node: ast.AST) -> Iterator[Any]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant):
            yield inner.value


def comparisons(source: str) -> List[Tuple[int, str]]:
    """(line, text) of what depends on whether a name is "eager" or "sdpa": comparisons, cases, methods of
    strings, and tuples that are compared elsewhere."""
    found = []
    for node in ast.walk(ast.parse(source)):
        is_one = isinstance(node, (ast.Compare, ast.MatchValue))
        if isinstance(node, ast.Call):
            is_one = isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith")
        elif isinstance(node, ast.Assign):
            is_one = isinstance(node.value, (ast.Tuple, ast.List, ast.Set))
        if is_one and any(value in _NAMES for value in _constants(node) if isinstance(value, str)):
            found.append((node.lineno, " ".join(ast.unparse(node).split()))) # type: ignore[attr-defined]
    return sorted(found)


def known_comparisons(file: str) -> Dict[str, str]:
    """The comparisons of a module of Transformers that are on the list."""
    package, _, name = file.rpartition(".")
    return NAMED.get(name[len("modeling_"):], {}) if package.startswith("transformers.models.") else {}


@functools.lru_cache(maxsize=None)
def _asks(file: str, source_of: Any) -> Optional[str]:
    """Where a module compares the name of an attention, and nobody looked why; empty = nowhere, None = it has
    no source."""
    try:
        source = textwrap.dedent(inspect.getsource(source_of))
        found = comparisons(source) if "_attn_implementation" in source else []
    except (OSError, TypeError, SyntaxError):
        return None
    known = known_comparisons(file)
    return next(("%s, line %d: %s" % (file, line, text) for line, text in found if text not in known), "")


def asks_for_the_name(model: Any) -> str:
    """Where a model, or one of its parts, asks for the name of its attention; empty = nowhere."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        file = kind.__module__
        package, _, rest = file.partition(".")
        if package in ("torch", "builtins") or package == "transformers" and not rest.startswith("models."):
            continue
        where = _asks(file, sys.modules.get(file))
        if where is None: # a notebook, whose classes have sources
            where = _asks(file, kind)
        if where:
            return where
    return ""
