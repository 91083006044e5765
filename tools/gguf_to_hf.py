#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a Hugging Face directory, as `kvferry run` reads it, of a GGUF file.

usage: gguf_to_hf.py FILE.gguf FOLDER

Weights become bf16, whatever their type in the file: F32, F16, BF16, Q8_0, Q4_0 or Q4_1. Knows one
architecture, llama, and tokenizers of the kind of GPT-2; everything else is refused by name. GGUF
keeps rows of query and key weights in the order in which RoPE turns neighbouring channels; here
they get back the order that turns halves of a head. FOLDER is complete or not there. Needs NumPy.
"""
import json
import os
import shutil
import struct
import sys
import tempfile

import numpy as np

# How the text is cut before BPE, by the name that the file gives: expressions that isolate their
# matches, in front of GPT-2's own.
SPLITS = {"smollm": [r"\p{N}"], "gpt-2": []}
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that are never made of others


def refuse(what):
    sys.exit("gguf_to_hf: " + what)


# ---- the file ----

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
           11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9


class Reader:
    """Bytes of the file, from the front to the back."""

    def __init__(self, path):
        self.bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self.at = 0

    def take(self, count):
        if self.at + count > len(self.bytes):
            refuse("the file is cut short")
        self.at += count
        return self.bytes[self.at - count:self.at].tobytes()

    def scalar(self, kind):
        shape = SCALARS.get(kind) or refuse("a value of the unknown type %d" % kind)
        return struct.unpack(shape, self.take(struct.calcsize(shape)))[0]

    def text(self):
        return self.take(self.scalar(10)).decode("utf-8")

    def value(self, kind):
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            return self.scalar(kind)
        inner, count = self.scalar(4), self.scalar(10)
        return [self.value(inner) for _ in range(count)]


def read(path):
    """(metadata, {name: (shape, type, bytes from its first on)})."""
    r = Reader(path)
    if r.take(4) != b"GGUF" or r.scalar(4) not in (2, 3):
        refuse("%s is no GGUF file of version 2 or 3" % path)
    tensors, fields = r.scalar(10), r.scalar(10)
    meta, places = {}, {}
    for _ in range(fields):
        name = r.text()
        meta[name] = r.value(r.scalar(4))
    for _ in range(tensors):
        name = r.text()
        shape = [r.scalar(10) for _ in range(r.scalar(4))]
        places[name] = (shape[::-1], r.scalar(4), r.scalar(10))
    alignment = meta.get("general.alignment", 32)
    base = -(-r.at // alignment) * alignment
    return meta, {n: (shape, kind, r.bytes[base + offset:])
                  for n, (shape, kind, offset) in places.items()}


# ---- numbers ----

def half(blocks, at):
    """One fp16 of every block, as a column."""
    return blocks[:, at:at + 2].copy().view(np.float16).astype(np.float32)


def nibbles(blocks):
    return np.concatenate([blocks & 15, blocks >> 4], axis=1).astype(np.float32)


# type: (name, numbers of a block, its bytes, how it is read)
TYPES = {
    0: ("F32", 1, 4, lambda b: b.view(np.float32)),
    1: ("F16", 1, 2, lambda b: b.view(np.float16).astype(np.float32)),
    2: ("Q4_0", 32, 18, lambda b: half(b, 0) * (nibbles(b[:, 2:]) - 8)),
    3: ("Q4_1", 32, 20, lambda b: half(b, 0) * nibbles(b[:, 4:]) + half(b, 2)),
    8: ("Q8_0", 32, 34, lambda b: half(b, 0) * b[:, 2:].copy().view(np.int8)),
    30: ("BF16", 1, 2, lambda b: (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32)),
}


def numbers(name, tensor):
    shape, kind, data = tensor
    if kind not in TYPES:
        refuse("%s has type %d; known are %s" % (name, kind, ", ".join(
            t[0] for t in TYPES.values())))
    _, block, size, make = TYPES[kind]
    count = int(np.prod(shape))
    if count % block or len(data) < count // block * size:
        refuse("%s is cut short" % name)
    blocks = np.array(data[:count // block * size]).reshape(-1, size)
    return make(blocks).astype(np.float32).reshape(shape)


def to_bf16(x):
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def halves(weight, heads):
    """Rows of every head, from neighbours that turn together to halves that do."""
    rows = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


# ---- the model ----

LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(name):
    parts = name.split(".")
    if parts[-1] == "weight" and parts[0] == "blk" and parts[2] in LAYER:
        return "model.layers.%s.%s.weight" % (parts[1], LAYER[parts[2]])
    if parts[-1] == "weight" and parts[0] in OUTSIDE:
        return OUTSIDE[parts[0]] + ".weight"
    return refuse("the tensor %s is unknown" % name)


def config_of(meta, tensors):
    def get(field, *fallback):
        name = "llama." + field
        if name not in meta and not fallback:
            refuse("%s is missing" % name)
        return meta.get(name, *fallback)

    if meta.get("general.architecture") != "llama":
        refuse("the architecture is %s; llama is known" % meta.get("general.architecture"))
    if any(name.startswith("llama.rope.scaling") for name in meta):
        refuse("scaled RoPE is not known")
    heads, width = get("attention.head_count"), get("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": width, "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("rope.dimension_count", width // heads),
        "vocab_size": tensors["token_embd.weight"][0][0],
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0), "rope_scaling": None,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors, "torch_dtype": "bfloat16",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
    }


def write_weights(path, config, tensors):
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, _, _) in tensors.items():
        size = 2 * int(np.prod(shape))
        header[hf_name(name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            x = numbers(name, tensor)
            part = name.split(".")[-2]
            f.write(to_bf16(halves(x, heads[part]) if part in heads else x).tobytes())


# ---- the tokenizer ----

def tokenizer_of(meta):
    kind, cut = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in SPLITS:
        refuse("the tokenizer is %s, %s; gpt2 is known with %s" % (kind, cut, ", ".join(SPLITS)))
    if meta.get("tokenizer.ggml.add_bos_token", False):
        refuse("a tokenizer that adds a token in front is not known")
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": k == CONTROL}
            for i, k in enumerate(kinds) if k in (CONTROL, USER_DEFINED)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False}
            for r in SPLITS[cut]] + [byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
                  "byte_fallback": False, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": meta["tokenizer.ggml.merges"]},
    }


def tokenizer_config_of(meta, config):
    tokens = meta["tokenizer.ggml.tokens"]
    out = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
           "model_max_length": config["max_position_embeddings"]}
    for name in ("bos", "eos"):
        if config[name + "_token_id"] is not None:
            out[name + "_token"] = tokens[config[name + "_token_id"]]
    if "tokenizer.chat_template" in meta:
        out["chat_template"] = meta["tokenizer.chat_template"]
    return out


def convert(path, folder):
    meta, tensors = read(path)
    config = config_of(meta, tensors)
    files = {"config.json": config, "tokenizer.json": tokenizer_of(meta),
             "tokenizer_config.json": tokenizer_config_of(meta, config),
             "generation_config.json": {k: config[k] for k in ("bos_token_id", "eos_token_id")}}
    partial = tempfile.mkdtemp(dir=os.path.dirname(os.path.abspath(folder)))
    try:
        for name, content in files.items():
            with open(os.path.join(partial, name), "w", encoding="utf-8") as f:
                json.dump(content, f, ensure_ascii=False)
        write_weights(os.path.join(partial, "model.safetensors"), config, tensors)
        os.chmod(partial, 0o755)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial)
        raise


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.split("\n\n")[1])
    convert(sys.argv[1], sys.argv[2])
