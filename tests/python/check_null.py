#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every pointer of the public C API is NULL once: arguments of all functions, and members of the
structs that they take. Each call is made in a process of its own, beside arguments that are right, and
must end: with KVF_INVALID and a text that names the argument, or as ALLOWED says. Functions without a
status give 0, NULL or an empty text, or do nothing.

usage: check_null.py INCLUDE_FOLDER
"""
import ctypes
import functools
import os
import pathlib
import re
import signal
import sys
import tempfile
import traceback
import unittest

from kvferry import capi
from kvferry.capi import lib

INCLUDE = pathlib.Path(sys.argv[1])
TOKENS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 8, 4, 2, 32
FLOATS = 1 << 16
KEEP: list = [] # what the library has addresses of

# Arguments and members that may be NULL: what a call then returns. The headers say so of each.
ANY, OK = "any", 0
ALLOWED = {
    "error": ANY, "log": ANY, "log_user": ANY,
    "kvf_runtime_error runtime": ANY, "kvf_runtime_describe text": ANY,
    "kvf_runtime_numa_nodes ids": ANY, "kvf_stream_wrap native": ANY,
    "kvf_stream_launch args": ANY, # with args_bytes 0
    "kvf_saved_read_sized note": ANY, "kvf_hidden_open disk_path": OK,
    "kvf_memory_free pointer": ANY, "kvf_pinned_free host": ANY,
    "kvf_link_measure_sized samples_ns": OK, "kvf_save_is_done save": 1,
    "kvf_runtime_describe needed": ANY, "kvf_structkv_measure profile": ANY,
    # Nothing can be recorded on the host device, and chunks are pruned under other settings.
    "kvf_record_begin stream": ANY, "kvf_replay stream": ANY, "kvf_prune_chunk sequence": ANY,
}


def exported(text):
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    for result, name, parameters in re.findall(
            r"KVF_API\s+(?:KVF_CHECKED\s+)?([\w\s]+?[\s*]+?)(kvf_\w+)\(([^;]*)\);", text):
        names = [re.search(r"(\w+)(\[\w*\])?\s*$", p).group(1) for p in parameters.split(",")]
        kinds = [" ".join(p.split()) for p in parameters.split(",")]
        yield name, result.strip(), [] if kinds == ["void"] else list(zip(names, kinds))


CODE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(INCLUDE.glob("kvferry/*.h")))
API = {name: (result, parameters) for name, result, parameters in exported(CODE)
       if name not in capi.LEFT_OUT}
STRUCTS = {s.c_name: s for s in capi.STRUCTS}


def kept(thing):
    KEEP.append(thing)
    return thing


def address(thing):
    return ctypes.addressof(kept(thing))


def must(status):
    if status:
        raise RuntimeError(ctypes.string_at(lib.kvf_runtime_error(None) + 8).decode())


# Handles and memory: the call that makes each, into `out`.
HANDLES = {
    "runtime": lambda w, out: lib.kvf_runtime_open(w.config("kvf_runtime_config"), out, None),
    "stream": lambda w, out: lib.kvf_stream_create(w.runtime, out),
    "cache": lambda w, out: lib.kvf_cache_open(w.runtime, w.config("kvf_cache_config"), out, None),
    "memory": lambda w, out: lib.kvf_memory_alloc(w.runtime, 4 * FLOATS, out),
    "pinned": lambda w, out: lib.kvf_pinned_alloc(w.runtime, 4096, out, ctypes.byref(ctypes.c_void_p())),
    "prune": lambda w, out: lib.kvf_prune_open(w.cache, w.config("kvf_prune_config"), out, None),
    "hidden": lambda w, out: lib.kvf_hidden_open(w.runtime, 128, 64, None, out),
    "blocks": lambda w, out: lib.kvf_blocks_open(w.runtime, w.config("kvf_blocks_config"), out, None),
    "link": lambda w, out: lib.kvf_link_open(w.runtime, out),
    "disk": lambda w, out: lib.kvf_disk_open(w.runtime, w.folder, 1 << 24, out),
    "save": lambda w, out: lib.kvf_sequence_save(w.cache, w.config("kvf_save_args"), w.stream, out),
    "whole": lambda w, out: lib.kvf_complete_begin(w.cache, w.sequence, 1, TOKENS, w.stream, out),
}
CACHE = dict(layers=2, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=capi.Dtype.FP32,
             tokens_max=256, sequences_max=4, select=capi.Select.DYNAMIC, static_ratio=0)
# Fields of structs of the caller's with which a call is right.
FIELDS = {
    "kvf_runtime_config": lambda w: dict(device=capi.Device.HOST, threads=1, allow_unpinned=1),
    "kvf_cache_config": lambda w: dict(CACHE, observe_window=4),
    "kvf_blocks_config": lambda w: dict(block_count=8, block_tokens=32),
    "kvf_save_args": lambda w: dict(sequence=w.sequence, path=os.path.join(w.folder, b"saved"), model=b"m"),
    "kvf_restore_args": lambda w: dict(path=w.path, model=b"m"),
    "kvf_prefill_args": lambda w: dict(w.rooms("q k v out"), sequence=w.sequence, tokens=2,
                                       positions=address((ctypes.c_uint32 * 2)(100, 101))),
    "kvf_decode_args": lambda w: dict(w.rooms("q k v out lse"), batch=1,
                                      sequences=address((ctypes.c_void_p * 1)(w.sequence))),
    "kvf_page_lists": lambda w: dict(w.rooms("indptr indices last_page_len"), capacity=FLOATS),
    "kvf_blocks_put_args": lambda w: dict(w.rooms("k v slots"), tokens=1, k_stride=KV_HEADS * HEAD_DIM,
                                          v_stride=KV_HEADS * HEAD_DIM),
    "kvf_blocks_get_args": lambda w: dict(w.rooms("k v slots"), tokens=1),
    "kvf_blocks_rows": lambda w: dict(w.rooms("table lengths regions"), rows=1, table_stride=1),
    "kvf_blocks_decode_args": lambda w: dict(w.rooms("q out lse"), rows=w.config("kvf_blocks_rows")),
    "kvf_blocks_extend_args": lambda w: dict(w.rooms("starts contexts q out lse"), rows=w.config("kvf_blocks_rows")),
    "kvf_prune_shape": lambda w: dict(layers=2, kv_heads=KV_HEADS, query_heads=QUERY_HEADS, tokens_max=256),
}


def filled(row, fields):
    for name, value in fields.items():
        setattr(row, name, value)


class World:
    """Handles and memory, made when an argument needs them."""

    def __init__(self, folder, is_empty):
        """is_empty: whether the sequence has no token."""
        self.folder, self.is_empty = folder, is_empty
        self.policy, self.recording = lib.kvf_prune_policy_find(b"snapkv"), None # there is none on the host device

    def __getattr__(self, name):
        setattr(self, name, self.opened(HANDLES[name]))
        return getattr(self, name)

    def opened(self, call):
        out = ctypes.c_void_p()
        must(call(self, ctypes.byref(out)))
        return out.value

    @staticmethod
    def room():
        return address((ctypes.c_float * FLOATS)())

    def rooms(self, names):
        return {name: self.room() for name in names.split()}

    @functools.cached_property
    def sequence(self):
        sequence = self.opened(lambda w, out: lib.kvf_sequence_create(w.cache, out))
        for layer in range(0 if self.is_empty else 2):
            args = capi.PrefillArgs(sequence=sequence, layer=layer, tokens=TOKENS, **self.rooms("q k v out"))
            must(lib.kvf_prefill_sized(self.cache, *capi.sized(args), self.stream))
            must(lib.kvf_stream_wait(self.stream))
        return sequence

    @functools.cached_property
    def path(self):
        must(lib.kvf_save_finish(self.save, None))
        return os.path.join(self.folder, b"saved")

    def config(self, kind):
        """The address of a struct of the caller's, filled so that the call is right."""
        row = STRUCTS[kind]()
        init = getattr(lib, kind + "_init_sized", None)
        if init:
            policy = [self.policy] if kind == "kvf_prune_config" else []
            init(ctypes.byref(row), *policy, ctypes.sizeof(row))
        filled(row, FIELDS.get(kind, lambda w: {})(self))
        if kind == "kvf_prune_config":
            row.settings.window = 4
        if kind == "kvf_blocks_config":
            filled(row.cache, CACHE)
        return address(row)


# Arguments of one function that are not those that their names say.
SPECIAL = {
    "kvf_status_name status": 0, "kvf_status_text status": 0,
    "kvf_runtime_describe capacity": 0, "kvf_runtime_numa_nodes capacity": 0,
    "kvf_stream_launch fn": lambda w: ctypes.cast(kept(capi.CALLBACKS["kvf_task_fn"](
        lambda args, task: None)), ctypes.c_void_p).value,
    "kvf_stream_launch args_bytes": 0,
    "kvf_memory_free pointer": lambda w: w.memory, "kvf_pinned_free host": lambda w: w.pinned,
    "kvf_sequence_fork parent": lambda w: w.sequence,
    "kvf_saved_read_sized path": lambda w: w.path,
    "kvf_saved_read_sized capacity": 0,
    "kvf_disk_open folder": lambda w: w.folder,
    "kvf_hidden_open disk_path": lambda w: w.folder,
    "kvf_prune_policy_find name": b"snapkv", "kvf_prune_policy_takes setting": b"keep",
    "kvf_setting_parse text": b"1",
    "kvf_complete_end whole": lambda w: w.whole,
    "kvf_blocks_bind codes": lambda w: w.memory,
}


def numbers(name):
    """Whole numbers by the names of parameters."""
    return {"tokens": 2, "bytes": 4096, "tasks": 1, "count": 1, "batch": 1, "capacity": 64, "layers": 1,
            "heads": 1, "states_max": 4, "state_bytes": 128}.get(name, 0)


def value_of(w, function, name, kind):
    """A right argument."""
    special = SPECIAL.get(function + " " + name)
    if special is not None:
        return special(w) if callable(special) else special
    if "*" not in kind and "[" not in kind and "_fn" not in kind:
        return None if "size_t" in kind and name.endswith("size") else numbers(name)
    handle = re.fullmatch(r"(?:const )?kvf_(\w+) \*\w+", kind)
    if handle and "kvf_" + handle.group(1) in STRUCTS:
        if function.startswith("kvf_setting") or kind.startswith("const kvf_setting"):
            return lib.kvf_runtime_setting(1)
        if handle.group(1) == "prune_policy":
            return w.policy
        return w.config("kvf_" + handle.group(1))
    if handle:
        return getattr(w, handle.group(1))
    if name == "sequences":
        return address((ctypes.c_void_p * 1)(w.sequence))
    if name == "config": # void *, of a setting
        return w.config("kvf_runtime_config")
    return w.room()


def size_after(kinds, at):
    struct = re.search(r"(kvf_\w+) \*", kinds[at - 1][1])
    return ctypes.sizeof(STRUCTS[struct.group(1)])


def arguments(w, function):
    _, kinds = API[function]
    values = [value_of(w, function, name, kind) for name, kind in kinds]
    for at, (name, kind) in enumerate(kinds):
        if values[at] is None and kind.startswith("size_t") and name.endswith("size"):
            before = next(i for i in range(at, 0, -1) if "*" in kinds[i - 1][1] and
                          re.search(r"kvf_\w+ \*", kinds[i - 1][1]).group(0)[:-2] in STRUCTS)
            values[at] = size_after(kinds, before)
    return values


def last_text():
    return ctypes.string_at(lib.kvf_runtime_error(None) + 8).decode()


def complaint(function, name, status, allowed):
    """The fault of a call that ended; None = it has none."""
    result = API[function][0]
    if allowed is ANY:
        return None
    if result != "kvf_status":
        return None if status in (allowed, 0, None, b"") else "gives %r" % status
    if allowed is not None:
        return None if status == allowed else "gives %d: %s" % (status, last_text())
    if status != capi.Status.INVALID:
        return "gives %d and not KVF_INVALID" % status
    return None if re.search(r"\b%s\b" % name, last_text()) else "does not name it: " + last_text()


def struct_kind(kind):
    found = re.fullmatch(r"(?:const )?(kvf_\w+) \*\w+", kind)
    return found.group(1) if found and found.group(1) in STRUCTS else None


def cases():
    """(function, argument, member or None) of every pointer."""
    for function, (_, kinds) in API.items():
        for name, kind in kinds:
            if "*" in kind or "[" in kind or "_fn" in kind:
                yield function, name, None
            struct = struct_kind(kind)
            if struct and kind.startswith("const") and struct not in ("kvf_setting", "kvf_prune_policy"):
                for member, ctype in STRUCTS[struct]._fields_:
                    if ctype in (ctypes.c_void_p, ctypes.c_char_p):
                        yield function, name, member


def attempt(case, folder):
    """In a process of its own: a text if the call does not end as it must."""
    function, name, member = case
    w = World(folder, function == "kvf_prune_begin")
    kinds = API[function][1]
    values = arguments(w, function)
    at = [n for n, _ in kinds].index(name)
    if member:
        setattr(STRUCTS[struct_kind(kinds[at][1])].from_address(values[at]), member, None)
        getattr(lib, function)(*values)
        return None # whatever it says: a member may be one of several, and most may be NULL
    values[at] = None
    allowed = ALLOWED.get("%s %s" % (function, name), ALLOWED.get(name))
    return complaint(function, name, getattr(lib, function)(*values), allowed)


def in_a_process(case, folder):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = attempt(case, folder) or ""
        except BaseException: # pylint: disable=broad-except
            said = "cannot be tried: " + traceback.format_exc()
        os.write(write, said.encode()[:60000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        said = pipe.read()
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        return "ends the process by " + signal.Signals(os.WTERMSIG(ended)).name
    return said


class Null(unittest.TestCase):
    def test_every_pointer(self):
        self.assertEqual(set(API), {row.split()[0] for row in capi.FUNCTIONS.split("\n") if row})
        wrong, count = [], 0
        for case in cases():
            with tempfile.TemporaryDirectory() as folder:
                said = in_a_process(case, os.fsencode(folder))
            count += 1
            if said:
                wrong.append("%s: %s = NULL %s" % (case[0], ".".join(x for x in case[1:] if x), said))
        print("%d pointers" % count, file=sys.stderr)
        self.assertEqual(wrong, [], "\n" + "\n".join(wrong))
        self.assertGreater(count, 200)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
