# SPDX-License-Identifier: Apache-2.0
"""Every architecture of the installed Transformers that writes text: equal to eager, or refused by name.

A tiny random model of each (tiny_models.py) reads 300 tokens and writes some, with eager attention and
with kvferry, whose budget is the whole context. Logits may differ by rounding, tokens not at all; a small
budget attends to that much. Every refusal of kvferry says why in its own words; any other error, and kvferry
never asked to attend, is a fault, and so is a class that does not run as a tiny model and is not in the
list of those. docs/python.md has the outcomes in a table, which this test compares and --write makes anew.
With another Transformers than that of the table a class may have another outcome, or be new: it must be
right or refused, too.

usage: check_hf_models.py [--write] [--shard I/N] [CLASS...]
"""
import argparse
import collections
import inspect
import json
import os
import re
import subprocess
import sys
import traceback
import warnings

try:
    import torch
    import transformers
except ImportError as error:
    print("skipped: %s; ./dev python makes an environment that has it" % error)
    sys.exit(77)

from transformers.models.auto import modeling_auto

import kvferry.hf
import tiny_models

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "python.md")
BEGIN, END = "<!-- models: check_hf_models.py --write -->", "<!-- end of models -->"
PROMPT, NEW, SEED = 300, 6, 5
FULL, SMALL = 1024, 96
# A share of the standard deviation of a logit. Sums of another order differ by 1e-6 of their terms, and some
# layers multiply that; attention to other tokens shows in 1e-1.
TOLERANCE = 1e-3
ROUNDING = 5e-3 # the most that logits may differ where SDPA is as far from eager
NEWEST, BLIND = 8, 1e-2  # other tokens before the newest ones must move logits by that much


def families():
    """Class name -> True for a language model, False for one with an encoder, pictures or sound."""
    found = {name: not name.endswith("ForConditionalGeneration")
             for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    for mapping in (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
                    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES):
        for name in mapping.values():
            found.setdefault(name, False)
    found.update((name, found[of]) for name, (of, _) in tiny_models.VARIANTS.items() if of in found)
    return found


class NotTiny(Exception):
    """It does not run as it is, without kvferry."""


def prompt(rows=1, seed=3, tokens=PROMPT):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(tiny_models.FIRST, tiny_models.LAST, (rows, tokens), generator=generator)


def generate(model, ids, **more):
    """Greedy: tokens, logits of every step, and the cache that was used."""
    more.setdefault("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        told = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                              return_dict_in_generate=True, output_logits=True, **more)
    cache = getattr(told, "cache", None) or told.past_key_values
    return told.sequences[:, -NEW:], torch.stack(told.logits).float(), \
        getattr(cache, "self_attention_cache", cache)


def distance(wanted, got):
    """Largest difference of logits, in their standard deviations; infinite for other tokens."""
    if wanted[0].tolist() != got[0].tolist():
        return float("inf")
    return ((wanted[1] - got[1]).abs().amax() / wanted[1].std()).item()


def told_of(error):
    at = traceback.extract_tb(error.__traceback__)[-1]
    return "%s: %s (%s:%d)" % (type(error).__name__, " ".join(str(error).split())[:200],
                               os.path.basename(at.filename), at.lineno)


def attempt(model, inputs, limit, *references):
    """(outcome, text) of a generation whose logits are within `limit` of one of the references."""
    try:
        got = generate(model, **inputs)
    except kvferry.Error as error:
        return "refused", str(error)
    except Exception as error:
        return "wrong", told_of(error)
    off = min(distance(wanted, got) for wanted in references)
    if not off < limit:
        return "wrong", "logits differ by %.2g" % off
    if isinstance(got[2], kvferry.hf.Cache) and not got[2].stats().get("steps"):
        return "wrong", "kvferry was never asked to attend"
    return "right", "%.1g" % off


def inputs_of(model):
    """{what: arguments of generate}; the first one is a plain prompt."""
    mask, marks = torch.ones(2, PROMPT, dtype=torch.long), torch.zeros(1, PROMPT, dtype=torch.long)
    mask[0, :90], marks[0, 20:60] = 0, 1
    found = {"": {"ids": prompt()}, "with padding: ": {"ids": prompt(2, seed=7), "attention_mask": mask}}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inspect.signature(model.forward).parameters:
            found["with %s: " % name] = {"ids": prompt(), name: marks}
    return found


def by_implementation(model, name, inputs):
    """The outputs of Transformers by itself; None where it cannot."""
    try:
        model.set_attn_implementation(name)
        return generate(model, **inputs)
    except Exception:
        return None


def try_family(name):
    """(outcome, text): right, refused or wrong. Raises NotTiny."""
    try:
        model = tiny_models.make(name, SEED)
        model.set_attn_implementation("eager")
        wanted, again = generate(model, prompt()), generate(model, prompt())
        others = torch.cat([prompt(seed=4)[:, :-NEWEST], prompt()[:, -NEWEST:]], 1)
        sees = (generate(model, others)[1][0] - wanted[1][0]).abs().max() / wanted[1].std()
    except Exception as error:
        raise NotTiny(told_of(error))
    if distance(wanted, again) > TOLERANCE:
        raise NotTiny("two runs differ")
    if not sees > BLIND:
        raise NotTiny("its logits show no attention (%.1g)" % sees)
    first = None
    for what, inputs in inputs_of(model).items():
        eager = by_implementation(model, "eager", inputs)
        if eager is None:  # not for this model
            continue
        sdpa = by_implementation(model, "sdpa", inputs)
        limit = TOLERANCE if sdpa is None else max(TOLERANCE, min(distance(eager, sdpa), ROUNDING))
        if not what:  # the name alone means SDPA, or eager where that is the model's own
            model.set_attn_implementation("kvferry")
            outcome, text = attempt(model, inputs, limit, eager, *([] if sdpa is None else [sdpa]))
            if outcome == "wrong":
                return outcome, "by name alone: " + text
        try:
            kvferry.hf.use(model, FULL, tokens_max=FULL)
            outcome, text = attempt(model, inputs, limit, eager)
        except kvferry.Error as error:
            outcome, text = "refused", str(error)
        except Exception as error:
            outcome, text = "wrong", told_of(error)
        model.__dict__.pop("generate", None)
        first = first or (outcome, text)
        if outcome == "wrong":
            return outcome, what + text
        if first[0] == "refused":
            return first
    return small(model) or first


def small(model):
    """("wrong", text) of a model that is right, if it does not run with less than the context."""
    try:
        kvferry.hf.use(model, SMALL, tokens_max=FULL, local_tokens=32)
        _, logits, cache = generate(model, prompt())
    except Exception as error:
        return "wrong", "with a small budget: " + told_of(error)
    finally:
        model.__dict__.pop("generate", None)
    attended = cache.stats()["tokens_attended"] / cache.stats()["steps"] / cache._cache.settings.kv_heads
    if not logits.isfinite().all() or not attended < SMALL + NEW:
        return "wrong", "with a small budget: %d tokens were attended, or logits are not finite" % attended
    return None


# -- one process per core, because a model may end its process --

def work(names):
    for name in names:
        try:
            told = try_family(name)
        except NotTiny as error:
            told = "not tiny", str(error)
        print(json.dumps([name, *told]), flush=True)


def outcomes(names):
    """{name: (outcome, text)}"""
    found, left = {}, sorted(names)
    while left:
        count = min(os.cpu_count() or 1, len(left))
        parts = [left[i::count] for i in range(count)]
        workers = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", *part],
                                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                   for part in parts]
        for part, worker in zip(parts, workers):
            lines = worker.communicate()[0].splitlines()
            told = [json.loads(line) for line in lines if line.startswith("[")]
            found.update((name, tuple(rest)) for name, *rest in told)
            if len(told) < len(part):
                found[part[len(told)]] = "wrong", "its process ended with %d" % worker.returncode
        left = [name for name in left if name not in found]
    return found


# -- the table --

def reason(name, text):
    """The refusal, without the names that differ from model to model."""
    for pattern, word in ((r"^kvferry\.hf: ", ""), (r"\b%s\b" % re.escape(name.split(" ")[0]), "the model"),
                          (r", layer \d+", ""), (r"(goes) into \w+,", r"\1 elsewhere,"),
                          (r"; use the model without kvferry$", ""), (r"\|", "/")):
        text = re.sub(pattern, word, text)
    return "refused: " + text


def short(name):
    return re.sub(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)(?=$| )", "", name)


def rows_of(found):
    """[(kind, outcome and reason, names)], most first."""
    kinds, rows = families(), collections.defaultdict(list)
    for name, (outcome, text) in found.items():
        words = {"right": "equal to eager",
                 "not tiny": "not tried, because " + tiny_models.NOT_TINY.get(name, "?")}
        rows[not kinds.get(name, True), words.get(outcome) or reason(name, text)].append(name)
    return sorted(rows.items(), key=lambda row: (row[0][0], row[0][1] != "equal to eager",
                                                 row[0][1].startswith("not tried"), -len(row[1]), row[0]))


def table(found):
    lines = ["| with Transformers %s | models |" % transformers.__version__, "|---|---|"]
    for (other, words), names in rows_of(found):
        lines.append("| %s%s | %s |" % ("with an encoder, pictures or sound: " if other else "", words,
                                        ", ".join(sorted(map(short, names), key=str.lower))))
    return "\n".join(lines)


def rows_in_page():
    """{(other, short name): words} of the table that is there, and whether it is of this Transformers."""
    with open(PAGE, encoding="utf-8") as page:
        text = page.read()
    found: dict = {}
    table_there = text.split(BEGIN)[1].split(END)[0] if BEGIN in text else ""
    for line in table_there.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 2:
            other = cells[0].startswith("with an encoder")
            words = cells[0].split(": ", 1)[1] if other else cells[0]
            found.update(((other, name), words) for name in cells[1].split(", "))
    return found, "| with Transformers %s |" % transformers.__version__ in table_there


def write(found):
    with open(PAGE, encoding="utf-8") as page:
        text = page.read()
    before, rest = text.split(BEGIN)
    with open(PAGE, "w", encoding="utf-8") as page:
        page.write(before + BEGIN + "\n\n" + table(found) + "\n\n" + END + rest.split(END)[1])


def faults(found):
    """Lines that say what is wrong, and those that only say what is new."""
    (there, same_version), wrong, new = rows_in_page(), [], []
    for (other, words), names in rows_of({
            name: told for name, told in found.items()
            if told[0] != "wrong" and (told[0] == "not tiny") == (name in tiny_models.NOT_TINY)}):
        for name in names:
            row = there.get((other, short(name)))
            if row is None:
                new.append("%s: %s, which the table does not have yet" % (name, words))
            elif row != words:
                (wrong if same_version else new).append("%s: the table says '%s', it is '%s'" % (
                    name, row, words))
    for name, (outcome, text) in found.items():
        if outcome == "wrong":
            wrong.append("%s: %s" % (name, text))
        elif outcome == "not tiny" and name not in tiny_models.NOT_TINY:
            wrong.append("%s: does not run as a tiny model (%s), and tiny_models.NOT_TINY does not say why" %
                         (name, text))
        elif outcome != "not tiny" and name in tiny_models.NOT_TINY:
            new.append("%s: runs by now; take it out of tiny_models.NOT_TINY" % name)
    return wrong, new


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table of docs/python.md")
    parser.add_argument("--shard", default="1/1", help="I/N: every Nth class, from the Ith")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="CLASS")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.worker:
        return work(args.names)
    shard, of = map(int, args.shard.split("/"))
    names = args.names or sorted(families())[shard - 1::of]
    found = outcomes(names)
    if args.write and not any(outcome == "wrong" for outcome, _ in found.values()):
        write(found)
    wrong, new = faults(found)
    counts = collections.Counter(outcome for outcome, _ in found.values())
    for line in [*new, *wrong]:
        print(line)
    print("Transformers %s, seed %d, shard %s: %s" % (
        transformers.__version__, SEED, args.shard,
        ", ".join("%d %s" % (counts[key], key) for key in ("right", "refused", "not tiny", "wrong"))))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
