# SPDX-License-Identifier: Apache-2.0
"""The cost of selections and pruning in the tasks of RULER and MRCR (judge/tasks.py): `eval.py
--ruler`. A sweep has a row for each value of a setting: `eval_footprint.py` makes of it the smallest
footprint that keeps a share of the score.

Every task at every length is a run of its own, so that its rows say how many tokens were attended.
A task in which the model scores below a fifth with full attention tells little of selections: it is
shown and not judged. Knows scores and rows, not prompts. Figures are always of the runs that
are complete.
"""
import itertools
import os
import statistics
import sys
import tempfile

import eval_footprint
import eval_sets
import eval_texts
from eval_run import Command, Row, command_line, is_whole, named, read, run, spent
from judge import tasks
from judge.figures import DRAWS, JUDGED, interval_of, kept, mean, outcomes
from judge.texts import Material, Random
from results_folder import RESULTS, machine, save

LENGTHS, SAMPLES = [2048, 4096, 7500], 10
PART = 4  # documents that are asked at once
FEW = 1  # documents of a task that full attention cannot do at a shorter length
ROWS = [("full", "select=full"), ("default", "")]


def count(program, model, documents):
    """Tokens of each document with its longest question."""
    with tempfile.TemporaryDirectory(prefix="kvferry-eval-") as folder:
        counts = iter(Command(program, model, folder).count(
            [d.text + task.text for d in documents for task in d.tasks]))
        return [max(next(counts) for _ in d.tasks) for d in documents]


def swept(texts):
    """Rows of sweeps: NAME FIELD=VALUE FIELD=A,B,C is NAME@A FIELD=VALUE FIELD=A, and so on."""
    rows = []
    for text in texts or []:
        name, *words = text.split()
        lists = [w for w in words if "," in w]
        if len(lists) != 1:
            sys.exit("eval: --sweep '%s': one setting must have values with commas between" % text)
        field, _, values = lists[0].partition("=")
        for value in values.split(","):
            rows.append(" ".join(["%s@%s" % (name, value)] + [
                "%s=%s" % (field, value) if w == lists[0] else w for w in words]))
    return rows


def rows_of(extra):
    """full, default, and NAME FIELD=VALUE ..."""
    rows = [Row(name, settings, None) for name, settings in ROWS]
    return rows + named(extra)


class Part:
    """Some documents of a task at a length, and what its rows said of them."""

    def __init__(self, documents, model, folder, name, rows, more=None):
        """rows, more: as of rows_of; `more` may lack"""
        self.documents, self.extra = documents, [rows or [], more or []]
        self.model, self.rows, self.lengths = model, [], []
        self.path = os.path.join(folder, "%s-%s-%s" % (
            name, os.path.basename(model), eval_texts.digest(documents)))

    def read(self):
        """@return whether all rows are there that must be"""
        self.rows = rows_of(sum(self.extra, []))
        for row in self.rows:
            row.is_whole = row.is_whole or all(map(is_whole, self.documents))
        self.lengths = read(self.path, self.rows)
        needed = self.rows[:len(self.rows) - len(self.extra[1])]
        return bool(self.rows[0].stats) and all(r.stats or r.refused for r in needed)

    def run(self, program):
        """Rows that are not there yet; those that are stay."""
        more = self.path + ".more"
        run(program, self.model, self.documents,
            [r for r in self.rows if not r.stats and not r.refused], more)
        with open(more, encoding="utf-8") as f:
            lines = f.readlines()
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as f:
                before = [line for line in f if line.endswith("\n")]
            lines = before + [line for line in lines if not line.startswith("document\t")]
            with open(more, "w", encoding="utf-8") as f:
                f.writelines(lines)
        os.replace(more, self.path)

    def scores(self, name):
        """Scores of every question, by document; none where the row was not run."""
        for row in self.rows:
            if row.method == name and row.stats:
                return [[task.score(row.answers[i, t]) for t, task in enumerate(d.tasks)]
                        for i, d in enumerate(self.documents)]
        return []


class Run:
    """A task at a length. Parts are run one by one; rows of `first` in the first one only."""

    def __init__(self, task, tokens, documents, make):
        """make(documents, name, is_first) -> Part"""
        name = "%s-%d" % (task, tokens)
        self.task, self.tokens = task, tokens
        self.parts = [make(documents[i:i + PART], name, i == 0)
                      for i in range(0, len(documents), PART)]
        self.done = []

    def read(self):
        """Parts count that are complete, up to the first that is not.
        @return whether there is one"""
        self.done = list(itertools.takewhile(Part.read, self.parts))
        return bool(self.done)

    def scores(self, name):
        return [of_document for part in self.done for of_document in part.scores(name)]

    def is_judged(self):
        return mean(self.scores("full")) >= JUDGED

    def attended(self, name):
        """Tokens per KV head and step."""
        told = self.stats(name)
        return (sum(s["tokens_attended"] for s in told) /
                sum(s["tokens"] * s["layers"] * s["kv_heads"] for s in told))


    def stats(self, name):
        return [r.stats for part in self.done for r in part.rows if r.method == name and r.stats]

    def first(self, name):
        """Milliseconds to the first token of whole prompts."""
        return [ms for part in self.done for r in part.rows if r.method == name
                for ms in r.first.values()]

    def share(self, name, part, whole):
        """The share in sums; None where nothing was."""
        told = [s for s in self.stats(name) if s.get(whole)]
        return sum(s[part] for s in told) / sum(s[whole] for s in told) if told else None


def figures(one):
    """The figures that are told of a run."""
    full = one.scores("full")
    rows = {}
    for row in one.done[0].rows:
        mine = one.scores(row.method)
        if mine:
            rows[row.method] = {"score": mean(mine), "full_score": mean(full[:len(mine)]),
                                "questions": sum(map(len, mine)),
                                "attended": one.attended(row.method), "scores": mine}
            if row.is_whole:
                rows[row.method].update(
                    first_ms=one.first(row.method),
                    computed=one.share(row.method, "tokens_computed", "tokens_full"),
                    footprint=one.share(row.method, "entry_steps", "full_entry_steps"),
                    device=one.share(row.method, "device_entry_steps", "full_entry_steps"))
    return {"task": one.task, "tokens": one.tokens, "samples": len(full),
            "questions": sum(map(len, full)),
            "documents": [n for part in one.done for n in part.lengths],
            "cpu_seconds": sum(spent(part.rows, "cpu_seconds") for part in one.done),
            "judged": one.is_judged(), "rows": rows}


def judged(told, name):
    """(mine, full): scores of all judged questions that the row was asked, by document."""
    mine, full = [], []
    for f in told:
        if f["judged"] and name in f["rows"]:
            scores = f["rows"][name]["scores"]  # of the first documents, at least
            mine += scores
            full += f["rows"]["full"]["scores"][:len(scores)]
    return mine, full


def names_of(told):
    names = []
    for f in told:
        names += [name for name in f["rows"] if name not in names]
    return names


def asked_alike(told):
    """Names of rows in groups: those that were asked of all documents, those of the first ones."""
    names = names_of(told)
    some = [name for name in names if any(
        name in f["rows"] and f["rows"][name]["questions"] < f["questions"] for f in told)]
    return [group for group in ([n for n in names if n not in some], some) if group]


def line(f, names):
    """The line of a task at a length: scores of the documents that these rows were asked."""
    asked = [f["rows"][name] for name in names if name in f["rows"]]
    if not asked:
        return []
    cells = [f["task"], "%d" % f["tokens"], "%d" % len(asked[0]["scores"]),
             "%d" % asked[0]["questions"], "yes" if f["judged"] else "no"]
    if "full" not in names:
        cells += ["%.0f" % (100 * asked[0]["full_score"]), ""]
    for name in names:
        row = f["rows"].get(name)
        cells += ["%.0f" % (100 * row["score"]), "%.0f" % row["attended"]] if row else ["", ""]
    return ["| " + " | ".join(cells) + " |"]


def table(told, names):
    shown = ["full"] * ("full" not in names) + names
    lines = ["| task | tokens | documents | questions | judged | " + " | ".join(
        "%s: score | attended" % name for name in shown) + " |",
        "|---|" + "---:|" * 3 + "---|" + "---:|" * (2 * len(shown))]
    for f in told:
        lines += line(f, names)
    return lines


def by_task(told, name):
    """[(mine, full)] of every judged task and length that the row was asked, of two documents at
    least: one alone says nothing of how they differ."""
    return [judged([f], name) for f in told
            if f["judged"] and name in f["rows"] and len(f["rows"][name]["scores"]) > 1]


def mean_of_tasks(runs):
    """RULER's score, in which every task counts alike, as a share of full's, and its interval:
    documents are drawn within each task, one less than there are, because as many would tell too
    narrow an interval of few."""
    def share(runs):
        total = sum(mean(full) for _, full in runs)
        return sum(mean(mine) for mine, _ in runs) / total if total else None

    def drawn(r):
        for mine, full in runs:
            at = [r.below(len(full)) for _ in full[1:]]
            yield [mine[i] for i in at], [full[i] for i in at]

    r = Random(11)
    return share(runs), interval_of([v for v in (share(list(drawn(r))) for _ in range(DRAWS)) if v is not None])


def attended_share(told, name):
    """The share of the tokens that full attention attends to, in the mean of the judged questions."""
    rows = [(f["rows"][name], f["rows"]["full"]) for f in told if f["judged"] and name in f["rows"]]
    return (sum(r["questions"] * r["attended"] / full["attended"] for r, full in rows) /
            sum(r["questions"] for r, _ in rows))


def of_judged(told, name, what):
    """[(questions, figure)] of a row where it has that figure."""
    rows = [f["rows"][name] for f in told if f["judged"] and name in f["rows"]]
    return [(r["questions"], r[what]) for r in rows if r.get(what) is not None]


def mean_of(told, name, what):
    """Over judged questions; None where the row has no such figure."""
    found = of_judged(told, name, what)
    return sum(n * x for n, x in found) / sum(n for n, _ in found) if found else None


def first_seconds(told, name):
    """The median over the prompts of judged tasks."""
    found = [ms for _, all_ms in of_judged(told, name, "first_ms") for ms in all_ms]
    return statistics.median(found) / 1e3 if found else None


def in_percent(share, interval):
    return ["%.1f%%" % (100 * share), "%.1f–%.1f" % tuple(100 * x for x in interval)]


def whole_prompts(told):
    """Rows that read whole prompts: what of them was computed and held, and how soon they answer."""
    names = [n for n in names_of(told) if of_judged(told, n, "first_ms")]
    if not names:
        return []
    lines = ["", "| row | prefill computed | footprint | on the device | first token, s |",
             "|---|" + "---:|" * 4]
    for name in names:
        shares = [mean_of(told, name, what) for what in ("computed", "footprint", "device")]
        lines.append("| %s | %s | %.2f |" % (name, " | ".join(
            "" if x is None else "%.1f%%" % (100 * x) for x in shares), first_seconds(told, name)))
    return lines


def summary(told):
    if not any(f["judged"] for f in told):
        return ["No task is judged."]
    lines = ["| row | attended | judged documents | questions | worse | better | score | of full's "
             "| 95% | mean of tasks | of full's | 95% |", "|---|" + "---:|" * 11]
    for name in names_of(told):
        mine, full = judged(told, name)
        if not mine:
            continue
        cells = [name, "%.0f%%" % (100 * attended_share(told, name)), "%d" % len(mine),
                 "%d" % sum(map(len, mine))]
        cells += ["%d" % n for n in outcomes(mine, full)] + ["%.1f" % (100 * mean(mine))]
        cells += in_percent(*kept([sum(d) for d in mine], [sum(d) for d in full]))
        runs = by_task(told, name)
        cells += (["%.1f" % (100 * sum(mean(m) for m, _ in runs) / len(runs))] +
                  in_percent(*mean_of_tasks(runs)) if runs else [""] * 3)
        lines.append("| " + " | ".join(cells) + " |")
    return lines + whole_prompts(told)


LEGEND = """\
Prompts, answer prefixes, limits of generated tokens and scores are RULER's (`mrcr`: the form of
MRCR, with made-up replies); prose and words are of the manuals of [eval.md](eval.md), keys of lists
of its own; no chat template. Every row gets the same prompts, read with full attention; questions
and answers are decode steps of the row. *tokens*: the most that a prompt, its question and what is
generated may have; prose fills 80 to 100% of them. In a document that holds more needles (multikey)
or replies, up to four are asked for, each by itself. *score*: share of the expected strings that are
found, times 100; of `mrcr` the likeness of the reply. An answer ends where all of them were found.
*attended*: tokens per KV head and step, above as a share of those of `full`. A task counts where
full attention scores 20 or more, so luck in that favours `full`. *worse*, *better*: questions that
score less than with full attention, and more. *of full's*: sums of scores over all judged questions;
*mean of tasks*: every task at every length that has two documents counts alike, as in RULER's score.
Rows that prune read every prompt whole, with its question at the end; with `retention=complete` the
document is pruned, and completed after a question that is not judged. *prefill computed*: tokens times
layers, of all; *footprint*: entries of the KV cache, summed over steps, of full causal attention's, and
those on the device; *first token*: the median of wall seconds after a prompt, on a machine as busy as it
was.
Intervals are of a bootstrap over documents, within tasks for the mean of tasks."""


def markdown(facts, told, about=None):
    """about: in place of what is said of RULER"""
    settings = ["`%s`: %s" % (name, settings or "as the library has it")
                for name, settings in facts["rows"].items()]
    drawn = eval_sets.repeated(told, names_of(told)) if about else []
    return "\n".join(
        ["# Data sets" if about else "# Tasks of RULER under selections", "",
         "Model: %s." % facts["model"], ""] + summary(told) + drawn + [""] +
        (about or LEGEND).split("\n") + ["Rows: " + "; ".join(settings) + ".", ""] +
        [text for names in asked_alike(told) for text in table(told, names) + [""]] +
        ["Machine: %s; %.0f CPU minutes. Made with `%s`." % (
            facts["machine"], facts["cpu_minutes"], facts["command"]), ""])


def quick(args):
    """A first look: one length, the tasks that small models can do, few samples."""
    if args.quick:
        args.lengths = args.lengths or [2048]
        args.tasks = args.tasks or ["niah_single_1", "niah_single_2", "niah_multikey_1"]
        args.samples = args.samples or [2]


def samples_of(args):
    """(length, samples), shortest first."""
    lengths, samples = args.lengths or LENGTHS, args.samples or [SAMPLES]
    if len(samples) not in (1, len(lengths)):
        sys.exit("eval: --samples takes one number, or one for each of %d lengths" % len(lengths))
    return sorted(zip(lengths, samples * (len(lengths) // len(samples))))


class Runs:
    """All that is asked for, in rounds: a part of every task and length before the next one of any,
    so that a run that is cut has judged all tasks alike."""

    def __init__(self, args, program, model, folder):
        self.args, self.program, self.model, self.folder = args, program, model, folder
        self.runs = {}
        if args.data:
            self.source = eval_sets.Sets(args.data, args.draws)
            self.names = list(self.source.files)
        else:
            self.source, self.names = Material(eval_texts.all_prose()), list(tasks.TASKS)
        self.too_hard = {}  # task -> the shortest length that full attention cannot do

    def part(self, documents, name, is_first):
        rows = [(self.args.row or []) + swept(self.args.sweep), (self.args.first_row or []) if is_first else []]
        if not self.args.report:  # which tells of what there is
            rows = [sum(rows, [])]
        return Part(documents, self.model, self.folder, name, *rows)

    def is_hard(self, task, tokens):
        return tokens >= self.too_hard.get(task, tokens + 1)

    def get(self, task, tokens, samples):
        """The run, made when it is first wanted."""
        if (task, tokens) not in self.runs:
            if self.is_hard(task, tokens):
                samples = min(samples, FEW)
            counted = lambda d: count(self.program, self.model, d)  # noqa: E731
            documents = (self.source.documents(task, tokens, samples, counted) if self.args.data else
                         tasks.fitted(self.source, task, tokens, samples, counted))
            self.runs[task, tokens] = Run(task, tokens, documents, self.part)
        return self.runs[task, tokens]

    def go_on(self, one, number):
        """A part of a run, where there is one that is wanted."""
        if number >= len(one.parts) or (number > 0 and self.is_hard(one.task, one.tokens)):
            return
        part = one.parts[number]
        if not part.read():
            if self.args.report:
                return
            part.run(self.program)
        if one.read() and number < len(one.done):
            told = figures(one)
            if number == 0 and not told["judged"]:
                self.too_hard.setdefault(one.task, one.tokens)
            if not self.args.report:
                print("\n".join(line(told, names_of([told]))), flush=True)

    def told(self):
        plan = samples_of(self.args)
        for number in range(-(-max(samples for _, samples in plan) // PART)):
            for tokens, samples in plan:
                for task in self.args.tasks or self.names:
                    self.go_on(self.get(task, tokens, samples), number)
        order = self.names
        return [figures(self.runs[at]) for at in sorted(
            self.runs, key=lambda at: (at[1], order.index(at[0]))) if self.runs[at].done]


def main(args, program, model, folder):
    """`folder`: where parts are kept. Runs that are there are not made again; --report runs nothing."""
    if not args.data:
        quick(args)
    os.makedirs(folder, exist_ok=True)
    runs = Runs(args, program, model, folder)
    unknown = [t for t in args.tasks or [] if t not in runs.names]
    if unknown:
        sys.exit("eval: no task %s; there are %s" % (unknown[0], ", ".join(runs.names)))
    told = runs.told()
    if not told:
        sys.exit("eval: no run is complete")
    facts = {"machine": machine(), "model": os.path.basename(model),
             "cpu_minutes": round(sum(f["cpu_seconds"] for f in told) / 60, 1),
             "rows": {r.method: " ".join("%s=%s" % s for s in r.settings.items())
                      for r in rows_of((args.row or []) + swept(args.sweep) + (args.first_row or []))},
             "command": command_line()}
    out = args.out or (None if args.quick or args.tasks or args.data else RESULTS)
    text = markdown(facts, told, eval_sets.ABOUT if args.data else None)
    print(text)
    name = "sets" if args.data else "ruler"
    found = dict(bench=name, **facts, runs=told)
    if args.sweep:
        eval_footprint.write(found, out)
    if out:
        save(out, name, text, found)
