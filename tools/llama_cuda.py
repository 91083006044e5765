#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp with its CUDA backend for one generation of GPUs, built where there is none; for `./dev gpu llama`.

usage: llama_cuda.py [--jobs N] [--target N]

In the cache folder of the user, from the source that `./dev llama` fetches. It takes nvcc and hours of processor
time on two cores; a build that was cut goes on. `./dev gpu pack` then carries its libraries. It asks for no
driver, and takes cuBLAS from where it runs.
"""
import argparse
import os
import pathlib
import shutil
import sys

import llama_env

TARGETS = ("ggml-cuda", "llama")
LIBRARIES = ("libggml.so", "libggml-base.so", "libggml-cpu.so", "libggml-cuda.so", "libllama.so")
# Kernels for caches of F16 alone; no NCCL and no library of the driver. xz packs them better than nvcc does.
OPTIONS = {"GGML_NATIVE": "OFF", "GGML_CUDA": "ON", "GGML_CUDA_FA_QUANTS": "f16-f16", "GGML_CUDA_NCCL": "OFF",
           "GGML_CUDA_NO_VMM": "ON", "GGML_CUDA_COMPRESSION_MODE": "none", "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON"}


def is_built():
    """Whether the libraries are there, whole."""
    return llama_env.is_built("cuda")


def build(jobs, target):
    """Build the libraries, or what is left of it."""
    nvcc = shutil.which("nvcc", path=os.environ["PATH"] + ":/usr/local/cuda/bin:/opt/cuda/bin")
    if not nvcc:
        sys.exit("llama_cuda.py: there is no nvcc")
    launcher = {"CMAKE_CUDA_COMPILER_LAUNCHER": "ccache"} if shutil.which("ccache") else {}
    llama_env.build("cuda", dict(OPTIONS, CMAKE_CUDA_COMPILER=nvcc, CMAKE_CUDA_ARCHITECTURES="%d-real" % target, **launcher),
                    TARGETS, jobs)


def carry(into):
    """Copy the libraries and what reads models to a folder, as tests/python/llama_case.py wants them."""
    here, there = pathlib.Path(llama_env.folder("cuda", "bin")), pathlib.Path(into) / "native" / "bin"
    there.mkdir(parents=True)
    for name in LIBRARIES:
        whole = (here / name).resolve()
        for link in here.glob(name + "*"): # by the names that others load it by
            if link.resolve() == whole and not (there / link.name).exists() and len(link.name) <= len(name) + 2:
                shutil.copy(whole, there / link.name)
    source = pathlib.Path(llama_env.source())
    shutil.copy(source / "include" / "llama.h", there)
    shutil.copytree(source / "gguf-py" / "gguf", pathlib.Path(into) / "source" / "gguf-py" / "gguf")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--target", type=int, default=90, help="compute capability, times ten (90)")
    args = parser.parse_args()
    build(args.jobs, args.target)


if __name__ == "__main__":
    main()
