#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the tables of the Python package with the headers: functions with their parameters, structs
with their fields, enumerators, constants; by a C program also offsets, sizes and kinds of fields.

usage: check_capi.py INCLUDE_FOLDER [CC...]
"""
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from kvferry import capi

INCLUDE = pathlib.Path(sys.argv[1])
CC = sys.argv[2:]
HEADERS = sorted(INCLUDE.glob("kvferry/*.h"))


def without_comments(text):
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text).replace("\\\n", " ")


TEXT = "\n".join(without_comments(path.read_text(encoding="utf-8")) for path in HEADERS)
CODE = re.sub(r"^\s*#.*$", "", TEXT, flags=re.M)
FUNCTIONS = dict(row.split(maxsplit=1) for row in capi.FUNCTIONS.split("\n") if row)


def parameter_word(text):
    """A parameter or a result of C in the words of the tables."""
    text = text.strip()
    if text == "const char *" or re.fullmatch(r"const char \*\w*", text):
        return "text"
    if "*" in text or "[" in text or re.match(r"kvf_\w+_fn\b", text):
        return "ptr"
    kind = text.replace("const ", "").split()[0]
    words = {"uint32_t": "u32", "uint64_t": "u64",
             "size_t": "size", "int": "int", "void": "void", "double": "f64"}
    return words.get(kind) or ("enum" if "enum " + kind in CODE else kind)


def fields_of(body):
    """Names in the body of a struct, in order."""
    names = []
    for row in body.split(";"):
        pointer = re.search(r"\(\s*\*\s*(\w+)\s*\)\s*\(", row)
        if pointer:
            names.append(pointer.group(1))
        elif row.strip():
            names += [re.search(r"(\w+)\s*(\[\w+\]\s*)?$", part.strip()).group(1)
                      for part in row.split(",")]
    return names


class Tables(unittest.TestCase):
    def test_functions(self):
        found = {}
        for result, name, parameters in re.findall(
                r"KVF_API\s+(?:KVF_CHECKED\s+)?([\w\s]+?[\s*]+?)(kvf_\w+)\(([^;]*)\);", CODE):
            words = [parameter_word(result)]
            if parameters.strip() != "void":
                words += [parameter_word(p) for p in parameters.split(",")]
            found[name] = " ".join(words)
        self.assertEqual(len(found), CODE.count("KVF_API"))
        ours = {name: " ".join(row.split()) for name, row in FUNCTIONS.items()}
        # Texts that the library writes to, and what may be NULL, are plain pointers in the tables.
        for name in found:
            if name in ours:
                left, right = found[name].split(), ours[name].split()
                self.assertEqual(left, right, name)
        self.assertEqual(set(found) - set(capi.LEFT_OUT), set(ours))

    def test_structs(self):
        found = {name: fields_of(body) for body, name in re.findall(
            r"typedef struct kvf_\w+ \{(.*?)\}\s*(kvf_\w+);", CODE, re.S)}
        ours = {s.c_name: [name for name, _ in s._fields_] for s in capi.STRUCTS}
        self.assertEqual(CODE.count("typedef struct"), len(found) + len(re.findall(
            r"typedef struct kvf_\w+ kvf_\w+;", CODE)))
        self.assertEqual(found, ours)

    def test_callbacks(self):
        found = set(re.findall(r"typedef [\w\s]+\(\*(kvf_\w+)\)", CODE))
        self.assertEqual(found, set(capi.CALLBACKS))

    def test_enumerators(self):
        lists = re.findall(r"\bX\((KVF_\w+),", TEXT)
        plain = [name for body in re.findall(r"typedef enum kvf_\w+ \{(.*?)\}", CODE, re.S)
                 for name in re.findall(r"\b(KVF_\w+)\s*(?:,|=|$)", body)]
        ours = [name for e in capi.ENUMS for name in e.c_names]
        self.assertEqual(sorted(lists + plain), sorted(ours))

    def test_constants(self):
        found = {name for name in re.findall(r"^\s*#\s*define (KVF_\w+)\b", TEXT, re.M)
                 if not name.endswith("_LIST")}
        self.assertEqual(found, set(capi.CONSTANTS) | set(capi.LEFT_OUT))
        self.assertTrue(all(capi.LEFT_OUT.values()))

    def test_values_and_layout(self):
        """What a compiler says of every name, against ctypes."""
        wanted = {}
        lines = []

        def ask(label, expression, form, value):
            wanted[label] = value
            lines.append('printf("%s %s\\n", %s);' % (label, form, expression))

        for e in capi.ENUMS:
            for name, value in e.c_names.items():
                ask(name, "(long long)" + name, "%lld", str(value))
        for name, value in capi.CONSTANTS.items():
            ask(name, "(double)" + name, "%.17g", "%.17g" % value)
        for s in capi.STRUCTS:
            ask(s.c_name, "sizeof(%s)" % s.c_name, "%zu", str(ctypes.sizeof(s)))
            for name, kind in s._fields_:
                field = getattr(s, name)
                member = "((%s *)0)->%s" % (s.c_name, name)
                ask("%s.%s" % (s.c_name, name),
                    "offsetof(%s, %s), sizeof(%s), KIND(%s)" % (s.c_name, name, member, member),
                    "%zu,%zu,%s", "%d,%d,%s" % (field.offset, field.size, self.kind(kind)))
        includes = "".join("#include <kvferry/%s>\n" % path.name for path in HEADERS)
        program = includes + """#include <stdio.h>
        #define KIND(x) _Generic((x), float: "float", double: "float", int32_t: "int", \\
            uint32_t: "int", uint64_t: "int", unsigned long long: "int", default: "other")
        int main(void) { %s return 0; }""" % "\n".join(lines)
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "layout.c")
            source.write_text(program, encoding="utf-8")
            try:
                subprocess.run([*CC, "-std=c17", "-I", str(INCLUDE), "-o", folder + "/layout",
                                str(source)], check=True)
            except FileNotFoundError:
                self.skipTest("no C compiler (%s)" % " ".join(CC))
            said = subprocess.run([folder + "/layout"], check=True, capture_output=True, text=True)
        self.assertEqual(dict(line.split(" ") for line in said.stdout.splitlines()), wanted)

    @staticmethod
    def kind(kind):
        if kind in (ctypes.c_float, ctypes.c_double):
            return "float"
        integers = (ctypes.c_int, ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t)
        return "int" if kind in integers else "other"

    def test_every_function_is_used(self):
        """What the library has, a class or a function of the package calls."""
        package = pathlib.Path(capi.__file__).parent
        text = "".join(path.read_text(encoding="utf-8") for path in package.glob("*.py")
                       if path.name != "capi.py")
        unused = [name for name in FUNCTIONS if "lib." + name not in text]
        self.assertEqual(unused, ["kvf_status_name"]) # Status(n).name is its text


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
