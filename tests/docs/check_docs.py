#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the first example of a page of the documentation, as a reader would after `./dev build`.

The example is the first fenced block of sh, python or c. It runs in a folder of its own that looks
like a checkout: examples/ is the source's, build/ has the programs and takes what the example
writes. If a block of text stands right after it, every line of that is a line of what the example
prints; `...` in it stands for anything.

The page of vLLM runs in the Python that `./dev vllm` makes, beside the model of that; without it the test
is skipped.

usage: check_docs.py SOURCE BUILD CC PAGE
"""
import importlib
import os
import re
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"^```(sh|python|c)\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.S | re.M)
# The program around README's lines of C: they are a piece of a program.
PIECE = """#include <kvferry/kvferry.h>
#include <stdio.h>
int piece(kvf_runtime *runtime, kvf_cache *cache, kvf_sequence *sequence, kvf_stream *stream,
          const void *q, const void *k, const void *v, void *out)
{
    kvf_error error;
    kvf_cache_config config;
%s
    return 0;
}
"""


def run(what, folder, **options):
    done = subprocess.run(what, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          text=True, check=False, **options)
    print(done.stdout, end="")
    if done.returncode:
        sys.exit("%s ends with %d" % (what[0], done.returncode))
    return done.stdout


class Place:
    """The folder, and how each language runs there."""

    def __init__(self, folder, source, build, cc):
        self.folder, self.source, self.cc = folder, source, cc
        os.symlink(os.path.join(source, "examples"), os.path.join(folder, "examples"))
        os.mkdir(os.path.join(folder, "build"))
        for built in ("runtime", "runner"):
            os.symlink(os.path.join(build, built), os.path.join(folder, "build", built))
        self.library = os.path.join(build, "runtime")
        self.python, self.paths, self.env = sys.executable, [], {}

    def use_vllm(self):
        """Its interpreter finds the plug-in, and the real model lies in the folder."""
        sys.path.insert(0, os.path.join(self.source, "tools"))
        env, real = importlib.import_module("vllm_env"), importlib.import_module("real_model")
        python = os.path.join(real.cache_folder(), "vllm", "bin", "python")
        model = os.path.join(real.cache_folder(), real.NAME + ".hf")
        if not os.path.exists(python) or not os.path.exists(model):
            print("skipped: no vLLM here; ./dev vllm makes an environment that has it")
            sys.exit(77)
        os.symlink(model, os.path.join(self.folder, real.NAME))
        self.python, self.paths = python, [env.entry_points(python, env.VLLM.partition("==")[2])]
        self.env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1"}

    def write(self, name, text):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as f:
            f.write(text)

    def run_sh(self, text):
        return run(["bash", "-euo", "pipefail", "-c", text], self.folder)

    def run_python(self, text):
        paths = os.pathsep.join([os.path.join(self.source, "python"), *self.paths])
        env = dict(os.environ, PYTHONPATH=paths, **self.env,
                   KVFERRY_LIBRARY=os.path.join(self.library, "libkvferry.so"))
        return run([self.python, "-c", text], self.folder, env=env)

    def run_c(self, text):
        self.write("program.c", text)
        include = os.path.join(self.source, "include")
        run([*self.cc, "-std=c11", "-Wall", "-Werror", "-I", include, "program.c", "-o", "program",
             "-L", self.library, "-Wl,-rpath," + self.library, "-lkvferry"], self.folder)
        return run(["./program"], self.folder)

    def compile_piece(self, text):
        self.write("piece.c", PIECE % text)
        run([*self.cc, "-std=c11", "-Wall", "-Werror", "-I", os.path.join(self.source, "include"),
             "-c", "piece.c"], self.folder)


def lacking(told, output):
    """Lines of the page that the example did not print."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for line in told.splitlines():
        parts = " ".join(line.split()).split("...")
        pattern = re.compile(".*".join(map(re.escape, parts)))
        if not any(pattern.fullmatch(held) for held in lines):
            yield line


def main():
    source, build, cc, page = sys.argv[1], sys.argv[2], sys.argv[3].split(), sys.argv[4]
    with open(os.path.join(source, page), encoding="utf-8") as f:
        blocks = BLOCK.findall(f.read())
    with tempfile.TemporaryDirectory() as folder:
        place = Place(folder, source, build, cc)
        if page == "README.md":
            place.compile_piece(next(text for language, text, _ in blocks if language == "c"))
            return
        if page == "docs/vllm.md":
            place.use_vllm()
        language, text, told = blocks[0]
        missing = list(lacking(told, getattr(place, "run_" + language)(text)))
    if missing:
        sys.exit("%s: its example did not print: %s" % (page, "; ".join(missing)))


if __name__ == "__main__":
    main()
