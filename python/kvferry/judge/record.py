# SPDX-License-Identifier: Apache-2.0
"""Questions and answers in a file of lines of JSON, from which a run goes on, and with which others compare.

    {"judge": 1, "asked": {...}, "documents": N}          what the documents follow from
    {"task", "length", "text", "questions": [...]}        N of them
    {"side", "document", "question", "answer", ...}       in any order

Knows lines, not who is asked. Invariant: a line that is there is whole; one that was cut is not read, and is gone
when the next one is written.
"""
import json
import os
from typing import Any, Dict, List, Optional, Tuple

from . import tasks

FULL, AGAIN = "full", "again" # sides: full attention, and once more


class Refused(Exception):
    """It cannot be judged as it was asked for."""


class Record:
    """The file `path`, with its documents."""

    def __init__(self, path: str) -> None:
        self.path, self.asked = path, {} # type: str, Dict[str, Any]
        self.documents: List[tasks.Document] = []
        self.said: Dict[Tuple[str, int, int], Dict[str, Any]] = {}

    def exists(self) -> bool:
        """Whether documents are there."""
        return os.path.exists(self.path)

    def read(self) -> "Record":
        """All that it has."""
        with open(self.path, encoding="utf-8") as f:
            lines = f.read().split("\n")[:-1] # the last one may be cut
        try:
            head = json.loads(lines[0])
            self.asked, count = head["asked"], head["documents"]
            self.documents = [tasks.document_of(json.loads(line)) for line in lines[1:1 + count]]
            for line in lines[1 + count:]:
                row = json.loads(line)
                self.said[row["side"], row["document"], row["question"]] = row
        except (ValueError, KeyError, IndexError, TypeError) as why:
            raise Refused("%s is no file of kvferry.judge, or an older one: take another name" % self.path) from why
        if len(self.documents) != count:
            raise Refused("%s ends amid its documents: remove it" % self.path)
        return self

    def begin(self, asked: Dict[str, Any], rows: List[Dict[str, Any]], said: Tuple[Dict[str, Any], ...] = ()) -> "Record":
        """Write what is to be asked, and what was said elsewhere; whole or not at all."""
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        head = {"judge": 1, "asked": asked, "documents": len(rows)}
        with open(self.path + ".partial", "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in [head, *rows, *said])
        os.replace(self.path + ".partial", self.path)
        return self.read()

    def take(self, other: "Record") -> "Record":
        """Documents and full attention's answers of another file."""
        with open(other.path, encoding="utf-8") as f:
            rows = [json.loads(line) for line in f.read().split("\n")[1:1 + len(other.documents)]]
        return self.begin(other.asked, rows, tuple(row for (side, _, _), row in other.said.items() if side in (FULL, AGAIN)))

    def add(self, side: str, document: int, question: int, result: Dict[str, Any]) -> None:
        """Keep it; after a line that was cut."""
        row = {"side": side, "document": document, "question": question, **result}
        with open(self.path, "rb+") as f:
            end = f.seek(0, os.SEEK_END)
            while end and (f.seek(end - 1), f.read(1))[1] != b"\n":
                end -= 1
            f.truncate(end)
            f.seek(end)
            f.write((json.dumps(row) + "\n").encode())
        self.said[side, document, question] = row

    def get(self, side: str, document: int, question: int) -> Optional[Dict[str, Any]]:
        """The row of an answer, if there is one."""
        return self.said.get((side, document, question))
