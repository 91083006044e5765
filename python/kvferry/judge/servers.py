# SPDX-License-Identifier: Apache-2.0
"""Servers of any engine that speak OpenAI's interface, asked by the standard library's HTTP.

Knows the interface, and of two engines what it does not have: counters of kvferry in vLLM's /metrics and in what
llama-server writes, and that one's own way to go on by one token. Questions of a document are asked one after the
other, so that what the server keeps of a prefix serves all of them.
"""
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from .record import Refused
from .tasks import Document, Task

TOP = 20 # likeliest tokens that are compared
TRIES, WAIT_SECONDS, LIMIT_SECONDS = 3, 2.0, 3600.0
EXACT_CHARS = 6000 # of a longer text the number of tokens is estimated, where a server only counts what it answers
COUNTERS = {"selected": "request_selected_tokens_sum", "steps": "steps_total", "heads": "heads_verified_total",
            "recall": "recall_total"}
ANOTHER_TOKENS = 4 # of a request after which the one before is counted: a pass for each stage of a pipeline
LOG_END = 1 << 14 # bytes of a log, in which the latest summary is
NO_STEPS = ("given text is a prompt to this server, which it reads densely whatever the budget; Transformers, the "
            "command and llama-server take it token by token")


class Stopped(Exception):
    """Who was asked does not answer any more."""


class Cannot(Exception):
    """Why an engine has no such row."""


class Missing(Cannot):
    """The server does not have it, or not for everybody."""


class Server:
    """One of them.

    url    with /v1
    name   of the model; the first one that the server has
    chat   questions are messages
    log    the file that a llama-server with kvferry writes
    """

    def __init__(self, url: str, name: Optional[str] = None, key: str = "", chat: bool = False,
                 log: Optional[str] = None) -> None:
        self.url, self.chat, self.key, self.log = url.rstrip("/"), chat, key, log
        self.root = re.sub(r"/v\d+$", "", self.url)
        self.model = name or self._first_model()
        self.counts: Dict[str, int] = {}
        self.is_llama = self._has("/props")

    def describe(self) -> str:
        """For readers."""
        return "%s at %s" % (self.model, self.url)

    # -- HTTP --

    def send(self, address: str, body: Optional[dict] = None) -> Any:
        """The answer, of JSON or as text. A server that is busy or gone is asked again before that counts."""
        headers = {"Content-Type": "application/json", **({"Authorization": "Bearer " + self.key} if self.key else {})}
        data = None if body is None else json.dumps(body).encode()
        for left in reversed(range(TRIES)):
            try:
                with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=LIMIT_SECONDS) as f:
                    text = f.read().decode("utf-8", "replace")
                    return json.loads(text) if "json" in (f.headers.get("Content-Type") or "") else text
            except urllib.error.HTTPError as error:
                said = error.read().decode("utf-8", "replace")[:300]
                if error.code in (401, 403, 404, 405):
                    raise Missing("%s answers %d: %s" % (address, error.code, said)) from error
                if error.code < 500 and error.code != 429:
                    raise Cannot("%s answers %d: %s" % (address, error.code, said)) from error
                why: Exception = Stopped("%s answers %d: %s" % (address, error.code, said))
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = Stopped("%s does not answer: %s" % (address, error))
            if left:
                time.sleep(WAIT_SECONDS)
        raise why

    def _first_model(self) -> str:
        try:
            return self.send(self.url + "/models")["data"][0]["id"]
        except (Cannot, KeyError, IndexError, TypeError) as why:
            raise Refused("%s/models names no model: give the address with /v1, or --name" % self.url) from why

    def _has(self, path: str) -> bool:
        try:
            return isinstance(self.send(self.root + path), dict)
        except (Cannot, Stopped):
            return False

    # -- tokens --

    def count(self, texts: Sequence[str]) -> List[int]:
        """Tokens of each: the server's own count where it has one, of a short text what an answer says it took,
        of a longer one as much by character as of its end."""
        return [self._count(text) for text in texts]

    def _count(self, text: str) -> int:
        if not self.counts.get("no tokenizer"):
            body = {"content": text, "add_special": True} if self.is_llama else {"model": self.model, "prompt": text}
            try:
                said = self.send(self.root + "/tokenize", body)
                return said.get("count") or len(said["tokens"])
            except (Cannot, KeyError, AttributeError, Stopped):
                self.counts["no tokenizer"] = 1
        if len(text) > EXACT_CHARS:
            return 1 + self._count(text[-EXACT_CHARS:]) * len(text) // EXACT_CHARS
        if text not in self.counts:
            self.counts[text] = self.complete(text, 1)["usage"]["prompt_tokens"]
        return self.counts[text]

    # -- questions --

    def complete(self, text: str, tokens: int) -> Dict[str, Any]:
        """The server's answer, greedy."""
        body = {"model": self.model, "max_tokens": tokens, "temperature": 0, "seed": 0}
        if self.chat:
            return self.send(self.url + "/chat/completions", {**body, "messages": [{"role": "user", "content": text}]})
        try:
            return self.send(self.url + "/completions", {**body, "prompt": text})
        except Missing as why:
            raise Refused("%s; if the server takes messages alone, ask with --chat" % why) from why

    def _answer(self, text: str, task: Task) -> Dict[str, Any]:
        said = self.complete(text + task.text, task.tokens)
        choice = said["choices"][0]
        answer = (choice.get("message") or {}).get("content") if self.chat else choice.get("text")
        return {"answer": answer or "", "tokens": (said.get("usage") or {}).get("completion_tokens", 0)}

    def _tool(self, text: str, task: Task) -> Dict[str, Any]:
        said = self.send(self.url + "/chat/completions", {
            "model": self.model, "max_tokens": task.tokens, "temperature": 0, "seed": 0,
            "messages": [{"role": "user", "content": text + task.text}],
            "tools": [{"type": "function", "function": json.loads(task.answers[0])}]})
        calls = (said["choices"][0].get("message") or {}).get("tool_calls") or []
        return {"answer": json.dumps([{k: call["function"][k] for k in ("name", "arguments")} for call in calls]),
                "tokens": (said.get("usage") or {}).get("completion_tokens", 0)}

    def _likelihoods(self, text: str, task: Task) -> Dict[str, Any]:
        """A token at a time: all others are what the server has read, so this one is a decode step."""
        if not self.is_llama:
            raise Cannot(NO_STEPS)
        ids, more = (self.send(self.root + "/tokenize", {"content": some, "add_special": first})["tokens"]
                     for some, first in ((text, True), (task.text, False)))
        tops = []
        for count in range(min(task.tokens, len(more))):
            said = self.send(self.root + "/completion", {
                "prompt": ids + more[:count], "n_predict": 1, "n_probs": TOP, "temperature": 0, "cache_prompt": True})
            if count: # before it, the prompt was read
                tops.append([[t["id"], t["logprob"]] for t in said["completion_probabilities"][0]["top_logprobs"]])
        pieces = [self.send(self.root + "/detokenize", {"tokens": [one]})["content"] for one in more[1:1 + len(tops)]]
        return {"tops": tops, "pieces": pieces, "tokens": len(tops)}

    def ask(self, document: Document, which: Sequence[int], _: str) -> Iterator[Tuple[int, Dict[str, Any]]]:
        """(question, what was said), of these questions of a document."""
        for question in which:
            task, before = document.tasks[question], self._counters()
            ways = {"tool": self._tool, "text": self._likelihoods}
            result = ways.get(task.kind, self._answer)(document.text, task)
            yield question, {**result, "served": self._served(before, result["tokens"])}

    # -- what was served --

    def _counters(self) -> Dict[str, float]:
        """kvferry's, summed over ranks; none before the first pass, or of a server that has none."""
        if self.log:
            return self._summary(self.log)
        if self.counts.get("no counters"):
            return {}
        try:
            text = self.send(self.root + "/metrics")
        except (Cannot, Stopped):
            text = ""
        found: Dict[str, float] = {}
        for name, value in re.findall(r"^kvferry:(\w+)(?:\{[^}]*\})? ([-+.\deE]+)$", text if isinstance(text, str) else "", re.M):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    @staticmethod
    def _summary(path: str) -> Dict[str, float]:
        """The latest one that the plug-in wrote."""
        with open(path, "rb") as f:
            f.seek(max(0, os.path.getsize(path) - LOG_END))
            lines = re.findall(r"^kvferry: attended (.*)\n", f.read().decode("utf-8", "replace"), re.M)
        return {name: float(value) for name, value in (w.split("=") for w in lines[-1].split())} if lines else {}

    def _served(self, before: Dict[str, float], tokens: int) -> Optional[Dict[str, float]]:
        """Steps of an answer, by who attended. vLLM counts tokens that selected when a request has ended and another
        came, so one does. The plug-in of llama.cpp writes now and then, so its counts are those of the request before."""
        after, steps = self._counters(), max(tokens - 1, 0)
        if self.log:
            return self._of_summary({name: after[name] - before.get(name, 0.0) for name in after}, steps)
        if COUNTERS["steps"] not in after: # though there was an answer
            self.counts["no counters"] = 1
            return None
        self.complete(".", ANOTHER_TOKENS)
        after[COUNTERS["selected"]] = self._counters().get(COUNTERS["selected"], 0.0)
        more = {ours: after.get(name, 0.0) - before.get(name, 0.0) for ours, name in COUNTERS.items()}
        out = {"steps": steps, "selected": more["selected"], "elsewhere": 0 if more["steps"] else steps}
        return {**out, "heads": more["heads"], "recall": more["recall"]}

    @staticmethod
    def _of_summary(more: Dict[str, float], steps: int) -> Optional[Dict[str, float]]:
        """None = it wrote nothing since the question before."""
        ours, theirs = more.get("served", 0.0), more.get("stock", 0.0)
        if not ours + theirs:
            return None
        mine = steps * ours / (ours + theirs)
        return {"steps": steps, "selected": mine if more["tokens"] < more["held"] else 0, "elsewhere": steps - mine,
                "heads": 0, "recall": 0}
