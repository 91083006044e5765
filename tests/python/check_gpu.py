#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""First use on a GPU: blocks as engines call them, prompts in chunks, Transformers. A verdict for each.

Where the budget holds the context, outputs are those of dense attention in double precision. Where it does not,
those of a replay are those of the same step, enqueued, bit by bit. --fault plants one fault in every section: an
id of a table, a key, a weight that is another's; then none may pass. --emulated takes the emulator's device, with
KVFERRY_LIBRARY of an emulated build; Transformers is on the host device there.

usage: check_gpu.py [--emulated] [--fault] [SECTION...]

Exits with 77 without NumPy, torch or a GPU, and where all sections named lack something.
"""
import argparse
import ctypes
import sys
import time
import traceback

try:
    import numpy as np
except ImportError as missing:
    print("check_gpu: %s" % missing, file=sys.stderr)
    sys.exit(77)

import kvferry # before torch, whose CUDA would be found in place of the emulator's
from python_rig import dense

ROWS, HEADS, KV_HEADS, BLOCK = 3, 4, 2, 32
CLOSE = 0.02  # bf16 has 8 bits, and outputs are below 4
CLOSE_K8V8 = 0.05
CLOSE_LOGITS = 2e-3  # of the largest: fp32, sums of 128 terms in another order
PROMPT, NEW = 90, 20  # of Transformers: over the windows of tiny models
FAMILIES = ("LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM")
TYPES = {"table": np.int32, "lengths": np.int32, "regions": np.int32, "slots": np.int64}


def must(holds, what, *numbers):
    if not holds:
        raise AssertionError(what % numbers)


def bits(values):
    """The nearest numbers in bf16, as uint16."""
    wide = np.asarray(values, np.float32).view(np.uint32)
    return ((wide + 0x7fff + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def numbers(of_bits):
    return (of_bits.astype(np.uint32) << 16).view(np.float32)


def draw(random, tokens, shapes):
    return [bits(random.standard_normal((tokens, *shape))) for shape in shapes]


class Rig:
    """A device, its memory and streams."""

    def __init__(self, fault, **settings):
        self.fault = fault
        self.runtime = kvferry.Runtime(device="cuda", **settings)
        self.own = kvferry.Stream(self.runtime)

    def array(self, values):
        """Device memory with these values."""
        return self.put(self.runtime.memory(values.nbytes), values)

    def put(self, memory, values):
        self.own.copy(memory, np.ascontiguousarray(values))
        self.own.wait()
        return memory

    def get(self, memory, *shape):
        """The numbers of an array in bf16."""
        values = np.empty(shape, np.uint16)
        self.own.copy(values, memory)
        self.own.wait()
        return numbers(values)


class Gpu(Rig):
    """Streams and captures are torch's."""
    models_on = "cuda"

    def __init__(self, torch, fault):
        super().__init__(fault)
        self.torch = torch

    def stream(self, is_default):
        cuda = self.torch.cuda
        return self.runtime.torch_stream(cuda.default_stream() if is_default else cuda.Stream())

    def capture(self, work):
        """A function that replays what `work` enqueues, captured in global mode, and waits."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, capture_error_mode="global"):
            work(self.runtime.torch_stream())

        def replay():
            graph.replay()
            self.torch.cuda.synchronize()
        return replay


class Emulated(Rig):
    """Captures by CUDA's own calls."""
    models_on = "cpu"

    def __init__(self, fault):
        super().__init__(fault, calibrate=False)
        self.cuda = ctypes.CDLL("libkvf_emu.so")  # which the library has loaded

    def stream(self, is_default):
        return kvferry.Stream(self.runtime, 0 if is_default else None)

    def call(self, name, *args):
        status = getattr(self.cuda, name)(*args)
        must(status == 0, "%s: CUDA error %d", name, status)

    def capture(self, work):
        stream, graph, run = kvferry.Stream(self.runtime), ctypes.c_void_p(), ctypes.c_void_p()
        native = ctypes.c_void_p(stream.native)
        self.call("cudaStreamBeginCapture", native, 0)  # cudaStreamCaptureModeGlobal
        work(stream)
        self.call("cudaStreamEndCapture", native, ctypes.byref(graph))
        self.call("cudaGraphInstantiate", ctypes.byref(run), graph, ctypes.c_ulonglong(0))

        def replay():
            self.call("cudaGraphLaunch", run, native)
            stream.wait()
        return replay


# ---- blocks, as engines call them ----


class Row:
    """A request: its block ids, and all of its keys and values."""

    def __init__(self):
        self.ids, self.k, self.v = [], None, None

    def __len__(self):
        return 0 if self.k is None else len(self.k)

    def add(self, k, v, free):
        self.k, self.v = (new if old is None else np.concatenate([old, new])
                          for old, new in ((self.k, numbers(k)), (self.v, numbers(v))))
        while len(self.ids) * BLOCK < len(self):
            self.ids.append(free.pop())

    def slots(self, count):
        """Slots of its newest tokens."""
        return [self.ids[t // BLOCK] * BLOCK + t % BLOCK for t in range(len(self) - count, len(self))]


class Engine:
    """One layer under block tables. Arrays of steps stay where they are, as captures want it."""

    def __init__(self, rig, dims=(64, 64), budget=4096, limit=512, close=CLOSE, sinks=None, cap=0.0, **settings):
        self.rig, self.budget, self.close, self.sinks, self.cap = rig, budget, close, sinks, cap
        self.random = np.random.default_rng(5)
        self.width, (self.dim, self.value_dim) = limit // BLOCK, dims
        self.shapes = (HEADS, self.dim), (KV_HEADS, self.dim), (KV_HEADS, self.value_dim)
        self.free = self.random.permutation(ROWS * self.width + 1).tolist()
        self.blocks = kvferry.Blocks(rig.runtime, block_count=len(self.free), block_tokens=BLOCK, layers=1,
                                     query_heads=HEADS, kv_heads=KV_HEADS, head_dim=self.dim,
                                     value_dim=self.value_dim, tokens_max=limit, sequences_max=ROWS, dtype="bf16",
                                     budget_tokens=budget, **settings)
        self.codes = rig.array(np.zeros(len(self.free) * self.blocks.plan.code_bytes, np.uint8))
        self.blocks.bind(0, self.codes.address)
        if sinks is not None or cap:
            self.blocks.attention_params(0, sinks=sinks, soft_cap=cap)
        self.rows = [Row() for _ in range(ROWS)]
        self.host = {name: np.zeros((ROWS, self.width) if name == "table" else ROWS, kind)
                     for name, kind in TYPES.items()}
        self.host.update(zip("qkv", self.draw(ROWS)), out=np.zeros((ROWS, HEADS, self.value_dim), np.uint16))
        self.there = {name: rig.array(values) for name, values in self.host.items()}

    def draw(self, tokens):
        return draw(self.random, tokens, self.shapes)

    def tell(self, at, row):
        self.host["table"][at, :len(row.ids)] = row.ids
        if self.rig.fault:
            self.host["table"][at, 0] = self.free[0]  # nobody's
        self.host["lengths"][at] = len(row)

    def upload(self, *names):
        for name in names:
            self.rig.put(self.there[name], self.host[name])

    def table(self):
        return self.there["table"].address, self.width

    def compare(self, got, q, row):
        error = np.abs(got - dense(numbers(q), row.k, row.v, self.sinks, self.cap)).max()
        must(error < self.close, "an output differs from dense attention's by %g, at most %g", error, self.close)

    def prompt(self, row, chunks, stream):
        """Each chunk attends to all before it."""
        for count in chunks:
            before, (q, k, v) = len(row), self.draw(count)
            row.add(k, v, self.free)
            self.tell(0, row)
            self.upload("table", "lengths")
            out = self.rig.array(np.zeros((count, HEADS, self.value_dim), np.uint16))
            there = [self.rig.array(x) for x in (q, k, v, np.array(row.slots(count)))]
            self.blocks.put(0, count, *(x.address for x in there[1:]), stream)
            self.blocks.extend(0, self.table(), self.there["lengths"].address, [0, count], [before],
                               there[0].address, out.address, stream)
            stream.wait()
            self.compare(self.rig.get(out, count, HEADS, self.value_dim), q, row)

    def advance(self, order):
        """A token for the rows that `order` names, in its order; places after them are empty."""
        host = self.host
        host.update(zip("qkv", self.draw(ROWS)), regions=self.random.permutation(ROWS).astype(np.int32))
        host["lengths"][:], host["slots"][:], host["out"][:] = 0, -1, bits(np.nan)
        for at, i in enumerate(order):
            self.rows[i].add(host["k"][at:at + 1], host["v"][at:at + 1], self.free)
            self.tell(at, self.rows[i])
            host["slots"][at:at + 1] = self.rows[i].slots(1)
        self.upload(*host)

    def enqueue(self, stream):
        at = {name: memory.address for name, memory in self.there.items()}
        self.blocks.put(0, ROWS, at["k"], at["v"], at["slots"], stream)
        self.blocks.decode(0, ROWS, self.table(), at["lengths"], at["q"], at["out"], stream, regions=at["regions"])

    def out(self):
        return self.rig.get(self.there["out"], ROWS, HEADS, self.value_dim)

    def compare_step(self, order):
        out = self.out()
        for at, i in enumerate(order):
            if len(self.rows[i]) <= self.budget:
                self.compare(out[at:at + 1], self.host["q"][at:at + 1], self.rows[i])
        must(np.isfinite(out).all(), "an output that nobody wrote")
        must(not out[len(order):].any(), "a place without a row is not zeros")
        return out

    def close_clean(self):
        stats = self.blocks.stats()
        must(stats.bad_rows + stats.bad_slots == 0, "%d bad rows, %d bad slots", stats.bad_rows, stats.bad_slots)
        self.blocks.close()
        return stats


def chunks_and_steps(rig, is_default=False, chunks=(40, 64, 30), **settings):
    """Prompts in chunks that end within a block, and steps of some rows in any order."""
    engine, stream, outs = Engine(rig, **settings), rig.stream(is_default), []
    for i, row in enumerate(engine.rows):
        engine.prompt(row, (*chunks, 9 * i + 1), stream)
    for order in ((0, 1, 2), (2, 0, 1), (1,)):
        engine.advance(order)
        engine.enqueue(stream)
        stream.wait()
        outs.append(engine.compare_step(order))
    return engine.close_clean(), outs


def captured(rig, budget):
    """Steps captured in global mode, replayed with other tables, lengths and regions."""
    engine, stream = Engine(rig, budget=budget), rig.stream(True)
    for i, row in enumerate(engine.rows):
        engine.prompt(row, (180 + 40 * i,), stream)
    engine.advance((0, 1, 2))
    engine.enqueue(stream)  # engines warm up before they capture
    stream.wait()
    replay = rig.capture(engine.enqueue)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2), (0,)):
        engine.advance(order)
        replay()
        out = engine.compare_step(order)
        engine.enqueue(stream)
        stream.wait()
        must(np.array_equal(out, engine.out()), "a replay and the same step, enqueued, differ")
    engine.close_clean()


def captured_both(rig):
    for budget in (128, 4096):
        captured(rig, budget)


def evicted(rig):
    long = {"budget": 128, "chunks": (200, 160, 30)}
    stats, outs = chunks_and_steps(rig, device_bytes=0, **long)
    in_place = rig.runtime.describe()["devices"][0]["shares_host_memory"]
    must(stats.misses > 0 and (stats.bytes_prompt > 0 or in_place), "%d pages, %d bytes of prompts came from the host",
         stats.misses, stats.bytes_prompt)
    must(np.array_equal(outs, chunks_and_steps(rig, device_bytes=1 << 30, **long)[1]),
         "a step differs where its pages are on the device")


# ---- sequences, and Transformers ----


def sequences(rig):
    outs = [run_sequence(rig, chunks, slots) for chunks in ((301,), (128, 173), (64, 37, 100, 1, 99))
            for slots in ({}, {"device_bytes": 0})]
    for out, _ in outs[1:]:
        must(np.array_equal(out, outs[0][0]), "a prompt in chunks, or the step after it, differs")
    error = np.abs(outs[0][0] - dense(*outs[0][1])[-len(outs[0][0]):]).max()
    must(error < CLOSE, "a prompt differs from dense attention by %g, at most %g", error, CLOSE)


def run_sequence(rig, chunks, slots):
    """Outputs of a prompt in these chunks and of a step, and what they were made from."""
    shapes = (HEADS, 64), (KV_HEADS, 64), (KV_HEADS, 64)
    parts, at, got = draw(np.random.default_rng(6), sum(chunks) + 1, shapes), 0, []
    with kvferry.Cache(rig.runtime, layers=1, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=64, tokens_max=512,
                       dtype="bf16", prefill_chunk_max=512, **slots) as cache:
        sequence = cache.sequence()
        for count in (*chunks, 1):
            q, k, v = (x[at:at + count].copy() for x in parts)
            if rig.fault and at:
                k[0] = bits(4 + numbers(k[0]))
            there = [rig.array(x) for x in (q, k, v, np.zeros_like(q))]
            if at < sum(chunks):
                cache.prefill(sequence, *there, tokens=count, stream=rig.own)
            else:
                cache.decode([sequence], *there, stream=rig.own)
            rig.own.wait()
            got.append(rig.get(there[3], count, HEADS, 64))
            at += count
    return np.concatenate(got), [numbers(x) for x in parts]


def logits_of(model, ids, mask, implementation, **more):
    import torch
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        said = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                              output_logits=True, return_dict_in_generate=True, **more)
    return torch.stack(said.logits)


def transformers(rig):
    import torch
    import kvferry.hf
    import tiny_models
    if rig.models_on == "cpu":
        torch.set_num_threads(1) # more would wait for each other most of the time
    for family in FAMILIES:
        for left_out in (0, 17):
            model = tiny_models.make(family, 7).to(rig.models_on)
            ids = torch.randint(tiny_models.FIRST, tiny_models.LAST, (2, PROMPT)).to(rig.models_on)
            mask = torch.ones_like(ids)
            mask[0, :left_out] = 0
            wanted = logits_of(model, ids, mask, "eager")
            if rig.fault:
                name = next(name for name, p in model.named_parameters() if "layers.1.self_attn" in name and p.ndim == 2)
                model.get_parameter(name).data.mul_(-1)
            model.set_attn_implementation("kvferry")
            for whose in ("own", "library"):
                got = logits_of(model, ids, mask, "kvferry", past_key_values=kvferry.hf.Cache(
                    model, budget=2048, prompt_attention=whose))
                error = ((got - wanted).abs().max() / wanted.abs().max()).item()
                must(error < CLOSE_LOGITS, "%s, %d tokens of padding, prompt_attention = %s: logits differ by %g of the "
                     "largest, at most %g", family, left_out, whose, error, CLOSE_LOGITS)


def blocks(**settings):
    return lambda rig: chunks_and_steps(rig, **settings)


# Name: words, and the function.
SECTIONS = {
    "default": ("blocks on the default stream", blocks(is_default=True)),
    "side": ("blocks on a side stream", blocks()),
    "captured": ("blocks captured in global mode, replayed with other tables, lengths, regions", captured_both),
    "evicted": ("contexts that left the device, read from the host", evicted),
    "sinks": ("attention sinks", blocks(sinks=np.float32([1.5, -2.0, 4.0, 0.0]))),
    "caps": ("a soft cap", blocks(cap=5.0)),
    "wide": ("keys of 192, values of 128", blocks(dims=(192, 128))),
    "k8v8": ("quantized pages", blocks(dims=(128, 128), pages="k8v8", close=CLOSE_K8V8)),
    "sequences": ("prompts of sequences in chunks, with slots and without", sequences),
    "transformers": ("tiny models of four families, padded and not, beside eager attention", transformers),
}


def verdict_of(rig, name):
    """One line. A failure stops no other section."""
    begin, (what, section) = time.monotonic(), SECTIONS[name]
    try:
        section(rig)
        verdict, why = "PASS", ""
    except ImportError as error:
        verdict, why = "skipped", ": no " + str(error.name)
    except Exception as error:  # whatever it is, it is this section's verdict
        verdict, why = "FAIL", ": %s: %s" % (type(error).__name__, str(error).split("\n")[0])
        if not rig.fault:
            traceback.print_exc()
    print("%-12s %-7s %5.1f s  %s%s" % (name, verdict, time.monotonic() - begin, what, why), flush=True)
    return verdict


def open_rig(args):
    if args.emulated:
        return Emulated(args.fault)
    try:
        import torch
        if torch.cuda.is_available():
            return Gpu(torch, args.fault)
        why = "torch sees no GPU"
    except ImportError as error:
        why = str(error)
    print("check_gpu: %s; --emulated runs it on the CPU" % why, file=sys.stderr)
    sys.exit(77)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--emulated", action="store_true", help="on the emulator's device")
    parser.add_argument("--fault", action="store_true", help="plant faults: no section may pass")
    args = parser.parse_args()
    unknown = [name for name in args.sections if name not in SECTIONS]
    if unknown:
        parser.error("unknown section '%s'; sections are %s" % (unknown[0], ", ".join(SECTIONS)))
    rig = open_rig(args)
    print("%s, %s" % (rig.runtime.device_name, "faults planted" if args.fault else "no fault planted"))
    verdicts = [verdict_of(rig, name) for name in args.sections or SECTIONS]
    if set(verdicts) == {"skipped"}:
        return 77
    return int(("PASS" if args.fault else "FAIL") in verdicts)


if __name__ == "__main__":
    sys.exit(main())
