#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`kvferry run --prompts` and `--samples` from outside: every answer is what `kvferry run` gives for
its prompt alone, token by token, whatever runs beside it; `kvferry score` of answers and texts; long
answers; and what is refused or interrupted.

usage: check_batch.py KVFERRY RECALL_MODEL
"""
import array
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time

from chat_model import DRAWS, FACT, SELECTION, run_checks
from checks import read

# Longer ones are read in two chunks, and lose tokens to the selection.
PROMPTS = (FACT + "question the code of alice brown", "quiet", "quiet river guards heavy lantern",
           FACT * 40 + "question the code of", "the code", FACT * 9, "question the code of alice")


def lines_of(chat, *options):
    """(results by (id, sample), statistics)."""
    return chat.answers(*SELECTION, *options)[:2]


def alone(chat, prompt, *options):
    """(ids, text) of a run with one prompt."""
    out, ids, _ = chat.answer(*SELECTION, "--prompt", prompt, *options)
    return ids, out.rstrip("\n")


def check_prompts(chat):
    chat.write()
    tokens = [5 + 7 * (i % 4) for i in range(len(PROMPTS))]
    jobs = [{"prompt": p, "tokens": n} for p, n in zip(PROMPTS, tokens)]
    jobs[1]["id"] = "a name"
    path = chat.save("p.jsonl", "\n\n".join(json.dumps(job) for job in jobs) + "\n")
    wanted = [alone(chat, p, "-n", str(n), "--ignore-eos") for p, n in zip(PROMPTS, tokens)]
    names = [job.get("id", 2 * i + 1) for i, job in enumerate(jobs)]
    for options in (("--batch", "1"), ("--batch", "3"), ("--batch", "16"),
                    ("--batch", "16", "--memory", "1400K"), ("--batch", "5", "--threads", "1")):
        results, told = lines_of(chat, "--prompts", path, "--ignore-eos", *options)
        chat.check("all prompts are answered with %s" % (options,),
                   set(results) == {(name, 0) for name in names}, results.keys())
        for name, (ids, text), n in zip(names, wanted, tokens):
            r = results.get((name, 0), {})
            chat.check("prompt %s with %s is as alone" % (name, options), r.get("ids") == ids and
                       r["answer"] == text and r["generated_tokens"] == n and
                       r["stop"] == "length" and "reasoning" not in r, r, ids, text)
        at_once = told["batch"]["rows_at_once"]
        chat.check("rows are shared", at_once == 1 if options[1] == "1" else
                   1 < at_once <= told["batch"]["rows"], told["batch"])
        if "--memory" in options:
            chat.check("memory is a limit", told["host_kv_bytes"] <= 1440 << 10 and at_once < 6,
                       told["host_kv_bytes"], at_once)


def check_samples(chat):
    chat.write()
    single = [alone(chat, PROMPTS[0], "-n", "9", "--seed", str(40 + i), *DRAWS) for i in range(5)]
    chat.check("seeds differ", len({tuple(ids) for ids, _ in single}) > 1, single)
    for batch in ("2", "5"):
        results, told = lines_of(chat, "--prompt", PROMPTS[0], "--samples", "5", "--seed", "40",
                                 "--batch", batch, "-n", "9", *DRAWS)
        for i, (ids, text) in enumerate(single):
            r = results.get((1, i), {})
            chat.check("sample %d is the run of its seed" % i, r.get("ids") == ids and
                       r["answer"] == text and r["seed"] == 40 + i, r, ids, text)
        # The first token of each follows from the prompt itself.
        chat.check("a prompt is read once", told["batch"]["answers"] == told["batch"]["ended"] == 5
                   and round(told["decode_steps"] * told["batch"]["rows_at_once"]) ==
                   told["generated_tokens"] - 5 and told["prefilled_tokens"] ==
                   told["prompt_tokens"], told)
    job = {"prompt": PROMPTS[2], "temperature": 1.5, "min_p": 0.01, "repetition_penalty": 1.1,
           "seed": 41, "tokens": 9, "top_k": 50, "top_p": 0.9}
    path = chat.save("p.jsonl", json.dumps(job) + "\n" + json.dumps({"prompt": PROMPTS[1]}))
    results, _ = lines_of(chat, "--prompts", path, "--samples", "2", "-n", "4")
    ids, _ = alone(chat, PROMPTS[2], "-n", "9", "--seed", "42", "--top-k", "50", "--top-p", "0.9",
                   *DRAWS)
    chat.check("a line has settings of its own", results[(1, 1)]["ids"] == ids, results, ids)
    for options, is_told in ((("--samples", "2"), True), (("--samples", "2", *DRAWS), False),
                             (("--samples", "1"), False)):
        _, err = chat.run(*SELECTION, "--prompt", PROMPTS[1], "-n", "2", *options)
        chat.check("equal answers are foretold", ("are the same" in err) == is_told, options, err)
    chat.check("others have the command's", results[(2, 0)]["ids"] == results[(2, 1)]["ids"] and
               results[(2, 0)]["generated_tokens"] == 4, results)


def check_pruned(chat):
    chat.write()
    options = ("--prune", "snapkv", "--keep", "0.3", "--prune-window", "4", "-n", "6")
    ids, _ = alone(chat, PROMPTS[5], *options)
    results, told = lines_of(chat, "--prompt", PROMPTS[5], "--samples", "3", *options)
    chat.check("samples share a pruned prompt", [results[(1, i)]["ids"] for i in range(3)] ==
               [ids] * 3 and told["prune"]["policy"] == "snapkv", results, ids)
    lines = [PROMPTS[5], PROMPTS[3], "the code of alice brown is seven tiger quiet", PROMPTS[5]]
    path = chat.save_lines("p.jsonl", [{"prompt": p} for p in lines])
    for how in (("snapkv", "--keep", "0.5"), ("fastkv", "--keep", "0.5", "--propagate", "0.5"),
                ("gemfilter", "--keep", "0.5"),
                ("snapkv", "--keep", "0.5", "--chunk", "20", "--evict", "patched",
                 "--chunk-queries", "4")):
        options = ("--prune", *how, "-n", "6") + (
            () if how[0] == "gemfilter" else ("--prune-window", "4"))
        wanted = [alone(chat, p, *options)[0] for p in lines]
        for batch in ("1", "3"):
            results, told = lines_of(chat, "--prompts", path, "--batch", batch, *options)
            chat.check("prompts are pruned as alone, %s, %s at once" % (how, batch),
                       [results[(i + 1, 0)]["ids"] for i in range(4)] == wanted and
                       told["prune"]["prompts"] == 4, results, wanted, told)
    path = chat.save("p.jsonl", json.dumps({"prompt": PROMPTS[5]}) + "\n" +
                     json.dumps({"prompt": "quiet river"}))
    _, err = chat.run("--prompts", path, "--prune", "snapkv", "--prune-window", "4", status=1)
    chat.check("a prompt that is too short to prune is named", "line 2: --prune snapkv: window = 4"
               in err, err)


def check_masked(chat):
    """A learnt head mask goes with a batch, also on a saved beginning."""
    chat.write()
    mask = os.path.join(chat.recall, "../../train_mask/recall_mask.tsv")
    options = ("--head-mask", mask, "--streaming-recent", "32", "-n", "6", "--ignore-eos")
    path = chat.save_lines("p.jsonl", [{"prompt": p} for p in PROMPTS])
    wanted = [alone(chat, p, *options)[0] for p in PROMPTS]
    for batch in ("1", "4"):
        results, told = lines_of(chat, "--prompts", path, "--batch", batch, *options)
        chat.check("heads that stream answer as alone, %s at once" % batch, told["head_mask"] and
                   [results[(i + 1, 0)]["ids"] for i in range(len(PROMPTS))] == wanted, results, wanted)
    saved = os.path.join(chat.folder, "saved")
    alone(chat, PROMPTS[3], *options, "--save", saved)
    path = chat.save("p.jsonl", "\n".join(json.dumps({"prompt": " " + p}) for p in PROMPTS[1:3]))
    wanted = [alone(chat, PROMPTS[3] + " " + p, *options, "--load", saved)[0] for p in PROMPTS[1:3]]
    results, _ = lines_of(chat, "--prompts", path, "--load", saved, *options)
    chat.check("also after a saved beginning", [results[(i, 0)]["ids"] for i in (1, 2)] == wanted,
               results, wanted)
    os.remove(saved)


def check_rows(chat):
    """Without --batch as many answers at once as memory has room for, 16 at most."""
    chat.write(config={"max_position_embeddings": 1 << 26})
    path = chat.save("p.jsonl", "\n".join([json.dumps({"prompt": PROMPTS[1]})] * 20))
    _, told = lines_of(chat, "--prompts", path, "-n", "2")
    chat.check("16 of 20 at once", told["batch"]["rows"] == 16, told["batch"])
    plan = ("--prompt", PROMPTS[1], "--samples", "20", "--temperature", "1", "--dry-run")
    _, err = chat.run(*plan, "-n", "1000")
    amount, unit = re.search(r"available +([0-9.]+) ([KMGT])iB", err).groups()
    room = float(amount) * 1024 ** " KMGT".index(unit)
    tokens = str(min(1 << 24, int(room / 4 / 2560)))  # four of them and a little, at most
    _, err = chat.run(*plan, "-n", tokens)
    chat.check("fewer where memory has no room for them", "total" in err and "takes" not in err, err)
    if int(tokens) << 15 > room:
        _, err = chat.run(*plan, "-n", tokens, "--batch", "16", status=1)
        chat.check("and as many as are asked for", "this run takes" in err, err)


def rescored(chat, answers, *options):
    """(lines by (id, sample), what --stats says of them, standard error)."""
    return chat.answers("--answers", answers, *SELECTION, *options, command="score")


def check_logprobs(chat):
    """They change no token. Scored again under the selection that drew them, they are the same to
    the last bit; densely they are those of a dense run of the same tokens."""
    chat.write()
    jobs = [{"prompt": PROMPTS[3], "id": "long"}, {"prompt": PROMPTS[0]}, {"prompt": PROMPTS[5]}]
    path = chat.save("p.jsonl", "\n".join(map(json.dumps, jobs)))
    options = ("--prompts", path, "--samples", "3", "--batch", "4", "-n", "9", "--ignore-eos")
    free, _ = lines_of(chat, *options, *DRAWS)
    drawn, _ = lines_of(chat, *options, *DRAWS, "--logprobs", "3")
    for key, r in drawn.items():
        best = [step[0] for step in r["top_logprobs"]]
        chat.check("%s has the tokens that it has without" % (key,), r["ids"] == free[key]["ids"] and
                   not {"logprobs", "select"} & free[key].keys(), r)
        chat.check("%s has a number per token" % (key,), len(r["logprobs"]) == len(r["draw_logprobs"])
                   == len(r["top_logprobs"]) == 9 and all(len(step) == 3 for step in r["top_logprobs"]) and
                   all(p <= 0 for p in r["logprobs"] + r["draw_logprobs"]), r)
        chat.check("%s: none is above the likeliest" % (key,), all(
            p <= b[1] and (p == b[1]) == (i == b[0])
            for i, p, b in zip(r["ids"], r["logprobs"], best)), r)
    for text, temperature in (("1", 1.0), ("2", 2.0)):
        plain, _ = lines_of(chat, *options, "--temperature", text, "--logprobs", "20")
        r = plain[("long", 0)]
        near = max(abs(a - b) for a, b in zip(r["logprobs"], r["draw_logprobs"]))
        chat.check("uncut draws at temperature %s" % text, (near < 1e-5) == (temperature == 1.0), r)
    greedy, _ = lines_of(chat, *options, "--logprobs", "1")
    r = greedy[("long", 0)]
    chat.check("a greedy token is the likeliest, and not drawn", "draw_logprobs" not in r and
               [[[i, p]] for i, p in zip(r["ids"], r["logprobs"])] == r["top_logprobs"], r)

    answers = chat.save("a.jsonl", "\n".join(json.dumps(r) for r in drawn.values()))
    for batch in ("1", "5"):
        same, told, _ = rescored(chat, answers, "--prompts", path, "--select", "dynamic",
                                 "--logprobs", "0", "--batch", batch)
        chat.check("the selection that drew them gives the same, %s at once" % batch,
                   {key: r["logprobs"] for key, r in same.items()} ==
                   {key: r["logprobs"] for key, r in drawn.items()} and
                   told["rescored"]["differences"][0]["max_abs"] == 0 and
                   told["scored_tokens"] == 81, told, same)
    dense, told, err = rescored(chat, answers, "--prompts", path, "--logprobs", "0")
    figures = told["rescored"]["differences"]
    chat.check("densely they differ where tokens were left out", len(figures) == 1 and
               figures[0]["drawn_with"] == "dynamic, budget 128" and
               figures[0]["compared_tokens"] == 81 and 0 < figures[0]["mean_abs"] <=
               figures[0]["p99_abs"] <= figures[0]["max_abs"] and "drawn     dynamic" in err and
               told["settings"]["select"] == "full", told, err)
    by_hand = [a - b for key in drawn for a, b in zip(drawn[key]["logprobs"], dense[key]["logprobs"])]
    chat.check("the mean is that of all tokens", abs(sum(by_hand) / 81 - figures[0]["mean"]) < 1e-7 and
               abs(max(map(abs, by_hand)) - figures[0]["max_abs"]) < 1e-7, by_hand, figures)
    whole, _ = lines_of(chat, *options, "--select", "full", *DRAWS, "--logprobs", "0")
    again, told, _ = rescored(chat, chat.save("b.jsonl", "\n".join(
        json.dumps(r) for r in list(whole.values()) + list(drawn.values())[:2])), "--prompts", path)
    chat.check("a dense run is dense, and each selection has its figures", sorted(
        d["drawn_with"] for d in told["rescored"]["differences"]) == ["dynamic, budget 128", "full"]
        and all(d["max_abs"] == 0 for d in told["rescored"]["differences"] if d["drawn_with"] == "full"),
        told)
    one, _ = lines_of(chat, "--prompt", PROMPTS[3], "--samples", "2", "-n", "4", *DRAWS, "--logprobs", "0")
    few = [{"id": 1, "sample": 5, "ids": one[(1, 0)]["ids"][:2]}]
    short, told, _ = rescored(chat, chat.save("c.jsonl", json.dumps(few[0])), "--prompt", PROMPTS[3],
                              "--logprobs", "0")
    chat.check("an answer without log-probabilities is scored", len(short[(1, 5)]["logprobs"]) == 2 and
               "difference" not in short[(1, 5)] and
               "compared_tokens" not in told["rescored"]["differences"][0], short, told)


def scored(chat, text, *options):
    """(losses of a text after a prompt, whether each token is the likeliest) of `kvferry score`."""
    stats = chat.save("stats", "")
    out, _ = chat.run("--prompt", PROMPTS[3], "--text", chat.save("text", " ".join(text)), "--stats", stats,
                      *options, command="score")
    result, told = json.loads(out), json.loads(read(stats))
    losses = [t["loss"] for t in told["tokens"]]
    chat.check("a loss for each token of the text", [t["text"].strip() for t in told["tokens"]] == text and
               result["scored_tokens"] == told["scored_tokens"] == len(text), result)
    chat.check("one figure in both, their mean", result["loss"] == told["loss"] and
               abs(sum(losses) / len(losses) - result["loss"]) < 1e-6, result, told["loss"])
    chat.check("every token but the first has its share of a step's time", told["tpot_ms"]["p50"] > 0 and
               told["decode_steps"] == result["decoded_tokens"] == len(text) - 1, told)
    return losses, [t["likeliest"] for t in told["tokens"]]


def draw(chat, *options):
    """(ids, losses, whether each is the likeliest) of tokens that a run drew, by its logits."""
    dump = os.path.join(chat.folder, "logits")
    _, ids, _ = chat.answer("--prompt", PROMPTS[3], "-n", "60", "--temperature", "2", "--top-k", "20", "--seed", "3",
                            "--ignore-eos", "--dump-logits", dump, *options)
    with open(dump, "rb") as f:
        logits = array.array("f", f.read())
    size, losses, likeliest = len(logits) // len(ids), [], []
    for i, token in enumerate(ids):
        row = logits[i * size:(i + 1) * size]
        top = max(row)
        losses.append(top + math.log(sum(math.exp(x - top) for x in row)) - row[token])
        likeliest.append(row.index(top) == token)
    return ids, losses, likeliest


def check_text(chat):
    """A text has the losses that follow from the logits of the run that drew it, under its selection. That
    logits are those of the model other tests show (test_logits.c, test_select.c)."""
    few = ("--select", "streaming", "--budget", "160", "--page-size", "32")
    vocabulary = chat.write()
    for options in (few, ("--select", "full")):
        ids, wanted, of_run = draw(chat, *options)
        text = [vocabulary[i] for i in ids]
        full, likeliest = scored(chat, text, *options)
        off = max(abs(a - b) for a, b in zip(full, wanted))
        chat.check("losses are those of the logits, %s" % (options,), off < 1e-5, off)
        chat.check("and the likeliest tokens, %s" % (options,), 0 < sum(likeliest) < len(text) and
                   likeliest == of_run, likeliest, of_run)
    answers = chat.save("a.jsonl", json.dumps({"id": 1, "ids": ids}))
    out, _ = chat.run("--prompt", PROMPTS[3], "--answers", answers, "--logprobs", "0", command="score")
    chat.check("an answer is scored as the text that it is",
               max(abs(a + b) for a, b in zip(full, json.loads(out)["logprobs"])) < 1e-5, out)
    chat.check("a transfer changes no bit", scored(chat, text, *options, "--transfer", "gather")[0] == full)
    large, _ = scored(chat, text, "--select", "dynamic", "--budget", "1024")
    chat.check("a budget that holds all is full", max(abs(a - b) for a, b in zip(large, full)) < 2e-3, large)
    some, _ = scored(chat, text, *few)
    chat.check("the first token follows from dense attention", some[0] == full[0], some[0], full[0])
    chat.check("streaming is not full", max(abs(a - b) for a, b in zip(some, full)) > 0.1, some)


def check_saved(chat):
    """Lines go on from a saved document, which is read once for all of them."""
    about = subprocess.run([chat.kvferry, "info"], stdout=subprocess.PIPE, check=True).stdout
    if not re.search(rb"xxHash.*\n?.*yes", about):
        return
    chat.write()
    document, ends = PROMPTS[3], (" alice", " alice brown", "", " alice brown is")
    saved = os.path.join(chat.folder, "document.kvs")
    chat.run(*SELECTION, "--prompt", document, "-n", "1", "--save", saved)
    # Each alone, from the file too: products in bf16 depend on how many tokens are read at once.
    wanted = [alone(chat, document + end, "--load", saved, "-n", "6", *DRAWS)[0] for end in ends]
    path = chat.save_lines("p.jsonl", [{"prompt": end} for end in ends])
    for batch in ("1", "3"):
        results, told = lines_of(chat, "--load", saved, "--prompts", path, "--batch", batch,
                                 "-n", "6", *DRAWS)
        chat.check("lines go on from the document, %s at once" % batch,
                   [results[(i + 1, 0)]["ids"] for i in range(4)] == wanted, results, wanted)
        chat.check("which is not read again", told["loaded_tokens"] > 300 and
                   told["prefilled_tokens"] < 20, told)
    results, _ = lines_of(chat, "--load", saved, "--prompt", document, "--samples", "3", "-n", "6",
                          *DRAWS)
    chat.check("so do samples", results[(1, 0)]["ids"] == wanted[2], results, wanted)
    path = chat.save("p.jsonl", json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    _, err = chat.run(*SELECTION, "--load", saved, "--prompts", path, status=1)
    chat.check("a chat does not", "leave messages and system out" in err, err)


def check_options(chat):
    """Other features of the command work in a batch too."""
    chat.write()
    prompts = [PROMPTS[5], PROMPTS[2], PROMPTS[5]]
    path = chat.save_lines("p.jsonl", [{"prompt": p} for p in prompts])
    mask = chat.save("mask.tsv", "0\t1\n1\t0\n1\t1\n0\t0\n")
    for options in (("--head-mask", mask, "--streaming-recent", "8"), ("--chunk", "16"),
                    ("--stop", "brown")):
        wanted = [alone(chat, p, "-n", "9", *options) for p in prompts]
        results, told = lines_of(chat, "--prompts", path, "-n", "9", *options)
        chat.check("%s as alone" % (options,), [(r["ids"], r["answer"]) for _, r in
                   sorted(results.items())] == wanted, results, wanted)
        chat.check("%s is heard" % (options,), "--head-mask" not in options or
                   told["head_mask"]["streaming_heads"] == 4, told)


def rename(chat, word, name):
    """The word of the vocabulary is another text from now on."""
    tokenizer = json.loads(read(os.path.join(chat.folder, "tokenizer.json")))
    vocab = tokenizer["model"]["vocab"]
    vocab[name] = vocab.pop(word)
    chat.save("tokenizer.json", tokenizer)


def check_chat(chat):
    chat.write()
    question = [{"role": "user", "content": PROMPTS[0]}]
    wanted, _ = chat.run(*SELECTION, "--messages", chat.save("m.json", question), "-n", "8")
    told, _ = chat.run(*SELECTION, "--chat", "--system", "guards", "--prompt", PROMPTS[2],
                       "-n", "8")
    path = chat.save("p.jsonl", "\n".join(json.dumps(job) for job in (
        {"messages": question}, {"prompt": PROMPTS[2], "system": "guards"})))
    results, _ = lines_of(chat, "--prompts", path, "-n", "8")
    chat.check("messages are a chat", results[(1, 0)]["answer"] == wanted.rstrip("\n"), results)
    chat.check("so is a system prompt", results[(2, 0)]["answer"] == told.rstrip("\n"), results)
    # The format opens a thought; a word that the model says becomes the end of one.
    rename(chat, "lantern", "<think>")
    options = ("--prompts", path, "--chat-format", "deepseek-r1", "-n", "8", "--repetition-penalty", "4",
               "--ignore-eos")
    free = lines_of(chat, *options)[0][(1, 0)]
    words = free["reasoning"].split()
    chat.check("a thought without end is all reasoning", free["answer"] == "" and
               len(set(words)) > 4, free)
    end = next(i for i in range(1, len(words)) if words[i] not in PROMPTS[0].split())
    rename(chat, words[end], "</think>")
    parted = lines_of(chat, *options)[0][(1, 0)]
    chat.check("reasoning and answer are apart", parted["ids"] == free["ids"] and
               parted["reasoning"].split() == words[:end] and
               parted["answer"].split() == words[end + 1:] != [], parted, words)


def check_refused(chat):
    chat.write()
    lines = [{"prompt": "quiet", "id": name} for name in ("c", "7", 7, "b", 9)]
    path = chat.save_lines("p.jsonl", lines)
    out, _ = chat.run("--prompts", path, "-n", "2")
    chat.check("a text and a number are two ids", sorted(str(json.loads(line)["id"]) for line in
                                                       out.splitlines()) == list("779bc"), out)
    _, err = chat.run("--prompts", path, "--context", "40000")
    chat.check("a context past the model's positions is told", "32768 positions" in err, err)
    _, err = chat.run("--prompts", path, "--memory", "1000", status=1)
    chat.check("too little memory is refused", "--memory 1000 has room for" in err, err)
    chat.refusals("lines")


def check_long(chat):
    """A short prompt, a long answer: refreshes come when they are due, pages grow on the host
    alone, and the budget holds."""
    chat.write()
    told = []
    for n in (300, 1150):
        told.append(chat.answer("--budget", "256", "--select", "hybrid", "--prompt", "quiet river", "-n",
                                str(n), "--temperature", "1", "--ignore-eos")[2])
        # From the first block that left the window of 64 tokens on, every 128 steps in 4 layers.
        chat.check("refreshes are where they should be", told[-1]["refreshes"] ==
                   4 * ((n - 96) // 128 + 1), n, told[-1]["refreshes"])
    short, long = told
    chat.check("pages grow on the host alone", long["device_kv_bytes"] == short["device_kv_bytes"]
               and long["host_kv_bytes"] > 3 * short["host_kv_bytes"], short, long)
    chat.check("the budget holds", long["tokens_attended_per_head_step"] < 256 and
               len(long["tpot_ms_by_1000"]) == 1 and short["tpot_ms_by_1000"] == [], long)


def check_real(chat):
    """A real model's answers do not depend on how many are decoded at once either."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
    import real_model
    model = os.path.join(real_model.cache_folder(), real_model.NAME + ".Q4_1.gguf")
    if not os.path.exists(model):
        print("not looked at: the real model, which ./dev demo fetches")
        return
    path = chat.save("ids", "")

    def run(*options):
        done = subprocess.run([chat.kvferry, "run", "--model", model, "--device", "host", "--prompt",
                               "A list of five animals:", "-n", "3",
                               "--temperature", "1", "--ignore-eos", *options],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        chat.check("the real model answers with %s" % (options,), done.returncode == 0, done.stderr)
        return done.stdout
    batches = {n: {r["sample"]: r["ids"] for r in map(json.loads, run(
        "--samples", "16", "--batch", str(n)).splitlines())} for n in (1, 3, 16)}
    run("--seed", "15", "--emit-ids", path)
    batches[0] = {**batches[1], 15: [int(line) for line in read(path).split()]}
    for n, found in batches.items():
        chat.check("%d at once are single runs" % n, found == batches[1] and len(found) == 16 and
                   len({tuple(ids) for ids in found.values()}) > 9, found, batches[1])


def check_interrupted(chat):
    """Ctrl-C, or whatever ends jobs and containers: what was generated is out, and statistics are
    written."""
    chat.write()
    path = chat.save("p.jsonl", "\n".join(json.dumps({"prompt": p, "tokens": n}) for p, n in (
        (PROMPTS[2], 3), (PROMPTS[0], 30000), (PROMPTS[1], 30000), (PROMPTS[4], 30000))))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        name = number.name
        signal.signal(number, signal.SIG_DFL) # under nohup it is ignored, and the command would leave it so
        stats = os.path.join(chat.folder, name)
        command = [chat.kvferry, "run", "--model", chat.folder, "--device", "host", "--prompts", path,
                   "--batch", "3", "--ignore-eos", "--stats", stats]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as process:
            first = process.stdout.readline() # so the others are on their way
            time.sleep(0.2)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        results = [json.loads(first)] + [json.loads(line) for line in out.splitlines()]
        by_id = {r["id"]: r for r in results}
        chat.check(name + " ends with its number", process.returncode == 128 + number,
                   process.returncode, err)
        chat.check(name + ": what ended before is whole", by_id[1]["stop"] == "length", by_id[1])
        chat.check(name + ": what was on its way is out",
                   by_id[2]["stop"] == by_id[3]["stop"] == "interrupted"
                   and by_id[2]["generated_tokens"] == len(by_id[2]["ids"]) > 0 and
                   len(by_id[2]["answer"].split()) > 0, by_id[2])
        told = json.loads(read(stats)) if os.path.exists(stats) else {"stop": "no statistics"}
        chat.check(name + ": statistics are written", told["stop"] == "interrupted" and
                   told["generated_tokens"] == sum(r["generated_tokens"] for r in results), told)


def check_interrupted_prefill(chat):
    """Ctrl-C inside a prompt that goes layer by layer, or in one call by chunks: it is heard, and
    statistics are written. A token that the first layers alone have seen does not count as prefilled."""
    chat.write()
    prompt = chat.save("long.txt", FACT * 3500)
    for options in (("--chunk", "64K"), ("--prune", "snapkv"), ("--prune", "snapkv", "--samples", "2"),
                    ("--prune", "snapkv", "--chunk", "2048", "--evict", "naive")):
        stats = os.path.join(chat.folder, "prefill")
        master, slave = pty.openpty()
        command = [chat.kvferry, "run", "--model", chat.folder, "--device", "host", "--prompt-file",
                   prompt, "-n", "4", "--stats", stats] + list(options)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave) as process:
            os.close(slave)
            shown = b""
            # A bar that has moved: the prefill is under way.
            while not re.search(rb"prefill[^\r]* [1-9]\d*/|tokens/s", shown):
                shown += os.read(master, 4096)
            process.send_signal(signal.SIGINT)
            try:
                while True:
                    shown += os.read(master, 4096)
            except OSError:  # the terminal was closed at the other end
                pass
            out = process.communicate(timeout=60)[0]
        os.close(master)
        told = json.loads(read(stats))
        chat.check("Ctrl-C is heard inside a prefill with %s" % (options,),
                   process.returncode == 130 and told["stop"] == "interrupted" and
                   told["generated_tokens"] == 0 and out.strip() == b"" and
                   0 < told["prefilled_tokens"] < told["prompt_tokens"] - 1,
                   process.returncode, told["stop"], told["generated_tokens"],
                   told["prefilled_tokens"], out)
        os.remove(stats)


if __name__ == "__main__":
    sys.exit(run_checks(check_prompts, check_samples, check_logprobs, check_text, check_pruned, check_masked,
                        check_rows, check_saved, check_options, check_chat, check_refused,
                        check_long, check_real, check_interrupted, check_interrupted_prefill))
