# SPDX-License-Identifier: Apache-2.0
"""The plug-in for llama.cpp, seen from outside: where it is, which programs can load it, what memory it takes.

Loads neither ggml nor llama.cpp into this process. `kvferry.llama` does.
"""
import ctypes
import os
import pathlib
import sys
import sysconfig

NAME = "libggml-kvferry.so"
SETTINGS = "KVFERRY_LLAMA"


class Refused(Exception):
    """Why something does not go on, in one line; `status` is what the command ends with."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def plugin_path() -> str:
    """Where the plug-in is: KVFERRY_LLAMA_PLUGIN, the wheel, beside the library, or what the system has."""
    named = os.environ.get("KVFERRY_LLAMA_PLUGIN")
    if named:
        return os.path.abspath(named)
    wheels = [pathlib.Path(__file__).parents[2], pathlib.Path(sysconfig.get_path("platlib"))]
    places = [place / ".kvferry.mesonpy.libs" for place in wheels]
    library = os.environ.get("KVFERRY_LIBRARY")
    if library: # as installed, and in a build folder
        places += [pathlib.Path(library).resolve().parent, pathlib.Path(library).resolve().parents[1] / "llama"]
    places += map(pathlib.Path, [os.path.join(sys.prefix, "lib"), "/usr/local/lib", "/usr/lib",
                                 "/usr/local/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu"])
    for place in places:
        if (place / NAME).exists():
            return str(place / NAME)
    raise Refused("there is no %s: install kvferry's package with pip, or set KVFERRY_LLAMA_PLUGIN to its path" % NAME)


def plugin() -> ctypes.CDLL:
    """The plug-in as a library; it needs no ggml for what is asked of it here."""
    try:
        library = ctypes.CDLL(plugin_path())
    except OSError as error:
        raise Refused("the plug-in does not load: %s" % error) from error
    library.kvferry_llama_plan.restype = ctypes.c_char_p
    library.kvferry_llama_plan.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    return library


def check_settings(text: str) -> None:
    """Refuse settings in the library's words."""
    said = plugin().kvferry_llama_plan(os.fsencode(text), None, None)
    if said:
        raise Refused(said.decode(), 2)
