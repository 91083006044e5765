#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/gguf_to_hf.py on small files that are made here: every type of tensor, names, the order of
query and key rows, the tokenizer, and what is refused.

usage: check_gguf.py GGUF_TO_HF
"""
import json
import os
import struct
import subprocess
import sys
import tempfile

import numpy as np

TOOL = sys.argv[1]
CHECKS = []
HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 4, 2, 64, 256, 96
TOKENS = ["<|end|>", "a", "b", "Ġ", "Ġa", "1"]


def check(name, fine):
    CHECKS.append(bool(fine))
    if not fine:
        print("not ok: " + name)


# ---- a file ----

def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(v):
    """A value behind its type."""
    if isinstance(v, str):
        return struct.pack("<I", 8) + text(v)
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    inner = [value(x) for x in v]
    return struct.pack("<I", 9) + inner[0][:4] + struct.pack("<Q", len(v)) + b"".join(
        x[4:] for x in inner)


def blocks_of(kind, rng, count):
    """(bytes, the numbers they stand for), by the definition of each type, number by number."""
    out, numbers = b"", []
    if kind == 0:
        x = rng.standard_normal(count).astype(np.float32)
        return x.tobytes(), x
    if kind == 1:
        x = rng.standard_normal(count).astype(np.float16)
        return x.tobytes(), x.astype(np.float32)
    for _ in range(count // 32):
        scale, least = np.float16(rng.uniform(0.01, 0.1)), np.float16(rng.uniform(-1, 0))
        if kind == 8:
            q = rng.integers(-128, 128, 32)
            out += scale.tobytes() + q.astype(np.int8).tobytes()
            numbers += [float(scale) * int(c) for c in q]
            continue
        q = rng.integers(0, 16, 32)
        out += scale.tobytes() + (least.tobytes() if kind == 3 else b"")
        out += bytes(int(q[i] + 16 * q[i + 16]) for i in range(16))
        numbers += [float(scale) * (int(c) - 8) if kind == 2 else
                    float(scale) * int(c) + float(least) for c in q]
    return out, np.array(numbers, np.float32)


def shapes():
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield "token_embd.weight", (len(TOKENS), WIDTH), 8
    yield "output_norm.weight", (WIDTH,), 0
    for name, shape, kind in (("attn_q", (q, WIDTH), 3), ("attn_k", (kv, WIDTH), 2),
                              ("attn_v", (kv, WIDTH), 1), ("attn_output", (WIDTH, q), 3),
                              ("attn_norm", (WIDTH,), 0), ("ffn_norm", (WIDTH,), 0),
                              ("ffn_gate", (INNER, WIDTH), 3), ("ffn_up", (INNER, WIDTH), 8),
                              ("ffn_down", (WIDTH, INNER), 2)):
        yield "blk.0.%s.weight" % name, shape, kind


META = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 512,
    "llama.embedding_length": WIDTH, "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 5000.0, "llama.rope.dimension_count": HEAD_DIM,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1], "tokenizer.ggml.merges": ["Ġ a"],
    "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "{{ messages }}",
}


def write(path, meta, cut=0):
    """{name: numbers}."""
    rng, head, data, held = np.random.Generator(np.random.PCG64(3)), b"", b"", {}
    for name, shape, kind in shapes():
        part, numbers = blocks_of(kind, rng, int(np.prod(shape)))
        held[name] = numbers.reshape(shape)
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(
            struct.pack("<Q", n) for n in shape[::-1]) + struct.pack("<IQ", kind, len(data))
        data += part + b"\0" * (-len(part) % 32)
    head = (b"GGUF" + struct.pack("<IQQ", 3, len(held), len(meta)) +
            b"".join(text(k) + value(v) for k, v in meta.items()) + head)
    with open(path, "wb") as f:
        f.write(head + b"\0" * (-len(head) % 32) + (data[:-cut] if cut else data))
    return held


# ---- what came out ----

def convert(folder, meta, **how):
    """(status, standard error, the folder that was made, the numbers that went in)."""
    path, out = os.path.join(folder, "in.gguf"), os.path.join(folder, "out")
    held = write(path, meta, **how)
    run = subprocess.run([sys.executable, TOOL, path, out], stderr=subprocess.PIPE, text=True)
    return run.returncode, run.stderr, out, held


def loaded(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def tensors(path):
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, t in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            a, b = (8 + size + x for x in t["data_offsets"])
            bits = np.frombuffer(data[a:b], np.uint16).astype(np.uint32) << 16
            out[name] = bits.view(np.float32).reshape(t["shape"])
    return out


def rotate_neighbours(x, angle):
    """RoPE on a head as GGUF has it: channels 2i and 2i + 1 turn together."""
    a, b = x[0::2], x[1::2]
    out = np.empty_like(x)
    out[0::2] = a * np.cos(angle) - b * np.sin(angle)
    out[1::2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def rotate_halves(x, angle):
    a, b = np.split(x, 2)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle),
                           b * np.cos(angle) + a * np.sin(angle)])


def check_weights(found, held):
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm",
             "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
             "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
             "blk.0.attn_norm": "model.layers.0.input_layernorm",
             "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
             "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
             "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
             "blk.0.ffn_down": "model.layers.0.mlp.down_proj"}
    check("11 tensors", len(found) == len(held) == 11)
    for name, hf in names.items():
        x, y = held[name + ".weight"], found[hf + ".weight"]
        # Rounded to bf16: half a unit of the 8th bit.
        check(name, x.shape == y.shape and (abs(x - y) <= abs(x) * 2.0 ** -8).all())
    # Dot products of rotated queries and keys are the same either way.
    rng = np.random.Generator(np.random.PCG64(5))
    x = rng.standard_normal(WIDTH).astype(np.float32)
    angle = 0.7 ** np.arange(HEAD_DIM // 2)
    q, k = (found["model.layers.0.self_attn.%s_proj.weight" % c] @ x for c in "qk")
    q0, k0 = (held["blk.0.attn_%s.weight" % c] @ x for c in "qk")
    for head in range(HEADS):
        a, b = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM), slice(
            head // 2 * HEAD_DIM, (head // 2 + 1) * HEAD_DIM)
        here = rotate_halves(q[a], 3 * angle) @ rotate_halves(k[b], angle)
        there = rotate_neighbours(q0[a], 3 * angle) @ rotate_neighbours(k0[b], angle)
        size = np.linalg.norm(q0[a]) * np.linalg.norm(k0[b])
        check("head %d turns alike" % head, abs(here - there) < 0.01 * size)


def main():
    with tempfile.TemporaryDirectory() as folder:
        status, _, out, held = convert(folder, META)
        check("it ends with 0", status == 0)
        check_weights(tensors(os.path.join(out, "model.safetensors")), held)
        config = loaded(os.path.join(out, "config.json"))
        check("the shape", (config["num_attention_heads"], config["num_key_value_heads"],
                            config["head_dim"], config["vocab_size"], config["rope_theta"]) ==
              (HEADS, KV_HEADS, HEAD_DIM, len(TOKENS), 5000.0))
        check("embeddings are tied", config["tie_word_embeddings"])
        tokenizer = loaded(os.path.join(out, "tokenizer.json"))
        check("tokens", tokenizer["model"]["vocab"] == {t: i for i, t in enumerate(TOKENS)})
        check("one added token", [t["content"] for t in tokenizer["added_tokens"]] == TOKENS[:1])
        check("digits stand alone", r"\p{N}" in json.dumps(
            tokenizer["pre_tokenizer"]).replace("\\\\", "\\"))
        check("the chat template", loaded(os.path.join(out, "tokenizer_config.json"))[
            "chat_template"] == "{{ messages }}")
    for name, change, says in (("another model", {"general.architecture": "mamba"}, "mamba"),
                               ("another tokenizer", {"tokenizer.ggml.pre": "other"}, "other"),
                               ("scaled RoPE", {"llama.rope.scaling.type": "yarn"}, "RoPE")):
        with tempfile.TemporaryDirectory() as folder:
            status, said, out, _ = convert(folder, dict(META, **change))
            check(name + " is refused", status == 1 and says in said and not os.path.exists(out))
    with tempfile.TemporaryDirectory() as folder:
        status, said, out, _ = convert(folder, META, cut=64)
        check("a file that is cut short", status == 1 and "cut short" in said)
        check("nothing is left of it", sorted(os.listdir(folder)) == ["in.gguf"])
    print("%d checks, %d failed" % (len(CHECKS), CHECKS.count(False)))
    return CHECKS.count(False) > 0


if __name__ == "__main__":
    sys.exit(main())
