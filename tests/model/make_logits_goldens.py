#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Logits of HF Transformers for small random models of every family, and for the recall model.

Reads goldens/logits/NAME/config.json and writes goldens/logits/NAME.f32. The weights are not stored: a
tensor's numbers follow from its name (see `numbers`), and random_model.c makes the same ones in C.

A golden is float32, little endian, [STEPS + 1, ceil(vocab / STRIDE)]: the logits of every
STRIDE-th token after the prompt and after each of STEPS given tokens. NAME.f32 is computed in the
model's own type, NAME.exact.f32 from the same weights in fp32: in bf16 HF rounds after every
operation, and single rows of a trained model are then off by more than the runner is.
`versions.json` records what made them. Needs torch, numpy and transformers; the tests do not.

  make_logits_goldens.py              everything
  make_logits_goldens.py NAME ...     these models
  make_logits_goldens.py recall       only the recall model, after its weights changed
"""
import glob
import json
import os
import sys
import tempfile

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "goldens", "logits")
RECALL = os.path.join(HERE, "..", "..", "examples", "recall")
PROMPT, STEPS = 100, 64
RECALL_PROMPT = 300
STRIDE, RECALL_STRIDE = 5, 16
MASK = (1 << 64) - 1
GOLDEN_RATIO = 0x9E3779B97F4A7C15
# Original lengths of rotary scalings are short, so that scaling shows within the prompt.
MODELS = {}
for _path in sorted(glob.glob(os.path.join(OUT, "*", "config.json"))):
    with open(_path) as _f:
        MODELS[os.path.basename(os.path.dirname(_path))] = json.load(_f)


def stream(name, count):
    """splitmix64, seeded with FNV-1a of the name."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & MASK
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN_RATIO)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def numbers(name, shape, fine):
    """Values that are exact in the model's type; `fine` uses the 24 bits that fp32 has."""
    z = stream(name, int(np.prod(shape)))
    if name.endswith("norm.weight"):
        values = 1.0 + ((z >> np.uint64(57)).astype(np.float64) - 64.0) / 128.0
    else:
        if fine:
            values = (z >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
        else:
            values = (z >> np.uint64(56)).astype(np.float64) / 128.0 - 1.0
        scale = 1.0
        if name.endswith("bias"):
            scale = 0.5
        elif "embed_tokens" not in name:
            while scale * scale * shape[1] > 3.0:
                scale /= 2.0
        values *= scale
    return torch.from_numpy(values.reshape(shape).astype(np.float32))


def write_random_model(config, folder):
    """As a Hugging Face directory: `to(dtype)` in memory would round the rotary frequencies too."""
    dtype = getattr(torch, config["torch_dtype"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            exact = numbers(name, tuple(parameter.shape), dtype == torch.float32)
            parameter.copy_(exact)
            assert torch.equal(parameter.float(), exact), name
    model.save_pretrained(folder)


def load(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    assert all(b.dtype == torch.float32 for n, b in model.named_buffers() if "inv_freq" in n)
    return model


@torch.inference_mode()
def logits(model, ids, prompt, stride):
    """Rows after the prompt and after every later id, decoded one by one with HF's cache."""
    out = model(torch.tensor([ids[:prompt]]), use_cache=True, logits_to_keep=1)
    rows = [out.logits[0, -1]]
    for token in ids[prompt:]:
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows).float()[:, ::stride].numpy().astype("<f4")


def make_goldens(name, folder, ids, prompt, stride):
    for suffix, dtype in ((".f32", "auto"), (".exact.f32", torch.float32)):
        rows = logits(load(folder, dtype), ids, prompt, stride)
        rows.tofile(os.path.join(OUT, name + suffix))
        if dtype == "auto":
            own = rows
    row = max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(own, rows))
    whole = np.linalg.norm(own - rows) / np.linalg.norm(rows)
    print(f"{name}: mean |logit| {np.abs(rows).mean():.2f}; HF's own rounding {whole:.1e}, "
          f"worst row {row:.1e}")


def make_random(names):
    for name, config in MODELS.items():
        if name not in names:
            continue
        ids = [int(z % config["vocab_size"]) for z in stream("ids", PROMPT + STEPS)]
        with tempfile.TemporaryDirectory() as folder:
            write_random_model(config, folder)
            make_goldens(name, folder, ids, PROMPT, STRIDE)


def make_recall():
    sys.path.insert(0, RECALL)
    import generate as gen
    folder = os.path.join(RECALL, "model")
    with open(os.path.join(folder, "tokenizer.json")) as f:
        vocabulary = json.load(f)["model"]["vocab"]
    rng = gen.Rng(3)
    words, table, _ = gen.make_document(rng, RECALL_PROMPT, 8)
    for fact in rng.sample(table, 8):
        words += gen.question_words(fact) + [fact[2], fact[3], "."]
    ids = [vocabulary[word] for word in words][:RECALL_PROMPT + STEPS]
    assert len(ids) == RECALL_PROMPT + STEPS
    make_goldens("recall", folder, ids, RECALL_PROMPT, RECALL_STRIDE)
    with open(os.path.join(OUT, "recall.ids"), "w") as f:
        f.write(" ".join(map(str, ids)) + "\n")


def main():
    torch.manual_seed(0)
    only = sys.argv[1:]
    make_random(only if only and "random" not in only else MODELS)
    if not only or "recall" in only:
        make_recall()
    with open(os.path.join(OUT, "versions.json"), "w") as f:
        json.dump({"torch": torch.__version__, "transformers": transformers.__version__,
                   "numpy": np.__version__, "python": sys.version.split()[0]}, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
