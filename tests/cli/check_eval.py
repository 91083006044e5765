#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The evaluation, in which a document is read once for all rows: it has to give the answers and
losses of `kvferry run` and `kvferry score` of documents that were read under the row's own settings.

usage: check_eval.py KVFERRY EXAMPLES

On the recall model, with documents of its own generator. Answers are the same, and so are losses, to
the digits that are printed.
"""
import contextlib
import io
import json
import os
import sys
import tempfile

from checks import check, ended, generate, output, read, write

KVFERRY, EXAMPLES = sys.argv[1:3]
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import eval_footprint  # noqa: E402
import eval_niah  # noqa: E402
import eval_papers  # noqa: E402
import eval_report  # noqa: E402
import eval_ruler  # noqa: E402
import eval_run  # noqa: E402
import eval_sets  # noqa: E402
import eval_texts  # noqa: E402
import results_folder  # noqa: E402
from judge import tasks as ruler_tasks  # noqa: E402
from judge.texts import Material  # noqa: E402

MODEL = os.path.join(EXAMPLES, "recall", "model")
SETTINGS = {
    "full": {"select": "full"},
    "packed": {"select": "dynamic", "budget_tokens": "256", "pages": "k8v4"},
    "boxes": {"select": "dynamic", "budget_tokens": "256", "page_size": "32", "digest": "minmax"},
    "hybrid": {"select": "hybrid", "budget_tokens": "256"},
    "dynamic": {"select": "dynamic", "budget_tokens": "256", "page_size": "16"},
    "auto": {"select": "hybrid", "static_ratio": "auto", "budget_tokens": "256"},
}
OPTIONS = {"budget_tokens": "budget"}


def evaluate(folder, documents, configs):
    """(tokens of documents, {name: row})."""
    rows = [eval_run.Row(name, " ".join("%s=%s" % s for s in settings.items()), None)
            for name, settings in configs.items()]
    path = os.path.join(folder, "said")
    eval_run.run(KVFERRY, MODEL, documents, rows, path)
    return eval_run.read(path, rows), {row.method: row for row in rows}


class Document:
    def __init__(self, text, tasks):
        self.text, self.tasks = text, tasks


def task_of(text, tokens=0, cue="", enough=()):
    task = eval_texts.Task("" if tokens else "text", text, None, tokens, cue)
    task.enough = list(enough)
    return task


def command(folder, settings, document, questions, text, asking=None):
    """(answers, mean loss) of the command. asking: other settings of the questions"""
    files = {"document": document, "questions": "".join(q + "\n" for q in questions), "text": text}
    for name, content in files.items():
        write(os.path.join(folder, name), content)

    def options(of):
        out = ["--model", MODEL, "--device", "host", "--prompt-file",
               os.path.join(folder, "document")]
        for field, value in of.items():
            out += ["--" + OPTIONS.get(field, field).replace("_", "-"), value]
        return out

    told = output(KVFERRY, "run", *options(asking or settings), "-n", "3", "--ask",
                os.path.join(folder, "questions"))
    saved = os.path.join(folder, "saved")  # as there: its last token is read by itself
    output(KVFERRY, "run", *options(settings), "-n", "1", "--save", saved)
    loss = json.loads(output(KVFERRY, "score", *options(settings), "--load", saved, "--text",
                           os.path.join(folder, "text")))
    return [line.strip() for line in told.splitlines()], loss["loss"]


def check_dense(folder, document, questions):
    """Questions that are read densely; and answers that end where all that is wanted was said."""
    settings = dict(SETTINGS["dynamic"], extend="dense")
    right, _ = command(folder, SETTINGS["dynamic"], document, questions, "question", settings)
    second = right[0].split()[1]
    tasks = [task_of(q, 3, enough=["no such word", "nor this"]) for q in questions]
    tasks.append(task_of(questions[0], 3, enough=[second]))
    said = evaluate(folder, [Document(document, tasks)], {"dense": settings})[1]["dense"].answers
    check("questions that are read densely",
          [said[0, i].strip() for i in range(len(questions))] == right)
    check("two words of three are enough", said[0, len(questions)].split() == right[0].split()[:2])


def check_pruned(folder, documents):
    """Prompts with their question at the end; and documents that are completed, which answer as whole
    ones do."""
    kept = {"prune": "snapkv", "keep": "0.5", "set.window": "8", "retention": "evict", "select": "full"}
    rows = evaluate(folder, documents[:1], {
        "pruned": kept, "some@0.5": {k: v for k, v in kept.items() if k not in ("prune", "keep", "set.window",
                                                                                "retention")},
        "whole": {"prune": "full", "select": "full"}, "few": dict(kept, keep="0.001"),
        "asked": {"select": "full"},
        "complete": {"prune": "fastkv", "propagate": "0.5", "retention": "complete", "select": "full"}})[1]
    asked = [t for t, task in enumerate(documents[0].tasks) if task.tokens]
    prompt = write(os.path.join(folder, "prompt"), documents[0].text + documents[0].tasks[2].text)
    alone = output(KVFERRY, "run", "--model", MODEL, "--device", "host", "--prompt-file", prompt, "-n", "3",
                 "--prune", "snapkv", "--keep", "0.5", "--prune-window", "8", "--retention", "evict",
                 "--select", "full")
    check("a pruned prompt", rows["pruned"].answers[0, 2].strip() == alone.strip())
    check("every prompt has its time", sorted(rows["pruned"].first) == [(0, t) for t in asked] ==
          sorted(rows["pruned"].answers) and min(rows["pruned"].first.values()) > 0)
    stats = {name: row.stats for name, row in rows.items()}
    check("what was held and computed", stats["pruned"]["entry_steps"] < stats["whole"]["entry_steps"] ==
          stats["whole"]["full_entry_steps"] and stats["whole"]["tokens_computed"] ==
          stats["whole"]["tokens_full"] > 0)
    check("a sweep reads whole prompts, pruned or not", rows["some@0.5"].answers == rows["whole"].answers and
          stats["some@0.5"]["tokens_full"] == 0 and len(rows["some@0.5"].first) == len(asked))
    check("what a policy refuses is told", "keep" in (rows["few"].refused or ""))
    check("a document that was completed answers as a whole one",
          {at: rows["complete"].answers[at] for at in rows["asked"].answers} == rows["asked"].answers and
          stats["complete"]["tokens_computed"] < stats["complete"]["tokens_full"])


def check_footprint(folder):
    """The smallest footprint that keeps enough."""
    three = [(0.6, 1.0, "c"), (0.2, 0.5, "a"), (0.4, 0.8, "b")]
    close = [eval_footprint.critical(three, share) for share in (0.9, 0.8, 0.5)]
    check("linear between rows", [(round(x, 9), value) for x, value in close] ==
          [(0.5, "c"), (0.4, "b"), (0.2, "a")])
    check("nothing is enough", eval_footprint.critical(three[1:], 0.9) is None)
    check("a higher score does not come back down", eval_footprint.critical(
        [(0.1, 1.0, "a"), (0.2, 0.1, "b"), (0.3, 1.0, "c")], 0.9) == (0.1, "a"))

    def told(task, scores, judged=True):
        return {"task": task, "tokens": 700, "judged": judged, "questions": 2, "rows": {
            "full": {"score": 1.0, "full_score": 1.0},
            **{"snapkv@%s" % v: {"footprint": x, "device": x / 2, "score": s, "full_score": 0.5}
               for v, x, s in scores}}}

    made = {"machine": "m", "command": "c", "model": "n", "runs": [
        told("vt", [("1", 0.1, 0.25), ("2", 0.3, 0.5)]), told("cwe", [("1", 0.1, 0.5), ("2", 0.3, 0.5)]),
        told("fwe", [("1", 0.1, 0.0)], False)]}
    found = eval_footprint.points(made["runs"], "footprint")
    check("tasks count alike", eval_footprint.over_tasks(found["snapkv"]) == [(0.1, 0.75, "1"),
                                                                            (0.3, 1.0, "2")])
    with contextlib.redirect_stdout(io.StringIO()):
        eval_footprint.write(made, folder)
    check("a table", "| snapkv | 22.0% (2) | 26.0% (2) | 10.0% (1) |\n" in
          read(os.path.join(folder, "footprint.md")))
    check("rows of a sweep", eval_ruler.swept(["a prune=b keep=0.1,0.2 select=full"]) == [
        "a@0.1 prune=b keep=0.1 select=full", "a@0.2 prune=b keep=0.2 select=full"])


def check_niah(text):
    """A needle is where it should be, and prompts fit."""
    material = Material(text)
    counted = lambda made: eval_ruler.count(KVFERRY, MODEL, made)  # noqa: E731
    check("more tokens than the model's positions are counted",
          counted([Document("a " * 40000, [task_of("b")])])[0] > 32768)
    made = eval_niah.documents(material, [300, 500], 3, 2, counted)
    check("every length, depth and sample", [d.at for d in made] == [
        (n, depth) for n in (300, 500) for depth in (0.0, 0.5, 1.0) for _ in range(2)])
    taken = [n + eval_niah.ANSWER for n in counted(made)]
    check("prompts of %s tokens fill 300 and 500" % taken, all(
        0.8 * d.at[0] < n <= d.at[0] for n, d in zip(taken, made)))
    for d in made:
        place = d.text.index("special magic numbers for") / len(d.text)
        check("a needle at depth %g lies at %.2f" % (d.at[1], place), abs(place - d.at[1]) < 0.3 and
              d.text.count(d.tasks[0].answers[0]) == 1)
    rows = [eval_run.Row("full", "select=full", None)]
    rows[0].answers = {(i, 0): d.tasks[0].answers[0] if d.at[1] else "-" for i, d in enumerate(made)}
    check("scores by place", eval_niah.means(made, rows[0]) == {
        (n, depth): float(depth > 0) for n in (300, 500) for depth in (0.0, 0.5, 1.0)})
    check("a table", "| 50% | 100 | 100 |" in eval_niah.table(made, rows))


SETS = {
    "two.json": [{"_id": "1", "choice_A": "red", "choice_B": "blue", "choice_C": "c", "choice_D": "d",
                  "question": "Which?", "context": "The sky is blue.", "answer": "B", "length": "short"}],
    "hotpotqa.jsonl": [{"input": "Who?", "context": "Ann met Bob.", "answers": ["Bob", "Robert"],
                        "all_classes": None, "dataset": "hotpotqa"}],
    "trec.jsonl": [{"input": "Q", "context": "c", "answers": ["Date"], "all_classes": ["Date", "City"]}],
    "passkey.jsonl": [{"context": "The pass key is 7.", "input": "Key?", "answer": ["7"], "options": []}],
    "kilt_nq.jsonl": [{"question": "Who?", "ctxs": [{"title": "T", "text": "Ann."}], "answers": [["Ann"]]}],
    "aime.jsonl": [{"problem": "What is 3 + 30?", "answer": "033", "id": 1}],
    "own.jsonl": [{"prompt": "Ann met Bob. Who met Bob?", "answers": ["Ann"]}]}


def check_sets(folder):
    """Small files in the forms of the data sets, as they are read and judged."""
    for name, rows in SETS.items():
        write(os.path.join(folder, name), json.dumps(rows) if name.endswith(".json") else
              "".join(json.dumps(row) + "\n" for row in rows))
    sets = eval_sets.Sets(folder, 3)
    check("all files", sorted(sets.files) == sorted(os.path.splitext(n)[0] for n in SETS))
    made = {n: sets.documents(n, 4096, 9, lambda d: [len(x.text) // 4 for x in d])[0] for n in sets.files}
    said = {"two": ("The correct answer is (B).", "The correct answer is (C)."),
            "hotpotqa": ("The Bob", "nobody"), "trec": ("Date", "City"), "passkey": ("7.", "17"),
            "kilt_nq": ("It is Ann", "Bob"), "aime": ("so 1 is \\boxed{33}.", "\\boxed{}"),
            "own": ("Ann met", "he")}
    for name, (right, wrong) in said.items():
        check("%s: right and wrong" % name, made[name].tasks[0].score(right) == 1.0 and
              made[name].tasks[0].score(wrong) == 0.0)
    check("what is asked", "(B) blue" in made["two"].tasks[0].text and "sky is blue" in made["two"].text and
          "Document (Title: T): Ann." in made["kilt_nq"].text and made["own"].text == SETS["own.jsonl"][0]["prompt"])
    check("draws of a problem", [t.seed for t in made["aime"].tasks] == [0, 1, 2] and
          made["two"].tasks[0].seed is None)
    check("likenesses", abs(eval_sets.f1("Bob and Ann", "Ann") - 0.5) < 1e-9 and
          abs(eval_sets.rouge("a b c d", "a c e f") - 0.5) < 1e-9 and
          eval_sets.numbers("Paragraph 3, 4", "Paragraph 3") == 0.5 and eval_sets.boxed("\\boxed{\\frac{1}{2}}") ==
          "\\frac{1}{2}" and eval_sets.code("\n# no\nx = 1\ny", "x = 1") == 1.0)
    long = eval_sets.document("own", {"prompt": "a" * 50 + "b" * 100 + "c" * 50, "answers": ["x"]}, 0.5, 1)
    check("the middle is cut", long.text == "a" * 50 + "c" * 50)
    told = [{"task": "aime", "rows": {"full": {"scores": [[1.0, 0.0], [0.0, 0.0]]}}}]
    check("avg@k and pass@k", eval_sets.repeated(told, ["full"])[-1] == "| aime | full | 2 | 25.0 | 50.0 |")
    for name, text in (("bad.jsonl", '{"a": 1}'), ("none.jsonl", ""), ("cut.json", "[{")):
        write(os.path.join(folder, name), text)
        try:
            eval_sets.Sets(folder).documents(name.split(".")[0], 99, 1, None)
            check("%s is refused" % name, False)
        except SystemExit as why:
            check("%s is refused by name" % name, name in str(why))


def check_whole_set(folder, document, questions):
    """A file of prompts, through the command, with several draws and a prompt that is too long."""
    data = os.path.join(folder, "data")
    os.makedirs(data)
    write(os.path.join(data, "own.jsonl"), "".join(
        json.dumps({"prompt": document + " " + q, "answers": ["x"]}) + "\n" for q in questions[:2]))
    sets = eval_sets.Sets(data)
    counted = lambda made: eval_ruler.count(KVFERRY, MODEL, made)  # noqa: E731
    made = sets.documents("own", 4096, 9, counted)
    rows = evaluate(folder, made, {"full": {"select": "full"}, "default": {}})[1]
    answers, _ = command(folder, {"select": "full"}, document + " ", questions[:2], "question")
    check("answers of whole prompts", sorted(rows["full"].answers) == [(0, 0), (1, 0)] == sorted(rows["full"].first) and
          all(rows["full"].answers[i, 0].strip().startswith(answers[i]) for i in range(2)))
    cut = counted(sets.documents("own", 300, 9, counted))
    check("prompts are cut to what fits", all(200 < n <= 300 - eval_sets.TOKENS["found"] for n in cut))


def check_report():
    """Figures and what is made of them."""
    check("questions of a document are drawn together", eval_report.of_documents(
        [(0, "number", True), (0, "facts", True), (2, "number", False), (0, "chain", False)]) == [2, 0])
    above, (low, high) = eval_report.lost([(10, 12.0), (10, 14.0)], [(10, 10.0), (10, 10.0)])
    check("nats above full's", abs(above - 0.3) < 1e-9 and low >= 0.2 - 1e-9 and high <= 0.4 + 1e-9)
    task = eval_texts.Task("number", "", "12345")
    check("an answer", task.is_right(" 12345.") and not task.is_right(" 123456") and
          not task.is_right(" 1234"))
    check("escapes", eval_texts.unescaped(eval_texts.escaped("a\\n\n\tb")) == "a\\n\n\tb")


def check_ruler_report():
    """Judged questions, and how much is kept."""
    def told(full, mine):
        def row(scores, attended):
            return {"attended": attended, "questions": sum(map(len, scores)), "scores": scores}

        return {"judged": eval_ruler.mean(full) >= eval_ruler.JUDGED,
                "rows": {"full": row(full, 40), "default": row(mine, 10)}}

    runs = [told([[1.0, 1.0], [0.5], [0.5]], [[1.0, 0.5], [0.5], [0.25]]),
            told([[0.0], [0.25]], [[1.0], [1.0]])]
    check("what full attention cannot do is not judged",
          eval_ruler.judged(runs, "default") == ([[1.0, 0.5], [0.5], [0.25]],
                                                 [[1.0, 1.0], [0.5], [0.5]]))
    check("three quarters are kept of four questions",
          eval_ruler.summary(runs)[-1].startswith(
              "| default | 25% | 3 | 4 | 2 | 0 | 56.2 | 75.0% |"))
    runs[1] = told([[1.0], [1.0], [1.0]], [[0.5], [0.5]])
    runs.append(told([[1.0]], [[0.0]]))
    share, (low, high) = eval_ruler.mean_of_tasks(eval_ruler.by_task(runs, "default"))
    check("a row of fewer documents, and tasks that count alike, of two documents at least",
          eval_ruler.judged(runs, "default")[1][3:] == [[1.0], [1.0], [1.0]] and
          abs(share - (0.5625 + 0.5) / (0.75 + 1.0)) < 1e-9 and low <= share <= high)
    # Two documents, 0 and 1 of 1, drawn one by one: both are in half of the draws.
    share, interval = eval_ruler.mean_of_tasks([([[0.0], [1.0]], [[1.0], [1.0]])])
    check("an interval of two documents", share == 0.5 and interval == (0.0, 1.0))


def check_ruler_parts(folder):
    """A run that was cut counts up to its first part that is not complete."""
    documents = [ruler_tasks.Document(
        "d%d" % i, ruler_tasks.RulerTask("vt", "q", ["abc"], 1)) for i in range(12)]
    one = eval_ruler.Run("vt", 700, documents, lambda d, name, is_first: eval_ruler.Part(
        d, "model", folder, name, ["more select=full"] if is_first else None))

    def say(part, rows):
        with open(part.path, "w", encoding="utf-8") as f:
            for i, (name, said) in enumerate(rows):
                f.write("config\t%s\n" % name)
                f.writelines("answer\t%d\t0\t%s\n" % (d, said) for d in range(4))
                f.write("stats\ttokens=2\tlayers=1\tkv_heads=2\ttokens_attended=%d\t"
                        "all_cpu_seconds=%d\n" % (40 + i, i))

    rows = [("full select=full", "Abc"), ("default ", "-"), ("more select=full", "abc")]
    check("nothing was run", not one.read())
    say(one.parts[2], rows[:2])
    check("a first part is needed", not one.read())
    say(one.parts[0], rows[:2])
    check("without a row it is not complete", not one.read())
    say(one.parts[0], rows)
    check("with it, it is", one.read() and len(one.scores("full")) == 4)
    say(one.parts[1], rows[:2])
    told = eval_ruler.figures(one) if one.read() else {}
    part = eval_ruler.Part(documents[:4], "model", folder, "vt-700", None, ["new select=full"])
    check("a row that may lack, and one that is not wanted",
          part.read() and part.scores("new") == part.scores("more") == [])
    check("all parts", told["questions"] == 12 and told["rows"]["more"]["questions"] == 4 and
          told["rows"]["full"]["score"] == 1.0 and told["rows"]["default"]["score"] == 0.0 and
          told["rows"]["default"]["attended"] == 41 * 3 / (2 * 2 * 3))
    check("rows in two tables", eval_ruler.asked_alike([told]) == [["full", "default"], ["more"]])
    part = eval_ruler.Part(documents[:4], "model", folder, "vt-700", ["fifth budget_tokens=5"])
    check("a row that lacks", not part.read())
    def ran(program, model, asked, rows, out):
        with open(out, "w", encoding="utf-8") as f:
            f.write("document\t0\t9\n")
            f.writelines("config\t%s\nanswer\t0\t0\tnew\nstats\ttokens=1\n" % row.name for row in rows)

    eval_ruler.run, really = ran, eval_ruler.run
    part.run("program")
    eval_ruler.run = really
    check("is run alone, and stands after the others",
          part.read() and part.rows[2].answers == {(0, 0): "new"} and
          part.rows[0].answers[0, 0] == "Abc" and part.scores("full") == [[1.0]] * 4)
    check("a table of the first documents",
          eval_ruler.table([told], ["more"])[2] == "| vt | 700 | 4 | 4 | yes | 100 |  | 100 | 10 |")


def check_papers():
    """Every row of the page has four cells and a result, and figures are found by their paths."""
    page = read(eval_papers.PAGE)
    cells = [line.strip("|").split(" | ") for line in page.split("\n") if line.startswith("| ")]
    check("rows of papers", all(len(c) == 4 and (c[3].strip() or "as figure" in c[1]) for c in cells))
    rows = eval_papers.rows(page)
    check("commands of papers", len({r[0] for r in rows}) == 5 and len(rows) > 20)
    check("none without its data", not any("FOLDER" in r[2] for r in rows))
    said = 'a\n{"kvferry": "0", "a": {"b": 0.25}, "layers": [{"c": 1.0}, {"c": null}]}\n'
    check("figures by path", eval_papers.shown(said, ["a.b", "layers[].c"]) ==
          ["a.b 0.25; layers[].c 1.00 -"])
    check("lines of others", eval_papers.shown("a\nb\n", []) == ["a", "b"])


def check_written(folder, documents, rows, lengths):
    """A table has a line for each row, and there are figures."""
    out = os.path.join(folder, "results")
    facts = {"machine": "some", "load_average": [0.0, 1.0], "command": "this", "minutes": 1, "cpu_seconds": 60,
             "verify_every": eval_run.VERIFY, "texts": eval_texts.digest(documents),
             "document_tokens": lengths}
    with contextlib.redirect_stdout(io.StringIO()):
        eval_report.write_results(facts, documents, rows, out)
    lines = read(os.path.join(out, "eval.md")).split("\n")
    table = [line for line in lines if line.startswith("|")]
    check("lines of a table", len(table) == 2 + len(rows) and
          len({line.count("|") for line in table}) == 1)
    told = json.loads(read(os.path.join(out, "eval.json")))
    check("figures", [row["method"] for row in told["rows"]] == ["full", "dynamic", "hybrid"])


def check_results(folder):
    """Text of a person stays."""
    results_folder.save(folder, "some", "# Table\n", {"a": 1})
    path = os.path.join(folder, "some.md")
    with open(path, "a", encoding="utf-8") as f:
        f.write(results_folder.MARK + "\nby hand\n")
    results_folder.save(folder, "some", "# New", {"a": 2})
    check("text by hand", read(path) == "# New\n\n%s\nby hand\n" % results_folder.MARK)
    check("figures", json.loads(read(os.path.join(folder, "some.json"))) == {"a": 2})


def main():
    with tempfile.TemporaryDirectory() as folder:
        texts = [generate(EXAMPLES, folder, 3, 1500), generate(EXAMPLES, folder, 4, 900)]
        text = "question " + " ".join(texts[0][0].split()[100:140])
        documents = [Document(document, [task_of(q, 3) for q in questions] +
                              [task_of(text), task_of(text[8:], cue="question")])
                     for document, questions in texts]
        lengths, rows = evaluate(folder, documents, dict(
            SETTINGS, none={"page_size": "24"}, again=dict(SETTINGS["dynamic"], sink_tokens="4")))
        check("tokens of documents", lengths == [len(document.split()) for document, _ in texts])
        for name, settings in SETTINGS.items():
            # The second document once: that it is one of two changes nothing.
            for d, (document, questions) in enumerate(texts[:2 if name == "hybrid" else 1]):
                answers, loss = command(folder, settings, document, questions, text)
                row, n = rows[name], len(questions)
                check("%s: answers of document %d" % (name, d),
                      [row.answers[d, i].strip() for i in range(n)] == answers)
                tokens, total, likeliest = row.losses[d, n]
                check("%s: the loss %f of document %d is %f" % (name, total / tokens, d, loss),
                      tokens == len(text.split()) and abs(total / tokens - loss) < 2e-6)
                cue_tokens, behind_cue, _ = row.losses[d, n + 1]
                check("%s: a cue is not scored" % name,
                      cue_tokens == tokens - 1 and behind_cue < total)
                check("%s: tokens that were the likeliest" % name,
                      likeliest < tokens and (name != "full" or likeliest > 0))
        check("page_size 24 is refused", "page-size" in (rows["none"].refused or ""))
        stats = rows["dynamic"].stats
        check("selection moves bytes", stats["bytes_to_device"] > 0)
        fed = sum(len(q.split()) + 2 for _, questions in texts for q in questions)
        check("steps after the documents are counted, %s" % (stats,),
              stats["tokens"] == fed + 2 * (len(text.split()) - 1) * len(texts))
        check_written(folder, documents, [rows[name] for name in ("full", "hybrid", "dynamic")], lengths)
        check("the same settings again are told", rows["again"].is_same and
              rows["again"].answers == rows["dynamic"].answers)
        check_dense(folder, *texts[0])
        check_pruned(folder, documents)
        check_whole_set(folder, *texts[0])
        check_niah(texts[0][0].replace(" . ", ". "))
    check_report()
    check_ruler_report()
    check_papers()
    with tempfile.TemporaryDirectory() as folder:
        check_ruler_parts(folder)
        check_footprint(folder)
    with tempfile.TemporaryDirectory() as folder:
        check_sets(folder)
        check_results(folder)
    return ended()


if __name__ == "__main__":
    sys.exit(main())
