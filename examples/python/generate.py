#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A long document and a question, in Transformers: dense attention, then kvferry with a budget.

Needs torch and Transformers 5.16 or newer, and a model as a Hugging Face directory; `./dev python --run
examples/python/generate.py` has them. The document is read by the model once per way; then it
answers, token by token.

usage: generate.py [MODEL_FOLDER [DOCUMENT [QUESTION]]]
"""
import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

import kvferry.hf

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
FOLDER = sys.argv[1] if len(sys.argv) > 1 else os.environ["KVF_HF_MODEL"]
DOCUMENTS = sys.argv[2:3] or [os.path.join(TOP, name) for name in (
    "ARCHITECTURE.md", "docs/design/gpu.md", "docs/design/disk.md")]
QUESTION = sys.argv[3] if len(sys.argv) > 3 else "What is a page? Answer in one sentence."
TOKENS, NEW = 4096, 48
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__annotations__ else "past_key_values" # before 5.24

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="kvferry").eval()
document = ""
for path in DOCUMENTS:
    with open(path) as text:
        document += text.read()
document = tokenizer.decode(tokenizer(document).input_ids[:TOKENS])
chat = [{"role": "user", "content": document + "\n\n" + QUESTION}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt",
                                       return_dict=True)
length = prompt.input_ids.shape[1]


class Pace:
    """Of `generate`: when tokens came. The prompt itself is the first that does."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        first, last = self.times[1], self.times[-1]
        self.ms = 1000 * (last - first) / max(len(self.times) - 2, 1)


def answer(name, cache):
    pace = Pace()
    with torch.no_grad():
        ids = model.generate(**prompt, **{CACHE: cache}, max_new_tokens=NEW, do_sample=False,
                             streamer=pace)
    print("%s: %s" % (name, tokenizer.decode(ids[0, length:], skip_special_tokens=True).strip()))
    return pace.ms


dense = DynamicCache(config=model.config)
ms = answer("dense", dense)
held = sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)
print("  %d tokens, %.1f ms a token, %.1f MB of keys and values, all of them read in each step\n" % (
    length, ms, held / 1e6))

cache = kvferry.hf.Cache(model, budget=512, tokens_max=length + NEW)
ms = answer("kvferry", cache)
stats = cache.stats()
heads = model.config.num_key_value_heads
attended = stats["tokens_attended"] / stats["steps"] / heads
print("  %d tokens, %.1f ms a token, %.1f MB in host memory and %.1f MB of digests; %.0f tokens attended "
      "per step" % (length, ms, stats["host_kv_bytes"] / 1e6, stats["device_digest_bytes"] / 1e6,
                    attended))
assert attended <= 512
