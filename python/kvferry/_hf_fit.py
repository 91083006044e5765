# SPDX-License-Identifier: Apache-2.0
"""Refusals of a cache of pages before the first pass of a model of Transformers.

By its class, its configuration, its sources and the settings; a pass shows the rest. Knows no pages.
"""
import sys
from typing import Any, Collection

import numpy
import torch

from . import _hf_known as _known
from ._cache import Cache
from ._errors import Invalid
from ._hf_attention import WITHOUT, no
from ._runtime import Runtime

_OF_THE_MODEL = ("layers", "query_heads", "kv_heads", "head_dim", "value_dim", "dtype", "tensors",
                 "softmax_scale")
_BUDGET = 1024
_DTYPES = (torch.float32, torch.float16, torch.bfloat16) # weights of others are not what attention is in


def implementation(model: Any) -> Any:
    return getattr(text_config(model), "_attn_implementation", None)


def text_config(model: Any) -> Any:
    """Configuration of the decoder."""
    return getattr(model, "config", model).get_text_config(decoder=True)


def must_fit(model: Any) -> None:
    """Refuses what the class or the configuration of a model shows; a pass shows the rest."""
    name = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        return
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        raise no("%s keeps a cache of its own kind" % name, WITHOUT)
    where = _known.asks_for_the_name(model)
    if where:
        raise no("%s asks for the name of its attention, and may do otherwise under the name kvferry (%s)" % (
            name, where), WITHOUT)
    homes = {type(module).__module__ for module in model.modules()
             if "Attention" in type(module).__name__}
    if homes and not any(hasattr(sys.modules.get(home), "ALL_ATTENTION_FUNCTIONS") for home in homes):
        raise no("%s does not attend through the attention interface of Transformers" % name, WITHOUT)


def settings_of(budget: Any, settings: dict) -> dict:
    """Settings as the library has them, each of them given once."""
    for name in _OF_THE_MODEL:
        if settings.get(name) is not None:
            raise Invalid("%s = %s: it follows from the model; leave it out" % (name, settings[name]))
    if budget is not None and settings.get("budget_tokens") is not None:
        raise Invalid("budget = %s and budget_tokens = %s are one setting: give one of them" % (
            budget, settings["budget_tokens"]))
    given = {name: value for name, value in settings.items() if value is not None}
    return {"budget_tokens": _BUDGET if budget is None else budget, **given}


def must_open(runtime: Runtime, model: Any, layers: Collection[int], settings: dict) -> None:
    """Says now what the first pass would say of settings, and of the heads of those layers."""
    config = text_config(model)
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    dims = {getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) for module in modules
            if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) in layers}
    dims = dims or {getattr(layer, "head_dim", None) for at, layer in enumerate(config.per_layer_config)
                    if at in layers}
    heads, dtype = (numpy.shape(settings.get("head_mask")) or (1,))[-1], getattr(model, "dtype", None)
    for dim in {dim for dim in dims if isinstance(dim, int)} or {64}:
        Cache.plan_for(runtime, **settings, layers=len(layers), query_heads=heads, kv_heads=heads, head_dim=dim,
                       dtype=dtype if dtype in _DTYPES else torch.float32)
