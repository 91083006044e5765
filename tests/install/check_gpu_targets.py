#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which targets -Dgpu_targets chooses, by what nvcc knows and which GPUs there are."""
import os
import stat
import sys
import tempfile

from cuda_toolkit import TARGETS, gpus, targets

NVCC_13 = ["75", "80", "86", "87", "88", "89", "90", "100", "103", "110", "120", "121"]
NVCC_12_4 = ["50", "52", "60", "61", "70", "75", "80", "86", "87", "89", "90"]
CASES = [
    # asked, known, GPUs present, chosen
    (["auto"], NVCC_13, [], ["80"]),
    ([], NVCC_13, [], ["80"]),
    (["auto"], NVCC_13, ["90"], ["90"]),
    (["auto"], NVCC_13, ["100", "89"], ["89", "100"]),
    (["auto"], NVCC_13, ["87"], ["87"]),
    (["auto"], NVCC_13, ["75"], ["80"]),  # too old for the library
    (["auto"], NVCC_12_4, ["120"], ["90"]),  # newer than nvcc: PTX
    (["all"], NVCC_13, ["90"], TARGETS),
    (["all"], NVCC_12_4, [], ["80", "86", "89", "90"]),
    (["90", "80"], NVCC_13, ["120"], ["80", "90"]),
    (["33"], NVCC_13, [], []),
]


def fake_driver(folder, text):
    path = os.path.join(folder, "nvidia-smi")
    with open(path, "w", encoding="utf-8") as f:
        f.write("#!/bin/sh\ncat <<'END'\n%s\nEND\n" % text)
    os.chmod(path, stat.S_IRWXU)


def main():
    failed = 0
    for asked, known, present, wanted in CASES:
        got = targets(asked, known, present)
        if got != wanted:
            failed += 1
            print("%s with %s: %s, should be %s" % (asked, present, got, wanted))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PATH"] = folder + ":" + os.environ["PATH"]
        for text, wanted in (("9.0\n9.0", ["90"]), ("12.0\n8.9", ["89", "120"]),
                             ("NVIDIA-SMI has failed", []), ("[N/A]", [])):
            fake_driver(folder, text)
            if gpus() != wanted:
                failed += 1
                print("%r: %s, should be %s" % (text, gpus(), wanted))
    print("%d cases, %d failed" % (len(CASES) + 4, failed))
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
