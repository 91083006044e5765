# SPDX-License-Identifier: Apache-2.0
"""Whether a build of llama.cpp can load the plug-in: its ggml is loaded in a process of its own, and the plug-in
in it says what it thinks of the interface.
"""
import os
import re
import subprocess
import sys
from typing import List

from . import Refused, plugin_path, programs

# Run in a process of its own, with the build's ggml: libggml, the plug-in, where its report goes.
PROBE = """
import ctypes, os, sys
ggml, plugin = sys.argv[1:]
library = ctypes.CDLL(ggml, ctypes.RTLD_GLOBAL)
folder = os.path.dirname(ggml).encode()
if hasattr(library, "ggml_backend_load_all_from_path"):
    library.ggml_backend_load_all_from_path(ctypes.c_char_p(folder))
library.ggml_backend_load.restype = ctypes.c_void_p
library.ggml_backend_load(ctypes.c_char_p(plugin.encode()))
"""


def verdict(ggml: str) -> str:
    """The plug-in's report in a process with that libggml: "loaded ggml=V api=N", or "refused REASON"."""
    reads, writes = os.pipe()
    env = dict(os.environ, KVFERRY_LLAMA_REPORT=str(writes), KVFERRY_LLAMA="")
    env["LD_LIBRARY_PATH"] = os.path.dirname(ggml)
    for name in (programs.PATH, programs.PRELOAD):
        env.pop(name, None)
    done = subprocess.run([sys.executable, "-c", PROBE, ggml, plugin_path()], env=env, pass_fds=[writes],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8") as report:
        text = report.read().strip()
    if not text:
        said = [line for line in done.stdout.strip().splitlines() if line]
        raise Refused("%s does not load in a process: %s" % (ggml, said[-1] if said else "it ended with %d" % done.returncode))
    return text


def beside(path: str) -> str:
    """The libggml of a library of llama.cpp, or of its folder."""
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))
    found = sorted(name for name in os.listdir(folder) if re.fullmatch(r"libggml\.so(\.\d+)*", name))
    if not found:
        raise Refused("%s has no libggml.so: a library of llama.cpp lies next to it" % folder)
    return os.path.join(folder, found[0])


def main(given: List[str]) -> None:
    """Print what a program or a library is, one line a fact; status 1 where nothing serves."""
    if len(given) != 1:
        raise Refused("--check takes one program or library", 2)
    if os.path.isdir(given[0]) or re.search(r"\.so(\.\d+)*$", given[0]):
        ggml, by = beside(given[0]), "import kvferry.llama in the process"
    else:
        program = programs.look(programs.find(given[0]))
        if not program.libraries:
            raise Refused("%s is a script: check the program that it starts" % program.path)
        ggml, by = program.library("libggml"), programs.way(program, {})
    print("ggml     %s" % ggml)
    said = verdict(ggml)
    word, _, rest = said.partition(" ")
    if word != "loaded":
        raise Refused("the plug-in does not load into it: %s; llama.cpp runs on as it is" % (rest or said))
    print("serves   %s" % rest)
    print("loads by %s" % by)
