# SPDX-License-Identifier: Apache-2.0
"""Settings by name: the library's own rows of names, ranges and meanings read and fill a config.

Knows no field by name. Invariant: a value outside its range never gets into a config; the error names
field, value and range.
"""
import ctypes
import difflib
import os
from typing import Any, Callable, Iterator, List, NamedTuple, Type

from .capi import (CacheConfig, DiskCase, LinkCase, PruneConfig, RuntimeConfig, SettingKind, SettingRow,
                    Struct, lib)
from ._errors import Invalid, without_nul

ROWS = {"runtime": lib.kvf_runtime_setting, "cache": lib.kvf_cache_setting,
        "prune": lib.kvf_prune_setting, "link": lib.kvf_link_setting,
        "disk": lib.kvf_disk_setting}
OWN, LIBRARY = "own", "library" # values of prompt_attention


class Setting(NamedTuple):
    """The values that a setting may have (`range`, in words), its default, and what it is for."""
    name: str
    range: str
    default: str
    meaning: str


def prompt_attention(value: Any) -> str:
    """Whose kernels attend tokens of a prompt that have no context; see _prompt_attention.py."""
    if value not in (OWN, LIBRARY):
        raise Invalid("prompt_attention = %s: must be own or library" % (value,))
    return value


def rows_of(at: Callable[[int], int], row: Type[Struct] = SettingRow) -> Iterator[Any]:
    """The rows of a table of the library, which ends with NULL."""
    index = 0
    while at(index):
        yield row.from_address(at(index))
        index += 1


def _text(function: Callable, *arguments: Any) -> str:
    text = ctypes.create_string_buffer(512)
    return function(*arguments, text, len(text)).decode()


def settings(of: str = "cache") -> List[Setting]:
    """All settings of "runtime", "cache", "prune", "link" or "disk", as keyword arguments take them."""
    configs = {"runtime": RuntimeConfig, "cache": CacheConfig, "prune": PruneConfig, "link": LinkCase,
               "disk": DiskCase}
    config = configs[of]()
    if of == "prune":
        lib.kvf_prune_config_init_sized(ctypes.byref(config), None, ctypes.sizeof(config))
    else:
        init = {"runtime": lib.kvf_runtime_config_init_sized, "cache": lib.kvf_cache_config_init_sized,
                "link": lib.kvf_link_case_init_sized, "disk": lib.kvf_disk_case_init_sized}[of]
        init(ctypes.byref(config), ctypes.sizeof(config))
    return [Setting(row.name.decode(), _text(lib.kvf_setting_range, ctypes.byref(row)),
                    _text(lib.kvf_setting_show, ctypes.byref(row), ctypes.byref(config)),
                    row.meaning.decode()) for row in rows_of(ROWS[of])]


def _as_text(row: SettingRow, value: Any) -> str:
    """A value of Python as the library reads it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if row.special and value == row.special_value:
        return row.special.decode()
    if row.kind == SettingKind.NAME:
        names = ctypes.cast(row.names, ctypes.POINTER(ctypes.c_char_p))
        return names[value].decode() if 0 <= int(value) <= row.high else str(value)
    if row.kind in (SettingKind.REAL, SettingKind.SHARE):
        return repr(float(value))
    return str(int(value)) if int(value) == value else str(value)


def fill(config: Struct, of: str, given: dict, keep: list) -> None:
    """Set fields of `config` by name; what it then points to goes to `keep`. None is the default."""
    rows = {row.name.decode(): row for row in rows_of(ROWS[of])}
    for name, value in given.items():
        if value is None:
            continue
        if name not in rows:
            near = difflib.get_close_matches(name, rows, 1)
            raise Invalid("there is no setting %s%s" % (
                name, ": did you mean %s?" % near[0] if near
                else "; kvferry.settings(%r) lists them" % of))
        row = rows[name]
        is_path = row.kind == SettingKind.TEXT
        text = without_nul(name, os.fsencode(value) if is_path else _as_text(row, value).encode())
        keep.append(text)
        if not lib.kvf_setting_parse(ctypes.byref(row), text, ctypes.byref(config)):
            raise Invalid("%s = %s: must be %s" % (name, value,
                                                   _text(lib.kvf_setting_range, ctypes.byref(row))))
