#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write one CUDA source of several small kernels, which compile together in the time of one or two.

usage: cuda_unit.py OUT KERNELS SOURCE...

KERNELS is the folder of kernels, where each SOURCE lies, `family/op.cu`. Their includes come first; then
each has a namespace of its own, unit_OP, by which tools/check_cuda_budget.py knows where a kernel is from, and
its macros end after it.
"""
import os
import re
import sys


def main():
    out, kernels, sources = sys.argv[1], sys.argv[2], sys.argv[3:]
    includes, parts = [], []
    for path in sources:
        family, name = os.path.basename(os.path.dirname(path)), os.path.basename(path)
        with open(path, encoding="utf-8") as f:
            text = f.read()
        for quote, header in re.findall(r'^#include (["<])([^">]+)', text, re.M):
            beside = quote == '"' and os.path.exists(os.path.join(kernels, family, header))
            header = family + "/" + header if beside else header
            line = "#include <%s>" % header if quote == "<" else '#include "%s"' % header
            includes += [line] if line not in includes else []
        parts.append('namespace unit_%s\n{\n#include "%s/%s"\n}' % (os.path.splitext(name)[0], family, name))
        parts += ["#undef " + macro for macro in re.findall(r"^#define (\w+)", text, re.M)]
    with open(out, "w", encoding="utf-8") as f:
        f.write("\n".join(includes + parts) + "\n")


if __name__ == "__main__":
    main()
