# SPDX-License-Identifier: Apache-2.0
"""Settings of the plug-in: `--additional-config '{"kvferry": {...}}'`, or KVFERRY_* variables.

Names are those of `kvferry.settings("cache")` and `("runtime")`, and the few of NAMES. Imports nothing
of vLLM. Invariant: a name or a value that means nothing is an error, never ignored.
"""
import difflib
import os
from typing import Any, List, Mapping, NamedTuple, Optional

from .._errors import Invalid
from .._settings import ROWS, fill, rows_of
from ..capi import CacheConfig

# What is shorter here, as `kvferry run` and kvferry.hf say it.
NAMES = {"budget": "budget_tokens", "host_memory": "host_bytes", "disk": "disk_path"}
OWN = ("head_mask", "log_interval")
# Said by the model and the engine.
TAKEN = ("layers", "query_heads", "kv_heads", "head_dim", "dtype", "softmax_scale", "sequences_max",
         "tokens_max", "host_tokens_max", "observe_window", "device", "device_ordinal", "host_bytes")
PREFIX = "KVFERRY_"
NOT_OURS = ("library", "metrics") # where the library is, and where metrics.py writes


class Options(NamedTuple):
    """What was set. None = the plug-in decides."""
    runtime: dict
    cache: dict # without memory
    host_memory: Optional[int] # bytes of pages of a rank
    disk_bytes: Optional[int] # of pages of a rank, with a disk
    head_mask: Optional[str] # a file
    log_interval: float # seconds between lines of statistics; 0 = none


def read(given: Any, environment: Mapping[str, str]) -> Options:
    """Options from the additional configuration, and from variables for what is not in it."""
    if not isinstance(given, dict):
        raise Invalid("additional_config: kvferry = %r must be an object of names and values" % (given,))
    said = {name[len(PREFIX):].lower(): value for name, value in environment.items()
            if name.startswith(PREFIX) and name[len(PREFIX):].lower() not in NOT_OURS}
    found = {**_full(said), **_full(given)}
    own = {name: found.pop(name) for name in OWN if name in found}
    runtime = {name: found.pop(name) for name in _rows("runtime") if name in found}
    sizes = CacheConfig()
    fill(sizes, "cache", {name: found.pop(name, None) for name in ("host_bytes", "disk_bytes")}, [])
    if "disk_path" in found and not sizes.disk_bytes:
        raise Invalid("disk = %s: disk_bytes must say how many bytes of pages a rank may put there"
                      % found["disk_path"])
    return Options(runtime, found, sizes.host_bytes or None, sizes.disk_bytes or None,
                   own.get("head_mask"), _seconds(own.get("log_interval", 60)))


def _rows(of: str) -> List[str]:
    return [row.name.decode() for row in rows_of(ROWS[of])]


def _full(said: dict) -> dict:
    """Values by the names of the library, of one source."""
    settable = [n for n in _rows("runtime") + _rows("cache") if n not in TAKEN] + [*NAMES, *OWN]
    found: dict = {}
    for name, value in said.items():
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


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if seconds < 0:
        raise Invalid("log_interval = %s: must be seconds, 0 or more" % (value,))
    return seconds


def read_mask(path: str, layers: int, kv_heads: int) -> list:
    """A head mask as `kvferry run --head-mask` reads it: 1 = retrieval head, 0 = streaming head."""
    with open(path, encoding="utf-8") as text:
        rows = [line.split("\t") for line in text.read().splitlines() if line.strip()]
    if len(rows) != layers or any(len(row) != kv_heads for row in rows):
        raise Invalid("%s: a head mask of this model has %d lines of %d values" % (
            path, layers, kv_heads))
    if any(text.strip() not in ("0", "1") for row in rows for text in row):
        raise Invalid("%s: a value is neither 0 nor 1" % path)
    return [[int(text) for text in row] for row in rows]


def default_memory(ranks: int, engine: int = 0) -> int:
    """Half of the host memory that is free now, shared by the ranks of the only engine."""
    if engine:
        raise Invalid("host_memory must be said with data parallelism: engines know nothing of each other")
    with open("/proc/meminfo", encoding="ascii") as text:
        free = next(int(line.split()[1]) for line in text if line.startswith("MemAvailable"))
    return free * 1024 // 2 // ranks


def of_config(config: Any) -> Options:
    """Options of a VllmConfig and this process."""
    additional = config.additional_config
    return read(additional.get("kvferry", {}) if isinstance(additional, dict) else {}, os.environ)
