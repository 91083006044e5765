#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train small tokenizers of each family's kind and write what HF `tokenizers` does with hostile text.

usage: make_tokenizer_goldens.py [--check | NAME...]     needs the `tokenizers` package, no network

Reads goldens/fragments.txt: one JSON string per line, of which hostile strings are made. First come words,
then contractions, white space, control characters, emoji and joiners, combining marks, digits, letters at
the edges of classes, complex scripts and the last planes, what looks like broken UTF-8, the byte alphabet,
punctuation and code, and special tokens, whole, broken and nested. Writes into goldens/:
  assigned.txt           ranges of code points that Unicode 14 assigns, see below
  NAME.tokenizer.json    a tokenizer: the pipeline of a published family with a vocabulary trained here
  NAME.txt               for STRINGS strings: ids of the first FULL of them, then one hash for every
                         GROUP strings, over ids and decoded text

The strings themselves are not written: test_tokenizer.c makes the same ones from the fragments with
the same generator (splitmix64). Strings hold only code points that Unicode 14 assigns, because the
engines come with different Unicode versions: PCRE2 10.42 has 14, utf8proc 2.8 has 15, Oniguruma in
tokenizers 0.23 has 16. On the code points of 14 all three agree, U+180E in \\s excepted, which
regex_split.c takes care of. The NFC of tokenizers 0.23 knows no mark younger than Unicode 9: the 98
marks that it does not move are left out too, and with them the one composition that it lacks.

--check encodes the strings again with the tokenizers in goldens/ and compares instead of writing.
"""
import json
import os
import sys
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "goldens")
STRINGS, GROUP, FULL = 10240, 16, 24
SEED = 20261121
MASK = (1 << 64) - 1

with open(os.path.join(HERE, "fragments.txt"), encoding="utf-8") as _f:
    FRAGMENTS = [json.loads(line) for line in _f]
WORDS = FRAGMENTS[:FRAGMENTS.index("'s")]


class Splitmix:
    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        return z ^ z >> 31

    def below(self, n):
        return self.next() % n


def is_known(code, nfc=normalizers.NFC()):
    """Whether Unicode 14 assigns it and HF's NFC orders and composes it as Unicode 14 does."""
    c = chr(code)
    if unicodedata.category(c) in ("Cn", "Cs") or code in (0x11930, 0x11935):
        return False
    if unicodedata.combining(c) in (0, 240):
        return True
    return nfc.normalize_str("\u0345" + c)[-1] == "\u0345"  # class 240, the last of all


def assigned_ranges():
    ranges = []
    for code in range(0x110000):
        if not is_known(code):
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return ranges


def make_piece(rng, ranges):
    kind = rng.below(16)
    if kind < 7:
        return FRAGMENTS[rng.below(len(FRAGMENTS))]
    if kind < 8:
        return " " + FRAGMENTS[rng.below(len(FRAGMENTS))]
    if kind < 10:
        low, high = ranges[rng.below(len(ranges))]
        return chr(low + rng.below(high - low + 1))
    if kind == 10:
        fragment = FRAGMENTS[rng.below(len(FRAGMENTS))]
        return fragment * (2 + rng.below(20))
    if kind == 11:
        return "".join(chr(0x20 + rng.below(0x5F)) for _ in range(1 + rng.below(12)))
    if kind == 12:
        return "".join(chr(0x30 + rng.below(10)) for _ in range(1 + rng.below(9)))
    if kind == 13:
        return "".join(" \t\n\r"[rng.below(4)] for _ in range(1 + rng.below(6)))
    if kind == 14:
        return "".join(chr(0x61 + rng.below(26)) for _ in range(1 + rng.below(14)))
    base = chr(0x61 + rng.below(26))
    return base + "".join(chr(0x300 + rng.below(0x70)) for _ in range(1 + rng.below(6)))


def make_string(index, ranges, seed=SEED):
    rng = Splitmix(seed ^ (index * 0xD1342543DE82EF95 & MASK))
    text = "".join(make_piece(rng, ranges) for _ in range(1 + rng.below(12)))
    if index % 512 == 511:
        text = make_piece(rng, ranges) * (100 + rng.below(900)) + text
    return text


def hash_bytes(h, data):
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & MASK
    return h


def hash_result(h, ids, plain, skipped):
    for i in ids:
        h = (h ^ i) * 0x100000001B3 & MASK
    h = (h ^ 0xFFFFFFFF) * 0x100000001B3 & MASK
    h = hash_bytes(h, plain.encode())
    h = (h ^ 0xFFFFFFFF) * 0x100000001B3 & MASK
    return hash_bytes(h, skipped.encode())


# ------------------------------------------------------------------------------- tokenizers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
LLAMA3 = (CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + r"+|[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER
          + r"*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


def bos(token, token_id):
    template = processors.TemplateProcessing(single=token + " $A", pair=None,
                                             special_tokens=[(token, token_id)])
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def special(*texts):
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def train_bpe(pre_tokenizer, corpus, vocab_size=1400, normalizer=None, first=()):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(first),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def edited(tokenizer, edit):
    data = json.loads(tokenizer.to_str())
    edit(data)
    return Tokenizer.from_str(json.dumps(data)), data


def llama3(corpus):
    tokenizer = train_bpe(byte_level(LLAMA3), corpus)
    tokenizer.add_special_tokens(special(
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))
    tokenizer.post_processor = bos("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))

    def edit(data):
        model = data["model"]
        parts = {p for merge in model["merges"] for p in merge}
        leaves = [m for m in model["merges"] if "".join(m) not in parts]
        for merge in leaves[::3]:  # tokens that only ignore_merges can reach
            model["merges"].remove(merge)
        model["ignore_merges"] = True
        model["merges"] = [" ".join(m) for m in model["merges"]]  # the older spelling
    return edited(tokenizer, edit)


def qwen2(corpus):
    tokenizer = train_bpe(byte_level(QWEN2), corpus, normalizer=normalizers.NFC())
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False)
                          for t in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    return edited(tokenizer, lambda data: None)


def tekken(corpus):
    tokenizer = train_bpe(byte_level(TEKKEN), corpus,
                          first=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    tokenizer.post_processor = bos("<s>", 1)
    return edited(tokenizer, lambda data: data["model"].update(ignore_merges=True))


def gpt2(corpus):
    """ByteLevel and added tokens where the three above do not use them."""
    tokenizer = train_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True), corpus,
                          normalizer=normalizers.Sequence([normalizers.NFC()]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=[("<s>", 1400), ("</s>", 1401)])
    tokenizer.add_special_tokens(special("<s>", "</s>"))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=False, normalized=False),
                                  AddedToken("<sp>", lstrip=False, rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("\u1e63_tok", normalized=True),
                          AddedToken("\u1e62AFE", normalized=True, lstrip=True, rstrip=True),
                          AddedToken("...", normalized=True), AddedToken("....", normalized=True)])
    return edited(tokenizer, lambda data: None)


def words(corpus):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"],
                                        show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return edited(tokenizer, lambda data: None)


FAMILIES = {"llama3": llama3, "qwen2": qwen2, "tekken": tekken, "gpt2": gpt2, "words": words}


def make_corpus(ranges):
    rng = Splitmix(7)
    for index in range(1500):
        yield make_string(index * 512, ranges, seed=99)
        yield " ".join(WORDS[rng.below(len(WORDS))] for _ in range(4 + rng.below(16)))


def results(tokenizer, ranges):
    lines, h = [], 0
    for index in range(STRINGS):
        text = make_string(index, ranges)
        ids = tokenizer.encode(text, add_special_tokens=index % 2 == 0).ids
        h = hash_result(0xCBF29CE484222325 if index % GROUP == 0 else h, ids,
                        tokenizer.decode(ids, skip_special_tokens=False),
                        tokenizer.decode(ids, skip_special_tokens=True))
        if index < FULL:
            lines.append("ids " + " ".join(map(str, ids)))
        if index % GROUP == GROUP - 1:
            lines.append("hash %016x" % h)
    return lines


def write(name, text):
    with open(os.path.join(HERE, name), "w", encoding="utf-8", newline="\n") as f:
        f.write(text)


def check(ranges):
    wrong = 0
    for name in FAMILIES:
        tokenizer = Tokenizer.from_file(os.path.join(HERE, name + ".tokenizer.json"))
        with open(os.path.join(HERE, name + ".txt"), encoding="utf-8") as f:
            same = f.read().split("\n")[1:-1] == results(tokenizer, ranges)
        print("%s: %s" % (name, "same" if same else "DIFFERENT"))
        wrong += not same
    return wrong > 0


def main():
    ranges = assigned_ranges()
    if sys.argv[1:] == ["--check"]:
        return check(ranges)
    write("assigned.txt", "".join("%x-%x\n" % (a, b) for a, b in ranges))
    for name in sys.argv[1:] or FAMILIES:
        build = FAMILIES[name]
        tokenizer, data = build(make_corpus(ranges))
        write(name + ".tokenizer.json",
              json.dumps(data, ensure_ascii=True, separators=(",", ":")) + "\n")
        lines = results(tokenizer, ranges)
        write(name + ".txt", "# tokenizers %s, Unicode %s, %d strings, a hash for every %d\n%s\n"
              % (tokenizers.__version__, unicodedata.unidata_version, STRINGS, GROUP, "\n".join(lines)))
        print("%s: %d tokens" % (name, tokenizer.get_vocab_size()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
