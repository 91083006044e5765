# SPDX-License-Identifier: Apache-2.0
"""libllama by its C API, whatever its version: structs are read from the declarations beside the library.

Loads the shared libraries of one folder into this process and what `GGML_BACKEND_PATH` names, as
llama.cpp's own programs do. Invariant: a field that a version lacks is refused, not ignored.
"""
import ctypes
import glob
import os
import re

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
TYPES = {"f32": F32, "f16": F16, "q8_0": Q8_0, "bf16": BF16}
FLASH_OFF, FLASH_ON, FLASH_AUTO = 0, 1, -1
_WORDS = {"uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
          "uint64_t": ctypes.c_uint64, "float": ctypes.c_float, "double": ctypes.c_double,
          "bool": ctypes.c_bool, "size_t": ctypes.c_size_t, "int8_t": ctypes.c_int8}


class Batch(ctypes.Structure):
    """The struct llama_batch, alike in all versions."""
    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)),
                ("embd", ctypes.c_void_p), ("pos", ctypes.POINTER(ctypes.c_int32)),
                ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
                ("logits", ctypes.POINTER(ctypes.c_int8))]


def _kind(words):
    if "*" in words or words.split()[-1].endswith(("_callback", "_t")) and words.split()[-1] not in _WORDS:
        return ctypes.c_void_p
    return ctypes.c_int if words.startswith("enum ") else _WORDS[words.split()[-1]]


def struct(name, text):
    """A struct of C declarations, as ctypes has it."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    fields = re.search(r"struct %s\s*\{(.*?)\}" % name, text, re.S).group(1)
    rows = []
    for row in fields.split(";"):
        found = re.fullmatch(r"(.*?[\s*])(\w+)", " ".join(row.replace("*", " * ").split()))
        if found:
            rows.append((found.group(2), _kind(found.group(1).strip())))
    return type(name, (ctypes.Structure,), {"_fields_": rows})


def declarations(folder):
    """The text of llama.h that belongs to the libraries of a folder."""
    for place in ("_cffi_bindings.py", "llama.h", "../../llama.cpp/include/llama.h"):
        path = os.path.join(folder, place)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as text:
                return text.read()
    raise FileNotFoundError("%s has neither _cffi_bindings.py nor llama.h" % folder)


class Library:
    """The shared libraries of a folder, with every backend that they load."""

    def __init__(self, folder):
        text = declarations(folder)
        self.model_params, self.context_params = (struct("llama_%s_params" % one, text)
                                                  for one in ("model", "context"))
        for name in ("libggml-base", "libggml-cpu", "libggml"):
            self.ggml = ctypes.CDLL(self._path(folder, name), ctypes.RTLD_GLOBAL)
        self.base = ctypes.CDLL(self._path(folder, "libggml-base"), ctypes.RTLD_GLOBAL)
        self.llama = ctypes.CDLL(self._path(folder, "libllama"), ctypes.RTLD_GLOBAL)
        self._declare()
        self.log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(self._log)
        self.quiet = "KVF_LLAMA_LOG" not in os.environ
        self.llama.llama_log_set(self.log, None)
        self.ggml.ggml_backend_load_all()
        self.llama.llama_backend_init()

    def _path(self, folder, name):
        return sorted(glob.glob(os.path.join(folder, name + ".so*")), key=len)[0]

    def _log(self, level, text, _):
        if not self.quiet or level == 4: # errors
            os.write(2, text)

    def _declare(self):
        lib, ptr, i32 = self.llama, ctypes.c_void_p, ctypes.c_int32
        size, boolean = ctypes.c_size_t, ctypes.c_bool
        lib.llama_model_default_params.restype = self.model_params
        lib.llama_context_default_params.restype = self.context_params
        for name, result, arguments in (
                ("llama_model_load_from_file", ptr, [ctypes.c_char_p, self.model_params]),
                ("llama_init_from_model", ptr, [ptr, self.context_params]),
                ("llama_model_get_vocab", ptr, [ptr]), ("llama_vocab_n_tokens", i32, [ptr]),
                ("llama_get_memory", ptr, [ptr]), ("llama_batch_init", Batch, [i32, i32, i32]),
                ("llama_batch_free", None, [Batch]), ("llama_decode", i32, [ptr, Batch]),
                ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [ptr, i32]),
                ("llama_memory_clear", None, [ptr, boolean]),
                ("llama_memory_seq_rm", boolean, [ptr, i32, i32, i32]),
                ("llama_memory_seq_cp", None, [ptr, i32, i32, i32, i32]),
                ("llama_memory_seq_add", None, [ptr, i32, i32, i32, i32]),
                ("llama_memory_seq_pos_max", i32, [ptr, i32]),
                ("llama_memory_can_shift", boolean, [ptr]),
                ("llama_state_seq_get_size", size, [ptr, i32]),
                ("llama_state_seq_get_data", size, [ptr, ptr, size, i32]),
                ("llama_state_seq_set_data", size, [ptr, ptr, size, i32]),
                ("llama_state_seq_save_file", size, [ptr, ctypes.c_char_p, i32, ptr, size]),
                ("llama_state_seq_load_file", size, [ptr, ctypes.c_char_p, i32, ptr, size, ptr]),
                ("llama_tokenize", i32, [ptr, ctypes.c_char_p, i32, ptr, i32, boolean, boolean]),
                ("llama_free", None, [ptr]), ("llama_model_free", None, [ptr]),
                ("llama_synchronize", None, [ptr]), ("llama_log_set", None, [ptr, ptr])):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments


def _set(params, fields):
    known = {name for name, _ in params._fields_}
    for name, value in fields.items():
        if name not in known:
            raise AttributeError("this version has no %s" % name)
        setattr(params, name, value)
    return params


class Model:
    """A model of a GGUF file."""

    def __init__(self, library, path, **fields):
        self.library = library
        params = _set(library.llama.llama_model_default_params(), fields)
        self.model = library.llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise RuntimeError("llama.cpp does not load " + path)
        self.vocab = library.llama.llama_model_get_vocab(self.model)
        self.tokens = library.llama.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text):
        """Token ids of a text, without special ones in front of them."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self.library.llama.llama_tokenize(self.vocab, data, len(data), ids, len(ids), False, True)
        return list(ids[:count])

    def close(self):
        """Free it."""
        self.library.llama.llama_model_free(self.model)


class Context:
    """A context: a KV cache, and passes through the model.

    fields    of llama_context_params; the KV cache is of one type for keys and values. Flash attention makes fp16
              of an fp32 cache, so that one goes without it. Layers with windows have cells for their windows, as in llama-server
    """

    def __init__(self, model, tokens, *, slots=1, kind="f16", threads=1, unified=False, **fields):
        self.model, self.lib, self.slots = model, model.library.llama, slots
        params = _set(self.lib.llama_context_default_params(), dict(
            {"n_batch": 2048, "n_ubatch": 512, "swa_full": False}, n_ctx=tokens, n_seq_max=slots, n_threads=threads,
            n_threads_batch=threads, type_k=TYPES[kind], type_v=TYPES[kind], kv_unified=unified, no_perf=True,
            flash_attn_type=FLASH_OFF if kind == "f32" else FLASH_ON, **fields))
        self.context = self.lib.llama_init_from_model(model.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp makes no context")
        self.memory = self.lib.llama_get_memory(self.context)
        self.batch = self.lib.llama_batch_init(2048, 0, 1)

    def decode(self, rows):
        """One pass over rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, wanted
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError("llama_decode: %d" % status)

    def prompt(self, tokens, sequence=0, start=0):
        """A prompt, in passes as large as the batch; its last token has logits."""
        for at in range(0, len(tokens), 2048):
            self.decode([(token, start + at + i, sequence, at + i == len(tokens) - 1)
                         for i, token in enumerate(tokens[at:at + 2048])])

    def logits(self, row=-1):
        """A view of a row's logits, valid until the next pass."""
        pointer = self.lib.llama_get_logits_ith(self.context, row)
        return (ctypes.c_float * self.model.tokens).from_address(ctypes.addressof(pointer.contents))

    def length(self, sequence):
        """Positions of a sequence."""
        return self.lib.llama_memory_seq_pos_max(self.memory, sequence) + 1

    def remove(self, sequence, first=-1, last=-1):
        """Take positions out; False where the memory cannot."""
        return self.lib.llama_memory_seq_rm(self.memory, sequence, first, last)

    def copy(self, source, target):
        """Let a sequence have the cells of another."""
        self.lib.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def shift(self, sequence, first, by):
        """Move positions from `first` on."""
        self.lib.llama_memory_seq_add(self.memory, sequence, first, -1, by)

    def state(self, sequence=0):
        """The state of a sequence, as a buffer."""
        data = ctypes.create_string_buffer(self.lib.llama_state_seq_get_size(self.context, sequence))
        size = self.lib.llama_state_seq_get_data(self.context, data, len(data), sequence)
        return bytearray(memoryview(data)[:size])

    def restore(self, state, sequence=0):
        """Put a state back; False where llama.cpp refuses it."""
        data = (ctypes.c_char * len(state)).from_buffer(state)
        return self.lib.llama_state_seq_set_data(self.context, data, len(state), sequence) > 0

    def close(self):
        """Free it."""
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
