# SPDX-License-Identifier: Apache-2.0
"""The name "kvferry" among the attentions and masks of Transformers, and the operator that it calls.

A layer of pages hands keys and values out as `Stored`, which only this attention can read: whatever
else a model does with them is refused. Every other key belongs to a cache of Transformers or to none,
and is attended as Transformers does without kvferry.

Knows no model and no pages. Invariant: a Stored key is attended at once, as it is, or not at all; then
by layers that share it, as their configuration says.
"""
import functools
import sys
import types
import weakref
from typing import Any, Dict, Iterator, NamedTuple, Optional

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from . import _hf_known as _known
from ._errors import Unsupported

NAME = "kvferry"
WITHOUT = "use the model without kvferry"

caches: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary() # by number
_PLAIN = (bool, int, float, str, torch.Size, torch.dtype, torch.device, torch.layout)
_NOTHING_TO_DO = ("contiguous", "cpu", "cuda", "to", "type_as") # may return what they are called on
_COMPARED = 64 # newest keys of a prompt, over which a model's own attention is compared
_AGREES = 2e-3 # of the largest value: in fp32 both differ by rounding

_plain: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet() # whose own attention was compared


def no(what: str, way_out: str) -> Unsupported:
    return Unsupported("kvferry.hf: %s; %s" % (what, way_out))


def _called(function: Any, args: tuple, kwargs: Optional[Dict[str, Any]]) -> tuple:
    """The name of a function of torch, and what it gives for tensors without a class of their own."""
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(function, "__name__", str(function)), function(*args, **(kwargs or {}))


class Stored(torch.Tensor):
    """Keys or values that wait for the attention of their layer. Whoever computes with them is refused."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (),
                           kwargs: Optional[Dict[str, Any]] = None) -> Any:
        name, result = _called(function, args, kwargs)
        if isinstance(result, _PLAIN) or name in _NOTHING_TO_DO and any(result is a for a in args) or \
                isinstance(result, tuple) and all(isinstance(x, int) for x in result):
            return result
        stored = next(a for a in flat((args, kwargs)) if isinstance(a, Stored))
        stored.kvferry_layer.waiting = None # this pass ends here
        raise stored.kvferry_layer.refusal(
            "what the cache hands out goes into %s, not into the attention "
            "named kvferry, which alone reads pages" % name)


class Mask(torch.Tensor):
    """A mask of columns that are in pages, for their attention alone. A layer that edits it is refused."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (),
                           kwargs: Optional[Dict[str, Any]] = None) -> Any:
        name, result = _called(function, args, kwargs)
        if isinstance(result, _PLAIN) or result is None and name == "__get__":
            return result
        if isinstance(result, torch.Tensor) and (name in _NOTHING_TO_DO or name == "__getitem__" and
                                                 _takes_queries(args[0], args[1])):
            return result.as_subclass(Mask)
        raise no("the mask of layers in pages goes into %s, not into the attention named kvferry, which alone "
                 "knows which tokens there are" % name, WITHOUT)


def _takes_queries(mask: torch.Tensor, index: Any) -> bool:
    """Whether a slice of a mask leaves its rows and columns as they are: layers may have fewer queries."""
    index = index if isinstance(index, tuple) else (index,)
    return len(index) <= mask.ndim and all(isinstance(part, slice) for part in index) and all(
        mask.shape[at] == len(range(*part.indices(mask.shape[at]))) for at, part in enumerate(index) if at != 2)


class AttentionParams(NamedTuple):
    """How a layer attends besides its keys; see `kvferry.Cache.attention_params`."""
    scale: float
    sinks: Optional[torch.Tensor]
    cap: Optional[float]


class Columns(int):
    """A number of columns that are in pages. It tells a mask whose it is."""


def columns(number: int) -> int:
    """Columns of pages. A compiler knows no numbers of other kinds."""
    return number if torch.compiler.is_compiling() else Columns(number)


def flat(values: Any) -> Any:
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from flat(value)
    elif isinstance(values, dict):
        yield from flat(list(values.values()))
    else:
        yield values


def stored(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The values that a layer hands out. A compiler sees through it, and gets a mark alone."""
    if not torch.compiler.is_compiling():
        tensor = tensor.as_subclass(Stored)
    tensor.kvferry_layer = layer
    return tensor


def expands(attention: type) -> None:
    """Lets an attention with latent keys and values (MLA), whose class expands them by `expand_kv` after the
    cache had them, expand those of this pass alone: pages have what it attends to."""
    expand = getattr(attention, "expand_kv", None)
    if expand is None or hasattr(expand, "kvferry_expands"):
        return

    @functools.wraps(expand)
    def expand_kv(self: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple:
        layer = getattr(latent, "kvferry_layer", None)
        if layer is None:
            return expand(self, latent, rotary)
        if layer.waiting is None or getattr(rotary, "kvferry_layer", None) is not layer:
            raise layer.refusal("its latent keys are expanded twice in a pass, or with others")
        layer.waiting = expand(self, *layer.waiting)
        key, value = layer.waiting
        return stored(layer, key), stored(layer, value)

    expand_kv.kvferry_expands = True # type: ignore[attr-defined]
    attention.expand_kv = expand_kv # type: ignore[attr-defined]


def _handed_out(layer: Any, key: torch.Tensor, value: torch.Tensor) -> tuple:
    """The keys and values of this pass, which a layer of pages has attended, for another layer of the model."""
    if not layer.lends or not torch.compiler.is_compiling() and (
            layer.lent is None or key is not layer.lent[0]() or value is not layer.lent[1]()):
        raise layer.refusal("its keys are attended twice in a pass, or with other values")
    if torch.compiler.is_compiling():
        return key, value
    with torch._C.DisableTorchFunctionSubclass():
        return key.as_subclass(torch.Tensor), value.as_subclass(torch.Tensor)


# ---- operators: opaque to torch.compile ----

def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor],
            cache: torch.Tensor, layer: int, shared: bool, scale: float, sinks: Optional[torch.Tensor],
            cap: Optional[float]) -> torch.Tensor:
    return caches[int(cache)]._attend(q, k, v, mask, layer, shared, AttentionParams(scale, sinks, cap))


def _shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor],
              cache: torch.Tensor, layer: int, shared: bool, scale: float, sinks: Optional[torch.Tensor],
              cap: Optional[float]) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _begin(cache: torch.Tensor, module: int, wanted: int) -> None:
    caches[int(cache)]._begin(module, wanted)


def _end(cache: torch.Tensor, module: int, made: torch.Tensor) -> None:
    caches[int(cache)]._end(module)


def _nothing(*args: Any) -> None:
    """To a compiler, which keeps them in order, because they change the number, or so it thinks."""


def _backward(*args: Any) -> None:
    raise no("gradients do not go through pages", "train with attn_implementation='sdpa' and no Cache")


_library = torch.library.Library("kvferry", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor cache, int layer, bool shared, "
                "float scale, Tensor? sinks, float? cap) -> Tensor")
_library.define("begin(Tensor(a!) cache, int module, SymInt wanted) -> ()")
_library.define("end(Tensor(a!) cache, int module, Tensor made) -> ()")
for _device in ("CPU", "CUDA"):
    _library.impl("attend", _attend, _device)
torch.library.register_fake("kvferry::attend", _shape_of, lib=_library)
for _name, _does in (("begin", _begin), ("end", _end)):
    _library.impl(_name, _does, "CompositeExplicitAutograd")
    torch.library.register_fake("kvferry::" + _name, _nothing, lib=_library)
torch.library.register_autograd("kvferry::attend", _backward, lib=_library)


# ---- without pages ----

@functools.lru_cache(maxsize=None)
def _is_for_sdpa(file: str) -> bool:
    """Whether models of that file say that SDPA gives what their own attention does."""
    return all(kind._supports_sdpa for kind in vars(sys.modules.get(file, types)).values()
               if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == file and
               kind.can_generate())


def _models(of: type = PreTrainedModel) -> Iterator[type]:
    for kind in of.__subclasses__():
        yield kind
        yield from _models(kind)


def _has_own(config: Any) -> bool:
    """Whether there is a model, outside of Transformers, of such configurations that SDPA does not serve."""
    return not torch.compiler.is_compiling() and any(
        kind.config_class is type(config) and not kind._supports_sdpa and kind.can_generate() # type: ignore
        for kind in _models() if not kind.__module__.startswith("transformers."))


def _sdpa_serves(module: Any) -> bool:
    """Whether SDPA gives what the attention of a layer does, as its model says."""
    file = type(module).__module__
    return _is_for_sdpa(file) and (file.startswith("transformers.") or
                                   not _has_own(getattr(module, "config", None)))


def _refuse_unknown(module: Any, kwargs: dict, function: Any, known: frozenset = frozenset()) -> None:
    """Refuses arguments of an attention that the function does not take which answers for it."""
    names = [] if torch.compiler.is_compiling() else _known.unknown(kwargs, known | _known.parameters(function))
    if names:
        raise no("%s, layer %s: its attention is handed %s, which kvferry does not support" % (
            type(module).__name__, getattr(module, "layer_idx", "?"), _known.words(names)),
            "load the model with attn_implementation='eager', or 'sdpa' where it has that")


def _own(module: Any) -> Any:
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _eager(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           mask: Optional[torch.Tensor], kwargs: dict) -> tuple:
    """The model's own attention, where SDPA is not the same: sinks, capped scores, and what models say."""
    own = _own(module)
    if own is None:
        raise no("%s does not attend as SDPA does (sinks, capped scores)" % type(module).__name__,
                 "load the model with attn_implementation='eager'")
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and queries > 1 and getattr(module, "is_causal", True):
        mask = eager_mask(query.shape[0], queries, keys, q_offset=keys - queries, dtype=query.dtype,
                          device=query.device)
    elif mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min)
    _refuse_unknown(module, kwargs, own, _known.ATTENTION_PARAMS)
    return own(module, query, key, value, mask, **kwargs)


def _dense(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           mask: Optional[torch.Tensor], **kwargs: Any) -> tuple:
    """Layers that keep their own cache, with the mask that `_make_mask` left to them."""
    # Where keys are shared, a prompt's queries may be its newest alone: SDPA takes them for its first ones.
    is_cut = mask is None and 1 < query.shape[2] < key.shape[2] and \
        getattr(module, "is_kv_shared_layer", False) and getattr(module, "is_causal", True)
    if is_cut or mask is not None and mask.ndim < 3:
        mask = sdpa_mask(query.shape[0], query.shape[2], key.shape[2],
                         q_offset=key.shape[2] - query.shape[2],
                         attention_mask=None if is_cut or mask.ndim < 2 else mask, device=query.device)
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None or not _sdpa_serves(module):
        return _eager(module, query, key, value, mask, kwargs)
    _refuse_unknown(module, kwargs, sdpa_attention_forward)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


# ---- with pages ----

def _number(layer: Any, name: str, value: Any) -> Optional[float]:
    """A setting of an attention that is one number."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise layer.refusal("its attention is handed %s of %d numbers" % (name, value.numel()))
        return float(value)
    return value


def _must_know(layer: Any, kwargs: dict, heads: int) -> None:
    """Pages have a scale, sinks and a soft cap, and nothing else that an attention may be handed."""
    names = _known.unknown(kwargs, _known.ATTENTION_PARAMS)
    if names:
        raise layer.refusal("its attention is handed %s, which pages do not have" % _known.words(names))
    sinks = kwargs.get("s_aux")
    if sinks is not None and sinks.shape != (heads,):
        raise layer.refusal("its attention is handed sinks (s_aux) of shape %s, not one for each of %d heads" % (
            tuple(sinks.shape), heads))


def _must_agree(layer: Any, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                params: AttentionParams, kwargs: dict) -> None:
    """A model that SDPA does not serve has an attention of its own: over some keys of its first prompt it must
    give what pages compute."""
    keys = min(key.shape[2], _COMPARED)
    if module in _plain or keys < 2:
        return
    q, k, v = query[:, :, -1:].float(), key[:, :, -keys:].float(), value[:, :, -keys:].float()
    own = _own(module)
    if own is None:
        raise layer.refusal("SDPA does not serve it, as its model says, and its own attention is not in the file of "
                            "its class by the name eager_attention_forward")
    with torch.no_grad():
        got = own(module, q, k, v, q.new_zeros(q.shape[0], 1, 1, keys), **{
            **kwargs, "scaling": params.scale, "dropout": 0.0})[0].float()
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * params.scale
        if params.cap is not None:
            scores = torch.tanh(scores / params.cap) * params.cap
        if params.sinks is not None:
            scores = torch.cat([scores, params.sinks.float()[None, :, None, None].expand(q.shape[0], -1, 1, 1)], 3)
        wanted = (scores.softmax(3)[..., :keys] @ v).transpose(1, 2)
    if got.shape != wanted.shape or not bool((got - wanted).abs().max() <= _AGREES * wanted.abs().max()):
        raise layer.refusal("its own attention is not that of pages: more than a scale, a soft cap and sinks")
    _plain.add(module)


def _plain_mask(mask: torch.Tensor) -> torch.Tensor:
    """The columns of rows that a `Mask` shows, or one element, if all are tokens."""
    with torch._C.DisableTorchFunctionSubclass():
        mask = mask.as_subclass(torch.Tensor)
        if mask.ndim < 4:
            return mask
        return mask[0, 0, 0, :1] if mask.stride(3) == 0 else mask[:, 0, 0]


def _masked(made: Optional[torch.Tensor], rows: int, queries: int, columns: int, device: Any) -> torch.Tensor:
    """A mask of columns as SDPA's looks; without padding it is one element that is seen everywhere."""
    made = torch.ones(1, 1, dtype=torch.bool, device=device) if made is None else made
    if made.ndim == 2 and made.shape[0] in (1, rows) and made.shape[1] in (1, columns):
        made = made[:, None, None].expand(rows, 1, queries, columns)
    return made.as_subclass(Mask)


# ---- attention and masks by name ----

def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: Optional[torch.Tensor], scaling: Optional[float] = None,
               dropout: float = 0.0, **kwargs: Any) -> tuple:
    if kwargs.get("output_attentions"):
        raise no("output_attentions: weights over pages are never in one place",
                 "load the model with attn_implementation='eager'")
    layer = getattr(key, "kvferry_layer", None)
    if isinstance(attention_mask, Mask):
        attention_mask = _plain_mask(attention_mask)
    elif attention_mask is not None and attention_mask.ndim == 5:
        attention_mask = _unfolded(attention_mask)
    if layer is None:
        return _dense(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                      **kwargs)
    if getattr(value, "kvferry_layer", None) is not layer:
        raise layer.refusal("its keys are attended with other values")
    shared = layer.waiting is None
    key, value = _handed_out(layer, key, value) if shared else layer.waiting
    layer.waiting = None
    if torch.is_autocast_enabled(query.device.type): # as SDPA does
        query, key, value = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (query, key, value))
    _must_know(layer, kwargs, query.shape[1])
    if dropout:
        raise no("dropout", "call model.eval() first")
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    # The cache knows whether fewer queries are the newest ones.
    if query.shape[2] != key.shape[2] and not (shared and query.shape[2] < key.shape[2]) or \
            attention_mask is None and not causal:
        raise layer.refusal("its attention is not causal")
    if key.shape[:3] != value.shape[:3] or value.shape[3] > key.shape[3] or query.shape[3] != key.shape[3]:
        raise layer.refusal("queries, keys and values have %d, %d and %d elements" % (
            query.shape[3], key.shape[3], value.shape[3]))
    scale = query.shape[3] ** -0.5 if scaling is None else _number(layer, "scaling", scaling)
    params = AttentionParams(scale, kwargs.get("s_aux"), _number(layer, "softcap", kwargs.get("softcap")))
    if not torch.compiler.is_compiling() and not _sdpa_serves(module):
        _must_agree(layer, module, query, key, value, params, kwargs)
    return torch.ops.kvferry.attend(query, key, value, attention_mask, layer.number, layer.index,
                                    shared, params.scale, params.sinks, params.cap), None


def _folded(mask: torch.Tensor) -> torch.Tensor:
    """A mask of columns in a form that stays whole when its queries, dimension 2 of other masks, are cut.
    Five dimensions, because a mask of four with one query would look the same."""
    return mask[:, None, None, :, None] if mask.ndim == 2 else mask.new_empty(1, 1, 1, 0, 1)


def _unfolded(mask: torch.Tensor) -> torch.Tensor:
    """What `_folded` was given; no columns stand for "no padding"."""
    return mask[:, 0, 0, :, 0] if mask.shape[3] else mask[0, 0, 0, :, 0]


def _make_mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
               mask_function: Any = causal_mask_function,
               attention_mask: Optional[torch.Tensor] = None, allow_is_causal_skip: bool = True,
               device: Any = "cpu", **kwargs: Any) -> Optional[torch.Tensor]:
    """Causal masks over pages stay as they come, [rows, tokens], or one element that says "no padding";
    others are SDPA's, or eager's where models expect that. For a compiler, all caches that grow have such masks."""
    ours = isinstance(kv_length, Columns) or torch.compiler.is_compiling() and kv_offset == 0 and \
        not isinstance(q_offset, torch.Tensor) and kv_length == q_offset + q_length
    config = kwargs.get("config")
    file = type(config).__module__.replace("configuration_", "modeling_")
    for_sdpa = _is_for_sdpa(file) and not _has_own(config)
    if ours and mask_function is causal_mask_function and allow_is_causal_skip and for_sdpa:
        if not torch.compiler.is_compiling():
            return _masked(attention_mask, batch_size, q_length, kv_length, device)
        made = torch.ones(1, dtype=torch.bool, device=device) if attention_mask is None else attention_mask
        return _folded(made) if config is not None and made.ndim < 3 and getattr(
            config.get_text_config(decoder=True), "num_kv_shared_layers", None) else made
    of_others = sdpa_mask if for_sdpa else eager_mask
    return of_others(batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset,
                     mask_function=mask_function, attention_mask=attention_mask,
                     allow_is_causal_skip=allow_is_causal_skip, device=device, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _make_mask)
