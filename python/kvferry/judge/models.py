# SPDX-License-Identifier: Apache-2.0
"""A model of Transformers, asked in this process: full attention and every budget on the same weights.

Knows torch, Transformers and `kvferry.hf`. Caches go on from what two prompts have in common. Answers are
greedy, a pass for each token. A side is "full", which is the cache and the attention of Transformers, or a budget
with settings of the cache by name: "1024+5% local_tokens=32".
"""
import os
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from .record import FULL
from .servers import TOP, Cannot
from .tasks import Document, Task

SPARE = 512 # tokens of room, for a longer question of the same document


def settings_of(side: str) -> Dict[str, Any]:
    """1024+5% is at least that share of the context."""
    budget, *more = side.split()
    tokens, _, share = budget.partition("+")
    out: Dict[str, Any] = {"budget_tokens": int(tokens)}
    if share:
        out["budget_share"] = float(share.rstrip("%")) / 100
    for name, _, value in (one.partition("=") for one in more):
        out[name] = int(value) if value.isdigit() else value
    return out


class Model:
    """A folder with a model.

    verify   every so many steps are compared with dense attention; 0 = none
    """

    def __init__(self, folder: str, verify: int) -> None:
        import torch
        import transformers
        from .. import hf
        self.torch, self.hf, self.folder, self.verify = torch, hf, folder, verify
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kvferry", dtype="auto")
        self.model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.full = transformers.DynamicCache
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.caches: Dict[str, Tuple[Any, List[int], int]] = {} # by side: a cache, its tokens, and how many it takes

    def describe(self) -> str:
        """For readers."""
        return "Transformers, %s" % os.path.basename(self.folder.rstrip("/"))

    def ids(self, text: str) -> List[int]:
        """Tokens of a prompt."""
        return self.tokenizer(text).input_ids

    def count(self, texts: Sequence[str]) -> List[int]:
        """Tokens of each."""
        return [len(self.ids(text)) for text in texts]

    # -- passes --

    def _new(self, side: str, room: int) -> Any:
        """A cache without tokens."""
        if side == FULL:
            return self.full(config=self.model.config)
        return self.hf.Cache(self.model, tokens_max=room, verify_interval=self.verify, **settings_of(side))

    def _cache(self, side: str, ids: List[int], more: int) -> Tuple[Any, int]:
        """A cache with room for the tokens and more, and how many of them it holds; all but one, at most."""
        room = len(ids) + more + 1
        cache, held, had = self.caches.pop(side, (None, [], 0))
        same = next((i for i, (a, b) in enumerate(zip(held, ids[:-1])) if a != b), min(len(held), len(ids) - 1))
        if cache is None or room > had or same < len(held) // 2:
            if hasattr(cache, "close"):
                cache.close()
            had, same, cache = room + SPARE, 0, self._new(side, room + SPARE)
        elif same < len(held):
            cache.crop(same - len(held))
        self.caches[side] = cache, [], had # until it has them
        return cache, same

    def _keep(self, side: str, ids: List[int]) -> None:
        cache, _, room = self.caches[side]
        self.caches[side] = cache, ids, room

    def _pass(self, cache: Any, ids: List[int]) -> Any:
        """Log-probabilities of the token that comes next."""
        given = self.torch.tensor([ids], device=self.model.device)
        logits = self.model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        return logits.float().log_softmax(-1)

    def _top(self, next_token: Any) -> List[List[float]]:
        values, ids = next_token.topk(TOP)
        return [list(pair) for pair in zip(ids.tolist(), values.tolist())]

    # -- questions --

    def _answer(self, document: Document, task: Task, side: str) -> Dict[str, Any]:
        ids = self.ids(document.text + task.text)
        cache, same = self._cache(side, ids, task.tokens)
        before, said, fed = self._counters(cache), [], ids[same:] # type: Any, List[int], List[int]
        while True:
            said.append(int(self._pass(cache, fed).argmax()))
            if said[-1] in self.ends or len(said) == task.tokens:
                break
            fed = said[-1:]
        self._keep(side, ids + said[:-1])
        return {"answer": self.tokenizer.decode(said, skip_special_tokens=True), "tokens": len(said),
                "served": self._served(before, cache, len(said) - 1)}

    def _likelihoods(self, document: Document, task: Task, side: str) -> Dict[str, Any]:
        ids, more = self.ids(document.text), self.tokenizer(task.text, add_special_tokens=False).input_ids[:task.tokens]
        cache, same = self._cache(side, ids, len(more))
        self._pass(cache, ids[same:])
        before = self._counters(cache)
        tops = [self._top(self._pass(cache, [one])) for one in more[:-1]]
        self._keep(side, ids + more[:-1])
        return {"tops": tops, "pieces": [self.tokenizer.decode([one]) for one in more[1:]], "tokens": len(more),
                "served": self._served(before, cache, len(tops))}

    def ask(self, document: Document, which: Sequence[int], side: str) -> Iterator[Tuple[int, Dict[str, Any]]]:
        """(question, what was said), of these questions of a document."""
        for question in which:
            task = document.tasks[question]
            if task.kind == "tool":
                raise Cannot("only servers take tools")
            with self.torch.inference_mode():
                yield question, (self._likelihoods if task.kind == "text" else self._answer)(document, task, side)

    # -- what was served --

    def _counters(self, cache: Any) -> Dict[str, float]:
        return cache.stats() if hasattr(cache, "stats") else {}

    def _served(self, before: Dict[str, float], cache: Any, steps: int) -> Dict[str, float]:
        """Steps of an answer, by who attended: they selected if they attended to less than there was."""
        after = self._counters(cache)
        more = {k: after[k] - before.get(k, 0) for k in ("steps", "tokens_attended", "tokens_held", "verified",
                                                         "recall_sum")} if after else {}
        is_ours = more.get("steps", 0) > 0
        return {"steps": steps, "selected": steps if is_ours and more["tokens_attended"] < more["tokens_held"] else 0,
                "elsewhere": 0 if is_ours else steps, "heads": more.get("verified", 0), "recall": more.get("recall_sum", 0)}
