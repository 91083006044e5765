#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the tables of the Python package with the headers: functions with their parameters, structs
with their fields, enumerators, constants; by a C program also offsets, sizes and kinds of fields.

Sizes and offsets are compared with the committed table struct_layout.txt, too. A line of it never
changes: a new field adds one, at the end of its struct or for a reserved field that it takes over, and
changes the size of the struct alone. KVF_WRITE_LAYOUT=1 writes the table anew.

usage: check_capi.py INCLUDE_FOLDER [CC...]
"""
import ctypes
import os
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

# Structs with no size that never change, and their bytes.
WHOLE = {"kvf_error": 520, "kvf_allocator": 24, "kvf_link_times": 40, "kvf_link_line": 24,
         "kvf_prune_profile": 12, "kvf_structkv_measures": 24}
# Structs that only the library makes.
LENT = {"kvf_setting", "kvf_select_view", "kvf_prune_view", "kvf_prune_answer"}


def exported(text):
    """(result, name, parameters) of the functions that the library exports."""
    return [(result, name, [" ".join(p.split()) for p in parameters.split(",")])
            for result, name, parameters in re.findall(
                r"KVF_API\s+(?:KVF_CHECKED\s+)?([\w\s]+?[\s*]+?)(kvf_\w+)\(([^;]*)\);", text)]


def structs(text):
    """Bodies by name."""
    return {name: body for body, name in re.findall(
        r"typedef struct kvf_\w+ \{(.*?)\}\s*(kvf_\w+);", text, re.S)}


def who_cannot_grow(text):
    """Structs of a header that no field may be added to: they have no size, and come without."""
    found, functions = structs(text), exported(text)
    findings = set()
    for struct in set(found) - set(WHOLE):
        if found[struct].split()[:2] == ["size_t", "size;"]:
            continue
        for holder, body in found.items():
            if re.search(r"\b%s \w" % struct, body):
                findings.add("%s is inside %s" % (struct, holder))
        if struct in LENT:
            findings.update("%s is given to %s" % (struct, name) for _, name, parameters in functions
                            for p in parameters if re.fullmatch(r"%s \*\w+" % struct, p))
            continue
        comes = 0
        for _, name, parameters in functions:
            for p, after in zip(parameters, parameters[1:] + [""]):
                pointer = re.fullmatch(r"(?:const )?(kvf_\w+) \*(\w+)", p)
                if not pointer:
                    continue
                kind, argument = pointer.groups()
                inside = re.search(r"\b%s \*(\w+);" % struct, found.get(kind, ""))
                if kind == struct:
                    comes += 1
                    if after not in ("size_t size", "size_t %s_size" % argument):
                        findings.add("%s comes to %s without its size" % (struct, name))
                elif inside:
                    comes += 1
                    if "size_t %s_size" % inside.group(1) not in parameters:
                        findings.add("%s comes to %s in %s without its size" % (struct, name, kind))
        if not comes:
            findings.add("%s has no size, and no function takes it with one" % struct)
        findings.update("%s is what %s returns" % (struct, name) for result, name, _ in functions
                        if result.strip() == struct)
    return sorted(findings)


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
        for result, name, parameters in exported(CODE):
            words = [parameter_word(result)]
            if parameters != ["void"]:
                words += [parameter_word(p) for p in parameters]
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
        found = {name: fields_of(body) for name, body in structs(CODE).items()}
        ours = {s.c_name: [name for name, _ in s._fields_] for s in capi.STRUCTS}
        self.assertEqual(CODE.count("typedef struct"), len(found) + len(re.findall(
            r"typedef struct kvf_\w+ kvf_\w+;", CODE)))
        self.assertEqual(found, ours)

    def test_structs_can_grow(self):
        """Every struct begins with its size, or comes with it, or never changes."""
        self.assertEqual(who_cannot_grow(CODE), [])
        self.assertEqual({s.c_name: ctypes.sizeof(s) for s in capi.STRUCTS if s.c_name in WHOLE}, WHOLE)

    def test_a_struct_that_cannot_grow_is_found(self):
        struct = "typedef struct kvf_new { int a; } kvf_new;"
        takes = "KVF_API void kvf_f(kvf_new *n%s);"
        holder = "typedef struct kvf_holder { size_t size; const kvf_new %sinner; } kvf_holder;"
        takes_holder = "KVF_API void kvf_g(const kvf_holder *h%s);"
        for text, finding in (
                (struct, "kvf_new has no size, and no function takes it with one"),
                (struct + takes % "", "kvf_new comes to kvf_f without its size"),
                (struct + takes % ", int size", "kvf_new comes to kvf_f without its size"),
                (struct + takes % ", size_t size" + holder % "", "kvf_new is inside kvf_holder"),
                (struct + holder % "*" + takes_holder % "",
                 "kvf_new comes to kvf_g in kvf_holder without its size"),
                (struct + takes % ", size_t n_size" + "KVF_API kvf_new kvf_h(void);",
                 "kvf_new is what kvf_h returns"),
                ("typedef struct kvf_setting { int a; } kvf_setting;"
                 "KVF_API void kvf_f(kvf_setting *s);", "kvf_setting is given to kvf_f")):
            self.assertEqual(who_cannot_grow(text), [finding], text)
        for text in (struct + takes % ", size_t size", struct + takes % ", size_t n_size",
                     struct + holder % "*" + takes_holder % ", size_t inner_size"):
            self.assertEqual(who_cannot_grow(text), [], text)

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
        """A compiler's values of every name, against ctypes."""
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

    def test_layout_is_the_committed_one(self):
        """Programs that were compiled with yesterday's headers go on."""
        rows = ["# Size of every public struct, offset and size of its fields, on 64-bit machines."]
        for s in sorted(capi.STRUCTS, key=lambda s: s.c_name):
            rows.append("%s %d" % (s.c_name, ctypes.sizeof(s)))
            rows += ["    %d %d %s" % (getattr(s, name).offset, getattr(s, name).size, name) for name, _ in s._fields_]
        table = pathlib.Path(__file__).with_name("struct_layout.txt")
        text = "\n".join(rows) + "\n"
        if os.environ.get("KVF_WRITE_LAYOUT") == "1":
            table.write_text(text, encoding="utf-8")
        self.assertEqual(table.read_text(encoding="utf-8").splitlines(), text.splitlines())

    @staticmethod
    def kind(kind):
        if kind in (ctypes.c_float, ctypes.c_double):
            return "float"
        integers = (ctypes.c_int, ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t)
        return "int" if kind in integers else "other"

    def test_every_function_is_used(self):
        """Every function of the library is called by a class or a function of the package."""
        package = pathlib.Path(capi.__file__).parent
        text = "".join(path.read_text(encoding="utf-8") for path in package.glob("*.py")
                       if path.name != "capi.py")
        unused = [name for name in FUNCTIONS if "lib." + name not in text]
        self.assertEqual(unused, ["kvf_status_name"]) # Status(n).name is its text


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
