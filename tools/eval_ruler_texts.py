# SPDX-License-Identifier: Apache-2.0
"""Documents and tasks in the forms of RULER (Hsieh et al., 2024), and one in that of MRCR.

Knows texts and right answers, not models or selections. The forms are RULER's: kinds of needles and
haystacks, prompts, answer prefixes, how many tokens are generated, and the score, which is the
share of expected strings that are found. A document is a prompt up to its question; the question
and the answer prefix follow as the task. RULER asks one question of a document; where it holds more
needles, or replies, that could have been the one, up to QUESTIONS of them are asked for, each by
itself. Where RULER takes data that is not generated this takes
the manuals of eval_texts.py: their prose in place of essays, their words in place of a list of
words. The same texts on the machine and the same seed give the same documents.

  niah_*  needles: a key and a value. single_1: in one repeated sentence; single_2, multi*: in prose;
          single_3: a value that is a UUID; multikey_1: of four keys one is asked for; multikey_2, _3:
          all other sentences are needles, too, in _3 keys and values are UUIDs; multivalue: one key
          has four values; multiquery: four keys are asked for
  vt      variables that get a value through four assignments
  cwe     the ten words that are listed most often
  fwe     the three most frequent of made-up words
  mrcr    a chat in which the same is asked for several times; one of the replies is asked for again
"""
import difflib
import math
import uuid

from eval_texts import MANUALS, WORDS, Random, Task, prose

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
ADJECTIVES = """ancient bitter brave broad calm clever cold curious dark deep eager early faint fancy
fierce gentle golden grand happy heavy hollow humble icy jolly keen late little lively loud lucky
mellow mild narrow noble odd pale plain proud quick quiet rapid rare rough round sharp shiny silent
silver simple sleepy slow small smooth soft solid sour steady stern strange strong sturdy sweet
swift tall tender thick thin tidy tiny vast warm weak wide wild wise young""".split()
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


# ---- material ----

class Material:
    """Texts that are read once: prose as words, and a list of words."""

    def __init__(self, text=None):
        """text: instead of the manuals"""
        if text is None:
            text = " ".join(p for name in MANUALS for p in prose(name))
        self.words = text.split()
        counts = {}
        for word in self.words:
            if word.isascii() and word.isalpha() and word.islower() and 4 <= len(word) <= 10:
                counts[word] = counts.get(word, 0) + 1
        self.list = sorted(word for word, n in counts.items() if n >= 2)

    def sentences(self, r, count):
        """So many words, from somewhere, cut after full stops."""
        first = r.below(len(self.words))
        words = [self.words[(first + i) % len(self.words)] for i in range(count)]
        out, sentence = [], []
        for word in words:
            sentence.append(word)
            if word[-1] in ".?!":
                out.append(" ".join(sentence))
                sentence = []
        return out + ([" ".join(sentence)] if sentence else [])


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


def make(material, name, tokens, sample, size):
    return TASKS[name][0](Random(SEED + 1000 * list(TASKS).index(name) + sample), material, size,
                          tokens)


def fitted(material, name, tokens, samples, count):
    """So many documents that fill `tokens` with their question and what is generated.

    count(documents): tokens of each, with its question. Prompts grow with their size nearly as a
    line does: two sizes tell which size fits, and what is still too long is made shorter.
    """
    least = TASKS[name][1]
    sizes = [least, 2 * least]
    short, long = count([make(material, name, tokens, 0, s) for s in sizes])
    room = tokens - make(material, name, tokens, 0, least).tasks[0].tokens
    if short > room:
        raise ValueError("%s does not fit %d tokens" % (name, tokens))
    size = least + int((room - short) * (sizes[1] - sizes[0]) / (long - short))
    sizes = [size] * samples
    while True:
        documents = [make(material, name, tokens, i, s) for i, s in enumerate(sizes)]
        taken = count(documents)
        if all(t <= room for t in taken):
            return documents
        sizes = [s if t <= room else max(least, min(s - 1, s * room // t))
                 for s, t in zip(sizes, taken)]
