# SPDX-License-Identifier: Apache-2.0
"""Helpers of tests of kvferry in vLLM: the tokens of vLLM alone, and which tests of a file run.

usage of a file of tests: FILE [--shard I/N] [TEST...]: every Nth of its tests, from the Ith; those that
share a server stay together
"""
import argparse
import functools
import sys
import time
import unittest

from vllm_engine import FULL, Engine, answer, beginnings, prompts, three_answers


@functools.lru_cache(maxsize=None)
def vllm_alone():
    engine = Engine([answer(prompts()), three_answers(), answer(beginnings())])
    assert engine.rc == 0, engine.log[-4000:]
    return engine


def stock():
    """vLLM's answers to the prompts, with room and time for all of them."""
    return vllm_alone().results[0]["tokens"]


class Case(unittest.TestCase):
    maxDiff = 400

    def ran(self, engine):
        self.assertEqual(engine.rc, 0, engine.log[-4000:])
        return engine

    def ours(self, calls, **changes):
        engine = self.ran(Engine(calls, {"budget": FULL}, **changes))
        self.assertRegex(engine.log, r"kvferry 0\.\d+\.\d+ on .*: budget 2048, pages of 4 tokens")
        return engine

    def same_that_stay(self, told, wanted):
        """Requests that were dropped have no answer, the others that of their prompt, which come in turn."""
        self.assertEqual(told, [tokens and wanted[number % len(wanted)][0] for number, tokens in enumerate(told)])


class Timed(unittest.TextTestResult):
    """Says how long each group took."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.seconds, self._began = {}, 0.0

    def startTest(self, test):
        self._began = time.monotonic()
        super().startTest(test)

    def stopTest(self, test):
        group = type(test).__name__
        self.seconds[group] = self.seconds.get(group, 0) + time.monotonic() - self._began
        super().stopTest(test)


def main(groups):
    """Run tests by name, or all of some groups."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", default="1/1", help="I/N: every Nth test, from the Ith")
    parser.add_argument("names", nargs="*", metavar="TEST")
    args = parser.parse_args()
    load, module = unittest.defaultTestLoader, sys.modules["__main__"]
    shard, of = map(int, args.shard.split("/"))
    units = []
    for name in args.names or [one.__name__ for one in groups]:
        tests = load.loadTestsFromName(name, module)
        units += [tests] if "setUpClass" in vars(getattr(module, name, Case)) else list(tests)
    done = unittest.TextTestRunner(verbosity=2, resultclass=Timed).run(unittest.TestSuite(units[shard - 1::of]))
    print(", ".join("%s %d s" % one for one in done.seconds.items()))
    sys.exit(not done.wasSuccessful())
