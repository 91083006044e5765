# SPDX-License-Identifier: Apache-2.0
"""The jobs of each part of `./dev gpu`: which program runs with which words, and for how long.

It runs nothing but `check_kernels --list`. `NAME_jobs(tree, scratch)` gives the jobs of a part; files
that they write lie in `scratch`. Invariant: names of jobs are those that gpu_aims.py and
gpu_figures.py look for.
"""
import os
import pathlib
import sys

from gpu_job import Job, output_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Kernels of a step, as the profiler names them.
STEP_KERNELS = "append_kernel|rotate_rows|score_codes_tile|score_codes_pages|reduce_mass_pages|select_list|step_chunks|step_plain"
SECTIONS = ("default", "side", "captured", "evicted", "sinks", "caps", "wide", "k8v8", "sequences",
            "transformers")  # of check_gpu.py
UNTRIED = ("blocks", "stage", "admit_written")  # operations that no GPU has compared with their references
# How large the cases are: on a GPU, and where the emulator only shows that they run.
LARGE = {"context": 131072, "dense": 4096, "layers": 32, "batch": 16, "shape": "llama-3.1-8b", "tokens": 48,
         "divide": 1, "decode": ["--steps", "20"]}
SMALL = {"context": 1024, "dense": 1024, "layers": 2, "batch": 2, "shape": "small", "tokens": 4,
         "divide": 512, "decode": ["--steps", "2", "--kv-heads", "2", "--head-dim", "64"]}
# Does memory come as it is used? MemAvailable is no limit everywhere.
TOUCH = """
import mmap, time
said = next(line for line in open('/proc/meminfo') if line.startswith('MemAvailable'))
begin, most = time.time(), %d
memory = mmap.mmap(-1, most)
for at in range(0, most, 1 << 28):
    for i in range(at, min(most, at + (1 << 28)), 4096):
        memory[i] = 1
print(said.strip(), '; touched', most >> 20, 'MiB in', round(time.time() - begin, 1), 's')
"""


def facts_jobs(tree, scratch):
    versions = ("import importlib.metadata as m\n"
                "for p in ('torch', 'transformers', 'triton', 'numpy', 'meson', 'ninja'):\n"
                "    try: print(p, m.version(p))\n"
                "    except m.PackageNotFoundError: print(p, 'missing')\n")
    tools = ("for t in nvcc ncu nsys compute-sanitizer cuobjdump cuda-gdb gcc g++ clang meson ninja git; do "
             "printf '%s: ' $t; command -v $t || echo missing; done; nvcc --version | tail -n 2; "
             "ldconfig -p | grep -E 'cublas|libnuma|dnnl|pcre2-8|utf8proc|jansson|cmocka'; true")
    return [Job("driver", ["nvidia-smi", "-q"], 30),
            Job("link", ["nvidia-smi", "topo", "-m"], 30),
            Job("machine", ["sh", "-c", "lscpu; free -m; cat /proc/meminfo; ulimit -a; df -h /tmp; uname -a; "
                            "cat /sys/fs/cgroup/memory.max 2>/dev/null; true"], 20),
            Job("tools", ["sh", "-c", tools], 30),
            Job("python", [sys.executable, "-c", versions], 30),
            Job("memory", [sys.executable, "-c", TOUCH % (1 << (24 if tree.emulated else 34))], 60),
            Job("kvferry info", [tree.program("runner/cli/kvferry"), "info", "--device", "cuda"], 60),
            Job("gpu only", [tree.program("tests/offload/gpu_only")], 120)]


def python_env(tree):
    """For scripts that use the package on the tree's library."""
    library = tree.folder / "lib/libkvferry.so.0"  # of a packed tree
    if not library.exists():
        library = tree.folder / "runtime/libkvferry.so"
    return {"KVFERRY_LIBRARY": str(library), "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1"}


def operation_job(tree, op):
    return Job("kernels " + op, [tree.program("tests/kernels/check_kernels"), "--isa", "cuda", "--op", op], 150)


def uses_jobs(tree, scratch):
    """Code that no GPU has run: sections of check_gpu.py, in processes of their own, since a fault ends a
    device's context; and the operations under them."""
    script = [sys.executable, ROOT / "tests/python/check_gpu.py"] + ["--emulated"] * tree.emulated
    return [Job(name, script + [name], 100, env=python_env(tree)) for name in SECTIONS] + \
        [operation_job(tree, op) for op in UNTRIED]


def operations_jobs(tree, scratch):
    """A job for each operation that check_kernels compares, as it lists them; if it lists none, one for all
    of them, which says why."""
    check = tree.program("tests/kernels/check_kernels")
    listed = (output_of([str(check), "--list"]) or "").split()
    return [operation_job(tree, op) for op in listed if op not in UNTRIED] or [
        Job("kernels", [check, "--isa", "cuda"], 300)]


def profile_job(tree):
    """A recorded step of one layer under the profiler, launch by launch."""
    size = SMALL if tree.emulated else LARGE
    metrics = ["gpu__time_duration.sum", "dram__bytes.sum", "smsp__inst_executed.sum",
               "sm__inst_issued.avg.pct_of_peak_sustained_active", "sm__warps_active.avg.pct_of_peak_sustained_active"]
    decode = [tree.program("runner/cli/kvferry"), "bench", "decode", "--device", "cuda", "--layers", "1",
              "--warmup", "3", "--context", str(size["context"])] + size["decode"]
    return Job("one layer, profiled",
               ["ncu", "--graph-profiling", "node", "--csv", "--page", "raw", "--metrics", ",".join(metrics),
                "--kernel-name", "regex:" + STEP_KERNELS, "--launch-skip", "18", "--launch-count", "40"] + decode,
               120, is_alone=True)


def kernels_jobs(tree, scratch):
    check = tree.program("tests/kernels/check_kernels")
    figures = str(scratch / "timed.json")
    return [Job("timed", [check, "--isa", "cuda", "--bench", "--json", figures], 120, figures=figures, is_alone=True),
            profile_job(tree)]


def suite_jobs(tree, scratch):
    """Recordings and dense attention first: most rests on them."""
    wanted = {"offload", "runtime", "model"}
    known = {name: t for name, t in tree.tests.items()  # an emulated tree has each once more, for the host
             if set(t["suite"]) & wanted and "host" not in t["suite"] and t["cmd"][0].startswith("tests/")
             and ("cuda" in t["suite"] or not tree.emulated)}
    first = [name for name in sorted(known) if "record" in name or "dense" in name]
    return [Job(name, [tree.program(known[name]["cmd"][0])] + known[name]["cmd"][1:], 150, env=known[name]["env"])
            for name in first + [n for n in sorted(known) if n not in first]]


def sanitizer_jobs(tree, scratch, kept=None):
    """The jobs that failed before, if any did; else families of kernels, and attention that needs all."""
    bad = {j["name"]: j["command"].split() for part in ("operations", "suite") for j in (kept or {}).get(part, {}).get(
        "jobs", []) if j["status"] in ("failed", "timeout")}
    check = tree.program("tests/kernels/check_kernels")

    def sanitized(tool, name, command, limit):
        return Job("%s of %s" % (tool, name), ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"] +
                   [str(c) for c in command], limit)
    if bad:
        return [sanitized(tool, name, command, 110) for name, command in bad.items()
                for tool in ("memcheck", "racecheck")]
    jobs = [sanitized("memcheck", family, [check, "--isa", "cuda", "--family", family], 170)
            for family in ("move", "select", "score", "attend", "observe")]
    jobs += [sanitized("racecheck", op, [check, "--isa", "cuda", "--op", op], 110)
             for op in ("topk", "resolve", "attend", "move")]
    dense = tree.program("tests/runtime/test_runtime_dense")
    return jobs + [sanitized("memcheck", "runtime dense", [dense], 170)]


def bench(tree, scratch, name, words, limit, env=None):
    figures = str(scratch / (name.replace(" ", "-") + ".json"))
    return Job(name, [tree.folder / "runner/cli/kvferry", "bench"] + words + ["--device", "cuda", "--json", figures],
               limit, env=env, figures=figures)


def link_jobs(tree, scratch):
    few = ["link", "methods", "--pages", "4", "--repetitions", "5"]
    return [bench(tree, scratch, "peak", ["link", "peak"], 60),
            bench(tree, scratch, "gather, kernels loaded late",
                  few + ["--method", "gather"], 60, {"CUDA_MODULE_LOADING": "LAZY"}),
            bench(tree, scratch, "gather, one connection",
                  few + ["--method", "gather"], 60, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
            bench(tree, scratch, "methods", ["link", "methods"], 200),
            bench(tree, scratch, "rows of 512 bytes",
                  ["link", "methods", "--page-bytes", "512", "--pages", "64,1024,8192"], 90),
            bench(tree, scratch, "blocks", ["link", "blocks"], 90),
            bench(tree, scratch, "cadence", ["link", "cadence"], 120)]


def decode_jobs(tree, scratch):
    size = SMALL if tree.emulated else LARGE
    few = size["decode"] + ["--warmup", "4", "--layers", "4"]
    long = few + ["--context", str(size["context"])]
    afresh = ["--afresh", "--method", "each"]
    return [bench(tree, scratch, "32 layers", ["decode"] + long + ["--layers", str(size["layers"])], 200),
            bench(tree, scratch, "4 layers, batch 16", ["decode", "--batch", str(size["batch"])] + long, 150),
            bench(tree, scratch, "dense at 4K",
                  ["decode", "--context", str(size["dense"]), "--select", "full"] + few, 60),
            bench(tree, scratch, "4 layers, enqueued", ["decode", "--eager"] + long, 90),
            bench(tree, scratch, "4 layers, packed", ["decode", "--pages", "k8v4"] + long, 90),
            bench(tree, scratch, "4 layers, forks of 32K, enqueued",
                  ["decode", "--eager", "--forks", "--batch", str(size["batch"]),
                   "--context", str(max(1024, size["context"] // 4))] + few, 90),
            bench(tree, scratch, "methods", ["decode", "--eager", "--method", "mapped,gather"] + long, 90),
            bench(tree, scratch, "4 layers, each, nothing resident", ["decode"] + afresh + long, 60),
            bench(tree, scratch, "32 layers, late starts",
                  ["decode", "--early-starts", "off"] + long + ["--layers", str(size["layers"])], 200)]


def torch_job(tree, scratch, rows):
    figures = str(scratch / "torch.json")
    small = ["--device", "cpu", "--small"] if tree.emulated else []
    return Job("torch", [sys.executable, ROOT / "bench/python/bench_gpu.py", "--json", figures, "--rows", rows] + small,
               360, env=python_env(tree), figures=figures)


def peers_jobs(tree, scratch):
    """Without torch what is left is kvferry, whose own dense attention stands beside it."""
    size = SMALL if tree.emulated else LARGE
    return [torch_job(tree, scratch, "kvferry|SDPA|cuDNN"),
            bench(tree, scratch, "kvferry and dense attention",
                  ["decode", "--dense-steps", "5", "--layers", "4", "--warmup", "4"] + size["decode"] +
                  ["--context", "%d,%d" % (max(1024, size["context"] // 4), size["context"])], 150)]


def offloaded_jobs(tree, scratch):
    """Transformers' cache, which brings every layer whole: seconds a step."""
    return [torch_job(tree, scratch, "kvferry$|offloaded")]


def runner_jobs(tree, scratch):
    size = SMALL if tree.emulated else LARGE
    model, few, many = scratch / "model", scratch / "few.txt", scratch / "many.txt"
    for path, count in ((few, 64 if tree.emulated else size["dense"]),
                        (many, 128 if tree.emulated else size["context"])):
        path.write_text(" ".join(str(i * 37 % 4000) for i in range(count)))

    def run(name, ids, words, limit, answers=1):
        figures = str(scratch / (name.replace(" ", "-") + ".json"))
        command = [tree.folder / "runner/cli/kvferry", "run", "--device", "cuda", "--model", model,
                   "--token-ids", ids, "--ignore-eos", "-n", str(size["tokens"]), "--stats", figures]
        if answers > 1:  # they fork one prompt, and go ways of their own
            command += ["--samples", str(answers), "--batch", str(answers), "--temperature", "1"]
        return Job(name, command + words, limit, figures=figures)
    dense, slots = ["--select", "full"], ["--device-memory", "0", "--transfer", "each"]
    tests = [Job(name, [tree.program(t["cmd"][0])] + t["cmd"][1:], 90, env=t["env"])
             for name, t in sorted(tree.tests.items())
             if "model" in t["suite"] and t["cmd"][0].endswith((
                 "test_logits", "test_transformer", "test_generate", "test_row_ops", "test_wide_step"))]
    products = str(scratch / "products.json")
    thin = [tree.program("bench/model/bench_small_batch"), "--json", products, "--divide", str(size["divide"])]
    return [Job("products", thin, 60, figures=products),
            Job("weights of an 8B shape", [sys.executable, ROOT / "bench/model/random_model.py", model,
                                           "--shape", size["shape"]], 240),
            run("run, all of 4K", few, dense, 90),
            run("run, 128K", many, [], 150),
            run("run, all of 4K, batch 16", few, dense, 90, size["batch"]),
            run("run, 128K, batch 16", many, [], 170, size["batch"]),
            run("run, 128K, each", many, slots, 150),
            run("run, 128K, late starts", many, ["--early-starts", "off"], 150)] + tests


def llama_jobs(tree, scratch):
    """llama.cpp, as tools/llama_cuda.py built it, on weights that are drawn here."""
    folder, model, figures = tree.folder / "llama", scratch / "model.gguf", str(scratch / "llama.json")
    places = [p for root in (sys.prefix, "/usr/local/cuda", "/opt/cuda")
              for p in sorted(pathlib.Path(root).glob("**/libcublas.so.1*"))[:1]]
    found = [str(p.parent) for p in places] + [os.environ.get("LD_LIBRARY_PATH", "")]
    env = {"KVF_LLAMA": str(folder), "KVFERRY_LLAMA_PLUGIN": str(folder / "libggml-kvferry.so"),
           "LD_LIBRARY_PATH": ":".join(filter(None, found))}
    layers = 2 if tree.emulated else 8
    depths = "256,512" if tree.emulated else "256,32768,131072"
    return [Job("weights for llama.cpp", [sys.executable, ROOT / "bench/python/llama_shape.py", folder / "source",
                                          model, str(layers)], 60),
            Job("llama.cpp", [sys.executable, ROOT / "bench/python/bench_llama_gpu.py", model, "--layers", str(layers),
                              "--depths", depths, "--turns", "2", "--steps", "16", "--json", figures],
                470, env=env, figures=figures, is_alone=True)]
