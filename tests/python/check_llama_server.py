# SPDX-License-Identifier: Apache-2.0
"""An unmodified llama-server under kvferry-llama: slots, shared prefixes, cancelled requests, files, prompt caches.

Answers are compared with those of the same server without kvferry by the log-probability of the next token, at a
budget of the context. KVF_LLAMA_REQUESTS says how many requests the first test sends (400 by hand, 40 here), and
KVF_LLAMA_SERVER which server it is, the native build's if not another one.
"""
import concurrent.futures
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import llama_case

SERVER = os.environ.get("KVF_LLAMA_SERVER", os.path.join(llama_case.NATIVE, "llama-server"))
REQUESTS = int(os.environ.get("KVF_LLAMA_REQUESTS", "40"))
NEAR = 0.25 # of a log-probability: this model of 4 bits scatters by 0.05 when sums of fp16 change their order
STORY = ("The lighthouse keeper wrote in her log every evening. On the first day she saw two ships and a whale. On the "
         "second day a storm came from the west and broke the window of the lamp room. On the third day she mended it "
         "with glass from the cellar, and the light was seen from the harbour again. ")
ENDS = ("How many ships did she see?", "What broke?", "Where did the glass come from?", "Who wrote the log?",
        "When did the storm come?", "What was seen from the harbour?")


class Server:
    """One llama-server on a free port; with kvferry unless settings are None."""

    def __init__(self, *words, settings="budget=full verify=64"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.said = tempfile.NamedTemporaryFile("w+", suffix=".txt") # pylint: disable=consider-using-with
        command = [SERVER, "-m", llama_case.MODEL, "-c", "4096", "-t", "1", "--host", "127.0.0.1", "--port",
                   str(self.port), "--no-webui", *words]
        env = llama_case.environment()
        if settings is None:
            command += [] if "-fa" in words else ["-fa", "on"]
        else:
            command = [sys.executable, "-m", "kvferry._llama", *command]
            env.update(KVFERRY_LLAMA=settings, KVFERRY_LLAMA_PLUGIN=llama_case.PLUGIN)
        self.process = subprocess.Popen(command, env=env, stdout=self.said, stderr=subprocess.STDOUT)
        self.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def wait(self):
        """Until it answers."""
        limit = time.monotonic() + 240
        while time.monotonic() < limit:
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
            time.sleep(0.3)
        raise RuntimeError("llama-server does not answer:\n" + self.text()[-3000:])

    def ask(self, method, path, body=None):
        """Status and answer of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None,
                               {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
        finally:
            connection.close()

    def complete(self, prompt, tokens=4, **more):
        """A completion without chance."""
        status, answer = self.ask("POST", "/completion", {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": True, "n_probs": 1, **more})
        if status != 200:
            raise RuntimeError("%d: %s" % (status, answer))
        return answer

    def cancel(self, prompt):
        """A stream that nobody reads to its end."""
        with socket.create_connection(("127.0.0.1", self.port)) as line:
            body = json.dumps({"prompt": prompt, "n_predict": 200, "stream": True}).encode()
            line.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)
            line.recv(64)

    def memory(self):
        """Resident bytes."""
        with open("/proc/%d/status" % self.process.pid, encoding="utf-8") as text:
            return int(re.search(r"VmRSS:\s+(\d+)", text.read()).group(1)) << 10

    def text(self):
        """All that it said."""
        self.said.seek(0)
        return self.said.read()

    def end(self, how=signal.SIGINT):
        """Its status, after a signal."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=120)


def logprob(answer):
    """The log-probability of the first token of an answer, and the token."""
    first = answer["completion_probabilities"][0]
    return first["logprob"], first["token"]


# Libraries that a binding loaded for itself alone, and the plug-in in them, once.
IMPORT = """
import ctypes, os, sys
for name in ("libggml-base.so", "libggml-cpu.so", "libggml.so", "libllama.so"):
    ctypes.CDLL(os.path.join(sys.argv[1], name))
import kvferry.llama
print(kvferry.llama.loaded, kvferry.llama.load())
"""


class Imported(unittest.TestCase):
    """A process of Python with llama.cpp in it."""

    def test_import(self):
        """The import finds its ggml; a second call loads nothing."""
        done = subprocess.run([sys.executable, "-c", IMPORT, llama_case.NATIVE], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=120, check=False,
                              env=dict(llama_case.environment(), KVFERRY_LLAMA_PLUGIN=llama_case.PLUGIN))
        self.assertEqual(done.stdout, "True True\n", done.stderr)
        self.assertEqual(done.stderr.count("kvferry: loaded into llama.cpp"), 1, done.stderr)


class Served(unittest.TestCase):
    """Servers, one at a time."""

    def served(self, server, share=0.95):
        """The summary of a server that has ended: what it served, and nothing was wrong."""
        numbers = llama_case.summary(server.text())
        self.assertGreaterEqual(numbers.get("share", 0), share, llama_case.reasons(server.text()))
        self.assertEqual(numbers.get("wrong", 0), 0, server.text()[-2000:])
        return numbers

    def near(self, one, other):
        """Two answers begin alike."""
        (a, first), (b, second) = logprob(one), logprob(other)
        if first == second:
            self.assertLess(abs(a - b), NEAR)
        else: # a tie
            self.assertLess(max(a, b), -0.4, (one["content"], other["content"]))

    def test_slots(self):
        """4 slots, shared prefixes, some requests cancelled: as without kvferry, and memory stays."""
        prompts = [STORY * (1 + i % 2) + ENDS[i % len(ENDS)] + " Answer %d:" % (i % 5) for i in range(REQUESTS)]
        answers = {}
        with Server(settings=None) as server:
            for prompt in sorted(set(prompts))[:6]:
                answers[prompt] = server.complete(prompt)
        with Server("-np", "4") as server:
            def one(i):
                if i % 9 == 8:
                    return server.cancel(prompts[i])
                return prompts[i], server.complete(prompts[i])
            half = REQUESTS // 2
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                got = list(pool.map(one, range(half)))
                before = server.memory()
                got += list(pool.map(one, range(half, REQUESTS)))
                after = server.memory()
            for prompt, answer in filter(None, got):
                if prompt in answers:
                    self.near(answers[prompt], answer)
            self.assertLess(after, before * 1.1 + (16 << 20))
            self.assertEqual(server.end(), 0)
            self.served(server)

    def test_slot_files(self):
        """A file that one writes, the other reads, both ways."""
        with tempfile.TemporaryDirectory() as folder:
            words = ("-np", "1", "--slot-save-path", folder)
            prompt, rest = STORY + ENDS[0], " She saw"
            for writer, reader in (("budget=full verify=1", None), (None, "budget=full verify=1")):
                with Server(*words, settings=writer) as server:
                    answer = server.complete(prompt + rest, 1)
                    status, saved = server.ask("POST", "/slots/0?action=save", {"filename": "slot"})
                    self.assertEqual(status, 200, saved)
                with Server(*words, settings=reader) as server:
                    status, read = server.ask("POST", "/slots/0?action=restore", {"filename": "slot"})
                    self.assertEqual((status, read["n_restored"]), (200, saved["n_saved"]), read)
                    again = server.complete(prompt + rest, 1)
                    self.near(answer, again)
                    self.assertLess(again["timings"]["prompt_n"], 16)
                    server.end()
                    if reader:
                        self.served(server)

    def test_prompt_caches(self):
        """Two conversations in one slot: each comes back from the prompt cache, or by shifting."""
        prompts = [STORY + end for end in ENDS[:2]] + [STORY[60:] + STORY + ENDS[2]]
        words = ("-np", "1", "--cache-ram", "64", "--cache-reuse", "32", "-ctxcp", "4")
        with Server(*words, settings=None) as server: # keys that were shifted are not those of a new prompt
            first = [server.complete(prompt) for prompt in prompts * 2]
        with Server(*words, settings="budget=full verify=1") as server:
            for prompt, answer in zip(prompts * 2, first):
                self.near(answer, server.complete(prompt))
            self.assertEqual(server.end(), 0)
            self.served(server)

    def test_killed(self):
        """kill -9 in the middle leaves nothing; the next one serves, and chat with tools is answered."""
        before = set(os.listdir("/dev/shm"))
        with Server("-np", "2") as server:
            server.cancel(STORY)
            server.end(signal.SIGKILL)
        self.assertEqual(set(os.listdir("/dev/shm")) - before, set())
        with Server("-np", "2") as server:
            status, answer = server.ask("POST", "/v1/chat/completions", {
                "messages": [{"role": "user", "content": ENDS[0]}], "max_tokens": 4, "tools": [
                    {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {
                        "what": {"type": "string"}}}}}]})
            self.assertEqual(status, 200, answer)
            server.end()
            self.served(server)

    def test_never_silently_idle(self):
        """Without flash attention nothing is served, which is said once; `off` says nothing."""
        with Server("-np", "1", "-fa", "off") as server:
            server.complete(ENDS[0])
            server.complete(ENDS[1])
            server.end()
            self.assertEqual(server.text().count("flash attention is off"), 1, server.text()[-2000:])
            self.assertEqual(llama_case.summary(server.text()).get("share", 0), 0)
        with Server("-np", "1", settings="off") as server:
            server.complete(ENDS[0])
            server.end()
            self.assertEqual(llama_case.summary(server.text()), {})


if __name__ == "__main__":
    llama_case.require(SERVER, llama_case.MODEL)
    unittest.main()
