#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`kvferry run` on small GGUF files that are made here, against a forward pass in NumPy that follows
the format's own conventions: RoPE turns neighbouring channels, and rows of query and key weights
lie in that order.

usage: check_gguf.py KVFERRY [cuda]

One model is of many types of tensors and becomes bf16: as in tests/model/test_logits.c, its logits
may be off by 2e-2 of their norm. The other is F32, of which only the order of sums is another: 1e-4.
Then: the tokenizer, the chat template, and what widened weights take.

With `cuda` all of it on that device, and the model of many types says there what it says on the host.
"""
import json
import os
import struct
import sys
import tempfile

import numpy as np

from checks import check, command, ended, read

KVFERRY = sys.argv[1]
ON_CUDA = sys.argv[2:] == ["cuda"]
HEADS, KV_HEADS, WIDTH, INNER, LAYERS = 4, 2, 256, 96, 2
TOKENS = ["<|end|>", "a", "b", "Ġ", "Ġa", "1", "<|im_start|>", "<|im_end|>", "Ċ", "u", "s", "e", "r", "i", "t", "n"]
IDS = [1, 4, 2, 5, 5, 3, 1, 2, 4, 1, 5, 2, 3, 3, 1, 4, 5, 1, 2, 2, 4, 3, 1, 5]
CHAT = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
        "{% endfor %}")


# ---- a file ----

def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(v):
    """A value after its type."""
    if isinstance(v, str):
        return struct.pack("<I", 8) + text(v)
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    inner = [value(x) for x in v]
    kind = struct.pack("<I", 5) if isinstance(v[0], int) else inner[0][:4]
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(v)) + b"".join(x[4:] for x in inner)


def blocks_of(kind, rng, count):
    """(bytes, the numbers they stand for), by the definition of each type, number by number."""
    out, numbers = b"", []
    if kind == 0:
        x = (rng.standard_normal(count) / 8).astype(np.float32)
        return x.tobytes(), x
    if kind == 1:
        x = (rng.standard_normal(count) / 8).astype(np.float16)
        return x.tobytes(), x.astype(np.float32)
    for _ in range(count // 32):
        scale, least = np.float16(rng.uniform(0.005, 0.02)), np.float16(rng.uniform(-0.2, -0.1))
        if kind == 8:
            q = rng.integers(-16, 17, 32)
            out += scale.tobytes() + q.astype(np.int8).tobytes()
            numbers += [float(scale) * int(c) for c in q]
            continue
        q = rng.integers(0, 16, 32)
        out += scale.tobytes() + (least.tobytes() if kind == 3 else b"")
        out += bytes(int(q[i] + 16 * q[i + 16]) for i in range(16))
        numbers += [float(scale) * (int(c) - 8) if kind == 2 else
                    float(scale) * int(c) + float(least) for c in q]
    return out, np.array(numbers, np.float32)


class Model:
    def __init__(self, head_dim, mixed, factors, last_norm=0):
        self.head_dim, self.mixed, self.factors, self.held = head_dim, mixed, factors, {}
        self.last_norm = last_norm
        self.meta = {
            "general.architecture": "llama", "llama.block_count": LAYERS, "llama.context_length": 512,
            "llama.embedding_length": WIDTH, "llama.feed_forward_length": INNER,
            "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.key_length": head_dim, "llama.attention.value_length": head_dim,
            "llama.rope.freq_base": 5000.0, "llama.rope.dimension_count": head_dim,
            "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1],
            "tokenizer.ggml.merges": ["Ġ a"], "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": CHAT}

    def shapes(self):
        q, kv = HEADS * self.head_dim, KV_HEADS * self.head_dim
        yield "token_embd.weight", (len(TOKENS), WIDTH), 8
        yield "output_norm.weight", (WIDTH,), self.last_norm
        if self.factors:
            yield "rope_freqs.weight", (self.head_dim // 2,), 0
        for layer in range(LAYERS):
            for name, shape, kind in (
                    ("attn_q", (q, WIDTH), 8), ("attn_k", (kv, WIDTH), 2), ("attn_v", (kv, WIDTH), 1),
                    ("attn_output", (WIDTH, q), 3), ("attn_norm", (WIDTH,), 0),
                    ("ffn_norm", (WIDTH,), 0), ("ffn_gate", (INNER, WIDTH), 3),
                    ("ffn_up", (INNER, WIDTH), 8), ("ffn_down", (WIDTH, INNER), 2)):
                yield "blk.%d.%s.weight" % (layer, name), shape, kind if self.mixed else 0

    def file(self, **changes):
        """The bytes of the file."""
        rng = np.random.Generator(np.random.PCG64(3))
        tensors, data = b"", b""
        shapes = list(self.shapes())
        for name, shape, kind in shapes:
            kind = kind if self.mixed or len(shape) == 1 else 0
            part, numbers = blocks_of(kind, rng, int(np.prod(shape)))
            if len(shape) == 1 and kind == 0:  # norms, and divisors of RoPE
                numbers = (1.0 + abs(numbers)).astype(np.float32)
                part = numbers.tobytes()
            self.held[name] = numbers.reshape(shape)
            tensors += text(name) + struct.pack("<I", len(shape)) + b"".join(
                struct.pack("<Q", n) for n in shape[::-1]) + struct.pack("<IQ", kind, len(data))
            data += part + b"\0" * (-len(part) % 32)
        meta = dict(self.meta, **changes)
        head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(meta)) + b"".join(
            text(k) + value(v) for k, v in meta.items()) + tensors
        return head + b"\0" * (-len(head) % 32) + data


# ---- the forward pass ----

def to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def turn(x, angle):
    """x [tokens, heads, head_dim]: channels 2i and 2i + 1 turn together."""
    out, cos, sin = np.empty_like(x), np.cos(angle)[:, None], np.sin(angle)[:, None]
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
    return out


def gated(y, gate, up, down):
    y, up = y @ gate.T, y @ up.T
    return (y / (1 + np.exp(-y)) * up) @ down.T


def logits(model, ids):
    """Logits of the last token."""
    d, n = model.head_dim, len(ids)
    held = {k: (to_bf16(v) if model.mixed and v.ndim == 2 else v).astype(np.float64) for k, v in model.held.items()}
    angle = np.arange(n)[:, None] * 5000.0 ** (-np.arange(d // 2) * 2.0 / d)
    if model.factors:
        angle = angle / held["rope_freqs.weight"]
    x = held["token_embd.weight"][ids]
    for layer in range(LAYERS):
        w = {k.split(".")[2]: v for k, v in held.items() if k.startswith("blk.%d." % layer)}
        y = norm(x, w["attn_norm"])
        q = (y @ w["attn_q"].T).reshape(n, HEADS, d)
        k = (y @ w["attn_k"].T).reshape(n, KV_HEADS, d)
        q, k = turn(q, angle), turn(k, angle)
        v = (y @ w["attn_v"].T).reshape(n, KV_HEADS, d)
        out = np.empty((n, HEADS, d))
        for h in range(HEADS):
            s = q[:, h] @ k[:, h * KV_HEADS // HEADS].T / np.sqrt(d)
            s = np.where(np.tri(n, dtype=bool), s, -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h * KV_HEADS // HEADS]
        x = x + out.reshape(n, HEADS * d) @ w["attn_output"].T
        x = x + gated(norm(x, w["ffn_norm"]), w["ffn_gate"], w["ffn_up"], w["ffn_down"])
    return held["token_embd.weight"] @ norm(x, held["output_norm.weight"])[-1]


# ---- the command ----

def write(folder, name, data):
    path = os.path.join(folder, name)
    with open(path, "wb") as f:
        f.write(data)
    return path


def run(path, *arguments):
    device = ["--device", "cuda"] if ON_CUDA else [] # the last --device counts
    return command(KVFERRY, "run", "--model", path, "--select", "full", *device, *arguments)


def run_ids(folder, path):
    """The run, and the logits after the prompt."""
    ids = write(folder, "ids", " ".join(map(str, IDS)).encode())
    dump = os.path.join(folder, "logits")
    done = run(path, "--token-ids", ids, "-n", "1", "--dump-logits", dump, "--stats",
               os.path.join(folder, "stats"))
    return done, np.fromfile(dump, np.float32)[:len(TOKENS)] if done.returncode == 0 else None


def check_logits(folder, model, name, most):
    done, got = run_ids(folder, write(folder, "model.gguf", model.file()))
    check(name + " runs: " + done.stderr, done.returncode == 0)
    if got is not None:
        want = logits(model, IDS)
        off = np.linalg.norm(got - want) / np.linalg.norm(want)
        print("%s: logits are off by %.1e" % (name, off))
        check(name + ": logits", off < most)
    return done, got


def check_widened(folder, done):
    """Blocks are widened to bf16 when a file is opened, and the command says what that takes."""
    stats = json.loads(read(os.path.join(folder, "stats")))
    size = os.path.getsize(os.path.join(folder, "model.gguf"))
    check("weights take %d bytes, the file %d" % (stats["weight_bytes"], size),
          size < stats["weight_bytes"] < 4 * size)
    check("that is said: " + done.stderr, "some weights are widened: " in done.stderr)


def check_text(folder, model):
    path = write(folder, "model.gguf", model.file())
    plain = run(path, "--prompt", "ab a11", "-n", "1", "--dump-logits", os.path.join(folder, "x"))
    check("a prompt as text: " + plain.stderr, plain.returncode == 0)
    got = np.fromfile(os.path.join(folder, "x"), np.float32)[:len(TOKENS)]
    ids = [1, 2, 4, 5, 5]
    check("its ids", np.linalg.norm(got - logits(model, ids)) < 0.02 * np.linalg.norm(got))
    chat = run(path, "--chat", "--prompt", "ab", "-n", "1", "--dump-logits", os.path.join(folder, "y"))
    check("a chat in the format of the file's template: " + chat.stderr, chat.returncode == 0)
    got = np.fromfile(os.path.join(folder, "y"), np.float32)[:len(TOKENS)]
    ids = [6, 9, 10, 11, 12, 8, 1, 2, 7, 8, 6, 1, 10, 10, 13, 10, 14, 1, 15, 14, 8]
    check("its ids", np.linalg.norm(got - logits(model, ids)) < 0.02 * np.linalg.norm(got))


def check_tokenizer(folder, model):
    """Refusals of a file are in tests/model/gguf.refusals."""
    path = write(folder, "model.gguf", model.file(**{"tokenizer.ggml.model": "t5"}))
    done, got = run_ids(folder, path)
    check("ids go in where the tokenizer is another: " + done.stderr, got is not None and "ids are printed" in done.stderr)


def check_tokens(folder):
    """The device says what the host says."""
    said = []
    for device in ("host", "cuda"):
        name = os.path.join(folder, device)
        done = run(os.path.join(folder, "model.gguf"), "--token-ids", os.path.join(folder, "ids"),
                   "-n", "8", "--ignore-eos", "--device", device, "--emit-ids", name)
        check("tokens on %s: %s" % (device, done.stderr), done.returncode == 0)
        said.append(read(name).split())
    check("the same tokens on both: %s" % said, said[0] == said[1] and len(said[0]) == 8)


def main():
    mixed, plain = Model(32, True, False), Model(64, False, True)
    with tempfile.TemporaryDirectory() as folder:
        done, _ = check_logits(folder, mixed, "head_dim 32, many types", 2e-2)
        check_widened(folder, done)
        if ON_CUDA:
            check_tokens(folder)
        done, _ = check_logits(folder, plain, "head_dim 64, F32, factors of RoPE", 1e-4)
        check("nothing is widened", "widened" not in done.stderr)
        done, _ = check_logits(folder, Model(32, False, False, last_norm=8), "F32, a norm of Q8_0", 1e-4)
        check("a widened norm is noted: " + done.stderr,
              "some weights are widened: 272 B of the file take 1.00 KiB" in done.stderr)
        check_text(folder, mixed)
        check_tokenizer(folder, mixed)
    return ended()


if __name__ == "__main__":
    sys.exit(main())
