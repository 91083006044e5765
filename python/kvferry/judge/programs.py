# SPDX-License-Identifier: Apache-2.0
"""The kvferry command, asked on a model: a document is read once, and every side goes on from it.

Knows options of `kvferry run` and `score`. Questions are read densely, as a prompt is, and answers are decode
steps. A side is "full", or a budget with settings of the cache by name: "1024+5% pages=k8v4".
"""
import json
import os
import subprocess
import tempfile
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from .record import FULL, Refused
from .servers import TOP, Cannot, Stopped
from .tasks import Document, Task

OPTIONS = {"sink_tokens": "sink", "local_tokens": "local", "budget_tokens": "budget"} # others have the setting's name


class Program:
    """The command on a model.

    verify   every so many steps are compared with dense attention; 0 = none
    """

    def __init__(self, program: str, model: str, verify: int) -> None:
        self.program, self.model, self.verify = program, model, verify
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-judge-") # pylint: disable=consider-using-with
        self._held = None # the document that is saved

    def describe(self) -> str:
        """For readers."""
        return "kvferry run --model %s" % os.path.basename(self.model.rstrip("/"))

    def _path(self, name: str, text: Any = None) -> str:
        path = os.path.join(self._folder.name, name)
        if text is not None:
            with open(path, "w", encoding="utf-8", newline="") as f:
                f.write(text)
        return path

    def run(self, command: str, *options: str) -> str:
        """Standard output."""
        try:
            done = subprocess.run([self.program, command, "--model", self.model, *options], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        except OSError as why:
            raise Refused("--command %s: %s" % (self.program, why.strerror)) from why
        if done.returncode:
            line = (done.stderr.strip().split("\n") or [""])[-1]
            raise Stopped("%s %s ended with %d: %s" % (self.program, command, done.returncode, line))
        return done.stdout

    def _lines(self, name: str, rows: List[dict]) -> str:
        return self._path(name, "".join(json.dumps(row) + "\n" for row in rows))

    def count(self, texts: Sequence[str]) -> List[int]:
        """Tokens of each."""
        prompts = self._lines("count.jsonl", [{"prompt": text} for text in texts])
        said = self.run("run", "--prompts", prompts, "-n", "1", "--dry-run").splitlines()
        return [json.loads(line)["prompt_tokens"] for line in said]

    def _side(self, side: str) -> List[str]:
        if side == FULL:
            return ["--select", "full"]
        budget, *settings = side.split()
        out = ["--budget", budget]
        for one in ["select=dynamic", *settings]: # the first is what `score` does not have by itself
            name, _, value = one.partition("=")
            out += ["--" + OPTIONS.get(name, name).replace("_", "-"), value]
        return out + (["--verify", "dense:%d" % self.verify] if self.verify else [])

    def _document(self, document: Document) -> List[str]:
        """Options by which a run goes on from it."""
        if not document.text:
            return []
        path, saved = self._path("document.txt", document.text), self._path("document.kvs")
        if self._held is not document:
            self.run("run", "--prompt-file", path, "--save", saved, "--select", "full", "-n", "1")
            self._held = document
        return ["--load", saved, "--reselect"]

    def ask(self, document: Document, which: Sequence[int], side: str) -> Iterator[Tuple[int, Dict[str, Any]]]:
        """(question, what was said), of these questions of a document."""
        kinds = {document.tasks[q].kind for q in which}
        if "tool" in kinds:
            raise Cannot("only servers take tools")
        if "text" in kinds:
            yield which[0], self._likelihoods(document, document.tasks[which[0]], side)
            return
        prompts = self._lines("prompts.jsonl", [
            {"id": str(q), "prompt": document.tasks[q].text, "tokens": document.tasks[q].tokens} for q in which])
        stats = self._path("stats.json")
        said = self.run("run", *self._document(document), "--prompts", prompts, "--stats", stats, *self._side(side))
        served = self._served(stats)
        for line in map(json.loads, said.splitlines()):
            if line["stop"] == "error":
                raise Stopped(line.get("error", "an answer ended with an error"))
            yield int(line["id"]), {"answer": line["answer"], "tokens": line["generated_tokens"], "served": served}
            served = None # of all of them

    def _likelihoods(self, document: Document, task: Task, side: str) -> Dict[str, Any]:
        """The text's tokens, which any run tells, as an answer that is scored."""
        loaded = self._document(document) + ["--prompt-file", self._path("document.txt")]
        stats, text = self._path("stats.json"), self._path("text.txt", task.text)
        self.run("score", "--prompt", ".", "--text", text, "--select", "full", "--stats", stats)
        with open(stats, encoding="utf-8") as f:
            tokens = json.load(f)["tokens"][:task.tokens]
        given = self._lines("given.jsonl", [{"id": 1, "ids": [t["id"] for t in tokens]}])
        said = json.loads(self.run("score", *loaded, "--answers", given, "--logprobs", str(TOP), "--stats", stats,
                                   *self._side(side)))
        return {"tops": said["top_logprobs"][1:], "pieces": [t["text"] for t in tokens[1:]], "tokens": len(tokens),
                "served": self._served(stats)}

    @staticmethod
    def _served(stats: str) -> Dict[str, float]:
        """All decode steps of a run, by who attended: they selected if they attended to less than there was."""
        with open(stats, encoding="utf-8") as f:
            told = json.load(f)
        steps, heads = told["decoded_tokens"], told.get("verified_rows", 0)
        return {"steps": steps, "selected": steps if told["attended_share"] < 0.9999 else 0, "elsewhere": 0,
                "heads": heads, "recall": told.get("attention_recall", 0) * heads}
