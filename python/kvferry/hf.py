# SPDX-License-Identifier: Apache-2.0
"""kvferry in Hugging Face Transformers: attention by the name "kvferry", and a cache for `generate`.

    import kvferry.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvferry")
    cache = kvferry.hf.Cache(model, budget=512)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=200)
    cache.stats()

`kvferry.hf.use(model, budget=512)` gives every `generate` of a model such a cache, in pipelines and
other programs that pass none.

Several tokens at once (a prompt, a further turn) attend densely; a single token selects pages within
the budget, and so do candidates of prompt lookup and of an assistant, each for itself: a pass that wants
logits of several newest tokens has these. Layers with a sliding window or linear attention keep the cache and
the attention that Transformers gives them. Without a `Cache` the name means torch's SDPA.

Knows the interfaces of Transformers 5 (AttentionInterface, AttentionMaskInterface, cache layers) and
no model. Invariants: a row of a batch holds its own tokens only, never padding; a layer's length
counts columns as Transformers does, with padding.
"""
import functools
import json
import os
import types
import weakref
from typing import Any, Dict, List, Optional, Union

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import cache_utils as _caches
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ._cache import Cache as _PagedCache
from ._cache import Sequence
from ._errors import Invalid, Unsupported
from ._prune import Policy, Pruner
from ._runtime import Runtime
from ._save import saved

__all__ = ["Cache", "use"]

NAME = "kvferry"
# Policies that hand every token on to the next layer: a model of Transformers cannot drop rows.
PRUNE_POLICIES = ("full", "streaming", "h2o", "snapkv", "pyramidkv")
_TOKENS_MAX = 32768
_STEP_TOKENS = 16 # of a sequence, that one decode call takes

_by_number: "weakref.WeakValueDictionary[int, Cache]" = weakref.WeakValueDictionary()
_runtimes: Dict[str, Runtime] = {}


def _no(what: str, way_out: str) -> Unsupported:
    return Unsupported("kvferry.hf: %s; %s" % (what, way_out))


def _runtime_of(device: torch.device) -> Runtime:
    """One per device, shared."""
    name = str(device)
    if name not in _runtimes or _runtimes[name].closed:
        _runtimes[name] = Runtime(device="host") if device.type == "cpu" else \
            Runtime(device="cuda", device_ordinal=device.index)
    return _runtimes[name]


def _whole_prompts_only(generation_config: Any) -> None:
    """A forward pass does not tell whether more of the prompt follows, so what prunes would take the
    first chunk for all of it."""
    chunk = getattr(generation_config, "prefill_chunk_size", None)
    if chunk:
        raise _no("prune with prefill_chunk_size = %d would choose at the end of the first chunk, "
                  "without the question" % chunk, "leave prefill_chunk_size out, or prune")


def _note_wanted(module: Any, args: tuple, kwargs: dict) -> None:
    """Before a forward pass: of how many newest tokens logits are wanted; all but one are candidates."""
    cache, wanted = kwargs.get("past_key_values"), kwargs.get("logits_to_keep", 1)
    if isinstance(cache, Cache):
        cache._candidates = wanted - 1 if isinstance(wanted, int) and wanted > 1 else 0


def _watch(model: Any) -> None:
    """Once per model; a configuration has no passes."""
    if isinstance(model, torch.nn.Module) and _note_wanted not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_note_wanted, with_kwargs=True)


def _row_path(path: Union[str, os.PathLike], row: int) -> str:
    return os.fspath(path) + (".%d" % row if row else "")


class _Layer(_caches.CacheLayerMixin):
    """One layer of full attention: marks its keys, so that the attention finds the pages."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, number: int, index: int, tokens_max: int) -> None:
        super().__init__()
        self.number, self.index, self.tokens_max = number, index, tokens_max
        self.columns = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Pages are reserved by the first attention, which knows the query heads."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple:
        key_states.kvferry_layer = self
        self.columns += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return self.tokens_max

    def reset(self) -> None:
        """`Cache.reset` empties all layers at once."""
        self.columns = 0

    def crop(self, tokens_to_remove: int) -> None:
        """`Cache.crop` cuts all layers at once."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise _no("beam search moves rows at every step",
                  "take num_beams=1, or a DynamicCache with attn_implementation='sdpa'")

    def _rows_change(self, *args: Any) -> None:
        raise _no("the rows of a batch cannot change", "begin again with another Cache")

    batch_repeat_interleave = batch_select_indices = offload = prefetch = _rows_change


class Cache(_caches.Cache):
    """Keys and values of a model in kvferry's pages; pass it as `past_key_values`.

    model       a model with attn_implementation="kvferry"
    budget      tokens that a KV head attends to in a step, with the first and the newest ones; at least
                the length of the context = dense attention
    tokens_max  longest context. Memory is reserved for it by the first forward pass: (tokens_max) x
                layers x KV heads x 2 x head_dim elements per row of the batch in host memory. Default:
                what the model is made for, at most 32768
    prune       "snapkv", "h2o", "pyramidkv", "streaming", or a PrunePolicy: what of the first prompt is
                kept, with settings of `kvferry.settings("prune")` in prune_settings. The prompt is the
                first forward pass, whose newest queries choose: hand it over whole. A
                prefill_chunk_size of the model, or of a `generate` that `use` has wrapped, is refused;
                one that you hand to `generate` together with a Cache is not seen here
    runtime     a kvferry.Runtime; None = one per device, shared
    settings    of `kvferry.settings("cache")`: select, page_size, local_tokens, ...

    Batches may be padded on either side: masked tokens are not stored. `crop` takes tokens back. With
    prompt lookup and assisted decoding candidates are steps, so tokens are those without, to rounding;
    with a static set, which a cut does not bring back, they attend densely. `save` and `restore` keep a
    prompt for a later process. Several turns, chunks (prefill_chunk_size) and streamers work as with any
    cache. Not supported, and said so: beam search, output_attentions, masks of 4 dimensions.
    """

    def __init__(self, model: Any, budget: int = 512, *, tokens_max: Optional[int] = None,
                 prune: Optional[Policy] = None, prune_settings: Optional[dict] = None,
                 runtime: Optional[Runtime] = None, **settings: Any) -> None:
        config = getattr(model, "config", model).get_text_config(decoder=True)
        implementation = getattr(config, "_attn_implementation", None)
        if implementation != NAME:
            raise Invalid("attn_implementation = %s: load the model with attn_implementation='kvferry', "
                          "or call model.set_attn_implementation('kvferry')" % implementation)
        if isinstance(prune, str) and prune not in PRUNE_POLICIES:
            raise _no("prune = %s hands fewer tokens to deeper layers" % prune,
                      "take one of %s" % ", ".join(PRUNE_POLICIES))
        if prune is not None:
            _whole_prompts_only(getattr(model, "generation_config", None))
        limit = getattr(config, "max_position_embeddings", None) or _TOKENS_MAX
        self._settings = dict(settings, budget_tokens=budget,
                              tokens_max=tokens_max or min(limit, _TOKENS_MAX))
        self._prune, self._prune_settings = prune, prune_settings or {}
        if prune is not None:
            self._settings.setdefault("observe_window",
                                      max(1, Pruner.window(prune, **self._prune_settings)))
        self._runtime = runtime
        layers: list = _caches.DynamicCache(config=config).layers
        self._number = max(_by_number, default=0) + 1
        self._paged: List[_Layer] = []
        for i, layer in enumerate(layers):
            if type(layer) is _caches.DynamicLayer:
                layers[i] = _Layer(self._number, len(self._paged), self._settings["tokens_max"])
                self._paged.append(layers[i])
        if not self._paged:
            raise _no("the model has no layer of full attention", "use it without kvferry")
        super().__init__(layers=layers)
        _watch(model)
        _by_number[self._number] = self
        self._cache: Optional[_PagedCache] = None
        self._pruner: Optional[Pruner] = None
        self._rows: List[Sequence] = []
        self._held: List[int] = [] # tokens of each row
        self._gaps: Optional[torch.Tensor] = None # [rows, columns] False = padding; None = there is none
        self._saved: List[str] = [] # files that the rows come from
        self._model: Optional[str] = None # what they must be of
        self._candidates = 0 # newest tokens of this pass that are to be verified
        self._columns = 0 # of the whole batch, as the operator counts them
        self._valid: Optional[torch.Tensor] = None # of this pass, likewise

    # -- what Transformers calls --

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest columns back; a negative number, as Transformers counts them."""
        if tokens_to_remove > 0:
            raise Invalid("tokens_to_remove = %d: give a negative number, as other caches want it"
                          % tokens_to_remove)
        columns = max(self._columns + tokens_to_remove, 0)
        for i, row in enumerate(self._rows): # the first one says whether that can be
            dropped = self._columns - columns if self._gaps is None else \
                int(self._gaps[i, columns:].sum())
            if dropped:
                row.truncate(self._held[i] - dropped)
            self._held[i] -= dropped
        super().crop(tokens_to_remove) # layers of other kinds
        self._gaps = None if self._gaps is None else self._gaps[:, :columns]
        self._columns = columns
        for layer in self._paged:
            layer.columns = columns

    def reset(self) -> None:
        """Forget all tokens; the memory stays reserved."""
        super().reset()
        for row in self._rows:
            row.truncate(0)
        self._held = [0] * len(self._rows)
        self._gaps, self._columns = None, 0

    @property
    def batch_size(self) -> int:
        return len(self._rows) or len(self._saved) or -1

    # -- files --

    def save(self, path: Union[str, os.PathLike], model: str = "") -> None:
        """Write what it holds to a file, and further rows of a batch to PATH.1, PATH.2, ...

        Each file is there whole or not at all. model: what the keys are of, at most 63 bytes; `restore`
        compares.
        """
        if len(self._paged) != len(self.layers):
            raise _no("layers with a window or linear attention keep caches that cannot be saved",
                      "save models whose layers all have full attention")
        if self._cache is None:
            raise Invalid("there is nothing to save before the first forward pass")
        for i, row in enumerate(self._rows):
            gaps = None if self._gaps is None else self._gaps[i].int().tolist()
            note = {"rows": len(self._rows), "columns": self._columns, "held": self._held[i],
                    "gaps": gaps}
            row.save(_row_path(path, i), model, json.dumps(note).encode()).wait()

    def restore(self, path: Union[str, os.PathLike], model: Optional[str] = None) -> None:
        """Hold what `save` wrote, and go on bit for bit; in a new Cache with the same settings.

        model: must be what the files say; None = any. The files are read whole by the next forward pass.
        """
        if self._cache is not None or self._saved:
            raise Invalid("the cache holds tokens: restore into a new one")
        notes = [self._note_of(path, 0)]
        notes += [self._note_of(path, i) for i in range(1, notes[0]["rows"])]
        if any(note["columns"] != notes[0]["columns"] for note in notes):
            raise Invalid("%s: its rows are of different batches; save them again" % os.fspath(path))
        self._saved, self._model = [_row_path(path, i) for i in range(len(notes))], model
        self._columns, self._held = notes[0]["columns"], [note["held"] for note in notes]
        if notes[0]["gaps"] is not None:
            self._gaps = torch.tensor([note["gaps"] for note in notes]).bool()
        for layer in self._paged:
            layer.columns = self._columns

    def _note_of(self, path: Union[str, os.PathLike], row: int) -> dict:
        path = _row_path(path, row)
        _, note = saved(self._runtime or _runtime_of(torch.device("cpu")), path)
        try:
            found = json.loads(note)
        except ValueError:
            found = None
        if not isinstance(found, dict) or set(found) != {"rows", "columns", "held", "gaps"}:
            raise Invalid("%s was not saved by a Cache of kvferry.hf" % path)
        return found

    # -- what it holds and did --

    def stats(self) -> dict:
        """Statistics of kvferry by name, bytes that are reserved, and the KV footprint.

        See kvf_stats and kvf_cache_plan in kvferry.h: tokens_attended, hits, misses, bytes_to_device,
        host_kv_bytes, device_kv_bytes, ... Empty before the first forward pass.
        """
        if self._cache is None:
            return {}
        found = {"footprint": self._cache.footprint().footprint}
        for row in (self._cache.plan, self._cache.stats()):
            found.update((name, getattr(row, name)) for name, *_ in row._fields_)
        return found

    def stats_reset(self) -> None:
        """Set statistics to zero."""
        if self._cache is not None:
            self._cache.stats_reset()

    def close(self) -> None:
        """Give all memory back."""
        if self._cache is not None:
            self._cache.close()

    # -- the attention of one layer --

    def _open(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
        if self._runtime is None:
            self._runtime = _runtime_of(q.device)
        settings = dict(self._settings, layers=len(self._paged), query_heads=q.shape[1],
                        kv_heads=k.shape[1], head_dim=k.shape[3], dtype=q.dtype, softmax_scale=scale)
        settings.setdefault("sequences_max", len(self._saved) or q.shape[0])
        if settings["sequences_max"] == 1: # candidates come one row at a time
            settings.setdefault("tokens_per_step_max", _STEP_TOKENS)
        cache = _PagedCache(self._runtime, **settings)
        if self._saved:
            self._rows = [cache.restore(path, self._model) for path in self._saved]
        else:
            self._rows = [cache.sequence() for _ in range(q.shape[0])]
            self._held = [0] * q.shape[0]
        self._cache = cache
        if self._prune is not None:
            self._pruner = Pruner(self._cache, self._prune, **self._prune_settings)

    def _note(self, mask: Optional[torch.Tensor], rows: int, tokens: int) -> None:
        """The first layer of a forward pass: which of its columns are tokens."""
        valid = None
        if mask is not None and mask.ndim == 2:
            new = mask[:, -tokens:].cpu()
            valid = None if bool(new.all()) else new
        self._valid = valid
        if valid is not None or self._gaps is not None:
            gaps = torch.ones(rows, self._columns, dtype=torch.bool) if self._gaps is None else self._gaps
            new = torch.ones(rows, tokens, dtype=torch.bool) if valid is None else valid
            self._gaps = torch.cat([gaps, new], 1)
        self._columns += tokens
        for i in range(rows):
            self._held[i] += tokens if valid is None else int(valid[i].sum())

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                mask: Optional[torch.Tensor], layer: int, scale: float) -> torch.Tensor:
        """[rows, tokens, heads, head_dim] of [rows, heads, tokens, head_dim]."""
        rows, _, tokens, _ = q.shape
        if mask is not None and mask.ndim == 4:
            raise _no("a mask of 4 dimensions", "pass the mask of [rows, tokens], or none")
        if self._cache is None:
            self._open(q, k, scale)
        if rows != len(self._rows):
            raise Invalid("kvferry.hf: %d rows came to a cache of %d; make a Cache per batch" % (
                rows, len(self._rows)))
        if layer == 0:
            self._note(mask, rows, tokens)
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        if tokens == 1 and self._valid is None:
            return self._cache.decode(self._rows, q[:, 0], k[:, 0], v[:, 0], layer=layer)[:, None]
        out = torch.zeros_like(q) if self._valid is not None else torch.empty_like(q)
        for i in range(rows):
            self._append(i, q[i], k[i], v[i], out[i], layer)
        return out

    def _append(self, i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                layer: int) -> None:
        """The new tokens of a row, without padding."""
        row, of, result = self._rows[i], None, out
        if self._valid is not None and not bool(self._valid[i].all()):
            of = self._valid[i].nonzero()[:, 0].to(q.device)
            if not len(of):
                return
            q, k, v = q[of], k[of], v[of]
            result = torch.empty_like(q)
        dense = q.shape[0] - self._steps(i, q.shape[0])
        if self._pruner is not None and self._held[i] == dense > 1:
            self._prune_prompt(row, q, k, v, result, layer)
        elif dense:
            self._cache.prefill(row, q[:dense], k[:dense], v[:dense], result[:dense], layer=layer)
        most = self._cache.settings.tokens_per_step_max
        for at in range(dense, q.shape[0], most):
            end = min(at + most, q.shape[0])
            self._cache.decode(row, q[at:end], k[at:end], v[at:end], result[at:end], layer=layer,
                               tokens=[end - at])
        if of is not None:
            out[of] = result

    def _steps(self, i: int, tokens: int) -> int:
        """Newest tokens of a row's pass that are decode steps; what is left is read as a prompt."""
        if tokens == 1:
            return 1
        if self._pruner is not None and self._held[i] == tokens or self._cache.plan.static_tokens:
            return 0
        # Behind the first pass a candidate follows the token that was chosen last.
        return tokens if tokens <= self._candidates + 1 else self._candidates

    def _prune_prompt(self, row: Sequence, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                      out: torch.Tensor, layer: int) -> None:
        tokens = q.shape[0]
        if layer == 0:
            self._pruner.begin(row, tokens)
        self._pruner.prefill(row, q, k, v, out, layer=layer)
        step = self._pruner.layer(row, layer)
        if step.propagate is not None and len(step.propagate) != tokens or step.restart:
            raise _no("this policy hands fewer tokens to deeper layers", "take one that keeps them")


def use(model: Any, budget: int = 512, **settings: Any) -> Any:
    """Give every `generate` of a model a Cache of its own where none is passed. Returns the model.

    For pipelines, evaluation harnesses and servers, which call `generate` themselves. Its memory is
    reserved by the call, for tokens_max tokens, and given back at its end, unless the call returns the
    cache. settings: of `Cache`. `del model.generate` ends it.
    """
    model.set_attn_implementation(NAME)
    Cache(model, budget, **settings) # says now what does not fit
    generate = type(model).generate

    @functools.wraps(generate)
    def generate_with_pages(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None or kwargs.get("use_cache") is False:
            return generate(model, *args, **kwargs)
        if settings.get("prune") is not None:
            _whole_prompts_only(kwargs.get("generation_config"))
            _whole_prompts_only(types.SimpleNamespace(**kwargs))
        cache = Cache(model, budget, **settings)
        kwargs["past_key_values"], told = cache, None
        try:
            told = generate(model, *args, **kwargs)
        finally:
            if getattr(told, "past_key_values", None) is not cache:
                cache.close()
        return told

    model.generate = generate_with_pages
    return model


# ---- the operator: opaque to torch.compile ----

def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor],
            cache: int, layer: int, scale: float) -> torch.Tensor:
    return _by_number[cache]._attend(q, k, v, mask, layer, scale)


def _shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor],
              cache: int, layer: int, scale: float) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


_library = torch.library.Library("kvferry", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, int cache, int layer, float scale)"
                " -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("attend", _attend, _device)
torch.library.register_fake("kvferry::attend", _shape_of, lib=_library)


# ---- attention and masks by name ----

def _dense(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           mask: Optional[torch.Tensor], **kwargs: Any) -> tuple:
    """Layers that keep their own cache: SDPA, with the mask that `_make_mask` left to it."""
    if mask is not None and mask.ndim < 4:
        mask = sdpa_mask(query.shape[0], query.shape[2], key.shape[2],
                         q_offset=key.shape[2] - query.shape[2],
                         attention_mask=mask if mask.ndim == 2 else None, device=query.device)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: Optional[torch.Tensor], scaling: Optional[float] = None,
               dropout: float = 0.0, **kwargs: Any) -> tuple:
    if kwargs.get("output_attentions"):
        raise _no("output_attentions: weights over pages are never in one place",
                  "load the model with attn_implementation='eager'")
    layer = getattr(key, "kvferry_layer", None)
    if layer is None:
        return _dense(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                      **kwargs)
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise _no("%s of this model's attention" % name, "use it without kvferry")
    if dropout:
        raise _no("dropout", "call model.eval() first")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return torch.ops.kvferry.attend(query, key, value, attention_mask, layer.number, layer.index,
                                    scale), None


def _make_mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
               mask_function: Any = causal_mask_function,
               attention_mask: Optional[torch.Tensor] = None, device: Any = "cpu",
               **kwargs: Any) -> Optional[torch.Tensor]:
    """Causal masks stay as they come, [rows, tokens], or one element that says "no padding"; other
    patterns are SDPA's."""
    if mask_function is causal_mask_function:
        return torch.ones(1, dtype=torch.bool, device=device) if attention_mask is None else \
            attention_mask
    return sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset,
                     mask_function=mask_function, attention_mask=attention_mask, device=device,
                     **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _make_mask)
