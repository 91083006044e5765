# SPDX-License-Identifier: Apache-2.0
"""What the rows of a pass attend to: the budget, or everything.

A row that goes on by one token selects within the budget. Tokens of a prompt, and candidates with the
token before them, attend to all that comes before. Imports nothing of vLLM. Invariant: every row with
tokens is in one run, and rows of a run lie side by side, as many as a call takes.
"""
from typing import List, NamedTuple, Optional


class Run(NamedTuple):
    """Rows side by side that attend alike."""
    row: int # the first
    starts: List[int] # first token of each in the pass, and the end of the last
    contexts: Optional[List[int]] # tokens before them; None = a token each, within the budget

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.starts) - 1


def runs_of(starts: List[int], lengths: List[int], prompts: List[bool], most: int) -> List[Run]:
    """Runs of a pass; rows without tokens, which only fill it up, are left out.

    starts    first token of every row, and the end of the last
    lengths   tokens of every row with those of this pass
    prompts   whether a row has tokens of its prompt
    most      rows of a run
    """
    runs: List[Run] = []
    for row, is_prompt in enumerate(prompts):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        is_step = end - start == 1 and not is_prompt
        last = runs[-1] if runs else None
        if (last is None or last.row + last.rows != row or (last.contexts is None) != is_step
                or last.rows == most):
            last = Run(row, [start], None if is_step else [])
            runs.append(last)
        last.starts.append(end)
        if last.contexts is not None:
            last.contexts.append(lengths[row] - (end - start))
    return runs
