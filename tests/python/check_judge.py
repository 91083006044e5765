#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.judge`: figures against known values, and judgements of servers whose faults are known."""
import contextlib
import io
import json
import math
import os
import tempfile
import unittest

from judge_server import Server
from kvferry.judge import __main__ as judge, figures, record, report, servers, tasks, texts

servers.WAIT_SECONDS = 0.0
ASKED = ["--lengths", "400", "--samples", "3", "--tasks", "niah_single_2", "niah_multikey_1", "niah_multiquery", "--quick"]
QUESTIONS = 3 + 3 * 4 + 3


class Figures(unittest.TestCase):
    def test_kept(self):
        share, (low, high) = figures.kept([1.0] * 40 + [0.0] * 10, [1.0] * 50)
        self.assertAlmostEqual(share, 0.8)
        self.assertTrue(0.66 < low < 0.72 and 0.88 < high < 0.92, (low, high)) # 0.8 -+ 1.96 x 0.0566
        self.assertEqual(figures.kept([2.0, 2.0], [2.0, 2.0]), (1.0, (1.0, 1.0)))
        self.assertEqual(figures.kept([0.0], [0.0]), (None, (None, None)))
        # Two documents, 0 and 1 of 1, drawn one by one: both are the same in half of the draws.
        self.assertEqual(figures.kept([0.0, 1.0], [1.0, 1.0]), (0.5, (0.0, 1.0)))

    def test_without_a_change(self):
        self.assertEqual(figures.without_a_change(300), (0.99, 1.0))
        self.assertAlmostEqual(0.99 ** 300, 0.05, 2) # as likely is it that none of 300 shows a loss of 1 in 100
        self.assertEqual(figures.without_a_change(2), (0.0, 1.0))

    def test_outcomes(self):
        self.assertEqual(figures.outcomes([[0.5, 1.0], [0.0]], [[1.0, 0.5], [0.0]]), (1, 1))

    def test_divergence(self):
        p, q = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.25), 2: math.log(0.75)}
        self.assertAlmostEqual(figures.divergence(p, q), 0.5 * math.log(2) + 0.5 * math.log(2 / 3), 6)
        self.assertAlmostEqual(figures.divergence(p, p), 0.0, 9)
        one = {1: math.log(0.5), 3: math.log(0.2)} # what is not named by both is one token: 0.5 and 0.5
        self.assertAlmostEqual(figures.divergence(p, one), 0.0, 9)
        self.assertEqual(figures.likeliest(q), 2)

    def test_texts(self):
        self.assertEqual(figures.first_difference("a b c", "a b d"), 2)
        self.assertEqual(figures.first_difference("a b", "a b c"), 2)
        self.assertIsNone(figures.first_difference("a b ", "a b"))
        self.assertEqual(figures.repetition("a b c d e f"), 0.0)
        self.assertAlmostEqual(figures.repetition("a b c d a b c d a"), 2 / 6)
        self.assertEqual(figures.percentile(range(1, 201), 0.99), 198)

    def test_foresight(self):
        self.assertEqual(figures.foresight([0.5, 0.6, 0.9], [True, False, False]), 1.0)
        self.assertEqual(figures.foresight([0.9, 0.6, 0.6], [True, False, True]), 0.25)
        self.assertIsNone(figures.foresight([0.9], [True]))


class Tasks(unittest.TestCase):
    def test_all_forms(self):
        """Prompts fill what they should, hold what is asked for, are always the same, and come back from a file."""
        def counted(some):
            return [max(len((d.text + task.text).split()) for task in d.tasks) for d in some]

        material = texts.Material(texts.made(), more=True)
        for name in tasks.TASKS:
            with self.subTest(name):
                made, same = (tasks.fitted(material, name, 900, 2, counted) for _ in range(2))
                self.assertEqual([d.text for d in made], [d.text for d in same])
                self.assertNotEqual(made[0].text, made[1].text)
                for words in counted(made):
                    self.assertTrue(0.85 * 900 < words + made[0].tasks[0].tokens <= 900, words)
                row = json.loads(json.dumps(tasks.row_of(made[1], name, 900, 1)))
                again = tasks.document_of(row)
                self.assertEqual((again.text, again.name, again.length, again.sample), (made[1].text, name, 900, 1))
                self.assertEqual(len({task.text for task in again.tasks}), 4 if "multikey" in name or name == "mrcr" else 1)
                for task, old in zip(again.tasks, made[1].tasks, strict=True):
                    self.assertEqual((type(task), task.text, task.tokens), (type(old), old.text, old.tokens))
                    self.assertEqual((task.score(" ".join(task.answers)), task.score("-")), (1.0, 0.0))
                    self.assertTrue(all(answer in again.text for answer in task.answers[name == "mrcr":]))

    def test_scores(self):
        four = tasks.RulerTask("", "", ["Abc", "def", "ghi", "jkl"], 1)
        self.assertEqual(four.score(" abc, DEF and gh"), 0.5)
        mrcr = tasks.MrcrTask("", "", ["QWERTY", "one two three"], 1)
        self.assertEqual((mrcr.score("one two three"), mrcr.score(" QWERTY one two three User: and")), (0.0, 1.0))
        self.assertTrue(0.3 < mrcr.score("QWERTY one") < 0.7)

    def test_a_document_that_is_too_long_at_its_least(self):
        """The first one fits, and no size makes another one fit."""
        def make(sample, size):
            return tasks.Document("word " * (size + 50 * sample), tasks.RulerTask("cwe", "", ["word"], 10))

        with self.assertRaisesRegex(ValueError, "cwe does not fit 40 tokens: give greater --lengths, or --tasks"):
            tasks.filled(make, 11, "cwe", 40, 2, lambda some: [len(d.text.split()) for d in some])

    def test_calls(self):
        task = tasks.tool(0, 100, texts.Material(texts.made())).tasks[0]
        schema = json.loads(task.answers[0])
        good = {"person": "A", "city": schema["parameters"]["properties"]["city"]["enum"][1], "count": 3, "urgent": False}

        def score(**other):
            given = {k: v for k, v in {**good, **other}.items() if v is not None}
            return task.score(json.dumps([{"name": schema["name"], "arguments": json.dumps(given)}]))

        self.assertEqual(score(), 1.0)
        for wrong in ({"count": "3"}, {"count": True}, {"city": "Atlantis"}, {"urgent": None}, {"more": 1}):
            self.assertEqual(score(**wrong), 0.0, wrong)
        for said in ("[]", "{", '[{"name": "x", "arguments": "{}"}]', '[{"name": "%s", "arguments": "{"}]' % schema["name"]):
            self.assertEqual(task.score(said), 0.0, said)

    def test_questions_of_a_user(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "own.jsonl")
            with open(path, "w", encoding="utf-8") as f:
                f.write('{"fact": "The safe is green.", "question": "Which colour?", "answers": ["green"]}\n\n'
                        '{"prompt": "2 + 2 =", "answers": ["4"]}\n')
            hidden, whole = tasks.read_own(path)
            document = tasks.own([hidden], 0)(0, 200, texts.Material(texts.made()))
            self.assertIn("The safe is green.", document.text)
            self.assertEqual(document.tasks[0].score(" It is Green."), 1.0)
            self.assertEqual(tasks.whole(whole).tasks[0].text, "2 + 2 =")
            with open(path, "a", encoding="utf-8") as f:
                f.write('{"question": "?", "answers": ["4"]}\n')
            with self.assertRaisesRegex(ValueError, "own.jsonl:4: give"):
                tasks.read_own(path)


class Told(unittest.TestCase):
    """Answers that are written here: ten documents at each of two lengths, one question each."""

    @classmethod
    def setUpClass(cls):
        task, text = tasks.RulerTask("own", "?", ["yes"], 4), tasks.Task("text", " b", tokens=3)
        cls.documents = [tasks.Document("", task) for _ in range(20)] + [tasks.Document("", text)]
        for at, one in enumerate(cls.documents):
            one.name, one.length, one.sample = "own", (1024, 2048)[at // 10 % 2], at % 10

    def record(self, right, **tops):
        """right: by side, how many answers are right at both lengths. tops: by side, probability of the likelier token"""
        made = record.Record("nowhere")
        made.documents = self.documents
        for side, counts in {"full": (10, 10), **right}.items():
            for d in range(20):
                answer = "yes" if d % 10 < counts[d // 10] else "no"
                made.said[side, d, 0] = {"answer": answer, "served": {"steps": 3, "selected": 3, "elsewhere": 0, "heads": 0}}
                made.said[side, d, 0]["served"]["recall"] = 0
        for side, p in tops.items():
            made.said[{"control": report.CONTROL}.get(side, side), 20, 0] = {
                "tops": [[[1, math.log(p)], [2, math.log(1 - p)]]], "pieces": ["b"], "tokens": 2}
        return made

    def verdict(self, keep=0.9, **right):
        made = self.record({name[1:]: counts for name, counts in right.items()})
        sides = [name[1:] for name in right]
        return report.verdict(made, report.judgements({s: report.rows(made, s) for s in sides}), sides, keep)

    def test_the_smallest_budget_that_keeps_enough(self):
        line, status = self.verdict(_128=(9, 5), _512=(10, 9), _1024=(10, 10))
        self.assertEqual(status, 0, line)
        self.assertRegex(line, r"^128 keeps 90\.0% \(\S+ to 100\.0\) of full on 10 questions at 1K; 512 keeps 90\.0%.* at 2K$")
        line, status = self.verdict(_128=(9, 5), _512=(10, 8))
        self.assertEqual(status, 1)
        self.assertTrue(line.endswith("at 2K, less than 90.0%"), line)

    def test_a_lost_answer_is_lost_whatever_else_is_won(self):
        made, task = record.Record("nowhere"), tasks.RulerTask("own", "?", ["yes"], 4)
        for d, (full, mine, share) in enumerate((("yn", "ny", 0.6), ("yn", "yn", 0.9), ("nn", "yy", 0.1))):
            made.documents.append(tasks.Document("", task, task))
            made.documents[d].length = 1024
            for q in range(2):
                for side, said in (("full", full), ("128", mine)):
                    made.said[side, d, q] = {"answer": {"y": "yes", "n": "no"}[said[q]], "served": {"heads": 2, "recall": 2 * share}}
        told = report.foresight(made, "128")
        self.assertEqual((told["documents"], told["share"]), ([1, 1], 1.0)) # the third had nothing to lose
        self.assertAlmostEqual(told["measured"][0], 0.6)

    def test_a_control_that_does_not_differ(self):
        for p, is_measured in ((0.6, True), (0.9, False)):
            said = "\n".join(report.of_side(self.record({}, full=0.9, control=p), report.CONTROL, []))
            self.assertIn("likelihoods: KL %.4f nats" % (0.0 if p == 0.9 else 0.9 * math.log(1.5) + 0.1 * math.log(0.25)), said)
            self.assertEqual("likelihoods are NOT measured" not in said, is_measured, said)


class Judged(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory() # pylint: disable=consider-using-with
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def server(self, **how):
        one = Server(**how)
        self.addCleanup(one.server_close)
        self.addCleanup(one.shutdown)
        return one

    def run_judge(self, *given):
        """(exit status, output)"""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), self.assertRaises(SystemExit) as ended:
            judge.main(["--out", os.path.join(self.folder, "out"), *given])
        return ended.exception.code, out.getvalue()

    def told(self):
        with open(os.path.join(self.folder, "out", "judge.json"), encoding="utf-8") as f:
            return json.load(f)

    def total(self, side="kvferry"):
        return self.told()["sides"][side]["rows"][-1]

    def test_servers_that_are_right(self):
        status, out = self.run_judge("--url", self.server(selects=1.0).url, "--full", self.server().url, *ASKED)
        self.assertEqual(status, 0, out)
        self.assertIn("kvferry keeps 100.0%% (66.7 to 100.0) of full on %d questions at 400" % QUESTIONS, out)
        self.assertLess(out.index("to be asked: "), out.index("verdict: ")) # what it costs is told first
        self.assertIn("tokens of prompts", out)
        self.assertIn("likelihoods: none, because given text is a prompt to this server", out)
        self.assertIn("calls of functions: none, because", out)
        self.assertIn("long answer: the same; 10 tokens with full, 10 here", out)
        self.assertIn("measured share of attention: 0.7500; no document lost an answer, so how well it foresees", out)
        self.assertEqual([self.total("again")[k] for k in ("full", "mine", "worse", "better")], [6, 6, 0, 0])

    def test_a_server_that_is_wrong_on_purpose(self):
        wrong = self.server(selects=1.0, is_wrong=lambda prompt: len(prompt) % 3 == 0)
        status, out = self.run_judge("--url", wrong.url, "--full", self.server().url, *ASKED)
        self.assertEqual(status, 1, out)
        lost, row = sum("What " in p and len(p) % 3 == 0 for p in wrong.asked), self.total()
        self.assertGreater(lost, 2)
        self.assertEqual((row["worse"], row["better"], row["full"], row["mine"]), (lost, 0, QUESTIONS, QUESTIONS - lost))
        self.assertLess(row["interval"][0], row["kept"])
        self.assertIn("less than 99.0%", out)
        foresight = self.told()["sides"]["kvferry"]["foresight"]
        self.assertEqual((foresight["share"], foresight["interval"], sum(foresight["documents"])), (1.0, [1.0, 1.0], 9))
        self.assertIn("0.7500 in %d others: lower in 100%% of pairs (100 to 100" % foresight["documents"][1], out)

    def test_full_attention_that_cannot_is_not_judged(self):
        status, out = self.run_judge("--url", self.server().url, "--full", self.server(is_wrong=lambda prompt: True).url, *ASKED)
        self.assertEqual(status, 3, out)
        self.assertIn("not judged: full itself scores below a fifth", out)
        self.assertIn("no verdict", out)

    def test_a_server_that_dies_and_the_run_that_goes_on(self):
        full, mine = self.server(), self.server(lives=6)
        given = ("--url", mine.url, "--full", full.url, *ASKED)
        status, out = self.run_judge(*given)
        self.assertEqual(status, 3, out)
        self.assertIn("does not answer", out)
        self.assertEqual(self.total()["questions"], 6) # as it came before it died
        self.assertIn("keeps 100.0% (0.0 to 100.0) of full on 6 questions at 400", out)
        mine.lives = math.inf
        status, out = self.run_judge(*given)
        self.assertEqual((status, self.total()["questions"]), (0, QUESTIONS), out)
        self.assertEqual(len(set(mine.asked)), len(mine.asked)) # nothing twice
        before = len(mine.asked), len(full.asked)
        self.run_judge(*given)
        self.assertEqual((len(mine.asked), len(full.asked)), before)

    def test_a_line_that_was_cut(self):
        self.run_judge("--url", self.server().url, "--full", self.server().url, *ASKED)
        path = os.path.join(self.folder, "out", "answers.jsonl")
        with open(path, "rb+") as f:
            f.truncate(os.path.getsize(path) - 9)
        said = len(record.Record(path).read().said)
        status, out = self.run_judge("--url", self.server().url, "--full", self.server().url, *ASKED)
        self.assertEqual(status, 2)
        self.assertIn("give another --out", out) # these are other servers
        one = record.Record(path).read()
        one.add("kvferry", 0, 9, {"answer": "x"})
        self.assertEqual(len(record.Record(path).read().said), said + 1)

    def test_full_first_and_the_other_later(self):
        path, full = os.path.join(self.folder, "full.jsonl"), self.server()
        status, out = self.run_judge("--url", full.url, "--record", path, *ASKED)
        self.assertEqual(status, 0, out)
        self.assertIn("full again (the control)", out)
        status, out = self.run_judge("--url", self.server(selects=1.0).url, "--full", path)
        self.assertEqual((status, self.total()["questions"]), (0, QUESTIONS), out)
        other = os.path.join(self.folder, "other.jsonl")
        self.run_judge("--url", full.url, "--record", other, *ASKED, "--samples", "1")
        status, out = self.run_judge("--url", self.server().url, "--full", other)
        self.assertEqual(status, 2)
        self.assertIn("has other questions than", out)

    def test_no_verdict_on_what_was_not_selected(self):
        status, out = self.run_judge("--url", self.server(selects=0.5).url, "--full", self.server().url, *ASKED)
        self.assertEqual(status, 3, out)
        self.assertIn("no verdict: kvferry at 400: 50% of the judged steps selected", out)
        served = self.told()["sides"]["kvferry"]["served"]
        self.assertEqual(served["densely"], 0.5 * served["steps"])

    def test_who_does_not_count(self):
        status, out = self.run_judge("--url", self.server().url, "--full", self.server().url, *ASKED)
        self.assertEqual(status, 0)
        self.assertIn("whether steps selected is not known", out)

    def test_what_llama_server_writes(self):
        log = os.path.join(self.folder, "log.txt")
        for is_half, status, shares in ((False, 0, (1.0, 0.0)), (True, 3, (0.5, 0.5))):
            with open(log, "w", encoding="utf-8") as f:
                f.write("kvferry: loaded into llama.cpp\n")
            got, out = self.run_judge("--url", self.server(log=log, is_half=is_half).url, "--full", self.server().url,
                                      "--log", log, *ASKED, "--out", os.path.join(self.folder, "half %d" % is_half))
            self.assertEqual(got, status, out)
            self.assertNotIn("is not known", out.splitlines()[-1])
            with open(os.path.join(self.folder, "half %d" % is_half, "judge.json"), encoding="utf-8") as f:
                served = json.load(f)["sides"]["kvferry"]["served"]
            self.assertEqual((served["selected"] / served["steps"], served["elsewhere"] / served["steps"]), shares)

    def test_one_that_refuses_a_question(self):
        """It is told, and the others are judged; 1 of 9 is too much for a verdict that counts."""
        refused = []
        mine = self.server(selects=1.0, refuses=lambda prompt: len(mine.asked) == 4 and not refused and not refused.append(1))
        status, out = self.run_judge("--url", mine.url, "--full", self.server().url, *ASKED)
        self.assertEqual((status, self.total()["documents"]), (3, 8), out)
        self.assertIn("1 documents were not answered", out)
        self.assertIn("too long", out)

    def test_a_server_without_a_tokenizer(self):
        """Answers say how many tokens a short text has, and characters how many a long one."""
        status, out = self.run_judge("--url", self.server(selects=1.0, counts=False).url, "--full", self.server().url,
                                     "--lengths", "2000", "--samples", "1", "--tasks", "niah_single_2", "--quick")
        self.assertEqual(status, 0, out)
        path = os.path.join(self.folder, "out", "answers.jsonl")
        made = next(d for d in record.Record(path).read().documents if d.name == "niah_single_2")
        self.assertTrue(1600 < len((made.text + made.tasks[0].text).split()) < 2000)

    def test_likelihoods_token_by_token(self):
        urls = [self.server(is_llama=True, nats=nats).url for nats in (0.7, 0.0)]
        self.run_judge("--url", urls[0], "--full", urls[1], *ASKED)
        told, p = self.told()["sides"]["kvferry"]["likelihoods"], 0.5 * math.exp(-0.7)
        self.assertAlmostEqual(told["mean"], 0.5 * math.log(0.5 / p) + 0.5 * math.log(0.5 / (1 - p)), 6)
        self.assertEqual((told["steps"], told["same_top"]), (49, 0.0)) # the first of 50 is read with the prompt
        self.assertEqual(self.told()["sides"]["again"]["likelihoods"]["mean"], 0.0)

    def test_messages(self):
        status, out = self.run_judge("--url", self.server(selects=1.0).url, "--full", self.server().url, "--chat", *ASKED)
        self.assertEqual((status, self.total()["mine"]), (0, QUESTIONS), out)

    def test_texts_of_a_user(self):
        for name, text in (("a.md", "The heron waded in the brook. " * 60), ("b.bin", "unread " * 60), ("c.txt", "An otter slept. " * 60)):
            with open(os.path.join(self.folder, name), "w", encoding="utf-8") as f:
                f.write(text)
        mine = self.server(selects=1.0)
        status, out = self.run_judge("--url", mine.url, "--full", self.server().url, "--text", self.folder, *ASKED)
        self.assertEqual(status, 0, out)
        asked = " ".join(mine.asked)
        self.assertEqual([word in asked for word in ("heron", "otter", "unread", "Alice")], [True, True, False, False])

    def test_calls_of_functions(self):
        self.run_judge("--url", self.server(calls=False).url, "--full", self.server(calls=True).url, *ASKED)
        self.assertEqual(self.told()["sides"]["kvferry"]["calls"], {"asked": 2, "full": 2, "mine": 0})

    def test_what_it_costs_alone(self):
        full, mine = self.server(), self.server()
        status, out = self.run_judge("--url", mine.url, "--full", full.url, "--dry-run", *ASKED)
        self.assertEqual((status, mine.asked + full.asked), (0, []))
        self.assertIn("at most", out)
        for given, documents in (([], 1 + 2 + 5 + 5), (["--quick"], 1 + 1 + 2 + 3), (["--quick", "--samples", "4"], 1 + 1 + 2 + 4)):
            _, out = self.run_judge("--url", mine.url, "--full", full.url, "--dry-run", "--tasks", "niah_single_2", "--lengths",
                                    "4K" if not given else "400", *given, "--out", os.path.join(self.folder, "of %d" % documents))
            self.assertIn("of %d documents" % documents, out) # a long answer, texts, calls, needles

    def test_refused(self):
        for given, text in ((["--model", "m", "--url", "u"], "give --url or --model"),
                            (["--url", "u"], "--record makes the file"),
                            (["--url", "u", "--full", "nowhere"], "no such file"),
                            (["--url", "u", "--full", "http://u", "--sweep", "budget=1"], "leave --sweep"),
                            (["--url", "u", "--full", "http://u", "--budget", "full"], "is what full attention itself"),
                            (["--url", "u", "--full", __file__, "--lengths", "8K"], "brings its questions along"),
                            (["--model", "m", "--budget", "many"], "budget many: give 1024, or 1024+5%"),
                            (["--model", "m", "--sweep", "512"], "--sweep is budget=A,B"),
                            (["--url", "u", "--full", "http://u", "--log", "nowhere"], "it is a file of the server"),
                            (["--model", "m", "--set", "x"], "--set is NAME=VALUE"),
                            (["--url", "http://127.0.0.1:9/v1", "--full", "http://127.0.0.1:9/v1"], "does not answer"),
                            (["--url", self.server().url, "--full", self.server().url, "--text", self.folder], "too few")):
            status, out = self.run_judge(*given)
            self.assertEqual(status, 2, given)
            self.assertIn(text, out)


if __name__ == "__main__":
    unittest.main()
