#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the CUDA toolkit behind an nvcc is, and what it can compile for.

usage: cuda_toolkit.py NVCC [TARGET...]

Prints four lines: version (major.minor), include folder, folder of libcudart_static.a, and those
TARGETs (80, 90, ...) that this nvcc knows. Exits 1 with one line on stderr if it cannot be used.
"""
import os
import re
import subprocess
import sys

VERSION_MIN = (12, 4)


def output(*command):
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return run.stdout


def folders(dry_run, name, flag):
    line = re.search(r"^#\$ %s=(.*)$" % name, dry_run, re.M)
    return [os.path.realpath(p) for p in re.findall(flag + r'([^" ]+)', line.group(1))] if line else []


def first_with(paths, name):
    for path in paths:
        if os.path.exists(os.path.join(path, name)):
            return path
    sys.exit("the toolkit has no " + name)


def main():
    nvcc = sys.argv[1]
    version = re.search(r"release (\d+)\.(\d+)", output(nvcc, "--version"))
    if not version:
        sys.exit(nvcc + " does not say its version")
    if tuple(map(int, version.groups())) < VERSION_MIN:
        sys.exit("nvcc is %s.%s, and %d.%d is needed" % (version.groups() + VERSION_MIN))
    dry_run = output(nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null")
    top = os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
    print(".".join(version.groups()))
    print(first_with(folders(dry_run, "INCLUDES", "-I") + [top + "/include"], "cuda_runtime_api.h"))
    print(first_with(folders(dry_run, "LIBRARIES", "-L") + [top + "/lib64"], "libcudart_static.a"))
    known = re.findall(r"sm_(\d+)", output(nvcc, "--list-gpu-code"))
    print(" ".join(t for t in sys.argv[2:] if t in known))


if __name__ == "__main__":
    main()
