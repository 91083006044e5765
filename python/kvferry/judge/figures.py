# SPDX-License-Identifier: Apache-2.0
"""Scores, intervals and distances, of numbers and texts alone.

Intervals hold 95%: for what is compared with full attention a bootstrap over documents, whose questions hang
together, with a fixed seed.
"""
import bisect
import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from .texts import Random

DRAWS = 2000
JUDGED = 0.2 # full attention's least score: what it cannot do itself says little of selections
GRAM = 4 # words that are said again
Interval = Tuple[Optional[float], Optional[float]]


def mean(scores: Sequence[Sequence[float]]) -> float:
    """Over all questions of all documents."""
    return sum(map(sum, scores)) / sum(map(len, scores))


def interval_of(values: Sequence[float]) -> Interval:
    """Bounds of 95% of the values that were drawn."""
    values = sorted(values)
    return (values[int(0.025 * len(values))], values[int(0.975 * len(values)) - 1]) if values else (None, None)


def bootstrap(count: int, figure: Callable[[List[int]], Optional[float]]) -> Interval:
    """The interval of figure(indexes) over draws with replacement."""
    r, values = Random(11), []
    for _ in range(DRAWS):
        value = figure([r.below(count) for _ in range(count)])
        if value is not None:
            values.append(value)
    return interval_of(values)


def kept(mine: Sequence[float], full: Sequence[float]) -> Tuple[Optional[float], Interval]:
    """Scores of documents as a share of full's, with its interval."""
    def share(at: Sequence[int]) -> Optional[float]:
        total = sum(full[i] for i in at)
        return sum(mine[i] for i in at) / total if total else None

    everything = range(len(full))
    return share(everything), bootstrap(len(full), share)


def without_a_change(documents: int) -> Interval:
    """The interval of the share kept where no answer changed, of which draws say nothing: in fewer than 5 of 100 cases
    do so many documents show no loss where more than three in as many lose (the rule of three)."""
    return max(0.0, 1 - 3 / documents), 1.0


def outcomes(mine: Sequence[Sequence[float]], full: Sequence[Sequence[float]]) -> Tuple[int, int]:
    """Questions that score less than with full attention, and those that score more."""
    pairs = [pair for m, f in zip(mine, full) for pair in zip(m, f)]
    return sum(m < f for m, f in pairs), sum(m > f for m, f in pairs)


def divergence(full: Dict[Any, float], mine: Dict[Any, float]) -> float:
    """KL divergence in nats, of log-probabilities of the likeliest tokens of both.

    All tokens that one of them does not name count as one, so it is at most that of all tokens.
    """
    p = {token: math.exp(x) for token, x in full.items() if token in mine}
    q = {token: math.exp(mine[token]) for token in p}
    rest_p, rest_q = (max(1 - sum(some.values()), 1e-9) for some in (p, q))
    return max(0.0, sum(p[t] * (full[t] - mine[t]) for t in p) + rest_p * math.log(rest_p / rest_q))


def likeliest(one: Dict[Any, float]) -> Any:
    """The token that greedy decoding takes."""
    return max(one, key=lambda token: one[token])


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that such a share of them does not exceed."""
    values = sorted(values)
    return values[max(0, math.ceil(share * len(values)) - 1)]


def first_difference(full: str, mine: str) -> Optional[int]:
    """Words before the first one that differs; None = there is none."""
    a, b = full.split(), mine.split()
    same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return None if len(a) == len(b) == same else same


def repetition(text: str) -> float:
    """The share of GRAM words in a row that were said before."""
    words = text.split()
    grams = [tuple(words[i:i + GRAM]) for i in range(len(words) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def foresight(measure: Sequence[float], lost: Sequence[bool]) -> Optional[float]:
    """How well a low measure tells which documents lost answers: the share of pairs, one that lost and one that did
    not, in which it is lower (the area under the ROC curve; 0.5 = chance). None = there is no such pair."""
    of_lost, others = (sorted(x for x, is_lost in zip(measure, lost) if is_lost == wanted) for wanted in (True, False))
    if not of_lost or not others:
        return None
    above = sum(2 * len(others) - bisect.bisect_left(others, x) - bisect.bisect_right(others, x) for x in of_lost)
    return above / (2 * len(of_lost) * len(others))
