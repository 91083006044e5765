# SPDX-License-Identifier: Apache-2.0
"""A server that speaks OpenAI's interface and finds needles by looking for them: for check_judge.py.

It answers rightly, or wrongly where it is told to; it dies and lives again; it counts as kvferry does in vLLM; or it
gives tokens one by one as llama-server does. A token is a word. Wrong answers attend to less, as its counters say.
"""
import http.server
import json
import math
import re
import threading


class Server(http.server.ThreadingHTTPServer):
    """is_wrong(prompt): whether the answer is to be wrong. lives: requests until it dies. selects: share of steps
    that its counters say have selected; None = it has none. is_llama, nats: likelihoods, and how far off they are.
    calls: whether it calls functions rightly; None = it takes no tools. refuses(prompt): with 400. counts: tokens.
    log: a file that gets the plug-in's summary, in which half of the steps are llama.cpp's if is_half"""

    daemon_threads = True

    def __init__(self, is_wrong=lambda prompt: False, lives=math.inf, selects=None, is_llama=False, nats=0.0, calls=None,
                 refuses=lambda prompt: False, counts=True, log=None, is_half=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_wrong, self.lives, self.selects = is_wrong, lives, selects
        self.is_llama, self.nats, self.calls = is_llama, nats, calls
        self.refuses, self.counts, self.log, self.is_half = refuses, counts, log, is_half
        self.asked, self.steps, self.recall = [], 0, 0.0 # prompts that were answered
        self.ended = 0 # steps of requests before the latest
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return "http://127.0.0.1:%d/v1" % self.server_address[1]

    def handle_error(self, request, client_address):
        """It dies without a word."""


def found(prompt):
    """Values of the keys that the last question is about."""
    keys = re.findall(r"[a-z]+-[a-z]+|[0-9a-f]{8}(?:-[0-9a-f]+){4}", prompt.rsplit("What ", 1)[1].split("mentioned")[0])
    return [value for key in dict.fromkeys(keys) for value in re.findall(r"for %s is: ([\w-]+)\." % key, prompt)]


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Nobody reads it."""

    def reply(self, value, status=200):
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(value, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self): # pylint: disable=invalid-name
        s = self.server
        if self.path == "/v1/models":
            self.reply({"data": [{"id": "words"}]})
        elif self.path == "/metrics" and s.selects is not None:
            rows = (("steps_total", s.steps), ("request_selected_tokens_sum", s.selects * s.ended),
                    ("heads_verified_total", s.steps), ("recall_total", s.recall))
            self.reply("".join('kvferry:%s{rank="0"} %g\n' % row for row in rows if s.steps)) # none before the first pass
        elif self.path == "/props" and s.is_llama:
            self.reply({})
        else:
            self.reply({"error": "no " + self.path}, 404)

    def do_POST(self): # pylint: disable=invalid-name
        s, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and s.counts:
            words = body.get("content" if s.is_llama else "prompt", "").split()
            self.reply({"tokens": words} if s.is_llama else {"count": len(words)})
        elif self.path == "/detokenize":
            self.reply({"content": " ".join(body["tokens"])})
        elif self.path == "/completion":
            p = 0.5 * math.exp(-s.nats)
            self.reply({"completion_probabilities": [{"top_logprobs": [
                {"id": 1, "logprob": math.log(p)}, {"id": 2, "logprob": math.log(1 - p)}]}]})
        elif len(s.asked) >= s.lives:
            self.connection.close()
        elif "tools" in body:
            self.call(body)
        elif self.path == "/v1/completions":
            self.answer(body["prompt"]) if not s.refuses(body["prompt"]) else self.reply({"error": "too long"}, 400)
        elif self.path == "/v1/chat/completions":
            self.answer(body["messages"][0]["content"], is_chat=True)
        else:
            self.reply({"error": "no " + self.path}, 404)

    def answer(self, prompt, is_chat=False):
        s = self.server
        s.ended = s.steps
        if prompt == ".": # one token, which the prompt gives
            self.reply({"choices": [{"text": ".", "message": {"content": "."}}], "usage": {"completion_tokens": 1}})
            return
        is_wrong = s.is_wrong(prompt)
        said = "123" if is_wrong else ", ".join(found(prompt)) if "What " in prompt else "once upon a time"
        s.asked.append(prompt)
        s.steps += 9
        s.recall += 9 * (0.5 if is_wrong else 0.75)
        if s.log:
            with open(s.log, "a", encoding="utf-8") as f:
                f.write("srv stop: tokens=10\nkvferry: attended served=%d stock=%d tokens=%d held=%d\n" % (
                    s.steps, s.steps * s.is_half, s.steps, 2 * s.steps))
        choice = {"message": {"content": said}} if is_chat else {"text": " " + said}
        self.reply({"choices": [choice], "usage": {"prompt_tokens": len(prompt.split()), "completion_tokens": 10}})

    def call(self, body):
        s, function = self.server, body["tools"][0]["function"]
        if s.calls is None:
            self.reply({"error": "tools are not enabled"}, 400)
            return
        fields = function["parameters"]["properties"]
        arguments = {"person": "Anna", "city": fields["city"]["enum"][0], "count": 3, "urgent": True if s.calls else "yes"}
        self.reply({"choices": [{"message": {"tool_calls": [{"function": {
            "name": function["name"], "arguments": json.dumps(arguments)}}]}}], "usage": {"completion_tokens": 5}})
