#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How `./dev gpu` runs its jobs: what failed is looked at again, alone; results are carried from call to
call, job by job; limits hold. Programs of two lines stand in for those of a GPU."""
import ast
import json
import os
import pathlib
import re
import sys
import tempfile
import time
import unittest
from unittest import mock

import gpu
import gpu_figures
import gpu_job
import gpu_parts
import gpu_tree

# A kernel check in which the operation `bad` fails and `slow` takes too long, but when it is looked at,
# and a memcheck that finds a fault in it.
CHECK = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in
--list) echo good; echo bad; echo slow ;;
*--bench*) echo '{"kernels": []}' > "$6" ;;
*good*) ;;
*slow*) [ -n "$CUDA_LAUNCH_BLOCKING" ] || sleep 60 ;;
*) echo "FAIL bad [cuda] case 7 of seed 3: d=64: off"; exit 1 ;;
esac
"""
MEMCHECK = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
echo "========= Invalid __global__ read of size 4 bytes"
echo "=========     at score_codes_tile+0x40"
echo "$*" >> "$(dirname "$0")/calls"
exit 9
"""


class Calls(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "tests/kernels").mkdir(parents=True)
        for path, text in (("tests/kernels/check_kernels", CHECK), ("compute-sanitizer", MEMCHECK)):
            (self.folder / path).write_text(text)
            (self.folder / path).chmod(0o755)
        paths = mock.patch.dict(os.environ, {"PATH": "%s:%s" % (self.folder, os.environ["PATH"])})
        paths.start()
        self.addCleanup(paths.stop)
        self.tree = gpu_tree.Tree(self.folder, {}, False, "")

    def kept(self):
        return gpu.Kept(self.folder / "results.json")

    def run_part(self, kept, seconds, part="operations"):
        with mock.patch.object(gpu, "say"), mock.patch.object(gpu_job, "say") as said:
            gpu.run_part(part, self.tree, kept, time.monotonic() + seconds)
        return {j["name"]: j for j in kept.results[part]["jobs"]}, [c.args[0] for c in said.mock_calls]

    def test_a_failure_is_looked_at_alone(self):
        with mock.patch.object(gpu, "LOOKS", 0.85): # the jobs get 6 seconds, and the looks what they need
            jobs, said = self.run_part(self.kept(), 40)
        self.assertEqual(jobs["kernels good"]["status"], "ok")
        self.assertEqual(jobs["kernels slow"]["status"], "timeout")
        bad = jobs["kernels bad"]
        self.assertEqual(bad["status"], "failed")
        self.assertEqual(bad["first_report"][0], "========= Invalid __global__ read of size 4 bytes")
        self.assertIn("    " + bad["first_report"][1], said)
        again = (self.folder / "tests/kernels/calls").read_text().split("\n")
        self.assertIn("--isa cuda --op bad --case 7 --seed 3", again)
        self.assertIn("--op bad --case 7 --seed 3", (self.folder / "calls").read_text())

    def test_results_are_carried(self):
        kept = self.kept()
        kept.add("link", {"name": "peak", "status": "ok", "figures": {"results": []}})
        kept.add("link", {"name": "methods", "status": "failed"})
        kept = self.kept()
        kept.add("link", {"name": "methods", "status": "ok"})
        kept.add("link", {"name": "peak", "status": "not run"})
        jobs = json.loads((self.folder / "results.json").read_text())["link"]["jobs"]
        self.assertEqual([(j["name"], j["status"]) for j in jobs], [("peak", "ok"), ("methods", "ok")])

    def test_limits_of_a_call(self):
        begin = time.monotonic()
        jobs, _ = self.run_part(self.kept(), 1)
        self.assertLess(time.monotonic() - begin, 20)
        self.assertIn(jobs["kernels slow"]["status"], ("timeout", "not run"))
        with mock.patch.object(sys, "argv", ["gpu.py", "A", "B"]):
            self.assertEqual(gpu.options().total, gpu.CALL_SECONDS["A"] + gpu.CALL_SECONDS["B"])
        with mock.patch.object(sys, "argv", ["gpu.py", "link", "--total", "90"]):
            self.assertEqual(gpu.options().total, 90)

    def test_a_part_leaves_time_to_others(self):
        for name, parts in gpu.CALLS.items():
            now = 0.0
            for i in range(len(parts)): # each takes all that it may
                end = gpu.end_of_first(parts[i:], now, gpu.CALL_SECONDS[name])
                self.assertGreater(end - now, 60)
                now = end
            self.assertAlmostEqual(now, gpu.CALL_SECONDS[name])
        self.assertAlmostEqual(gpu.end_of_first(["runner"], 20, 540), 540) # what decode left

    def test_calls_fit_into_what_is_lent(self):
        """A call has ten minutes, and a quarter of an hour has a machine's start and the first two calls."""
        self.assertLessEqual(max(gpu.CALL_SECONDS.values()), 570)
        self.assertLessEqual(120 + gpu.CALL_SECONDS["A"] + gpu.CALL_SECONDS["B"], 900)
        self.assertEqual(sorted(gpu.PARTS), sorted(part for parts in gpu.CALLS.values() for part in parts))

    def test_what_no_gpu_has_run_goes_first(self):
        self.assertEqual(gpu.CALLS["A"][0], "uses")
        jobs = gpu.jobs_of("uses", self.tree, self.folder, None)
        script = ast.parse(pathlib.Path(jobs[0].command[1]).read_text(encoding="utf-8"))
        sections = next(node.value for node in script.body
                        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SECTIONS")
        self.assertEqual([job.command[-1] for job in jobs],
                         [key.value for key in sections.keys] + list(gpu_parts.UNTRIED))

    def test_what_does_not_start_stops_nothing(self):
        check = self.folder / "tests/kernels/check_kernels"
        check.write_bytes(b"\x7fELF of another machine")
        jobs, _ = self.run_part(self.kept(), 20)
        self.assertEqual(jobs["kernels"]["status"], "failed")
        self.assertIn("cannot start", jobs["kernels"]["why"])
        jobs, _ = self.run_part(self.kept(), 20, "kernels")
        self.assertEqual(jobs["timed"]["status"], "failed")

    def test_sanitizer_looks_at_what_failed(self):
        kept = self.kept()
        kept.add("operations", {"name": "kernels topk", "command": "check --op topk", "status": "failed"})
        kept.add("operations", {"name": "kernels reduce_mass", "command": "check --op reduce_mass", "status": "ok"})
        names = [j.name for j in gpu.jobs_of("sanitizer", self.tree, self.folder, kept)]
        self.assertEqual(names, ["memcheck of kernels topk", "racecheck of kernels topk"])

    def test_jobs_that_are_named(self):
        named = gpu.jobs_of("decode", self.tree, self.folder, None, re.compile("dense|packed"))
        self.assertEqual([j.name for j in named], ["dense at 4K", "4 layers, packed"])

    def test_suite_begins_with_what_most_rests_on(self):
        tests = {name: {"cmd": ["tests/x"], "env": {}, "suite": ["runtime"]}
                 for name in ("runtime bits", "runtime record", "offload io", "runtime dense")}
        jobs = gpu_parts.suite_jobs(gpu_tree.Tree(self.folder, tests, False, ""), self.folder)
        self.assertEqual([j.name for j in jobs][:2], ["runtime dense", "runtime record"])
        self.assertEqual({j.limit for j in jobs}, {150})
        self.assertLessEqual(gpu.TOGETHER["suite"], 8)

    def test_programs_of_a_packed_tree_find_its_libraries(self):
        meson = [{"name": "bits", "cmd": ["/built/tests/bits"], "suite": ["kvferry:runtime"],
                  "env": {"KVF_TEST_DIGEST": "codes", "LD_LIBRARY_PATH": "/built/runtime"}}]
        with mock.patch.object(gpu_tree, "output_of", return_value=json.dumps(meson)):
            tests = gpu_tree.tests_of_build(pathlib.Path("/built"))
        self.assertEqual(tests["bits"]["env"], {"KVF_TEST_DIGEST": "codes"})
        (self.folder / "manifest.json").write_text(json.dumps({"commit": "", "emulated": False, "tests": tests}))
        with mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": "/driver"}):
            job, = gpu_parts.suite_jobs(gpu_tree.tree_of_pack(self.folder), self.folder)
            job.command = ["sh", "-c", "echo $LD_LIBRARY_PATH"]
            _, text = job.run(time.monotonic() + 10)
        self.assertEqual(text.strip(), "%s/lib:/driver" % self.folder.resolve())

    def test_programs_find_cublas_of_this_python(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("VIRTUAL_ENV", None)
            os.environ.pop("CONDA_PREFIX", None)
            _, text = gpu_job.Job("env", ["sh", "-c", "echo $VIRTUAL_ENV"], 10).run(time.monotonic() + 10)
            self.assertEqual(text.strip(), sys.prefix)

    def test_figures_fit_a_screen(self):
        kernels = [{"op": op, "batch": b, "us": 10.0, "times_floor": 1.5} for op in gpu_figures.STEP for b in (1, 4, 16)]
        jobs = {
            "uses": [{"name": "captured"}, {"name": "sinks", "status": "failed"}],
            "kernels": [{"name": "timed", "figures": {"copy_gb_per_s": 3000, "link_gb_per_s": 50, "kernels": kernels}}],
            "decode": [{"name": "32 layers", "figures": {"layers": 32, "results": [{"layer_us": 50.0}]}}],
            "runner": [{"name": "run, 128K, batch 16", "command": "kvferry run --batch 16", "figures": {
                "tpot_ms": {"p50": 16.0}}}],
            "link": [{"name": "methods", "figures": {"results": [
                {"method": "mapped", "bytes": 8 << 20, "median_us": 160.0}, {"method": "mapped", "bytes": 4096,
                                                                            "median_us": 1.0}]}}],
            "llama": [{"name": "llama.cpp", "figures": {
                "layers": 8, "kl": 1e-3, "kl_host": 2e-3, "kl_wrong": 0.5, "boundary_us": 60.0,
                "results": [{"depth": 32768, "way": "kvferry", "ms": 12.5, "resident": 900, "copied": 0.1}]}}]}
        made = {part: {"jobs": [dict({"status": "ok"}, **j) for j in found]} for part, found in jobs.items()}
        said = gpu_figures.show(dict(made, device="H100"))
        self.assertLess(said.count("\n"), 40)
        for words in ("first use: captured ok, sinks failed", "60.0", "1000 tokens/s", "1.600 ms per token", "mapped 52.4 GB/s", "10.0  1.5x",
                      "boundary 60.0 us a layer", "12.50 ms per token, 80 tokens/s, 900 MiB resident, 0.10 copies"):
            self.assertIn(words, said)


if __name__ == "__main__":
    unittest.main()
