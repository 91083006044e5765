# SPDX-License-Identifier: Apache-2.0
"""The programs that `./dev gpu` runs: those of a build folder, or of a tree that `pack` made.

It knows Meson and what a loader needs, and starts no test. Invariant: what a packed tree has runs on
a machine with neither Meson nor the libraries of the one that packed it.
"""
import atexit
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import llama_cuda
from gpu_job import output_of, say

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Tree:
    """Programs and how to run them: {name: {"cmd", "env", "suite", "timeout"}} of the tests."""

    def __init__(self, folder, tests, emulated, commit):
        self.folder, self.tests, self.emulated, self.commit = folder, tests, emulated, commit

    def program(self, path):
        return self.folder / path


def tests_of_build(folder):
    """The tests as Meson knows them, by what a machine without Meson needs. Where libraries lie is said by
    programs of a build folder themselves, and for those of a packed tree by tree_of_pack; what Meson says
    would be in its place."""
    listed = json.loads(output_of(["meson", "introspect", "--tests", str(folder)], 60) or "[]")
    return {t["name"]: {"cmd": [os.path.relpath(c, folder) if c.startswith(str(folder)) else c
                                for c in t["cmd"]],
                        "env": {k: v for k, v in t["env"].items() if k != "LD_LIBRARY_PATH"},
                        "suite": [s.split(":")[-1] for s in t["suite"]]}
            for t in listed}


def is_emulated(folder):
    options = json.loads(output_of(["meson", "introspect", "--buildoptions", str(folder)], 60) or "[]")
    return any(o["name"] == "cuda" and o["value"] == "emulated" for o in options)


def commit_of(folder, is_fresh=False):
    """The sources of a build folder, as far as one can see: the commit of its own sources, which
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
    built = folder / "runner/cli/kvferry"
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
PROGRAMS = {"runner/cli/kvferry", "tests/kernels/check_kernels", "tests/offload/gpu_only",
            "bench/model/bench_small_batch", "llama/libggml-kvferry.so"}
NOT_CARRIED = ("libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux", "linux-vdso",
               "libgcc_s.so", "libstdc++.so")


def libraries_of(program):
    """Libraries that the loader would add, but for those of every machine; with where it lies here."""
    found = {}
    for line in (output_of(["ldd", str(program)]) or "").split("\n"):
        words = line.split()
        if len(words) > 2 and words[1] == "=>" and not words[0].startswith(NOT_CARRIED):
            found[words[0]] = words[2]
    return found


def tests_to_carry(folder):
    """Tests of the suite; tests that need no device stay here."""
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
        build(folder, ["-Dgpu_targets=90", "-Dnuma=disabled", "-Ddnnl=disabled",
                       "-Dinside_shared=true"], lambda: programs_to_carry(folder))
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
    if llama_cuda.is_built():
        llama_cuda.carry(into / "llama")
    else:
        say("left out: llama.cpp, which tools/llama_cuda.py builds")
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
