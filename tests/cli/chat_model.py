# SPDX-License-Identifier: Apache-2.0
"""A folder with the recall model, some of whose words are markers of a chat, for tests of chats."""
import json
import os
import subprocess
import sys
import tempfile

import checks

FACT = "the code of alice brown is seven tiger . "
SELECTION = ("--budget", "128", "--local", "32")
DRAWS = ("--temperature", "1.5", "--min-p", "0.01", "--repetition-penalty", "1.1")
# By its markers the format is known.
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
# The meaning of words of its vocabulary in a chat: rare names of the recall model give way.
MARKERS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
           "<｜User｜>", "<｜Assistant｜>", "system", "user", "assistant")


class ChatModel:
    """`write` fills the folder; `run` is the command on it."""
    check = staticmethod(checks.check)

    def __init__(self, kvferry, recall, folder):
        self.kvferry, self.recall, self.folder = kvferry, recall, folder
        os.symlink(os.path.join(recall, "model.safetensors"),
                   os.path.join(folder, "model.safetensors"))

    def read(self, name):
        return json.loads(checks.read(os.path.join(self.recall, name)))

    def save(self, name, content):
        return checks.write(os.path.join(self.folder, name),
                            content if isinstance(content, str) else json.dumps(content))

    def save_lines(self, name, rows):
        return self.save(name, "".join(json.dumps(row) + "\n" for row in rows))

    def write(self, template=CHATML, eos=2, config=None, end=None):
        """@end: the id of </s>, which otherwise is that of a rare word."""
        tokenizer = self.read("tokenizer.json")
        words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
        for i, marker in enumerate(MARKERS):
            words[end if end and marker == "</s>" else len(words) - 1 - i] = marker
        tokenizer["model"]["vocab"] = {word: i for i, word in enumerate(words)}
        like = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"] += [dict(like, id=words.index(w), content=w)
                                      for w in MARKERS[:8]]
        self.save("tokenizer.json", tokenizer)
        self.save("config.json", dict(self.read("config.json"), **(config or {})))
        self.save("generation_config.json", {"bos_token_id": 1, "eos_token_id": eos})
        self.save("tokenizer_config.json", {"bos_token": "<bos>", "eos_token": "<eos>"})
        path = os.path.join(self.folder, "chat_template.jinja")
        if os.path.exists(path):
            os.remove(path)
        if template is not None:
            self.save("chat_template.jinja", template)
        return words

    def run(self, *arguments, status=0, command="run", stdin=""):
        """(standard output, standard error)."""
        done = checks.command(self.kvferry, command, "--model", self.folder, "--device", "host",
                              *arguments, stdin=stdin)
        self.check("%s ends with %d, not %d" % (" ".join(arguments), status, done.returncode),
                   done.returncode == status, done.stderr)
        return done.stdout, done.stderr

    def answer(self, *arguments):
        """(standard output, ids, statistics) of one prompt."""
        ids, stats = self.save("ids", ""), self.save("stats", "")
        out, _ = self.run(*arguments, "--emit-ids", ids, "--stats", stats)
        return out, [int(line) for line in checks.read(ids).split()], json.loads(checks.read(stats))

    def answers(self, *arguments, command="run"):
        """({(prompt, sample): line}, statistics, standard error) of a batch."""
        stats = self.save("stats", "")
        out, err = self.run(*arguments, "--stats", stats, command=command)
        lines = [json.loads(line) for line in out.splitlines()]
        by_id = {(line["id"], line["sample"]): line for line in lines}
        self.check("no answer comes twice", len(by_id) == len(lines) or command == "score", out)
        return by_id, json.loads(checks.read(stats)), err

    def refusals(self, table):
        """The rows of TABLE.refusals, in the folder; see refusals.py."""
        here = os.path.dirname(os.path.abspath(__file__))
        done = subprocess.run([sys.executable, os.path.join(here, "refusals.py"), self.kvferry,
                               os.path.join(here, table + ".refusals"), "run=run --model . --device host",
                               "score=score --model . --device host"], cwd=self.folder, check=False)
        self.check("rows of %s.refusals" % table, done.returncode == 0)


def run_checks(*parts):
    """The main program of a test: each part with the model of the command line. @return the exit
    status"""
    with tempfile.TemporaryDirectory() as folder:
        chat = ChatModel(sys.argv[1], sys.argv[2], folder)
        for part in parts:
            part(chat)
    return checks.ended()
