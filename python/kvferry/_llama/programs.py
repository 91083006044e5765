# SPDX-License-Identifier: Apache-2.0
"""Kinds of programs and libraries of llama.cpp: how its ggml comes into the process, and so the way by which it
loads the plug-in.

Nothing of it is run: the dynamic linker lists what it would load. Invariant: a way is named only where ggml
comes as a shared library.
"""
import os
import re
import shutil
import subprocess
from typing import List, NamedTuple

from . import Refused

ELF = b"\x7fELF"
PATH, PRELOAD = "GGML_BACKEND_PATH", "LD_PRELOAD"
MARK = b"ggml_backend_reg" # in every program that has ggml inside


class Program(NamedTuple):
    """A program, and libraries that it loads when it starts."""
    path: str
    libraries: List[str]

    def library(self, name: str) -> str:
        """The path of one of its libraries, "" where it has none of that name."""
        found = [path for path in self.libraries if re.match(name + r"\.so", os.path.basename(path))]
        return found[0] if found else ""


def is_elf(path: str) -> bool:
    """Whether a file is a program or a library, and no script."""
    with open(path, "rb") as file:
        return file.read(4) == ELF


def _has(path: str, text: bytes) -> bool:
    with open(path, "rb") as file:
        before = b""
        while True:
            piece = file.read(1 << 20)
            if not piece:
                return False
            if text in before + piece:
                return True
            before = piece[-len(text):]


def libraries_of(path: str) -> List[str]:
    """Shared libraries that the dynamic linker would load, as it says; none for a static program."""
    env = {name: value for name, value in os.environ.items() if name != PRELOAD}
    done = subprocess.run(["ldd", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
                          check=False)
    lacking = re.findall(r"^\s*(\S+) => not found", done.stdout, re.M)
    lacking += re.findall(r"version `(\S+)' not found", done.stdout)
    if lacking:
        raise Refused("%s does not start here: it lacks %s" % (path, ", ".join(sorted(set(lacking)))))
    return [path for path in re.findall(r"=> (/\S+) \(", done.stdout)]


def find(name: str) -> str:
    """The file of a program, as a shell finds it."""
    path = shutil.which(name)
    if not path:
        raise Refused("there is no program %s" % name, 127)
    return os.path.realpath(path)


def look(path: str) -> Program:
    """A program of llama.cpp, refused with the reason where no ggml comes as a shared library."""
    if not is_elf(path):
        return Program(path, []) # a script: what it starts is looked at by the plug-in itself
    program = Program(path, libraries_of(path))
    if program.library("libggml-base") or program.library("libggml"):
        return program
    if re.match(r"python", os.path.basename(path)):
        raise Refused("%s loads llama.cpp after it has started, if it does: let it `import kvferry.llama` before it "
                      "makes a model" % path)
    if _has(path, MARK):
        raise Refused("%s is a static build of llama.cpp, which loads no plug-in: take one with shared libraries "
                      "(-DBUILD_SHARED_LIBS=ON, as packages of distributions and releases have them)" % path)
    raise Refused("%s is no program of llama.cpp: it loads no libggml" % path)


def way(program: Program, environment: dict) -> str:
    """The variable by which a program loads the plug-in.

    Builds that load their backends when they start read GGML_BACKEND_PATH; one that has the CPU's linked in
    does not, and the plug-in's constructor does it there. So it does where that variable is taken.
    """
    loads = bool(program.libraries) and not program.library("libggml-cpu")
    return PATH if loads and PATH not in environment else PRELOAD
