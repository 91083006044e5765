# SPDX-License-Identifier: Apache-2.0
"""The tokens that rows of a pass attend to: the budget, or everything.

A row that goes on by one token selects within the budget, and so does each candidate of a draft, as a row
of its own. Tokens of a prompt attend to all that comes before. Imports nothing of vLLM. Invariant: every
row with tokens is in one run, and rows of a run lie side by side, as many as a call takes.
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

    @property
    def is_first(self) -> bool:
        """Whether they attend to their tokens of this pass alone."""
        return self.contexts is not None and not any(self.contexts)


class Rows(NamedTuple):
    """Rows of a pass, as `runs_of` takes them, and where they come from."""
    starts: List[int]
    lengths: List[int]
    prompts: List[bool]
    of: List[int] # rows of the batch
    number: List[int] # among those that come from it
    behind: List[int] # tokens of it in this pass that come later


def part(starts: List[int], lengths: List[int], prompts: List[bool], drafts: int) -> Rows:
    """A row of the batch that goes on by a token and at most so many candidates becomes a row for each."""
    count = len(prompts)
    if not drafts:
        return Rows(starts[:count + 1], lengths[:count], prompts, list(range(count)), [0] * count, [0] * count)
    rows = Rows([starts[0]], [], [], [], [], [])
    for row, is_prompt in enumerate(prompts):
        tokens = starts[row + 1] - starts[row]
        each = range(tokens - 1, -1, -1) if not is_prompt and 1 < tokens <= 1 + drafts else [0]
        for number, behind in enumerate(each):
            rows.starts.append(starts[row + 1] - behind)
            rows.lengths.append(lengths[row] - behind)
            rows.prompts.append(is_prompt)
            rows.of.append(row)
            rows.number.append(number)
            rows.behind.append(behind)
    return rows


def runs_of(starts: List[int], lengths: List[int], prompts: List[bool], most: int,
            apart: bool = False) -> List[Run]:
    """Runs of a pass; rows without tokens, which only fill it up, are left out.

    starts    first token of every row, and the end of the last
    lengths   tokens of every row with those of this pass
    prompts   whether a row has tokens of its prompt
    most      rows of a run
    apart     whether rows without context are in runs of their own
    """
    runs: List[Run] = []
    for row, is_prompt in enumerate(prompts):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        is_step, context = end - start == 1 and not is_prompt, lengths[row] - (end - start)
        last = runs[-1] if runs else None
        if (last is None or last.row + last.rows != row or (last.contexts is None) != is_step
                or last.rows == most or apart and last.contexts and (not last.contexts[0]) != (not context)):
            last = Run(row, [start], None if is_step else [])
            runs.append(last)
        last.starts.append(end)
        if last.contexts is not None:
            last.contexts.append(context)
    return runs
