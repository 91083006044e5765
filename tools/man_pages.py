#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Manual pages of the C API, made from the comments of the public headers.

usage: man_pages.py --headers DIR --version V --doxygen PROGRAM --doxygen2man PROGRAM OUTPUT

Functions have pages by doxygen2man, structs, with what their fields mean, by Doxygen. OUTPUT becomes
a folder man3. Pages name the version and no date, so that the same headers give the same pages.
"""
import argparse
import glob
import os
import re
import shutil
import subprocess
import tempfile

SETTINGS = """
PROJECT_NAME = kvferry
INPUT = "{headers}/kvferry"
STRIP_FROM_PATH = "{headers}"
STRIP_FROM_INC_PATH = "{headers}"
OUTPUT_DIRECTORY = "{work}"
OPTIMIZE_OUTPUT_FOR_C = YES
JAVADOC_AUTOBRIEF = YES
SORT_MEMBER_DOCS = NO
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = KVF_API= KVF_CHECKED=
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
GENERATE_MAN = YES
QUIET = YES
WARNINGS = NO
WARN_IF_UNDOCUMENTED = NO
WARN_IF_INCOMPLETE_DOC = NO
"""
SECTION = r'^\.SH "?(?:%s)"?\n(?:(?!\.SH).*\n?)*'
# Lines of the tools that say nothing of kvferry: a company's copyright, who generated it, and all the
# other functions of the header.
ADDED = re.compile(SECTION % "COPYRIGHT|Author|SEE ALSO", re.MULTILINE)
# Structs of a call, with half of their comments: their own pages have the whole.
STRUCTS = re.compile(SECTION % "STRUCTURES", re.MULTILINE)
# NAME_sized with the inline NAME that passes sizeof to it: the page is of NAME.
SIZED = re.compile(r"^KVF_API [^;]*?\w+_sized\([^;]*\);\nstatic inline ([^{]*?)\n\{.*?^\}",
                   re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"^\.TH .*$", re.MULTILINE)


def finish(path, folder, version):
    """Write a page into the folder, under one title line; structs of a call are what to see also."""
    name = os.path.basename(path)
    with open(path, encoding="utf-8") as page:
        text = ADDED.sub("", page.read())
    title = '.TH "%s" 3 "" "kvferry %s" "kvferry"' % (name[: -len(".3")], version)
    text = TITLE.sub(lambda _: title, text, count=1)
    structs = STRUCTS.search(text)
    if structs:
        names = re.findall(r"^struct (kvf_\w+) \{", structs.group(), re.MULTILINE)
        text = STRUCTS.sub("", text).rstrip() + "\n.SH SEE ALSO\n"
        text += "".join(".BR %s (3)\n" % struct for struct in names)
    with open(os.path.join(folder, name), "w", encoding="utf-8") as page:
        page.write(text)


def make(options, work):
    headers = os.path.join(work, "include")
    os.makedirs(os.path.join(headers, "kvferry"))
    for path in glob.glob(os.path.join(options.headers, "kvferry", "*.h")):
        with open(path, encoding="utf-8") as header:
            text = SIZED.sub(r"\1;", header.read())
        copy = os.path.join(headers, "kvferry", os.path.basename(path))
        with open(copy, "w", encoding="utf-8") as header:
            header.write(text)
    subprocess.run([options.doxygen, "-"], input=SETTINGS.format(headers=headers, work=work), text=True,
                   check=True)
    functions = os.path.join(work, "functions")
    os.mkdir(functions)
    for path in sorted(glob.glob(os.path.join(headers, "kvferry", "*.h"))):
        stem = os.path.splitext(os.path.basename(path))[0]
        subprocess.run([options.doxygen2man, "-m", "-P", "-p", "kvferry", "-I", "kvferry/%s.h" % stem,
                        "-d", os.path.join(work, "xml"), "-o", functions, "%s_8h.xml" % stem],
                       stdout=subprocess.DEVNULL, check=True)
    structs = os.path.join(work, "man", "man3")
    return sorted(p for folder in (functions, structs) for p in glob.glob(folder + "/kvf_*.3"))


def main():
    parser = argparse.ArgumentParser()
    for name in ("headers", "version", "doxygen", "doxygen2man"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-man-") as work:
        pages = make(options, work)
        shutil.rmtree(options.output, ignore_errors=True)
        os.makedirs(options.output)
        for path in pages:
            finish(path, options.output, options.version)


if __name__ == "__main__":
    main()
