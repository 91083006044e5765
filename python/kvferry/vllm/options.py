# SPDX-License-Identifier: Apache-2.0
"""Settings of the plug-in: `--additional-config '{"kvferry": {...}}'`, or KVFERRY_* variables.

Names are those of `kvferry.settings("cache")` and `("runtime")`, and the few of NAMES. Imports nothing
of vLLM. Invariant: a name or a value that means nothing is an error, never ignored.
"""
import difflib
import math
import os
import re
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Union

from .._errors import Invalid, OutOfMemory, Unsupported
from .._settings import OWN as BY_KVFERRY, ROWS, fill, prompt_attention, rows_of
from ..capi import CacheConfig
from .memory import said as in_words

# Names that are shorter here, as `kvferry run` and kvferry.hf say it.
NAMES = {"budget": "budget_tokens", "host_memory": "host_bytes", "device_memory": "device_bytes"}
OWN = ("log_interval", "verify_interval", "head_mask", "admit", "prompt_attention")
ALL, RESIDENT = "all", "resident" # values of admit
# Said by the model and the engine.
TAKEN = ("layers", "query_heads", "kv_heads", "head_dim", "dtype", "tensors", "softmax_scale", "sequences_max",
         "tokens_max", "host_tokens_max", "prefill_chunk_max", "tokens_per_step_max", "device",
         "device_ordinal", "host_bytes")
# Settings that have no home under blocks, and why; other such settings the library refuses by their values.
_ON_DISK = "a block may be any request's next, so it stays in host memory: give host_memory what there is"
HOMELESS = {"disk": _ON_DISK, "disk_path": _ON_DISK,
            "disk_bytes": _ON_DISK, "observe_window": "blocks cannot be pruned",
            "phase_times": "vLLM's own profiler times a pass"}
PREFIX = "KVFERRY_"
# Variables that are no settings: where the library is, where metrics.py writes, those of the plug-in for llama.cpp,
# and those that Kubernetes gives every pod for a Service named kvferry or kvferry-NAME.
NOT_OURS = re.compile("LIBRARY|METRICS|LLAMA(_.+)?|(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_.+)?)?)")


class Options(NamedTuple):
    """Settings that were given. None = the plug-in decides."""
    runtime: dict
    cache: dict # without memory
    host_memory: Optional[int] # bytes of pages of a rank
    log_interval: float # seconds between lines of statistics; 0 = none
    verify_interval: int # every N-th pass is also attended to densely; 0 = none
    head_mask: Optional[str] # file of the kinds of heads; see heads.py
    device_memory: Optional[int] # bytes of windows, tables and pages on the device of a rank
    admit: Union[str, int] = ALL # or RESIDENT, or how many requests at once that is; see admit.py
    prompt_attention: str = BY_KVFERRY # or "library": tokens without context are attended by FlashAttention or torch


def read(given: Any, environment: Mapping[str, str]) -> Options:
    """Options from the additional configuration, and from variables for what is not in it."""
    if not isinstance(given, dict):
        raise Invalid("additional_config: kvferry = %r must be an object of names and values" % (given,))
    said = {name[len(PREFIX):].lower(): value for name, value in environment.items()
            if name.startswith(PREFIX) and not NOT_OURS.fullmatch(name, len(PREFIX))}
    found = {**_full(said), **_full(given)}
    own = {name: found.pop(name) for name in OWN if name in found}
    runtime = {name: found.pop(name) for name in _rows("runtime") if name in found}
    host, device = found.pop("host_bytes", None), found.pop("device_bytes", "auto")
    return Options(runtime, found, None if host is None else bytes_of("host_bytes", host) or None,
                   _number("log_interval", own.get("log_interval", 60), "seconds", float),
                   _number("verify_interval", own.get("verify_interval", 0), "a number of passes", _whole),
                   own.get("head_mask"),
                   None if device == "auto" else bytes_of("device_bytes", device), _admit(own.get("admit", ALL)),
                   prompt_attention(own.get("prompt_attention", BY_KVFERRY)))


def bytes_of(name: str, value: Any) -> int:
    """A size as the library reads it, 64GiB, or in powers of ten, as memory is sold: 64GB, 1.5TB."""
    sold = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT])B", value) if isinstance(value, str) else None
    if sold is not None:
        return int(float(sold[1]) * 1000 ** ("KMGT".index(sold[2].upper()) + 1))
    sizes = CacheConfig()
    try:
        fill(sizes, "cache", {"host_bytes": value}, [])
    except Invalid as error:
        raise Invalid("%s = %s: must be a size, as 64GiB or 64GB" % (name, value)) from error
    return sizes.host_bytes


def _rows(of: str) -> List[str]:
    return [row.name.decode() for row in rows_of(ROWS[of])]


def _full(said: dict) -> dict:
    """Values by the names of the library, of one source."""
    settable = [n for n in _rows("runtime") + _rows("cache") if n not in TAKEN and n not in HOMELESS and n not in OWN] + [*NAMES, *OWN]
    found: dict = {}
    for name, value in said.items():
        if name in HOMELESS:
            raise Unsupported("kvferry in vLLM has no %s: %s; leave it out" % (name, HOMELESS[name]))
        if name not in settable:
            near = difflib.get_close_matches(name, settable, 1)
            raise Invalid("kvferry in vLLM has no setting %s%s" % (
                name, ": vLLM and the model decide it" if name in TAKEN
                else ": did you mean %s?" % near[0] if near else ""))
        full = NAMES.get(name, name)
        if full in found:
            raise Invalid("%s and %s are one setting: give one of them" % (
                name, next(other for other in said if NAMES.get(other, other) == full)))
        found[full] = value
    return found


def _admit(value: Any) -> Union[str, int]:
    """The value of admit."""
    if value in (ALL, RESIDENT):
        return value
    try:
        count = _whole(value)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if count < 1:
        raise Invalid("admit = %s: must be all, resident, or how many requests" % (value,))
    return count


def _whole(value: Any) -> int:
    if int(value) != float(value):
        raise ValueError("a part of one")
    return int(value)


def _number(name: str, value: Any, what: str, kind: Callable[[Any], Any]) -> Any:
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not 0 <= number < math.inf:
        raise Invalid("%s = %s: must be %s, 0 or more" % (name, value, what))
    return number


def default_memory(ranks: int, engine: int = 0, machine: Optional[Mapping[str, Any]] = None, has_card: bool = False) -> int:
    """Three quarters of the host memory that is free now, and of that where pages go, which may be one of several nodes;
    half where there is no card, because weights and activations are there, too. Shared by the ranks of the only engine.

    machine   memory, as Runtime.describe() tells it
    """
    if engine:
        raise Invalid("host_memory must be set with data parallelism: engines cannot divide memory among each other")
    with open("/proc/meminfo", encoding="ascii") as text:
        free = next(int(line.split()[1]) for line in text if line.startswith("MemAvailable")) * 1024
    told = machine or {}
    limit, near = (told.get(name) for name in ("cgroup_headroom_bytes", "available_bytes")) # None: none, or unknown
    most = min(free, free if limit is None else limit) * (3 if has_card else 2) // 4
    return (most if near is None else min(most, near * 3 // 4)) // ranks


def check_memory(size: Optional[int], machine: Mapping[str, Any]) -> None:
    """Refuse, before weights are loaded, more for a rank than its container may have. A virtual machine that shows less
    may get more, so the library tries that."""
    limit = machine.get("cgroup_headroom_bytes") # None: there is none, or it is not known
    if size is not None and limit is not None and size > limit:
        raise OutOfMemory("host_memory = %s: %s is the limit of this container (memory.max); give that or less" % (
            in_words(size), in_words(limit, up=False)))


def of_engine(engine: Any) -> Options:
    """Options of an upstream.Engine and this process."""
    return read(engine.settings.get("kvferry", {}) if isinstance(engine.settings, dict) else {}, os.environ)
