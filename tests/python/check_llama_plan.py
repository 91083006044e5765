# SPDX-License-Identifier: Apache-2.0
"""Bytes of kvferry-llama --plan beside those of an unmodified llama.cpp that was started with the plug-in: a dense
model, a hybrid, and one with windows, within 5%.
"""
import json
import os
import re
import sys
import tempfile

import llama_case

import kvferry
from kvferry._llama import gguf, plan

NEAR = 0.05
MIB = 1 << 20
NAMES = ("llama", "qwen35", "gptoss")
TOKENS = 4096


def measured(version, path, folder):
    """Bytes that a process told: of llama.cpp's KV cache, of pages, of what is on the device, of codes."""
    job = {"model": path, "seed": 1, "prompt": 64, "steps": 2, "context": TOKENS, "draws": os.path.join(folder, "draws.npy"),
           "layouts": [{"kind": "f16", "slots": 1, "unified": False, "out": os.path.join(folder, "out.npy")}]}
    with open(os.path.join(folder, "job.json"), "w", encoding="utf-8") as out:
        json.dump(job, out)
    _, said = llama_case.run(version, "llama_steps.py", out.name, settings="budget=1024", KVF_LLAMA_LOG="1")
    sums = {name: sum(map(int, re.findall(r"\b%s=(\d+)" % name, said))) for name in ("host", "device", "codes")}
    return dict(sums, cache=sum(float(size) for size in re.findall(
        r"llama_kv_cache: size = +([\d.]+) MiB", said)) * MIB)


def main():
    llama_case.require(os.path.join(llama_case.PLACE, "models"))
    failed, asked = 0, plan.Asked(TOKENS, 1, True, 512, 2, 2)
    with tempfile.TemporaryDirectory() as folder, kvferry.Runtime(device="host") as runtime:
        for name in NAMES:
            path = os.path.join(llama_case.PLACE, "models", name + ".gguf")
            groups = plan.groups(runtime, gguf.layers(gguf.metadata(path)), asked, {"budget": "1024"})
            real = measured(llama_case.versions()[0], path, folder)
            for what, size in real.items():
                said = sum(getattr(group, what) for group in groups)
                bad = abs(said - size) > NEAR * size or not size
                failed += bad
                print("%-7s %-6s planned %9d, measured %9d%s" % (name, what, said, size, " WRONG" if bad else ""))
    print("%d passed, %d failed" % (len(NAMES) * 4 - failed, failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
