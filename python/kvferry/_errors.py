# SPDX-License-Identifier: Apache-2.0
"""A status of the library as an exception. Knows no handle. Every failed call ends here, and every text
that the library would cut."""
import ctypes

from .capi import ErrorText, Status, lib


class Error(RuntimeError):
    """An error, with the field, the value and the fix.

    status   `Status`, e.g. Status.FULL
    text     one sentence or two
    foreign  errno or the device's own code, 0 if none
    """

    def __init__(self, text: str, status: Status = Status.INVALID, foreign: int = 0) -> None:
        super().__init__(text)
        self.status, self.text, self.foreign = status, text, foreign


class Invalid(Error, ValueError):
    """An argument or a setting is out of its range."""


class OutOfMemory(Error, MemoryError):
    """Host or device memory is too small, or cannot be pinned."""


class Unsupported(Error):
    """This build, device or geometry does not support it."""


class Full(Error):
    """A limit that was set when the cache was opened is reached; nothing was changed."""


_KINDS = {Status.INVALID: Invalid, Status.OUT_OF_MEMORY: OutOfMemory,
          Status.OUT_OF_DEVICE_MEMORY: OutOfMemory, Status.PIN_FAILED: OutOfMemory,
          Status.UNSUPPORTED: Unsupported, Status.FULL: Full}


def without_nul(name: str, text: bytes) -> bytes:
    """Text or a path for the library, which would end at a NUL inside."""
    if b"\0" in text:
        raise Invalid("%s = %r: must have no NUL, at which it would be cut" % (name, text))
    return text


def raise_error(error: ErrorText, status: int) -> None:
    """Raise for `status`, with the text of `error` where it is about that status."""
    status = Status(status)
    same = error is not None and error.status == status and error.text
    text = error.text.decode(errors="replace") if same else lib.kvf_status_text(status).decode()
    raise _KINDS.get(status, Error)(text, status, error.foreign if same else 0)


def raise_last(runtime: int, status: int) -> None:
    """Raise for a call on anything of a runtime."""
    raise_error(ErrorText.from_address(lib.kvf_runtime_error(runtime)), status)


def checked(call: object, *arguments: object) -> None:
    """A call whose last argument receives the error."""
    error = ErrorText()
    status = call(*arguments, ctypes.byref(error))
    if status:
        raise_error(error, status)
