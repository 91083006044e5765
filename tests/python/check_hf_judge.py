#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.judge --model`: the door of Transformers, with the real model.

At a budget of the whole context it is full attention, at a small one it is not, and both are told; what is kept of a
cache between two questions changes no answer.

usage: check_hf_judge.py [TEST...]
"""
import contextlib
import io
import os
import tempfile
import unittest

import check_hf # ends here where there is no torch
from kvferry import Error
from kvferry.judge import __main__ as judge, figures, models, tasks, texts
from kvferry.judge.record import FULL

FOLDER = os.environ["KVF_HF_MODEL"]
WHOLE, SMALL = "2048", "64 local_tokens=16"


def setUpModule():
    assert check_hf


def text_of(words):
    return " ".join(texts.made().split()[:words])


class Door(unittest.TestCase):
    """One that is asked directly."""

    @classmethod
    def setUpClass(cls):
        cls.door = models.Model(FOLDER, 8)
        material = texts.Material(texts.made(), more=True)
        cls.needles, = tasks.fitted(material, "niah_multikey_1", 500, 1, lambda some: [
            cls.door.count([d.text + d.tasks[0].text])[0] for d in some])
        for task in cls.needles.tasks:
            task.tokens = 12
        cls.said = tasks.Document(text_of(300), tasks.Task("text", " " + text_of(24), tokens=12))
        cls.said.name, cls.said.length, cls.said.sample = "text", 300, 0

    def ask(self, document, side, which=(0,)):
        return [told for _, told in self.door.ask(document, which, side)]

    def test_settings_of_a_side(self):
        self.assertEqual(models.settings_of("1024"), {"budget_tokens": 1024})
        self.assertEqual(models.settings_of("1024+5% pages=k8v4 local_tokens=32"),
                         {"budget_tokens": 1024, "budget_share": 0.05, "pages": "k8v4", "local_tokens": 32})

    def test_answers_of_the_whole_context_are_those_of_full_attention(self):
        full, whole, small = (self.ask(self.needles, side) for side in (FULL, WHOLE, SMALL))
        self.assertEqual(full[0]["answer"], whole[0]["answer"])
        self.assertGreater(full[0]["tokens"], 1)
        steps = full[0]["served"]["steps"]
        self.assertEqual(full[0]["served"], {"steps": steps, "selected": 0, "elsewhere": steps, "heads": 0, "recall": 0})
        self.assertEqual([whole[0]["served"][k] for k in ("steps", "selected", "elsewhere")], [steps, 0, 0])
        steps = small[0]["served"]["steps"]
        self.assertEqual([small[0]["served"][k] for k in ("selected", "elsewhere")], [steps, 0])
        self.assertGreater(small[0]["served"]["heads"], 0)
        self.assertLess(small[0]["served"]["recall"], small[0]["served"]["heads"])

    def test_a_cache_that_goes_on_says_what_a_new_one_says(self):
        which = range(2)
        for side in (FULL, "256"):
            kept = self.ask(self.needles, side, which)
            for question in reversed(which):
                self.door.caches.clear()
                self.assertEqual(self.ask(self.needles, side, [question])[0]["answer"], kept[question]["answer"], (side, question))

    def test_likelihoods_of_steps(self):
        tops = {side: self.ask(self.said, side)[0] for side in (FULL, WHOLE, SMALL)}
        kl = {side: [figures.divergence(dict(p), dict(q)) for p, q in zip(tops[FULL]["tops"], tops[side]["tops"])]
              for side in (WHOLE, SMALL)}
        self.assertEqual(len(kl[WHOLE]), 11)
        self.assertEqual(len(tops[FULL]["pieces"]), 11)
        self.assertLess(max(kl[WHOLE]), 1e-6)
        self.assertGreater(sum(kl[SMALL]) / 11, 1e-3)

    def test_tools_are_not_for_a_model(self):
        asked = tasks.Document("", tasks.Task("tool", "", tokens=1))
        with self.assertRaisesRegex(models.Cannot, "only servers"):
            self.ask(asked, FULL)

    def test_a_setting_that_there_is_not(self):
        with self.assertRaisesRegex(Error, "no setting budgit"):
            self.ask(self.said, "64 budgit=1")


class Command(unittest.TestCase):
    def run_judge(self, *given):
        """Exit status and what is said on standard error."""
        said = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said), \
                self.assertRaises(SystemExit) as end:
            judge.main(["--model", FOLDER, "--quick", "--lengths", "500", "--samples", "1", "--tasks", "niah_single_1",
                        "--out", os.path.join(folder, "out"), *given])
        return end.exception.code, said.getvalue()

    def test_what_it_costs(self):
        status, said = self.run_judge("--sweep", "budget=128,2048", "--dry-run")
        self.assertEqual(status, 0, said)
        self.assertRegex(said, r"\(full, 128, 2048, .*; [\d,]+ tokens of prompts")

    def test_a_budget_that_no_cache_takes(self):
        status, said = self.run_judge("--sweep", "budget=64,2048")
        self.assertEqual(status, 2)
        self.assertRegex(said, "kvferry.judge: budget_tokens = 64: at least")


if __name__ == "__main__":
    unittest.main()
