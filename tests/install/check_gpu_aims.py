#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of aims of `./dev gpu`: it reads what jobs are called and what they write, says what was met
and what was not measured, and the emulator meets nothing."""
import pathlib
import tempfile
import unittest

import gpu_parts
import gpu_tree
import gpu_aims


def results(device="NVIDIA H100", slower=1.0):
    """As if every aim were met with a tenth to spare, or missed where `slower` is 2."""
    def kernels():
        for op in ("append", "score_codes", "reduce_mass", "select", "attend, all here"):
            for batch in (1, 4, 16):
                yield {"op": op, "batch": batch, "us": 7 * slower, "times_floor": 1.05 * slower}

    def link(page_bytes):
        for method, share in (("mapped", 0.95), ("gather", 0.99), ("each", 0.1)):
            for size in (1 << 20, 4 << 20, 16 << 20):
                yield {"method": method, "page_bytes": page_bytes, "bytes": size,
                       "of_peak": 0.2 if size < 4 << 20 else share / slower}

    def run(ms):
        return {"tpot_ms": {"p50": ms}}

    def decode(us):
        return {"layers": 32, "results": [{"layer_us": 1.0}, {"layer_us": us, "graph_nodes": 194 * slower}]}

    products = [{"rows": rows, "floor_us": us, "kernel_us": 1.1 * us * slower}
                for rows in (1, 4) for us in (10.0, 300.0)]
    def beside(what, us):
        return [{"what": what, "context": context << 10, "batch": batch, "us": us}
                for context in (32, 128) for batch in (1, 16)]
    peers = beside("SDPA", 400.0) + beside("kvferry", 50.0)
    peers += [{"what": what, "context": n << 10, "batch": 1, "us": us * n} for what, us in (
        ("SDPA prefill", 10.0), ("kvferry prefill", 20.0), ("cuDNN prefill", 5.0)) for n in (4, 16, 32)]
    peers[0] = {"what": "SDPA", "context": 32 << 10, "batch": 1, "why": "does not fit"}
    figures = {
        "kernels": {"timed": {"kernels": list(kernels())}},
        "link": {"methods": {"results": list(link(16384)) + [{"method": "mapped", "status": "not here"}]},
                 "rows of 512 bytes": {"results": list(link(512))}},
        "decode": {"32 layers": decode(60.0), "4 layers, each, nothing resident": decode(1500.0)},
        "runner": {"run, all of 4K": run(6.0), "run, 128K": run(6.5 * slower),
                   "run, all of 4K, batch 16": run(9.0), "run, 128K, batch 16": run(12.0 * slower),
                   "run, 128K, each": run(60.0), "products": {"results": products}},
        "peers": {"torch": {"results": peers}},
        "offloaded": {"torch": {"results": beside("kvferry", 40.0) + beside("offloaded DynamicCache", 20000.0)}}}
    made = {part: {"jobs": [{"name": name, "status": "ok", "figures": f} for name, f in jobs.items()]}
            for part, jobs in figures.items()}
    made["device"] = device
    return made


class Aims(unittest.TestCase):
    def met(self, made):
        return {r["what"]: r["met"] for r in gpu_aims.table(made) if r["aim"]}

    def test_what_was_stopped_meets_nothing(self):
        made = results()
        for job in made["runner"]["jobs"]:
            if job["name"] == "run, 128K":
                job["status"], job["figures"] = "timeout", {"tpot_ms": {"p50": 0}}
        self.assertIsNone(self.met(made)["a token at 128K to dense at 4K, batch 1"])

    def test_met_and_missed(self):
        self.assertEqual(set(self.met(results()).values()), {True})
        self.assertEqual(set(self.met(results(slower=2.0)).values()), {False})
        self.assertEqual(set(self.met(results("emulated")).values()), {None})

    def test_what_was_not_measured_says_so(self):
        rows = gpu_aims.table({"device": "NVIDIA H100"})
        self.assertEqual([r for r in rows if r["measured"] is not None or r["met"] is not None], [])
        said = gpu_aims.show(rows)
        self.assertEqual(said.count("not measured"), len(rows))
        made = results()
        made["runner"]["jobs"] = [{"name": "run, all of 4K", "status": "timeout"}]
        lacking = [r["what"] for r in gpu_aims.table(made) if r["measured"] is None]
        self.assertIn("a token at 128K to dense at 4K, batch 1", lacking)
        self.assertIn("SDPA to kvferry, 32K, batch 1", lacking) # did not fit
        self.assertNotIn("SDPA to kvferry, 128K, batch 1", lacking)

    def test_a_figure_that_is_none_stops_nothing(self):
        made = results()
        made["runner"]["jobs"][0]["figures"] = {"tpot_ms": {"p50": None}}
        made["link"]["jobs"][0]["figures"] = None
        self.assertEqual(len(gpu_aims.table(made)), len(gpu_aims.AIMS))

    def test_figures(self):
        found = {r["what"]: r["measured"] for r in gpu_aims.table(results())}
        self.assertAlmostEqual(found["a token at 128K to dense at 4K, batch 16"], 12 / 9)
        self.assertAlmostEqual(found["attention by `each`, nothing resident, to the default"], 25)
        self.assertAlmostEqual(found["mapped, share of the link's peak, pages of 16 KiB"], 0.95)
        self.assertAlmostEqual(found["SDPA to kvferry, 128K, batch 16"], 8)
        self.assertAlmostEqual(found["prefill attention to SDPA's time, 16K"], 2)
        self.assertAlmostEqual(found["prefill attention to cuDNN's time, 4K"], 4)
        self.assertAlmostEqual(found["offloaded DynamicCache to kvferry, 32K, batch 1"], 500) # of one run
        self.assertAlmostEqual(found["products of one row, share of copy bandwidth"], 1 / 1.1)
        self.assertIsNone(found["the same by cuBLAS"]) # it was not there
        self.assertEqual(found["nodes of a layer, recorded"], 6)
        self.assertIn("NO", gpu_aims.show(gpu_aims.table(results(slower=2.0))))

    def test_names_are_those_of_jobs(self):
        with tempfile.TemporaryDirectory() as scratch:
            for emulated in (False, True):
                tree = gpu_tree.Tree(pathlib.Path(scratch), {}, emulated, "")
                for part, said in results().items():
                    if part != "device":
                        jobs = getattr(gpu_parts, part + "_jobs")(tree, pathlib.Path(scratch))
                        known = {job.name for job in jobs if job.figures}
                        self.assertLessEqual({job["name"] for job in said["jobs"]}, known)


if __name__ == "__main__":
    unittest.main()
