#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names that kvferry takes from vLLM's inside, with their signatures in a release: a list per release.

usage: vllm_names.py SOURCE [--write]

SOURCE is a wheel (`pip download --no-deps vllm==0.33.0`) or a folder with a package vllm. Nothing of it is imported.
They are read from python/kvferry/vllm/: names that upstream.py imports and those of its tables, attributes of
values that are annotated with vLLM's classes, and methods that backend.py overrides. The list of that release in
tests/python/vllm/ is compared, or written. Knows Python's syntax alone.
"""
import argparse
import ast
import difflib
import os
import re
import sys
import zipfile
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PLUGIN = os.path.join(ROOT, "python", "kvferry", "vllm")
LISTS = os.path.join(ROOT, "tests", "python", "vllm")
ENUM = ("name", "value") # which every enumerator has


class Member(NamedTuple):
    """A name, and what comes after it in a list: a signature, a type, or what it stands for."""
    name: str
    text: str

    @property
    def types(self) -> List[str]:
        """Names in its type."""
        return re.findall(r"\w+", self.text) if self.text.startswith(": ") else []


def signature(function: ast.FunctionDef) -> str:
    """Parameters without types; `a=` has a default."""
    a = function.args
    names = [one.arg for one in a.posonlyargs + a.args]
    first = len(names) - len(a.defaults)
    words = [name + ("=" if i >= first else "") for i, name in enumerate(names)]
    words += ["*" + a.vararg.arg] if a.vararg else ["*"] if a.kwonlyargs else []
    words += [one.arg + ("" if default is None else "=") for one, default in zip(a.kwonlyargs, a.kw_defaults)]
    words += ["**" + a.kwarg.arg] if a.kwarg else []
    return "(%s)" % ", ".join(words)


class Source:
    """A release, by its files."""

    def __init__(self, path: str) -> None:
        self._zip = zipfile.ZipFile(path) if os.path.isfile(path) else None # pylint: disable=consider-using-with
        self._path, self._modules = path, {}

    def _read(self, path: str) -> Optional[str]:
        try:
            if self._zip is not None:
                return self._zip.read(path).decode()
            with open(os.path.join(self._path, path), encoding="utf-8") as text:
                return text.read()
        except (KeyError, FileNotFoundError):
            return None

    @property
    def version(self) -> str:
        """As 0.33."""
        text = self._read("vllm/_version.py") or ""
        return ".".join(re.search(r"version = '([\d.]+)", text)[1].split(".")[:2])

    def _module(self, name: str) -> Tuple[Optional[ast.Module], bool]:
        if name not in self._modules:
            path = name.replace(".", "/")
            plain, package = self._read(path + ".py"), self._read(path + "/__init__.py")
            text = plain if package is None else package
            self._modules[name] = None if text is None else ast.parse(text), package is not None
        return self._modules[name]

    def find(self, module: str, name: str, seen: Tuple[str, ...] = ()) -> Optional[Tuple[str, ast.AST]]:
        """(module that defines it, its node)."""
        tree, is_package = self._module(module)
        if tree is None or module in seen:
            return None
        for node in statements(tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return module, node
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in targets(node):
                return module, node
        for node in statements(tree.body):
            if isinstance(node, ast.ImportFrom) and name in {one.asname or one.name for one in node.names}:
                above = module.split(".")[:len(module.split(".")) - node.level + is_package] if node.level else []
                where = ".".join(above + ([node.module] if node.module else []))
                real = next(one.name for one in node.names if name == (one.asname or one.name))
                found = self.find(where, real, (*seen, module))
                if found is not None:
                    return found
        return None

    def named(self, module: str, name: str) -> Optional[Member]:
        """A name of a module, as it is imported."""
        found = self.find(module, name)
        if found is None:
            return None
        (where, node) = found
        full, real = "%s.%s" % (module, name), "%s.%s" % (where, name)
        if isinstance(node, ast.FunctionDef):
            return Member(full, signature(node))
        return Member(full, " = " + real if real != full else "")

    def member(self, full: str, name: str, top: Optional[str] = None) -> Optional[Member]:
        """A field or method of a class, or of one above it."""
        module, _, class_name = full.rpartition(".")
        found = self.find(module, class_name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        where, node = found
        told = "%s.%s" % (top or full, name)
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == name:
                is_property = any("property" in ast.unparse(word) for word in one.decorator_list)
                return Member(told, ": " + (ast.unparse(one.returns) if one.returns else "Any") if is_property else signature(one))
            if isinstance(one, (ast.Assign, ast.AnnAssign)) and name in targets(one):
                return Member(told, ": " + ast.unparse(one.annotation) if isinstance(one, ast.AnnAssign) else "")
        if any(isinstance(one, ast.Attribute) and one.attr == name and isinstance(one.ctx, ast.Store) for one in ast.walk(node)):
            return Member(told, "")
        for base in node.bases:
            text = ast.unparse(base).split("[")[0]
            above = self.find(where, text)
            got = self.member("%s.%s" % (above[0], text), name, top or full) if above else None
            if got is not None:
                return got
        return None


class List_:
    """A release, by its list."""

    def __init__(self, lines: List[str]) -> None:
        self._rows: Dict[str, Member] = {}
        for line in lines:
            name = re.match(r"[\w.]+", line)[0]
            self._rows[name] = Member(name, line[len(name):])

    def named(self, module: str, name: str) -> Optional[Member]:
        """As Source.named."""
        return self._rows.get("%s.%s" % (module, name))

    def member(self, full: str, name: str) -> Optional[Member]:
        """As Source.member."""
        return self._rows.get("%s.%s" % (full, name))

    def find(self, module: str, name: str) -> Optional[Tuple[str, None]]:
        """Where a class is, by its members or by its own row."""
        return (module, None) if any(row.startswith("%s.%s." % (module, name)) for row in self._rows) else None


def targets(node: ast.AST) -> List[str]:
    """Names that are assigned."""
    places = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [one.id for one in places if isinstance(one, ast.Name)]


def statements(body: List[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, in whatever branch."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
                yield from statements(getattr(node, part, []))


def of_release(tree: ast.AST, version: str) -> ast.AST:
    """Without the branches of other releases: `if IS_0_32:`."""
    class Branches(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> object: # pylint: disable=invalid-name
            self.generic_visit(node)
            asked = re.fullmatch(r"IS_(\d+)_(\d+)", ast.unparse(node.test))
            if asked is None:
                return node
            return node.body if ".".join(asked.groups()) == version else node.orelse
    return Branches().visit(tree)


class Taken:
    """Names that the plug-in takes of a release, member by member; `missing` has those that are not there."""

    def __init__(self, release: object, version: str) -> None:
        self.release, self.rows, self.missing = release, {}, []
        self.overrides: List[Tuple[str, str, str]] = [] # (ours, its signature, theirs)
        self.calls: List[Tuple[str, int, List[str], str]] = [] # (theirs, arguments, their names, its signature)
        self._names: Dict[str, str] = {} # of upstream.py: vLLM's classes, by full name
        trees = {name: of_release(ast.parse(text), version) for name, text in files()}
        upstream = trees["upstream.py"]
        self._imports(upstream)
        self._tables(upstream)
        values = {name: node for node in upstream.body if isinstance(node, ast.AnnAssign) for name in targets(node)}
        self._globals = {name: self._class_in(node.annotation) for name, node in values.items()}
        for tree in trees.values():
            self._attributes(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    self._called(node)
                if isinstance(node, ast.ClassDef):
                    self._overridden(node)

    def _add(self, member: Optional[Member], name: str) -> Optional[Member]:
        if member is None:
            self.missing.append(name)
        else:
            self.rows[member.name] = member.text
        return member

    def _imports(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                for one in node.names:
                    full = "%s.%s" % (node.module, one.name)
                    member = self._add(self.release.named(node.module, one.name), full)
                    self._names[one.name] = member.text[3:] if member and member.text.startswith(" = ") else full

    def _tables(self, tree: ast.AST) -> None:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                for full, names in ast.literal_eval(node.value).items():
                    for name in names:
                        self._add(self.release.member(full, name), "%s.%s" % (full, name))

    def _class_in(self, annotation: Optional[ast.AST]) -> Optional[str]:
        """vLLM's class in an annotation."""
        words = re.findall(r"\w+", ast.unparse(annotation)) if annotation is not None else []
        return next((self._names[word] for word in words if word in self._names), None)

    def _type_of(self, member: Member, where: str) -> Optional[str]:
        """vLLM's class that a field has, if it is known: it is in a module of its part of vLLM."""
        for word in member.types:
            if word in self._names:
                return self._names[word]
            parts = where.split(".")[:-1]
            for module in [".".join(parts), *(".".join(parts[:-1] + [word_]) for word_ in modules_beside(self.release, parts))]:
                if word[0].isupper() and self.release.find(module, word):
                    found = self.release.find(module, word)
                    return "%s.%s" % (found[0], word)
        return None

    def _attributes(self, tree: ast.AST) -> None:
        """Chains that begin at a name that is annotated, at a class of vLLM's, or at self.config."""
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for nodes in [[node for node in ast.walk(tree) if id(node) not in inside], *map(list, map(ast.walk, functions))]:
            known = {name: full for name, full in self._names.items() if name[0].isupper()}
            known.update(self._globals)
            known["self.config"] = self._names.get("VllmConfig")
            for node in nodes:
                if isinstance(node, ast.arg) and node.annotation is not None:
                    known[node.arg] = self._class_in(node.annotation)
                elif isinstance(node, ast.AnnAssign):
                    known[ast.unparse(node.target)] = self._class_in(node.annotation)
            for node in nodes:
                if isinstance(node, ast.Attribute):
                    self._chain(node, known)

    def _called(self, node: ast.Call) -> None:
        """A call of a function that is imported."""
        name = ast.unparse(node.func)
        row = self.rows.get(self._names.get(name, ""), "")
        if row.startswith("("):
            self.calls.append((name, len(node.args), [one.arg for one in node.keywords], row))

    def _chain(self, node: ast.Attribute, known: Dict[str, Optional[str]]) -> Optional[str]:
        """The class at the end of a chain; its members are taken."""
        at = ast.unparse(node.value)
        full = known.get(at)
        if full is None and isinstance(node.value, ast.Attribute) and at != "self.config":
            full = self._chain(node.value, known)
        if full is None:
            return None
        member = self.release.member(full, node.attr)
        if member is None and node.attr in ENUM:
            return None
        self._add(member, "%s.%s" % (full, node.attr))
        return self._type_of(member, full) if member else None

    def _overridden(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            full = self._names.get(ast.unparse(base).split("[")[0])
            if full is None:
                continue
            for one in node.body:
                if isinstance(one, ast.FunctionDef):
                    theirs = self.release.member(full, one.name)
                    if theirs is not None:
                        self.rows[theirs.name] = theirs.text
                        self.overrides.append(("%s.%s" % (node.name, one.name), signature(one), theirs.text))
                elif isinstance(one, (ast.Assign, ast.AnnAssign)):
                    for name in targets(one):
                        theirs = self.release.member(full, name)
                        if theirs is not None:
                            self.rows[theirs.name] = theirs.text

    def lines(self) -> List[str]:
        """The list."""
        return ["%s%s" % row for row in sorted(self.rows.items())]


def modules_beside(release: object, parts: List[str]) -> List[str]:
    """Modules of the package that a module is in: classes of configurations refer to each other."""
    if isinstance(release, List_):
        before = ".".join(parts[:-1]) + "."
        return sorted({name[len(before):].split(".")[0] for name in release._rows if name.startswith(before)})
    folder = "/".join(parts[:-1])
    names = release._zip.namelist() if release._zip else [
        "%s/%s" % (folder, name) for name in sorted(os.listdir(os.path.join(release._path, folder)))]
    return sorted(name[len(folder) + 1:-3] for name in names
                  if name.startswith(folder + "/") and name.endswith(".py") and "/" not in name[len(folder) + 1:])


def files() -> List[Tuple[str, str]]:
    """The plug-in's."""
    found = []
    for name in sorted(os.listdir(PLUGIN)):
        if name.endswith(".py"):
            with open(os.path.join(PLUGIN, name), encoding="utf-8") as text:
                found.append((name, text.read()))
    return found


def takes(ours: str, theirs: str) -> bool:
    """Whether a method with our parameters takes what one with theirs takes."""
    def split(text: str) -> Tuple[List[str], Set[str]]:
        words = text[1:-1].split(", ") if text != "()" else []
        return [word for word in words if not word.startswith("*")], {word for word in words if word.startswith("*")}
    (mine, rest), (wanted, _) = split(ours), split(theirs)
    given = [word.rstrip("=") for word in wanted]
    if any(word.startswith("**") for word in rest) and any(not word.startswith("**") and word != "*" for word in rest):
        return True
    names = [word.rstrip("=") for word in mine]
    return names[:len(given)] == given and all(word.endswith("=") for word in mine[len(given):]) and all(
        one.endswith("=") for one, other in zip(mine, wanted) if other.endswith("="))


def given(call: Tuple[str, int, List[str], str]) -> bool:
    """Whether a call has what the function wants, and no more."""
    _, count, names, theirs = call
    words = [word for word in theirs[1:-1].split(", ") if word and not word.startswith("*")]
    wanted = [word for word in words[count:] if not word.endswith("=")]
    return count <= len(words) and set(wanted) <= set(names) <= {word.rstrip("=") for word in words[count:]}


def list_of(version: str) -> str:
    """Its file."""
    return os.path.join(LISTS, "%s.txt" % version)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("source", metavar="SOURCE", help="a wheel, or a folder with a package vllm")
    parser.add_argument("--write", action="store_true", help="write the list")
    args = parser.parse_args()
    source = Source(args.source)
    taken, path = Taken(source, source.version), list_of(source.version)
    for name in taken.missing:
        print("vLLM %s has no %s" % (source.version, name))
    for ours, mine, theirs in taken.overrides:
        if not takes(mine, theirs):
            print("%s%s does not take what vLLM gives: %s" % (ours, mine, theirs))
    for call in taken.calls:
        if not given(call):
            print("%s has other parameters: %s" % (call[0], call[3]))
    lines = taken.lines()
    if args.write:
        os.makedirs(LISTS, exist_ok=True)
        with open(path, "w", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")
        return 0
    there: List[str] = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as text:
            there = text.read().splitlines()
    else: # a new release: beside the newest that there is
        newest = max(os.listdir(LISTS), key=lambda name: [int(n) for n in name[:-4].split(".")])
        with open(os.path.join(LISTS, newest), encoding="utf-8") as text:
            there = text.read().splitlines()
    changes = list(difflib.unified_diff(there, lines, "list", args.source, n=0, lineterm=""))
    print("\n".join(changes))
    return 1 if changes or taken.missing else 0


if __name__ == "__main__":
    sys.exit(main())
