# SPDX-License-Identifier: Apache-2.0
"""kvferry: decode against a KV cache that does not fit on the device.

The whole cache is in host memory, in pages of a few tokens. A decode step scores two bits per channel
of every key, selects pages within a budget, brings the missing ones to the device, and attends.

    import kvferry, numpy as np

    runtime = kvferry.Runtime(device="host")
    cache = kvferry.Cache(runtime, layers=32, query_heads=32, kv_heads=8, head_dim=128,
                          tokens_max=131072, budget_tokens=1024, dtype="fp32")
    sequence = cache.sequence()
    out = cache.prefill(sequence, q, k, v, layer=0)   # [tokens, heads, head_dim], per layer
    out = cache.decode(sequence, q, k, v, layer=0)    # [1, heads, head_dim], per layer and token

Runtime   a device and its threads; Stream an order of work on it; Link measures its link,
          Disk a disk
Cache     prefill, decode, fork, page lists, statistics; Sequence, Recording, PageLists
Blocks    pages under block tables of the caller, for engines that number blocks themselves
Save      a sequence on its way to a file (`Sequence.save`, `Cache.restore`); `saved` tells of one
Pruner    what of a prompt is kept, by a policy of `prune_policies()` or a PrunePolicy of your own;
          Hidden keeps what `Sequence.complete_begin` goes on from
settings  names, ranges, defaults and meanings of all settings
Select, Dtype, Device, Transfer, ...  values of settings; their names as text do too
Error     every failure: `status` and `text`; Invalid is a ValueError, OutOfMemory a MemoryError

Arrays are NumPy arrays, torch tensors, Buffers, or anything with DLPack; none is copied. Everything
that is opened closes with `close()`, with `with`, with what it was opened from, or when collected. One
thread at a time is in a cache; while the library works, other threads of Python run.

The library is the wheel's own, or KVFERRY_LIBRARY, or the system's. `kvferry.capi` has the C ABI.
"""
import enum as _enum

from . import capi
from ._arrays import Buffer
from ._blocks import Blocks
from ._cache import Cache, PageLists, Recording, Sequence
from .capi import (Device, Digest, DiskEngine, DiskWhat, Dtype, Eviction, Fill, GroupReduce, HugePages, Isa, LinkPattern, LinkWhat,
                    Pages, Pivot, Pool, Preset, PruneNeeds, PruneReach, Refresh, Retention, Select, Status,
                    Tensors, Transfer, lib as _lib)
from ._errors import Error, Full, Invalid, OutOfMemory, Unsupported
from ._policies import PruneChoice, PrunePolicy, PruneView, SelectView, prune_policies
from ._prune import (Hidden, Pruner, PruneStep, policy_takes, structkv_measure, structkv_pivot,
                     structkv_transition)
from ._runtime import Disk, Link, Runtime, Stream
from ._save import Save, saved
from ._settings import Setting, settings

__version__ = _lib.kvf_version().decode()
# Errors and help say where people find a class. Enums are left out of help: they are their values.
for _name, _value in list(globals().items()):
    if isinstance(_value, type):
        _value.__module__ = __name__
__all__ = [name for name, value in globals().items() if not name.startswith("_")
           and not (isinstance(value, type) and issubclass(value, _enum.Enum))]
