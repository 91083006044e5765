#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `./dev python` and `./dev vllm` make once in the cache folder: two that make it at once end with one of
theirs, whole, and leave nothing beside it; what fails leaves nothing at all. Nothing is fetched."""
import os
import pathlib
import tempfile
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import python_env
import real_model

PARTS = ("config.json", "model.safetensors")


class Once(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.cache = pathlib.Path(folder.name)
        for owner, name, value in ((real_model, "cache_folder", lambda: folder.name),
                                   (real_model, "fetch", lambda: "a.gguf")):
            patch = mock.patch.object(owner, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def unpacking(self, unpack):
        return mock.patch.object(python_env.subprocess, "run", lambda command, check: unpack(pathlib.Path(command[-1])))

    def test_two_at_once(self):
        both = threading.Barrier(2, timeout=20)

        def unpack(made):
            for part in PARTS:
                made.mkdir(exist_ok=True)
                both.wait()
                (made / part).write_text(str(threading.get_ident()))
            both.wait()
        with self.unpacking(unpack), ThreadPoolExecutor(2) as threads:
            first, second = threads.map(lambda _: python_env.model_folder("python"), range(2))
        self.assertEqual(first, second)
        self.assertEqual(os.listdir(self.cache), [os.path.basename(first)])
        texts = {(pathlib.Path(first) / part).read_text() for part in PARTS}
        self.assertEqual(sorted(os.listdir(first)), sorted(PARTS))
        self.assertEqual(len(texts), 1, "parts of two makers")

    def test_what_fails_leaves_nothing(self):
        def unpack(made):
            made.mkdir()
            raise OSError("no space")
        with self.unpacking(unpack), self.assertRaisesRegex(OSError, "no space"):
            python_env.model_folder("python")
        self.assertEqual(os.listdir(self.cache), [])


if __name__ == "__main__":
    unittest.main()
