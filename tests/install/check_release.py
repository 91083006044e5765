#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `./dev release` does to a wheel that auditwheel made: the version says which CUDA is inside, licences are those
of the libraries inside, and a library without one ends it."""
import json
import os
import pathlib
import tempfile
import unittest
from unittest import mock

import release


class Wheel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.told = self.folder / "kvferry-0.1.0.dist-info"
        (self.told / "sboms").mkdir(parents=True)
        (self.folder / "kvferry-0.1.0.data").mkdir()
        (self.folder / "kvferry.libs").mkdir()
        (self.told / "METADATA").write_text("Name: kvferry\nVersion: 0.1.0\nRequires-Python: >= 3.9\n\nVersion: none\n")

    def holds(self, *libraries):
        for name in libraries:
            (self.folder / "kvferry.libs" / (name + ".so.1")).touch()

    def named(self, *packages):
        parts = [{"name": "kvferry", "purl": "pkg:pypi/kvferry@0.1.0"},
                 *({"name": name, "purl": "pkg:deb/debian/" + name} for name in packages)]
        (self.told / "sboms" / "auditwheel.cdx.json").write_text(json.dumps({"components": parts}))

    def test_version(self):
        release.name_version(str(self.folder), "cuda12.9")
        self.assertEqual(sorted(os.listdir(self.folder)),
                         ["kvferry-0.1.0+cuda12.9.data", "kvferry-0.1.0+cuda12.9.dist-info", "kvferry.libs"])
        self.assertEqual((self.folder / "kvferry-0.1.0+cuda12.9.dist-info" / "METADATA").read_text(),
                         "Name: kvferry\nVersion: 0.1.0+cuda12.9\nRequires-Python: >= 3.9\n\nVersion: none\n")

    def test_licences(self):
        self.holds("liba", "libb")
        self.named("a", "b")
        with mock.patch.object(release.shutil, "copy", lambda source, target: pathlib.Path(target).write_text(source)):
            release.add_licences(str(self.folder))
        self.assertEqual(sorted(os.listdir(self.told / "licenses")), ["a.txt", "b.txt", "kvferry.txt"])
        self.assertEqual((self.told / "licenses" / "b.txt").read_text(), "/usr/share/doc/b/copyright")

    def test_a_library_without_a_licence(self):
        self.holds("liba", "libb")
        self.named("a")
        with mock.patch.object(release.shutil, "copy"), self.assertRaisesRegex(SystemExit, "liba.so.1 libb.so.1"):
            release.add_licences(str(self.folder))


if __name__ == "__main__":
    unittest.main()
