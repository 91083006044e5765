#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names that the plug-in takes from vLLM's inside, against the list of each release that is known. Needs no vLLM.

tools/vllm_names.py makes the lists; check_vllm.py compares one with the release that is there.
"""
import ast
import os
import re
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import vllm_names # pylint: disable=wrong-import-position


def lines_of(version):
    with open(vllm_names.list_of(version), encoding="utf-8") as text:
        return text.read().splitlines()


def known():
    """Releases, as known.py has them."""
    with open(os.path.join(vllm_names.PLUGIN, "known.py"), encoding="utf-8") as text:
        return next(ast.literal_eval(node.value) for node in ast.parse(text.read()).body
                    if isinstance(node, ast.Assign) and vllm_names.targets(node) == ["KNOWN"])


class Names(unittest.TestCase):
    def test_each_release_has_what_is_taken(self):
        """And its list has nothing else."""
        for version in known():
            with self.subTest(version):
                lines = lines_of(version)
                taken = vllm_names.Taken(vllm_names.List_(lines), version)
                self.assertEqual(taken.missing, [])
                self.assertEqual(taken.lines(), lines)
                self.assertGreater(len(lines), 150)
                for ours, mine, theirs in taken.overrides:
                    self.assertTrue(vllm_names.takes(mine, theirs), (ours, mine, theirs))
                for call in taken.calls:
                    self.assertTrue(vllm_names.given(call), call)
                self.assertGreater(len(taken.overrides), 15)
                self.assertGreater(len(taken.calls), 3)

    def test_a_name_that_went(self):
        """Each name that a release may lose is missed, or is found not to be taken."""
        version = known()[-1]
        lines = lines_of(version)
        for gone in ("vllm.v1.core.kv_cache_planning.get_kv_cache_groups_from_builder",
                     "vllm.config.scheduler.SchedulerConfig.max_num_seqs",
                     "vllm.v1.attention.backend.CommonAttentionMetadata.slot_mapping",
                     "vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states"):
            with self.subTest(gone):
                left = [line for line in lines if re.match(r"[\w.]+", line)[0] != gone]
                self.assertEqual(len(left), len(lines) - 1)
                self.assertEqual(set(vllm_names.Taken(vllm_names.List_(left), version).missing), {gone})

    def test_parameters(self):
        for is_taken, ours, theirs in (
                (True, "(self, a, b=)", "(self, a)"), (True, "(cls, *given, **named)", "(cls, a, b=, *, c=)"),
                (True, "(self, a=)", "(self, a=)"), (True, "(self, b)", "(self, b)"),
                (False, "(self, a)", "(self, a, b=)"), (False, "(self, a, b)", "(self, a)"),
                (False, "(self, a)", "(self, a=)"), (False, "(self, a)", "(self, b)")):
            self.assertEqual(vllm_names.takes(ours, theirs), is_taken, (ours, theirs))
        for is_given, count, names, theirs in (
                (True, 2, [], "(a, b)"), (True, 1, ["b"], "(a, b, c=)"), (True, 0, [], "()"),
                (False, 1, [], "(a, b)"), (False, 3, [], "(a, b)"), (False, 1, ["d"], "(a, b=)")):
            self.assertEqual(vllm_names.given(("f", count, names, theirs)), is_given, (count, names, theirs))

    def test_nobody_else_imports_vllm(self):
        for name, text in vllm_names.files():
            found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))
                     and not getattr(node, "level", 0)
                     and any((one or "").partition(".")[0] == "vllm" for one in
                             ([node.module] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]))]
            wanted = {"upstream.py": None, "__init__.py": ["import vllm"]}.get(name, [])
            if wanted is not None:
                self.assertEqual([ast.unparse(node) for node in found], wanted, name)

    def test_releases_that_are_said(self):
        """The lists, the package's requirement and the page are of the same releases."""
        told = known()
        self.assertEqual(sorted(name[:-4] for name in os.listdir(vllm_names.LISTS)), sorted(told))
        major, minor = told[-1].split(".")
        with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as text:
            self.assertIn('vllm = ["vllm >= %s, < %s.%d"]' % (told[0], major, int(minor) + 1), text.read())
        with open(os.path.join(ROOT, "docs", "vllm.md"), encoding="utf-8") as text:
            self.assertIn("vLLM " + " or ".join(told), text.read())


if __name__ == "__main__":
    unittest.main()
