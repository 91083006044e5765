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
from typing import Optional

from ._llama import SETTINGS, Refused, check_settings, plugin_path


def _ggml() -> Optional[ctypes.CDLL]:
    """The library of this process that has ggml's functions; bindings may have loaded it for themselves alone."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = set(re.findall(r"(/.*(?:ggml|llama)[^/]*\.so[.\d]*)$", maps.read(), re.M))
    found = [library for library in map(ctypes.CDLL, sorted(paths)) if hasattr(library, "ggml_backend_load")]
    return found[0] if found else None


def load() -> bool:
    """Load the plug-in into this process's ggml; whether it serves. A second call changes nothing."""
    import os
    try:
        check_settings(os.environ.get(SETTINGS, ""))
        ggml = _ggml()
        if not ggml:
            try:
                import llama_cpp # pylint: disable=unused-import
            except ImportError as error:
                raise Refused("no llama.cpp is in this process, and llama_cpp cannot be imported: %s" % error) from error
            ggml = _ggml()
        if not ggml:
            raise Refused("there is no ggml with shared libraries in this process")
        for function in (ggml.ggml_backend_reg_by_name, ggml.ggml_backend_load):
            function.restype = ctypes.c_void_p
        return bool(ggml.ggml_backend_reg_by_name(b"kvferry") or ggml.ggml_backend_load(os.fsencode(plugin_path())))
    except Refused as error:
        print("kvferry: not loaded: %s" % error, file=sys.stderr)
        return False


loaded = load()
__all__ = ["load", "loaded", "plugin_path"]
