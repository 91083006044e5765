# SPDX-License-Identifier: Apache-2.0
"""The work of a judgement: documents as they were asked for, and sides that answer them.

Sides take turns, document by document, and tasks and lengths, sample by sample, so that a run that is cut has judged
all alike. Knows engines by `count` and `ask` alone.
"""
import sys
import time
from typing import Any, Dict, List, NamedTuple, Sequence

from . import tasks
from .record import AGAIN, FULL, Record, Refused
from .report import CONTROL, OTHERS
from .servers import Cannot
from .texts import Material

ONE_ANSWER_TOKENS = 48 # are enough for one string; RULER generates 128
LEAST = 100 # words of prose


class Wanted(NamedTuple):
    """Documents and tasks that are asked for."""
    lengths: Sequence[int]
    tasks: Sequence[str]
    samples: int
    texts: int # to be continued, of each length
    text_tokens: int
    long_tokens: int # of an answer; 0 = none
    tools: int # calls of functions, of each length
    own: List[dict]


class Side(NamedTuple):
    """Who answers: an engine under a setting. kinds: of tasks; None = all. most: samples of each task and length."""
    name: str
    engine: Any
    setting: str
    kinds: Any = None
    most: int = 1 << 30

    def wants(self, document: Any) -> bool:
        """Whether it is asked that."""
        return document.sample < self.most and (self.kinds is None or document.tasks[0].kind in self.kinds)


def forms(wanted: Wanted, material: Material) -> List[tuple]:
    """(name, make(sample, size), least size, samples, whether at the first length alone) of all that are made."""
    out = []
    if wanted.texts:
        out.append(("continued text", tasks.continued(wanted.text_tokens), LEAST, wanted.texts, False))
    if wanted.long_tokens:
        out.append(("long answer", tasks.told_at_length(wanted.long_tokens), LEAST, 1, True))
    if wanted.tools:
        out.append(("call of a function", tasks.tool, LEAST, wanted.tools, False))
    hidden = [q for q in wanted.own if "fact" in q]
    for at in range(0, len(hidden), tasks.QUESTIONS):
        out.append(("own", tasks.own(hidden, at), LEAST, 1, False))
    return [(name, lambda sample, size, make=make: make(sample, size, material), least, samples, once)
            for name, make, least, samples, once in out]


def documents(wanted: Wanted, material: Material, count: Any) -> List[Dict[str, Any]]:
    """Rows of all documents. count(texts): tokens of each."""
    def counted(made: List[Any]) -> List[int]:
        return count([d.text + max((t.text for t in d.tasks), key=len) for d in made])

    made = []
    for length in wanted.lengths:
        for name in wanted.tasks:
            made.append((name, length, tasks.fitted(material, name, length, wanted.samples, counted)))
        for name, make, least, samples, once in forms(wanted, material):
            if not once or length == wanted.lengths[0]:
                more = make(0, least).tasks[0].tokens if once else 0 # a long answer comes after the text
                made.append((name, length, tasks.filled(make, least, name, length + more, samples, counted)))
    whole = [tasks.whole(q) for q in wanted.own if "prompt" in q]
    rows = [(n, tasks.row_of(one, name, length, n)) for name, length, some in made for n, one in enumerate(some)]
    rows += [(0, tasks.row_of(one, "own prompts", 0, n)) for n, one in enumerate(whole)]
    for _, one in rows:
        for q in one["questions"]:
            if q["answers"] and len(q["answers"]) == 1 and q["kind"] in tasks.TASKS:
                q["tokens"] = min(q["tokens"], ONE_ANSWER_TOKENS)
    return [one for _, one in sorted(rows, key=lambda pair: pair[0])]


def cost(record: Record, sides: Sequence[Side], count: Any) -> str:
    """Work that is still to be done."""
    prompts = answers = questions = 0
    read: Dict[int, int] = {}
    for side in sides:
        for d, document in enumerate(record.documents):
            left = [t for q, t in enumerate(document.tasks) if side.wants(document) and not record.get(side.name, d, q)]
            if left and d not in read:
                read[d] = count([document.text + document.tasks[0].text])[0]
            prompts += read[d] if left else 0
            answers += sum(t.tokens for t in left)
            questions += len(left)
    return "to be asked: %d questions of %s (%s); {:,} tokens of prompts, each document once, and at most {:,} of answers".format(
        prompts, answers) % (questions, "%d documents" % len(record.documents), ", ".join(side.name for side in sides))


def introduce(record: Record, sides: Sequence[Side]) -> None:
    """Who every side is; another one under the same name would be mixed up with it."""
    for side in sides:
        here, there = side.engine.describe(), record.get(side.name, -1, -1)
        if there and there["engine"] != here:
            raise Refused("%s has answers of %s (side %s), and this is %s: give another --out" % (
                record.path, there["engine"], side.name, here))
        if not there:
            record.add(side.name, -1, -1, {"engine": here})


def go_on(record: Record, sides: Sequence[Side]) -> None:
    """Ask what was not answered yet. Stopped = an engine ended; what it said until then is kept."""
    introduce(record, sides)
    begin, total, done = time.monotonic(), len(record.documents), 0
    for d, document in enumerate(record.documents):
        asked = False
        for side in sides:
            which = [q for q in range(len(document.tasks)) if side.wants(document) and not record.get(side.name, d, q)]
            if not which:
                continue
            asked = True
            try:
                for question, result in side.engine.ask(document, which, side.setting):
                    record.add(side.name, d, question, result)
            except Cannot as why:
                record.add(side.name, d, which[0], {"cannot": str(why)})
        done += asked
        if asked:
            left = (time.monotonic() - begin) / done * (total - d - 1)
            print("judge: %d of %d documents, %s; about %d min left" % (d + 1, total, document.name, -(-left // 60)),
                  file=sys.stderr, flush=True)


def sides_of(full: Any, engine: Any, sides: Sequence[str], control: int, has_budget: bool) -> List[Side]:
    """full: who has full attention; None = a file has its answers."""
    out = [Side(FULL, full, FULL)] if full else []
    out += [Side(side, engine, side) for side in sides]
    if has_budget:
        out.append(Side(CONTROL, engine, CONTROL, ("text",)))
    if full and control:
        kinds = {kind for kind in (*tasks.TASKS, "own", *OTHERS) if kind != "long"}
        out.append(Side(AGAIN, full, FULL, kinds, control))
    return out
