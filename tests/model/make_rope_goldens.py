#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write goldens/rope.txt: rotary frequencies of HF Transformers for small configurations.

usage: make_rope_goldens.py          needs torch and transformers, no network

Per case three lines: the text of config.json, attention scaling, the inverse frequencies.
"""
import json
import os
import sys

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = os.path.dirname(os.path.abspath(__file__))


def base(architecture, head_dim, **fields):
    config = {
        "architectures": [architecture], "vocab_size": 1000, "hidden_size": 4 * head_dim,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": head_dim, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    }
    config.update(fields)
    return config


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

CASES = [
    base("LlamaForCausalLM", 128),
    base("LlamaForCausalLM", 80, rope_theta=10000.0),
    base("LlamaForCausalLM", 96, rope_theta=1e8),
    base("LlamaForCausalLM", 64, rope_theta=1e5, rope_scaling={"rope_type": "default"}),
    base("LlamaForCausalLM", 256, rope_theta=5e4, rope_scaling={"type": "linear", "factor": 4.0}),
    base("LlamaForCausalLM", 128, rope_theta=5e5, max_position_embeddings=131072,
         rope_scaling=LLAMA3),
    base("LlamaForCausalLM", 64, rope_theta=5e5, max_position_embeddings=131072,
         rope_scaling=dict(LLAMA3, factor=32.0)),
    base("LlamaForCausalLM", 80, max_position_embeddings=131072,
         rope_parameters=dict(LLAMA3, rope_theta=5e5, low_freq_factor=0.5, high_freq_factor=3.0)),
    base("MistralForCausalLM", 128, rope_theta=1e8, sliding_window=None),
    base("Qwen2ForCausalLM", 128, rope_theta=1e6),
    base("Qwen2ForCausalLM", 128, rope_theta=1e6, rope_scaling=dict(YARN, type="yarn")),
    base("Qwen3ForCausalLM", 128, rope_theta=1e6, max_position_embeddings=40960, rope_scaling=YARN),
    base("Qwen3ForCausalLM", 128, max_position_embeddings=131072,
         rope_parameters=dict(YARN, rope_theta=5e6, factor=16.0)),
    base("LlamaForCausalLM", 96, rope_theta=1e6,
         rope_scaling=dict(YARN, attention_factor=0.8, beta_fast=24.0, beta_slow=2.0)),
    base("LlamaForCausalLM", 64, rope_theta=1e4,
         rope_scaling=dict(YARN, factor=40.0, mscale=0.707, mscale_all_dim=1.0,
                           original_max_position_embeddings=4096)),
    base("LlamaForCausalLM", 80, rope_theta=1e4,
         rope_scaling=dict(YARN, truncate=False, original_max_position_embeddings=2048)),
    base("LlamaForCausalLM", 64, rope_theta=1e6, max_position_embeddings=131072,
         rope_scaling=dict(YARN, factor=None, beta_fast=None, beta_slow=None)),
    base("LlamaForCausalLM", 128, rope_theta=1e4, max_position_embeddings=2048,
         rope_scaling={"rope_type": "yarn", "factor": 1.0}),
    base("LlamaForCausalLM", 64, rope_theta=2.0, max_position_embeddings=2048,
         rope_scaling={"rope_type": "yarn", "factor": 2.0}),
]


def frequencies(fields):
    classes = {"Llama": transformers.LlamaConfig, "Mistral": transformers.MistralConfig,
               "Qwen2": transformers.Qwen2Config, "Qwen3": transformers.Qwen3Config}
    family = fields["architectures"][0].removesuffix("ForCausalLM")
    copy = json.loads(json.dumps(fields))
    config = classes[family](**copy)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        dim = config.head_dim
        base_theta = config.rope_parameters["rope_theta"]
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float) / dim
        return 1.0 / (base_theta ** exponent), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def main():
    path = os.path.join(HERE, "goldens", "rope.txt")
    with open(path, "w", encoding="utf-8") as out:
        out.write("# Made by make_rope_goldens.py with torch %s, transformers %s. Per case: config, "
                  "attention scaling, inverse frequencies.\n"
                  % (torch.__version__, transformers.__version__))
        for fields in CASES:
            inv_freq, scaling = frequencies(fields)
            out.write(json.dumps(fields) + "\n%.9g\n" % scaling)
            out.write(" ".join("%.9g" % x for x in inv_freq.tolist()) + "\n")
    print("wrote %s: %d cases, %d bytes" % (path, len(CASES), os.path.getsize(path)))


if __name__ == "__main__":
    sys.exit(main())
