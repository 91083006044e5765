#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can say, in parts that fit into ten minutes each; `./dev gpu`.

usage: gpu.py [PART...] [--out DIR] [--built DIR|FILE] [--seconds N]
       gpu.py pack [--into DIR] [--built DIR]

parts: facts kernels suite sanitizer link decode peers runner; all of them if none is named. Each ends
within --seconds (520), every job in it within a limit of its own; what is missing or fails stops
nothing else. --out (gpu-out/) gets results.json, which keeps what earlier calls brought, and a log per
part; what facts say is in results.json. The end is a table of aims and what was measured. Programs
come from build-gpu/, built here for this GPU, or from a tree that `pack` made elsewhere. No network,
no package manager. Nothing beyond Python is needed, but `peers` compares only with what is there. The
status is 0 if nothing failed, 1 if something did, 77 if there is no GPU.
"""
import argparse
import atexit
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import gpu_aims

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOG_BYTES = 40000  # of one job in its part's log
# The parts, and the order in which they run.
PARTS = ["facts", "kernels", "suite", "sanitizer", "link", "decode", "peers", "runner"]
FEWEST_SLOTS = 128  # pages that the default budget can choose
KERNEL_FAMILIES = ["common", "score", "select", "attend", "move", "observe"]
SUITE_ENV = {"KVF_TEST_DEVICE": "cuda"}
# How large the cases are: on a GPU, and where the emulator only shows that they run.
LARGE = {"context": 131072, "dense": 4096, "layers": 32, "batch": 16, "shape": "llama-3.1-8b", "tokens": 48,
         "divide": 1, "decode": ["--steps", "20"]}
SMALL = {"context": 1024, "dense": 1024, "layers": 2, "batch": 2, "shape": "small", "tokens": 4,
         "divide": 512, "decode": ["--steps", "2", "--kv-heads", "2", "--head-dim", "64"]}


def say(text):
    print("gpu: " + text, file=sys.stderr, flush=True)


class Job:
    """One program with a limit. `figures` names a JSON file that it writes."""

    def __init__(self, name, command, limit, env=None, figures=None, cwd=None):
        self.name, self.command, self.limit = name, [str(c) for c in command], limit
        self.env, self.figures, self.cwd = dict(SUITE_ENV, **(env or {})), figures, cwd or ROOT

    def run(self, until):
        """The result, and what the program said."""
        result = {"name": self.name, "command": " ".join(self.command)}
        seconds = min(self.limit, until - time.monotonic())
        if seconds < 1:
            return dict(result, status="not run", why="the part's time was over"), ""
        if not shutil.which(self.command[0]):
            return dict(result, status="not run", why=self.command[0] + " is not here"), ""
        begin = time.monotonic()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       cwd=self.cwd, env=dict(os.environ, **self.env), start_new_session=True)
            try:
                code = process.wait(seconds)
                status = "ok" if code == 0 else "skipped" if code == 77 else "failed"
            except subprocess.TimeoutExpired:
                status, code = "timeout", None
            end_group(process)
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_BYTES))
            text = log.read().decode("utf-8", "replace")
        result.update(status=status, code=code, seconds=round(time.monotonic() - begin, 1),
                      limit=round(seconds, 1))
        if status in ("failed", "timeout", "skipped"):
            result["end"] = text.strip().split("\n")[-3:]
        if self.figures and os.path.exists(self.figures):
            try:
                with open(self.figures, encoding="utf-8") as f:
                    result["figures"] = json.load(f)
            except ValueError as e:
                result["figures_error"] = str(e)
        return result, text


def end_group(process):
    """End what the program started, too: a hung one ignores a polite request."""
    for number, patience in ((signal.SIGTERM, 2), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, PermissionError):
            break
        except subprocess.TimeoutExpired:
            continue


def output_of(command, limit=20):
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=limit, check=False)
        return done.stdout if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def find_gpu():
    """Its name, or None and why."""
    if not shutil.which("nvidia-smi"):
        return None, "no NVIDIA GPU here: there is no nvidia-smi, so no driver"
    name = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    if not name or not name.strip():
        return None, "no NVIDIA GPU here: nvidia-smi names none"
    return name.strip().split("\n")[0], None


# ---- the tree of programs ----


class Tree:
    """Programs and how to run them: {name: {"cmd", "env", "suite", "timeout"}} of the tests."""

    def __init__(self, folder, tests, emulated, commit):
        self.folder, self.tests, self.emulated, self.commit = folder, tests, emulated, commit

    def program(self, path):
        return self.folder / path


def tests_of_build(folder):
    """The tests as Meson knows them, by what a machine without Meson needs."""
    listed = json.loads(output_of(["meson", "introspect", "--tests", str(folder)], 60) or "[]")
    return {t["name"]: {"cmd": [os.path.relpath(c, folder) if c.startswith(str(folder)) else c
                                for c in t["cmd"]],
                        "env": t["env"], "suite": [s.split(":")[-1] for s in t["suite"]]}
            for t in listed}


def is_emulated(folder):
    options = json.loads(output_of(["meson", "introspect", "--buildoptions", str(folder)], 60) or "[]")
    return any(o["name"] == "cuda" and o["value"] == "emulated" for o in options)


def commit_of(folder, is_fresh=False):
    """What a build folder was built from, as far as one can see: the commit of its own sources, which
    may have moved on since unless it was built just now."""
    try:
        source = json.loads((folder / "meson-info/meson-info.json").read_text())["directories"]["source"]
    except (OSError, ValueError, KeyError):
        return "unknown"
    git = ["git", "-C", source]
    commit, _, at = (output_of(git + ["log", "-1", "--format=%h %ct"]) or "").strip().partition(" ")
    if not commit:
        return "unknown"
    if output_of(git + ["status", "--porcelain", "--untracked-files=no"]):
        commit += " with changes"
    built = folder / "runtime/cli/kvferry"
    if not is_fresh and (not built.exists() or built.stat().st_mtime < int(at)):
        commit += " or older"
    return commit


def tree_of_pack(path):
    """An unpacked tree, a packed one, or a build folder."""
    path = pathlib.Path(path).resolve()
    if path.is_file():
        into = pathlib.Path(tempfile.mkdtemp(prefix="kvferry-gpu-"))
        atexit.register(shutil.rmtree, into, ignore_errors=True)
        shutil.unpack_archive(path, into)
        path = into
    manifest = path / "manifest.json"
    if manifest.exists():
        m = json.loads(manifest.read_text())
        library_path = str(path / "lib")
        os.environ["LD_LIBRARY_PATH"] = ":".join(
            p for p in (library_path, os.environ.get("LD_LIBRARY_PATH")) if p)
        return Tree(path, m["tests"], m["emulated"], m["commit"])
    if (path / "build.ninja").exists() and shutil.which("meson"):
        return Tree(path, tests_of_build(path), is_emulated(path), commit_of(path))
    sys.exit("gpu: %s is neither a tree that `./dev gpu pack` made nor a build folder" % path)


def build_here():
    lacking = [t for t in ("cc", "meson", "ninja", "nvcc") if not shutil.which(t)]
    if lacking:
        sys.exit("gpu: cannot build without %s; give --built with a tree of `./dev gpu pack`"
                 % ", ".join(lacking))
    folder = ROOT / "build-gpu"
    say("building build-gpu/")
    build(folder, [])
    return Tree(folder, tests_of_build(folder), False, commit_of(folder, True))


def build(folder, options, targets=lambda: []):
    """Configure once, then build the targets, or everything."""
    folder.mkdir(exist_ok=True)
    log = folder / "log.txt"
    with open(log, "w", encoding="utf-8") as f:
        def step(command):
            if subprocess.run(command, stdout=f, stderr=f, cwd=ROOT, check=False).returncode != 0:
                tail = log.read_text(errors="replace").split("\n")[-30:]
                sys.exit("\n".join(tail) + "\ngpu: %s failed; see %s" % (command[0], log))
        if not (folder / "build.ninja").exists():
            step(["meson", "setup", "-Dcuda=enabled", "--buildtype=release", "-Dassert_level=1"] +
                 options + [str(folder)])
        step(["ninja", "-C", str(folder)] + targets())


# ---- packing ----

# Beside the tests.
PROGRAMS = {"runtime/cli/kvferry", "tests/kernels/check_kernels", "tests/offload/gpu_only",
            "bench/model/bench_thin"}
NOT_CARRIED = ("libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux", "linux-vdso",
               "libgcc_s.so", "libstdc++.so")


def libraries_of(program):
    """What the loader would add, but for what every machine has; with where it lies here."""
    found = {}
    for line in (output_of(["ldd", str(program)]) or "").split("\n"):
        words = line.split()
        if len(words) > 2 and words[1] == "=>" and not words[0].startswith(NOT_CARRIED):
            found[words[0]] = words[2]
    return found


def tests_to_carry(folder):
    """What the suite runs; tests that need no device stay here."""
    return {name: t for name, t in tests_of_build(folder).items()
            if set(t["suite"]) & {"offload", "runtime", "cuda", "model"} and "host" not in t["suite"]
            and t["cmd"][0].startswith("tests/")
            and (folder / t["cmd"][0]).suffix == ""}


def programs_to_carry(folder):
    listed = json.loads(output_of(["meson", "introspect", "--targets", str(folder)], 60) or "[]")
    known = {os.path.relpath(f, folder) for t in listed for f in t["filename"]}
    wanted = {t["cmd"][0] for t in tests_to_carry(folder).values()} | PROGRAMS
    for program in sorted(wanted - known):
        say("left out: this build has no " + program)
    return sorted(wanted & known)


def pack(into, built):
    """A tree of build-pack/, built here for sm_90, or of what lies in another build folder; and its
    archive beside it, which travels: it shrinks to a tenth."""
    folder, into = pathlib.Path(built or ROOT / "build-pack").resolve(), pathlib.Path(into).resolve()
    if not built:
        say("building build-pack/ for sm_90")
        build(folder, ["-Dgpu_targets=90", "-Dhwloc=disabled", "-Dnuma=disabled", "-Ddnnl=disabled",
                       "-Dlibedit=disabled", "-Dinside_shared=true"], lambda: programs_to_carry(folder))
    elif not (folder / "build.ninja").exists():
        sys.exit("gpu: %s is no build folder" % folder)
    programs = [p for p in programs_to_carry(folder) if (folder / p).is_file()]
    tests = {name: t for name, t in tests_to_carry(folder).items() if t["cmd"][0] in programs}
    if into.exists():
        shutil.rmtree(into)
    libraries = {}
    for program in programs:
        (into / program).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / program, into / program)
        libraries.update(libraries_of(folder / program))
    (into / "lib").mkdir()
    for name, path in libraries.items():
        shutil.copy(os.path.realpath(path), into / "lib" / name)
    for f in into.rglob("*"):
        if f.is_file():
            subprocess.run(["strip", "--strip-unneeded", str(f)], stderr=subprocess.DEVNULL, check=False)
    commit = commit_of(folder, not built)
    (into / "manifest.json").write_text(json.dumps(
        {"commit": commit, "emulated": is_emulated(folder), "tests": tests}, indent=1))
    size = sum(f.stat().st_size for f in into.rglob("*") if f.is_file())
    packed = os.path.getsize(shutil.make_archive(str(into), "xztar", into))
    print("%s.tar.xz: %.1f MiB, unpacked %.1f MiB, %d programs, %d libraries, %d tests, commit %s" % (
        into, packed / 1048576, size / 1048576, len(programs), len(libraries), len(tests), commit))
    if packed > 60 << 20:
        sys.exit("gpu: more than 60 MiB")


# ---- parts ----


def facts_jobs(tree, scratch):
    versions = ("import importlib.metadata as m\n"
                "for p in ('torch', 'transformers', 'triton', 'numpy', 'meson', 'ninja'):\n"
                "    try: print(p, m.version(p))\n"
                "    except m.PackageNotFoundError: print(p, 'missing')\n")
    tools = ("for t in nvcc ncu nsys compute-sanitizer cuobjdump cuda-gdb gcc g++ clang meson ninja git; do "
             "printf '%s: ' $t; command -v $t || echo missing; done; nvcc --version | tail -n 2; "
             "ldconfig -p | grep -E 'cublas|hwloc|libnuma|dnnl|pcre2-8|utf8proc|jansson|cmocka'; true")
    return [Job("driver", ["nvidia-smi", "-q"], 30),
            Job("link", ["nvidia-smi", "topo", "-m"], 30),
            Job("machine", ["sh", "-c", "lscpu; free -m; cat /proc/meminfo; ulimit -a; df -h /tmp; uname -a; "
                            "cat /sys/fs/cgroup/memory.max 2>/dev/null; true"], 20),
            Job("tools", ["sh", "-c", tools], 30),
            Job("python", [sys.executable, "-c", versions], 30),
            Job("kvferry info", [tree.program("runtime/cli/kvferry"), "info", "--device", "cuda"], 60),
            Job("gpu only", [tree.program("tests/offload/gpu_only")], 120)]


def kernels_jobs(tree, scratch):
    check = tree.program("tests/kernels/check_kernels")
    jobs = [Job("kernels " + family, [check, "--isa", "cuda", "--family", family], 150)
            for family in KERNEL_FAMILIES]
    figures = str(scratch / "timed.json")
    return jobs + [Job("timed", [check, "--isa", "cuda", "--bench", "--json", figures], 220, figures=figures)]


def suite_jobs(tree, scratch):
    wanted = {"offload", "runtime", "model"}
    known = {name: t for name, t in tree.tests.items()  # an emulated tree has each once more, for the host
             if set(t["suite"]) & wanted and "host" not in t["suite"] and t["cmd"][0].startswith("tests/")
             and ("cuda" in t["suite"] or not tree.emulated)}
    return [Job(name, [tree.program(t["cmd"][0])] + t["cmd"][1:], 90, env=t["env"])
            for name, t in sorted(known.items())]


def sanitizer_jobs(tree, scratch):
    check = tree.program("tests/kernels/check_kernels")

    def sanitized(tool, name, command, limit):
        return Job("%s of %s" % (tool, name), ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"] +
                   [str(c) for c in command], limit)
    jobs = [sanitized("memcheck", family, [check, "--isa", "cuda", "--family", family], 170)
            for family in ("move", "select", "score", "attend", "observe")]
    jobs += [sanitized("racecheck", op, [check, "--isa", "cuda", "--op", op], 110)
             for op in ("topk", "resolve", "attend", "move")]
    dense = tree.program("tests/runtime/test_runtime_dense")
    return jobs + [sanitized("memcheck", "runtime dense", [dense], 170)]


def bench(tree, scratch, name, words, limit, env=None):
    figures = str(scratch / (name.replace(" ", "-") + ".json"))
    return Job(name, [tree.folder / "runtime/cli/kvferry", "bench"] + words + ["--device", "cuda", "--json", figures],
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
            bench(tree, scratch, "4 layers, enqueued", ["decode", "--eager"] + long, 90),
            bench(tree, scratch, "4 layers, batch 16", ["decode", "--batch", str(size["batch"])] + long, 150),
            bench(tree, scratch, "methods", ["decode", "--eager", "--method", "mapped,gather"] + long, 90),
            bench(tree, scratch, "4 layers, each, nothing resident", ["decode"] + afresh + long, 60),
            bench(tree, scratch, "dense at 4K",
                  ["decode", "--context", str(size["dense"]), "--select", "full"] + few, 60)]


def peers_jobs(tree, scratch):
    """Without torch what is left is kvferry, whose own dense attention stands beside it."""
    size = SMALL if tree.emulated else LARGE
    figures = str(scratch / "torch.json")
    library = tree.folder / "lib/libkvferry.so.0"  # of a packed tree
    if not library.exists():
        library = tree.folder / "runtime/libkvferry.so"
    env = {"KVFERRY_LIBRARY": str(library), "PYTHONPATH": str(ROOT / "python"), "HF_HUB_OFFLINE": "1"}
    small = ["--device", "cpu", "--small"] if tree.emulated else []
    return [bench(tree, scratch, "kvferry and dense attention",
                  ["decode", "--dense-steps", "5", "--layers", "4", "--warmup", "4"] + size["decode"] +
                  ["--context", "%d,%d" % (max(1024, size["context"] // 4), size["context"])], 150),
            Job("torch", [sys.executable, ROOT / "bench/python/bench_gpu.py", "--json", figures] + small, 360,
                env=env, figures=figures)]


def runner_jobs(tree, scratch):
    size = SMALL if tree.emulated else LARGE
    model, few, many = scratch / "model", scratch / "few.txt", scratch / "many.txt"
    for path, count in ((few, 64 if tree.emulated else size["dense"]),
                        (many, 128 if tree.emulated else size["context"])):
        path.write_text(" ".join(str(i * 37 % 4000) for i in range(count)))

    def run(name, ids, words, limit, answers=1):
        figures = str(scratch / (name.replace(" ", "-") + ".json"))
        command = [tree.folder / "runtime/cli/kvferry", "run", "--device", "cuda", "--model", model,
                   "--token-ids", ids, "--ignore-eos", "-n", str(size["tokens"]), "--stats", figures]
        if answers > 1:  # they fork one prompt, and go ways of their own
            command += ["--samples", str(answers), "--batch", str(answers), "--temperature", "1"]
        return Job(name, command + words, limit, figures=figures)
    dense, slots = ["--select", "full"], ["--slots", str(FEWEST_SLOTS), "--transfer", "each"]
    tests = [Job(name, [tree.program(t["cmd"][0])] + t["cmd"][1:], 90, env=t["env"])
             for name, t in sorted(tree.tests.items())
             if "model" in t["suite"] and t["cmd"][0].endswith((
                 "test_logits", "test_transformer", "test_generate", "check_row_ops", "test_draw_queue",
                 "test_thin_product", "test_wide_step"))]
    products = str(scratch / "products.json")
    thin = [tree.program("bench/model/bench_thin"), "--json", products, "--divide", str(size["divide"])]
    return [Job("products", thin, 60, figures=products),
            Job("weights of an 8B shape", [sys.executable, ROOT / "bench/model/random_model.py", model,
                                           "--shape", size["shape"]], 240),
            run("run, all of 4K", few, dense, 90),
            run("run, 128K", many, [], 150),
            run("run, all of 4K, batch 16", few, dense, 90, size["batch"]),
            run("run, 128K, batch 16", many, [], 170, size["batch"]),
            run("run, 128K, each", many, slots, 150)] + tests


# Jobs at once: where time is measured, one.
TOGETHER = {"facts": 4, "kernels": 3, "suite": 8, "sanitizer": 3, "link": 1, "decode": 1, "peers": 1,
            "runner": 1}


def write_log(path, done):
    with open(path, "w", encoding="utf-8") as log:
        for result, text in done:
            log.write("==== %s: %s (%s s)\n%s\n%s\n" % (
                result["name"], result["status"], result.get("seconds", 0), result["command"], text))


def run_part(part, tree, out, seconds):
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvferry-gpu-") as folder:
        jobs = globals()[part + "_jobs"](tree, pathlib.Path(folder))
        alone = [j for j in jobs if j.name == "timed"]
        with concurrent.futures.ThreadPoolExecutor(TOGETHER[part]) as pool:
            done = list(pool.map(lambda j: j.run(begin + seconds), [j for j in jobs if j not in alone]))
        done += [j.run(begin + seconds) for j in alone]
    if part == "facts":
        results = [dict(r, said=text.split("\n")) for r, text in done]
    else:
        results = [r for r, _ in done]
        write_log(out / (part + ".txt"), done)
    for r in results:
        if r["status"] not in ("ok", "skipped"):
            say("%s: %s: %s%s" % (part, r["name"], r["status"], ": " + r["why"] if "why" in r else ""))
    counts = {s: sum(r["status"] == s for r in results)
              for s in ("ok", "failed", "timeout", "skipped", "not run")}
    say("%s: %s (%d s)" % (part, ", ".join("%d %s" % (n, s) for s, n in counts.items() if n),
                           time.monotonic() - begin))
    return {"counts": counts, "seconds": round(time.monotonic() - begin, 1), "jobs": results}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS) + "; or pack")
    parser.add_argument("--out", default="gpu-out", help="folder of the results (gpu-out)")
    parser.add_argument("--built", help="a tree of `pack`, that tree as one file, or a build folder; of pack: a build folder")
    parser.add_argument("--seconds", type=int, default=520, help="of one part (520)")
    parser.add_argument("--into", default="gpu-tree", help="of pack: the folder that it makes, and its .tar.xz (gpu-tree)")
    a = parser.parse_args()
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/local/cuda/bin:/opt/cuda/bin:/usr/local/nvidia/bin"
    if a.parts == ["pack"]:
        return pack(a.into, a.built)
    unknown = [p for p in a.parts if p not in PARTS]
    if unknown:
        parser.error("unknown part '%s'; parts are %s" % (unknown[0], " ".join(PARTS)))
    gpu, why = find_gpu()
    tree = tree_of_pack(a.built) if a.built else None
    if not gpu and not (tree and tree.emulated):
        say(why)
        return 77
    tree = tree or build_here()
    say(gpu or "%s; the emulator stands in, and its times say nothing" % why)
    out = pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    results.update(device=gpu or "emulated", built=a.built or "build-gpu", commit=tree.commit)
    for part in a.parts or PARTS:
        results[part] = run_part(part, tree, out, a.seconds)
        results["aims"] = gpu_aims.table(results)
        kept.write_text(json.dumps(results, indent=1))
    print(gpu_aims.show(results["aims"]))
    bad = [p for p in a.parts or PARTS if results[p]["counts"]["failed"] or results[p]["counts"]["timeout"]]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
