# SPDX-License-Identifier: Apache-2.0
"""Data sets that are read from a folder of the user: `eval.py --data FOLDER`.

A file NAME.jsonl or NAME.json, a list or a line for each question, is a task. Its form is known by the
fields of its rows:

  choice_A ... D, question, context, answer     LongBench v2: a letter
  context, input, answers                       LongBench: the score that its NAME has there
  context, input, answer, options               InfiniteBench: an option, a likeness, or what is found
  ctxs, question, answers                       HELMET's retrieval: what is found
  problem, answer                               MATH500, AIME: what is in the last box, or the last number
  prompt, answers                               any other, LongProc's too: what is found

Prompts of LongBench v2 and of problems are the published ones, others are a plain form of their own, so
their scores compare rows with each other and not with papers. A prompt that is too long loses its
middle: as much is left of both ends. Problems may be drawn several times, each with its seed: the mean is
avg@k, and the share of problems that are right at least once pass@k. Knows files and scores, not models.
"""
import difflib
import json
import os
import re
import string
import sys

import eval_texts  # noqa: F401: the way to judge
from judge.tasks import Document, Task

ABOUT = """\
Every row reads every prompt whole. Prompts of LongBench v2 and of problems are the published ones,
others are a plain form of their own, so their scores compare rows with each other and not with papers.
A prompt that is too long loses its middle: as much is left of both ends. *score*: as the data set has
it, times 100; a task counts where full attention scores 20 or more. *avg@k*: the mean over draws of a
problem, *pass@k*: the share of problems that are right at least once."""
CHOICE = """Please read the following text and answer the question below.

<text>
{context}
</text>
""", """
What is the correct answer to this question: {question}
Choices:
{choices}

Format your response as follows: "The correct answer is (insert answer here)"."""
PROBLEM = "", "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.\n"
PLAIN = "{context}\n\n", "Question: {question}\nAnswer:"
CODE = "{context}", "{question}"
# Measures of LongBench and InfiniteBench, by the name of the file.
OF_NAME = {
    "f1": "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa longbook_qa_eng",
    "rouge": "gov_report qmsum multi_news samsum longbook_sum_eng",
    "classes": "trec", "numbers": "passage_retrieval_en passage_count", "code": "lcc repobench-p"}
TOKENS = {"letter": 32, "f1": 64, "rouge": 256, "classes": 64, "numbers": 32, "code": 64, "found": 64,
          "problem": 1024}


# ---- scores: of what was said and all right answers ----

def words(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return [w for w in text.split() if w not in ("a", "an", "the")]


def f1(said, answer):
    said, right, common = words(said), words(answer), 0
    left = list(right)
    for word in said:
        if word in left:
            left.remove(word)
            common += 1
    return 2 * common / (len(said) + len(right)) if common else 0.0


def rouge(said, answer):
    """ROUGE-L: of the longest common subsequence of words."""
    said, right = said.lower().split(), answer.lower().split()
    row = [0] * (len(right) + 1)
    for word in said:
        before = 0
        for i, other in enumerate(right, 1):
            before, row[i] = row[i], before + 1 if word == other else max(row[i], row[i - 1])
    return 2 * row[-1] / (len(said) + len(right)) if row[-1] else 0.0


def letter(said, answer):
    found = re.search(r"correct answer is:?\W*([A-D])\b", said) or re.match(r"\W*([A-D])\b", said)
    return float(bool(found) and found.group(1) == answer.strip(" ()."))


def numbers(said, answer):
    right, found = re.findall(r"\d+", answer), re.findall(r"\d+", said)
    return found.count(right[0]) / len(found) if found and right else 0.0


def code(said, answer):
    lines = [s for s in said.lstrip("\n").split("\n") if not re.search(r"`|#|//", s)]
    return difflib.SequenceMatcher(None, lines[0] if lines else "", answer).ratio()


def plain(text):
    text = text.strip().strip("$").rstrip(".").replace(" ", "").replace("\\dfrac", "\\frac").replace(
        "\\left", "").replace("\\right", "").replace(",\\!", "")
    return str(int(text)) if re.fullmatch(r"\d+", text) else text


def boxed(said):
    """The text in the last box, else the last number."""
    at = said.rfind("\\boxed{")
    if at < 0:
        return (re.findall(r"-?\d+(?:\.\d+)?", said) or [""])[-1]
    depth = 0
    for i, c in enumerate(said[at + 6:], at + 6):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return said[at + 7:i]
    return ""


def problem(said, answer):
    return float(plain(boxed(said)) == plain(answer) != "")


def found(said, answer):
    return float(" %s " % " ".join(words(answer)) in " %s " % " ".join(words(said)))


SCORES = {f.__name__: f for f in (f1, rouge, letter, numbers, code, problem, found)}


class SetTask(Task):
    def __init__(self, kind, text, answers, tokens, seed=None, classes=()):
        Task.__init__(self, kind, text, answers[0], tokens)
        self.answers, self.seed, self.classes = answers, seed, classes

    def score(self, said):
        if self.kind == "classes":
            named = [c for c in self.classes if c in said]
            return 1 / len(named) if set(named) & set(self.answers) else 0.0
        return max(SCORES[self.kind](said, answer) for answer in self.answers)


# ---- rows ----

def listed(answers):
    """Some data sets have a list of lists, or one text."""
    if not isinstance(answers, list):
        return [str(answers)]
    return [str(x) for a in answers for x in (a if isinstance(a, list) else [a])]


def kind_of(name, default):
    return next((kind for kind, names in OF_NAME.items() if name in names.split()), default)


def formed(name, row):
    """(kind, form, context, what is asked, answers, classes)"""
    if "choice_A" in row:
        choices = "\n".join("(%s) %s" % (c, row["choice_" + c]) for c in "ABCD")
        return "letter", CHOICE, row["context"], {"question": row["question"], "choices": choices}, [
            row["answer"]], ()
    if "problem" in row:
        return "problem", PROBLEM, "", {"question": row["problem"]}, listed(row["answer"]), ()
    if "ctxs" in row:
        context = "\n\n".join("Document (Title: %s): %s" % (c.get("title", ""), c["text"]) for c in row["ctxs"])
        return "found", PLAIN, context, {"question": row["question"]}, listed(
            row.get("answers", row.get("answer"))), ()
    if "prompt" in row and "answers" in row:
        return kind_of(name, "found"), ("{context}", ""), row["prompt"], {}, listed(row["answers"]), ()
    if "context" in row and "input" in row and ("answers" in row or "answer" in row):
        kind = kind_of(name, "found")
        options = row.get("options") or []
        question = row["input"] + ("\n" + "\n".join(options) if options else "")
        return kind, CODE if kind == "code" else PLAIN, row["context"], {"question": question}, listed(
            row.get("answers", row.get("answer"))), row.get("all_classes") or ()
    raise ValueError("no form that is known has the fields %s" % ", ".join(sorted(row)))


def cut(text, share):
    """As much of both ends."""
    half = int(len(text) * share / 2)
    return text if share >= 1 else text[:half] + text[len(text) - half:]


def document(name, row, share, draws):
    kind, (before, after), context, asked, answers, classes = formed(name, row)
    question = after.format(**asked)
    many = draws if kind == "problem" else 1
    made = Document(before.format(context=cut(context, share)), *(
        SetTask(kind, question, answers, TOKENS[kind], seed if many > 1 else None, classes)
        for seed in range(many)))
    made.is_whole = True
    return made


class Sets:
    """The files of a folder."""

    def __init__(self, folder, draws=1):
        self.folder, self.draws = folder, draws
        try:
            files = sorted(os.listdir(folder))
        except OSError as why:
            sys.exit("eval: --data %s: %s" % (folder, why.strerror))
        self.files = {os.path.splitext(f)[0]: f for f in files if f.endswith((".jsonl", ".json"))}
        if not self.files:
            sys.exit("eval: --data %s has no *.jsonl and no *.json" % folder)

    def rows(self, name):
        path = os.path.join(self.folder, self.files[name])
        with open(path, encoding="utf-8") as f:
            text = f.read()
        rows = json.loads(text) if text.lstrip().startswith("[") else [
            json.loads(line) for line in text.split("\n") if line.strip()]
        if not rows:
            raise ValueError("%s has no rows" % path)
        return rows

    def documents(self, name, tokens, samples, count):
        """The first rows, of at most `tokens` with what is generated. count(documents): tokens of
        each."""
        try:
            rows = self.rows(name)[:samples]
            made = [document(name, row, 1.0, self.draws) for row in rows]
        except (ValueError, KeyError, TypeError) as why:
            sys.exit("eval: %s: %s" % (os.path.join(self.folder, self.files[name]), why))
        shares = [1.0] * len(rows)
        while True:
            room = [tokens - d.tasks[0].tokens for d in made]
            taken = count(made)
            if all(n <= most for n, most in zip(taken, room)):
                return made
            if min(shares) < 1e-3:
                sys.exit("eval: %s: %d tokens are too few for a question of it" % (name, tokens))
            shares = [s if n <= most else 0.98 * s * max(most, 0) / n
                      for s, n, most in zip(shares, taken, room)]
            made = [document(name, row, s, self.draws) for row, s in zip(rows, shares)]


def repeated(told, names):
    """avg@k and pass@k of tasks that were drawn several times."""
    lines = []
    for f in told:
        draws = max(map(len, f["rows"]["full"]["scores"]))
        if draws < 2:
            continue
        for name in names:
            if name in f["rows"]:
                scores = f["rows"][name]["scores"]
                lines.append("| %s | %s | %d | %.1f | %.1f |" % (
                    f["task"], name, draws, 100 * sum(map(sum, scores)) / sum(map(len, scores)),
                    100 * sum(max(s) >= 1 for s in scores) / len(scores)))
    return ["", "| task | row | k | avg@k | pass@k |", "|---|---|---:|---:|---:|"] + lines if lines else []
