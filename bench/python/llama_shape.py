# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of the shape of Llama-3.1-8B, 4 layers of it and a vocabulary of 8,192, with random weights in Q4_0.

usage: llama_shape.py SOURCE OUT.gguf [LAYERS]     (SOURCE: llama.cpp's tree, for its gguf-py; under a Python with NumPy)

Blocks are drawn as they are stored, so that nothing is converted: 0.5 GB in seconds. It has no tokenizer.
"""
import os
import sys

import numpy as np

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 4, 4096, 14336, 32, 8, 128, 8192
BLOCK, SCALE = 32, 0.004 # numbers of a block; weights have a deviation of 4.6 scales


def drawn(random, rows, columns):
    """A matrix of Q4_0: of each block a scale in fp16, and 16 bytes."""
    blocks = np.empty((rows, columns // BLOCK, 2 + BLOCK // 2), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(SCALE).tobytes(), np.uint8)
    blocks[..., 2:] = random.integers(0, 256, (rows, columns // BLOCK, BLOCK // 2), np.uint8)
    return blocks.reshape(rows, -1)


def main():
    source, path, *more = sys.argv[1:]
    layers = int(more[0]) if more else LAYERS
    sys.path.insert(0, os.path.join(source, "gguf-py"))
    import gguf
    random, out = np.random.default_rng(1), gguf.GGUFWriter(path, "llama")
    out.add_block_count(layers)
    out.add_context_length(1 << 18)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(DIM)
    out.add_rope_freq_base(500000.0)
    out.add_vocab_size(VOCABULARY)
    out.add_tokenizer_model("none")

    def matrix(name, rows, columns):
        out.add_tensor(name + ".weight", drawn(random, rows, columns), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    matrix("token_embd", VOCABULARY, WIDTH)
    matrix("output", VOCABULARY, WIDTH)
    out.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(layers):
        name = "blk.%d." % layer
        for norm in ("attn_norm", "ffn_norm"):
            out.add_tensor(name + norm + ".weight", np.ones(WIDTH, np.float32))
        matrix(name + "attn_q", HEADS * DIM, WIDTH)
        matrix(name + "attn_k", KV_HEADS * DIM, WIDTH)
        matrix(name + "attn_v", KV_HEADS * DIM, WIDTH)
        matrix(name + "attn_output", WIDTH, HEADS * DIM)
        matrix(name + "ffn_gate", INNER, WIDTH)
        matrix(name + "ffn_up", INNER, WIDTH)
        matrix(name + "ffn_down", WIDTH, INNER)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    main()
