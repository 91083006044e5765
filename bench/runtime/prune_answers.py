# SPDX-License-Identifier: Apache-2.0
"""Answers to questions about a pruned document, many of them from one reading of it.

The reference of tests/python computes the model, in torch, and what a policy keeps and hands on: a
document once for all questions about it, and of a prompt only what no other has. The content of the layers
then goes into a cache of the library, which attends and selects for every token that follows, as the
command does. So one prefill serves all retentions:

  evict    what a KV head does not keep is not there, and all that is left is attended
  offload  all that a layer got is there, and the default selection finds it

Knows the reference and the cache, and neither texts nor tables. The first token of an answer follows
from the prefill of its prompt; tokens of a question that is asked afterwards are decode steps.
Invariant: every question meets what the document left, and nothing of another question.
"""
import os

import kvferry
import prune_reference as reference
import torch

ANSWER, BUDGET = 7, 512  # tokens
EVICT, OFFLOAD = "evict", "offload"
SELECTS = {EVICT: "full", OFFLOAD: None}


class Held(reference.Cache):
    """The tokens that every layer got, and what of it each KV head keeps."""

    def __init__(self):
        super().__init__()
        self.keep = []

    def add(self, k, v, keep):
        super().add(k, v, None)
        self.keep.append(keep)

    def rows(self, layer, evicts, first):
        """k and v [tokens, kv_heads, d], from the first on"""
        k, v, keep = self.k[layer], self.v[layer], self.keep[layer] if evicts else None
        if keep is not None:
            k, v = (torch.stack([x[h][keep[h]] for h in range(len(keep))]) for x in (k, v))
        return [x[:, first:].transpose(0, 1).contiguous() for x in (k, v)]

    def is_whole(self, tokens):
        """Whether every layer got the whole prompt."""
        return all(k.shape[1] == tokens for k in self.k)


def open_caches(model, runtime, retentions, tokens, count):
    """A cache for each retention, for so many prompts of so many tokens and what follows them."""
    most = tokens + 128
    return {r: kvferry.Cache(
        runtime, layers=model.layers, query_heads=model.heads, kv_heads=model.kv_heads,
        head_dim=model.d, dtype="fp32", tokens_max=most, select=SELECTS[r], budget_tokens=BUDGET,
        sequences_max=count, host_tokens_max=count * most) for r in retentions}


class Rows:
    """The same questions under some retentions, which go on token by token, all together."""

    def __init__(self, model, caches):
        """caches: {retention: cache}"""
        self.model, self.retentions, self.caches = model, list(caches), list(caches.values())
        self.bases = [None] * len(caches)
        self.sequences = [[] for _ in caches]
        self.next = []

    def close(self):
        for sequence in sum(self.sequences, []) + self.bases:
            if sequence is not None:
                sequence.close()

    def put(self, part, sequence, held, first=0):
        for layer in range(self.model.layers):
            k, v = held.rows(layer, self.retentions[part] == EVICT, first)
            self.caches[part].prefill(sequence, None, k, v, layer=layer)
        return sequence

    def begin(self, held):
        """The state that all questions go on from."""
        self.bases = [self.put(part, cache.sequence(), held) for part, cache in enumerate(self.caches)]
        self.base_next = held.next

    def fork(self, count):
        self.sequences = [[base.fork() for _ in range(count)] for base in self.bases]
        self.next = [self.base_next] * count

    def add(self, held, first=0):
        """A question; first: it goes on from the base with the tokens from there on."""
        for part, cache in enumerate(self.caches):
            sequence = self.bases[part].fork() if first else cache.sequence()
            self.sequences[part].append(self.put(part, sequence, held, first))
        self.next.append(held.next)

    def step(self, which, tokens):
        """A token to each of these questions, by retention; hidden states in that order."""
        m, size = self.model, len(which)
        x = m.embed([t for part in tokens for t in part])
        positions = torch.tensor([self.next[i] for i in which] * len(tokens))
        rows = [[part[i] for i in which] for part in self.sequences]
        for layer in range(m.layers):
            parts = [y.transpose(0, 1).contiguous().split(size) for y in m.project(layer, x, positions)]
            out = [cache.decode(rows[p], *(y[p] for y in parts), layer=layer)
                   for p, cache in enumerate(self.caches)]
            x = m.add_mlp(layer, m.add_attention(layer, x, torch.cat(out).transpose(0, 1)))
        for i in which:
            self.next[i] += 1
        return x

    def feed(self, questions):
        """Logits after the questions, by retention."""
        last = [[None] * len(questions) for _ in self.caches]
        for at in range(max(map(len, questions))):
            which = [i for i, q in enumerate(questions) if at < len(q)]
            hidden = self.step(which, [[questions[i][at] for i in which]] * len(self.caches))
            for part, rows in zip(last, hidden.split(len(which))):
                for i, row in zip(which, rows):
                    part[i] = row
        return self.model.logits(torch.stack(sum(last, []))).split(len(questions))

    def say(self, logits):
        """Tokens of the answers, by retention."""
        answers = [[[int(row.argmax())] for row in part] for part in logits]
        while len(answers[0][0]) < ANSWER:
            hidden = self.step(range(len(answers[0])), [[a[-1] for a in part] for part in answers])
            for a, row in zip(sum(answers, []), self.model.logits(hidden)):
                a.append(int(row.argmax()))
        return answers


class Answers:
    """For one model, and one document at a time. Questions are ids of tokens; what is returned is
    {retention: [ids of an answer]}."""

    def __init__(self, folder):
        torch.set_grad_enabled(False)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.model, self.retentions = reference.Model(folder), list(SELECTS)
        self.runtime = kvferry.Runtime(device="host", threads=torch.get_num_threads())
        self.ids, self.prefix, self.caches = None, None, {}
        self.whole = {}  # answers that no policy had a part in

    def read(self, ids, questions):
        """The document that is asked about."""
        if self.ids == ids:
            return
        for cache in self.caches.values():
            cache.close()
        self.prefix, self.whole, self.prompts = None, {}, []
        self.prefix, self.ids = reference.Prefix(self.model, ids, sums=True), ids
        self.prompts = [reference.Longer(self.model, self.prefix, q) for q in questions]
        self.caches = open_caches(self.model, self.runtime, self.retentions, len(ids),
                                  len(questions) + 1)

    def held(self, prefix, tokens):
        """The first tokens of a prefix, as what layers hold."""
        held = Held()
        for layer in range(self.model.layers):
            held.add(prefix.k[layer][:, :tokens], prefix.v[layer][:, :tokens], None)
        held.next = tokens
        return held

    def rows(self, retentions):
        return Rows(self.model, {r: self.caches[r] for r in retentions})

    def at_end(self, ids, questions, policy, settings):
        """Questions at the end of prompts of their own."""
        self.read(ids, questions)
        prompts = [reference.prefill(self.model, p.ids, policy, settings, p, Held) for p in self.prompts]
        logits = [row for _, row in prompts]
        if not all(held.is_whole(len(p.ids)) for (held, _), p in zip(prompts, self.prompts)):
            return self.answer(self.retentions, prompts, logits)
        out = self.answer([EVICT], prompts, logits)
        if "end" not in self.whole:
            self.whole["end"] = self.answer([OFFLOAD], prompts, logits, len(ids))
        return {**out, **self.whole["end"]}

    def answer(self, retentions, prompts, logits, first=0):
        """first: tokens that are the document's in all prompts and layers"""
        rows = self.rows(retentions)
        if first:
            rows.begin(self.held(self.prefix, first))
        for held, _ in prompts:
            rows.add(held, first)
        said = rows.say([logits] * len(retentions))
        rows.close()
        return dict(zip(retentions, said))

    def afterwards(self, ids, questions, policy, settings):
        """Questions of a document that is kept."""
        self.read(ids, questions)
        prefix, n = self.prefix, len(ids)
        held, _ = reference.prefill(self.model, ids, policy, settings, prefix, Held)
        if not held.is_whole(n):
            return self.ask(self.retentions, held, questions)
        out = self.ask([EVICT], held, questions)
        if "after" not in self.whole:
            self.whole["after"] = self.ask([OFFLOAD], held, questions)
        return {**out, **self.whole["after"]}

    def ask(self, retentions, held, questions):
        rows = self.rows(retentions)
        rows.begin(held)
        rows.fork(len(questions))
        said = rows.say(rows.feed(questions))
        rows.close()
        return dict(zip(retentions, said))
