#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Servers of vLLM with kvferry: the client of OpenAI, /metrics, two engines, two machines, and a soak.

KVF_HF_MODEL is the folder of the real model.

usage: check_vllm_server.py [--shard I/N] [TEST...]     ./dev vllm makes the environment and runs it
"""
import concurrent.futures
import glob
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import unittest
import urllib.request

from kvferry.vllm.metrics import COUNTERS, GAUGES
from vllm_case import Case, main, stock
from vllm_engine import FOLDER, FULL, LIMIT, NEW, Engine, answer, environment, prompts, small_model


def serving(model, ours):
    """The beginning of a command line that serves."""
    custom = () if ours is None else ("--attention-backend", "CUSTOM", "--additional-config",
                                      json.dumps({"kvferry": ours}))
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name",
            "small", "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.2",
            *custom]


class Serving:
    """A server: its port, and what it answers. `words` go to its command line; ours=None is vLLM's."""

    def __init__(self, name, model, ours, *words, several=False, **variables):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = os.path.join(FOLDER.name, name + ".txt")
        with open(self.log, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                [*serving(model, ours), "--port", str(self.port), *words],
                env={**environment(several), **variables}, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True)

    def wait(self):
        """Until it answers, or is gone."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/health")
                break
            except OSError:
                time.sleep(1)
        assert self.process.poll() is None, self.text_of_log()[-8000:]
        return self

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def text_of_log(self):
        with open(self.log, encoding="utf-8") as text:
            return text.read()

    def get(self, path):
        with urllib.request.urlopen("http://127.0.0.1:%d%s" % (self.port, path), timeout=60) as got:
            return got.read().decode()

    def metrics(self, prefix):
        """Values of /metrics by name and labels."""
        rows = [line.rsplit(" ", 1) for line in self.get("/metrics").splitlines()]
        return {name: float(value) for name, value in rows if name.startswith(prefix)}

    def tokens(self, ids, new=NEW):
        """A greedy answer to token ids, where there is no tokenizer."""
        asked = urllib.request.Request(
            "http://127.0.0.1:%d/v1/completions" % self.port, headers={"Content-Type": "application/json"},
            data=json.dumps({"model": "small", "prompt": ids, "max_tokens": new, "temperature": 0,
                             "ignore_eos": True, "return_token_ids": True}).encode())
        with urllib.request.urlopen(asked, timeout=LIMIT) as got:
            return json.load(got)["choices"][0]["token_ids"]

    def memory_kib(self):
        """Memory of the server and of every process below it that is in no file."""
        below, pids = [self.process.pid], set()
        while below:
            pid = below.pop()
            pids.add(pid)
            for task in glob.glob("/proc/%d/task/*/children" % pid):
                with open(task, encoding="ascii") as text:
                    below += map(int, text.read().split())
        total = 0
        for pid in pids:
            with open("/proc/%d/status" % pid, encoding="ascii") as text:
                total += sum(int(line.split()[1]) for line in text if line.startswith("RssAnon"))
        return total


SMALL = ("--skip-tokenizer-init", "--block-size", "32", "--max-num-seqs", "12", "--max-model-len",
         str(FULL), "--max-num-batched-tokens", "2048")


class TwoEngines(Case):
    """Data parallel: each engine has its own pages, and a server asks both."""

    def ask(self, name, ours):
        served = Serving(name, small_model(), {"host_memory": "64MiB", **ours}, *SMALL,
                         "--data-parallel-size", "2", several=True,
                         VLLM_CPU_SIM_MULTI_NUMA="0").wait() # 0.33 gives each engine a node, where that is not said
        self.addCleanup(served.stop)
        with concurrent.futures.ThreadPoolExecutor(12) as threads:
            told = list(threads.map(served.tokens, prompts()))
        self.assertEqual(served.text_of_log().count("kvferry 0."), 2)
        steps = served.metrics("kvferry:steps_total")
        self.assertEqual(len(steps), 2)
        self.assertTrue(all(steps.values()), steps)
        return [[one] for one in told]

    def test_data_parallel(self):
        self.assertEqual(self.ask("two", {"budget": FULL}), stock())

    def test_within_a_budget(self):
        ours = {"budget": 128, "local_tokens": 32}
        one = self.ran(Engine([answer(prompts())], {**ours, "transfer": "direct"}))
        self.assertEqual(self.ask("two of 128", {**ours, "transfer": "mapped"}),
                         one.results[0]["tokens"])


class TwoMachines(Case):
    """`./dev vllm TwoMachines`, as root: vLLM's own launch over machines, of which the second is a
    network namespace. The heads are shared by a rank on each."""

    HERE, THERE, NAME = "10.213.77.1", "10.213.77.2", "kvferry-vllm"

    def setUp(self):
        self.addCleanup(self.ip, "netns", "delete", self.NAME)
        for words in (("netns", "add", self.NAME),
                      ("link", "add", "kvf-here", "type", "veth", "peer", "name", "kvf-there",
                       "netns", self.NAME),
                      ("address", "add", self.HERE + "/30", "dev", "kvf-here"),
                      ("link", "set", "kvf-here", "up"),
                      ("-n", self.NAME, "address", "add", self.THERE + "/30", "dev", "kvf-there"),
                      ("-n", self.NAME, "link", "set", "kvf-there", "up"),
                      ("-n", self.NAME, "link", "set", "lo", "up")):
            self.assertEqual(self.ip(*words), 0, words)

    @staticmethod
    def ip(*words):
        return subprocess.run(["ip", *words]).returncode

    def test_tensor_parallel(self):
        ours = {"budget": FULL, "host_memory": "64MiB"}
        words = (*SMALL, "--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", self.HERE)
        with open(os.path.join(FOLDER.name, "there.txt"), "w+", encoding="utf-8") as log:
            there = subprocess.Popen(
                ["ip", "netns", "exec", self.NAME, *serving(small_model(), ours), *words,
                 "--node-rank", "1", "--headless"], stdout=log, stderr=subprocess.STDOUT,
                env={**environment(True), "VLLM_HOST_IP": self.THERE, "GLOO_SOCKET_IFNAME": "kvf-there",
                     "VLLM_CPU_OMP_THREADS_BIND": "1"}, start_new_session=True)
            self.addCleanup(there.wait, 60)
            self.addCleanup(there.terminate)
            served = Serving("here", small_model(), ours, *words, "--node-rank", "0", several=True,
                             VLLM_HOST_IP=self.HERE, GLOO_SOCKET_IFNAME="kvf-here",
                             VLLM_CPU_OMP_THREADS_BIND="0").wait()
            self.addCleanup(served.stop)
            with concurrent.futures.ThreadPoolExecutor(12) as threads:
                told = list(threads.map(served.tokens, prompts()))
            self.assertEqual([[one] for one in told], stock(), served.text_of_log()[-4000:])
            log.seek(0)
            self.assertEqual([text.count("kvferry 0.") for text in (log.read(), served.text_of_log())],
                             [1, 1])


class Soak(Case):
    """`./dev vllm Soak`: two thousand requests, or KVF_REQUESTS of them, equal answers, and memory that
    grows no faster than without kvferry: what vLLM keeps of requests is its own.

    torch keeps a compiled product for every number of tokens that a pass ever had, half a MiB of each
    in this model, and which numbers come up is chance. So it keeps none here, and pieces of memory that
    were given back do not lie in the heap."""

    MANY = max(400, int(os.environ.get("KVF_REQUESTS", "2000")) // 40 * 40)
    STEADY = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "MALLOC_MMAP_THRESHOLD_": "131072",
              "MALLOC_TRIM_THRESHOLD_": "131072"}

    def ask(self, name, ours):
        served = Serving(name, small_model(), ours, *SMALL, **self.STEADY).wait()
        self.addCleanup(served.stop)
        asked, wanted, held = prompts()[:8], [], {}
        with concurrent.futures.ThreadPoolExecutor(12) as threads:
            for number in range(0, self.MANY, 40):
                told = list(threads.map(lambda i: served.tokens(asked[i % 8], 8), range(40)))
                wanted = wanted or told[:8]
                self.assertEqual(told, wanted * 5)
                if number + 40 in (200, self.MANY // 2, self.MANY):
                    held[number + 40] = served.memory_kib()
        print("%s: memory after requests: %s KiB" % (name, held))
        return held

    def test_many_short_requests(self):
        ours = self.ask("kvferry", {"budget": 128, "host_memory": "64MiB"})
        alone = self.ask("alone", None)
        more = (ours[self.MANY] - ours[200]) - (alone[self.MANY] - alone[200])
        self.assertLess(more, 4096)


class Server(Case):
    """A real server, asked by the client of OpenAI as people do."""

    @classmethod
    def setUpClass(cls):
        cls.served = Serving(
            "server", os.environ["KVF_HF_MODEL"],
            {"budget": 512, "host_memory": "512MiB", "log_interval": 1, "verify_interval": 4,
             "transfer": "mapped", "device_memory": "64MiB"}, # too little for all pages of a long prompt
            "--max-num-seqs", "8", "--max-model-len", "4096").wait()
        import openai
        cls.client = openai.OpenAI(base_url="http://127.0.0.1:%d/v1" % cls.served.port,
                                   api_key="none", timeout=LIMIT, max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.served.stop()

    def ask(self, number, tokens=16, **fields):
        told = self.client.completions.create(model="small", temperature=0, max_tokens=tokens,
                                              prompt="%d and %d make" % (number, number), **fields)
        return told if fields.get("stream") else told.choices[0].text

    def test_first_line(self):
        self.assertRegex(self.served.text_of_log(), r"kvferry 0\.\d+\.\d+ on .*: budget 512, .*"
                         r"host memory \d+ MiB, device memory \d+ MiB")

    def test_chat(self):
        told = self.client.chat.completions.create(
            model="small", temperature=0, max_tokens=16,
            messages=[{"role": "user", "content": "What is the capital of France?"}])
        self.assertIn("Paris", told.choices[0].message.content)

    def test_stream_is_the_answer(self):
        parts = [part.choices[0].text for part in self.ask(3, stream=True)]
        self.assertGreater(len(parts), 3)
        self.assertEqual("".join(parts), self.ask(3))

    def test_many_at_once(self):
        """Rows of a batch round as they please, so the beginnings must agree, not every token."""
        alone = [self.ask(number, 4) for number in range(4)]
        with concurrent.futures.ThreadPoolExecutor(32) as threads:
            together = list(threads.map(lambda number: self.ask(number % 4, 4), range(32)))
        self.assertEqual(together, alone * 8)

    def test_a_client_goes_away(self):
        told = self.ask(5, 2000, stream=True, extra_body={"ignore_eos": True})
        next(iter(told))
        told.close()
        self.assertEqual(self.ask(6, 4), self.ask(6, 4))
        end = time.monotonic() + 120
        while self.running() and time.monotonic() < end:
            time.sleep(0.5)
        self.assertEqual(self.running(), 0)

    def running(self):
        return sum(self.served.metrics("vllm:num_requests_running").values())

    def test_a_prompt_that_was_there(self):
        """Its blocks are found, and the answer is the same."""
        prompt = "The pages of a book are numbered. " * 40
        before = self.found()
        told = [self.client.completions.create(model="small", temperature=0, max_tokens=8,
                                               prompt=prompt + end).choices[0].text
                for end in ("Page one", "Page two", "Page one")]
        self.assertEqual(told[0], told[2])
        self.assertGreaterEqual(self.found() - before, 2 * 128)

    def found(self):
        return sum(self.served.metrics("vllm:prefix_cache_hits_total").values())

    @unittest.skipUnless(importlib.util.find_spec("lm_eval"), "lm_eval is not installed")
    def test_lm_eval(self):
        """A task that generates and one that compares choices, of texts that the model knows by heart."""
        folder = os.path.join(FOLDER.name, "tasks")
        os.makedirs(folder)
        counts = [{"asked": ", ".join(map(str, range(i, i + 8))) + ",", "wanted": str(i + 8),
                   "other": str(i + 5)} for i in range(1, 21)]
        with open(os.path.join(folder, "counts.json"), "w", encoding="utf-8") as out:
            out.writelines(json.dumps(one) + "\n" for one in counts)
        tasks = {"counting": {"output_type": "generate_until", "doc_to_target": "{{wanted}}",
                              "generation_kwargs": {"until": [","], "max_gen_toks": 6},
                              "filter_list": [{"name": "number", "filter": [
                                  {"function": "regex", "regex_pattern": "([0-9]+)"},
                                  {"function": "take_first"}]}],
                              "metric_list": [{"metric": "exact_match"}]},
                 "choosing": {"output_type": "multiple_choice", "doc_to_target": 0,
                              "doc_to_choice": "{{[wanted, other]}}", "metric_list": [{"metric": "acc"}]}}
        for name, fields in tasks.items():
            with open(os.path.join(folder, name + ".yaml"), "w", encoding="utf-8") as out:
                json.dump({"task": name, "dataset_path": "json", "test_split": "test", # as YAML has it
                           "dataset_kwargs": {"data_files": {
                               "test": os.path.join(folder, "counts.json")}},
                           "doc_to_text": "{{asked}}", **fields}, out)
        before = sum(self.served.metrics("kvferry:steps_total").values())
        done = subprocess.run(
            [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args",
             "model=small,base_url=http://127.0.0.1:%d/v1/completions,tokenizer=%s,"
             "tokenized_requests=False,num_concurrent=4" % (self.served.port, os.environ["KVF_HF_MODEL"]),
             "--tasks", ",".join(tasks), "--include_path", folder, "--output_path", folder],
            env={**os.environ, "HF_HOME": folder, "HF_DATASETS_OFFLINE": "1"}, timeout=LIMIT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, 0, done.stdout[-4000:])
        told, = glob.glob(os.path.join(folder, "**", "results_*.json"), recursive=True)
        with open(told, encoding="utf-8") as text:
            results = json.load(text)["results"]
        self.assertGreaterEqual(results["counting"]["exact_match,number"], 0.9)
        self.assertGreaterEqual(results["choosing"]["acc,none"], 0.9)
        self.assertGreater(sum(self.served.metrics("kvferry:steps_total").values()), before)

    def test_metrics(self):
        self.ask(7)
        before = self.served.metrics("kvferry:")
        ended = self.answered()
        self.client.completions.create(model="small", temperature=0, max_tokens=24,
                                       prompt="One and one make two. " * 400,
                                       extra_body={"ignore_eos": True})
        names = {name.partition("{")[0] for name in before}
        self.assertEqual(names, {
            *("kvferry:%s_total" % name for name, _ in COUNTERS), *("kvferry:" + name for name, _ in GAUGES),
            *("kvferry:request_selected_tokens_" + name for name in ("bucket", "count", "sum"))})
        after = self.served.metrics("kvferry:")
        more = {name.partition("{")[0][len("kvferry:"):-len("_total")]: value - before[name]
                for name, value in after.items() if "_total{" in name}
        self.assertEqual(more["steps"], 23 * 30)
        self.assertLessEqual(more["tokens_attended"], 23 * 30 * 3 * 512)
        self.assertGreater(more["tokens_attended"], 23 * 30 * 3 * 400)
        self.assertGreater(more["page_hits"], more["page_misses"])
        self.assertGreater(more["bytes_to_device"], 0)
        self.assertGreater(more["tokens_put"], 23 * 30)
        self.assertEqual(more["rows_lost"], 0)
        self.assertIn(more["heads_verified"], (5 * 30 * 9, 6 * 30 * 9))
        self.assertTrue(0.8 < more["recall"] / more["heads_verified"] < 0.9999)
        self.assertIn('engine="0",rank="0"', next(iter(before)))
        gauges = {name.partition("{")[0][len("kvferry:"):]: value for name, value in after.items()}
        self.assertTrue(0 < gauges["host_bytes_used"] <= gauges["host_bytes"] <= 512 << 20, gauges)
        self.assertTrue(0 < gauges["windows_used"] <= gauges["windows"] <= 8, gauges)
        self.assertTrue(0.5 < gauges["hit_rate"] <= 1, gauges)
        self.assertGreater(gauges["bytes_per_second"], 0)
        self.ask(8, 1) # another pass, before which the long request has ended: all but its first token selected
        count, selected = (now - was for now, was in zip(self.answered(), ended))
        self.assertIn(count, (1, 2)) # the one before it may have been counted late, too
        self.assertEqual(selected, 23)

    def answered(self):
        """Requests that have ended, and tokens of theirs that selected."""
        told = self.served.metrics("kvferry:request_selected_tokens")
        return tuple(sum(value for name, value in told.items() if "_%s{" % part in name) for part in ("count", "sum"))


if __name__ == "__main__":
    main((TwoEngines, Server))
