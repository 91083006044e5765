#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Caches of Transformers and of kvferry side by side: time per token, bytes, answers kept.

A real model reads long texts with facts in them (those of the evaluation) and answers questions about
them, once per cache and length: DynamicCache with SDPA, QuantizedCache where a backend of it is
installed, and kvferry. The row of a cache names what it needs a GPU for. Texts are read once per way;
times are of steps only. Contexts longer than the model was made for are random keys and values: time
and bytes do not depend on what they say.

usage: bench_hf.py [--tokens N,N...] [--documents N] [--out FILE]
"""
import argparse
import copy
import os
import statistics
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvferry.hf

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tools"))
import eval_texts  # noqa: E402

STEPS = 8 # of an answer
LIMIT = 8192 # positions that the model was trained on


def caches(model):
    config = model.config
    yield "DynamicCache", lambda length: DynamicCache(config=config), "sdpa"
    for backend, package in (("fp8", "torch"), ("quanto", "optimum.quanto"), ("hqq", "hqq")):
        try:
            __import__(package)
        except ImportError:
            yield "QuantizedCache (%s)" % backend, "needs %s" % package, None
        else:
            yield "QuantizedCache (%s)" % backend, \
                lambda length, backend=backend: transformers.QuantizedCache(backend, config), "sdpa"
    if torch.cuda.is_available():
        yield "DynamicCache(offloading)", lambda length: DynamicCache(config=config, offloading=True), \
            "sdpa"
    else:
        yield "DynamicCache(offloading)", "needs a GPU", None
    for budget in (256, 512, 1024):
        yield "kvferry, budget %d" % budget, lambda length, budget=budget: kvferry.hf.Cache(
            model, budget=budget, tokens_max=length), "kvferry"


def held(cache):
    """Bytes of keys and values that are near, and those in host memory."""
    if isinstance(cache, kvferry.hf.Cache):
        stats = cache.stats()
        return stats["device_kv_bytes"] + stats["device_digest_bytes"], stats["host_kv_bytes"]
    found = [value for layer in cache.layers for value in vars(layer).values()]
    found += [part for value in found if isinstance(value, (tuple, list)) for part in value]
    return sum(value.nbytes for value in found if isinstance(value, torch.Tensor)), 0


def ask(model, tokenizer, cache, length, task):
    """Whether the answer is right, and the times of its steps; the cache is left as it was."""
    ids = torch.tensor([tokenizer(task.text).input_ids])
    said, times = [], []
    paged = isinstance(cache, kvferry.hf.Cache)
    cache = cache if paged else copy.deepcopy(cache) # not all of them can be cropped
    for _ in range(STEPS):
        begun = time.perf_counter()
        logits = model(ids, past_key_values=cache).logits
        times.append(1000 * (time.perf_counter() - begun))
        ids = logits[:, -1:].argmax(-1)
        said.append(int(ids))
    if paged:
        cache.crop(length - cache.get_seq_length())
    return task.is_right(tokenizer.decode(said)), times[1:]


def read(model, cache, ids):
    for first in range(0, len(ids), 512):
        model(torch.tensor([ids[first:first + 512]]), past_key_values=cache, logits_to_keep=1)


def put(cache, layer, k, v):
    """Keys and values without queries, which Transformers has no call for."""
    if not isinstance(cache, kvferry.hf.Cache):
        cache.update(k, v, layer)
        return
    tokens = k.shape[2]
    k, v = (x[0].transpose(0, 1).contiguous() for x in (k, v))
    cache._cache.prefill(cache._rows[0], None, k, v, layer=layer)
    cache._paged[layer].columns += tokens
    if layer == 0:
        cache._columns += tokens
        cache._held[0] += tokens


def fill(model, cache, ids, tokens):
    """A first part of the text, and random keys and values up to so many tokens."""
    config, start = model.config, 512
    read(model, cache, ids[:start])
    generator = torch.Generator().manual_seed(1)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(1, config.num_key_value_heads, tokens - start, config.head_dim,
                            generator=generator) for _ in range(2))
        put(cache, layer, k, v)


def documents(tokenizer, tokens, count):
    """Ids of texts of about so many tokens, and what to ask; one that only fills, where it is too long."""
    made = [eval_texts.Document(eval_texts.MANUALS[i], min(tokens, LIMIT), 2000 + i,
                                eval_texts.CONTINUATION_CHARS) for i in range(count)]
    asked = [(tokenizer(d.text).input_ids[:tokens], [t for t in d.tasks if t.tokens]) for d in made]
    return [(asked[0][0], asked[0][1][:1])] if tokens > LIMIT else asked


def row(model, tokenizer, name, make, tokens, asked):
    times, right, questions = [], 0, 0
    for ids, tasks in asked:
        length = tokens if tokens > LIMIT else len(ids)
        cache = make(length + 64)
        if tokens > LIMIT:
            fill(model, cache, ids, length)
        else:
            read(model, cache, ids)
        for task in tasks:
            is_right, steps = ask(model, tokenizer, cache, length, task)
            times += steps
            right += is_right
        questions += len(tasks)
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return name, tenths[4], tenths[0], tenths[8], *held(cache), right, questions


def run(model, tokenizer, tokens, count):
    asked, rows = documents(tokenizer, tokens, count), []
    for name, make, implementation in caches(model):
        if implementation is None:
            rows.append((name, make))
            continue
        model.set_attn_implementation(implementation)
        rows.append(row(model, tokenizer, name, make, tokens, asked))
        print(tokens, rows[-1], file=sys.stderr)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="4096,16384,65536")
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--out", default=os.path.join(ROOT, "bench", "results", "hf.md"))
    args = parser.parse_args()
    folder = os.environ["KVF_HF_MODEL"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    lines = ["# Caches of Transformers side by side", "",
             "`./dev python --run bench/python/bench_hf.py --tokens %s --documents %d`" % (
                 args.tokens, args.documents), "",
             "SmolLM2-135M-Instruct in fp32 on %d cores of a CPU, torch %s, Transformers %s. Only ratios "
             "within a table" % (os.cpu_count(), torch.__version__, transformers.__version__),
             "mean something. On a CPU near and host memory are the same, so what a GPU saves does not "
             "show. Time: median of", "single steps, and the range from a tenth to nine tenths of "
             "them. Answers: facts that were found, of those hidden in", "the text; the model misses "
             "some with any cache.", ""]
    with torch.no_grad():
        for tokens in map(int, args.tokens.split(",")):
            rows = run(model, tokenizer, tokens, args.documents)
            base = rows[0][1]
            lines += ["## %d tokens" % tokens, ""]
            if tokens > LIMIT:
                lines += ["Random keys and values: the model knows %d positions." % LIMIT, ""]
            lines += ["| cache | ms a token | range | of DynamicCache | near, MB | host, MB | answers |",
                      "|---|---|---|---|---|---|---|"]
            for name, *said in rows:
                lines.append("| %s | %s |  |  |  |  |  |" % (name, said[0]) if len(said) == 1 else
                             "| %s | %.1f | %.1f to %.1f | %.2f | %.1f | %.1f | %s |" % (
                                 name, *said[:3], said[0] / base, said[3] / 1e6, said[4] / 1e6,
                                 "–" if tokens > LIMIT else "%d of %d" % tuple(said[5:])))
            lines.append("")
            with open(args.out, "w") as out:
                out.write("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
