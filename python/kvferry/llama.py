# SPDX-License-Identifier: Apache-2.0
"""kvferry in a Python process with llama.cpp: importing this loads the plug-in into its ggml.

    import kvferry.llama
    from llama_cpp import Llama
    llama = Llama("model.gguf", n_ctx=131072, flash_attn=True)

It comes before the first model is made. A binding that is not loaded yet is llama_cpp, which is imported for it.
Settings are in KVFERRY_LLAMA. Invariant: without a usable ggml, the process goes on as it was, and a line on
standard error says why.
"""
import ctypes
import re
import sys

from ._llama import SETTINGS, Refused, check_settings, plugin, plugin_path


def _has_ggml() -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return bool(re.search("/libggml(?!-kvferry)", maps.read()))


def load() -> bool:
    """Load the plug-in into this process's ggml; whether it serves. A second call changes nothing."""
    import os
    try:
        check_settings(os.environ.get(SETTINGS, ""))
        if not _has_ggml():
            try:
                import llama_cpp # pylint: disable=unused-import
            except ImportError as error:
                raise Refused("no llama.cpp is in this process, and llama_cpp cannot be imported: %s" % error) from error
        library = plugin()
        library.kvferry_llama_load.restype = ctypes.c_int
        return library.kvferry_llama_load() == 0
    except Refused as error:
        print("kvferry: not loaded: %s" % error, file=sys.stderr)
        return False


loaded = load()
__all__ = ["load", "loaded", "plugin_path"]
