# SPDX-License-Identifier: Apache-2.0
"""Bytes of kvferry-llama --plan beside those of an unmodified llama.cpp that was started with the plug-in, within 5%:
a dense model, a hybrid, and one with windows. Compared are the sizes that the plug-in tells, and the memory that the process maps.
"""
import json
import os
import re
import resource
import sys
import tempfile

import llama_case

from kvferry._llama import gguf, plan

NEAR = 0.05
ROUNDED = 12 << 20 # of a cache: its areas begin at huge pages, and the library's threads have stacks
MIB = 1 << 20
NAMES = ("llama", "qwen35", "gptoss")
TOKENS = 131072


def measured(version, path, folder):
    """Bytes that a process mapped at the first step, and those that it told: the KV cache, pages, device, codes, tables."""
    job = {"model": path, "seed": 1, "prompt": 64, "steps": 2, "context": TOKENS, "draws": os.path.join(folder, "draws.npy"),
           "layouts": [{"kind": "f16", "slots": 1, "unified": False, "out": os.path.join(folder, "out.npy")}]}
    with open(os.path.join(folder, "job.json"), "w", encoding="utf-8") as out:
        json.dump(job, out)
    out, said = llama_case.run(version, "llama_steps.py", out.name, settings="budget=1024", KVF_LLAMA_LOG="1")
    sums = {name: sum(map(int, re.findall(r"\b%s=(\d+)" % name, said))) for name in ("host", "device", "codes", "own")}
    return dict(sums, mapped=json.loads(out.splitlines()[0])["mapped"], cache=sum(float(size) for size in re.findall(
        r"llama_kv_cache: size = +([\d.]+) MiB", said)) * MIB)


def main():
    llama_case.require(os.path.join(llama_case.PLACE, "models"))
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 18, resource.getrlimit(resource.RLIMIT_STACK)[1])) # of threads
    failed, asked = 0, plan.Asked(TOKENS, 1, True, 512, 2, 2)
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            path = os.path.join(llama_case.PLACE, "models", name + ".gguf")
            groups = plan.groups(gguf.layers(gguf.metadata(path)), asked, "budget=1024")
            real = measured(llama_case.versions()[0], path, folder)
            for what, size in real.items():
                parts = ("host", "device", "codes", "own") if what == "mapped" else (what,)
                said = sum(getattr(group, part) for group in groups for part in parts)
                rounded = ROUNDED * len(groups) if what == "mapped" else 0
                bad = abs(said - size) > NEAR * size + rounded or not size
                failed += bad
                print("%-7s %-6s planned %9d, measured %9d%s" % (name, what, said, size, " WRONG" if bad else ""))
    print("%d passed, %d failed" % (len(NAMES) * 6 - failed, failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
