#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far answers suffer if a KV head keeps its choice of pages until its logits have drifted.

usage: eval_kept.py --program FILE --data FOLDER [--check N | --report] [--out FOLDER]

FILE is the kvferry command of a build with the prototype (bench/kept.patch); FOLDER keeps what was
said, a line for each document. The questions are those that ruler.md judges, in an order that was
drawn once: a run that was cut is a sample of them, and the same command goes on with it. A document
is read once, with full attention; all variants of all its questions are rows of one batch. --check
compares tokens of N documents instead: where every step chooses, and where everything fits in the
budget. --report writes kept.md.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile

import eval_texts
import real_model
from eval_ruler import count
from judge import tasks
from judge.figures import kept, mean, outcomes
from judge.texts import Material, Random
from results_folder import RESULTS, ROOT, machine, read, save, write

BUDGETS, NATS, CAP = [512, 1024], [0, 2.5, 3, 4], 32
VARIANTS = ["%d:%g" % (budget, nats) for budget in BUDGETS for nats in NATS]
WHOLE = 16384  # a budget that holds every document
# Documents by task and tokens: those in which full attention scores 20 or more.
JUDGED = {(task, 2048): 72 for task in ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1",
                                        "niah_multivalue", "niah_multiquery", "fwe")}
LONGER = ("niah_single_1", "niah_single_2", "niah_multikey_1")
JUDGED.update({(task, tokens): n for tokens, n in ((4096, 16), (7500, 4)) for task in LONGER})
JUDGED.update({("vt", 4096): 1, ("cwe", 4096): 1})
QUESTIONS = 842
FAMILIES = {"niah_single": "one needle", "niah_multikey": "one needle of four",
            "niah_multi": "several needles", "fwe": "frequent words", "cwe": "frequent words",
            "vt": "variables"}
TABLE_TEXTS = ["docs/design/prune.md", "docs/design/step.md"]
TABLE_CHARS = 16000
SEED = 52
COUNTS = ["steps", "lists", "chosen", "capped", "pages", "fresh"]
LEAST, MOST = 0.985, 0.40


# ---- the command ----

class Command:
    """Runs of the command in a folder; the prototype reads the variables KVF_*."""

    def __init__(self, args, model, folder):
        self.base = [args.program, "run", "--model", model, "--device", "host", "--threads", "1"]
        self.folder = folder
        self.saved = self.path("document.kvs")

    def path(self, name, text=None):
        path = os.path.join(self.folder, name)
        if text is not None:
            write(path, text)
        return path

    def run(self, *options, **study):
        env = dict(os.environ, **{"KVF_" + name.upper(): value for name, value in study.items()})
        done = subprocess.run(self.base + list(options), env=env, check=False, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit("eval_kept: %s" % done.stderr.strip().split("\n")[-1])
        return done.stdout

    def read_document(self, text):
        self.run("--prompt-file", self.path("document.txt", text), "--save", self.saved, "--select", "full",
                 "-n", "1")

    def ask(self, questions, variants, budget, *options, **study):
        """For every question what it was answered by every variant; by none: as the library selects."""
        n = max(1, len(variants))
        lines = [{"id": "%d" % (i * n + v), "prompt": q.text, "tokens": q.tokens}
                 for i, q in enumerate(questions) for v in range(n)]
        stops = [q.enough[0] if len(q.enough) == 1 else "-" for q in questions]
        said = self.run("--load", self.saved, "--reselect", "--batch", str(len(lines)), "--budget", str(budget),
                        "--prompts", self.path("prompts", "".join(json.dumps(line) + "\n" for line in lines)),
                        *(word for text in stops for word in ("--stop", text)), *options,
                        kept=" ".join(variants), kept_stats=self.path("counts", ""), **study)
        answers = sorted(map(json.loads, said.splitlines()), key=lambda a: int(a["id"]))
        for a, counts in zip(answers, read(self.path("counts")).splitlines() or [""] * len(answers)):
            a["counts"] = dict(zip(COUNTS, map(int, counts.split()[3:])))
            if a["stop"] == "text":
                a["answer"] += stops[int(a["id"]) // n]
        return [answers[i:i + n] for i in range(0, len(answers), n)]

    def ask_alone(self, question, budget):
        """Tokens of the answer by `run --ask`, as the library is used."""
        ids = self.path("ids", "")
        self.run("--load", self.saved, "--reselect", "--ask", self.path(
            "ask.jsonl", json.dumps({"prompt": question.text}) + "\n"), "-n", str(question.tokens),
                 "--budget", str(budget), "--emit-ids", ids)
        return list(map(int, read(ids).split()))


# ---- what is asked, and what was said ----

def table(args, model):
    """The path of the model's own table, made once."""
    path = os.path.join(args.data, "variances.f32")
    if not os.path.exists(path):
        with tempfile.TemporaryDirectory(prefix="kept-", dir=args.data) as folder:
            command = Command(args, model, folder)
            command.read_document("".join(read(os.path.join(ROOT, name)) for name in TABLE_TEXTS)[:TABLE_CHARS])
            command.ask([tasks.RulerTask("own", "Then", ["-"], 1)], ["1024:0"], 1024, kept_write=path)
    return path


def documents(args, model):
    """[(name, document)] in the order of the run."""
    path = os.path.join(args.data, "documents.json")
    if not os.path.exists(path):
        material, rows = Material(eval_texts.all_prose()), []
        for (task, tokens), samples in JUDGED.items():
            made = tasks.fitted(material, task, tokens, samples, lambda d: count(args.program, model, d))
            rows += [["%s-%d-%d" % (task, tokens, i), d.text,
                      [[q.kind, q.text, q.answers, q.tokens] for q in d.tasks]] for i, d in enumerate(made)]
        write(path, json.dumps(Random(SEED).shuffled(rows)))
    return [(name, tasks.Document(text, *(tasks.RulerTask(*q) for q in questions)))
            for name, text, questions in json.loads(read(path))]


def lines_said(args):
    """Lines of documents, in the order in which they were asked; the last line may be cut."""
    path = os.path.join(args.data, "answers.jsonl")
    lines = read(path).split("\n")[:-1] if os.path.exists(path) else []
    return [json.loads(line) for line in lines]


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ask_document(args, model, name, document, variances):
    start = cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="kept-", dir=args.data) as folder:
        command = Command(args, model, folder)
        command.read_document(document.text)
        answers = command.ask(document.tasks, VARIANTS, max(BUDGETS), kept_table=variances)
    questions = [{v: {"score": q.score(a["answer"]), "answer": a["answer"], "counts": a["counts"]}
                  for v, a in zip(VARIANTS, said)} for q, said in zip(document.tasks, answers)]
    row = {"name": name, "cpu_seconds": round(cpu_seconds() - start, 2), "questions": questions}
    with open(os.path.join(args.data, "answers.jsonl"), "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")
    print(name, row["cpu_seconds"], [[q[v]["score"] for v in VARIANTS] for q in questions], flush=True)


def ask_all(args, model):
    """Documents that were asked with other variants come last."""
    variances, said = table(args, model), lines_said(args)
    whole = {row["name"] for row in said if all(v in row["questions"][0] for v in VARIANTS)}
    begun = {row["name"] for row in said}
    for name, document in sorted(documents(args, model), key=lambda d: d[0] in begun):
        if name not in whole:
            ask_document(args, model, name, document, variances)


# ---- checks ----

def pairs_of(command, question, variances):
    """(what, tokens, those that they must be)"""
    def rows(variants, budget, *options):
        return [a["ids"] for a in command.ask([question], variants, budget, *options, kept_table=variances)[0]]

    always = rows(["%d:%g" % (b, nats) for nats in (0, 1e-9) for b in BUDGETS], max(BUDGETS))
    own = {b: rows([], b)[0] for b in BUDGETS}
    full = rows([], WHOLE, "--select", "full")[0]
    for what, ids, budget in zip(("always", "always", "any drift", "any drift"), always, 2 * BUDGETS):
        yield "%s, %d" % (what, budget), ids, own[budget]
    for nats, ids in zip(NATS, rows(["%d:%g" % (WHOLE, nats) for nats in NATS], WHOLE)):
        yield "everything, %g nats" % nats, ids, full
    for budget in BUDGETS:
        yield "run --ask, %d" % budget, own[budget], command.ask_alone(question, budget)


def check(args, model):
    """@return whether all tokens were the same"""
    variances, wrong = table(args, model), 0
    for name, document in documents(args, model)[:args.check]:
        question = document.tasks[0]
        question.enough = []  # to the last token
        with tempfile.TemporaryDirectory(prefix="kept-", dir=args.data) as folder:
            command = Command(args, model, folder)
            command.read_document(document.text)
            for what, mine, other in pairs_of(command, question, variances):
                wrong += mine != other
                print(name, what, "same" if mine == other else "differs", flush=True)
    return not wrong


# ---- the page ----

ABOUT = """\
A step scores all tokens by their codes and ranks pages for every KV head. Here a KV head keeps its
list until its logits have drifted: until sqrt(Σ dq² v) · scale, dq the change of a rotated query
since the choice, v the variances of the KV head's rotated keys by channel, exceeds so many *nats* in
one of its group of query heads. It attends to its list and to every token since, for {cap} steps at
most. v is a table of the model, made from another document ({texts}). 0 nats: every step chooses.

Model: {model}. Questions, prompts, limits and scores are those of [ruler.md](ruler.md), all {questions} that it
judges; each document is read once, with full attention, and questions and answers are steps of the
row (up to 16 tokens of a question at once, each with its choice).
*chosen*: share of (step, layer, KV head) in which a list was chosen, the first step of a question
left out; *by age*: those that only the {cap} steps, or a list without room, asked for. *new pages*:
pages of a list that are not in the one before, as a share. *of always*: the score as a share of
choosing always under the same budget, with its interval by a bootstrap over documents. *worse*,
*better*: questions that score less than choosing always, and more. *same*: answers that are equal to
the letter. A threshold passes if the lower end is at least {least:g}% at no more than {most:g}% chosen."""


class Said:
    """Answers of a variant and of choosing always, for documents that both were asked."""

    def __init__(self, lines, variant):
        self.variant, self.always = variant, variant.split(":")[0] + ":0"
        by_name = {line["name"]: line["questions"] for line in lines
                   if variant in line["questions"][0]}
        self.documents = list(by_name.values())
        self.mine, self.other = ([[q[v]["score"] for q in d] for d in self.documents]
                                 for v in (variant, self.always))

    def questions(self):
        return sum(map(len, self.mine))

    def total(self, name):
        return sum(q[self.variant]["counts"][name] for d in self.documents for q in d)

    def share(self, part, whole):
        return self.total(part) / self.total(whole)

    def kept(self):
        return kept([sum(d) for d in self.mine], [sum(d) for d in self.other])

    def same(self):
        return mean([[q[self.variant]["answer"] == q[self.always]["answer"] for q in d] for d in self.documents])

    def passes(self):
        chosen = self.share("chosen", "lists")
        if chosen > MOST:
            return "no: chosen"
        if self.questions() < QUESTIONS:
            return "open"
        return "yes" if self.kept()[1][0] >= LEAST else "no"

    def cells(self):
        cells = self.variant.split(":") + ["%d" % self.questions()]
        cells += ["%.1f%%" % (100 * self.share(*of)) for of in (
            ("chosen", "lists"), ("capped", "lists"), ("fresh", "pages"))] + ["%.1f" % (100 * mean(self.mine))]
        if self.variant == self.always:
            return cells + [""] * 5
        share, interval = self.kept()
        return cells + ["%.1f%%" % (100 * share), "%.1f–%.1f" % tuple(100 * x for x in interval),
                        "%d, %d" % outcomes(self.mine, self.other), "%.0f%%" % (100 * self.same()), self.passes()]

    def cell(self):
        if not self.documents:
            return ""
        score = "%.1f" % (100 * mean(self.mine))
        return score if self.variant == self.always else score + " (-%d, +%d)" % outcomes(self.mine, self.other)


def family(name):
    return next(f for prefix, f in FAMILIES.items() if name.startswith(prefix))


def groups(lines):
    """(name, lines) by kind of task, then by length."""
    for name in dict.fromkeys(FAMILIES.values()):
        yield name, [line for line in lines if family(line["name"]) == name]
    for tokens in dict.fromkeys(str(tokens) for _, tokens in JUDGED):
        yield tokens + " tokens", [line for line in lines if line["name"].split("-")[1] == tokens]


def rows_of(rows):
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def markdown(lines, model):
    variants = sorted({v for line in lines for v in line["questions"][0]},
                      key=lambda v: tuple(map(float, v.split(":"))))
    asked = Said(lines, VARIANTS[0]).questions()
    text = ["# A choice of pages that is kept", "", ABOUT.format(
        cap=CAP, texts=", ".join(TABLE_TEXTS), model=os.path.basename(model), questions=QUESTIONS,
        least=100 * LEAST, most=100 * MOST), ""]
    if asked < QUESTIONS:
        text += ["**Partial: %d of %d questions**, by documents in an order that was drawn at random." % (
            asked, QUESTIONS), ""]
    text += ["| budget | nats | questions | chosen | by age | new pages | score | of always | 95% "
             "| worse, better | same | passes |", "|---:|" + "---:|" * 10 + "---|"]
    text += rows_of(Said(lines, v).cells() for v in variants)
    text += ["", "Scores by kind of task and by length; in brackets the questions that got worse and better.",
             "", "| | questions | " + " | ".join(VARIANTS) + " |", "|---|" + "---:|" * (1 + len(VARIANTS))]
    text += rows_of([name, "%d" % Said(some, VARIANTS[0]).questions()] + [Said(some, v).cell() for v in VARIANTS]
                    for name, some in groups(lines) if some)
    return "\n".join(text + ["", "Machine: %s; %.0f CPU minutes, one thread, beside other work. Made with "
                             "`eval_kept.py --report` and a build with `bench/kept.patch`." % (
                                 machine(), sum(line["cpu_seconds"] for line in lines) / 60), ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", required=True, help="the kvferry command with the prototype")
    parser.add_argument("--data", required=True, metavar="FOLDER", help="of what was said")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="compare tokens of N documents")
    parser.add_argument("--report", action="store_true", help="ask nothing, write kept.md")
    parser.add_argument("--out", default=RESULTS, help="folder of kept.md (bench/results)")
    args = parser.parse_args()
    os.makedirs(args.data, exist_ok=True)
    model = real_model.fetch()
    if args.check:
        return 0 if check(args, model) else 1
    if not args.report:
        ask_all(args, model)
        return 0
    lines = lines_said(args)
    if not lines:
        sys.exit("eval_kept: %s has no answers; run the same command without --report first" % args.data)
    text = markdown(lines, model)
    print(text)
    save(args.out, "kept", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
