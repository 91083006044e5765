#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write goldens/rope.txt anew: rotary frequencies of HF Transformers for its small configurations.

usage: make_rope_goldens.py          needs torch and transformers, no network

Per case three lines: the text of config.json, which is changed or added there, attention scaling, the
inverse frequencies.
"""
import json
import os
import sys

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "goldens", "rope.txt")


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
    with open(PATH, encoding="utf-8") as f:
        cases = [json.loads(line) for line in f if line.startswith("{")]
    with open(PATH, "w", encoding="utf-8") as out:
        out.write("# Made by make_rope_goldens.py with torch %s, transformers %s. Per case: config, "
                  "attention scaling, inverse frequencies.\n"
                  % (torch.__version__, transformers.__version__))
        for fields in cases:
            inv_freq, scaling = frequencies(fields)
            out.write(json.dumps(fields) + "\n%.9g\n" % scaling)
            out.write(" ".join("%.9g" % x for x in inv_freq.tolist()) + "\n")
    print("wrote %s: %d cases, %d bytes" % (PATH, len(cases), os.path.getsize(PATH)))


if __name__ == "__main__":
    sys.exit(main())
