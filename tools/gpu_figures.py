#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `./dev gpu` measured, in about 40 lines: reads its results.json.

usage: gpu_figures.py RESULTS

It knows the names of jobs and of their figures, and measures nothing. Invariant: a figure that is
shown comes from a job that ended well; what was not measured has no line.
"""
import json
import sys

STEP = ["append, rotate", "score_codes", "select, of masses", "attend, 1/8 missed"]
LARGE = 4 << 20  # bytes of a transfer that can fill the link


def jobs_of(results, part):
    return [j for j in results.get(part, {}).get("jobs", []) if j["status"] == "ok" and "figures" in j]


def figures_of(results, part, name):
    return next((j["figures"] for j in jobs_of(results, part) if j["name"] == name), None)


def use_lines(results):
    """The verdict of every section of check_gpu.py, and of the operations under them."""
    said = ["%s %s" % (j["name"], j["status"]) for j in results.get("uses", {}).get("jobs", [])]
    return ["first use: " + ", ".join(said)] if said else []


def kernel_lines(results):
    """Microseconds of a launch, and how many times the least that its bytes take."""
    timed = figures_of(results, "kernels", "timed")
    if not timed:
        return []
    found = {(k["op"], k["batch"]): k for k in timed["kernels"]}
    batches = sorted({batch for _, batch in found})
    lines = ["us, and times the floor (%.0f GB/s here, %.0f over the link)%s" % (
        timed["copy_gb_per_s"], timed["link_gb_per_s"],
        "".join("%14s" % ("batch %d" % b) for b in batches))]
    for op in dict.fromkeys(op for op, _ in found):
        cells = ["%8.1f %4.1fx" % (found[op, b]["us"], found[op, b]["times_floor"]) if (op, b) in found else ""
                 for b in batches]
        lines.append("  %-52s" % op + "".join("%14s" % c for c in cells))
    sums = [sum(found[op, b]["us"] for op in STEP) if all((op, b) in found for op in STEP) else None
            for b in batches]
    lines.append("  %-52s" % "a layer, as their sum" + "".join("%9.1f     " % s if s else " " * 14 for s in sums))
    return lines


def decode_lines(results):
    return ["  decode %-45s %9.1f us per layer, %.3f ms per token" % (
        job["name"], row["layer_us"], row["layer_us"] * job["figures"].get("layers", 1) / 1000)
        for job in jobs_of(results, "decode") for row in job["figures"].get("results", [])[-1:]
        if "layer_us" in row]


def runner_lines(results):
    lines = []
    for job in jobs_of(results, "runner"):
        ms = job["figures"].get("tpot_ms", {}).get("p50")
        if ms:
            answers = int(job["command"].split("--batch ")[1].split()[0]) if "--batch " in job["command"] else 1
            lines.append("  %-52s %9.2f ms per token, %.0f tokens/s" % (job["name"], ms, answers * 1000 / ms))
    return lines


def link_lines(results):
    lines = []
    for job in jobs_of(results, "link"):
        best = {}
        for row in job["figures"].get("results", []):
            if row.get("bytes", 0) >= LARGE and row.get("median_us"):
                method = row.get("method", "")
                best[method] = max(best.get(method, 0), row["bytes"] / row["median_us"] / 1000)
        if best:
            said = ", ".join("%s %.1f" % item for item in best.items()).strip()
            lines.append("  link, %-46s %s GB/s" % (job["name"], said))
    return lines


def llama_lines(results):
    """Steps of llama.cpp, by where its KV cache is."""
    found = figures_of(results, "llama", "llama.cpp")
    if not found:
        return []
    lines = ["  llama.cpp, %d layers: largest KL %.1e, of -nkvo %.1e, with a wrong cell %.1e; boundary %.1f us a layer" % (
        found["layers"], found["kl"], found["kl_host"], found["kl_wrong"], found["boundary_us"])]
    return lines + ["  %-52s %9.2f ms per token, %.0f tokens/s, %d MiB resident, %.2f copies a layer and step" % (
        "llama.cpp at %d, %s" % (row["depth"], row["way"]), row["ms"], 1e3 / row["ms"], row["resident"], row["copied"])
                    for row in found["results"]]


def failure_lines(results):
    return ["  %s: %s: %s%s" % (part, j["name"], j["status"],
                                ": " + j["first_report"][0].strip("= ") if j.get("first_report") else "")
            for part, found in results.items() if isinstance(found, dict) and "jobs" in found
            for j in found["jobs"] if j["status"] in ("failed", "timeout", "not run")]


def show(results):
    head = "%s, commit %s" % (results.get("device", "?"), results.get("commit", "?"))
    if results.get("device") == "emulated":
        head += "; times of the emulator say nothing"
    failures = failure_lines(results)
    counts = {}
    for found in results.values():
        for j in found.get("jobs", []) if isinstance(found, dict) else []:
            counts[j["status"]] = counts.get(j["status"], 0) + 1
    said = ", ".join("%d %s" % (n, status) for status, n in sorted(counts.items()))
    return "\n".join([head, "jobs of all calls: " + said] + failures[:8] +
                     (["  and %d more" % (len(failures) - 8)] if len(failures) > 8 else []) +
                     use_lines(results) + kernel_lines(results) + decode_lines(results) + runner_lines(results) +
                     link_lines(results) + llama_lines(results))


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as f:
        print(show(json.load(f)))
