# SPDX-License-Identifier: Apache-2.0
"""Documents and tasks in the forms of RULER (Hsieh et al., 2024), one in that of MRCR, and free questions.

Knows texts and right answers, not models or selections. The forms are RULER's: kinds of needles and
haystacks, prompts, answer prefixes, how many tokens are generated, and the score, which is the
share of expected strings that are found. A document is a prompt up to its question; the question
and the answer prefix follow as the task. RULER asks one question of a document; where it holds more
needles, or replies, that could have been the one, up to QUESTIONS of them are asked for, each by
itself. Where RULER takes data that is not generated this takes
a material's prose in place of essays, and its words in place of a list of
words. The same material and the same seed give the same documents.

  niah_*  needles: a key and a value. single_1: in one repeated sentence; single_2, multi*: in prose;
          single_3: a value that is a UUID; multikey_1: of four keys one is asked for; multikey_2, _3:
          all other sentences are needles, too, in _3 keys and values are UUIDs; multivalue: one key
          has four values; multiquery: four keys are asked for
  vt      variables that get a value through four assignments
  cwe     the ten words that are listed most often
  fwe     the three most frequent of made-up words
  mrcr    a chat in which the same is asked for several times; one of the replies is asked for again

Others are of the judge alone: `own` has questions of the user's file, `text` is continued token by token,
`long` is answered at length, `tool` asks for a call of a function that was described far back.
"""
import difflib
import json
import math
import uuid
from typing import Any, Callable, Dict, List, Optional

from .texts import ADJECTIVES, CITIES, PEOPLE, WORDS, Material, Random

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic %s for %s is: %s."
NIAH = ("{some} special magic {kind} {are} hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the {kind} afterwards.\n{context}\n",
        "What {are_all} the special magic {kind} for {query} mentioned in the provided text?"
        " The special magic {kind} for {query} mentioned in the provided text {are}")
# The prefix is spelt as it was published.
VT = ("Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
      "{context}\n",
      "Question: Find all variables that are assigned the value {query} in the text above. Answer: "
      "According to the chain(s) of variable assignment in the text above, {count} variables are "
      "assgined the value {query}, they are: ")
CWE = ("Below is a numbered list of words. In these words, some appear more often than others. "
       "Memorize the ones that appear most often.\n{context}\n",
       "Question: What are the 10 most common words in the above list? Answer: The top 10 words "
       "that appear most often in the list are:")
FWE = ("Read the following coded text and track the frequency of each coded word. Find the three "
       "most frequently appeared coded words. {context}\n",
       "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
       "most frequently appeared words in the above coded text? Answer: According to the coded text "
       "above, the three most frequently appeared words are:")
MRCR = ("User: Write a {form} about {topic}.\n\nAssistant: {reply}\n\n",
        "User: Prepend {mark} to the {which} {form} about {topic}. Do not include any other text in "
        "your response.\n\nAssistant:")
FORMS = ["poem", "riddle", "letter", "story"]
ORDER = ["first", "second", "third", "fourth"]
DEPTHS = 40  # at which needles lie in prose
SHORT = 4096  # below so many tokens words are repeated less often
SEED = 5000
QUESTIONS = 4  # of a document, at most


def choose(r, items, count):
    return r.shuffled(items)[:count]


def letters(r, count, first):
    return "".join(chr(ord(first) + r.below(26)) for _ in range(count))


def distinct(make, count):
    out = []
    while len(out) < count:
        one = make()
        if one not in out:
            out.append(one)
    return out


class Task:
    """kind, what is fed, and what is right; `key`: tasks that are right only together; `enough`:
    texts after which nothing that is said could change what it is worth."""

    enough: List[str] = []

    def __init__(self, kind, text, answer=None, tokens=0, cue="", key=None):
        self.kind, self.text, self.answer = kind, text, answer
        self.tokens, self.cue, self.key = tokens, cue, key

    def is_right(self, said):
        return is_answer(said, self.answer)


def is_answer(said, answer):
    """Whether it begins with the answer, and not with a longer word or number."""
    said = said.strip()
    return said.startswith(answer) and not said[len(answer):][:1].isalnum()


class RulerTask(Task):
    """`answers`: all that is to be found."""

    def __init__(self, kind, text, answers, tokens):
        Task.__init__(self, kind, text, " ".join(answers), tokens)
        self.answers = self.enough = answers

    def score(self, said):
        return sum(a.lower() in said.lower() for a in self.answers) / len(self.answers)


class MrcrTask(RulerTask):
    """How much of the reply is given again, after the mark."""

    def __init__(self, *args):
        RulerTask.__init__(self, *args)
        self.enough = []  # more may be worse

    def score(self, said):
        mark, reply = self.answers
        said = said.strip()
        if not said.startswith(mark):
            return 0.0
        said = said[len(mark):].split("User:")[0].strip()
        return difflib.SequenceMatcher(None, said, reply).ratio()


class Document:
    def __init__(self, text, *tasks):
        self.text, self.tasks = text, list(tasks)


# ---- words ----

def word(r):
    return ADJECTIVES[r.below(len(ADJECTIVES))] + "-" + WORDS[r.below(len(WORDS))]


def number(r):
    return str(1000000 + r.below(9000000))


def identifier(r):
    return str(uuid.UUID(int=sum(r.below(1 << 32) << 32 * i for i in range(4)), version=4))


MAKE = {"words": word, "numbers": number, "uuids": identifier}


# ---- tasks: (random numbers, material, size, tokens of the prompt) -> document ----

def spread(r, sentences, needles):
    """Needles at depths that were drawn, between sentences."""
    depths = sorted(len(sentences) * d // (DEPTHS - 1)
                    for d in choose(r, range(DEPTHS), len(needles)))
    out, done = [], 0
    for depth, needle in zip(depths, needles):
        out += sentences[done:depth] + [needle]
        done = depth
    return " ".join(out + sentences[done:])


def mixed(r, sentences, needles):
    for needle in needles:
        sentences.insert(r.below(len(sentences) + 1), needle)
    return "\n".join(sentences)


def niah(kind, haystack, key="words", value="numbers", keys=1, values=1, asked=1):
    def make(r, material, size, _):
        names = distinct(lambda: MAKE[key](r), keys)
        held = [[MAKE[value](r) for _ in range(values)] for _ in names]
        needles = r.shuffled(NEEDLE % (value, n, v) for n, vs in zip(names, held) for v in vs)
        hay = []
        if haystack == "prose":
            context = spread(r, material.sentences(r, size), needles)
        elif haystack == "noise":
            context = mixed(r, [NOISE] * size, needles)
        else:
            hay = [(MAKE[key](r), MAKE[value](r)) for _ in range(size)]
            context = mixed(r, [NEEDLE % (value, *pair) for pair in hay], needles)
        many = asked * values > 1
        words = {"some": "Some" if many else "A", "are": "are" if many else "is",
                 "are_all": "are all" if many else "is", "kind": value if many else value[:-1]}

        def task(queries, answers):
            query = ", ".join(queries[:-1]) + ", and " + queries[-1] if asked > 1 else queries[0]
            return RulerTask(kind, NIAH[1].format(query=query, **words), answers, 128)

        order = r.shuffled(range(keys))
        tasks = [task([names[i] for i in order[:asked]],
                      [v for i in order[:asked] for v in held[i]])]
        every = names + [name for name, _ in hay]
        more = [(names[i], held[i]) for i in order[1:]] + [
            (name, [v]) for name, v in r.shuffled(hay) if every.count(name) == 1]
        if not many:
            tasks += [task([name], answers) for name, answers in more[:QUESTIONS - 1]]
        return Document(NIAH[0].format(context=context, **words), *tasks)
    return make


def chain(r, noises, length, hops=4):
    """A prompt, its question, and the variables."""
    names = distinct(lambda: letters(r, length, "A"), hops + 1)
    value = r.number()
    links = ["VAR %s = %s" % (names[0], value)]
    links += ["VAR %s = VAR %s " % (b, a) for a, b in zip(names, names[1:])]
    sentences = [NOISE + "\n"] * noises
    for i, at in enumerate(sorted(choose(r, range(noises), len(links)))):
        sentences.insert(at + i, links[i])
    context = " ".join(sentences).replace(". \n", ".\n")
    return (VT[0].format(context=context), VT[1].format(query=value, count=len(names)), names)


def vt(r, _, size, __):
    example, asked, names = chain(r, 15, 3)
    text, question, answers = chain(r, max(size, 6), 5)
    return Document(" " + example + asked + " " + " ".join(names) + "\n\n\n\n" + text,
                    RulerTask("vt", question, answers, 30))


def listed(r, words, count, often, seldom):
    """A numbered list of `count` words, and the ten that are in it `often`."""
    drawn = choose(r, words, count)
    common = drawn[:10]
    items = r.shuffled(common * often + drawn[10:] * seldom)
    return " ".join("%d. %s" % (i + 1, w) for i, w in enumerate(items)), common


def cwe(r, material, size, tokens):
    of_example, often, seldom = ((20, 3, 1), 6, 1) if tokens < SHORT else ((40, 10, 3), 30, 3)
    example, held = listed(r, material.list, *of_example)
    context, answers = listed(r, material.list, max(size, 11), often, seldom)
    said = " ".join("%d. %s" % (i + 1, w) for i, w in enumerate(held))
    return Document(CWE[0].format(context=example) + CWE[1] + said + "\n" +
                    CWE[0].format(context=context), RulerTask("cwe", CWE[1], answers, 120))


def fwe(r, _, size, tokens):
    words = ["..."] + distinct(lambda: letters(r, 6, "a"), max(tokens // 50, 4) - 1)
    items = []
    for k, made_up in enumerate(words):
        items += [made_up] * int(size / (k + 1) ** 2 / (math.pi ** 2 / 6))
    return Document(FWE[0].format(context=" ".join(r.shuffled(items))),
                    RulerTask("fwe", FWE[1], words[1:4], 50))


def mrcr(r, material, size, _):
    """Four replies are about the same; the others are about something else."""
    form, topic = FORMS[r.below(len(FORMS))], WORDS[r.below(len(WORDS))]
    others = [(f, t) for f in FORMS for t in WORDS if (f, t) != (form, topic)]
    turns = [others[r.below(len(others))] for _ in range(max(size, 4) - 4)]
    for _ in ORDER:
        turns.insert(r.below(len(turns) + 1), (form, topic))
    replies = [" ".join(choose(r, material.list, 24)).capitalize() + "." for _ in turns]
    text = "".join(MRCR[0].format(form=f, topic=t, reply=reply)
                   for (f, t), reply in zip(turns, replies))
    same = [reply for turn, reply in zip(turns, replies) if turn == (form, topic)]
    first, tasks = r.below(len(ORDER)), []
    for i in range(QUESTIONS):
        which, mark = (first + i) % len(ORDER), letters(r, 6, "A")
        question = MRCR[1].format(mark=mark, which=ORDER[which], form=form, topic=topic)
        tasks.append(MrcrTask("mrcr", question, [mark, same[which]], 96))
    return Document(text, *tasks)


# Name, how a document is made, and the least size.
TASKS = {
    "niah_single_1": (niah("niah_single_1", "noise"), 5),
    "niah_single_2": (niah("niah_single_2", "prose"), 100),
    "niah_single_3": (niah("niah_single_3", "prose", value="uuids"), 100),
    "niah_multikey_1": (niah("niah_multikey_1", "prose", keys=4), 100),
    "niah_multikey_2": (niah("niah_multikey_2", "needles"), 5),
    "niah_multikey_3": (niah("niah_multikey_3", "needles", key="uuids", value="uuids"), 5),
    "niah_multivalue": (niah("niah_multivalue", "prose", values=4), 100),
    "niah_multiquery": (niah("niah_multiquery", "prose", keys=4, asked=4), 100),
    "vt": (vt, 6),
    "cwe": (cwe, 11),
    "fwe": (fwe, 20),
    "mrcr": (mrcr, 4),
}


def fitted(material, name, tokens, samples, count):
    """So many documents that fill `tokens` with their question and what is generated."""
    form, least = TASKS[name]
    seed = SEED + 1000 * list(TASKS).index(name)
    return filled(lambda sample, size: form(Random(seed + sample), material, size, tokens), least, name, tokens, samples,
                  count)


def filled(make, least, name, tokens, samples, count):
    """Likewise, of make(sample, size), from size `least` on.

    count(documents): tokens of each, with its question. Prompts grow with their size nearly as a
    line does: two sizes tell which size fits, and what is still too long is made shorter.
    """
    sizes = [least, 2 * least]
    short, long = count([make(0, s) for s in sizes])
    room = tokens - make(0, least).tasks[0].tokens
    too_long = ValueError("%s does not fit %d tokens: give greater --lengths, or --tasks without it" % (name, tokens))
    if short > room:
        raise too_long
    size = least + int((room - short) * (sizes[1] - sizes[0]) / (long - short))
    sizes = [size] * samples
    while True:
        documents = [make(i, s) for i, s in enumerate(sizes)]
        taken = count(documents)
        if all(t <= room for t in taken):
            return documents
        if any(t > room and s == least for s, t in zip(sizes, taken)):
            raise too_long
        sizes = [s if t <= room else max(least, min(s - 1, s * room // t))
                 for s, t in zip(sizes, taken)]


# ---- what RULER does not have ----

OWN = ("Read the following text. I will ask about it afterwards.\n{context}\n", "Question: {question}\nAnswer:")
LONG = ("Read the following text.\n{context}\n",
        "Write a long and detailed story, of several chapters, about the people and things in the text above.\n\nChapter 1.")
TOOL = "Read the following text.\n{context}\n", "Now call the function {name} once: {wish}."
OWN_TOKENS = 64


def own(questions: List[dict], at: int) -> Callable[[int, int, Material], Document]:
    """Documents with facts of a user's questions, QUESTIONS from the number `at` on."""
    asked = questions[at:at + QUESTIONS]

    def make(sample, size, material):
        r = Random(SEED + 77000 + at + sample)
        context = spread(r, material.sentences(r, size), [q["fact"] for q in asked])
        return Document(OWN[0].format(context=context), *(
            RulerTask("own", OWN[1].format(question=q["question"]), q["answers"], q.get("tokens", OWN_TOKENS))
            for q in asked))
    return make


def read_own(path: str) -> List[dict]:
    """Lines {"fact", "question", "answers"}, which are hidden in texts, or whole ones, {"prompt", "answers"}."""
    out = []
    with open(path, encoding="utf-8-sig") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                fine = isinstance(row, dict) and row.get("answers") and all(isinstance(a, str) for a in row["answers"])
            except ValueError:
                fine = False
            if not fine or not ("prompt" in row or ("fact" in row and "question" in row)):
                raise ValueError("%s:%d: give {\"fact\": \"...\", \"question\": \"...\", \"answers\": [\"...\"]}, or "
                                 "\"prompt\" in place of the first two" % (path, number))
            out.append(row)
    return out


def whole(row: dict) -> Document:
    """A prompt of the user, as it is."""
    return Document("", RulerTask("own", row["prompt"], row["answers"], row.get("tokens", OWN_TOKENS)))


def continued(tokens: int) -> Callable[[int, int, Material], Document]:
    """Text, and what follows in it."""
    def make(sample, size, material):
        r = Random(SEED + 88000 + sample)
        sentences = " ".join(material.sentences(r, size + 2 * tokens)).split(" ")
        return Document(" ".join(sentences[:size]), Task("text", " " + " ".join(sentences[size:]), tokens=tokens))
    return make


def told_at_length(tokens: int) -> Callable[[int, int, Material], Document]:
    """Text, and a wish for a long answer."""
    def make(sample, size, material):
        r = Random(SEED + 99000 + sample)
        context = " ".join(material.sentences(r, size))
        return Document(LONG[0].format(context=context), Task("long", LONG[1], tokens=tokens))
    return make


class ToolTask(Task):
    """A call of the function `answers[0]`, whose schema servers put before everything."""

    def __init__(self, text: str, schema: str, tokens: int = 128) -> None:
        Task.__init__(self, "tool", text, schema, tokens)
        self.answers = [schema]

    def score(self, said: str) -> float:
        """said: JSON of the calls, each {"name", "arguments"}"""
        try:
            calls = json.loads(said)
            return float(len(calls) == 1 and is_call(json.loads(self.answers[0]), **calls[0]))
        except (ValueError, TypeError, KeyError):
            return 0.0


TYPES = {"string": str, "integer": int, "boolean": bool}


def is_call(schema: dict, name: str, arguments: str) -> bool:
    """Whether it is one of the function: all that is required is there, of its type, and nothing else."""
    given, wanted = json.loads(arguments), schema["parameters"]["properties"]
    return (name == schema["name"] and set(schema["parameters"]["required"]) <= set(given) <= set(wanted) and all(
        isinstance(given[k], TYPES[wanted[k]["type"]]) and isinstance(given[k], bool) == (wanted[k]["type"] == "boolean")
        and given[k] in wanted[k].get("enum", [given[k]]) for k in given))


def tool(sample: int, size: int, material: Material) -> Document:
    """A function by a name that says nothing, so that its schema has to be looked at."""
    r = Random(SEED + 66000 + sample)
    name, cities = "file_%s_%s" % (r.one(ADJECTIVES), r.one(WORDS)), choose(r, CITIES, 4)
    fields = {"person": {"type": "string"}, "city": {"type": "string", "enum": cities},
              "count": {"type": "integer"}, "urgent": {"type": "boolean"}}
    schema = {"name": name, "description": "File a report.",
              "parameters": {"type": "object", "properties": fields, "required": list(fields)}}
    wish = "person %s, city %s, count %d, and it is %surgent" % (
        r.one(PEOPLE), r.one(cities), r.below(90), "" if r.below(2) else "not ")
    context = " ".join(material.sentences(r, size))
    return Document(TOOL[0].format(context=context), ToolTask(TOOL[1].format(name=name, wish=wish), json.dumps(schema)))


# ---- documents as rows of a file ----

def row_of(document: Document, name: str, length: int, sample: int) -> Dict[str, Any]:
    """As `document_of` takes it."""
    return {"task": name, "length": length, "sample": sample, "text": document.text, "questions": [
        {"kind": t.kind, "text": t.text, "tokens": t.tokens, "answers": getattr(t, "answers", None)}
        for t in document.tasks]}


def document_of(row: Dict[str, Any]) -> Document:
    """With `name` and `length`, which tell whose row it counts for, and its number among such."""
    def task(kind: str, text: str, tokens: int, answers: Optional[List[str]]) -> Task:
        if kind == "tool":
            return ToolTask(text, answers[0], tokens)
        if answers is None:
            return Task(kind, text, tokens=tokens)
        return (MrcrTask if kind == "mrcr" else RulerTask)(kind, text, answers, tokens)

    made = Document(row["text"], *(task(**q) for q in row["questions"]))
    made.name, made.length, made.sample = row["task"], row["length"], row["sample"]
    return made
