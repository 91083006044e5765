#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""While not every operation has its .cu: which are there, and launchers that refuse for the others.

usage: cuda_scaffold.py list          prints the names of the .cu files of kernels/ that git tracks
       cuda_scaffold.py missing FILE  writes C with a launcher for every operation without one
"""
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def tracked():
    run = subprocess.run(["git", "-C", ROOT, "ls-files", "kernels/*.cu"], stdout=subprocess.PIPE,
                         text=True, check=False)
    return [p for p in run.stdout.split() if os.path.exists(os.path.join(ROOT, p))]


def text(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def main():
    sources = tracked()
    if sys.argv[1] == "list":
        print(" ".join(sorted(os.path.basename(p)[:-3] for p in sources)))
        return
    lists = "".join(m for m in re.findall(r"#define KVF_(?:PAGING_)?KERNEL_LIST\(X\)((?:.*\\\n)*.*\n)",
                                          text("kernels/kernels.h")))
    operations = re.findall(r"\bX\((\w+)\)", lists)
    have = {op for p in sources for op in re.findall(r"kvf_(\w+)_cuda\(const void \*", text(p))}
    with open(sys.argv[2], "w", encoding="utf-8") as f:
        f.write('#include "cuda_kernels.h"\n')
        for op in operations:
            if op not in have:
                f.write("int kvf_%s_cuda(const void *args, uint32_t tasks, void *stream)\n" % op +
                        "{\n    (void)args, (void)tasks, (void)stream;\n    return 801;\n}\n")


if __name__ == "__main__":
    main()
