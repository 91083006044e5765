#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold the compiled kernels to their written budget: registers, stack, spills, instructions.

usage: check_cuda_budget.py BUILD [--budget FILE] [--list]

Reads what ptxas said of every .cu file (BUILD/*/cuda_*.ptxas.txt, kept by the build) and compares
each kernel of each target with the first line of the budget file that fits it. A kernel without a
line, a line that fits no kernel of a file that was compiled, and a warning of the compiler fail too.
Where cuobjdump is installed, the instructions that the budget names are looked for in the machine
code of every target. Kernels with a line that begins with = are counted in the machine code of COUNTED:
by cuobjdump, which pip brings to the user's cache folder once where it is not installed. Where such code
waits for earlier kernels, nothing may touch memory before. --list prints the greatest numbers per kernel,
to write a budget from.
"""
import argparse
import collections
import fnmatch
import glob
import os
import re
import shutil
import subprocess
import sys

import real_model

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COUNTED = "sm_90"
PACKAGES = ["nvidia-cuda-cuobjdump==13.5.37", "nvidia-cuda-nvdisasm==13.5.37"]
KERNEL = re.compile(
    r"Compiling entry function '(?P<symbol>\S+)' for '(?P<target>sm_\w+)'"
    r"(?:(?!Compiling entry).)*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads(?:(?!Compiling entry).)*?Used (?P<registers>\d+) registers"
    r"(?:[^\n]*?, (?P<shared>\d+) bytes smem)?", re.S)
# Instructions that a kernel that starts early may not have before it waits: prefetches are allowed, PREEXIT lets the next start.
TOUCHES = re.compile(r"(?<![.\w])(?:LDG?|LDGSTS|STG?|RED|REDG|ATOM|ATOMG|UBLKCP|EXIT)\b")
WAIT = "ACQBULK"
Kernel = collections.namedtuple("Kernel", "name full target registers stack spill shared object")
Line = collections.namedtuple("Line", "pattern registers stack spill instructions number")
Count = collections.namedtuple("Count", "unit kernel most number")


def demangle(symbols):
    run = subprocess.run(["c++filt", "-p"], input="\n".join(symbols) + "\n", text=True,
                         stdout=subprocess.PIPE, check=True)
    return run.stdout.splitlines()


def short(full):
    """attend_chunks of `void attend_chunks<(int)128>`, whatever the namespace."""
    name = re.sub(r"[<(].*", "", full[len("void "):] if full.startswith("void ") else full)
    return name.split("::")[-1]


def exact(full):
    """score_codes_pages<4,2> of `void score_codes_pages<4u, 2u>`."""
    arguments = re.search(r"<.*>", full)
    return short(full) + re.sub(r"\(\w+\)|\s|(?<=\d)u", "", arguments[0] if arguments else "")


def unit_of(path, ending):
    return os.path.basename(path)[len("cuda_"):-len(ending)]


def own_unit(unit, full):
    """The file that a kernel is from, and its name: several small ones are compiled as one unit, each in
    a namespace that says so (tools/cuda_unit.py)."""
    own = re.search(r"\bunit_(\w+)::", full)
    return (own[1], re.sub(r"\bunit_\w+::", "", full)) if own else (unit, full)


def read_logs(build):
    """Kernels, and findings."""
    kernels, findings = [], []
    logs = sorted(glob.glob(os.path.join(build, "**", "cuda_*.ptxas.txt"), recursive=True))
    for path in logs:
        with open(path, encoding="utf-8") as f:
            text = f.read()
        for line in text.splitlines():
            if re.search(r"\bwarning\b", line, re.I):
                findings.append("%s: %s" % (path, line.strip()))
        found = list(KERNEL.finditer(text))
        if len(found) != len(set(re.findall(r"Compiling entry function ('\S+' for '\w+')", text))):
            findings.append("%s: numbers of a kernel are missing" % path)
        made = path[:-len(".ptxas.txt")] + ".o"
        for m, full in zip(found, demangle([m["symbol"] for m in found]) if found else []):
            unit, full = own_unit(unit_of(path, ".ptxas.txt"), full)
            name = unit + "/" + short(full)
            kernels.append(Kernel(name, full, m["target"], int(m["registers"]), int(m["stack"]),
                                  int(m["stores"]) + int(m["loads"]), int(m["shared"] or 0), made))
    if not kernels:
        findings.append("%s: no kernel was compiled by nvcc there" % build)
    return kernels, findings


def rows(path):
    """(number, words) of the lines that have any."""
    with open(path, encoding="utf-8") as f:
        lines = [(number, text.split("#")[0].split()) for number, text in enumerate(f, 1)]
    return [(number, words) for number, words in lines if words]


def read_budget(path):
    return [Line(words[0] if "@" in words[0] else words[0] + "@*", *map(int, words[1:4]), tuple(words[4:]), number)
            for number, words in rows(path) if words[0] != "="]


def check_numbers(kernels, budget, path):
    used = set()
    for k in kernels:
        name = k.name + "@" + k.target
        line = next((l for l in budget if fnmatch.fnmatchcase(name, l.pattern)), None)
        if line is None:
            yield "%s: no line of %s fits" % (k.name, path)
            continue
        used.add(line)
        for what in ("registers", "stack", "spill"):
            if getattr(k, what) > getattr(line, what):
                yield "%s on %s: %s %d, the budget is %d (%s)" % (
                    k.name, k.target, what, getattr(k, what), getattr(line, what), k.full)
    compiled = {k.name.split("/")[0] + "@" + k.target for k in kernels}
    for line in budget:
        about = re.sub(r"/[^@]*", "", line.pattern)
        if line not in used and any(fnmatch.fnmatchcase(c, about) for c in compiled):
            yield "%s:%d: no kernel fits %s" % (path, line.number, line.pattern)


def read_counts(path):
    return [Count(*words[1].split("/"), int(words[2]), number) for number, words in rows(path) if words[0] == "="]


def cuobjdump():
    """Its path, or None."""
    nvcc = shutil.which("nvcc", path=os.environ["PATH"] + ":/usr/local/cuda/bin:/opt/cuda/bin")
    beside = os.path.dirname(os.path.realpath(nvcc)) if nvcc else None
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=beside or "")
    if found:
        return found
    folder = os.path.join(real_model.cache_folder(), "cuda-tools-" + PACKAGES[0].split("=")[-1])
    found = os.path.join(folder, "nvidia", "cu13", "bin", "cuobjdump")
    if not os.path.exists(found):
        part = "%s.%d" % (folder, os.getpid())
        pip = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
                              "--disable-pip-version-check", "--target", part] + PACKAGES,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if pip.returncode == 0 and not os.path.exists(folder):
            os.rename(part, folder)
        shutil.rmtree(part, ignore_errors=True)
    return found if os.path.exists(found) else None


def functions(tool, path, *options):
    """(unit, name, code) of each kernel of an object."""
    sass = subprocess.run([tool, *options, "-sass", path], stdout=subprocess.PIPE, text=True, check=True).stdout
    parts = re.split(r"^\s*Function : (\S+)$", sass, flags=re.M)
    for full, code in zip(demangle(parts[1::2]) if len(parts) > 1 else [], parts[2::2]):
        yield *own_unit(unit_of(path, ".o"), full), code


def coded(tool, path):
    """(unit/kernel, [instruction]) of an object's code for COUNTED, without what only fills up."""
    for unit, full, code in functions(tool, path, "-arch", COUNTED):
        yield unit + "/" + exact(full), re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+((?!NOP)\S.*?);", code, re.M)


def touches_early(code):
    """The memory access of an early kernel's code before it waits, or None. Code is laid out as it runs until then."""
    wait = next((i for i, text in enumerate(code) if WAIT in text), 0)
    return next((text for text in code[:wait] if TOUCHES.search(text)), None)


def check_counts(kernels, counts, tool, path):
    """Findings. A unit that was not compiled for COUNTED is left out."""
    objects = {k.name.split("/")[0]: k.object for k in kernels if k.target == COUNTED}
    counts = [c for c in counts if c.unit in objects]
    has = {}
    for made in sorted({objects[c.unit] for c in counts}):
        for name, code in coded(tool, made):
            has[name] = len(code)
            early = touches_early(code)
            if early:
                yield "%s on %s: %s before it waits for earlier kernels" % (name, COUNTED, early)
    for c in counts:
        name = c.unit + "/" + c.kernel
        if not has.get(name):
            yield "%s:%d: no code of %s for %s" % (path, c.number, name, COUNTED)
        elif has[name] > c.most:
            yield "%s on %s: %d instructions, the budget is %d" % (name, COUNTED, has[name], c.most)


def check_instructions(build, budget):
    wanted = [l for l in budget if l.instructions]
    for path in sorted(glob.glob(os.path.join(build, "**", "cuda_*.o"), recursive=True)):
        for unit, full, code in functions("cuobjdump", path):
            name = unit + "/" + short(full)
            for line in wanted:
                if fnmatch.fnmatchcase(name, line.pattern.split("@")[0]):
                    for instruction in line.instructions:
                        if not re.search(r"\b(%s)\b" % instruction, code):
                            yield "%s: no %s in its code (%s)" % (name, instruction, full)


def show(kernels):
    most = {}
    for k in kernels:
        old = most.get(k.name, (0, 0, 0))
        most[k.name] = tuple(map(max, old, (k.registers, k.stack, k.spill)))
    for name in sorted(most):
        print("%-28s %4d %4d %4d" % ((name,) + most[name]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("--budget", default=os.path.join(ROOT, "kernels", "cuda", "budget.txt"))
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    kernels, findings = read_logs(args.build)
    if args.list:
        show(kernels)
        return 0
    budget = read_budget(args.budget)
    findings += check_numbers(kernels, budget, os.path.relpath(args.budget, ROOT))
    if shutil.which("cuobjdump"):
        findings += check_instructions(args.build, budget)
    else:
        print("instructions were not looked at: no cuobjdump")
    counts, tool = read_counts(args.budget), cuobjdump()
    if not any(k.target == COUNTED for k in kernels):
        print("instructions were not counted: nothing was compiled for " + COUNTED)
    elif tool:
        findings += check_counts(kernels, counts, tool, os.path.relpath(args.budget, ROOT))
    else:
        print("instructions were not counted: no cuobjdump, and pip cannot bring it")
    for finding in findings:
        print(finding)
    print("%d kernels for %s: %s" % (len(kernels), ", ".join(sorted({k.target for k in kernels})),
                                     "%d findings" % len(findings) if findings else "in budget"))
    return len(findings) > 0


if __name__ == "__main__":
    sys.exit(main())
