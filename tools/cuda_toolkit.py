#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the CUDA toolkit of an nvcc is, and what it can compile for.

usage: cuda_toolkit.py NVCC [TARGET...]

Prints four lines: version (major.minor), include folder, folder of libcudart_static.a, and the
targets to compile for (80 90 ...). TARGET is a compute capability without its dot; `all` means
every one that is supported, `auto` the GPUs of this machine, or the oldest one where there is none.
Targets that this nvcc does not know are left out. Exits 1 with one line on stderr if it cannot be used.
"""
import os
import re
import subprocess
import sys

VERSION_MIN = (12, 4)
TARGETS = ["80", "86", "89", "90", "100", "120"]


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


def gpus():
    """Compute capabilities of the GPUs of this machine, as the driver says."""
    try:
        text = output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    except OSError:
        return []
    return sorted({m.replace(".", "") for m in re.findall(r"^\d+\.\d$", text, re.M)}, key=int)


def targets(asked, known, present):
    """Those `asked` for that nvcc knows, oldest first. PTX of the newest goes into every object,
    and newer GPUs compile it; so one of them finds its predecessor here, and any finds the oldest."""
    chosen = set()
    for name in asked or ["auto"]:
        if name == "all":
            chosen.update(TARGETS)
        elif name != "auto":
            chosen.add(name)
        elif not present:
            chosen.add(TARGETS[0])
        for gpu in present if name == "auto" else []:
            older = [t for t in TARGETS if t in known and int(t) <= int(gpu)] or TARGETS[:1]
            chosen.add(gpu if gpu in known and int(gpu) >= int(TARGETS[0]) else older[-1])
    return sorted(chosen.intersection(known), key=int)


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
    print(" ".join(targets(sys.argv[2:], known, gpus())))


if __name__ == "__main__":
    main()
