# SPDX-License-Identifier: Apache-2.0
"""kvferry in Hugging Face Transformers: attention by the name "kvferry", and a cache for `generate`.

    import kvferry.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvferry")
    cache = kvferry.hf.Cache(model, budget=1024)
    model.generate(**inputs, cache=cache, max_new_tokens=200) # past_key_values=cache before Transformers 5.24
    cache.stats()

`kvferry.hf.use(model, budget=1024)` gives every `generate` of a model such a cache, in pipelines and
other programs that pass none.

Several tokens at once (a prompt, a further turn) attend densely; a single token selects pages within
the budget, and so do candidates of prompt lookup and of an assistant, each for itself: a pass that wants
logits of several newest tokens has these. Layers with a sliding window or linear attention keep the cache and
the attention that Transformers gives them. Without a `Cache` the name means what Transformers would do:
torch's SDPA, or the model's own attention where that has sinks or a soft cap of scores.

Knows the interfaces of Transformers 5 (AttentionInterface, AttentionMaskInterface, cache layers) and
no model. Invariants: a row of a batch holds its own tokens only, never padding; a layer's length
counts columns as Transformers does, with padding; in a pass every layer of pages stores and attends
once, and so does every layer without keys that attends to them, in order; lengths change when the last
one has: a pass that does anything else raises, one that ends early has not been.
"""
import copy
import functools
import itertools
import json
import os
import sys
import tempfile
import threading
import types
import weakref
from typing import Any, Dict, List, NamedTuple, Optional, Union

from . import _hf_known as _known # before Transformers of other versions fail

import torch
from transformers import PreTrainedModel
from transformers import cache_utils as _caches

from . import _hf_attention as _attention
from ._cache import Cache as _PagedCache
from ._cache import Sequence, width_in_pages
from ._errors import Full, Invalid, Unsupported
from ._hf_attention import NAME, WITHOUT, no
from ._hf_fit import implementation, must_fit, must_open, settings_of, text_config
from ._hf_generate import NAMES, cache_in, follow, handed_back, name_of_the_cache, whole_prompts_only
from ._hf_prompt import attend_from_padding, attend_to_prompt, causal_columns
from ._prompt_attention import attend as attend_by_torch
from ._prune import Policy, Pruner
from ._runtime import Runtime
from ._save import saved
from ._settings import LIBRARY, OWN
from ._settings import prompt_attention as whose_kernels

__all__ = ["Cache", "use"]

# Policies that hand every token on to the next layer: a model of Transformers cannot drop rows.
PRUNE_POLICIES = ("full", "streaming", "h2o", "snapkv", "pyramidkv")
_TOKENS_MAX = 32768
_STEP_TOKENS = 16 # of a sequence, that one decode call takes
_SHARED = "it attends with keys of another layer"
_NOT_ATTENDED = "it did not attend to pages in this pass"
_OUTSIDE = "keys come outside a forward pass, in which nobody attends to them"

_runtimes: Dict[str, Runtime] = {}
_numbers = itertools.count(1)
_beginning = threading.Lock()


def _runtime_of(device: torch.device) -> Runtime:
    """One per device, shared."""
    name = str(device)
    if name not in _runtimes or _runtimes[name].closed:
        _runtimes[name] = Runtime(device="host") if device.type == "cpu" else \
            Runtime(device="cuda", device_ordinal=device.index)
    return _runtimes[name]


def _has_cross_attention(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _pass_begins(module: Any, args: tuple, kwargs: dict) -> None:
    cache = cache_in(args, kwargs)
    if cache is None:
        return
    if _has_cross_attention(module) and any(cache is value for value in (*kwargs.values(), *args)):
        raise no("a %s also has keys of its encoder" % type(module).__name__,
                 "pass EncoderDecoderCache(cache, DynamicCache()) of Transformers")
    if kwargs.get("use_cache") is False:
        raise no("%s, use_cache = False with a Cache: generate hands over the whole text in every pass"
                 % type(module).__name__, "call it with use_cache=True, or without a Cache")
    if implementation(module) != NAME:
        raise Invalid("attn_implementation = %s of a %s with a Cache of kvferry: call "
                      "set_attn_implementation('kvferry'), or pass another cache" % (
                          implementation(module), type(module).__name__))
    wanted = kwargs.get("logits_to_keep")
    torch.ops.kvferry.begin(cache._paged[0].number, id(module), wanted if isinstance(wanted, int) else -1)


def _pass_ends(module: Any, args: tuple, kwargs: dict, result: Any) -> None:
    cache = cache_in(args, kwargs)
    if cache is None:
        return
    if result is None: # an error ended it
        cache._interrupted(id(module))
    else:
        other = handed_back(result)
        if other is not None and cache_in((other,), {}) is not cache:
            raise no("%s hands out a %s after a pass with a Cache of kvferry" % (
                type(module).__name__, type(other).__name__), WITHOUT)
        # The operator comes after all that this tensor is made of.
        number = cache._paged[0].number
        made = next((x for x in _attention.flat(result) if isinstance(x, torch.Tensor)), number)
        torch.ops.kvferry.end(number, id(module), made)


def _watch(model: Any) -> None:
    """Once per model, and each model in it that may be called by itself; a configuration has no passes."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if (module is model or isinstance(module, PreTrainedModel)) and \
                _pass_begins not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_pass_begins, with_kwargs=True)
            module.register_forward_hook(_pass_ends, with_kwargs=True, always_call=True)
        _attention.expands(type(module))
    follow(type(model))


def _row_path(path: Union[str, os.PathLike], row: int) -> str:
    return os.fspath(path) + (".%d" % row if row else "")


def _in_a_forward(frame: Optional[types.FrameType]) -> bool:
    """Whether a module is at work, of a model that has never seen a Cache, too."""
    while frame is not None and not isinstance(frame.f_locals.get("self"), torch.nn.Module):
        frame = frame.f_back
    return frame is not None


class _Layer(_caches.CacheLayerMixin):
    """One layer of full attention: keeps what it is given until the attention asks for it."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, number: torch.Tensor, index: int, at: int, tokens_max: int) -> None:
        super().__init__()
        self.number, self.index, self.at = number, index, at # at: among all layers of the model
        self.tokens_max, self.columns = tokens_max, 0
        self.waiting: Optional[tuple] = None # keys and values of this pass that nobody has attended
        self.lends = False # other layers of the model attend to its keys after it
        self.lent: Optional[tuple] = None # weak references to what it handed out last, if so

    @property
    def is_initialized(self) -> bool:
        """Models make the mask of a prompt before there is a token."""
        return self.columns > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """`super().__init__` sets it."""

    def refusal(self, what: str) -> Unsupported:
        return _attention.caches[int(self.number)].refusal(self.at, what)

    def _in_pages(self, *value: Any) -> Any:
        if value != (None,): # as `super().__init__` sets them
            raise self.refusal("somebody reads or sets the keys or values of a cache, which are in pages")

    keys = values = property(_in_pages, _in_pages)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Pages are reserved by the first attention, which knows the query heads."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple:
        if not torch.compiler.is_compiling() and _attention.caches[int(self.number)]._is_idle() and \
                not _in_a_forward(sys._getframe(1)):
            raise self.refusal(_OUTSIDE)
        if self.waiting is not None:
            raise self.refusal("keys come again before those that came were attended")
        self.waiting = key_states, value_states
        handed = _attention.stored(self, key_states), _attention.stored(self, value_states)
        if self.lends and not torch.compiler.is_compiling():
            self.lent = weakref.ref(handed[0]), weakref.ref(handed[1])
        return handed

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple:
        return _attention.columns(self.columns + query_length), 0

    def get_max_length(self) -> int:
        return self.tokens_max

    def _of_all(self, *args: Any) -> None:
        """`Cache` does it for all layers at once."""

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _of_all

    def _stay(self, *args: Any) -> None:
        raise no("pages cannot be offloaded once more", "make no OffloadedCache of it")

    offload = prefetch = _stay


def _registered(cache: "Cache") -> torch.Tensor:
    """The cache's number for the operator: a tensor, because a compiler builds numbers in."""
    number = next(_numbers)
    _attention.caches[number] = cache
    with torch.inference_mode(False): # whatever passes there will be
        return torch.tensor(number, device="cpu")


class _Pass(NamedTuple):
    """A forward pass, as its first layer sees it: what counts once the last layer has attended."""
    mask: Optional[torch.Tensor]
    version: int # of the mask: a layer may write into it
    valid: Optional[torch.Tensor] # [rows, tokens] of its columns that are tokens; None = all
    gaps: Optional[torch.Tensor]
    columns: int
    held: List[int]


def _version(mask: Optional[torch.Tensor]) -> int:
    """How often somebody has written into it; -1 = nobody counts."""
    return 0 if mask is None else -1 if mask.is_inference() else mask._version


class _Turn(NamedTuple):
    """One layer of the model that attends to pages."""
    layer: int # whose pages
    at: int # the layer's own place among all of them
    shared: bool # it has no keys of its own


_NEVER = _Pass(None, 0, None, None, 0, []) # one that failed before its first layer attended


class Cache(_caches.DynamicCache):
    """Keys and values of a model in kvferry's pages; pass it as `cache`, or `past_key_values` before Transformers 5.24.

    model       a model with attn_implementation="kvferry"
    budget      tokens that a KV head attends to in a step, with the first and the newest ones; at least
                the length of the context = dense attention. Default: 1024
    tokens_max  longest context. Memory is reserved for it by the first forward pass: (tokens_max) x
                layers x KV heads x 2 x head_dim elements per row of the batch in host memory. Default:
                what the model is made for, at most 32768
    prune       "snapkv", "h2o", "pyramidkv", "streaming", or a PrunePolicy: what of the first prompt is
                kept, with settings of `kvferry.settings("prune")` in prune_settings. The prompt is the
                first forward pass, whose newest queries choose: hand it over whole. A
                prefill_chunk_size of the model, or of a `generate` that `use` has wrapped, is refused;
                one that you hand to `generate` together with a Cache is not seen here
    runtime     a kvferry.Runtime; None = one per device, shared
    prompt_attention  "own", or "library": torch's SDPA (FlashAttention, cuDNN) attends the first pass of rows
                without padding, sinks, a soft cap and pruning; answers are the same to rounding, but depend on
                where chunks of a prompt end
    settings    of `kvferry.settings("cache")`: select, page_size, local_tokens, ...

    Batches may be padded on either side: masked tokens are not stored. `crop` takes tokens back. With
    prompt lookup and assisted decoding candidates are steps, so tokens are those without, to rounding;
    with a static set, which a cut does not bring back, and where layers attend with keys of another layer,
    they attend densely. Encoder-decoders take
    EncoderDecoderCache(cache, DynamicCache()). `save` and `restore` keep a
    prompt for a later process. Several turns, chunks (prefill_chunk_size), beams and streamers work as with
    any cache. `copy.copy` and `copy.deepcopy` fork what it holds: beside it, if sequences_max leaves room,
    so that both share sealed pages, else into memory of its own. Refused by name: output_attentions,
    gradients, masks that are not causal or that change for older columns, and whatever a model does with
    keys other than hand them to the attention: the error says which layer.
    """

    def __init__(self, model: Any, budget: Optional[int] = None, *, tokens_max: Optional[int] = None,
                 prune: Optional[Policy] = None, prune_settings: Optional[dict] = None,
                 runtime: Optional[Runtime] = None, prompt_attention: str = OWN, **settings: Any) -> None:
        must_fit(model)
        config, self._of = text_config(model), getattr(model, "config", model)
        if implementation(model) != NAME:
            raise Invalid("attn_implementation = %s: load the model with attn_implementation='kvferry', "
                          "or call model.set_attn_implementation('kvferry')" % implementation(model))
        if isinstance(prune, str) and prune not in PRUNE_POLICIES:
            raise no("prune = %s hands fewer tokens to deeper layers" % prune,
                      "take one of %s" % ", ".join(PRUNE_POLICIES))
        if prune is not None:
            whole_prompts_only(getattr(model, "generation_config", None))
        limit = getattr(config, "max_position_embeddings", None) or _TOKENS_MAX
        self._settings = dict(settings_of(budget, settings),
                              tokens_max=tokens_max or min(limit, _TOKENS_MAX))
        self._prune, self._prune_settings = prune, prune_settings or {}
        self._prompt_attention = whose_kernels(prompt_attention)
        if prune is not None:
            self._settings.setdefault("observe_window",
                                      max(1, Pruner.window(prune, **self._prune_settings)))
        self._runtime = runtime
        layers: list = _caches.DynamicCache(config=config).layers
        self._name = type(model).__name__
        kinds = _known.unknown_kinds(config, layers)
        if kinds:
            raise no("%s has layers of kinds that kvferry does not support: %s" % (self._name, kinds), WITHOUT)
        number = _registered(self)
        self._paged: List[_Layer] = []
        self._order: List[_Turn] = [] # of a pass
        modes = getattr(config, "kv_sharing_modes", None) or [None] * len(layers)
        for i, layer in enumerate(layers):
            if type(layer) is _caches.DynamicLayer:
                layers[i] = _Layer(number, len(self._paged), i, self._settings["tokens_max"])
                self._paged.append(layers[i])
                self._order.append(_Turn(layers[i].index, i, False))
            elif modes[i] == "reuse":
                owner = next((layers[j] for j in reversed(range(i)) if modes[j] == "store" and
                              config.layer_types[j] == config.layer_types[i]), None)
                if isinstance(owner, _Layer):
                    owner.lends = True
                    self._order.append(_Turn(owner.index, i, True))
                elif owner is None and config.layer_types[i] == "full_attention":
                    raise no("%s, layer %d: %s" % (self._name, i, _SHARED), WITHOUT)
        self._shares = any(turn.shared for turn in self._order)
        if prune is not None and self._shares:
            raise no("%s has layers that share the keys of another layer, which would be pruned by that layer's "
                     "attention" % self._name, "leave prune out")
        if not self._paged:
            raise no("%s has no layer of full attention alone, but %s" % (
                self._name, ", ".join(sorted({type(layer).__name__ for layer in layers}))), WITHOUT)
        device = getattr(model, "device", torch.device("cpu"))
        must_open(runtime or _runtime_of(device if device.type == "cuda" else torch.device("cpu")), model,
                  {layer.at for layer in self._paged}, self._settings)
        _caches.Cache.__init__(self, layers=layers)
        _watch(model)
        self._cache: Optional[_PagedCache] = None
        self._sharers: "weakref.WeakSet[Cache]" = weakref.WeakSet([self]) # of _cache
        self._pruner: Optional[Pruner] = None
        self._rows: List[Sequence] = []
        self._held: List[int] = [] # tokens of each row
        self._gaps: Optional[torch.Tensor] = None # [rows, columns] False = padding; None = there is none
        self._columns = 0 # of the whole batch
        self._params: Dict[int, dict] = {} # of layers, as `kvferry.Cache.attention_params` takes them
        self._known: Dict[int, tuple] = {} # what tells whether a layer has another by now
        self._saved: List[str] = [] # files that the rows come from
        self._model: Optional[str] = None # what they must be of
        self._candidates = 0 # newest tokens of this pass that are to be verified
        self._outer: Optional[tuple] = None # module whose pass it is, by its id, and the thread that called it
        self._pass: Optional[_Pass] = None # while some layers have attended, and others have not
        self._turn = 0 # the layer that attends next
        self.kvferry_passes = 0 # that had this cache
        self._watched = isinstance(model, torch.nn.Module)

    def _is_idle(self) -> bool:
        """Whether no pass of the model is under way that says where it begins."""
        return self._watched and self._outer is None

    def refusal(self, at: int, what: str) -> Unsupported:
        """Names the model, one of its layers, the reason and the way out."""
        if implementation(self._of) != NAME:
            what += ", because attn_implementation = %s by now" % implementation(self._of)
        return no("%s, layer %d: %s" % (self._name, at, what), WITHOUT)

    # -- what Transformers calls --

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple:
        if layer_idx >= len(self.layers):
            raise no("%s has %d layers: this Cache is not for a model with a layer %d" % (
                self._name, len(self.layers), layer_idx), "make one of that model")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest columns back; a negative number, as Transformers counts them."""
        if tokens_to_remove > 0:
            raise Invalid("tokens_to_remove = %d: give a negative number, as other caches want it"
                          % tokens_to_remove)
        self._settle()
        columns = max(self._columns + tokens_to_remove, 0)
        for i in range(len(self._held)): # the first one says whether that can be
            dropped = self._columns - columns if self._gaps is None else \
                int(self._gaps[i, columns:].sum())
            if dropped and self._rows:
                self._rows[i].truncate(self._held[i] - dropped)
            self._held[i] -= dropped
        super().crop(tokens_to_remove) # layers of other kinds
        self._gaps = None if self._gaps is None else self._gaps[:, :columns]
        self._grow(columns)

    def reset(self) -> None:
        """Forget all tokens; the memory stays reserved."""
        super().reset()
        for row in self._rows:
            row.truncate(0)
        self._held, self._gaps, self._saved, self._candidates = [0] * len(self._rows), None, [], 0
        self._pass, self._turn, self._outer = None, 0, None
        for layer in self._paged:
            layer.waiting = None
        self._grow(0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """A step of beam search: row i goes on as row beam_idx[i] was."""
        self._select(beam_idx.tolist())
        super().reorder_cache(beam_idx) # layers of other kinds

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        self._select(torch.arange(len(self._held), device="cpu")[indices.cpu()].tolist())
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row that many times."""
        self._select([i for i in range(len(self._held)) for _ in range(repeats)])
        super().batch_repeat_interleave(repeats)

    def _select(self, taken: List[int]) -> None:
        """Rows by number. Those that nobody takes go first, so that their pages are free for forks."""
        self._settle()
        if not self._held:
            return
        taken = [range(len(self._held))[i] for i in taken] # before anything changes
        if self._rows:
            for i in set(range(len(self._rows))) - set(taken):
                self._rows[i].close()
            self._take([self._rows[i] for i in taken])
        else: # they are in files
            self._saved = [self._saved[i] for i in taken]
        self._held = [self._held[i] for i in taken]
        self._gaps = None if self._gaps is None else self._gaps[taken]

    def _grow(self, columns: int) -> None:
        self._columns = columns
        for layer in self._paged:
            layer.columns = columns

    # -- copies --

    def __copy__(self) -> "Cache":
        """Another cache that goes on from the same tokens, whose sealed pages both share."""
        self._settle()
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._paged, number = [], _registered(copied)
        copied.layers = [copy.deepcopy(layer) for layer in self.layers]
        for layer in copied.layers:
            if isinstance(layer, _Layer):
                layer.number = number
                copied._paged.append(layer)
        copied._held, copied._saved = list(self._held), list(self._saved)
        copied._outer = None
        if self._cache is None:
            copied._sharers = weakref.WeakSet([copied])
        else:
            copied._rows = []
            copied._take(self._rows)
        return copied

    def __deepcopy__(self, memo: dict) -> "Cache":
        return memo.setdefault(id(self), self.__copy__())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no("a Cache cannot be pickled: it is memory of this process",
                 "write it with save(path), and read it with restore(path)")

    def _take(self, rows: List[Sequence]) -> None:
        """Go on from these rows, any of them several times. Forks take the room that there is, beside them,
        or memory of their own."""
        made: List[Sequence] = []
        try:
            for n, row in enumerate(rows):
                made.append(row.fork() if row in rows[:n] or row not in self._rows else row)
            self._sharers.add(self)
        except Full:
            for row in made:
                if row not in rows:
                    row.close()
            made = self._move(rows)
        self._rows = made

    def _move(self, rows: List[Sequence]) -> List[Sequence]:
        """The same tokens in a memory of its own, through files."""
        most = max(len(rows), self._geometry["sequences_max"])
        self._geometry = dict(self._geometry, sequences_max=most)
        cache, made = self._pages(self._geometry), []
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "row")
            for n, row in enumerate(rows):
                if row in rows[:n]:
                    made.append(made[rows.index(row)].fork())
                else:
                    row.save(path).wait()
                    made.append(cache.restore(path))
        self.close()
        self._cache, self._sharers = cache, weakref.WeakSet([self])
        if self._prune is not None:
            self._pruner = Pruner(cache, self._prune, **self._prune_settings)
        return made

    @property
    def batch_size(self) -> int:
        return len(self._rows) or len(self._saved) or -1

    # -- files --

    def save(self, path: Union[str, os.PathLike], model: str = "") -> None:
        """Write what it holds to a file, and further rows of a batch to PATH.1, PATH.2, ...

        Each file is there whole or not at all. model: what the keys are of, at most 63 bytes; `restore`
        compares.
        """
        if self._others():
            raise no("layers with a window or linear attention keep caches that cannot be saved",
                      "save models whose layers all have full attention")
        if self._cache is None:
            raise Invalid("there is nothing to save before the first forward pass")
        self._settle()
        for i, row in enumerate(self._rows):
            gaps = None if self._gaps is None else self._gaps[i].int().tolist()
            note = {"rows": len(self._rows), "columns": self._columns, "held": self._held[i],
                    "gaps": gaps, "attention_params": [self._params[n] for n in range(len(self._paged))]}
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
        self._params = dict(enumerate(notes[0].get("attention_params", ())))
        self._held = [note["held"] for note in notes]
        if notes[0]["gaps"] is not None:
            self._gaps = torch.tensor([note["gaps"] for note in notes]).bool()
        self._grow(notes[0]["columns"])

    def _note_of(self, path: Union[str, os.PathLike], row: int) -> dict:
        path = _row_path(path, row)
        _, note = saved(self._runtime or _runtime_of(torch.device("cpu")), path)
        try:
            found = json.loads(note)
        except ValueError:
            found = None
        if not isinstance(found, dict) or set(found) - {"attention_params"} != {"rows", "columns", "held", "gaps"}:
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
        """Give all memory back that no copy shares."""
        if self._cache is None:
            return
        for row in self._rows:
            row.close()
        self._sharers.discard(self)
        if not self._sharers:
            self._cache.close()

    # -- a pass --

    def _begin(self, module: int, wanted: int) -> None:
        """Before a module's forward pass, by its id: of how many newest tokens logits are wanted; all but
        one are candidates. -1 = it does not say."""
        thread = threading.current_thread()
        with _beginning:
            outer, caller = self._outer or (module, thread)
            if caller is not thread and caller.is_alive():
                raise no("two threads call a model with one Cache", "give each its own (copy.deepcopy makes "
                         "one), or call reset() if a pass was interrupted")
            if caller is not thread or outer == module: # not a module inside
                self._settle()
                self._outer = module, thread
        if wanted >= 0:
            self._candidates = max(wanted - 1, 0)

    def _is_outer(self, module: int) -> bool:
        return self._outer == (module, threading.current_thread())

    def _interrupted(self, module: int) -> None:
        if self._is_outer(module):
            self._pass, self._outer, self._candidates = self._pass or _NEVER, None, 0

    def _end(self, module: int) -> None:
        if not self._is_outer(module):
            return
        self._outer, self._candidates = None, 0
        for layer in self._paged:
            if layer.waiting is not None:
                raise layer.refusal(_NOT_ATTENDED)
        if self._turn < len(self._order):
            raise self.refusal(self._order[self._turn].at, _NOT_ATTENDED)
        self._count()

    def _others(self) -> list:
        """Layers that keep a cache of Transformers."""
        none = getattr(_caches, "DummyLayer", _Layer)
        return [layer for layer in self.layers if not isinstance(layer, (_Layer, none))]

    def _settle(self) -> None:
        """Takes back what a pass has left that did not reach its end."""
        if self._outer is None and self._pass is None: # there was none
            for layer in self._paged:
                if layer.waiting is not None:
                    raise layer.refusal(_OUTSIDE + "; call reset()")
        if self._outer is not None or self._pass is not None:
            for layer in self._others():
                if not isinstance(layer, _caches.CacheLayerMixin) or \
                        layer.get_seq_length() != self._columns:
                    raise no("a pass was interrupted, and layers with a window or linear attention "
                             "cannot take it back", "call reset(), or begin again with another Cache")
            for row, held in zip(self._rows, self._held):
                row.truncate(held)
        for layer in self._paged:
            layer.waiting = None
        self._pass, self._turn, self._outer = None, 0, None

    # -- the attention of one layer --

    def _pages(self, settings: dict) -> _PagedCache:
        """A cache whose layers have the attention parameters of tokens that come from another memory or from files."""
        cache = _PagedCache(self._runtime, **settings)
        for layer, params in self._params.items():
            cache.attention_params(layer, **params)
        self._params, self._known = dict(self._params), {}
        return cache

    def _open(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        if self._runtime is None:
            self._runtime = _runtime_of(q.device)
        settings = dict(self._settings, layers=len(self._paged), query_heads=q.shape[1],
                        kv_heads=k.shape[1], head_dim=k.shape[3], dtype=q.dtype, softmax_scale=scale,
                        value_dim=width_in_pages(k.shape[3], v.shape[3], q.device.type)) # others are padded
        settings.setdefault("sequences_max", len(self._saved) or q.shape[0])
        if settings["sequences_max"] == 1: # candidates come one row at a time
            settings.setdefault("tokens_per_step_max", _STEP_TOKENS)
        cache = self._pages(settings)
        if self._saved:
            self._rows = [cache.restore(path, self._model) for path in self._saved]
            for row, held in zip(self._rows, self._held): # `crop` may have been called since
                row.truncate(held)
        else:
            self._rows = [cache.sequence() for _ in range(q.shape[0])]
            self._held = [0] * q.shape[0]
        self._cache, self._geometry = cache, settings
        if self._prune is not None:
            self._pruner = Pruner(self._cache, self._prune, **self._prune_settings)

    def _first_layer(self, mask: Optional[torch.Tensor], rows: int, tokens: int) -> None:
        """Which columns of this pass are tokens, and the lengths after it."""
        if self._pass is not None:
            raise self._paged[0].refusal("it is attended again before the pass ends, or a pass was "
                                         "interrupted, after which the cache needs a reset()")
        valid, gaps = self._new_columns(mask, rows, tokens, tokens), None
        if valid is not None or self._gaps is not None:
            gaps = torch.ones(
                rows, self._columns, dtype=torch.bool, device="cpu") if self._gaps is None else self._gaps
            new = torch.ones(rows, tokens, dtype=torch.bool, device="cpu") if valid is None else valid
            gaps = torch.cat([gaps, new], 1)
        held = [n + (tokens if valid is None else int(valid[i].sum())) for i, n in enumerate(self._held)]
        if valid is not None:
            for i in range(rows):
                if self._held[i] and not valid[i, -1]:
                    raise no("row %d ends in padding after tokens of an earlier pass" % i,
                             "pad on the left")
        self._pass, self._turn = _Pass(mask, _version(mask), valid, gaps, self._columns + tokens, held), 0

    def _new_columns(self, mask: Optional[torch.Tensor], rows: int, tokens: int,
                     queries: int) -> Optional[torch.Tensor]:
        """[rows, tokens] of a mask, None if all are tokens. Older columns of it must not change."""
        columns = self._columns
        seen = None
        if mask is not None and mask.ndim == 2:
            if mask.shape[1] != columns + tokens:
                raise Invalid("attention_mask has %d columns: it must have %d, one for each that the cache "
                              "holds and %d new" % (mask.shape[1], columns + tokens, tokens))
            seen = mask.bool().expand(rows, -1)
        elif mask is not None and mask.ndim == 4:
            seen = causal_columns(mask, columns + tokens, queries).expand(rows, -1)
        seen = None if seen is None or bool(seen.all()) else seen.cpu()
        before = None if self._gaps is None or bool(self._gaps.all()) else self._gaps
        old = None if seen is None else seen[:, :columns]
        if before is None and old is not None and not bool(old.all()) or \
                before is not None and (old is None or not torch.equal(old, before)):
            raise no("attention_mask changes for columns that the cache holds",
                     "keep it as it was and append to it, or begin again with another Cache")
        new = None if seen is None else seen[:, columns:]
        return None if new is None or bool(new.all()) else new

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor],
                layer: int, shared: bool, params: _attention.AttentionParams) -> torch.Tensor:
        """[rows, queries, heads, elements of a value] of [rows, heads, queries, elements of a key]."""
        rows, _, tokens, _ = k.shape
        if (layer or shared) and (self._pass is None or self._turn == len(self._order) or
                                  self._order[self._turn][::2] != (layer, shared)):
            raise self._paged[layer].refusal("it attends out of turn")
        if self._cache is None:
            self._open(q, k, v, params.scale)
        if rows != len(self._rows):
            raise Invalid("kvferry.hf: %d rows came to a cache of %d; make a Cache per batch" % (
                rows, len(self._rows)))
        if layer == 0 and not shared:
            self._first_layer(mask, rows, tokens)
        self._same(q, k, v, mask, layer, tokens)
        self._set_params(layer, params, shared)
        width, lacks = v.shape[3], self._cache.settings.value_dim - v.shape[3]
        if lacks:
            v = torch.nn.functional.pad(v, (0, lacks))
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        valid = self._pass.valid
        if tokens == 1 and valid is None:
            k, v = (None, None) if shared else (k[:, 0], v[:, 0])
            out = self._cache.decode(self._rows, q[:, 0], k, v, layer=layer)[:, None]
        else:
            make = q.new_zeros if valid is not None or shared else q.new_empty
            out = make(q.shape[:3] + v.shape[3:])
            for i in range(rows):
                if shared:
                    self._ask(i, q[i], k[i], v[i], out[i], layer, params)
                else:
                    self._append(i, q[i], k[i], v[i], out[i], layer, params)
        self._turn += 1
        if self._turn == len(self._order) and self._outer is None:
            self._count()
        return out[..., :width].contiguous() if lacks else out

    def _count(self) -> None:
        """The pass has been."""
        self.kvferry_passes += 1
        self._held, self._gaps = self._pass.held, self._pass.gaps
        self._grow(self._pass.columns)
        self._pass, self._turn = None, 0

    def _same(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor],
              layer: int, tokens: int) -> None:
        """A layer has the heads and the mask of the first one."""
        s, first = self._cache.settings, self._pass.mask
        if (q.shape[1], k.shape[1], k.shape[3]) != (s.query_heads, s.kv_heads, s.head_dim):
            raise self._paged[layer].refusal("%d query heads, %d KV heads of %d elements, where others have "
                                             "%d, %d of %d" % (q.shape[1], k.shape[1], k.shape[3],
                                                               s.query_heads, s.kv_heads, s.head_dim))
        if v.shape[3] > s.value_dim:
            raise self._paged[layer].refusal("values of %d elements, where others have %d" % (
                v.shape[3], s.value_dim))
        if mask is None and first is None or mask is not None and first is not None and \
                mask.shape == first.shape and mask.data_ptr() == first.data_ptr() and \
                _version(mask) == self._pass.version >= 0:
            return
        valid, wanted = self._new_columns(mask, q.shape[0], tokens, q.shape[2]), self._pass.valid
        if (valid is None) != (wanted is None) or valid is not None and not torch.equal(valid, wanted):
            raise self._paged[layer].refusal("its mask is not that of the first layer")

    def _set_params(self, layer: int, params: _attention.AttentionParams, shared: bool) -> None:
        """Before a layer's first token. Where sinks have changed since, pages refuse them."""
        if not 0 < params.scale < float("inf"):
            raise self._paged[layer].refusal("scores are multiplied by %g" % params.scale)
        sinks = params.sinks
        known = params._replace(sinks=None if sinks is None else (sinks.data_ptr(), sinks._version))
        if shared and (self._known.get(layer) != known or sinks is not None or params.cap):
            raise self.refusal(self._order[self._turn].at, _SHARED + ", and with a scale, a soft cap or sinks "
                               "of its own")
        if self._known.get(layer) != known:
            given = {"scale": params.scale, "soft_cap": params.cap or 0.0,
                     "sinks": None if sinks is None else sinks.detach().float().cpu().tolist()}
            self._cache.attention_params(layer, **given)
            self._known[layer], self._params[layer] = known, given

    def _append(self, i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                layer: int, params: _attention.AttentionParams) -> None:
        """The new tokens of a row, without padding."""
        row, of, result, valid = self._rows[i], None, out, self._pass.valid
        if valid is not None and not bool(valid[i].all()):
            of = valid[i].nonzero()[:, 0].to(q.device)
            if not len(of):
                return
            if not self._held[i]:
                attend_from_padding(q, k, v, valid[i].to(q.device), out, params)
            q, k, v = q[of], k[of], v[of]
            result = q.new_empty(q.shape[:2] + v.shape[2:])
        dense = q.shape[0] - self._steps(i, q.shape[0])
        if self._pruner is not None and not self._held[i] and dense > 1:
            self._prune_prompt(row, q, k, v, result, layer)
        elif dense:
            self._read_prompt(row, q[:dense], k[:dense], v[:dense], result[:dense], layer,
                              self._prompt_attention == LIBRARY and not self._held[i] and valid is None, params)
        most = self._cache.settings.tokens_per_step_max
        for at in range(dense, q.shape[0], most):
            end = min(at + most, q.shape[0])
            self._cache.decode(row, q[at:end], k[at:end], v[at:end], result[at:end], layer=layer,
                               tokens=[end - at])
        if of is not None:
            out[of] = result

    def _read_prompt(self, row: Sequence, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                     layer: int, by_torch: bool, params: _attention.AttentionParams) -> None:
        """Tokens that attend densely. Queries that are kept pass through kvferry's own attention in any case."""
        own = 0
        if by_torch and params.sinks is None and params.cap is None:
            own = max(len(q) - self._cache.settings.observe_window, 0)
        if own:
            attend_by_torch(q[:own], k[:own], v[:own], params.scale, out[:own])
            self._cache.prefill(row, None, k[:own], v[:own], layer=layer)
        if own < len(q):
            self._cache.prefill(row, q[own:], k[own:], v[own:], out[own:], layer=layer)

    def _ask(self, i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
             layer: int, params: _attention.AttentionParams) -> None:
        """Queries of a layer that has the keys of another one, which has appended the row's tokens."""
        row, valid, tokens = self._rows[i], self._pass.valid, k.shape[0]
        if q.shape[0] not in (tokens, self._candidates + 1):
            raise self.refusal(self._order[self._turn].at, "%d queries come to %d new keys, and the pass "
                               "wants logits of %d" % (q.shape[0], tokens, self._candidates + 1))
        valid = None if valid is None or bool(valid[i].all()) else valid[i].to(q.device)
        if not self._held[i]:
            return attend_to_prompt(q, k, v, valid, params.scale, out)
        of = slice(None) if valid is None else valid[-q.shape[0]:].nonzero()[:, 0]
        asked, most = q[of], self._cache.settings.prefill_chunk_max
        if asked.shape[0] > most:
            raise self.refusal(self._order[self._turn].at, "%s, which take %d queries at once after the first "
                               "pass, and %d came; make the Cache with prefill_chunk_max = %d, or hand over "
                               "fewer tokens at once" % (_SHARED, most, asked.shape[0], asked.shape[0]))
        if self._pass.held[i] == self._held[i] + 1: # its one token was a step
            out[of] = self._cache.decode(row, asked, None, None, layer=layer)
        else:
            out[of] = self._cache.prefill(row, asked, None, None, layer=layer)

    def _steps(self, i: int, tokens: int) -> int:
        """Newest tokens of a row's pass that are decode steps; what is left is read as a prompt."""
        if tokens == 1:
            return 1
        if self._shares: # queries alone are of the newest token, and all of a pass come together
            return 0
        if self._pruner is not None and not self._held[i] or self._cache.plan.static_tokens:
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
            raise no("this policy hands fewer tokens to deeper layers", "take one that keeps them")


def use(model: Any, budget: Optional[int] = None, **settings: Any) -> Any:
    """Give every `generate` of a model a Cache of its own where none is passed. Returns the model.

    For pipelines, evaluation harnesses and servers, which call `generate` themselves. Its memory is
    reserved by the call, for tokens_max tokens, and given back at its end, unless the call returns the
    cache. A call that names a cache_implementation has chosen its cache. settings: of `Cache`.
    `del model.generate` ends it.
    """
    if getattr(type(model), "generate", None) is None:
        raise no("%s has no generate" % type(model).__name__, "give use() the model itself, before torch.compile")
    must_fit(model)
    model.set_attn_implementation(NAME)
    Cache(model, budget, **settings) # says now what does not fit
    generate = type(model).generate

    @functools.wraps(generate)
    def generate_with_pages(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not None for name in (*NAMES, "cache_implementation")) or \
                kwargs.get("use_cache") is False or \
                getattr(kwargs.get("generation_config"), "cache_implementation", None) is not None:
            return generate(self, *args, **kwargs)
        if settings.get("prune") is not None:
            whole_prompts_only(kwargs.get("generation_config"))
            whole_prompts_only(types.SimpleNamespace(**kwargs))
        cache = Cache(self, budget, **settings)
        given = _caches.EncoderDecoderCache(cache, _caches.DynamicCache()) if \
            _has_cross_attention(self) else cache
        kwargs[name_of_the_cache(self)], told = given, None
        if getattr(getattr(self, "generation_config", None), "cache_implementation", None) is not None:
            kwargs["cache_implementation"] = None # the checkpoint's habit
        try:
            told = generate(self, *args, **kwargs)
        finally:
            if handed_back(told) is not given:
                cache.close()
        return told

    model.generate = types.MethodType(generate_with_pages, model) # a deep copy has its own
    return model
