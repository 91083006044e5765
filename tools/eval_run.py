# SPDX-License-Identifier: Apache-2.0
"""Rows of an evaluation: what is asked of the kvferry command, and what it said.

Knows settings of a cache and what the command prints, not tasks or tables. A document is read once,
with full attention, and kept by --save; every row goes on from it under its own settings. Rows with a
static set read the document once more, because that set is chosen by the prompt's queries, and so do
rows whose pages or heads are of another form. Questions are answered by `run --ask`, each on a fork;
texts are scored by `score`. Rows that prune, and rows of a sweep, read every prompt whole, with its
question at the end; with `retention=complete` the document is pruned, and completed after a question
that is not judged. The findings are a file of lines, fields apart by tabs:

    document DOCUMENT TOKENS
    config NAME                              what follows is of this row
    answer DOCUMENT TASK TEXT
    loss DOCUMENT TASK TOKENS SUM FIRST      FIRST: tokens that were the likeliest
    first DOCUMENT TASK MS                   from a whole prompt to its first token
    stats FIELD=VALUE ...                    sums over all steps after the documents
    refused REASON                           in place of these: the library has no such cache
    same NAME                                likewise: an earlier row comes to the same settings

Invariant: a row that has stats is complete.
"""
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time

import eval_texts

COUNTED_MAX = str(1 << 20)  # tokens of a prompt whose size is tried
VERIFY = 32  # every N-th step is compared with dense attention
OPTIONS = {"budget_tokens": "budget", "sink_tokens": "sink", "local_tokens": "local"}
# Counters of a run's statistics, by the names that the report knows.
COUNTED = {"hits": "hits", "misses": "misses", "pages_selected": "pages_selected",
           "bytes_moved": "bytes_to_device", "tokens_attended": "tokens_attended",
           "decoded_tokens": "tokens"}


class Refused(Exception):
    """The message of the command that has no such settings."""


class Row:
    """A method under one budget: what is asked of the library, and what came out."""

    def __init__(self, method, settings, budget):
        self.method, self.budget = method, budget
        self.settings = dict(word.split("=", 1) for word in settings.split())
        if budget:
            self.settings["budget_tokens"] = str(budget)
        self.name = " ".join([method, settings] + ([str(budget)] if budget else []))
        self.is_whole = "prune" in self.settings or "@" in method
        self.refused, self.is_same = None, False
        self.answers, self.losses, self.first, self.stats = {}, {}, {}, {}  # by (document, task)

    def options(self, is_asked):
        """Options of the command. is_asked: of `run --ask`"""
        out = ["--transfer", "gather", "--device-memory", "0", "--verify", "dense:%d" % VERIFY]
        for field, value in self.settings.items():
            if field.startswith("set."):
                out += ["--prune-set", "%s=%s" % (field[4:], value)]
            elif field != "extend" or is_asked:
                out += ["--" + OPTIONS.get(field, field.replace("_", "-")), value]
        return out

    def goes_on(self):
        """Whether what full attention left in a sequence is all that the row needs."""
        s = self.settings
        return (s.get("select") not in ("hybrid", "static") and "preset" not in s and
                s.get("pages", "bf16") == "bf16" and "head_mask" not in s)


def named(texts):
    """Rows of NAME FIELD=VALUE ..."""
    return [Row(name, settings, None)
            for name, _, settings in (text.partition(" ") for text in texts or [])]


def command_line():
    """The command for readers: folders of this machine are left out."""
    return "eval.py " + shlex.join(a for a in sys.argv[1:] if not os.path.isabs(a))


class Command:
    """Runs of the kvferry command on one model, in a folder."""

    def __init__(self, program, model, folder):
        self.base, self.folder = [program, "{}", "--model", model, "--device", "host"], folder

    def path(self, name, text=None):
        path = os.path.join(self.folder, name)
        if text is not None:
            with open(path, "w", encoding="utf-8", newline="") as f:
                f.write(text)
        return path

    def run(self, command, *options):
        done = subprocess.run([command if word == "{}" else word for word in self.base] + list(options),
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True)
        if done.returncode != 0:
            raise Refused(done.stderr.strip().split("\n")[-1].replace("\t", " "))
        return done.stdout

    def stats(self, command, *options):
        """(standard output, statistics)"""
        path = self.path("stats.json")
        said = self.run(command, *options, "--stats", path)
        with open(path, encoding="utf-8") as f:
            return said, json.load(f)

    def count(self, texts):
        """Tokens of each."""
        prompts = self.path("count.jsonl", "".join(json.dumps({"prompt": t}) + "\n" for t in texts))
        return [json.loads(line)["prompt_tokens"] for line in
                self.run("run", "--prompts", prompts, "-n", "1", "--context", COUNTED_MAX, "--dry-run").splitlines()]


def add(sums, counters):
    for name, ours in COUNTED.items():
        sums[ours] = sums.get(ours, 0) + counters[name]
    verified = counters.get("verified_rows", 0)
    sums["verified"] = sums.get("verified", 0) + verified
    sums["recall_sum"] = sums.get("recall_sum", 0.0) + counters.get("attention_recall", 0) * verified


def scored(tokens, cue):
    """(tokens, sum of losses, tokens that were the likeliest) after the cue."""
    seen = 0
    while tokens and seen < len(cue):
        seen += len(tokens[0]["text"])
        tokens = tokens[1:]
    return len(tokens), sum(t["loss"] for t in tokens), sum(t["likeliest"] for t in tokens)


class Evaluation:
    """Rows over documents, row by row."""

    def __init__(self, command, documents):
        self.command, self.documents, self.own, self.past = command, documents, None, {}
        self.is_whole = all(is_whole(d) for d in documents)
        self.context = 0  # tokens, the same for all: how attention is divided follows from it

    def save_documents(self, out):
        """Read each once."""
        if self.is_whole:
            for i, n in enumerate(self.command.count(
                    [d.text + d.tasks[0].text for d in self.documents])):
                out.write("document\t%d\t%d\n" % (i, n))
            return
        tasks = [task for document in self.documents for task in document.tasks]
        longest = max(n + task.tokens for n, task in zip(
            self.command.count([task.cue + task.text for task in tasks]), tasks))
        for i, document in enumerate(self.documents):
            text, saved = (self.command.path("%d.%s" % (i, end)) for end in ("txt", "kvs"))
            self.command.path("%d.txt" % i, document.text)
            _, told = self.command.stats("run", "--prompt-file", text, "--save", saved, "--select", "full",
                                         "-n", "1")
            out.write("document\t%d\t%d\n" % (i, told["prompt_tokens"]))
            self.context = max(self.context, told["prompt_tokens"] + longest)

    def prompt(self, row, i):
        """The document, where the row finds it."""
        context = ["--context", str(self.context)]
        if row.goes_on():
            return context + ["--load", self.command.path("%d.kvs" % i), "--reselect"]
        own = self.command.path("own.kvs")
        if self.own != (row.name, i):
            self.command.run("run", "--prompt-file", self.command.path("%d.txt" % i), "--save", own, "-n", "1",
                             *context, *row.options(False))
            self.own = (row.name, i)
        return context + ["--load", own]

    def ask(self, row, i, tasks, stop=()):
        """Answers to some tasks of a document. stop: texts that end them, and are not said"""
        questions = self.command.path("ask.jsonl", "".join(
            json.dumps({"prompt": self.documents[i].tasks[t].text}) + "\n" for t in tasks))
        said, told = self.command.stats(
            "run", *self.prompt(row, i), "--ask", questions, "-n",
            str(max(self.documents[i].tasks[t].tokens for t in tasks)), *row.options(True),
            *(word for text in stop for word in ("--stop", text)))
        return said.split("\n")[:len(tasks)], told

    def questions(self, row, i, sums, lines):
        tasks = self.documents[i].tasks
        asked = [t for t, task in enumerate(tasks) if task.tokens]
        alone = [t for t in asked if len(tasks[t].enough) == 1]
        groups = [[t] for t in alone] + [[t for t in asked if t not in alone]]
        for group in filter(None, groups):
            stop = tasks[group[0]].enough if group[0] in alone else ()
            answers, told = self.ask(row, i, group, stop)
            for t, said, counters in zip(group, answers, told["questions"]):
                said += stop[0] if stop and told["stop"] == "text" else ""
                lines.append("answer\t%d\t%d\t%s" % (i, t, eval_texts.escaped(said)))
                add(sums, counters)
            self.note(told, sums)

    def whole(self, row, i, sums, lines):
        """Questions at the end of prompts of their own."""
        document = self.documents[i]
        asked = [t for t, task in enumerate(document.tasks) if task.tokens]
        prompts = self.command.path("prompts.jsonl", "".join(json.dumps(dict(
            {"id": str(t), "prompt": document.text + document.tasks[t].text,
             "tokens": document.tasks[t].tokens}, **seed_of(document.tasks[t]))) + "\n" for t in asked))
        said, told = self.command.stats("run", "--prompts", prompts, "--batch", "1", *row.options(False))
        for line in map(json.loads, said.splitlines()):
            place = (i, int(line["id"]))
            lines.append("answer\t%d\t%d\t%s" % (*place, eval_texts.escaped(line["answer"])))
            lines.append("first\t%d\t%d\t%.1f" % (*place, line["ttft_ms"]))
        self.note_whole(told, sums)

    def completed(self, row, i, sums, lines):
        """A document that is pruned, and completed after a question that is not judged."""
        document = self.documents[i]
        asked = [t for t, task in enumerate(document.tasks) if task.tokens]
        text = self.command.path("%d.txt" % i, document.text)
        questions = self.command.path("ask.jsonl", "".join(
            json.dumps({"prompt": document.tasks[t].text}) + "\n" for t in asked[:1] + asked))
        said, told = self.command.stats(
            "run", "--prompt-file", text, "--ask", questions, "-n",
            str(max(document.tasks[t].tokens for t in asked)), *row.options(True))
        lines += ["answer\t%d\t%d\t%s" % (i, t, eval_texts.escaped(answer))
                  for t, answer in zip(asked, said.split("\n")[1:])]
        lines.append("first\t%d\t%d\t%.1f" % (i, asked[0], told["ttft_ms"]))
        self.note_whole(told, sums)

    def note_whole(self, told, sums):
        """Counters of all its prompts, and what they held and computed."""
        add(sums, told)
        for name in ("entry_steps", "device_entry_steps", "full_entry_steps"):
            sums[name] = sums.get(name, 0) + told["footprint"][name]
        for name in ("tokens_computed", "tokens_full"):
            sums[name] = sums.get(name, 0) + told.get("prune", {}).get(name, 0)
        self.note(told, sums)

    def note(self, told, sums):
        """Sizes; the row's settings as the library resolved them."""
        s = told["settings"]
        sums["settings"] = {k: v for k, v in s.items() if k not in (
            "context_tokens", "host_tokens_max", "sequences_max", "tokens_per_step_max", "device_bytes")}
        sums["digest_bytes"], sums["digest_tokens"] = told["device_digest_bytes"], s["host_tokens_max"]
        sums["layers"], sums["kv_heads"] = s["layers"], s["kv_heads"]

    def texts(self, row, i, sums, lines):
        for t, task in enumerate(self.documents[i].tasks):
            if task.tokens:
                continue
            text = self.command.path("text.txt", task.cue + task.text)
            said, told = self.command.stats("score", *self.prompt(row, i), "--text", text,
                                            *row.options(False))
            lines.append("loss\t%d\t%d\t%d\t%.6f\t%d" % (
                (i, t) + scored(told["tokens"], task.cue)))
            add(sums, json.loads(said))
            self.note(told, sums)

    def run(self, row):
        """@return lines of the row but for its name"""
        if row.is_whole or self.is_whole:
            return self.run_whole(row)
        sums, lines = {}, []
        try:
            self.command.run("run", "--prompt", "a", "-n", "1", "--dry-run", *row.options(False))
        except Refused as why:
            return ["refused\t%s" % why]
        for i in range(len(self.documents)):
            self.questions(row, i, sums, lines)
            self.texts(row, i, sums, lines)
            key = json.dumps([sums["settings"], row.settings.get("extend")], sort_keys=True)
            if i == 0 and key in self.past:
                return ["same\t%s" % self.past[key]]
            self.past.setdefault(key, row.name)
        return self.ended(sums, lines)

    def run_whole(self, row):
        """A policy refuses prompts that are too short for its settings, of which the first is one."""
        sums, lines = {}, []
        read = self.completed if row.settings.get("retention") == "complete" else self.whole
        for i in range(len(self.documents)):
            try:
                read(row, i, sums, lines)
            except Refused as why:
                if i:
                    raise
                return ["refused\t%s" % why]
        return self.ended(sums, lines)

    def ended(self, sums, lines):
        del sums["settings"]
        return lines + ["stats\t" + "\t".join("%s=%.9g" % s for s in sums.items())]


def is_whole(document):
    """Whether every row reads it whole, with its question."""
    return getattr(document, "is_whole", False)


def seed_of(task):
    seed = getattr(task, "seed", None)
    return {} if seed is None else {"seed": seed}


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(program, model, documents, rows, out):
    """Let the file `out` be written, row by row."""
    start, cpu_start = time.monotonic(), cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="documents-", dir=os.path.dirname(out)) as folder, \
            open(out, "w", encoding="utf-8") as f:
        evaluation = Evaluation(Command(program, model, folder), documents)
        try:
            evaluation.save_documents(f)
            for row in rows:
                before, cpu_before = time.monotonic(), cpu_seconds()
                lines = evaluation.run(row)
                seconds, cpu = time.monotonic() - before, cpu_seconds() - cpu_before
                if lines[-1].startswith("stats"):
                    lines[-1] += "\tseconds=%.3f\tcpu_seconds=%.3f\tall_seconds=%.1f\tall_cpu_seconds=%.1f" % (
                        seconds, cpu, time.monotonic() - start, cpu_seconds() - cpu_start)
                f.write("".join(line + "\n" for line in ["config\t" + row.name] + lines))
                f.flush()
                print("%-44s %6.1f s, %6.1f s of CPU%s" % (
                    row.name, seconds, cpu, "" if lines[-1].startswith("stats") else ", " + lines[-1]),
                    file=sys.stderr, flush=True)
        except Refused as why:
            sys.exit("eval: %s\neval: the same command with --report tells of the rows that are done" % why)


def read(path, rows):
    """Fill the rows; others that are there are passed over. A run that was cut has no stats.
    @return tokens of the documents, with the last token of each"""
    lengths, row, by_name = [], None, {r.name: r for r in rows}
    if not os.path.exists(path):
        return lengths
    with open(path, encoding="utf-8") as f:
        lines = f.read().split("\n")[:-1]  # the last one may be cut
    for line in lines:
        kind, *fields = line.split("\t")
        if kind == "document":
            lengths.append(int(fields[1]))
        elif kind == "config":
            row = by_name.get(fields[0]) or Row("", "", None)
        elif kind == "refused":
            row.refused = fields[0]
        elif kind == "same":
            same, row.is_same = by_name.get(fields[0]) or Row("", "", None), True
            row.answers, row.losses, row.stats = same.answers, same.losses, same.stats
        elif kind == "answer":
            row.answers[int(fields[0]), int(fields[1])] = eval_texts.unescaped(fields[2])
        elif kind == "loss":
            row.losses[int(fields[0]), int(fields[1])] = (
                int(fields[2]), float(fields[3]), int(fields[4]))
        elif kind == "first":
            row.first[int(fields[0]), int(fields[1])] = float(fields[2])
        elif kind == "stats":
            row.stats = {k: float(v) for k, v in (f.split("=") for f in fields)}
    return lengths


def spent(rows, what):
    """Seconds until the last row was done."""
    return max((r.stats["all_" + what] for r in rows if r.stats), default=0.0)
