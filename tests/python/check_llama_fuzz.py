# SPDX-License-Identifier: Apache-2.0
"""Random edits of sequences in an unmodified llama.cpp with kvferry's plug-in: no operation may be wrong.

Attentions are compared with a plain loop (llama_fuzz.py). A plug-in that does not count writes must fail, and so
must one that puts pages of llama.cpp away and brings none back.

usage: check_llama_fuzz.py [--quick] [--versions NAME,...] [--actions N] [--seeds N]
"""
import argparse
import json
import os
import sys

import llama_case

SHARE = 0.95
CONTROLS = ("writes", "pages") # of tests/llama/control.c
MODELS = {"llama": "f16", "qwen3": "q8_0", "gemma3": "f16"}


def fuzz(version, model, seed, actions, kind, unified, **more):
    """Counts of one run, with the share that kvferry served."""
    out, said = llama_case.run(version, "llama_fuzz.py", model, seed, actions, kind, 4, unified,
                               settings="budget=full", limit=3000, **more)
    return dict(json.loads(out.splitlines()[-1]), share=llama_case.summary(said).get("share", 0))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--versions")
    parser.add_argument("--actions", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    llama_case.require()
    versions = args.versions.split(",") if args.versions else llama_case.versions()[:1]
    plans = [(version, os.path.join(llama_case.PLACE, "models", name + ".gguf"), seed, args.actions, kind, unified)
             for version in versions for name, kind in MODELS.items() for seed in range(1, args.seeds + 1)
             for unified in (False, True)]
    if args.quick:
        plans = [(versions[0], llama_case.MODEL, 1, 60, "f16", unified) for unified in (False, True)]
    failed = 0
    for plan in plans:
        got = fuzz(*plan)
        bad = got["wrong"] or got["share"] < SHARE
        failed += bool(bad)
        print("%s %s seed %d %s unified %s: %s%s" % (
            plan[0], os.path.basename(plan[1]), plan[2], plan[4], plan[5],
            " ".join("%s %s" % (name, "%.4f" % value if isinstance(value, float) else value)
                     for name, value in got.items()), " WRONG" if bad else ""), flush=True)
    plugin = os.path.join(os.path.dirname(llama_case.PLUGIN), "..", "tests", "llama", "libggml-kvferry-control.so")
    for name in CONTROLS:
        if os.path.exists(plugin): # the same actions
            got = fuzz(*plans[0], GGML_BACKEND_PATH=plugin, KVF_TEST_WITHOUT=name)
            failed += not got["wrong"]
            print("without %s: %d of %d wrong, worst %.2f%s" % (
                name, got["wrong"], got["operations"], got["worst"], "" if got["wrong"] else ": THE FUZZ SEES NOTHING"))
    print("%d passed, %d failed" % (len(plans) - failed, failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
