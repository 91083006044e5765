# SPDX-License-Identifier: Apache-2.0
"""Logits of steps in one build of llama.cpp, teacher-forced: a process of check_llama_logits.py.

usage: llama_steps.py FOLDER JOB.json

A job has the model, the seed, how many tokens a prompt and how many steps, and layouts of the KV cache to go
through. Without a file of tokens the first layout draws them from its own logits and writes them. With "routes"
it writes which experts every token of a step had, too, and by how much the last of them was chosen.
"""
import ctypes
import json
import resource
import struct
import sys

import numpy as np

import llama_api
import llama_fuzz

FIRST, LAST = 5, 280  # ids of prompts of models with random weights


class Routes:
    """Experts as llama.cpp chooses them: sorted ids of a pass, [token][layer * experts], and their margins.

    A margin is the difference between the router's logits of the last expert that is chosen and the first that is not.
    """

    def __init__(self):
        self.chosen, self.margins = {}, {}
        self.callback = llama_fuzz.CALLBACK(self._seen)

    def _seen(self, address, ask, _):
        node = llama_fuzz.at(address)
        name = node.name.decode(errors="replace")
        what, _, layer = name.rpartition("-")
        wanted = what in ("ffn_moe_topk", "ffn_moe_logits", "ffn_moe_logits_biased", "ffn_moe_probs_biased")
        if ask or not wanted:
            return wanted or not ask
        if what == "ffn_moe_topk":
            rows = np.lib.stride_tricks.as_strided(
                np.frombuffer((ctypes.c_int32 * (node.nb[1] // 4 * node.ne[1])).from_address(node.data), np.int32),
                (node.ne[1], node.ne[0]), (node.nb[1], node.nb[0]))
            self.chosen[int(layer)] = np.sort(rows, -1)
        else:
            self.margins[int(layer)] = np.sort(node.numbers()[0, 0], -1)
        return True

    def taken(self):
        """Those of the latest pass: experts, and the margins of each layer."""
        layers = sorted(self.chosen)
        experts = self.chosen[layers[0]].shape[1]
        return (np.concatenate([self.chosen[layer] for layer in layers], -1),
                np.stack([self.margins[layer][:, -experts] - self.margins[layer][:, -experts - 1] for layer in layers], -1))


def drawn(logits, random):
    """A token by its probability."""
    p = np.exp(logits.astype(np.float64) - logits.max())
    return int(random.choice(len(p), p=p / p.sum()))


def make_wrong(context, sequence):
    """Write one wrong cell: the keys of a token in the first layer that has some, through a state."""
    state, cells = context.state(sequence), context.length(sequence)
    for at in range(0, len(state) - 24, 4): # of a layer: type and bytes of a row, then rows of all cells
        kind, row = struct.unpack_from("<iQ", state, at)
        after = at + 12 + row * cells
        if kind == llama_api.F16 and 64 <= row <= 1 << 14 and after + 12 <= len(state) and \
                struct.unpack_from("<i", state, after)[0] == kind:
            keys = np.frombuffer(state, np.float16, row // 2, at + 12 + row * (cells // 2))
            keys[:] = keys[::-1] * 16
            break
    else:
        raise RuntimeError("the state shows no keys")
    context.remove(sequence)
    if not context.restore(state, sequence):
        raise RuntimeError("the state does not go back")


def mapped():
    """Bytes of memory that the process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as text:
        return int(text.read().split()[0]) * resource.getpagesize()


def steps(model, job, layout, tokens):
    """Logits [step][slot][token] of one layout, the tokens that were fed, and experts and margins of every step."""
    slots, count = layout["slots"], job["steps"]
    routes = Routes() if job.get("routes") else None
    watch = {"cb_eval": ctypes.cast(routes.callback, ctypes.c_void_p).value} if routes else {}
    context = llama_api.Context(model, job["context"] * slots, slots=slots, kind=layout["kind"],
                                unified=layout["unified"], **layout.get("fields", {}), **watch)
    random = [np.random.default_rng([job["seed"], slot]) for slot in range(slots)]
    vocabulary = min(LAST, model.tokens)
    prompts = [one.integers(FIRST, vocabulary, job["prompt"] + 7 * slot).tolist()
               for slot, one in enumerate(random)]
    logits = []
    for slot, prompt in enumerate(prompts):
        context.prompt(prompt, slot)
        logits.append(np.array(context.logits()))
    fed, out, taken = [], np.empty((count, slots, model.tokens), np.float32), []
    for step in range(count):
        row = (tokens[step][:slots] if tokens is not None
               else [drawn(one, each) for one, each in zip(logits, random)])
        before = mapped()
        context.decode([(int(token), len(prompts[slot]) + step, slot, True) for slot, token in enumerate(row)])
        if step == 0:
            print(json.dumps({"mapped": mapped() - before})) # by what opens at the first step
        logits = [np.array(context.logits(slot)) for slot in range(slots)]
        out[step] = logits
        fed.append(row)
        if routes:
            taken.append(routes.taken())
        if layout.get("wrong") == step:
            make_wrong(context, 0)
    context.close()
    return out, fed, taken


def main():
    folder, path = sys.argv[1:]
    with open(path, encoding="utf-8") as text:
        job = json.load(text)
    model = llama_api.Model(llama_api.Library(folder), job["model"])
    tokens = np.load(job["tokens"]).tolist() if job.get("tokens") else None
    for layout in job["layouts"]:
        out, fed, taken = steps(model, job, layout, tokens)
        if tokens is None:
            tokens = fed
            np.save(job["draws"], fed)
        np.save(layout["out"], out)
        if taken:
            np.savez(layout["out"] + ".routes.npz", chosen=[one[0] for one in taken], margins=[one[1] for one in taken])
    model.close()


if __name__ == "__main__":
    main()
