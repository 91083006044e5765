#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`kvferry score` on the recall model against a forward pass that is written anew here in NumPy.

usage: check_score.py KVFERRY RECALL_MODEL

With `--select full` every loss has to be that of dense attention over prompt and text at once. With
`--select streaming` each token of the text sees the first tokens and the newest ones only. The
weights go to the command in fp32, so that nothing is rounded to bf16 on the way: both sides differ
by the order of their sums alone, 1e-4 of a loss here; the bounds leave room for a factor of 20.
"""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

import numpy as np

KVFERRY, MODEL = sys.argv[1], sys.argv[2]
EACH, MEAN = 0.002, 0.0005
CHECKS = []


def check(name, fine):
    CHECKS.append(bool(fine))
    if not fine:
        print("not ok: " + name)


# ---- the model ----

def load():
    with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    with open(os.path.join(MODEL, "model.safetensors"), "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    weights = {}
    for name, t in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        a, b = (8 + size + x for x in t["data_offsets"])
        bits = np.frombuffer(data[a:b], np.uint16).astype(np.uint32) << 16
        weights[name] = bits.view(np.float32).reshape(t["shape"])
    with open(os.path.join(MODEL, "tokenizer.json"), encoding="utf-8") as f:
        return config, weights, json.load(f)["model"]["vocab"]


def write_fp32(folder, config, weights):
    """The same model, its weights in fp32."""
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(dict(config, torch_dtype="float32"), f)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(os.path.join(MODEL, name), folder)
    header, at = {}, 0
    for name, w in weights.items():
        header[name] = {"dtype": "F32", "shape": w.shape, "data_offsets": [at, at + w.nbytes]}
        at += w.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for w in weights.values():
            f.write(w.tobytes())


def norm(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def rotate(x, theta):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = (np.float32(f(angle))[:, None] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def losses(config, w, ids, sees):
    """(loss, whether it is the likeliest) of every token but the first; `sees[i, j]`: whether token i
    attends to token j."""
    n, d = len(ids), config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        def of(name):
            return w["model.layers.%d.%s.weight" % (layer, name)]

        h = norm(x, of("input_layernorm"), config["rms_norm_eps"])
        q, k, v = ((h @ of("self_attn.%s_proj" % c).T).reshape(n, -1, d) for c in "qkv")
        q, k = rotate(q, config["rope_theta"]), rotate(k, config["rope_theta"])
        out = np.empty((n, heads, d), np.float32)
        for head in range(heads):
            g = head * kv_heads // heads
            s = np.where(sees, q[:, head] @ k[:, g].T / np.sqrt(d), -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, g]
        x = x + out.reshape(n, -1) @ of("self_attn.o_proj").T
        h = norm(x, of("post_attention_layernorm"), config["rms_norm_eps"])
        gate = h @ of("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
    logits = norm(x, w["model.norm.weight"], config["rms_norm_eps"]).astype(np.float64)
    logits = logits @ w["model.embed_tokens.weight"].T.astype(np.float64)
    top = logits.max(-1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return total[:-1] - logits[np.arange(n - 1), ids[1:]], logits[:-1].argmax(-1) == ids[1:]


# ---- the command ----

def score(folder, prompt, text, *options):
    """(the JSON object, losses of all tokens, whether each is the likeliest)."""
    for name, words in (("prompt", prompt), ("text", text)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            f.write(" ".join(words))
    stats = os.path.join(folder, "stats")
    run = subprocess.run([KVFERRY, "score", "--model", folder, "--prompt-file",
                          os.path.join(folder, "prompt"), "--text", os.path.join(folder, "text"),
                          "--stats", stats, "--device", "host"] + list(options),
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit("kvferry score ended with %d\n%s" % (run.returncode, run.stderr))
    with open(stats, encoding="utf-8") as f:
        told = json.load(f)
    result = json.loads(run.stdout)
    check("one figure in both", result["loss"] == told["loss"])
    check("as many losses as tokens",
          len(told["tokens"]) == len(text) == result["scored_tokens"] == told["scored_tokens"])
    of_tokens = np.array([t["loss"] for t in told["tokens"]])
    check("the loss is the mean", abs(of_tokens.mean() - result["loss"]) < 1e-6)
    check("tokens are the text", [t["text"].strip() for t in told["tokens"]] == text)
    check("counters are of the text alone", result["decoded_tokens"] == len(text) - 1)
    check("every token but the first has its share of a step's time",
          told["decode_steps"] == len(text) - 1 and told["tpot_ms"]["p50"] > 0)
    return result, of_tokens, np.array([t["likeliest"] for t in told["tokens"]])


def score_answer(folder, ids):
    """Losses of a finished answer to the prompt that was scored last."""
    with open(os.path.join(folder, "answers"), "w", encoding="utf-8") as f:
        json.dump({"id": 1, "ids": ids}, f)
    run = subprocess.run([KVFERRY, "score", "--model", folder, "--prompt-file",
                          os.path.join(folder, "prompt"), "--answers",
                          os.path.join(folder, "answers"), "--logprobs", "0", "--device", "host"],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    check("an answer is scored", run.returncode == 0)
    return -np.array(json.loads(run.stdout)["logprobs"])


def main():
    config, weights, vocab = load()
    words = sorted(vocab, key=vocab.get)[3:]
    rng = np.random.Generator(np.random.PCG64(7))
    prompt = [words[i] for i in rng.integers(len(words), size=300)]
    text = [words[i] for i in rng.integers(len(words), size=50)] + prompt[40:70]
    ids = np.array([vocab[word] for word in prompt + text])
    n, first = len(ids), len(prompt) - 1
    causal = np.tril(np.ones((n, n), bool))
    dense, is_likeliest = (found[first:] for found in losses(config, weights, ids, causal))
    with tempfile.TemporaryDirectory() as folder:
        write_fp32(folder, config, weights)
        result, full, likeliest = score(folder, prompt, text, "--select", "full")
        print("full: %.4f, NumPy %.4f, largest difference %.5f" % (
            result["loss"], dense.mean(), abs(full - dense).max()))
        check("full is dense attention, token by token", abs(full - dense).max() < EACH)
        check("full is dense attention, in the mean", abs(full.mean() - dense.mean()) < MEAN)
        check("the likeliest tokens are those of dense attention",
              0 < likeliest.sum() < len(text) and (likeliest == is_likeliest).all())
        answer = score_answer(folder, [vocab[word] for word in text])
        check("an answer is scored as dense attention", abs(answer - dense).max() < EACH)
        check("and as the text that it is", abs(answer - full).max() < 1e-5)
        _, gather, _ = score(folder, prompt, text, "--select", "full", "--transfer", "gather")
        check("a transfer changes no bit", (gather == full).all())
        _, large, _ = score(folder, prompt, text, "--select", "dynamic", "--budget", "1024")
        check("a budget that holds all is full", abs(large - full).max() < EACH)

        _, few, _ = score(folder, prompt, text, "--select", "streaming", "--budget", "160",
                          "--page-size", "32", "--sink", "4", "--local", "64")
        # The prompt is dense. Step i attends to the first 4 tokens and, so that whole pages fit in
        # the budget of 160, to 32 x p + the window of 64 to 95 tokens that ends with its own: pages
        # are aligned.
        page, sink, local, budget = 32, 4, 64, 160
        sees = causal.copy()
        for i in range(len(prompt), n):
            length = i + 1
            sealed = (length - local) // page
            pages = (budget - sink - (length - sealed * page)) // page
            oldest = max(0, sealed - pages) * page
            sees[i, sink:oldest] = False
        expected = losses(config, weights, ids, sees)[0][first:]
        print("streaming: %.4f, NumPy %.4f, full %.4f, largest difference %.5f" % (
            few.mean(), expected.mean(), dense.mean(), abs(few - expected).max()))
        check("streaming is the mask of streaming", abs(few - expected).max() < EACH)
        check("the first token follows from dense attention", few[0] == full[0])
        check("streaming is not full", abs(few - dense).max() > 0.1)
    print("%d checks, %d failed" % (len(CHECKS), CHECKS.count(False)))
    return CHECKS.count(False) > 0


if __name__ == "__main__":
    sys.exit(main())
