# SPDX-License-Identifier: Apache-2.0
"""Handles that close: by name, with `with`, with their parent, or when they are collected.

Knows no function of the library but those that it is given. Invariants: a handle is destroyed once,
after everything that was opened from it; one thread at a time is in a cache.
"""
import threading
import weakref
from typing import Any, Callable, Optional

from ._errors import Invalid

# A policy in Python runs inside the library, which it must not call.
here = threading.local()


class Node:
    """One open handle of C. It outlives the object of Python, which may be collected at any time.

    keep  what must live as long as the handle: functions that C calls, memory that it reads
    """

    def __init__(self, what: str, handle: int, destroy: Callable[[int], None],
                 parent: Optional["Node"] = None, lock: Any = None) -> None:
        self.what, self.handle, self.parent = what, handle, parent
        self._destroy = destroy
        self.lock = lock or threading.RLock()
        self.children: dict = {} # in the order in which they were opened
        self.keep: list = []
        if parent:
            parent.children[self] = None

    def check(self) -> int:
        """The handle, or an error if it is closed."""
        if self.handle is None:
            raise Invalid("this %s is closed" % self.what)
        return self.handle

    def close(self) -> None:
        """Close children, newest first, then the handle. Nothing happens the second time."""
        with self.lock:
            if self.handle is None:
                return
            for child in reversed(list(self.children)):
                child.close()
            handle, self.handle = self.handle, None
            self._destroy(handle)
            if self.parent:
                self.parent.children.pop(self, None)
            self.keep.clear()

    def taken(self) -> None:
        """The library has ended it."""
        self.handle = None
        if self.parent:
            self.parent.children.pop(self, None)

    def collected(self) -> None:
        """Close, but not from inside the library, nor while another thread is in the cache."""
        if not getattr(here, "in_policy", False) and self.lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                self.lock.release()
        else:
            threading.Thread(target=self.close).start()


class Handle:
    """What every object of the library can: `close()`, `with`, `closed`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        weakref.finalize(self, node.collected)

    @property
    def closed(self) -> bool:
        """Whether the handle is closed."""
        return self._node.handle is None

    def close(self) -> None:
        """Close it with everything that was opened from it. Closing twice is fine."""
        self._node.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "<kvferry.%s%s>" % (type(self).__name__, " closed" if self.closed else "")
