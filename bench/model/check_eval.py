#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The evaluation against the command: eval_selection, with its one prefill for all configurations,
has to give the answers and losses of `kvferry run` and `kvferry score`.

usage: check_eval.py EVAL_SELECTION KVFERRY EXAMPLES

On the recall model, with documents of its own generator. Decoded one by one the answers are those
of the command, and so are the losses, to the digits that are printed. In a batch, products of the
runner are summed in another order: losses may differ in the third digit there.
"""
import json
import os
import subprocess
import sys
import tempfile

PROGRAM, KVFERRY, EXAMPLES = sys.argv[1:4]
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import eval_report  # noqa: E402
import eval_ruler  # noqa: E402
import eval_ruler_texts  # noqa: E402
import eval_texts  # noqa: E402

MODEL = os.path.join(EXAMPLES, "recall", "model")
SETTINGS = {
    "full": {"select": "full"},
    "hybrid": {"select": "hybrid", "budget_tokens": "256"},
    "dynamic": {"select": "dynamic", "budget_tokens": "256", "page_size": "16"},
    "auto": {"select": "hybrid", "static_ratio": "auto", "budget_tokens": "256"},
}
OPTIONS = {"budget_tokens": "budget"}
CHECKS = []


def check(name, fine):
    CHECKS.append(bool(fine))
    if not fine:
        print("not ok: " + name)


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("%s\nended with %d\n%s" % (" ".join(command), done.returncode, done.stderr))
    return done.stdout


def generate(folder, seed, tokens):
    """(document, questions)."""
    run(sys.executable, os.path.join(EXAMPLES, "recall", "generate.py"), "document", "--tokens",
        str(tokens), "--questions", "6", "--seed", str(seed), "--out", folder)
    with open(os.path.join(folder, "document.txt"), encoding="utf-8") as f:
        document = f.read()
    with open(os.path.join(folder, "questions.json"), encoding="utf-8") as f:
        return document, [q["question"] for q in json.load(f)]


def evaluate(folder, configs, lanes):
    """{name: {"answer": {(document, task): text}, "loss": ..., "refused": text}}."""
    path, told = os.path.join(folder, "configs"), {}
    with open(path, "w", encoding="utf-8") as f:
        for name, settings in configs.items():
            f.write(name + "\t" + " ".join("%s=%s" % s for s in settings.items()) + "\n")
    for line in run(PROGRAM, "--model", MODEL, "--tasks", os.path.join(folder, "tasks"),
                    "--configs", path, "--lanes", str(lanes)).splitlines():
        kind, *fields = line.split("\t")
        if kind == "config":
            row = told[fields[0]] = {"answer": {}, "loss": {}}
        elif kind == "answer":
            row["answer"][int(fields[0]), int(fields[1])] = fields[2].strip()
        elif kind == "loss":
            row["loss"][int(fields[0]), int(fields[1])] = (int(fields[2]), float(fields[3]))
        elif kind == "stats":
            row["stats"] = dict(f.split("=") for f in fields)
        elif kind in ("refused", "same"):
            row[kind] = fields[0]
    return told


def command(folder, settings, document, questions, text, asking=None):
    """(answers, mean loss) of the command. asking: other settings of the questions"""
    files = {"document": document, "questions": "".join(q + "\n" for q in questions), "text": text}
    for name, content in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            f.write(content)

    def options(of):
        out = ["--model", MODEL, "--device", "host", "--prompt-file",
               os.path.join(folder, "document")]
        for field, value in of.items():
            out += ["--" + OPTIONS.get(field, field).replace("_", "-"), value]
        return out

    said = run(KVFERRY, "run", *options(asking or settings), "-n", "3", "--ask",
               os.path.join(folder, "questions"))
    loss = json.loads(run(KVFERRY, "score", *options(settings), "--text",
                          os.path.join(folder, "text")))
    return [line.strip() for line in said.splitlines()], loss["loss"]


def check_dense(folder, document, questions):
    """Questions that are read densely; and answers that end where all that is wanted was said."""
    settings = dict(SETTINGS["dynamic"], extend="dense")
    right, _ = command(folder, SETTINGS["dynamic"], document, questions, "question", settings)
    with open(os.path.join(folder, "tasks"), "w", encoding="utf-8") as f:
        f.write("document\t%s\n" % eval_texts.escaped(document))
        f.writelines("ask\t3\t%s\t%s\tno such word\n" % (q, right[0]) for q in questions)
        f.write("ask\t3\t%s\t%s\n" % (questions[0], "\t".join(right[0].upper().split()[:2])))
    said = evaluate(folder, {"dense": settings}, 2)["dense"]["answer"]
    check("questions that are read densely", [said[0, i] for i in range(len(questions))] == right)
    check("two words of three are enough", said[0, len(questions)].split() == right[0].split()[:2])


def check_report():
    """What is made of the figures."""
    low, high = eval_report.wilson(90, 100)
    check("Wilson's interval", abs(low - 0.8256) < 1e-3 and abs(high - 0.9448) < 1e-3)
    check("questions of a document are drawn together", eval_report.of_documents(
        [(0, "number", True), (0, "facts", True), (2, "number", False), (0, "chain", False)]) == [2, 0])
    share, (low, high) = eval_report.kept([True] * 40 + [False] * 10, [True] * 50)
    check("a share of full's", share == 0.8 and 0.6 < low < 0.75 and 0.85 < high < 0.95)
    above, (low, high) = eval_report.lost([(10, 12.0), (10, 14.0)], [(10, 10.0), (10, 10.0)])
    check("nats above full's", abs(above - 0.3) < 1e-9 and low >= 0.2 - 1e-9 and high <= 0.4 + 1e-9)
    task = eval_texts.Task("number", "", "12345")
    check("an answer", task.is_right(" 12345.") and not task.is_right(" 123456") and
          not task.is_right(" 1234"))
    check("escapes", eval_texts.unescaped(eval_texts.escaped("a\\n\n\tb")) == "a\\n\n\tb")


def check_ruler(text):
    """Prompts fill what they should, hold what is asked for, and are always the same."""
    material, tokens, samples = eval_ruler_texts.Material(text), 700, 2
    for name in eval_ruler_texts.TASKS:
        documents = eval_ruler_texts.fitted(
            material, name, tokens, samples, lambda d: eval_ruler.count(PROGRAM, MODEL, d))
        again = eval_ruler_texts.fitted(
            material, name, tokens, samples, lambda d: eval_ruler.count(PROGRAM, MODEL, d))
        taken = [n + d.tasks[0].tokens  # all ask for as many
                 for n, d in zip(eval_ruler.count(PROGRAM, MODEL, documents), documents)]
        check("%s: %s of %d tokens" % (name, taken, tokens),
              all(0.85 * tokens < n <= tokens for n in taken))
        check("%s: the same again" % name, [d.text for d in documents] == [d.text for d in again])
        check("%s: samples differ" % name, documents[0].text != documents[1].text)
        for d in documents:
            check("%s: %d questions, each its own" % (name, len(d.tasks)),
                  len({t.text for t in d.tasks}) == len(d.tasks) ==
                  (4 if "multikey" in name or name == "mrcr" else 1))
            for task in d.tasks:
                check("%s: what is asked for is there" % name,
                      all(a in d.text for a in task.answers[name == "mrcr":]))
                check("%s: all found, nothing found" % name,
                      task.score(" ".join(task.answers)) == 1.0 and task.score(" - ") == 0.0)
    four = eval_ruler_texts.RulerTask("", "", ["Abc", "def", "ghi", "jkl"], 1)
    check("a share of what is expected", four.score(" abc, DEF and gh") == 0.5)
    mrcr = eval_ruler_texts.MrcrTask("", "", ["QWERTY", "one two three"], 1)
    check("a reply needs its mark", mrcr.score("one two three") == 0.0 and
          mrcr.score(" QWERTY one two three User: and") == 1.0 and
          0.3 < mrcr.score("QWERTY one") < 0.7)
    try:
        eval_ruler_texts.fitted(material, "vt", 100, 1,
                                lambda d: eval_ruler.count(PROGRAM, MODEL, d))
        check("vt in 100 tokens is refused", False)
    except ValueError as problem:
        check("vt in 100 tokens is refused", "does not fit 100" in str(problem))


def check_ruler_report():
    """What is judged, and how much is kept."""
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
    check("more than half", eval_ruler.outcomes([[0.5, 1.0], [0.0]], [[1.0, 0.5], [0.0]]) == (1, 1))
    runs[1] = told([[1.0], [1.0], [1.0]], [[0.5], [0.5]])
    runs.append(told([[1.0]], [[0.0]]))
    share, (low, high) = eval_ruler.mean_of_tasks(eval_ruler.by_task(runs, "default"))
    check("a row of fewer documents, and tasks that count alike, of two documents at least",
          eval_ruler.judged(runs, "default")[1][3:] == [[1.0], [1.0], [1.0]] and
          abs(share - (0.5625 + 0.5) / (0.75 + 1.0)) < 1e-9 and low <= share <= high)
    # Of two documents, 0 and 1 of 1, drawn one by one: both are in half of the draws.
    share, interval = eval_ruler.mean_of_tasks([([[0.0], [1.0]], [[1.0], [1.0]])])
    check("an interval of two documents", share == 0.5 and interval == (0.0, 1.0))


def check_ruler_parts(folder):
    """A run that was cut counts up to its first part that is not complete."""
    documents = [eval_ruler.eval_ruler_texts.Document(
        "d%d" % i, eval_ruler_texts.RulerTask("vt", "q", ["abc"], 1)) for i in range(12)]
    one = eval_ruler.Run("vt", 700, documents, lambda d, name, is_first: eval_ruler.Part(
        d, "model", folder, name, ["more select=full"] if is_first else None))

    def say(part, rows):
        with open(part.path, "w", encoding="utf-8") as f:
            for i, (name, said) in enumerate(rows):
                f.write("config\t%s\n" % name)
                f.writelines("answer\t%d\t0\t%s\n" % (d, said) for d in range(4))
                f.write("stats\tsteps=2\tkv_heads=2\ttokens_attended=%d\t"
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
    program = os.path.join(folder, "program")
    with open(program, "w", encoding="utf-8") as f:
        f.write("""#!/bin/sh
while [ "$1" != --configs ]; do shift; done
printf 'document\\t0\\t9\\n' > "$4"
cut -f 1 "$2" | while read -r name; do
    printf 'config\\t%s\\nanswer\\t0\\t0\\tnew\\nstats\\tsteps=1\\n' "$name" >> "$4"
done
""")
    os.chmod(program, 0o755)
    part = eval_ruler.Part(documents[:4], "model", folder, "vt-700", ["fifth budget_tokens=5"])
    check("a row that lacks", not part.read())
    part.run(program, 1)
    check("is run alone, and stands behind the others",
          part.read() and part.rows[2].answers == {(0, 0): "new"} and
          part.rows[0].answers[0, 0] == "Abc" and part.scores("full") == [[1.0]] * 4)
    check("a table of the first documents",
          eval_ruler.table([told], ["more"])[2] == "| vt | 700 | 4 | 4 | yes | 100 |  | 100 | 10 |")


def main():
    with tempfile.TemporaryDirectory() as folder:
        texts = [generate(folder, 3, 1500), generate(folder, 4, 900)]
        text = "question " + " ".join(texts[0][0].split()[100:140])
        with open(os.path.join(folder, "tasks"), "w", encoding="utf-8") as f:
            for document, questions in texts:
                f.write("document\t%s\n" % eval_texts.escaped(document))
                f.writelines("ask\t3\t%s\n" % q for q in questions)
                f.write("score\t\t%s\nscore\tquestion\t%s\n" % (text, text[9:]))
        alone = evaluate(folder, dict(
            SETTINGS, none={"page_size": "24"}, again=dict(SETTINGS["dynamic"], sink_tokens="4")), 1)
        many = evaluate(folder, SETTINGS, 5)
        for name, settings in SETTINGS.items():
            # The second document once: that it is one of two changes nothing.
            for d, (document, questions) in enumerate(texts[:2 if name == "hybrid" else 1]):
                answers, loss = command(folder, settings, document, questions, text)
                row, n = alone[name], len(questions)
                check("%s: answers of document %d" % (name, d),
                      [row["answer"][d, i] for i in range(n)] == answers)
                tokens, total = row["loss"][d, n]
                check("%s: the loss %f of document %d is %f" % (name, total / tokens, d, loss),
                      tokens == len(text.split()) and abs(total / tokens - loss) < 2e-6)
                cue_tokens, behind_cue = row["loss"][d, n + 1]
                check("%s: a cue is not scored" % name,
                      cue_tokens == tokens - 1 and behind_cue < total)
                check("%s: a batch" % name,
                      abs(many[name]["loss"][d, n][1] / tokens - loss) < 0.05)
        check("page_size 24 is refused", "page_size" in alone["none"].get("refused", ""))
        moved = int(alone["dynamic"]["stats"]["bytes_to_device"])
        check("selection moves bytes", moved > 0)
        check("the same settings again are told", alone["again"].get("same") == "dynamic")
        check_dense(folder, *texts[0])
        check_ruler(texts[0][0].replace(" . ", ". "))
    check_report()
    check_ruler_report()
    with tempfile.TemporaryDirectory() as folder:
        check_ruler_parts(folder)
    print("%d checks, %d failed" % (len(CHECKS), CHECKS.count(False)))
    return CHECKS.count(False) > 0


if __name__ == "__main__":
    sys.exit(main())
