#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Deterministic text for the recall model: documents with hidden facts, questions, recitals.

Text is plain words separated by single spaces; one word is one token. No token is added at
the front: a text starts with its own first word. Only the standard library is used, and the
same seed gives the same text on every Python version from 3.9 on.

Layouts

  document   document FILLER ... the code of alice brown is seven tiger . FILLER ...
  question   question the code of alice brown is      (appended after the document)
  answer     seven tiger                              (always ANSWER_WORDS = 2 words)
  passage    passage WORD ... WORD end
  cue        recite FIRST_8_WORDS                     (appended after the passage)
  recital    the rest of the passage, then: end

A question can be put alone after the document (one fork of the prefilled document per
question), or the questions can follow one another, each with its answer and a full stop:

  DOCUMENT question the code of X Y is A B . question the code of Z W is C D . ...

The last eighth of a document holds no fact. In one document no name and no answer word
occurs twice, and fillers are drawn from other words. A passage
is dealt from shuffled decks of all words, so a word comes again only after most others, and
no pair of neighbouring words occurs twice: the last two words say which word comes next.

Commands

  generate.py document --tokens 16384 --questions 20 --seed 7 --out DIR
      writes DIR/document.txt, DIR/questions.txt, one question per line, to append after the
      document, and DIR/questions.json, a list of {"question": that line, "answer": what is right}
  generate.py recital --tokens 2048 --seed 7 --out DIR
      writes DIR/prompt.txt (passage and cue) and DIR/expected.txt (continuation)
"""
import argparse
import json
import os

ANSWER_WORDS = 2
CUE_WORDS = 8
FACTS = 32
FRAME = "document question the code of is . passage end recite".split()
FIRST = """
alice henry clara oscar emma felix nora hugo lydia simon julia peter marta
lucas irene victor helen martin sarah thomas anna robert laura edward diana
philip sylvia george paula walter monica albert teresa ralph edith arthur
bridget conrad daphne dennis elaine ernest fiona gerald gloria harold
harriet isaac ivy jacob janet jerome joan julian karen kevin leah leonard
louise malcolm margaret maurice miriam nathan naomi norman olivia patrick
priscilla quentin rachel raymond rebecca roland rosalind rupert ruth samuel
selma stanley stella stephen susan theodore ursula vera vincent viola wendy
wilfred yvonne zachary agnes barnaby cecilia desmond
""".split()
LAST = """
brown smith taylor johnson wilson davies evans walker wright robinson
thompson hughes edwards jackson harrison roberts morris rogers watson cooper
richardson bailey collins murphy miller simpson marshall anderson ellis
murray wilkinson foster graham stevens gibson webb kennedy campbell mitchell
carter phillips lloyd barnes henderson palmer stewart reynolds saunders
fletcher chapman lawrence bradley pearson holmes matthews spencer hawkins
dixon armstrong bennett burton crawford cunningham dawson donovan elliott
ferguson fitzgerald gallagher goodwin griffin hamilton harper hopkins hudson
jennings jensen larson mcdonald montgomery norris osborne parsons patterson
preston quinn ramsey sanders schultz sheldon sinclair sutton thornton
underwood vaughn wagner whitaker winslow yates
""".split()
VALUE1 = """
one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty
fifty sixty seventy eighty ninety hundred thousand million red blue green
yellow orange purple crimson scarlet violet indigo azure turquoise amber
ivory ebony golden bronze copper silver platinum nickel cobalt iron steel
marble granite emerald sapphire ruby topaz opal coral velvet cotton linen
leather wooden glassy paper woolen silken maple cedar walnut chestnut birch
willow bamboo north south east west spring summer autumn winter monday
tuesday wednesday thursday friday saturday sunday lunar solar arctic
tropical
""".split()
VALUE2 = """
tiger lion zebra giraffe elephant monkey panda camel donkey horse rabbit
squirrel badger otter beaver weasel hedgehog falcon eagle sparrow raven
magpie heron pelican penguin ostrich parrot pigeon pheasant turkey chicken
goose swan owl hawk salmon trout herring shark dolphin whale octopus lobster
shrimp oyster turtle tortoise lizard gecko iguana cobra python viper
alligator crocodile frog toad newt spider beetle butterfly moth cricket
hornet bumblebee ladybug dragonfly mosquito leopard cheetah panther jaguar
cougar lynx wolf coyote jackal hyena fox bear moose elk reindeer antelope
gazelle buffalo bison goat sheep lamb piglet hamster ferret gerbil kitten
puppy walrus seal
""".split()
ADJECTIVES = """
quiet heavy gentle bright narrow ancient clever distant eager fragile hollow
humble lonely modest noble patient polite rapid rough sacred shallow silent
simple slender smooth solemn steady strange sturdy subtle sudden tender
tired vivid warm weary wild wise young zealous bitter bold broad busy calm
careful cheap clean clear cold common cool crooked cruel curious damp dark
deep dense dirty dry dull early empty fair faint famous fancy fast fierce
final firm flat foreign fresh friendly full generous giant glad grand
grateful great happy hard healthy honest huge hungry idle jolly joyful keen
kind large late lazy light little lively local long loose loud lovely lucky
mighty mild muddy mute naked neat nervous new nice odd old open pale plain
pleasant poor pretty proud pure quick rare ready rich ripe round rude sad
safe salty secret sharp short shy sick slow small soft sour stiff strict
strong sweet swift tall tame thick thin tiny
""".split()
NOUNS = """
river lantern garden window mountain village harbor bridge castle forest
meadow island valley kitchen market station theater library museum temple
tower palace cottage barn stable mill factory workshop office school college
hospital prison church chapel tavern bakery shop street road path highway
railway tunnel canal lake pond ocean beach shore cliff cave desert jungle
prairie swamp field farm orchard vineyard hill ridge canyon waterfall
glacier volcano cloud storm thunder rain snow frost fog wind breeze sunrise
sunset moon star planet comet sky horizon shadow flame smoke ash candle lamp
torch mirror carpet curtain pillow blanket mattress cradle chair table bench
desk shelf cupboard drawer basket barrel bottle bucket kettle teapot cup
plate bowl spoon fork knife pan oven stove chimney ladder hammer chisel saw
needle thread button ribbon jacket coat sweater shirt collar sleeve pocket
glove scarf hat helmet boot shoe sandal sock belt buckle necklace bracelet
earring crown sword shield spear arrow bow cannon rifle banner flag drum
trumpet violin piano guitar flute whistle bell clock calendar compass map
letter envelope stamp parcel newspaper magazine diary notebook pencil eraser
ruler brush canvas portrait statue fountain pillar arch gate fence wall roof
ceiling floor stairs cellar attic balcony doorway hallway corridor engine
wagon carriage bicycle tractor truck airplane balloon rocket ship boat canoe
ferry anchor sail rudder captain sailor soldier farmer baker butcher tailor
carpenter blacksmith doctor nurse teacher student lawyer judge painter poet
singer dancer actor hunter shepherd merchant banker thief beggar king queen
prince princess knight wizard giantess neighbor cousin uncle aunt
grandmother child infant apple banana cherry grape lemon melon peach pear
plum berry potato tomato carrot onion garlic pepper cabbage lettuce bean pea
corn wheat barley rice bread butter cheese cream honey sugar salt
""".split()
VERBS = """
guards carries follows watches covers touches crosses reaches passes enters
leaves finds loses keeps holds lifts drops throws catches pulls pushes turns
opens closes breaks repairs builds paints cleans washes dries burns cools
heats freezes melts cooks eats drinks tastes smells hears sees knows learns
teaches remembers forgets loves hates fears trusts doubts helps hurts heals
saves spends earns buys sells trades borrows lends steals hides shows
reveals explains describes draws writes reads prints copies counts measures
weighs cuts folds bends twists ties binds joins divides shares collects
gathers plants waters harvests feeds chases hunts traps frees rides drives
steers guides leads greets meets visits invites welcomes thanks blames
praises scolds warns threatens attacks defends conquers rules serves obeys
calls answers asks tells promises orders allows forbids blocks delays stops
starts finishes continues repeats changes improves spoils ruins rescues
wakes shakes rocks rolls spins bounces kicks strikes taps scratches polishes
decorates
""".split()

STOCK = FIRST + LAST + VALUE1 + VALUE2 + ADJECTIVES + NOUNS + VERBS
WORDS = FRAME + STOCK
PATTERN = [ADJECTIVES, NOUNS, VERBS, ADJECTIVES, NOUNS]
MASK = (1 << 64) - 1


class Rng:
    """splitmix64."""

    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, n):
        return self.next() % n

    def choice(self, items):
        return items[self.next() % len(items)]

    def sample(self, items, n):
        """n different items in random order."""
        pool = list(items)
        for i in range(n):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:n]


def filler(rng, n):
    """n words of meaningless sentences."""
    return [rng.choice(PATTERN[i % 5]) for i in range(n)]


def passage(rng, n, stock=None):
    """n words dealt from shuffled decks of the stock; every pair of neighbours is unique."""
    stock = stock or STOCK
    words, pairs, deck, last = [], set(), [], None
    while len(words) < n:
        if not deck:
            deck = rng.sample(stock, len(stock))
        word = deck.pop()
        if word != last and (last, word) not in pairs:
            pairs.add((last, word))
            words.append(word)
            last = word
    return words


def fact_words(fact):
    return ["the", "code", "of", fact[0], fact[1], "is", fact[2], fact[3], "."]


def question_words(fact):
    return ["question", "the", "code", "of", fact[0], fact[1], "is"]


FACT_TOKENS = len(fact_words("abcd"))


def make_document(rng, tokens, facts=FACTS):
    """(words, facts, places): a document of exactly `tokens` words.

    Each fact is a tuple (first name, last name, answer word 1, answer word 2); places holds
    the index of the first word of each fact.
    """
    groups = [rng.sample(group, facts) for group in (FIRST, LAST, VALUE1, VALUE2)]
    table = list(zip(*groups))
    room = tokens - 1 - FACT_TOKENS * facts
    if room < 0:
        raise ValueError("the document is too short for its facts")
    last_gap = max(room - tokens // 8, 0)
    gaps = sorted(rng.below(last_gap + 1) for _ in table)
    words, places, used = ["document"], [], 0
    for gap, fact in zip(gaps, table):
        words += filler(rng, gap - used)
        places.append(len(words))
        words += fact_words(fact)
        used = gap
    words += filler(rng, room - used)
    return words, table, places


def make_recital(rng, tokens, stock=None):
    """(prompt words, expected words) for a passage of `tokens` words."""
    body = passage(rng, tokens, stock)
    prompt = ["passage"] + body + ["end", "recite"] + body[:CUE_WORDS]
    return prompt, body[CUE_WORDS:] + ["end"]


def write(folder, name, text):
    with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
        f.write(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sub = parser.add_subparsers(dest="kind", required=True)
    doc = sub.add_parser("document", help="a document with facts, and questions about it")
    doc.add_argument("--tokens", type=int, default=16384, help="length of the document")
    doc.add_argument("--questions", type=int, default=20)
    doc.add_argument("--facts", type=int, default=FACTS, help="facts in the document")
    rec = sub.add_parser("recital", help="a passage to be recited")
    rec.add_argument("--tokens", type=int, default=2048, help="length of the passage")
    for p in (doc, rec):
        p.add_argument("--seed", type=int, default=1)
        p.add_argument("--out", required=True, help="folder to write to")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    rng = Rng(args.seed)
    if args.kind == "document":
        if args.questions > args.facts:
            parser.error("there are more questions than facts")
        if not 0 < args.facts <= min(map(len, (FIRST, LAST, VALUE1, VALUE2))):
            parser.error("too many facts, or none")
        words, facts, _ = make_document(rng, args.tokens, args.facts)
        asked = rng.sample(facts, args.questions)
        questions = [{"question": " ".join(question_words(f)), "answer": f[2] + " " + f[3]}
                     for f in asked]
        write(args.out, "document.txt", " ".join(words) + "\n")
        write(args.out, "questions.txt", "".join(q["question"] + "\n" for q in questions))
        write(args.out, "questions.json", json.dumps(questions, indent=1) + "\n")
    else:
        prompt, expected = make_recital(rng, args.tokens)
        write(args.out, "prompt.txt", " ".join(prompt) + "\n")
        write(args.out, "expected.txt", " ".join(expected) + "\n")


if __name__ == "__main__":
    main()
