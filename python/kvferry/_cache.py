# SPDX-License-Identifier: Apache-2.0
"""Cache, Sequence and Recording: prompts in, tokens out.

Knows no machine and no model. Invariants: one thread at a time is in a cache; a call either returns
with its work enqueued and its arrays kept, or raises and keeps nothing.
"""
import ctypes
import os
import sys
from ctypes import addressof, byref
from typing import Any, Callable, NamedTuple, Optional, Sequence as Many, Union

import numpy as np

from . import _policies
from ._arrays import FLOAT32, INT32, NAMES, Reader, positions_address
from .capi import (CacheConfig, CachePlan, DecodeArgs, Dtype, Footprint, AttentionParams,
                    PageLists as PageListsRow, PrefillArgs, Preset, RestoreArgs, SaveArgs, Select, Stats,
                    Tensors, lib, sized)
from ._errors import Invalid, checked, raise_last, without_nul
from ._handles import Handle, Node
from ._runtime import Runtime, Stream, _opened, behind_work
from ._save import Save
from ._settings import fill

_decode, _DECODE_BYTES = lib.kvf_decode_sized, ctypes.sizeof(DecodeArgs)
_NOTHING = (None, None)
_DTYPES = {"bf16": Dtype.BF16, "bfloat16": Dtype.BF16, "fp16": Dtype.FP16, "float16": Dtype.FP16,
           "fp32": Dtype.FP32, "float32": Dtype.FP32}


def dtype_of(value: Any) -> Dtype:
    """An element type from its name, a Dtype, or a type of NumPy or torch."""
    if isinstance(value, Dtype):
        return value
    name = getattr(value, "__name__", str(value)).rpartition(".")[2]
    if name not in _DTYPES:
        raise Invalid("dtype = %s: must be one of bf16, fp16, fp32" % (value,))
    return _DTYPES[name]


def make_config(settings: dict, keep: list, errors: list) -> CacheConfig:
    """A kvf_cache_config from keyword arguments."""
    settings = dict(settings)
    config = CacheConfig()
    lib.kvf_cache_config_init_sized(*sized(config))
    preset = settings.pop("preset", None)
    if preset is not None:
        names = {p.name.lower(): p for p in Preset}
        if str(preset) not in names and preset not in list(Preset):
            raise Invalid("preset = %s: must be one of %s" % (preset, ", ".join(names)))
        lib.kvf_cache_config_preset(byref(config), names.get(str(preset), preset))
    if "dtype" in settings:
        settings["dtype"] = dtype_of(settings["dtype"])
    mask, windows = settings.pop("head_mask", None), settings.pop("layer_windows", None)
    if callable(settings.get("select")):
        keep.append(_policies.select_function(settings.pop("select"), errors))
        config.select, config.select_fn = Select.CUSTOM, ctypes.cast(keep[-1], ctypes.c_void_p)
    fill(config, "cache", settings, keep)
    if mask is not None:
        mask = np.ascontiguousarray(mask, dtype=np.uint8)
        if mask.shape != (config.layers, config.kv_heads):
            raise Invalid("head_mask has shape %s: it must be [layers, kv_heads] = [%d, %d]" % (
                mask.shape, config.layers, config.kv_heads))
        keep.append(mask)
        config.head_mask = mask.ctypes.data
    if windows is not None:
        windows = np.ascontiguousarray(windows, dtype=np.uint32)
        if windows.shape != (config.layers,):
            raise Invalid("layer_windows has shape %s: it must have a number for each of %d layers" % (
                windows.shape, config.layers))
        keep.append(windows)
        config.layer_windows = windows.ctypes.data
    return config


def make_attention_params(settings: CacheConfig, scale: float, sinks: Any, soft_cap: float) -> tuple:
    """A kvf_attention_params, and the array that it names."""
    params, array = AttentionParams(), None
    lib.kvf_attention_params_init_sized(byref(params), ctypes.sizeof(params))
    params.scale, params.soft_cap = scale, soft_cap
    if sinks is not None:
        array = np.ascontiguousarray(sinks, dtype=np.float32)
        if array.shape != (settings.query_heads,):
            raise Invalid("sinks has shape %s: it must have a number for each of %d query heads" % (
                array.shape, settings.query_heads))
        params.sinks = array.ctypes.data
    return params, array


class PageLists:
    """Pages of `Cache.select_pages`: list i = batch row * kv_heads + KV head.

    indptr         int32[batch * kv_heads + 1]; pages of list i are indices[indptr[i]:indptr[i + 1]]
    indices        int32[capacity], ascending in a list: page index within (sequence, layer)
    last_page_len  int32[batch * kv_heads], tokens in the last page of each list
    """

    def __init__(self, indptr: Any, indices: Any, last_page_len: Any) -> None:
        self.indptr, self.indices, self.last_page_len = indptr, indices, last_page_len


class _Shapes(NamedTuple):
    q: tuple
    k: tuple
    v: tuple
    out: tuple


def _shapes(s: CacheConfig, rows: int) -> _Shapes:
    return _Shapes((rows, s.query_heads, s.head_dim), (rows, s.kv_heads, s.head_dim),
                   (rows, s.kv_heads, s.value_dim), (rows, s.query_heads, s.value_dim))


_GPU_VALUES = {192: 128} # of heads whose values are not as wide as keys on a GPU


def width_in_pages(head_dim: int, value_dim: int, device: str) -> int:
    """The elements of a value in pages on a type of device: those that it has, or more, which are zeros."""
    if device == "cpu":
        return value_dim if (head_dim - value_dim) % 32 == 0 else max(head_dim, value_dim)
    return max(_GPU_VALUES.get(head_dim, head_dim), value_dim)


class Cache(Handle):
    """A KV cache: pages in host memory, digests and pages used lately on the device.

    layers, query_heads, kv_heads, head_dim  the model's geometry
    tokens_max  tokens of the longest sequence; memory is reserved for them now
    dtype       of the cache, and of queries, keys, values and outputs: "bf16", "fp16", "fp32". NumPy has
                no bf16; uint16 arrays hold its bits. With tensors="fp32" those of calls are fp32,
                with "fp32-queries" queries and outputs
    select      a policy by name, or a function `select(view: SelectView)` that returns page ids
    preset      "prkv": the policy after that paper (docs/run.md says what differs)
    head_mask   [layers, kv_heads]: 1 = hot head, 2 = coarse head, 0 = streaming head
    layer_windows  [layers]: newest tokens that streaming heads of each layer see, 0 where none streams
    settings    see `kvferry.settings("cache")`: budget_tokens, page_size, value_dim, ...

    Calls take NumPy arrays, torch tensors, Buffers, or anything with DLPack, and copy none of them.
    They must be contiguous. With a stream a call returns at once and the arrays are kept alive until
    `stream.wait()`; do not write to them before. Without one, a call waits until its work is done; on
    CUDA tensors of torch it goes to torch's current stream instead and does not wait.
    """

    def __init__(self, runtime: Runtime, *, layers: int, query_heads: int, kv_heads: int,
                 head_dim: int, tokens_max: int, dtype: Any = "bf16", select: Any = None,
                 preset: Any = None, head_mask: Any = None, **settings: Any) -> None:
        keep: list = []
        config = make_config(dict(
            settings, layers=layers, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim,
            tokens_max=tokens_max, dtype=dtype, select=select, preset=preset, head_mask=head_mask),
            keep, runtime._errors)
        out, parent = ctypes.c_void_p(), runtime._node
        checked(lib.kvf_cache_open, parent.check(), byref(config), byref(out))
        super().__init__(Node("cache", out.value, behind_work(parent, lib.kvf_cache_close), parent))
        self._node.keep += keep
        self.runtime = runtime
        self.settings: CacheConfig = CacheConfig.from_buffer_copy(
            CacheConfig.from_address(lib.kvf_cache_settings(out)))
        dtype, tensors = Dtype(config.dtype), Tensors(self.settings.tensors)
        wide = [Dtype.FP32 if tensors in which else dtype
                for which in ((Tensors.FP32, Tensors.FP32_QUERIES), (Tensors.FP32,))]
        self._reader = Reader(wide[0], runtime.on_cuda, runtime._ordinal) # of queries and outputs
        self._key_reader = self._reader if wide[1] == wide[0] else Reader(
            wide[1], runtime.on_cuda, runtime._ordinal)
        self._page_types = NAMES[dtype]
        self._args = DecodeArgs() # filled anew by every call, under the lock
        self._args_address = addressof(self._args)
        self._shapes: dict = {}

    def attention_params(self, layer: int, *, scale: float = 0.0, sinks: Any = None, soft_cap: float = 0.0) -> None:
        """How a layer attends; call it before the layer's first token.

        scale     of scores; 0 = softmax_scale of the settings
        sinks     [query_heads] on the host: logits that join the denominators; -inf = none of a head
        soft_cap  a score s becomes soft_cap * tanh(s / soft_cap); 0 = none
        """
        made = make_attention_params(self.settings, scale, sinks, soft_cap)
        with self._node.lock:
            self._must(lib.kvf_cache_attention_params(self._node.check(), self._layer(layer), byref(made[0])))

    # -- sequences --

    def sequence(self) -> "Sequence":
        """A new, empty sequence. Raises Full when sequences_max are alive."""
        with self._node.lock:
            handle = self._node.check()
            return Sequence(self, _opened(self.runtime._node.handle, lib.kvf_sequence_create, handle))

    def restore(self, path: Union[str, os.PathLike], model: Optional[str] = None, *,
                exact: bool = True, stream: Optional[Stream] = None) -> "Sequence":
        """A sequence from a file of `Sequence.save`, which goes on bit for bit.

        model   must be what the file says; None = any
        exact   False takes the tokens of a file that was saved under other settings
        """
        row = RestoreArgs()
        lib.kvf_restore_args_init_sized(*sized(row))
        row.path, row.exact = without_nul("path", os.fsencode(path)), int(exact)
        row.model = None if model is None else without_nul("model", model.encode())
        stream, _ = self.runtime._stream_for(stream, None)
        with self._node.lock:
            return Sequence(self, _opened(self.runtime._node.handle, lib.kvf_sequence_restore,
                                          self._node.check(), byref(row), stream._node.check()))

    # -- prompts and tokens --

    def prefill(self, sequence: "Sequence", q: Any, k: Any, v: Any, out: Any = None, *, layer: int = 0,
                tokens: Optional[int] = None, positions: Any = None,
                stream: Optional[Stream] = None) -> Any:
        """Append tokens to one layer, and attend densely and causally over all of it so far.

        q          [tokens, query_heads, head_dim]; None = append only
        k, v       [tokens, kv_heads, head_dim], keys after RoPE; of v value_dim
        out        [tokens, query_heads, value_dim]; made if None
        positions  [tokens] integers, ascending; None = contiguous
        tokens     only where k has no shape (Buffer)

        k = v = None: queries alone, of the newest tokens, for a layer that attends to keys of this one.
        More than prefill_chunk_max tokens go in several calls of the library; if one of them fails, the
        tokens of those before stay. Returns out.
        """
        return self._prefill(sequence, q, k, v, out, layer, tokens, positions, stream, None)

    def _prefill(self, sequence: "Sequence", q: Any, k: Any, v: Any, out: Any, layer: int,
                 tokens: Optional[int], positions: Any, stream: Optional[Stream],
                 after: Optional[Callable[[int, int], int]]) -> Any:
        tokens = _count(q if k is None else k, tokens)
        for name, array in (("q", q), ("v", v), ("out", out)):
            if len(getattr(array, "shape", ())) == 3 and array.shape[0] != tokens:
                raise Invalid("%s has %d tokens: it must have as many as k, %d" % (
                    name, array.shape[0], tokens))
        stream, waits = self.runtime._stream_for(stream, q if k is None else k)
        if q is not None and out is None:
            out = _like(q, "q", self.settings.value_dim)
        _, owner = positions_address(positions, tokens)
        most = self.settings.prefill_chunk_max
        with self._node.lock:
            if k is None and tokens > most:
                raise Invalid("%d queries alone: a chunk has at most prefill_chunk_max = %d" % (tokens, most))
            for first in range(0, tokens, most):
                many = min(most, tokens - first)
                part = [_slice(a, first, many, tokens) for a in (q, k, v, out, owner)]
                self._prefill_chunk(sequence, layer, many, part, stream, after)
        return self._done(stream, waits, out)

    def _prefill_chunk(self, sequence: "Sequence", layer: int, tokens: int, part: list,
                       stream: Stream, after: Optional[Callable[[int, int], int]]) -> None:
        q, k, v, out, positions = part
        s, kept, handle = self.settings, list(part), stream._node.check()
        args = PrefillArgs(sequence=sequence._of(self), layer=self._layer(layer), tokens=tokens)
        shapes = _shapes(s, tokens)
        args.k, args.v = (a if a is None else self._read(a, n, shape, kept)
                          for a, n, shape in ((k, "k", shapes.k), (v, "v", shapes.v)))
        if q is not None:
            args.q = self._read(q, "q", shapes.q, kept)
            args.out = self._read(out, "out", shapes.out, kept, True)
        args.positions = positions.ctypes.data if positions is not None else None
        status = lib.kvf_prefill_sized(self._node.check(), *sized(args), handle)
        if not status:
            stream._keep(*kept)
            status = after(addressof(args), handle) if after else 0
        self._must(status)

    def decode(self, sequences: Union["Sequence", Many["Sequence"]], q: Any, k: Any, v: Any,
               out: Any = None, *, layer: int = 0, positions: Any = None, lse: Any = None,
               tokens: Optional[Many[int]] = None, page_scores: Any = None, page_ids: Any = None,
               stream: Optional[Stream] = None) -> Any:
        """One decode step of one layer: append a token to each sequence, select, fetch, attend.

        sequences  one, or a list of distinct ones: the batch
        q          [rows, query_heads, head_dim]; rows = batch
        k, v       [rows, kv_heads, head_dim], keys after RoPE; of v value_dim
        out        [rows, query_heads, value_dim]; made if None
        positions  [rows] integers; None = the last + 1
        lse        float32[rows, query_heads], receives the natural log of the sum; may be None
        tokens     new tokens of each sequence, 1 to tokens_per_step_max; rows = their sum, one
                   sequence after the other. The same bits as one call per token
        page_scores  float32[rows, kv_heads, any], the caller's own selection: a score of each page,
                   tokens p * page_size and on of the sequence; NaN and -inf = not this one
        page_ids   int32 of the same shape, instead: pages, the most wanted first, and -1 for none

        Pages of the caller take the place of those by digest; as many are attended to as the budget has
        room for, beside window, sink and static set. They need select="dynamic" or "hybrid".
        k = v = None: queries alone, for a layer that attends to keys of this one.
        One sequence may leave the batch dimension out. Returns out.
        """
        runtime = self.runtime
        waits = False
        if stream is None or stream.runtime is not runtime:
            stream, waits = runtime._stream_for(stream, q)
        if out is None:
            out = _like(q, "q", self.settings.value_dim)
        with self._node.lock:
            args, reader, keys = self._args, self._reader, self._key_reader
            kept = [q, k, v, out]
            shapes = self._rows(sequences, kept)
            args.tokens = None
            if tokens is not None:
                shapes = self._several(tokens, shapes.q[0], kept)
            rows = shapes.q[0]
            args.layer = self._layer(layer)
            address = reader.address
            args.q = address(q, "q", shapes.q)
            args.k = None if k is None else keys.address(k, "k", shapes.k)
            args.v = None if v is None else keys.address(v, "v", shapes.v)
            args.out = address(out, "out", shapes.out, True)
            args.positions, owner = positions_address(positions, rows) if positions is not None \
                else _NOTHING
            args.lse = None if lse is None else reader.any_address(lse, "lse", shapes.q[:2], FLOAT32, True)
            self._give(rows, page_scores, page_ids, kept)
            handle = self._node.handle or self._node.check()
            status = _decode(handle, self._args_address, _DECODE_BYTES, stream._node.check())
            if status:
                self._raise(status)
            if stream.keep is not None:
                stream.keep += kept, owner, lse
            if reader.kept or keys.kept:
                stream._keep(*reader.kept, *keys.kept)
                reader.kept.clear()
                keys.kept.clear()
        return self._done(stream, waits, out) if waits or runtime._errors else out

    def _rows(self, sequences: Any, kept: list) -> _Shapes:
        """Fill in the batch."""
        args = self._args
        if type(sequences) is Sequence:
            sequences._of(self)
            batch, args.sequences = 1, sequences._pointer
        else:
            handles = [s._of(self) for s in sequences]
            batch, array = len(handles), (ctypes.c_void_p * len(handles))(*handles)
            args.sequences = addressof(array)
            kept.append(array)
        args.batch = batch
        shapes = self._shapes.get(batch)
        if shapes is None:
            shapes = self._shapes[batch] = _shapes(self.settings, batch)
        return shapes

    def _several(self, tokens: Many[int], batch: int, kept: list) -> _Shapes:
        """Fill in the tokens of each sequence."""
        array = np.array(tokens, dtype=np.uint32)
        if array.shape != (batch,):
            raise Invalid("tokens has shape %s: it must have a number for each of %d sequences" % (
                array.shape, batch))
        self._args.tokens = array.ctypes.data
        kept.append(array)
        return _shapes(self.settings, int(array.sum(dtype=np.int64)))

    def _give(self, rows: int, page_scores: Any, page_ids: Any, kept: list) -> None:
        """Fill in the caller's own selection."""
        args = self._args
        args.page_scores = args.page_ids = None
        if page_scores is None and page_ids is None:
            return
        for array, name, types in ((page_scores, "page_scores", FLOAT32), (page_ids, "page_ids", INT32)):
            if array is not None:
                args.page_stride = (getattr(array, "shape", None) or (0,))[-1]
                shape = (rows, self.settings.kv_heads, args.page_stride)
                setattr(args, name, self._reader.any_address(array, name, shape, types))
                kept.append(array)

    # -- recorded steps --

    def record_begin(self, sequences: Many["Sequence"], stream: Stream) -> None:
        """Record a decode step: calls on `stream` up to `record_end` are not executed. CUDA only."""
        with self._node.lock:
            self._node.check()
            self._rows(list(sequences), kept := [])
            self._must(lib.kvf_record_begin(self._node.handle, kept[0], self._args.batch,
                                            stream._node.check()))

    def record_end(self) -> "Recording":
        """End recording. If it fails nothing is recorded and the cache is usable."""
        with self._node.lock:
            handle = self._node.check()
            return Recording(self, _opened(self.runtime._node.handle, lib.kvf_record_end, handle))

    # -- selection and attention on their own --

    @property
    def select_pages_max(self) -> int:
        """The most pages that one list can have."""
        return lib.kvf_select_pages_max(self._node.check())

    def page_lists(self, batch: int = 1) -> PageLists:
        """Page lists with room for a batch, as NumPy arrays; on CUDA make them with torch."""
        lists = batch * self.settings.kv_heads
        return PageLists(np.zeros(lists + 1, np.int32),
                         np.zeros(lists * self.select_pages_max, np.int32), np.zeros(lists, np.int32))

    def select_pages(self, sequences: Union["Sequence", Many["Sequence"]], q: Any, k: Any, v: Any,
                     lists: PageLists, *, layer: int = 0, positions: Any = None,
                     page_scores: Any = None, page_ids: Any = None,
                     stream: Optional[Stream] = None) -> PageLists:
        """Append the token and select pages only; the caller attends. Shapes as in `decode`."""
        self._on_lists(lib.kvf_select_pages_sized, sequences, q, k, v, None, lists, layer, positions, stream,
                       page_scores, page_ids)
        return lists

    def attend_pages(self, sequences: Union["Sequence", Many["Sequence"]], q: Any, lists: PageLists,
                     out: Any = None, *, layer: int = 0, stream: Optional[Stream] = None) -> Any:
        """Attend over given page lists: the other half of `select_pages`. Returns out."""
        out = _like(q, "q", self.settings.value_dim) if out is None else out
        self._on_lists(lib.kvf_attend_pages_sized, sequences, q, None, None, out, lists, layer, None, stream)
        return out

    def read_pages(self, sequences: Union["Sequence", Many["Sequence"]], lists: PageLists, out: Any, *,
                   layer: int = 0, stream: Optional[Stream] = None) -> Any:
        """Copy listed pages, whatever form they have in the cache: page indices[i] to out[i].

        out  [capacity, page_size, head_dim + value_dim]: key and value of each token side by side; or
             [capacity, page_size, 2, head_dim] where they are as wide
        """
        self._on_lists(lib.kvf_read_pages_sized, sequences, None, None, None, out, lists, layer, None, stream)
        return out

    def _on_lists(self, call: Callable, sequences: Any, q: Any, k: Any, v: Any, out: Any,
                  lists: PageLists, layer: int, positions: Any, stream: Optional[Stream],
                  page_scores: Any = None, page_ids: Any = None) -> None:
        stream, waits = self.runtime._stream_for(stream, out if q is None else q)
        with self._node.lock:
            args, kept = self._args, [q, k, v, out, lists, lists.indptr, lists.indices,
                                      lists.last_page_len]
            shapes = self._rows(sequences, kept)
            rows = shapes.q[0] * self.settings.kv_heads
            args.layer, args.lse, args.tokens = self._layer(layer), None, None
            row = PageListsRow(capacity=_count(lists.indices, None))
            s = self.settings
            pages = (row.capacity, s.page_size, s.head_dim + s.value_dim)
            if s.value_dim == s.head_dim and len(getattr(out, "shape", ())) == 4: # keys and values apart
                pages = (row.capacity, s.page_size, 2, s.head_dim)
            for array, name, shape in ((q, "q", shapes.q), (k, "k", shapes.k), (v, "v", shapes.v),
                                       (None if q is None else out, "out", shapes.out)):
                setattr(args, name, None if array is None else self._read(array, name, shape, kept,
                                                                          name == "out"))
            if q is None:
                args.out = self._reader.any_address(out, "out", pages, self._page_types, True)
            args.positions, owner = positions_address(positions, shapes.q[0])
            self._give(shapes.q[0], page_scores, page_ids, kept)
            for name, count in (("indptr", rows + 1), ("indices", row.capacity),
                                ("last_page_len", rows)):
                setattr(row, name, self._reader.any_address(getattr(lists, name), name, (count,),
                                                            INT32, True))
            kept += self._reader.kept
            self._reader.kept.clear()
            self._must(call(self._node.check(), self._args_address, _DECODE_BYTES, *sized(row),
                            stream._node.check()))
            stream._keep(*kept, owner)
        self._done(stream, waits, None)

    # -- what it holds and did --

    @property
    def plan(self) -> CachePlan:
        """The memory that is reserved, in bytes."""
        return CachePlan.from_buffer_copy(
            CachePlan.from_address(lib.kvf_cache_memory(self._node.check())))

    @staticmethod
    def plan_for(runtime: Runtime, **settings: Any) -> CachePlan:
        """The memory that `Cache(runtime, **settings)` would reserve; nothing is reserved."""
        keep, plan = [], CachePlan()
        config = make_config(settings, keep, [])
        checked(lib.kvf_cache_plan_make_sized, runtime._node.check(), byref(config), *sized(plan))
        return plan

    def stats(self, layer: Optional[int] = None) -> Stats:
        """Totals since open or `stats_reset`, of all layers or one. Read them after `stream.wait()`."""
        stats = Stats()
        with self._node.lock:
            if layer is None:
                lib.kvf_cache_stats_sized(self._node.check(), *sized(stats))
            else:
                lib.kvf_cache_layer_stats_sized(self._node.check(), self._layer(layer), *sized(stats))
        return stats

    def stats_reset(self) -> None:
        """Set statistics and footprint to zero."""
        with self._node.lock:
            lib.kvf_cache_stats_reset(self._node.check())

    def footprint(self) -> Footprint:
        """How much KV was held and for how long, relative to full causal attention."""
        footprint = Footprint()
        with self._node.lock:
            lib.kvf_cache_footprint_sized(self._node.check(), *sized(footprint))
        return footprint

    # -- inside --

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self.settings.layers:
            raise Invalid("layer = %d: must be 0 to %d" % (layer, self.settings.layers - 1))
        return layer

    def _read(self, array: Any, name: str, shape: tuple, kept: list, out: bool = False) -> int:
        reader = self._key_reader if name in "kv" else self._reader
        address = reader.address(array, name, shape, out)
        kept += reader.kept
        reader.kept.clear()
        return address

    def _raise(self, status: int) -> None:
        _policies.raise_first(self.runtime._errors)
        raise_last(self.runtime._node.handle, status)

    def _must(self, status: int) -> None:
        if status:
            self._raise(status)

    def _done(self, stream: Stream, waits: bool, out: Any) -> Any:
        if waits:
            stream.wait()
        else:
            _policies.raise_first(self.runtime._errors)
        return out


def _count(array: Any, tokens: Optional[int]) -> int:
    shape = getattr(array, "shape", None)
    if tokens is None and shape is None:
        raise Invalid("tokens must be given where k has no shape")
    tokens = tokens if tokens is not None else shape[0] if shape else 0
    if tokens < 1:
        raise Invalid("tokens = %d: must be at least 1" % tokens)
    return tokens


def _slice(array: Any, first: int, many: int, of: int) -> Any:
    return array if array is None or many == of else array[first:first + many]


def _like(array: Any, name: str, width: int) -> Any:
    """Room for an output of the same kind and type, whose rows have `width` elements."""
    if isinstance(array, np.ndarray):
        return np.empty(array.shape[:-1] + (width,), array.dtype)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.new_empty(array.shape[:-1] + (width,))
    raise Invalid("out must be given where %s is neither a NumPy array nor a torch tensor" % name)


class Sequence(Handle):
    """The tokens of one conversation in a cache. `Cache.sequence` makes it, `fork` copies it."""

    def __init__(self, cache: Cache, handle: int) -> None:
        super().__init__(Node("sequence", handle, lib.kvf_sequence_destroy, cache._node,
                              cache._node.lock))
        self.cache = cache
        self._one = (ctypes.c_void_p * 1)(handle)
        self._pointer = addressof(self._one)

    def _of(self, cache: Cache) -> int:
        if self.cache is not cache:
            raise Invalid("a sequence is of another cache")
        handle = self._node.handle
        return handle if handle is not None else self._node.check()

    def fork(self, stream: Optional[Stream] = None) -> "Sequence":
        """A second sequence that goes on from the same tokens. Sealed pages are shared."""
        cache = self.cache
        stream, waits = cache.runtime._stream_for(stream, None)
        with cache._node.lock:
            handle = _opened(cache.runtime._node.handle, lib.kvf_sequence_fork, cache._node.check(),
                             self._of(cache), stream._node.check())
        return cache._done(stream, waits, Sequence(cache, handle))

    def save(self, path: Union[str, os.PathLike], model: str = "", note: bytes = b"",
             stream: Optional[Stream] = None) -> Save:
        """Write it to a file, as it is now, while decoding goes on. `Save.wait` ends it.

        model   what the keys and values are of; `Cache.restore` compares
        note    bytes of your own, such as token ids; `saved` gives them back
        """
        cache, row = self.cache, SaveArgs()
        lib.kvf_save_args_init_sized(*sized(row))
        row.path = without_nul("path", os.fsencode(path))
        row.model = without_nul("model", model.encode())
        row.note, row.note_bytes = ctypes.cast(note, ctypes.c_void_p), len(note)
        stream, _ = cache.runtime._stream_for(stream, None)
        with cache._node.lock:
            row.sequence = self._of(cache)
            return Save(cache._node, _opened(cache.runtime._node.handle, lib.kvf_sequence_save,
                                             cache._node.check(), byref(row), stream._node.check()))

    def truncate(self, tokens: int, stream: Optional[Stream] = None) -> None:
        """Cut the newest tokens off: those at positions below `tokens` stay, in every layer.

        Later tokens are as if the others had never been there. Forks are not affected.
        """
        cache = self.cache
        if not 0 <= tokens < 2**32:
            raise Invalid("tokens = %d: must be from 0 to %d" % (tokens, 2**32 - 1))
        stream, waits = cache.runtime._stream_for(stream, None)
        with cache._node.lock:
            cache._must(lib.kvf_sequence_truncate(cache._node.check(), self._of(cache), tokens,
                                                  stream._node.check()))
        cache._done(stream, waits, None)

    def complete_begin(self, first_layer: int, tokens: int,
                       stream: Optional[Stream] = None) -> "Sequence":
        """The completed sequence of a pruned one: its first `tokens` in layers below `first_layer`, and
        nothing after. Prefill its other layers, then what the sequence got since; see kvf_complete_begin.
        """
        cache = self.cache
        stream, waits = cache.runtime._stream_for(stream, None)
        with cache._node.lock:
            handle = _opened(cache.runtime._node.handle, lib.kvf_complete_begin, cache._node.check(),
                             self._of(cache), first_layer, tokens, stream._node.check())
        return cache._done(stream, waits, Sequence(cache, handle))

    def complete_end(self, whole: "Sequence", stream: Optional[Stream] = None) -> None:
        """Go on as the completed sequence, which is closed."""
        cache = self.cache
        stream, _ = cache.runtime._stream_for(stream, None)
        with cache._node.lock:
            cache._must(lib.kvf_complete_end(cache._node.check(), self._of(cache), whole._of(cache),
                                             stream._node.check()))
            whole._node.taken()

    def length(self, layer: int = 0) -> int:
        """Tokens that a layer holds."""
        with self.cache._node.lock:
            return lib.kvf_sequence_length(self._of(self.cache), self.cache._layer(layer))

    def __len__(self) -> int:
        return self.length()

    def position(self, index: int, layer: int = 0) -> int:
        """True position of token `index` of a layer."""
        with self.cache._node.lock:
            if not 0 <= index < self.length(layer):
                raise Invalid("index = %d: layer %d holds %d tokens" % (index, layer,
                                                                        self.length(layer)))
            return lib.kvf_sequence_position(self._of(self.cache), layer, index)

    def page_address(self, page: int, layer: int = 0, kv_head: int = 0) -> int:
        """Address of a page for the device: [page_size, head_dim + value_dim], key and value of each token.

        0 if it has none: it is quantized, or on disk.
        Valid until the sequence appends; call it after `stream.wait()`.
        """
        s = self.cache.settings
        pages = -(-self.length(layer) // s.page_size)
        for name, value, end in (("kv_head", kv_head, s.kv_heads), ("page", page, pages)):
            if not 0 <= value < end:
                raise Invalid("%s = %d: must be 0 to %d" % (name, value, end - 1))
        with self.cache._node.lock:
            return lib.kvf_page_address(self._of(self.cache), layer, kv_head, page) or 0


class Recording(Handle):
    """A decode step that was recorded: `replay` runs it again with the same arrays."""

    def __init__(self, cache: Cache, handle: int) -> None:
        super().__init__(Node("recording", handle,
                              behind_work(cache.runtime._node, lib.kvf_recording_destroy),
                              cache._node, cache._node.lock))
        self.cache = cache

    @property
    def is_possible(self) -> bool:
        """False if the next step refreshes, verifies, or has no room: enqueue it as usual."""
        return bool(lib.kvf_replay_is_possible(self._node.check()))

    @property
    def nodes(self) -> int:
        """Kernels, copies and fills of the step, the caller's included."""
        return int(lib.kvf_recording_nodes(self._node.check()))

    def replay(self, stream: Stream) -> None:
        """Run the step for the next token of every sequence. The recorded arrays must be alive."""
        with self._node.lock:
            self.cache._must(lib.kvf_replay(self._node.check(), stream._node.check()))
