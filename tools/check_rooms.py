#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that no library calls one that comes after it.

usage: check_rooms.py LIBRARY...    from below; prints `LIBRARY: SYMBOL is in LIBRARY` for every call
                                    upwards, exits 1 if any, and 77 where nm cannot read them

Include paths say which headers a room may see; this also catches a header that declares what a
higher room defines.
"""
import os
import subprocess
import sys


def symbols(library):
    """Names that the library defines, and names that it needs."""
    lines = subprocess.run(["nm", "--extern-only", "--portability", library], check=True,
                           stdout=subprocess.PIPE, universal_newlines=True).stdout.splitlines()
    pairs = [line.split()[:2] for line in lines if len(line.split()) > 1]
    return ({name for name, kind in pairs if kind != "U"},
            {name for name, kind in pairs if kind == "U"})


def main():
    findings = 0
    below = []
    try:
        for library in sys.argv[1:]:
            defined, needed = symbols(library)
            for lower, wanted in below:
                for name in sorted(wanted & defined):
                    print("%s: %s is in %s" % (lower, name, os.path.basename(library)))
                    findings += 1
            below.append((os.path.basename(library), needed - defined))
    except (OSError, subprocess.CalledProcessError) as error:
        print("nm: %s" % error)
        return 77
    return findings > 0


if __name__ == "__main__":
    sys.exit(main())
