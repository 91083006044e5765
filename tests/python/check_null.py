#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every pointer of the public C API is NULL once: arguments of all functions, and members of the
structs that they take. Each call is made in a process of its own, beside arguments that are right, and
must end: with KVF_INVALID and a text that names the argument, or as ALLOWED says. Functions without a
status give 0, NULL or an empty text, or do nothing.

usage: check_null.py INCLUDE_FOLDER
"""
import ctypes
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


class World:
    """Handles and memory, made when an argument needs them."""

    def __init__(self, folder):
        self.folder = folder
        self.made = {}

    def __getattr__(self, name):
        if name.startswith(("make_", "fill_", "is_")):
            raise AttributeError(name)
        if name not in self.made:
            self.made[name] = getattr(self, "make_" + name)()
        return self.made[name]

    def opened(self, call, *arguments):
        out = ctypes.c_void_p()
        must(call(*arguments, ctypes.byref(out)))
        return out.value

    def room(self):
        return address((ctypes.c_float * FLOATS)())

    def make_runtime(self):
        out, config = ctypes.c_void_p(), self.config("kvf_runtime_config")
        must(lib.kvf_runtime_open(config, ctypes.byref(out), None))
        return out.value

    def make_stream(self):
        return self.opened(lib.kvf_stream_create, self.runtime)

    def make_cache(self):
        out = ctypes.c_void_p()
        must(lib.kvf_cache_open(self.runtime, self.config("kvf_cache_config"), ctypes.byref(out), None))
        return out.value

    def make_sequence(self):
        sequence = self.opened(lib.kvf_sequence_create, self.cache)
        if getattr(self, "is_empty", False):
            return sequence
        for layer in range(2):
            args = capi.PrefillArgs(sequence=sequence, layer=layer, tokens=TOKENS, q=self.room(),
                                    k=self.room(), v=self.room(), out=self.room())
            must(lib.kvf_prefill_sized(self.cache, *capi.sized(args), self.stream))
        must(lib.kvf_stream_wait(self.stream))
        return sequence

    def make_memory(self):
        return self.opened(lib.kvf_memory_alloc, self.runtime, 4 * FLOATS)

    def make_pinned(self):
        host, device = ctypes.c_void_p(), ctypes.c_void_p()
        must(lib.kvf_pinned_alloc(self.runtime, 4096, ctypes.byref(host), ctypes.byref(device)))
        return host.value

    def make_policy(self):
        return lib.kvf_prune_policy_find(b"snapkv")

    def make_prune(self):
        out = ctypes.c_void_p()
        must(lib.kvf_prune_open(self.cache, self.config("kvf_prune_config"), ctypes.byref(out), None))
        return out.value

    def make_hidden(self):
        return self.opened(lib.kvf_hidden_open, self.runtime, 128, 64, None)

    def make_blocks(self):
        out = ctypes.c_void_p()
        must(lib.kvf_blocks_open(self.runtime, self.config("kvf_blocks_config"), ctypes.byref(out), None))
        return out.value

    def make_link(self):
        return self.opened(lib.kvf_link_open, self.runtime)

    def make_disk(self):
        return self.opened(lib.kvf_disk_open, self.runtime, self.folder, 1 << 24)

    def make_save(self):
        return self.opened(lib.kvf_sequence_save, self.cache, self.config("kvf_save_args"), self.stream)

    def make_whole(self):
        return self.opened(lib.kvf_complete_begin, self.cache, self.sequence, 1, TOKENS, self.stream)

    def make_recording(self):
        return None # there is none on the host device

    def make_path(self):
        must(lib.kvf_save_finish(self.save, None))
        return os.path.join(self.folder, b"saved")

    def config(self, kind):
        """The address of a struct of the caller's, filled so that the call is right."""
        return address(self.struct(kind))

    def struct(self, kind):
        row = STRUCTS[kind]()
        init = getattr(lib, kind + "_init_sized", None)
        if kind == "kvf_prune_config":
            init(ctypes.byref(row), self.policy, ctypes.sizeof(row))
        elif init:
            init(ctypes.byref(row), ctypes.sizeof(row))
        getattr(self, "fill_" + kind, lambda row: None)(row)
        return row

    def fill_kvf_runtime_config(self, row):
        row.device, row.threads, row.allow_unpinned = capi.Device.HOST, 1, 1

    def fill_kvf_cache_config(self, row):
        row.layers, row.query_heads, row.kv_heads, row.head_dim = 2, QUERY_HEADS, KV_HEADS, HEAD_DIM
        row.dtype, row.tokens_max, row.sequences_max, row.observe_window = capi.Dtype.FP32, 256, 4, 4
        row.select, row.static_ratio = capi.Select.DYNAMIC, 0

    def fill_kvf_blocks_config(self, row):
        row.block_count, row.block_tokens = 8, 32
        self.fill_kvf_cache_config(row.cache)
        row.cache.observe_window = 0

    def fill_kvf_prune_config(self, row):
        row.settings.window = 4

    def fill_kvf_save_args(self, row):
        row.sequence, row.path = self.sequence, os.path.join(self.folder, b"saved")
        row.model, row.note = b"m", None

    def fill_kvf_restore_args(self, row):
        row.path, row.model = self.path, b"m"

    def fill_kvf_prefill_args(self, row):
        row.sequence, row.tokens = self.sequence, 2
        row.q, row.k, row.v, row.out = self.room(), self.room(), self.room(), self.room()
        row.positions = address((ctypes.c_uint32 * 2)(100, 101))

    def fill_kvf_decode_args(self, row):
        row.batch, row.sequences = 1, address((ctypes.c_void_p * 1)(self.sequence))
        row.q, row.k, row.v, row.out, row.lse = (self.room() for _ in range(5))

    def fill_kvf_page_lists(self, row):
        row.indptr, row.indices, row.last_page_len, row.capacity = self.room(), self.room(), self.room(), FLOATS

    def fill_kvf_blocks_put_args(self, row):
        row.tokens, row.k, row.v, row.slots = 1, self.room(), self.room(), self.room()
        row.k_stride = row.v_stride = KV_HEADS * HEAD_DIM

    def fill_kvf_blocks_get_args(self, row):
        row.tokens, row.k, row.v, row.slots = 1, self.room(), self.room(), self.room()

    def fill_kvf_blocks_rows(self, row):
        row.rows, row.table_stride = 1, 1
        row.table, row.lengths, row.regions = self.room(), self.room(), self.room()

    def fill_kvf_blocks_decode_args(self, row):
        row.rows = self.config("kvf_blocks_rows")
        row.q, row.out, row.lse = self.room(), self.room(), self.room()

    def fill_kvf_blocks_extend_args(self, row):
        row.rows = self.config("kvf_blocks_rows")
        row.starts = row.contexts = self.room()
        row.q, row.out, row.lse = self.room(), self.room(), self.room()

    def fill_kvf_prune_shape(self, row):
        row.layers, row.kv_heads, row.query_heads, row.tokens_max = 2, KV_HEADS, QUERY_HEADS, 256


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
    w = World(folder)
    w.is_empty = function == "kvf_prune_begin"
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
