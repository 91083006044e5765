# SPDX-License-Identifier: Apache-2.0
"""From what was asked and said to rows, a verdict and a picture.

Knows answers of sides, not how they were had. A question counts where full attention and the side have answered
all questions of its document; a task at a length counts where full attention scores a fifth, so luck in that favours
full attention. There is no verdict on what was not selected.
"""
import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import figures
from .record import AGAIN, FULL, Record

SELECTED = 0.95 # of the judged steps; below it nothing is said of selection
OTHERS = ("text", "long", "tool")
CONTROL = "64 local_tokens=16" # a side whose likelihoods must differ from full's
DIFFERS = 1e-3 # nats, on average
GOOD, LOST, UNKNOWN = 0, 1, 3 # exit statuses


class Judged(NamedTuple):
    """Figures of a side at a length."""
    side: str
    length: int
    questions: int
    share: float
    interval: Tuple[float, float]


def shown(length: int) -> str:
    """32K, or 1,500; prompts of a user are as long as they are."""
    return "%dK" % (length // 1024) if length % 1024 == 0 and length else "{:,}".format(length) if length else "their length"


def budget_shown(side: str) -> str:
    """1,024+5%"""
    digits = re.match(r"\d*", side).group() # type: ignore[union-attr]
    return ("{:,}".format(int(digits)) if digits else "") + side[len(digits):]


def percent(share: float, interval: Sequence[Optional[float]]) -> str:
    """99.1% (97.8 to 100.2)"""
    return "%.1f%% (%.1f to %.1f)" % (100 * share, *(100 * (x or 0) for x in interval))


def said(record: Record, side: str, d: int) -> Optional[List[Dict[str, Any]]]:
    """All that a side said of a document, if it is all there."""
    found = [record.get(side, d, q) for q in range(len(record.documents[d].tasks))]
    return [f for f in found if f] if all(f and "cannot" not in f for f in found) else None


def pairs(record: Record, side: str, wanted: Any) -> List[Tuple[int, List[Any], List[Any]]]:
    """(document, full's, the side's) of the documents that are wanted and that both have."""
    found = ((d, said(record, FULL, d), said(record, side, d)) for d, doc in enumerate(record.documents) if wanted(doc))
    return [(d, full, mine) for d, full, mine in found if full and mine]


def refusals(record: Record, side: str, is_wanted: Any) -> List[str]:
    """Why documents of wanted kinds have no answer."""
    return [row["cannot"] for (name, d, _), row in record.said.items()
            if name in (side, FULL) and "cannot" in row and is_wanted(record.documents[d].tasks[0].kind)]


def is_question(kind: str) -> bool:
    """Whether answers are right or wrong, and count for the verdict."""
    return kind not in OTHERS


def places(record: Record) -> List[Tuple[int, str]]:
    """(length, task) of questions, in the order of the table."""
    return sorted({(d.length, d.name) for d in record.documents if is_question(d.tasks[0].kind)})


def scores(record: Record, d: int, answers: List[Dict[str, Any]]) -> List[float]:
    """One for each question of a document."""
    return [task.score(one["answer"]) for task, one in zip(record.documents[d].tasks, answers)]


def row(name: str, length: int, both: List[Tuple[List[float], List[float]]]) -> Dict[str, Any]:
    """Figures of (full's, mine) scores by document."""
    full, mine = [f for f, _ in both], [m for _, m in both]
    share, interval = figures.kept([sum(m) for m in mine], [sum(f) for f in full])
    worse, better = figures.outcomes(mine, full)
    if share is not None and worse == better == 0:
        interval = figures.without_a_change(len(both))
    return {"task": name, "length": length, "documents": len(both), "questions": sum(map(len, full)),
            "full": sum(map(sum, full)), "mine": sum(map(sum, mine)), "worse": worse, "better": better, "kept": share,
            "interval": interval, "judged": figures.mean(full) >= figures.JUDGED}


def rows(record: Record, side: str) -> List[Dict[str, Any]]:
    """A row for each task and length, and one for each length over what is judged."""
    out, judged = [], {} # type: List[Dict[str, Any]], Dict[int, List[Tuple[List[float], List[float]]]]
    for length, name in places(record):
        both = [(scores(record, d, full), scores(record, d, mine)) for d, full, mine in pairs(
            record, side, lambda doc: (doc.length, doc.name) == (length, name))] # pylint: disable=cell-var-from-loop
        if both:
            out.append(row(name, length, both))
            judged.setdefault(length, []).extend(both if out[-1]["judged"] else [])
    return out + [row("all judged", length, both) for length, both in judged.items() if both]


def judgements(told: Dict[str, List[Dict[str, Any]]]) -> List[Judged]:
    """All sides and lengths that have judged questions."""
    return [Judged(side, r["length"], r["questions"], r["kept"], tuple(r["interval"]))
            for side, table in told.items() for r in table if r["task"] == "all judged"]


# ---- likelihoods, long answers, calls ----

def likelihoods(record: Record, side: str) -> Optional[Dict[str, Any]]:
    """How far a side's next-token distributions are from full's, over the steps of continued texts."""
    found, same = [], 0 # type: List[Tuple[float, str]], int
    for _, (full,), (mine,) in pairs(record, side, lambda doc: doc.tasks[0].kind == "text"):
        for at, (p, q) in enumerate(zip(full["tops"], mine["tops"])):
            p, q = dict(map(tuple, p)), dict(map(tuple, q))
            found.append((figures.divergence(p, q), "".join(full["pieces"][max(0, at - 8):at]) + "|" + full["pieces"][at]))
            same += figures.likeliest(p) == figures.likeliest(q)
    if not found:
        return None
    values, worst = [x for x, _ in found], max(found)
    return {"steps": len(found), "mean": sum(values) / len(values), "p99": figures.percentile(values, 0.99),
            "same_top": same / len(found), "worst": worst[0], "worst_text": worst[1]}


def long_answers(record: Record, side: str) -> List[Dict[str, Any]]:
    """Words before the first difference, and what became of length and repetition, one for each."""
    out = []
    for _, (full,), (mine,) in pairs(record, side, lambda doc: doc.tasks[0].kind == "long"):
        both = full["answer"], mine["answer"]
        out.append({"same_words": figures.first_difference(*both), "tokens": [full["tokens"], mine["tokens"]],
                    "repeated": [figures.repetition(text) for text in both]})
    return out


def calls(record: Record, side: str) -> Optional[Dict[str, int]]:
    """Valid calls of functions."""
    both = [(scores(record, d, full)[0], scores(record, d, mine)[0])
            for d, full, mine in pairs(record, side, lambda doc: doc.tasks[0].kind == "tool")]
    return {"asked": len(both), "full": int(sum(f for f, _ in both)), "mine": int(sum(m for _, m in both))} if both else None


# ---- what was served ----

def served(record: Record, side: str, length: Optional[int] = None) -> Optional[Dict[str, float]]:
    """Steps of the side's answers that count, by who attended; None = the engine does not say. length: None = all"""
    counted = [row["served"] for (name, d, _), row in record.said.items() if name == side and row.get("served") and
               is_question(record.documents[d].tasks[0].kind) and length in (None, record.documents[d].length)]
    if not counted:
        return None
    out = {name: sum(one[name] for one in counted) for name in ("steps", "selected", "elsewhere", "heads", "recall")}
    selected = min(out["selected"], out["steps"])
    return {"steps": out["steps"], "selected": selected, "elsewhere": out["elsewhere"],
            "densely": max(0, out["steps"] - selected - out["elsewhere"]),
            "recall": out["recall"] / out["heads"] if out["heads"] else None}


def foresight(record: Record, side: str) -> Optional[Dict[str, Any]]:
    """How well the measured share of attention tells the documents that lost answers from those that lost none, of
    documents with something to lose. None = it is not measured."""
    measure, lost = [], []
    for d, full, mine in pairs(record, side, lambda doc: is_question(doc.tasks[0].kind)):
        counted = [one["served"] for one in mine if one.get("served") and one["served"]["heads"]]
        of_full, of_mine = (scores(record, d, answers) for answers in (full, mine))
        if counted and sum(of_full):
            measure.append(sum(c["recall"] for c in counted) / sum(c["heads"] for c in counted))
            lost.append(any(m < f for m, f in zip(of_mine, of_full)))
    if not measure:
        return None
    groups = [[x for x, is_lost in zip(measure, lost) if is_lost == wanted] for wanted in (True, False)]
    interval = figures.bootstrap(len(lost), lambda at: figures.foresight(
        [measure[i] for i in at], [lost[i] for i in at]))
    return {"documents": [len(group) for group in groups], "measured": [sum(g) / len(g) if g else None for g in groups],
            "share": figures.foresight(measure, lost), "interval": interval}


def foreseen(told: Dict[str, Any]) -> str:
    """The same for readers."""
    if told["share"] is None:
        return "%s lost an answer, so how well it foresees that is not known" % (
            "no document" if not told["documents"][0] else "every document")
    (lost, others), (of_lost, of_others) = told["measured"], told["documents"]
    return ("%.4f in %d documents that lost answers, %.4f in %d others: lower in %.0f%% of pairs (%.0f to %.0f; 50 is "
            "chance)") % (lost, of_lost, others, of_others, *(100 * x for x in (told["share"], *told["interval"])))


# ---- the verdict ----

def not_judged(record: Record, side: str, length: int) -> Optional[str]:
    """Why there is no verdict on a side at a length."""
    told = served(record, side, length)
    if told and told["steps"] and told["selected"] < SELECTED * told["steps"]:
        return "%s at %s: %.0f%% of the judged steps selected, and less than %.0f%% say nothing of selection" % (
            budget_shown(side), shown(length), 100 * told["selected"] / told["steps"], 100 * SELECTED)
    return None


def verdict(record: Record, found: List[Judged], sides: Sequence[str], keep: float) -> Tuple[str, int]:
    """(one line, exit status). sides: the smallest budget first."""
    why = {(j.side, j.length): not_judged(record, j.side, j.length) for j in found}
    fine = [j for j in found if not why[j.side, j.length]]
    if not fine:
        return "no verdict: %s" % ("; ".join(filter(None, why.values())) or "no question that full attention answers "
                                   "was answered by both"), UNKNOWN
    parts, status = [], GOOD
    for length in sorted({j.length for j in found}):
        here = sorted((j for j in fine if j.length == length), key=lambda j: sides.index(j.side))
        enough = next((j for j in here if j.share >= keep), None)
        best = enough or (here[-1] if here else None)
        if not best:
            parts.append("nothing is said of %s" % shown(length))
            status = max(status, UNKNOWN)
            continue
        text = "%s keeps %s of full on %d questions at %s" % (
            budget_shown(best.side), percent(best.share, best.interval), best.questions, shown(length))
        parts.append(text + ("" if enough else ", less than %.1f%%" % (100 * keep)))
        status = max(status, GOOD if enough else LOST)
    if any(not served(record, side) for side in {j.side for j in fine}):
        parts.append("whether steps selected is not known, because the engine does not count them")
    refused = max(len(refusals(record, side, is_question)) for side in {j.side for j in fine})
    if refused > (1 - SELECTED) * sum(is_question(d.tasks[0].kind) for d in record.documents):
        parts.append("%d documents were not answered" % refused)
        status = UNKNOWN
    return "; ".join(parts + list(filter(None, why.values()))), status


# ---- for readers ----

def table(told: List[Dict[str, Any]]) -> List[str]:
    """Rows of a side."""
    out = ["| task | length | documents | questions | right with full | right | worse | better | kept (95%) |",
           "|---|" + "---:|" * 8]
    for r in told:
        kept = percent(r["kept"], r["interval"]) if r["judged"] else "not judged: full itself scores below a fifth"
        out.append("| %s | %s | %d | %d | %.4g | %.4g | %d | %d | %s |" % (
            r["task"], shown(r["length"]), r["documents"], r["questions"], r["full"], r["mine"], r["worse"], r["better"], kept))
    return out


def others(record: Record, side: str) -> List[str]:
    """Sentences on what is not a question."""
    out = []
    close, told, made = likelihoods(record, side), long_answers(record, side), calls(record, side)
    if close:
        out.append("likelihoods: KL %.4f nats on average, 99%% below %.3f, same likeliest token in %.1f%% of %d decode steps; "
                   "worst %.3f at `%s`" % (close["mean"], close["p99"], 100 * close["same_top"], close["steps"],
                                           close["worst"], close["worst_text"].replace("\n", " ")))
        if side == CONTROL and close["mean"] < DIFFERS:
            out.append("this budget must differ, so likelihoods are NOT measured here: the engine attends to everything")
    for one in told:
        alike = "the same" if one["same_words"] is None else "parts after %d words" % one["same_words"]
        out.append("long answer: %s; %d tokens with full, %d here; said again %.0f%% and %.0f%%" % (
            alike, *one["tokens"], *(100 * x for x in one["repeated"])))
    if made:
        out.append("calls of functions: %d of %d valid with full, %d here%s" % (
            made["full"], made["asked"], made["mine"], "" if made["full"] else "; nothing to lose, so nothing is said"))
    for kind, name, has in (("text", "likelihoods", close), ("long", "long answers", told), ("tool", "calls of functions", made)):
        why = [] if has else refusals(record, side, lambda k, kind=kind: k == kind)
        out += ["%s: none, because %s" % (name, why[0])] if why else []
    why = refusals(record, side, is_question)
    out += ["%d documents of questions were not answered, the first because %s" % (len(why), why[0])] if why else []
    return out


def of_side(record: Record, side: str, told: List[Dict[str, Any]]) -> List[str]:
    """All of a side."""
    name = "full again (the control)" if side == AGAIN else budget_shown(side)
    out = ["", "## %s" % name, ""] + (table(told) + [""] if told else [])
    out += ["- " + line for line in others(record, side)]
    counts, measured = served(record, side), foresight(record, side)
    if counts and side != AGAIN:
        out.append("- served: of %d judged steps %d selected, %d attended densely, %d were another cache's" % (
            counts["steps"], counts["selected"], counts["densely"], counts["elsewhere"]))
        if counts["recall"] is not None:
            out.append("- measured share of attention: %.4f%s" % (
                counts["recall"], "; " + foreseen(measured) if measured else ""))
    elif not counts and told and side != AGAIN:
        out.append("- served: the engine has no counters of kvferry, so who attended is not known")
    return out


def draw(found: List[Judged], keep: float, path: str) -> Optional[str]:
    """The share kept by length and budget. @return why there is no picture"""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("svg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for side in dict.fromkeys(j.side for j in found):
        mine = sorted((j for j in found if j.side == side), key=lambda j: j.length)
        bars = [[100 * max(0, sign * (j.interval[end] - j.share)) for j in mine] for end, sign in ((0, -1), (1, 1))]
        axes.errorbar([j.length for j in mine], [100 * j.share for j in mine], yerr=bars, capsize=3, marker="o",
                      label=budget_shown(side))
    axes.axhline(100 * keep, linestyle="--", color="#6b7680")
    lengths = sorted({j.length for j in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [shown(n) for n in lengths], minor=False)
    axes.set_xlabel("tokens of a prompt and its answer")
    axes.set_ylabel("share of full's score, %")
    axes.legend(title="budget")
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
    return None
