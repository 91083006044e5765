#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PruLong's critical footprint, from sweeps of `eval.py --ruler --sweep`.

usage: eval_footprint.py RULER.json... [--share 0.9] [--of footprint|device] [--out FOLDER]

A sweep is rows NAME@VALUE that differ in one setting. The footprint of a row is the entries of the KV
cache, held in steps of prompts and answers, as a share of full causal attention's; `device` counts
those on the device alone, which is what a budget changes. Critical is the smallest footprint of a
sweep that keeps a share of full attention's score (0.9 as published), per task and over all judged
tasks, which count alike. Between a row that keeps less and the next one the score is taken to be
linear, as published; below the first row nothing is known, and a sweep that never keeps enough has
none. Writes footprint.md and, with gnuplot, footprint.svg. Knows scores and footprints, not how
they came about.
"""
import argparse
import json
import os

from results_folder import gnuplot, write as write_file

SHARE = 0.9
OF = ("footprint", "device")
COLORS = ["#c2571f", "#1f6fb0", "#2f7d4f", "#7a4fa3", "#b03a5b", "#8a6d1a", "#222222", "#4f9aa8"]


def points(told, of):
    """{sweep: {task: [(footprint, share of full's score, value)]}}, of judged tasks at all lengths."""
    out = {}
    for f in told:
        for name, row in f["rows"].items() if f["judged"] else ():
            sweep, _, value = name.partition("@")
            if value and row.get(of) is not None and row["full_score"]:
                task = "%s, %d" % (f["task"], f["tokens"])
                out.setdefault(sweep, {}).setdefault(task, []).append(
                    (row[of], row["score"] / row["full_score"], value))
    return out


def over_tasks(by_task):
    """The mean over tasks of every value that all of them have."""
    values = {}
    for found in by_task.values():
        for footprint, share, value in found:
            values.setdefault(value, []).append((footprint, share))
    return [(sum(x for x, _ in v) / len(v), sum(y for _, y in v) / len(v), value)
            for value, v in values.items() if len(v) == len(by_task)]


def critical(found, share):
    """(footprint, its row's value) where the score reaches the share; None = nowhere."""
    before = None
    for x, y, value in sorted(found):
        if y >= share - 1e-9:
            if before and y > before[1]:
                x = before[0] + (x - before[0]) * max(share - before[1], 0.0) / (y - before[1])
            return x, value
        before = x, y
    return None


def cell(point):
    return "%.1f%% (%s)" % (100 * point[0], point[1]) if point else "none"


def table(found, share):
    tasks = []
    for by_task in found.values():
        tasks += [t for t in by_task if t not in tasks]
    lines = ["| sweep | all tasks | " + " | ".join(tasks) + " |", "|---|" + "---:|" * (1 + len(tasks))]
    for sweep, by_task in found.items():
        cells = [cell(critical(over_tasks(by_task), share))]
        cells += [cell(critical(by_task[t], share)) if t in by_task else "" for t in tasks]
        lines.append("| %s | %s |" % (sweep, " | ".join(cells)))
    return lines


def curves(found):
    lines = ["| row | footprint | of full's score |", "|---|---:|---:|"]
    for sweep, by_task in found.items():
        lines += ["| %s@%s | %.1f%% | %.1f%% |" % (sweep, value, 100 * x, 100 * y)
                  for x, y, value in sorted(over_tasks(by_task))]
    return lines


ABOUT = """Model: %s. %s judged questions of RULER's tasks; all tasks count alike. *critical footprint*: the smallest
%s of a sweep that keeps %.0f%% of full attention's score, linear between rows, with the value of the
first row that does; *none*: no row does."""
HELD = {"footprint": "footprint (entries of the KV cache, held over steps, of full causal attention's)",
        "device": "footprint on the device (entries held there over steps, of full causal attention's)"}


def markdown(made, found, share, of):
    questions = sum(f["questions"] for f in made["runs"] if f["judged"])
    text = ABOUT % (made["model"], questions, HELD[of], 100 * share)
    return "\n".join(["# Critical footprint", "", text, ""] + table(found, share) + [""] + curves(found) + [
        "", "Machine: %s. Made with `%s`." % (made["machine"], made["command"]), ""])


def draw(found, share, of, path):
    script = ["set terminal svg size 760,480 dynamic background rgb 'white' font 'sans,14'",
              "set output '%s'" % path, "set grid", "set key outside right top",
              "set xlabel '%s, %% of full causal attention'" % (
                  "footprint" if of == "footprint" else "footprint on the device"),
              "set ylabel 'score, % of full attention'", "set yrange [0:*]", "set xrange [0:*]",
              "set arrow from graph 0, first %g to graph 1, first %g nohead dt 2 lc rgb '#6b7680'" % (
                  100 * share, 100 * share)]
    plots = []
    for i, (sweep, by_task) in enumerate(found.items()):
        found_here = sorted(over_tasks(by_task))
        if not found_here:
            continue
        color, point = COLORS[i % len(COLORS)], critical(found_here, share)
        script += ["$l%d << EOD" % i] + ["%g %g" % (100 * x, 100 * y) for x, y, _ in found_here] + ["EOD"]
        plots.append("$l%d using 1:2 with linespoints lw 2 pt 7 ps 0.6 lc rgb '%s' title '%s'" % (
            i, color, sweep.replace("_", " ")))
        if point:
            is_first = point == (found_here[0][0], found_here[0][2])  # nothing is known below it
            script += ["$c%d << EOD" % i, "%g %g" % (100 * point[0], 100 * (
                found_here[0][1] if is_first else share)), "EOD"]
            plots.append("$c%d using 1:2 with points pt 6 ps 1.6 lw 2 lc rgb '%s' notitle" % (i, color))
    script.append("plot " + ", ".join(plots))
    gnuplot(script)


def write(made, out, share=SHARE, of="footprint"):
    """The figures of a run of eval_ruler.py; a file only where there is a folder."""
    found = points(made["runs"], of)
    if not found:
        print("eval: no sweep has a judged task")
        return
    text = markdown(made, found, share, of)
    print(text)
    if out:
        os.makedirs(out, exist_ok=True)
        write_file(os.path.join(out, "footprint.md"), text)
        draw(found, share, of, os.path.join(out, "footprint.svg"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="RULER.json", help="of eval.py --ruler --sweep")
    parser.add_argument("--share", type=float, default=SHARE, help="of full attention's score")
    parser.add_argument("--of", choices=OF, default=OF[0])
    parser.add_argument("--out", help="folder of footprint.md and footprint.svg")
    args = parser.parse_args()
    made = None
    for path in args.files:
        with open(path, encoding="utf-8") as f:
            one = json.load(f)
        made = made or dict(one, runs=[])
        made["runs"] += one["runs"]
    write(made, args.out, args.share, args.of)


if __name__ == "__main__":
    main()
