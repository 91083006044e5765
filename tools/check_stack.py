#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check how much stack single functions take, in what was compiled.

usage: check_stack.py BYTES KERNEL_BYTES LIBRARY...    prints `LIBRARY: FUNCTION takes N bytes of stack`
                                                       for each that takes more than its limit, exits
                                                       1 if any, and 77 where objdump cannot tell

Kernels (libraries of that name) keep what they work on in their frames and run where there is stack
for it (offload/base/stack.h); all others may run on a caller's thread. The limits are of a build
without a sanitizer.
"""
import os
import re
import subprocess
import sys

FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
# Instructions that take room: x86-64, also page by page, and AArch64, whose shifted form is `#0x1, lsl #12`.
TAKEN = (re.compile(r"\b(?:sub|add)\s+\$(-?0x[0-9a-f]+),%rsp\b"),
         re.compile(r"\blea\s+(-0x[0-9a-f]+)\(%rsp\),%r\w+\b"),
         re.compile(r"\bsub\s+sp, sp, #(0x[0-9a-f]+)(, lsl #12)?"))


def taken(line):
    """Bytes that an instruction takes of the stack; 0 if it is another one."""
    for pattern in TAKEN:
        found = pattern.search(line)
        if found:
            bytes_taken = abs(int(found[1], 16)) << (12 if found.lastindex == 2 else 0)
            return bytes_taken if bytes_taken < 1 << 31 else (1 << 64) - bytes_taken
    return 0


def frames(library):
    """Functions and the largest piece of stack that each takes at once."""
    text = subprocess.run(["objdump", "--disassemble", "--no-show-raw-insn", library], check=True,
                          stdout=subprocess.PIPE, universal_newlines=True).stdout
    function, most = None, {}
    for line in text.splitlines():
        begins = FUNCTION.match(line)
        if begins:
            function = begins[1]
        elif function:
            most[function] = max(most.get(function, 0), taken(line))
    return most


def main():
    limit, kernel_limit, findings, largest = int(sys.argv[1]), int(sys.argv[2]), 0, 0
    for library in sys.argv[3:]:
        name = os.path.basename(library)
        try:
            found = frames(library)
        except (OSError, subprocess.CalledProcessError) as error:
            print("objdump: %s" % error)
            return 77
        for function, size in sorted(found.items()):
            largest = max(largest, size)
            if size > (kernel_limit if "kernels" in name else limit):
                print("%s: %s takes %d bytes of stack" % (name, function, size))
                findings += 1
    print("the largest frame has %d bytes" % largest)
    return 77 if largest < 4096 else findings > 0


if __name__ == "__main__":
    sys.exit(main())
