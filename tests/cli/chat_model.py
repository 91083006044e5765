# SPDX-License-Identifier: Apache-2.0
"""A folder with the recall model, some of whose words are markers of a chat, for tests of chats."""
import json
import os
import subprocess
import sys
import tempfile

# By its markers the format is known.
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
# The meaning of words of its vocabulary in a chat: rare names of the recall model give way.
MARKERS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
           "<｜User｜>", "<｜Assistant｜>", "system", "user", "assistant")


class ChatModel:
    """`write` fills the folder; `run` is the command on it."""

    def __init__(self, kvferry, recall, folder):
        self.kvferry, self.recall, self.folder = kvferry, recall, folder
        self.failed = self.checks = 0
        os.symlink(os.path.join(recall, "model.safetensors"),
                   os.path.join(folder, "model.safetensors"))

    def check(self, name, fine, *told):
        self.checks += 1
        if not fine:
            self.failed += 1
            print("not ok: " + name, *told)

    def read(self, name):
        with open(os.path.join(self.recall, name), encoding="utf-8") as f:
            return json.load(f)

    def save(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write(content if isinstance(content, str) else json.dumps(content))
        return path

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
        done = subprocess.run([self.kvferry, command, "--model", self.folder, "--device", "host"]
                              + list(arguments), input=stdin, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, check=False)
        self.check("%s ends with %d, not %d" % (" ".join(arguments), status, done.returncode),
                   done.returncode == status, done.stderr)
        return done.stdout, done.stderr


def run_checks(*parts):
    """The main program of a test: each part with the model of the command line. @return the exit
    status"""
    with tempfile.TemporaryDirectory() as folder:
        chat = ChatModel(sys.argv[1], sys.argv[2], folder)
        for part in parts:
            part(chat)
    print("%d checks, %d failed" % (chat.checks, chat.failed))
    return chat.failed > 0
