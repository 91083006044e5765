#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Learn which KV heads need the whole context, and write them as a head mask (needs torch and
transformers).

  train_mask.py --model DIR --text FILE... --sparsity 0.5 --out mask.tsv

The method is PruLong's (Bhaskar, Wettig, Gao, Dong, Chen: Cache Me If You Can, 2025, section 4 and
appendix B). Every KV head has a gate z in [0, 1], and its attention is z times attention to
everything plus (1 - z) times attention to the first and the most recent tokens. Gates are drawn
from hard-concrete distributions, so that they are mostly exactly 0 or 1; their parameters are
trained by the next-token loss while the weights stay as they are, and a Lagrangian drives the
expected share of zeros to the target. The best heads then become 1.

The mask has one row per layer and one column per KV head, tab separated: 1 keeps everything, 0
streams. `kvferry run --head-mask mask.tsv` reads it.

Text is cut into sequences of --length tokens, each file on its own; what does not fill one is left
out; with --last a file is its last --length tokens. The last --hold-out of them are not trained on:
at the end their loss is printed for all heads on, for the mask, and for its opposite.
"""
import argparse
import json
import math
import os
import sys
import time

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

STRETCH = (-0.1, 1.1)  # l and r of the hard-concrete distribution
TEMPERATURE = 2.0 / 3.0
OPEN = 4.0  # ln alpha at the start: all gates are 1 but for 0.4 %


class Gates:
    """z of the pass that is under way, [layers, KV heads], and the mask of streaming attention."""

    def __init__(self, sink, recent):
        self.z, self.sink, self.recent, self.visible = None, sink, recent, None

    def mask(self, count):
        if self.visible is None or self.visible.shape[-1] != count:
            query, key = torch.arange(count)[:, None], torch.arange(count)[None]
            near = (key < self.sink) | (key > query - self.recent)
            self.visible = near & (key <= query)
        return self.visible


GATES = None


def gated_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """z * attention to everything + (1 - z) * attention to the sink and the recent tokens."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    z = GATES.z[module.layer_idx].repeat_interleave(group).view(1, -1, 1, 1)
    out = z * F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    out = out + (1.0 - z) * F.scaled_dot_product_attention(
        query, key, value, GATES.mask(query.shape[2]), scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("gated", gated_attention)


def draw(log_alpha):
    """Gates from the hard-concrete distribution, one for each parameter."""
    u = torch.empty_like(log_alpha).uniform_(1e-6, 1.0 - 1e-6)
    s = torch.sigmoid((u.log() - (1.0 - u).log() + log_alpha) / TEMPERATURE)
    return (STRETCH[0] + s * (STRETCH[1] - STRETCH[0])).clamp(0.0, 1.0)


def expected_sparsity(log_alpha):
    """Share of gates that are 0, in expectation."""
    low = TEMPERATURE * math.log(-STRETCH[0] / STRETCH[1])
    return 1.0 - torch.sigmoid(log_alpha - low).mean()


def read_sequences(tokenizer, args):
    """[count, length] token ids, and the name and number of each."""
    rows = []
    for path in args.text:
        with open(path, encoding="utf-8") as f:
            ids = tokenizer(f.read(), add_special_tokens=False).input_ids
        if args.last and len(ids) > args.length:
            ids = ids[-args.length:]
        rows += [ids[i:i + args.length] for i in range(0, len(ids) - args.length + 1, args.length)]
    if len(rows) <= args.hold_out:
        sys.exit("train_mask: %d sequences of --length %d in the text, and --hold-out takes %d; "
                 "give more text, or a smaller --length or --hold-out" % (
                     len(rows), args.length, args.hold_out))
    return torch.tensor(rows)


def loss_of(model, ids, tail):
    """Mean next-token loss over the last `tail` tokens, 0 = over all."""
    count = min(tail, ids.shape[1] - 1) if tail else ids.shape[1] - 1
    logits = model(ids, use_cache=False, logits_to_keep=count + 1).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(),
                           ids[:, -count:].reshape(-1))


@torch.no_grad()
def loss_with(model, mask, ids, tail):
    GATES.z = mask
    return sum(loss_of(model, row[None], tail).item() for row in ids) / len(ids)


def rate(step, steps):
    """Factor of the learning rate: up over a tenth of the steps, then down to 1 %."""
    rise = max(steps // 10, 1)
    if step < rise:
        return (step + 1) / rise
    return 1.0 - 0.99 * (step - rise) / max(steps - rise, 1)


def train(model, ids, log_alpha, args):
    """The Lagrangian's saddle point: down in ln alpha, up in the two multipliers."""
    multipliers = torch.zeros(2, requires_grad=True)
    down = torch.optim.Adam([log_alpha], lr=args.rate, betas=(0.9, 0.95))
    up = torch.optim.Adam([multipliers], lr=args.rate_up, betas=(0.9, 0.95), maximize=True)
    warm = max(int(args.steps * args.warm), 1)
    begin = time.monotonic()
    for step in range(args.steps):
        target = args.sparsity * min((step + 1) / warm, 1.0)
        for optimizer, peak in ((down, args.rate), (up, args.rate_up)):
            optimizer.param_groups[0]["lr"] = peak * rate(step, args.steps)
            optimizer.zero_grad()
        batch = ids[torch.randint(len(ids), (args.batch,))]
        GATES.z = draw(log_alpha)
        loss = loss_of(model, batch, args.tail)
        excess = expected_sparsity(log_alpha) - target
        (loss + multipliers[0] * excess + multipliers[1] * excess * excess).backward()
        down.step()
        up.step()
        if step % args.every == 0 or step + 1 == args.steps:
            print("step %4d  loss %.4f  sparsity %.3f of %.3f  multipliers %.2f %.2f  %.0f s" % (
                step, loss.item(), target + excess.item(), target, *multipliers.tolist(),
                time.monotonic() - begin), flush=True)


def best_heads(log_alpha, sparsity):
    """[layers, KV heads] of 0 and 1: the largest ln alpha are 1; ties go to the first head."""
    flat = log_alpha.detach().flatten()
    ones = flat.numel() - int(round(sparsity * flat.numel()))
    mask = torch.zeros_like(flat)
    mask[torch.sort(flat, descending=True, stable=True).indices[:ones]] = 1.0
    return mask.view(log_alpha.shape)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--text", required=True, nargs="+", help="UTF-8 files")
    parser.add_argument("--out", required=True, help="the mask, TSV")
    parser.add_argument("--sparsity", type=float, default=0.7, help="share of streaming heads")
    parser.add_argument("--sink", type=int, default=128, help="first tokens of a streaming head")
    parser.add_argument("--recent", type=int, default=1024, help="newest ones, itself included")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--last", action="store_true", help="of each file its end only")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm", type=float, default=0.8,
                        help="share of the steps in which the target rises from 0")
    parser.add_argument("--rate", type=float, default=1.0, help="learning rate of ln alpha")
    parser.add_argument("--rate-up", type=float, default=1.0, help="of the multipliers")
    parser.add_argument("--tail", type=int, default=0,
                        help="the loss looks at the last N tokens only; 0 = all")
    parser.add_argument("--hold-out", type=int, default=4, help="sequences not trained on")
    parser.add_argument("--every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--threads", type=int, default=0, help="0 = as torch has it")
    args = parser.parse_args()
    if not 0.0 <= args.sparsity <= 1.0:
        parser.error("--sparsity is %g, and must be 0 to 1" % args.sparsity)
    if not 0.0 < args.warm <= 1.0:
        parser.error("--warm is %g, and must be above 0 and at most 1" % args.warm)
    for name, least in (("sink", 0), ("recent", 1), ("length", 2), ("batch", 1), ("steps", 1),
                        ("tail", 0), ("hold_out", 0), ("every", 1)):
        if getattr(args, name) < least:
            parser.error("--%s is %d, and must be at least %d" % (
                name.replace("_", "-"), getattr(args, name), least))
    if args.length <= args.sink + args.recent:
        parser.error("--length %d is all within --sink %d and --recent %d: every head would "
                     "see everything" % (args.length, args.sink, args.recent))
    return args


def main():
    global GATES
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32,
                                                 attn_implementation="gated").eval()
    model.requires_grad_(False)
    ids = read_sequences(tokenizer, args)
    held = ids[len(ids) - args.hold_out:]
    ids = ids[:len(ids) - args.hold_out]
    shape = (model.config.num_hidden_layers, model.config.num_key_value_heads)
    print("seed %d, %d sequences of %d tokens and %d held out, %d layers of %d KV heads" % (
        args.seed, len(ids), args.length, len(held), *shape), flush=True)
    GATES = Gates(args.sink, args.recent)
    log_alpha = torch.full(shape, OPEN).requires_grad_(True)
    train(model, ids, log_alpha, args)
    mask = best_heads(log_alpha, args.sparsity)
    print("ln alpha", json.dumps([[round(a, 2) for a in row] for row in log_alpha.tolist()]))
    if len(held):
        for name, heads in (("all heads", torch.ones(shape)), ("mask", mask),
                            ("its opposite", 1.0 - mask), ("no head", torch.zeros(shape))):
            print("held-out loss, %-13s %.4f" % (name + ":", loss_with(model, heads, held,
                                                                       args.tail)))
    partial = args.out + ".partial"
    with open(partial, "w", encoding="utf-8", newline="\n") as f:
        f.writelines("\t".join(str(int(z)) for z in row) + "\n" for row in mask.tolist())
    os.replace(partial, args.out)


if __name__ == "__main__":
    main()
