# SPDX-License-Identifier: Apache-2.0
"""The table of cards: docs/gpu.md has what the command prints, and a larger card never has less."""
import pathlib
import re
import unittest

from kvferry import _cards as cards

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


def tokens(cell):
    """The context of a cell, and what stays on the card."""
    return [int(n) for n in re.findall(r"(\d+)K", cell)] or [0, 0]


class Cards(unittest.TestCase):
    def test_the_page_has_what_the_command_prints(self):
        printed = cards.lines({})
        page = PAGE.read_text(encoding="utf-8")
        for line in filter(None, printed):
            self.assertIn(line + "\n", page)
        rows = [line.strip("| ").split(" | ")[1:] for line in printed[2:2 + len(cards.CARDS)]]
        for smaller, larger in zip(rows, rows[1:]):
            for few, many in zip(smaller, larger):
                self.assertLessEqual(tokens(few), tokens(many))
        self.assertEqual(rows[0].count("-"), 5) # 8 GB hold an 8B model in 4 bits alone

    def test_weights_that_do_not_fit(self):
        eight = cards.MODELS[0]
        self.assertLess(cards.left_on(16, eight, False), 0)
        self.assertGreater(cards.left_on(24, eight, False), 0)
        self.assertLess(eight.weights(True), eight.weights(False) / 2)


if __name__ == "__main__":
    unittest.main()
