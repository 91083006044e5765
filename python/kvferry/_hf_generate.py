# SPDX-License-Identifier: Apache-2.0
"""`generate` of Transformers with a cache of pages: what it does with the cache that it was given.

A model may pass over it: Phi-3 drops the cache where its long text begins to turn by other factors, and a
`generate` of somebody's own may have passes of its own. Knows no pages. Invariant: where a pass would have no
cache although `generate` was given one, the cache is emptied and the pass reads the text anew into it, or it is
refused; a `generate` whose passes never had its cache says so.
"""
import functools
import inspect
import warnings
from typing import Any, Dict, Optional

from transformers import cache_utils as _caches

from ._hf_attention import NAME, WITHOUT, no

NAMES = ("cache", "past_key_values") # of a cache among arguments, as versions call it
_BATCHES = ("generate_batch", "init_continuous_batching")


def cache_in(args: tuple, kwargs: dict) -> Optional[Any]:
    """The cache of kvferry among arguments, under whatever name."""
    for value in (*kwargs.values(), *args):
        if isinstance(value, _caches.EncoderDecoderCache):
            value = value.self_attention_cache
        if hasattr(value, "kvferry_passes"):
            return value
    return None


def handed_back(result: Any) -> Optional[Any]:
    """The cache of a result of a pass or of `generate`."""
    found = (result.get(name) for name in NAMES) if isinstance(result, dict) else ()
    return next((value for value in found if isinstance(value, _caches.Cache)), None)


def name_of_the_cache(model: Any) -> str:
    """As the model's own `forward` calls it."""
    return next(name for name in NAMES if name in inspect.signature(model.forward).parameters or
                name == NAMES[-1])


def whole_prompts_only(generation_config: Any) -> None:
    """A forward pass does not tell whether more of the prompt follows, so what prunes would take the
    first chunk for all of it."""
    chunk = getattr(generation_config, "prefill_chunk_size", None)
    if chunk:
        raise no("prune with prefill_chunk_size = %d would choose at the end of the first chunk, "
                 "without the question" % chunk, "leave prefill_chunk_size out, or prune")


def follow(kind: type) -> None:
    """Once per class of models that generate."""
    for name, wrapped in (("prepare_inputs_for_generation", _prepared), ("generate", _generated),
                          *((name, _batched) for name in _BATCHES)):
        function = getattr(kind, name, None)
        if inspect.isfunction(function) and not hasattr(function, "kvferry_follows"):
            made = wrapped(function)
            made.kvferry_follows = True
            setattr(kind, name, made)


def _prepared(prepare: Any) -> Any:
    @functools.wraps(prepare)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        given = cache_in(args, kwargs)
        inputs = prepare(self, *args, **kwargs)
        if given is not None and cache_in((), inputs) is None:
            if kwargs.get("next_sequence_length") is not None: # before 5.24 that stays when the cache goes
                inputs = prepare(self, *args, **{**kwargs, "next_sequence_length": None})
            _read_anew(self, given, kwargs, inputs)
        return inputs
    return prepare_inputs_for_generation


def _read_anew(model: Any, cache: Any, kwargs: dict, inputs: dict) -> None:
    """The model has dropped the cache, and wants to read its text again: that goes into the same one."""
    tokens = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    read, held = 0 if tokens is None else tokens.shape[1], cache.get_seq_length()
    if not _is_whole(read, held, kwargs, inputs):
        raise no("%s drops the Cache that it was given, which holds %d tokens, and would continue without it: the whole "
                 "text must be read again, but only %d tokens of it were passed" % (type(model).__name__, held, read),
                 "hand over the whole text, or " + WITHOUT)
    name = next(name for name, value in kwargs.items() if cache_in((value,), {}) is cache)
    cache.reset()
    inputs[name] = kwargs[name]


def _is_whole(read: int, held: int, kwargs: dict, inputs: dict) -> bool:
    """Whether a pass reads all of the text; masks and positions say how long that is, where there are some."""
    if not held or read <= held:
        return read > held
    masks = [mask for mask in (inputs.get("attention_mask"), kwargs.get("attention_mask")) if mask is not None]
    positions = inputs.get("position_ids")
    return all(mask.shape[-1] == read for mask in masks) and (
        bool(masks) if positions is None else int(positions.max()) < read)


def _generated(generate: Any) -> Any:
    @functools.wraps(generate)
    def generate_and_look(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = cache_in(args, kwargs)
        before = None if given is None else given.kvferry_passes
        told = generate(self, *args, **kwargs)
        if given is not None and given.kvferry_passes == before:
            warnings.warn("kvferry.hf: %s.generate passed over the Cache that it was given, and attended to all "
                          "tokens: %s" % (type(self).__name__, _reason(kwargs, given, handed_back(told))),
                          RuntimeWarning, stacklevel=2)
        return told
    return generate_and_look


def _reason(kwargs: dict, given: Any, other: Any) -> str:
    if kwargs.get("custom_generate") is not None:
        return "custom_generate = %s has passes of its own" % (kwargs["custom_generate"],)
    if other is not None and cache_in((other,), {}) is not given:
        return "its passes had a %s" % type(other).__name__
    return "none of its passes had a cache of kvferry"


def _batched(function: Any) -> Any:
    @functools.wraps(function)
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.config.get_text_config(decoder=True), "_attn_implementation", None) == NAME:
            raise no("continuous batching (%s) has pages and an attention of its own" % function.__name__,
                     "call generate, or " + WITHOUT)
        return function(self, *args, **kwargs)
    return refuse
