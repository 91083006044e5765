#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train the recall model from scratch on the CPU (needs torch 2.9 or newer, and transformers).

  train.py --out model --work /tmp/recall

runs the phases of PHASES in order. Each phase leaves a checkpoint in the work folder, and a
phase whose checkpoint is there is skipped, so a stopped run can be started again. After each
phase, and every few minutes, the model in HF format is written to the output folder.

The model is a plain Llama of HF Transformers, with an attention of its own. A sample has two
parts: a document (or passage) of n words, and a tail with the questions (or the recital). Only
the tail is supervised. There are three ways of attention:

  full    causal
  local   document words see the first words and a window before them only; tail words see
          everything. This makes a step on a real length cheap.
  pages   as full or local, but tail words see the first words, the words just before them,
          and the pages that page selection finds by its bounding boxes.
"""
import argparse
import json
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import generate as gen

SPECIAL = ["<unk>", "<bos>", "<eos>"]
VOCAB = SPECIAL + gen.WORDS
ID = {w: i for i, w in enumerate(VOCAB)}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
    "rope_theta": 1e8,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SINK, WINDOW, BLOCK, PAGE = 4, 64, 128, 32
MAX_POSITION = 24000
IGNORE = -100

# Model ---------------------------------------------------------------------------------------


class Plan:
    """How one forward pass attends: document length, attention of the document and the tail."""

    def __init__(self, local=False, pages=0):
        self.n, self.local, self.pages = 0, local, pages
        self.boost, self.times = None, 1
        self.seek, self.goal, self.page_loss, self.rows = 0.0, None, 0.0, None


def page_scores(q, k):
    """Scores [B, KV heads, m, pages] of m queries for the whole pages of keys, from their bounding
    boxes: the least and the greatest key of each channel."""
    b, heads, m, d = q.shape
    kv, t = k.shape[1:3]
    parts = k[:, :, :t // PAGE * PAGE].reshape(b, kv, -1, PAGE, d)
    lo, hi = (x.unsqueeze(2).mT for x in (parts.amin(3), parts.amax(3)))
    query = q.reshape(b, kv, heads // kv, m, d)
    return (query.clamp(min=0) @ hi + query.clamp(max=0) @ lo).mean(2)


def page_loss(q, k, plan):
    """How badly the boxes of KV head 0 tell the page of an answer from the other pages."""
    rows, keys, _ = plan.goal
    score = page_scores(q[:, :q.shape[1] // k.shape[1], rows], k[:, :1, :plan.n])
    score = score[:, 0] / math.sqrt(k.shape[-1])
    keys = keys // PAGE
    keep = keys < score.shape[-1]
    return F.cross_entropy(score[keep], keys[keep])


def select_pages(q, k, plan):
    """Token mask [B, KV heads, m, T] of what page selection lets the last m words see."""
    b, m = q.shape[0], q.shape[2]
    kv, t = k.shape[1], k.shape[2]
    score = page_scores(q, k)
    count = score.shape[-1]
    now = torch.arange(t - m, t)[:, None]
    score = score.masked_fill((torch.arange(1, count + 1) * PAGE)[None] > now, -math.inf)
    best = score.topk(min(plan.pages, count), -1).indices
    chosen = torch.zeros(b, kv, m, count, dtype=torch.bool).scatter_(-1, best, True)
    mask = torch.zeros(b, kv, m, t, dtype=torch.bool)
    mask[..., :count * PAGE] = chosen.repeat_interleave(PAGE, -1)
    key = torch.arange(t)[None]
    return (mask | (key < SINK) | (key > now - WINDOW)) & (key <= now)


def local_attention(q, k, v):
    """Attention of n words in blocks: each block sees itself, the block before and the sink."""
    b, h, n, d = q.shape
    blocks = -(-n // BLOCK)
    pad = blocks * BLOCK - n
    q = F.pad(q, (0, 0, 0, pad)).reshape(b, h, blocks, BLOCK, d)

    def window(x):
        cur = F.pad(x, (0, 0, 0, pad)).reshape(b, h, blocks, BLOCK, d)
        before = F.pad(cur, (0, 0, 0, 0, 1, 0))[:, :, :blocks]
        sink = x[:, :, None, :SINK].expand(b, h, blocks, SINK, d)
        return torch.cat((sink, before, cur), 3)

    i = torch.arange(BLOCK)[:, None]
    j = torch.arange(2 * BLOCK)[None] - BLOCK
    near = (j <= i) & (j > i - BLOCK)
    first = near & (j >= 0)
    near = torch.cat((torch.ones(BLOCK, SINK, dtype=torch.bool), near), 1)
    first = torch.cat((torch.zeros(BLOCK, SINK, dtype=torch.bool), first), 1)
    second = near.clone()
    second[:, SINK:SINK + SINK] &= False
    mask = torch.stack([first, second] + [near] * (blocks - 2))[:blocks]
    out = F.scaled_dot_product_attention(
        q.flatten(0, 2), window(k).flatten(0, 2), window(v).flatten(0, 2),
        mask.repeat(b * h, 1, 1))
    return out.reshape(b, h, blocks * BLOCK, d)[:, :, :n]


def look_far(out, q, k, v, plan):
    """Replace the outputs of the words in plan.rows by those of full attention."""
    key, row = torch.arange(plan.n), plan.rows[:, None, :, None]
    mask = key <= row
    if plan.boost is not None:
        near = (row - key).abs() < WINDOW
        mask = torch.where(mask, plan.boost[..., :plan.n].masked_fill(near, 0.0), -math.inf)
    row = row.expand(-1, q.shape[1], -1, q.shape[3])
    far = F.scaled_dot_product_attention(q.gather(2, row), k, v, mask)
    return out.scatter(2, row, far)


def attend(module, q, k, v, _, plan, **__):
    """The attention of a layer, as Transformers calls it. Layer 1 finds the pages of answers."""
    n, t, tail, mask = plan.n, q.shape[2], q[:, :, plan.n:], None
    if module.layer_idx == 1 and plan.goal is not None:
        plan.page_loss = page_loss(tail, k, plan)
    if plan.pages:
        with torch.no_grad():
            mask = select_pages(tail, k, plan).repeat_interleave(module.num_key_value_groups, 1)
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    if not plan.local and mask is None and plan.boost is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2), None
    if mask is None:
        mask = torch.arange(t)[None] <= torch.arange(n, t)[:, None]
    if plan.boost is not None:
        mask = torch.where(mask, plan.boost, -math.inf)
    out = F.scaled_dot_product_attention(tail, k, v, mask)
    q, k, v = q[:, :, :n], k[:, :, :n], v[:, :, :n]
    if module.layer_idx + 1 == CONFIG["num_hidden_layers"]:
        head = torch.zeros_like(q)  # nobody looks at it
    elif not plan.local or n <= BLOCK:
        head = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        head = local_attention(q, k, v)
        if plan.rows is not None:
            head = look_far(head, q, k, v, plan)
    return torch.cat((head, out), 2).transpose(1, 2), None


AttentionInterface.register("recall", attend)


def make_model():
    model = LlamaForCausalLM(LlamaConfig.from_dict(dict(CONFIG), attn_implementation="recall"))
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            gain = 0.25 if "o_proj" in name or "down_proj" in name else 0.7
            nn.init.normal_(weight, std=gain / math.sqrt(weight.shape[1]))
    nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    start_local(model.model.embed_tokens.weight.data, model.model.layers[0].self_attn)
    return model


def start_local(embedding, attention, offsets=(1, 1, 1, 2), pairs=8, size=6.0):
    """Let the heads of one layer begin as heads that look a fixed number of words back."""
    d = attention.head_dim
    freq = CONFIG["rope_theta"] ** (-torch.arange(0, d, 2).float() / d)
    embedding[:, 0] = 0.5
    half = d // 2
    scale = size * embedding.square().mean().sqrt() / 0.5
    with torch.no_grad():
        for head, back in enumerate(offsets):
            for i in range(pairs):
                angle = freq[i] * back
                at = head * d + i
                attention.q_proj.weight[at, 0] += scale * torch.cos(angle)
                attention.q_proj.weight[at + half, 0] -= scale * torch.sin(angle)
        for head in range(CONFIG["num_key_value_heads"]):
            at = head * d
            attention.k_proj.weight[at:at + pairs, 0] += scale


# Samples -------------------------------------------------------------------------------------


def spread(rng, b, t, cuts):
    """Position ids: a random start, and a random jump before each word in cuts[row]."""
    pos = np.zeros((b, t), np.int64)
    room = MAX_POSITION - t
    for row, places in zip(pos, cuts):
        total = int(room ** ((rng.below(1000) + 1) / 1000)) if room > 0 else 0
        places = [0] + [p for p in places if p]
        share = sorted(rng.below(total + 1) for _ in places)
        step = np.ones(t, np.int64)
        step[0] = 0
        for c, a, z in zip(places, [0] + share, share):
            step[c] += z - a
        row[:] = np.cumsum(step)
    return pos


def spans_batch(rng, b, length):
    """Random words, then short spans of them: one known word must tell the next."""
    ids, targets = [], []
    for _ in range(b):
        row = rng.sample(range(len(SPECIAL), len(VOCAB)), length // 2)
        target = [IGNORE] * len(row)
        while len(row) < length:
            at, size = rng.below(length // 2 - 6), 2 + rng.below(4)
            target += row[at + 1:at + size] + [IGNORE]
            row = row + row[at:at + size]
        ids.append(row[:length])
        targets.append(target[:length])
    return (np.array(ids), np.array(targets), 0,
            spread(rng, b, length, [[length // 2]] * b), None, None)


def facts_batch(rng, b, n, facts, questions):
    """Documents of n words, and questions with their answers."""
    ids, targets, cuts, crowd, goals, far = [], [], [], [], [], []
    for _ in range(b):
        words, table, places = gen.make_document(rng, n, facts)
        cuts.append(rng.sample(places, min(4, facts)) + [n])
        row = np.ones(n, np.float32)
        row[:SINK] = row[-WINDOW:] = 0
        for place in places:
            row[place:place + gen.FACT_TOKENS] = 0
        crowd.append(row)
        target = [IGNORE] * n
        asked = []
        while len(asked) < questions:
            asked += rng.sample(table, min(len(table), questions - len(asked)))
        far.append([p + i for p in places for i in range(gen.FACT_TOKENS)])
        goals.append([places[table.index(f)] + i for f in asked for i in (6, 7)])
        for fact in asked:
            q = gen.question_words(fact)
            words = words + q + [fact[2], fact[3], "."]
            target += [IGNORE] * (len(q) - 1) + [ID[fact[2]], ID[fact[3]], ID["."], IGNORE]
        ids.append([ID[w] for w in words])
        targets.append(target)
    t = len(ids[0])
    crowd = np.pad(np.array(crowd), ((0, 0), (0, t - n)))[:, None, None]
    rows = np.array([10 * i + j for i in range(questions) for j in (6, 7)])
    return (np.array(ids), np.array(targets), n, spread(rng, b, t, cuts), crowd,
            (torch.from_numpy(rows), torch.tensor(goals), torch.tensor(far)))


def recital_batch(rng, b, n):
    """Passages of n words and their recitals."""
    ids, targets = [], []
    for _ in range(b):
        least = min(n // 6 + 16, len(gen.STOCK))
        stock = rng.sample(gen.STOCK, log_uniform(rng, least, len(gen.STOCK)))
        prompt, rest = gen.make_recital(rng, n, stock)
        row = [ID[w] for w in prompt + rest]
        ids.append(row[:-1])
        targets.append([IGNORE] * (n + 4) + row[n + 5:])
    ids = np.array(ids)
    t = ids.shape[1]
    place, key = np.arange(t - n - 2)[:, None], np.arange(t)[None]
    crowd = ((key >= SINK) & (key < n) & (abs(key - place - 1) > 3)).astype(np.float32)
    return (ids, np.array(targets), n + 2, spread(rng, b, t, [[n + 2]] * b), crowd[None, None],
            None)


# Training ------------------------------------------------------------------------------------


def step_loss(model, batch, plan, kind):
    ids, target, n, pos, crowd, goal = (torch.from_numpy(x) if isinstance(x, np.ndarray) else x
                                        for x in batch)
    plan.n = n
    if goal is not None:
        plan.rows = goal[2]
        plan.goal = goal if plan.seek else None
    if plan.times > 1 and crowd is not None:
        plan.boost = math.log(plan.times) * crowd
    x = model.model(ids, position_ids=pos, use_cache=False, plan=plan).last_hidden_state[:, n:]
    target = target[:, n:]
    keep = target != IGNORE
    logits = F.linear(x[keep], model.model.embed_tokens.weight)
    goal = target[keep]
    right = (logits.argmax(-1) == goal).float()
    right = (right[::3] if kind == "facts" else right).mean().item()
    return F.cross_entropy(logits, goal), right


def log_uniform(rng, lo, hi):
    return int(lo * (hi / lo) ** (rng.below(10001) / 10000))


def make_batch(rng, phase, kind):
    tokens = phase["tokens"]
    if kind == "spans":
        return spans_batch(rng, tokens // phase["spans"], phase["spans"])
    if kind == "recital":
        n = log_uniform(rng, *phase["recital"])
        return recital_batch(rng, max(1, tokens // (2 * n)), n)
    n = log_uniform(rng, *phase["length"])
    most = min(phase.get("facts", 64), n // 14)
    facts = log_uniform(rng, max(1, most // 6), most)
    asked = max(facts, min(phase.get("asked", 64), n // 8))
    return facts_batch(rng, max(1, tokens // (n + 10 * asked)), n, facts, asked)


PHASES = [
    dict(name="spans", kinds=["spans"], spans=64, steps=240, lr=3e-3, tokens=2048, end_lr=0.5),
    dict(name="facts", kinds=["facts", "recital"], length=(96, 256), recital=(32, 128),
         steps=205, lr=1e-3, tokens=3072, end_lr=0.7),
    dict(name="crowd", kinds=["facts", "recital"], length=(128, 1024), recital=(64, 512),
         steps=160, lr=8e-4, tokens=3072, end_lr=0.5, crowd=75),
    dict(name="pages", kinds=["facts", "recital"], length=(512, 6144), recital=(64, 512),
         steps=150, lr=6e-4, tokens=2560, end_lr=0.5, crowd=60, local=90, sparse=40, asked=32,
         facts=40, log=10, seek=0.3),
    dict(name="far", kinds=["facts", "recital"], length=(1024, 12288), recital=(128, 1024),
         steps=50, lr=6e-4, tokens=3072, end_lr=0.9, crowd=60, local=90, sparse=40, asked=32,
         facts=40, log=10, seek=0.5),
    dict(name="last", kinds=["facts", "recital"], length=(2048, 16384), recital=(512, 2560),
         steps=90, lr=6e-4, tokens=3072, end_lr=0.05, warm=10, crowd=60, local=90, sparse=40,
         asked=32, facts=40, log=10, seek=0.5),
    dict(name="deck", kinds=["facts", "recital", "recital", "recital"], length=(3072, 16384),
         recital=(256, 2560), steps=140, lr=6e-4, tokens=3072, end_lr=0.6, warm=10, crowd=50,
         local=100, sparse=50, asked=32, facts=40, log=20, seek=0.5),
    dict(name="final", kinds=["recital", "facts", "recital"], length=(3072, 16384),
         recital=(256, 2560), steps=150, lr=6e-4, tokens=3072, end_lr=0.3, warm=10, crowd=50,
         local=100, sparse=50, asked=32, facts=40, log=15, seek=0.5),
    dict(name="settle", kinds=["facts", "facts", "recital"], length=(4096, 16384),
         recital=(512, 2048), steps=30, lr=2e-4, tokens=3072, end_lr=0.02, warm=3, crowd=50,
         local=100, sparse=50, asked=32, facts=40, log=10, seek=0.5),
]


def run_phase(model, phase, args, number):
    rng = gen.Rng(1000003 * (number + 1))
    hidden = [p for k, p in model.named_parameters() if p.ndim == 2 and "embed" not in k]
    other = [p for k, p in model.named_parameters() if p.ndim != 2 or "embed" in k]
    opts = [torch.optim.Muon(hidden, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(other, betas=(0.9, 0.98), weight_decay=0.0)]
    steps, start, saved = phase["steps"], time.time(), time.time()
    warm = phase.get("warm", 50)
    end = phase.get("end_lr", 0.3)
    seen = {}
    for step in range(1, steps + 1):
        scale = min(1.0, step / warm) * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for o, times in zip(opts, (3, 1)):  # the rates of PHASES are a third of that rule's
            o.param_groups[0]["lr"] = times * phase["lr"] * scale
        kind = phase["kinds"][step % len(phase["kinds"])]
        batch = make_batch(rng, phase, kind)
        plan = Plan(local=kind == "facts" and rng.below(100) < phase.get("local", 0),
                    pages=21 if kind == "facts" and rng.below(100) < phase.get("sparse", 0) else 0)
        if rng.below(100) < phase.get("crowd", 0):
            reach = batch[2] if kind == "facts" else 4 * batch[2]
            plan.times = max(1.0, log_uniform(rng, 500, 24000) / reach)
        plan.seek = phase.get("seek", 0.0)
        loss, right = step_loss(model, batch, plan, kind)
        model.zero_grad(set_to_none=True)
        (loss + plan.seek * plan.page_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in opts:
            o.step()
        key = kind + ("/pages" if plan.pages else "") + ("/crowd" if plan.times > 1 else "")
        seen.setdefault(key, []).append((loss.item(), float(torch.as_tensor(plan.page_loss).detach()), right))
        if step % phase.get("log", 20) == 0 or step == steps:
            text = "  ".join("%s loss %.4f %.2f right %.4f" % (k, *np.mean(v, 0))
                             for k, v in sorted(seen.items()))
            print("%s step %d  %s  %.0f s" % (phase["name"], step, text, time.time() - start),
                  flush=True)
            seen = {}
        if time.time() - saved > 60:
            save(model, args.out)
            torch.save(model.state_dict(), os.path.join(args.work, "latest.pt"))
            saved = time.time()


# Files ---------------------------------------------------------------------------------------


def write_json(path, value):
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


def save(model, folder):
    """Write the model and its tokenizer in the format of HF Transformers."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    os.makedirs(folder, exist_ok=True)
    write_json(os.path.join(folder, "config.json"), CONFIG)
    write_json(os.path.join(folder, "generation_config.json"),
               {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False})
    write_json(os.path.join(folder, "tokenizer_config.json"),
               {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>",
                "bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False,
                "clean_up_tokenization_spaces": False,
                "model_max_length": CONFIG["max_position_embeddings"]})
    tokenizer = Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    path = os.path.join(folder, "model.safetensors")
    tensors = {"model." + k: v.detach().to(torch.bfloat16).contiguous()
               for k, v in model.model.state_dict().items()}
    save_file(tensors, path + ".new", metadata={"format": "pt"})
    os.chmod(path + ".new", 0o644)
    os.replace(path + ".new", path)


def main():
    parser = argparse.ArgumentParser(description="Train the recall model.")
    parser.add_argument("--out", default="model")
    parser.add_argument("--work", required=True, help="folder for checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    os.makedirs(args.work, exist_ok=True)
    model = make_model()
    print("parameters:", sum(p.numel() for p in model.parameters()))
    for number, phase in enumerate(PHASES):
        path = os.path.join(args.work, phase["name"] + ".pt")
        if os.path.exists(path):
            model.load_state_dict(torch.load(path))
            continue
        run_phase(model, phase, args, number)
        torch.save(model.state_dict(), path)
        save(model, args.out)


if __name__ == "__main__":
    main()
