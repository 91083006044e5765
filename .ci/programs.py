#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Programs that have to be built for some of the tests of a build folder, for ninja.

usage: programs.py FOLDER [--suite NAME]... [--no-suite NAME]...

The options are those of `meson test`: without --suite all tests, and those of a --no-suite never.
"""
import argparse
import json
import os


def read(folder, what):
    with open(os.path.join(folder, "meson-info", "intro-%s.json" % what), encoding="utf-8") as f:
        return json.load(f)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--no-suite", action="append", default=[])
    args = parser.parse_args()
    needed = set()
    for test in read(args.folder, "tests"):
        suites = {name.split(":")[-1] for name in test["suite"]}
        if (not args.suite or suites & set(args.suite)) and not suites & set(args.no_suite):
            needed.update(test["depends"])
    top = os.path.realpath(args.folder)
    for target in read(args.folder, "targets"):
        if target["id"] in needed:
            print(os.path.relpath(target["filename"][0], top))


if __name__ == "__main__":
    main()
