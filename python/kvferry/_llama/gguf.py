# SPDX-License-Identifier: Apache-2.0
"""Metadata of a GGUF file, and the layers of its model that have keys.

Reads the head of a file and no tensor. Invariant: what the metadata do not tell is refused, not guessed.
"""
import glob
import os
import re
import struct
from typing import Any, BinaryIO, Dict, List, NamedTuple

from . import Refused

# Types of values: GGUF's number -> struct's letter.
_PLAIN = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
_TEXT, _ARRAY = 8, 9
# The period of windows where the file has none, as llama.cpp's loaders have it; every n-th layer sees all.
PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4}
WINDOWLESS = ("phi3", "llama") # what their files say of windows is not used
INTERVALS = ("qwen3next", "qwen35", "qwen35moe") # every n-th layer has keys


class Layer(NamedTuple):
    """A layer with keys; `window` is 0 where it sees all tokens."""
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int


def _read(file: BinaryIO, letter: str) -> Any:
    data = file.read(struct.calcsize("<" + letter))
    return struct.unpack("<" + letter, data)[0]


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return file.read(_read(file, "Q")).decode("utf-8", "replace")
    if kind == _ARRAY:
        inner, count = _read(file, "I"), _read(file, "Q")
        if inner in _PLAIN:
            return list(struct.unpack("<%d%s" % (count, _PLAIN[inner]),
                                      file.read(count * struct.calcsize("<" + _PLAIN[inner]))))
        return [_value(file, inner) for _ in range(count)]
    return _read(file, _PLAIN[kind])


def metadata(path: str) -> Dict[str, Any]:
    """All keys of a file and their values."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF" or _read(file, "I") < 2:
                raise Refused("%s is no GGUF file of version 2 or 3" % path)
            _, count = _read(file, "Q"), _read(file, "Q")
            found = {}
            for _ in range(count):
                name = _value(file, _TEXT)
                found[name] = _value(file, _read(file, "I"))
            return found
    except (OSError, struct.error, KeyError, MemoryError) as error:
        raise Refused("%s cannot be read: %s" % (path, error)) from error


def weight_bytes(path: str) -> int:
    """Bytes of a model's file, or of all its parts."""
    parts = re.sub(r"-\d{5}-of-", "-?????-of-", path)
    return sum(map(os.path.getsize, glob.glob(glob.escape(path) if parts == path else parts)))


def _windows(arch: str, own: Dict[str, Any], count: int) -> List[int]:
    """The window of each layer."""
    window = own.get("attention.sliding_window", 0)
    pattern = own.get("attention.sliding_window_pattern", PERIODS.get(arch, 0))
    if not window or arch in WINDOWLESS:
        return [0] * count
    if isinstance(pattern, list):
        return [window if each else 0 for each in pattern]
    if not pattern:
        raise Refused("the file has windows of %d tokens, and does not name the layers that have them" % window)
    return [window if layer % pattern < pattern - 1 else 0 for layer in range(count)]


def layers(found: Dict[str, Any]) -> List[Layer]:
    """Layers with keys of their own, in their order."""
    arch = found.get("general.architecture", "")
    own = {name[len(arch) + 1:]: value for name, value in found.items() if name.startswith(arch + ".")}
    if "attention.kv_lora_rank" in own:
        raise Refused("%s uses latent keys, which are left to llama.cpp" % arch)
    try:
        count = own["block_count"] - own.get("nextn_predict_layers", 0)
        width, heads = own["embedding_length"], own["attention.head_count"]
    except KeyError as error:
        raise Refused("the file lacks %s.%s" % (arch, error.args[0])) from error

    def each(value: Any) -> List[int]:
        return value if isinstance(value, list) else [value] * own["block_count"]
    heads, windows = each(heads), _windows(arch, own, own["block_count"])
    kv_heads = each(own.get("attention.head_count_kv", heads))
    interval = own.get("full_attention_interval", 4) if arch in INTERVALS else 0
    recurrent = own.get("attention.recurrent_layers") or [
        bool(interval) and (layer + 1) % interval != 0 for layer in range(count)]
    shared = own.get("attention.shared_kv_layers", 0)
    made = []
    for layer in range(count - shared):
        if kv_heads[layer] and not recurrent[layer]:
            after = "_swa" if windows[layer] and "attention.key_length_swa" in own else ""
            made.append(Layer(heads[layer], kv_heads[layer],
                              own.get("attention.key_length" + after, width // max(heads[layer], 1)),
                              own.get("attention.value_length" + after, width // max(heads[layer], 1)), windows[layer]))
    if not made:
        raise Refused("%s has no layer with keys" % arch)
    return made
