#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a model of random weights with the shape of a real one, for timing.

usage: random_model.py DIR [--shape llama-3.1-8b] [--layers N]

Writes config.json and model.safetensors in bf16; there is no tokenizer, so prompts are token ids
(`kvferry run --token-ids`). Weights are normal with deviation 1/sqrt(inputs), taken from one block of
random numbers again and again from different offsets: right for timing, meaningless otherwise. Needs
nothing beyond Python.
"""
import argparse
import array
import json
import os
import random
import struct
import sys

SHAPES = {
    "llama-3.1-8b": dict(hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, head_dim=128,
                         vocabulary=128256),
    "small": dict(hidden=512, inner=1408, layers=4, heads=8, kv_heads=2, head_dim=64, vocabulary=4096),
}
BLOCK = 1 << 20


def bf16_block(seed):
    """BLOCK normal numbers with deviation 1, as the upper halves of floats."""
    r = random.Random(seed)
    numbers = array.array("f", (r.gauss(0.0, 1.0) for _ in range(BLOCK)))
    return [b >> 16 for b in struct.unpack("<%dI" % BLOCK, numbers.tobytes())]


def scaled(block, power):
    """The block times 2^-power: bf16 has its exponent in bits 7 to 14."""
    return array.array("H", ((b - (power << 7)) & 0xffff if (b >> 7 & 0xff) > power else 0
                             for b in block)).tobytes()


def tensors(s):
    hidden, inner, q, kv = s["hidden"], s["inner"], s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    yield "model.embed_tokens.weight", (s["vocabulary"], hidden)
    for layer in range(s["layers"]):
        p = "model.layers.%d." % layer
        yield p + "input_layernorm.weight", (hidden,)
        yield p + "post_attention_layernorm.weight", (hidden,)
        yield p + "self_attn.q_proj.weight", (q, hidden)
        yield p + "self_attn.k_proj.weight", (kv, hidden)
        yield p + "self_attn.v_proj.weight", (kv, hidden)
        yield p + "self_attn.o_proj.weight", (hidden, q)
        yield p + "mlp.gate_proj.weight", (inner, hidden)
        yield p + "mlp.up_proj.weight", (inner, hidden)
        yield p + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (s["vocabulary"], hidden)


def write_tensor(f, shape, blocks, offset):
    """One tensor from the block of its scale, cyclically from an offset. Returns the next offset."""
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    if len(shape) == 1:
        f.write(struct.pack("<H", 0x3f80) * count)  # norms are 1
        return offset
    power = (shape[1].bit_length() - 1) // 2
    block = blocks[power]
    while count > 0:
        take = min(count, BLOCK - offset)
        f.write(block[2 * offset:2 * (offset + take)])
        count -= take
        offset = (offset + take) % BLOCK
    return (offset + 4099) % BLOCK


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    s = dict(SHAPES[a.shape])
    s["layers"] = a.layers or s["layers"]
    os.makedirs(a.directory, exist_ok=True)
    with open(os.path.join(a.directory, "config.json"), "w", encoding="utf-8") as f:
        json.dump({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "hidden_size": s["hidden"], "intermediate_size": s["inner"],
            "num_hidden_layers": s["layers"], "num_attention_heads": s["heads"],
            "num_key_value_heads": s["kv_heads"], "head_dim": s["head_dim"],
            "vocab_size": s["vocabulary"], "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2}, f, indent=1)
    header, at = {}, 0
    for name, shape in tensors(s):
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = bf16_block(a.seed)
    powers = {(shape[1].bit_length() - 1) // 2 for _, shape in tensors(s) if len(shape) > 1}
    blocks = {p: scaled(numbers, p) for p in powers}
    offset = 0
    with open(os.path.join(a.directory, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, shape in tensors(s):
            offset = write_tensor(f, shape, blocks, offset)
    print("%s: %.2f GiB in %s" % (a.shape, at / 2 ** 30, a.directory))


if __name__ == "__main__":
    sys.exit(main())
