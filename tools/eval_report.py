# SPDX-License-Identifier: Apache-2.0
"""From what the rows of an evaluation said to a table and a file of figures.

Knows tasks and rows, not how they were run. Intervals hold 95%: a bootstrap over documents, whose
questions hang together, with a fixed seed. Bytes are of a step of one sequence, over all layers and KV heads.
"""
import sys

import eval_texts  # noqa: F401: the way to judge
from judge.figures import bootstrap, kept
from results_folder import save

ASKED = ("number", "facts", "chain")


# ---- figures ----

def judged(documents, row):
    """[(document, kind, right)] of all questions, in one order for every row; a chain is one."""
    found = []
    for d, document in enumerate(documents):
        chains = {}
        for t, task in enumerate(document.tasks):
            if task.answer is None or (d, t) not in row.answers:
                continue
            right = task.is_right(row.answers[d, t])
            if task.kind == "chain":
                chains[task.key] = chains.get(task.key, True) and right
            elif task.kind in ASKED:
                found.append((d, task.kind, right))
        found += [(d, "chain", right) for right in chains.values()]
    return found


def of_documents(found):
    """Right answers of every document."""
    sums = {}
    for document, _, right in found:
        sums[document] = sums.get(document, 0) + right
    return list(sums.values())


def repeated(documents, row):
    """(foreseen, all) words of repeats."""
    found = [(first, tokens) for (d, t), (tokens, _, first) in row.losses.items()
             if documents[d].tasks[t].kind == "repeat"]
    return sum(first for first, _ in found), sum(tokens for _, tokens in found)


def texts(documents, row):
    """[(tokens, loss)] of every continuation."""
    return [(n, total) for (d, t), (n, total, _) in sorted(row.losses.items())
            if documents[d].tasks[t].kind == "text"]


def lost(mine, full):
    """Nats per token above full's, with its interval."""
    def difference(at):
        return sum(mine[i][1] - full[i][1] for i in at) / sum(full[i][0] for i in at)

    return difference(range(len(full))), bootstrap(len(full), difference)


def figures(documents, row, full):
    """The figures that are told of a row."""
    found, of_full = judged(documents, row), judged(documents, full)
    out = {"method": row.method, "settings": row.settings, "budget": row.budget}
    for kind in ASKED:
        marks = [right for _, k, right in found if k == kind]
        if marks:
            out[kind] = {"right": sum(marks), "of": len(marks)}
    share, interval = kept(of_documents(found), of_documents(of_full))
    out["kept"] = {"share": share, "interval": interval}
    right, count = repeated(documents, row)
    if count:
        out["repeat"] = {"right": right, "of": count}
    mine = texts(documents, row)
    if mine:
        above, interval = lost(mine, texts(documents, full))
        tokens = sum(n for n, _ in mine)
        out["loss"] = {"nats": sum(x for _, x in mine) / tokens, "tokens": tokens,
                       "above_full": above, "interval": interval}
    s = row.stats
    steps = s["tokens"]
    heads = s["layers"] * s["kv_heads"]
    out["recall"] = s["recall_sum"] / s["verified"] if s["verified"] else None
    out["tokens_attended"] = s["tokens_attended"] / (steps * heads)
    out["bytes_moved_per_step"] = s["bytes_to_device"] / steps
    out["hit_rate"] = s["hits"] / max(1.0, s["hits"] + s["misses"])
    out["digest_bytes"] = s["digest_bytes"]
    out["digest_bytes_per_token"] = s["digest_bytes"] / (s["digest_tokens"] * heads)
    out["steps"], out["seconds"], out["cpu_seconds"] = steps, s["seconds"], s["cpu_seconds"]
    return out


# ---- the table ----

METHODS = ["full", "full k8v8", "full k8v4", "oracle", "dynamic", "k8v8", "k8v4", "hybrid", "static",
           "streaming", "quest", "arkvale", "defaults"]


def place(f):
    """Where a row stands."""
    s = f["settings"]
    return (METHODS.index(f["method"]), s.get("digest", ""), int(s.get("page_size", 0)),
            float(s.get("static_ratio", 0)), f["budget"] or 0)


def cells(f):
    settings = f["settings"]
    kept_low, kept_high = f["kept"]["interval"]

    def of(kind):
        return "%d" % f[kind]["right"] if kind in f else ""

    row = [f["method"], settings.get("digest", ""), settings.get("page_size", ""),
           settings.get("static_ratio", ""), str(f["budget"] or "")]
    row += [of(kind) for kind in ASKED if kind in f]
    row.append("%.0f%% (%.0f–%.0f)" % (100 * f["kept"]["share"], 100 * kept_low, 100 * kept_high)
               if f["kept"]["share"] is not None and kept_low is not None else "")
    if "repeat" in f:
        row.append("%.0f%%" % (100.0 * f["repeat"]["right"] / f["repeat"]["of"]))
    if "loss" in f:
        loss = f["loss"]
        row.append("%+.4f (%+.3f–%+.3f)" % ((loss["above_full"],) + tuple(loss["interval"])))
    row += ["%.3f" % f["recall"] if f["recall"] else "", "%.0f" % f["tokens_attended"],
            "%.0f" % (f["bytes_moved_per_step"] / 1024), "%.1f" % f["digest_bytes_per_token"]]
    return row


def table(told):
    first = told[0]
    titles = ["method", "digest", "page", "static", "budget"]
    titles += ["%s of %d" % (kind, first[kind]["of"]) for kind in ASKED if kind in first]
    titles.append("answers kept")
    if "repeat" in first:
        titles.append("repeat")
    if "loss" in first:
        titles.append("nats above full")
    titles += ["recall", "attended", "KiB a step", "digest B"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * 4 + "---:|" * (len(titles) - 4)]
    return lines + ["| " + " | ".join(cells(f)) + " |" for f in told]


LEGEND = """\
*answers kept*: right answers as a share of full attention's, over all questions. *chain*: a value
after an assignment; both steps are asked, each by itself, and right together. *repeat*: share of a
line of random words that is foreseen when it is said again. *nats above full*: loss of {tokens:,}
tokens that continue the documents, against full attention's {nats:.4f} nats per token. *recall*:
share of dense attention on the attended tokens, in one step of {every}. *attended*: tokens per KV
head and step, with sink and window. *KiB a step*: brought to the device per sequence and step, over
all layers and KV heads, with `gather` and `--device-memory 0`. *digest B*: bytes of digests per token and
KV head. Documents are read with full attention, where pages are packed over packed tokens. Intervals
hold 95%: a bootstrap over documents."""


def markdown(facts, told, refused, missing, same):
    lengths = facts["document_tokens"]
    lines = ["# What selections cost a real language model", "",
             "SmolLM2-135M-Instruct (30 layers, 9 query heads, 3 KV heads, d = 64) reads %d "
             "documents of %d to %d tokens." % (len(lengths), min(lengths), max(lengths)), ""]
    lines += table(told) + ["", LEGEND.format(
        tokens=told[0]["loss"]["tokens"], nats=told[0]["loss"]["nats"],
        every=facts["verify_every"])] + [""]
    if refused:
        lines += ["Left out, because this build refuses them: " + "; ".join(refused) + ".", ""]
    if missing:
        lines += ["The run was cut before: " + "; ".join(missing) + ".", ""]
    if same:
        lines += ["Measured once, because the settings are the same: " + "; ".join(same) +
                  " and its row above.", ""]
    lines += ["Machine: %s; load average %.1f to %.1f; %.0f minutes, %.0f of CPU. Texts: %s. Made "
              "with `%s`." % (facts["machine"], *facts["load_average"], facts["minutes"],
                              facts["cpu_seconds"] / 60, facts["texts"], facts["command"]), ""]
    return "\n".join(lines)


# ---- files ----

def name_of(row):
    return row.method + " " + " ".join("%s=%s" % s for s in row.settings.items())


def write_results(facts, documents, rows, out):
    told = sorted((figures(documents, r, rows[0]) for r in rows if r.stats), key=place)
    refused = sorted({name_of(r) for r in rows if r.refused})
    missing = [name_of(r) for r in rows if not r.stats and not r.refused]
    same = [name_of(r).strip() for r in rows if r.is_same]
    if not told:
        sys.exit("eval: no row is complete")
    text = markdown(facts, told, refused, missing, same)
    print(text)
    if not out:
        return
    save(out, "eval", text, dict(bench="eval", **facts, rows=told))
