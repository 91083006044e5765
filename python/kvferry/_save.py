# SPDX-License-Identifier: Apache-2.0
"""Saved sequences: a save under way, and what a file says of itself.

Knows no arrays. Invariant: a save is finished once, before its cache closes.
"""
import ctypes
import os
from ctypes import byref
from typing import Tuple, Union

from .capi import ErrorText, Saved, lib, sized
from ._errors import checked, raise_error, without_nul
from ._handles import Handle, Node
from ._runtime import Runtime


class Save(Handle):
    """A sequence on its way to a file. `wait` says whether it is there; decoding may go on."""

    def __init__(self, cache: Node, handle: int) -> None:
        self._error = ErrorText()
        self._status = 0
        super().__init__(Node("save", handle, self._finish, cache, cache.lock))

    def _finish(self, handle: int) -> None:
        self._status = lib.kvf_save_finish(handle, byref(self._error))

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        return self.closed or bool(lib.kvf_save_is_done(self._node.check()))

    def wait(self) -> None:
        """Wait until the file is there and whole; raises if it is not."""
        self.close()
        if self._status:
            raise_error(self._error, self._status)


def saved(runtime: Runtime, path: Union[str, os.PathLike], verify: bool = False) -> Tuple[Saved, bytes]:
    """A file's description of itself, and the note of whoever saved it. `verify` reads all of it."""
    row, name = Saved(), without_nul("path", os.fsencode(path))
    handle = runtime._node.check()
    checked(lib.kvf_saved_read_sized, handle, name, int(verify), *sized(row), None, 0)
    note = ctypes.create_string_buffer(row.note_bytes)
    checked(lib.kvf_saved_read_sized, handle, name, 0, *sized(row), note, len(note))
    return row, note.raw
