# SPDX-License-Identifier: Apache-2.0
"""The other end of prune_probe's pipe, and how sets of tokens are compared.

Knows the commands of prune_probe.c and no policy. Sets are equal, or they differ only in tokens
whose scores are so close to the border that rounding may decide; the caller says how close, and 0
where the numbers are the same bits on both sides.
"""
import subprocess
import sys

import numpy as np


class Answer:
    """What a policy said of a layer; None stands for all tokens."""

    def __init__(self, keep, propagate, restart, chosen):
        self.keep = keep
        self.propagate = propagate
        self.restart = restart
        self.chosen = chosen


class Probe:
    def __init__(self, program):
        self.pipe = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.kv_heads = 0

    def ask(self, line, *arrays):
        self.pipe.stdin.write(line.encode() + b"\n")
        for a in arrays:
            self.pipe.stdin.write(np.ascontiguousarray(a).tobytes())
        self.pipe.stdin.flush()
        return self.line()

    def line(self):
        line = self.pipe.stdout.readline()
        if not line:
            sys.exit("prune_probe ended: status %d" % self.pipe.wait())
        return line.decode().rstrip("\n")

    def ids(self):
        return [int(x) for x in self.line().split()]

    def must(self, line):
        answer = self.ask(line)
        if answer != "ok":
            sys.exit("%s: %s" % (line, answer))

    def policy(self, name, settings, shape):
        """shape: layers, KV heads, query heads, the longest prompt."""
        self.must("policy " + name)
        for field, value in settings.items():
            self.pipe.stdin.write(("set %s %s\n" % (field, value)).encode())
        self.must("shape %d %d %d %d" % shape)
        self.kv_heads = shape[1]

    def answer(self, first, tokens):
        word, *numbers = first.split()
        if word != "answer":
            sys.exit("prune_probe: " + first)
        kept, passed, restart, chosen = (int(x) for x in numbers)
        keep = [self.ids() for _ in range(self.kv_heads)] if kept < tokens else None
        propagate = self.ids() if passed < tokens else None
        return Answer(keep, propagate, restart, chosen)

    def decide(self, layer, tokens, prompt, scores, turn=0):
        """scores [kv_heads, candidates], or None if nothing was measured."""
        columns = 0 if scores is None else scores.shape[1]
        data = [] if scores is None else [scores.astype(np.float32)]
        first = self.ask("decide %d %d %d %d %d" % (layer, tokens, prompt, turn, columns), *data)
        return self.answer(first, tokens)

    def layer(self, layer, q, k, v, positions):
        tokens = q.shape[0]
        data = [q.astype(np.float32), k.astype(np.float32), v.astype(np.float32),
                positions.astype(np.uint32)]
        return self.answer(self.ask("layer %d %d" % (layer, tokens), *data), tokens)

    def close(self):
        self.pipe.stdin.close()
        if self.pipe.wait() != 0:
            sys.exit("prune_probe: status %d" % self.pipe.returncode)


class Tally:
    """Counts comparisons; the first difference ends the test."""

    def __init__(self):
        self.equal = 0
        self.border = 0

    def sets(self, what, got, wanted, score, near):
        """got, wanted: ascending ids or None; score: of every token that could be left out."""
        if (got is None) != (wanted is None):
            sys.exit("%s: %s, the definition says %s" % (what, short(got), short(wanted)))
        if got is None or got == wanted:
            self.equal += 1
            return
        if len(got) != len(wanted):
            sys.exit("%s: %d tokens, the definition says %d" % (what, len(got), len(wanted)))
        if any(b <= a for a, b in zip(got, got[1:])):
            sys.exit("%s: %s does not ascend" % (what, short(got)))
        if score is None:
            sys.exit("%s: %s, the definition says %s" % (what, short(got), short(wanted)))
        only_got, only_wanted = set(got) - set(wanted), set(wanted) - set(got)
        for a, b in zip(sorted(score[list(only_got)]), sorted(score[list(only_wanted)])):
            if not near or not abs(a - b) <= near * max(abs(a), abs(b)):
                sys.exit("%s: takes %s, the definition %s; scores %.9g and %.9g"
                         % (what, sorted(only_got), sorted(only_wanted), a, b))
        self.border += 1


def short(ids):
    if ids is None:
        return "all tokens"
    return "%d tokens %s" % (len(ids), ids if len(ids) < 20 else ids[:20] + ["..."])
