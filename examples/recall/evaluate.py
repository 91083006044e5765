#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the recall model with HF Transformers (needs torch, numpy, transformers).

  evaluate.py                     full cache at 8K and 16K, recital, page selection at 16K
  evaluate.py --only recital      one part: full, recital or pages

Answers are decoded greedily, each question alone after its document, and count when both
words are right. In the part `pages` the document is prefilled with full attention; the words
of the question and of the answer then see, per KV head, the first 4 words, a window of the
last 64, and the pages with the best bounding-box scores (mean over the query heads of the
group), as many as fit in the budget next to a static set of 256 words, which is left out
here. `streaming` sees the first 4 words and the most recent ones only.
"""
import argparse
import os
import time

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers import __version__ as transformers_version

import generate as gen
from train import SINK, WINDOW, Plan, boxes, select_pages

STATIC = 256
PLAN = Plan()


def selected_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kw):
    """Attention of the last words with page selection, or with a window only (pages = 0)."""
    m, t = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    if PLAN.pages:
        box = PLAN.boxes.get(module.layer_idx)
        if box is None:
            box = PLAN.boxes[module.layer_idx] = boxes(key[:, :, :PLAN.n], PLAN.page, PLAN.sub)
        mask = select_pages(query, key, PLAN, box).repeat_interleave(group, 1)
    else:
        now, j = torch.arange(t - m, t)[:, None], torch.arange(t)[None]
        mask = ((j < SINK) | (j > now - PLAN.window)) & (j <= now)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), mask,
        scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("selected", selected_attention)


def ids_of(tokenizer, words):
    return tokenizer(" ".join(words), return_tensors="pt", add_special_tokens=False).input_ids


def decode(model, cache, ids, count):
    """The `count` words the model adds to the cached text and `ids`."""
    out = []
    for _ in range(count):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        out.append(ids.item())
    return out


@torch.inference_mode()
def answers(model, tokenizer, length, documents, questions, facts, seed, plans):
    """Share of right answers per plan; None stands for full cache."""
    global PLAN
    right = [0] * len(plans)
    for d in range(documents):
        rng = gen.Rng(seed + d)
        words, table, _ = gen.make_document(rng, length, facts)
        asked = rng.sample(table, questions)
        cache = DynamicCache()
        model.set_attn_implementation("sdpa")
        model(ids_of(tokenizer, words), past_key_values=cache, logits_to_keep=1)
        for i, plan in enumerate(plans):
            model.set_attn_implementation("selected" if plan else "sdpa")
            PLAN = plan
            if plan:
                plan.n, plan.boxes = length, {}
            for fact in asked:
                ids = ids_of(tokenizer, gen.question_words(fact))
                got = tokenizer.decode(decode(model, cache, ids, gen.ANSWER_WORDS))
                right[i] += got == fact[2] + " " + fact[3]
                cache.crop(length - cache.get_seq_length())
    return [r / (documents * questions) for r in right]


@torch.inference_mode()
def recital(model, tokenizer, length, seed):
    """How many words of a passage are recited before the first error, and how many there are."""
    prompt, expected = gen.make_recital(gen.Rng(seed), length)
    goal = ids_of(tokenizer, expected)[0].tolist()
    cache = DynamicCache()
    model.set_attn_implementation("sdpa")
    ids = ids_of(tokenizer, prompt)
    for i, word in enumerate(goal):
        got = decode(model, cache, ids, 1)
        if got != [word]:
            return i, len(goal)
        ids = torch.tensor([got])
    return len(goal), len(goal)


def plan_of(budget, page, sub):
    plan = Plan(pages=(budget - SINK - WINDOW - STATIC) // page, page=page, sub=sub)
    return plan, "budget %d, %d pages of %d, %d boxes a page" % (budget, plan.pages, page, sub)


def main():
    parser = argparse.ArgumentParser(description="Measure the recall model.")
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--model", default=os.path.join(here, "model"))
    parser.add_argument("--only", choices=["full", "recital", "pages"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--questions", type=int, default=20, help="per document")
    parser.add_argument("--facts", type=int, default=gen.FACTS)
    parser.add_argument("--seed", type=int, default=20000)
    parser.add_argument("--recital", type=int, nargs="+", default=[2048, 3072, 4096])
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("torch", torch.__version__, "transformers", transformers_version)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    count = (args.documents, args.questions, args.facts, args.seed)
    if args.only in (None, "full"):
        for length in args.lengths:
            start = time.time()
            share, = answers(model, tokenizer, length, *count, [None])
            print("full cache, %d words: %.1f %% of %d answers right (%.0f s)" % (
                length, 100 * share, count[0] * count[1], time.time() - start), flush=True)
    if args.only in (None, "recital"):
        for length in args.recital:
            for i in range(args.passages):
                got, goal = recital(model, tokenizer, length, args.seed + i)
                print("recital of a passage of %d words: %d of %d words before the first error"
                      % (length, got, goal), flush=True)
    if args.only in (None, "pages"):
        window = Plan()
        window.window = 1024 - SINK
        plans = [(None, "full cache"), (window, "streaming, budget 1024")]
        plans += [plan_of(1024, p, s) for p in (32, 16) for s in (1, 2, 4)]
        plans += [plan_of(b, 32, 1) for b in (2048, 512)]
        for length in args.lengths[-1:]:
            shares = answers(model, tokenizer, length, *count, [p for p, _ in plans])
            for share, (_, name) in zip(shares, plans):
                print("%d words, %s: %.1f %%" % (length, name, 100 * share), flush=True)


if __name__ == "__main__":
    main()
