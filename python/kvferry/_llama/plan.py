# SPDX-License-Identifier: Apache-2.0
"""The memory of a model in a llama.cpp with kvferry, from its file's metadata, before anything is loaded.

    kvferry-llama --plan MODEL.gguf --host 64GiB [--gpu 24GiB] [-c TOKENS] [-np SLOTS] [OPTION...] [NAME=VALUE...]

-c, -np, -kvu, -no-kvu, -ub, -ctk and -ctv are those of llama-server; settings are those of KVFERRY_LLAMA. A layer
without keys (linear, recurrent) takes none of it; layers with windows have a KV cache of their own length.
Buffers for activations are not counted.
"""
import argparse
import ctypes
import itertools
import os
from typing import Any, List, NamedTuple, Optional

from .._errors import Error
from .._settings import fill
from ..capi import CacheConfig
from . import SETTINGS, Refused, gguf, plugin

GIB = 1 << 30
ELEMENT = {"f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "f32": 4.0}


class Asked(NamedTuple):
    """The load of llama-server: its options."""
    tokens: int # -c
    slots: int
    unified: bool
    ubatch: int
    bytes_k: float # of a number
    bytes_v: float


class Group(NamedTuple):
    """Layers of one shape in one KV cache, and the bytes that they take."""
    layer: gguf.Layer
    layers: int
    cells: int # of a stream
    streams: int
    cache: int # llama.cpp's KV cache
    host: int # kvferry's pages
    device: int # kvferry's windows and pages in slots
    codes: int
    own: int # the plug-in's tables
    blocks: int


def _pad(count: int) -> int:
    return -(-count // 256) * 256


def cells(asked: Asked, window: int) -> int:
    """Cells of a stream, as llama.cpp has them."""
    own = _pad(asked.tokens) if asked.unified else _pad(_pad(asked.tokens) // asked.slots)
    return min(own, _pad(window * (asked.slots if asked.unified else 1) + asked.ubatch)) if window else own


def groups(layers: List[gguf.Layer], asked: Asked, settings: str) -> List[Group]:
    """The bytes of every group of layers, by the function with which the plug-in opens them."""
    library, made = plugin(), []
    for layer, same in itertools.groupby(sorted(layers)):
        count, length, streams = len(list(same)), cells(asked, layer.window), 1 if asked.unified else asked.slots
        shape = (ctypes.c_uint32 * 7)(count, layer.query_heads, layer.kv_heads, layer.head_dim, layer.value_dim, length,
                                      streams)
        sizes = (ctypes.c_uint64 * 5)()
        said = library.kvferry_llama_plan(os.fsencode(settings), shape, sizes)
        if said:
            raise Refused(said.decode(), 2)
        numbers = layer.kv_heads * count * length * streams
        made.append(Group(layer, count, length, streams, int(numbers * (
            layer.head_dim * asked.bytes_k + layer.value_dim * asked.bytes_v)), *sizes))
    return made


def _bytes(text: str) -> int:
    sizes = CacheConfig()
    fill(sizes, "cache", {"host_bytes": text}, [])
    return sizes.host_bytes


def _arguments(given: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("kvferry-llama --plan", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("settings", metavar="NAME=VALUE", nargs="*", help="settings of KVFERRY_LLAMA")
    parser.add_argument("--host", required=True, help="host memory, as 64GiB")
    parser.add_argument("--gpu", help="memory of a card; default: none")
    parser.add_argument("-c", "--ctx-size", type=int, help="default: what the model was made for")
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-kvu", "--kv-unified", action=argparse.BooleanOptionalAction)
    parser.add_argument("-no-kvu", dest="kv_unified", action="store_false")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    parser.add_argument("-ctk", "--cache-type-k", choices=ELEMENT, default="f16")
    parser.add_argument("-ctv", "--cache-type-v", choices=ELEMENT, default="f16")
    return parser.parse_intermixed_args(given)


def _show(group: Group) -> str:
    layer = group.layer
    return ("%3d layers of %d heads on %d of %d%s, %s cells: KV cache %.2f, pages %.2f, codes %.2f, windows %.2f, "
            "tables %.2f GiB") % (
        group.layers, layer.query_heads, layer.kv_heads, layer.head_dim,
        ", windows of %d tokens" % layer.window if layer.window else "",
        "%d x %d" % (group.streams, group.cells) if group.streams > 1 else group.cells,
        group.cache / GIB, group.host / GIB, group.codes / GIB, group.device / GIB, group.own / GIB)


def main(given: List[str]) -> None:
    """Print what there is, and whether it fits; status 1 where it does not."""
    args = _arguments(given)
    found = gguf.metadata(args.model)
    arch = found.get("general.architecture", "")
    tokens = args.ctx_size or found.get(arch + ".context_length") or 4096
    asked = Asked(tokens, args.parallel, bool(args.kv_unified) or args.parallel == 1, args.ubatch_size,
                  ELEMENT[args.cache_type_k], ELEMENT[args.cache_type_v])
    layers = gguf.layers(found)
    made = groups(layers, asked, " ".join(args.settings) or os.environ.get(SETTINGS, ""))
    try:
        host_there, card = _bytes(args.host), _bytes(args.gpu) if args.gpu else None
    except Error as error:
        raise Refused(str(error)) from error
    weights = gguf.weight_bytes(args.model)
    print("%s, %d of %d layers have keys; weights %.2f GiB" % (
        arch, len(layers), found.get(arch + ".block_count", 0), weights / GIB))
    for group in made:
        print(_show(group))
    on_host = sum(group.cache + group.host + group.own for group in made)
    beside = sum(group.codes + group.device for group in made)
    _verdict(on_host, beside + weights, host_there, card)


def _verdict(on_host: int, on_card: int, host: int, card: Optional[int]) -> None:
    rows: List[Any] = [("host memory", on_host if card else on_host + on_card, host)]
    if card:
        rows.append(("the card, once this runs on one,", on_card, card))
    for name, takes, there in rows:
        print("%s: %.2f of %.2f GiB%s" % (name, takes / GIB, there / GIB, "" if takes <= there else ": does not fit"))
    if any(takes > there for _, takes, there in rows):
        raise Refused("it does not fit: fewer tokens (-c) or slots (-np), -ctk and -ctv q8_0, or pages=k8v4 take less")
