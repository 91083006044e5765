# SPDX-License-Identifier: Apache-2.0
"""How much context three models have on cards of 8 to 141 GB: the table of docs/gpu.md.

    python -m kvferry._cards [NAME=VALUE ...]

One request on an engine with kvferry, by the function under `kvferry plan`: how long it may be, how much of it stays
on the card, and the host memory of its pages. Names are settings of a cache. Activations and graphs are estimated as
`kvferry plan --vllm` does. Reserves nothing.
"""
import sys
from typing import Any, Dict, List, NamedTuple, Optional

from . import Runtime
from ._errors import Error, Invalid, OutOfMemory
from ._planner import GIB, Model, Plan, budget_of, plan, shape_of
from .vllm import estimate, options
from .vllm.memory import Asked, Card

CARDS = (8, 12, 16, 24, 32, 48, 80, 141) # GB, as they are sold
SHARE = 0.92 # of a card that an engine takes
PASS = 2048 # tokens
CONTEXT = 131072 # tokens, of which host memory is told
STEP = 8192 # to which a context is rounded down
ROOM = 9 / 8 # of host memory: what pages of the longest request take, and blocks that are begun
QUARTER = 4.5 / 8 # bytes of a number in 4 bits, with its scale; embeddings and the last product stay in bf16
PAGES = ("bf16", "k8v8", "k8v4")


class Known(NamedTuple):
    """A model, as its config.json has it."""
    name: str
    shape: estimate.Model
    layers: int # with those that keep a state of one size
    states: int = 0 # bytes of these, of a request

    def weights(self, in_four_bits: bool) -> int:
        """Bytes."""
        plain = 2 * self.shape.vocabulary * self.shape.hidden
        return int((self.shape.weights - plain) * QUARTER) + 2 * plain if in_four_bits else 2 * self.shape.weights


MODELS = (
    Known("8B", estimate.Model(Model(32, 32, 8, 128, 131072), 4096, 14336, 128256, 8_030_000_000), 32),
    Known("14B", estimate.Model(Model(40, 40, 8, 128, 131072), 5120, 17408, 151936, 14_770_000_000), 40),
    Known("27B hybrid", estimate.Model(Model(16, 24, 4, 256, 262144), 5120, 17408, 248320, 27_000_000_000), 64,
          48 * 48 * 128 * 128 * 4))


def left_on(card: int, model: Known, in_four_bits: bool) -> int:
    """Bytes beside weights, activations, graphs and states; less than 0 where those do not fit."""
    total, weights = options.bytes_of("gpu", "%dGB" % card), model.weights(in_four_bits)
    ahead = estimate.activations(model.shape, PASS, 1) + estimate.graphs(model.shape, estimate.graph_sizes(1), model.layers)
    return Card(total, SHARE, total).left(total - weights, weights, weights, ahead + model.states)


def fitting(runtime: Runtime, model: Known, left: int, settings: Dict[str, Any]) -> Optional[Plan]:
    """The plan of the longest request that fits."""
    attention = model.shape.attention

    def attempt(tokens: int) -> Optional[Plan]:
        try:
            return plan(runtime, attention, Asked(int(ROOM * tokens * attention.token_bytes), 1, tokens, left=left), settings)
        except OutOfMemory:
            return None
    best: Optional[Plan] = None
    few, many = 0, attention.tokens // STEP
    while few < many and left > 0:
        middle = (few + many + 1) // 2
        found = attempt(middle * STEP)
        few, many, best = (middle, many, found) if found else (few, middle - 1, best)
    return best


def short(tokens: int) -> str:
    """In thousands."""
    return "%dK" % (tokens >> 10)


def cell(p: Optional[Plan]) -> str:
    """The context, and what of it stays on the card."""
    return "-" if p is None else "%s, %s" % (short(p.load.tokens), short(min(p.load.tokens, p.resident_tokens)))


def lines(settings: Dict[str, Any]) -> List[str]:
    """Both tables, in Markdown."""
    kinds = [(model, four) for model in MODELS for four in (False, True)]
    told = ["| card | " + " | ".join("%s, %s" % (m.name, "4 bits" if four else "bf16") for m, four in kinds) + " |",
            "|---|" + "---|" * len(kinds)]
    with Runtime(device="host") as runtime:
        for card in CARDS:
            told.append("| %d GB | " % card + " | ".join(
                cell(fitting(runtime, m, left_on(card, m, four), settings)) for m, four in kinds) + " |")
        told += ["", "| host memory of 128K tokens | " + " | ".join(m.name for m in MODELS) + " |",
                 "|---|" + "---|" * len(MODELS)]
        for pages in PAGES:
            told.append("| `pages=%s` | " % pages + " | ".join(host_of(runtime, m, pages) for m in MODELS) + " |")
    return told


def host_of(runtime: Runtime, model: Known, pages: str) -> str:
    """Host memory of 128K tokens."""
    if pages != "bf16" and model.shape.attention.head_dim not in (64, 128, 192):
        return "not on a GPU" # which dequantizes no other heads
    budget = budget_of(runtime, shape_of(model.shape.attention, {"pages": pages}), CONTEXT, 32)
    return "%.1f GiB" % (CONTEXT * budget.token_bytes / GIB)


def main(words: List[str]) -> None:
    """Print them."""
    if set(words) & {"--help", "-h"}:
        print(__doc__)
        return
    if not all("=" in word for word in words):
        raise Invalid("give settings as NAME=VALUE: %s" % " ".join(words))
    print("\n".join(lines(options.read(dict(word.split("=", 1) for word in words), {}).cache)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Error as error:
        sys.exit("kvferry._cards: %s" % error)
