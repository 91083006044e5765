# SPDX-License-Identifier: Apache-2.0
"""A needle in a haystack, by depth and length: `eval.py --niah`.

Heat maps as in the papers: a sentence with a key and a number lies at a depth in prose of a length,
and is asked for at the end of the prompt. Every row reads every prompt whole. The forms are those of
RULER's `niah_single_2` (judge/tasks.py), with one needle at a given depth. Writes niah.md and,
with gnuplot, niah.svg, a map for each row. Knows depths and scores, not how they came about.
"""
import itertools
import os
import sys
import tempfile

import eval_run
import eval_texts
from eval_ruler import count
from judge import tasks, texts
from results_folder import gnuplot, machine, write as write_file

LENGTHS, DEPTHS, SAMPLES = [1024, 2048, 4096], 5, 1
SEED = 9000
ANSWER = 24  # tokens


def placed(material, length, depth, sample, size):
    """Prose of `size` sentences with a needle after a share `depth` of its characters."""
    r = texts.Random(SEED + 100 * length + sample)
    key, value = "%s-%s" % tuple(tasks.choose(r, texts.ADJECTIVES, 2)), r.number()
    sentences = list(material.sentences(r, size))
    ends = [0, *itertools.accumulate(map(len, sentences))]
    at = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1]))
    sentences.insert(at, tasks.NEEDLE % ("numbers", key, value))
    words = {"some": "A", "are": "is", "are_all": "is", "kind": "number"}
    document = tasks.Document(
        tasks.NIAH[0].format(context=" ".join(sentences), **words),
        tasks.RulerTask("niah", tasks.NIAH[1].format(query=key, **words), [value], ANSWER))
    document.at, document.is_whole = (length, depth), True
    return document


def documents(material, lengths, depths, samples, counted):
    """All of them, each as long as fits. counted(documents): tokens of each, with its question."""
    out = []
    for length in lengths:
        least, most = [counted([placed(material, length, 0.5, 0, size)])[0] for size in (8, 16)]
        if least > length - ANSWER:
            sys.exit("eval: a needle and its question do not fit %d tokens" % length)
        size = 8 + int(0.95 * (length - ANSWER - least) * 8 / max(most - least, 1))
        while True:
            made = [placed(material, length, depth / max(depths - 1, 1), sample, size)
                    for depth in range(depths) for sample in range(samples)]
            if max(counted(made)) <= length - ANSWER:
                break
            size -= max(size // 20, 1)
        out += made
    return out


def means(made, row):
    """{(length, depth): score}"""
    found = {}
    for i, d in enumerate(made):
        found.setdefault(d.at, []).append(d.tasks[0].score(row.answers[i, 0]))
    return {at: sum(scores) / len(scores) for at, scores in found.items()}


def table(made, rows):
    lines = []
    lengths = sorted({d.at[0] for d in made})
    depths = sorted({d.at[1] for d in made})
    for row in rows:
        found = means(made, row)
        lines += ["**%s**: %.0f of 100 (`%s`)" % (
            row.method, 100 * sum(found.values()) / len(found), row.name), "",
            "| depth | " + " | ".join("%d" % n for n in lengths) + " |", "|---|" + "---:|" * len(lengths)]
        lines += ["| %.0f%% | %s |" % (100 * depth, " | ".join(
            "%.0f" % (100 * found[length, depth]) for length in lengths)) for depth in depths]
        lines.append("")
    return lines


def draw(made, rows, path):
    lengths = sorted({d.at[0] for d in made})
    depths = sorted({d.at[1] for d in made})
    script = ["set terminal svg size %d,%d dynamic background rgb 'white' font 'sans,13'" % (
        680, 60 + 260 * len(rows)), "set output '%s'" % path,
        "set multiplot layout %d,1" % len(rows), "set palette defined (0 '#b03a5b', 0.5 '#e8d27a', 1 '#2f7d4f')",
        "set cbrange [0:100]", "set xlabel 'tokens of the prompt'", "set ylabel 'depth, %'", "unset key",
        "set xrange [-0.5:%g]" % (len(lengths) - 0.5), "set yrange [%g:-0.5]" % (len(depths) - 0.5),
        "set xtics (%s)" % ", ".join("'%d' %d" % (n, i) for i, n in enumerate(lengths)),
        "set ytics (%s)" % ", ".join("'%.0f' %d" % (100 * d, i) for i, d in enumerate(depths))]
    for k, row in enumerate(rows):
        found = means(made, row)
        script += ["$m%d << EOD" % k] + ["%d %d %g" % (x, y, 100 * found[length, depth])
                                         for x, length in enumerate(lengths)
                                         for y, depth in enumerate(depths)] + ["EOD"]
        script += ["set title '%s, %.0f of 100'" % (row.method.replace("_", " "),
                                                   100 * sum(found.values()) / len(found)),
                   "plot $m%d using 1:2:3 with image pixels" % k]
    gnuplot(script)


def main(args, program, model, folder):
    """`folder`: where answers are kept while it runs"""
    rows = eval_run.named(["full select=full"] + (args.row or []))
    counted = lambda made: count(program, model, made)  # noqa: E731
    made = documents(texts.Material(eval_texts.all_prose()), args.lengths or LENGTHS, args.depths,
                     (args.samples or [SAMPLES])[0], counted)
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = os.path.join(scratch, "niah")
        eval_run.run(program, model, made, rows, path)
        eval_run.read(path, rows)
    for row in rows:
        if row.refused:
            print("eval: left out %s: %s" % (row.name, row.refused))
    rows = [row for row in rows if row.stats]
    text = "\n".join(["# Needle in a haystack", "", "Model: %s. %d prompts a row; scores of 100." % (
        os.path.basename(model), len(made)), ""] + table(made, rows) + [
            "Machine: %s. Made with `%s`." % (machine(), eval_run.command_line()), ""])
    print(text)
    if args.out:
        os.makedirs(args.out, exist_ok=True)
        write_file(os.path.join(args.out, "niah.md"), text)
        draw(made, rows, os.path.join(args.out, "niah.svg"))
