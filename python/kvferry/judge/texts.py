# SPDX-License-Identifier: Apache-2.0
"""Text that questions are hidden in: of files of the user, or made.

Knows words and sentences, not tasks or engines. The same seed gives the same text on every Python version from
3.9 on.
"""
import functools
import os
from typing import Any, Iterable, List, Sequence

WORDS = """lantern river tiger copper velvet anchor basket candle desert engine falcon garden
hammer island jungle kettle ladder marble needle orchid pepper quartz ribbon saddle temple
umbrella violin walnut yellow zipper bridge castle dragon eagle forest guitar helmet insect jacket
kitten lemon mirror noodle oyster pencil rabbit saucer turtle valley window""".split()
ADJECTIVES = """ancient bitter brave broad calm clever cold curious dark deep eager early faint fancy
fierce gentle golden grand happy heavy hollow humble icy jolly keen late little lively loud lucky
mellow mild narrow noble odd pale plain proud quick quiet rapid rare rough round sharp shiny silent
silver simple sleepy slow small smooth soft solid sour steady stern strange strong sturdy sweet
swift tall tender thick thin tidy tiny vast warm weak wide wild wise young""".split()
PEOPLE = """Alice Robert Martin Sophie Daniel Helen Victor Laura Simon Peter Julia Oscar Emma
Felix Clara Hugo Nora Thomas Anna Walter""".split()
CITIES = """Paris London Rome Berlin Madrid Vienna Lisbon Dublin Oslo Athens Prague Warsaw
Budapest Cairo Tokyo Delhi Moscow Boston Chicago Denver Dallas Seattle Toronto Sydney""".split()
DID = "repaired sold painted carried found drew lost kept weighed bought hid borrowed moved cleaned".split()
FORMS = ["{P} {d} the {a} {n} near {C}, because the {n} was too {a} for {P}.",
         "In {C} a {a} {n} was worth more than a {n}, and {P} {d} it twice.",
         "Nobody in {C} remembered who had {d} the {n}.",
         "When {P} came back from {C}, the {a} {n} was still where {P} had {d} it.",
         "The {n} of {P} is {a} and {a}, but the {n} in {C} is not.",
         "{P} wrote to {P} that the {n} had been {d} before winter.",
         "It took {P} a {a} day to see that a {n} is no {n}."]
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
MADE_SENTENCES = 6000 # so many differ; longer prose begins anew
LISTED = 20000 # words that a list of words may need
TEXT_ENDS = (".txt", ".md", ".rst", ".tex", ".org", ".html", ".py", ".c", ".h", ".json", ".jsonl", ".csv", ".pod")


class Random:
    """SplitMix64: the same numbers everywhere."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, n: int) -> int:
        """A whole number from 0 on."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        z = self.state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        z = (z ^ z >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        return (z ^ z >> 31) % n

    def one(self, items: List[str]) -> str:
        """One of them."""
        return items[self.below(len(items))]

    def shuffled(self, items: Iterable[Any]) -> List[Any]:
        """All of them, in another order."""
        items = list(items)
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]
        return items

    def number(self) -> str:
        """Five digits."""
        return str(10000 + self.below(90000))


@functools.lru_cache(maxsize=None)
def made() -> str:
    """Prose by rules, of small words."""
    r, lists = Random(31), {"P": PEOPLE, "C": CITIES, "a": ADJECTIVES, "n": WORDS, "d": DID}
    out = []
    for _ in range(MADE_SENTENCES):
        form = r.one(FORMS)
        for mark, words in lists.items():
            while "{%s}" % mark in form:
                form = form.replace("{%s}" % mark, r.one(words), 1)
        out.append(form)
    return " ".join(out)


def of_folder(folder: str) -> str:
    """All files of text in it, in the order of their names."""
    paths = [folder] if os.path.isfile(folder) else sorted(
        os.path.join(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(TEXT_ENDS))
    out = []
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as f:
            out.append(f.read())
    text = " ".join("\n\n".join(out).split())
    if len(text) < 2000:
        raise ValueError("--text %s: %d characters are too few to hide questions in; files of text end with %s" % (
            folder, len(text), " ".join(TEXT_ENDS)))
    return text


@functools.lru_cache(maxsize=None)
def made_words(count: int) -> Sequence[str]:
    """So many words that nobody has read."""
    r, out = Random(37), {}
    while len(out) < count:
        out["".join(r.one(SYLLABLES) for _ in range(3 + r.below(2)))] = None
    return tuple(out)


class Material:
    """Text that is read once: prose as words, and a list of words.

    more   as many words may be asked for as a long list needs
    """

    def __init__(self, text: str, more: bool = False) -> None:
        self.words = text.split()
        counts: dict = {}
        for word in self.words:
            if word.isascii() and word.isalpha() and word.islower() and 4 <= len(word) <= 10:
                counts[word] = counts.get(word, 0) + 1
        self.list = sorted(word for word, n in counts.items() if n >= 2)
        if more:
            self.list += [word for word in made_words(LISTED) if word not in counts][:max(0, LISTED - len(self.list))]

    def sentences(self, r: Random, count: int) -> List[str]:
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
