# SPDX-License-Identifier: Apache-2.0
"""Documents and tasks of the evaluation: text that every Debian has, with facts hidden in it.

Knows texts and right answers, not models, selections or files of results. The same texts on the
machine and the same seed give the same documents on every Python version from 3.9 on.

A document is the prose of one manual of Perl, cut to a length, with lines put between its
paragraphs, evenly from front to back in a shuffled order; what follows in the manual is its
continuation. Kinds of tasks:

  number   The special magic number of CITY is 12345.
  facts    three numbers of one person: phone, room, badge; each is asked for
  chain    The home city of PERSON is CITY. The population of CITY is 12345. A value after an
           assignment: both steps are asked for, each by itself, and are right together
  repeat   a line of words drawn at random is said again: the share of words that are foreseen
  text     the continuation: its loss, nats per token
"""
import glob
import hashlib
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(os.path.join(ROOT, "python", "kvferry")) # of the package this part needs no library
from judge.tasks import Task  # noqa: E402
from judge.texts import CITIES, PEOPLE, WORDS, Random  # noqa: E402

MANUALS = ["CPAN.pm", "Locale/Maketext/TPJ13.pod", "Math/BigInt.pm", "Getopt/Long.pm",
           "overload.pm", "CPAN/Meta/Spec.pm", "Locale/Maketext.pod", "ExtUtils/MakeMaker.pm",
           "JSON/PP.pm", "File/Temp.pm", "Text/Balanced.pm", "Unicode/UCD.pm"]
LENGTHS = [3000, 6000, 4000, 5000, 4500, 3500, 7000, 7000, 7500, 3000, 5500, 6000]  # tokens
CHARS_PER_TOKEN = 4.3  # of this prose, with the model's tokenizer
CONTINUATION_CHARS = 1560
NUMBERS, CHAINS, REPEATED = 9, 2, 40


# ---- prose ----

def find(name):
    for folder in sorted(glob.glob("/usr/share/perl/5*")):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
    raise FileNotFoundError("/usr/share/perl/5*/%s is missing (package perl-modules-5.36, or "
                            "-5.38 on Ubuntu 24.04)" % name)


def prose(name):
    """The paragraphs of a manual, without its code and marks."""
    with open(find(name), encoding="utf-8", errors="replace") as f:
        parts = re.split(r"\n[ \t]*\n", f.read())
    out, is_pod = [], False
    for part in parts:
        part = part.strip("\n")
        if part.startswith("="):
            is_pod = not part.startswith("=cut")
        elif is_pod and part and not part[0].isspace():
            for _ in range(3):  # marks stand in marks
                part = re.sub(r"[A-Z]<(?:<+ )?([^<>]*?)(?: >+)?>", r"\1", part)
            text = " ".join(part.replace("E<gt>", ">").replace("E<lt>", "<").split())
            if len(text) > 100:
                out.append(text)
    return out


def all_prose():
    return " ".join(p for name in MANUALS for p in prose(name))


def cut(paragraphs, chars):
    """Paragraphs of so many characters, and those after them."""
    size, count = 0, 0
    while count < len(paragraphs) and size < chars:
        size += len(paragraphs[count]) + 2
        count += 1
    return paragraphs[:count], paragraphs[count:]


def first_words(paragraphs, chars):
    text = "\n\n".join(paragraphs)
    return text if len(text) <= chars else text[:text.rfind(" ", 0, chars)]


# ---- tasks ----

def numbers(r, cities):
    for city in cities:
        cue, value = "The special magic number of %s is" % city, r.number()
        yield ["%s %s." % (cue, value)], [Task("number", cue, value, 7, key=city)]


def facts(r, person):
    for kind in ("phone", "room", "badge"):
        cue, value = "The %s number of %s is" % (kind, person), r.number()
        yield ["%s %s." % (cue, value)], [Task("facts", cue, value, 7, key=kind)]


def chains(r, people, cities):
    for person, city in zip(people, cities):
        steps = [("The home city of %s is" % person, city, 4),
                 ("The population of %s is" % city, r.number(), 7)]
        yield (["%s %s." % (cue, right) for cue, right, _ in steps],
               [Task("chain", cue, right, tokens, key=person) for cue, right, tokens in steps])


def repeats(r):
    words = r.shuffled(WORDS)[:REPEATED]
    line = "The secret words are: " + " ".join(words) + "."
    cue = "The secret words are: " + " ".join(words[:8])
    yield [line], [Task("repeat", " " + " ".join(words[8:]), cue=cue)]


class Document:
    def __init__(self, manual, tokens, seed, chars, count=NUMBERS):
        """count: tasks of kind `number`"""
        r = Random(seed)
        cities, people = r.shuffled(CITIES), r.shuffled(PEOPLE)
        groups = (list(numbers(r, cities[:count])) + list(facts(r, people[0])) +
                  list(chains(r, people[1:1 + CHAINS], cities[count:])) + list(repeats(r)))
        lines = r.shuffled(line for lines, _ in groups for line in lines)
        hidden = sum(len(line) + 2 for line in lines) * 1.3  # digits and names are short tokens
        body, rest = cut(prose(manual), tokens * CHARS_PER_TOKEN - hidden)
        parts, done = [], 0
        for i, paragraph in enumerate(body):
            parts.append(paragraph)
            due = (i + 1) * len(lines) // len(body)
            parts += lines[done:due]
            done = due
        self.manual = manual
        self.text = "\n\n".join(parts) + "\n\n"
        self.tasks = [task for _, tasks in groups for task in tasks]
        self.tasks.append(Task("text", first_words(rest, chars)))


def documents(count=len(MANUALS), chars=CONTINUATION_CHARS):
    """The first ones, continued by so many characters."""
    return [Document(MANUALS[i], LENGTHS[i], 1000 + i, chars) for i in range(count)]


def digest(docs):
    """A digest of all texts, so that two tables can be compared."""
    h = hashlib.sha256()
    for d in docs:
        h.update(d.text.encode())
        for t in d.tasks:
            h.update((t.kind + t.cue + t.text + (t.answer or "")).encode())
    return h.hexdigest()[:16]


def escaped(text):
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def unescaped(text):
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), text)
