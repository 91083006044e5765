# SPDX-License-Identifier: Apache-2.0
"""Handles that close: by name, with `with`, with their parent, or when they are collected.

Knows no function of the library but those that it is given. Invariants: a handle is destroyed once,
after everything that was opened from it; one thread at a time is in a cache. After os.fork() a
child's handles are dead: it waits for no lock of theirs, and closing them does nothing.
"""
import os
import threading
import weakref
from typing import Any, Callable, Optional

from ._errors import Invalid

# A policy in Python runs inside the library, which it must not call.
here = threading.local()

_forks = 0 # between this process and the one that imported the package


def _count_fork() -> None:
    global _forks # pylint: disable=global-statement
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Node:
    """One open handle of C. It outlives the object of Python, which may be collected at any time.

    keep  what must live as long as the handle: functions that C calls, memory that it reads
    """

    def __init__(self, what: str, handle: int, destroy: Callable[[int], None],
                 parent: Optional["Node"] = None, lock: Any = None) -> None:
        self.what, self.handle, self.parent = what, handle, parent
        self._destroy = destroy
        self._forks = _forks
        self._lock = lock or threading.RLock()
        self.children: dict = {} # in the order in which they were opened
        self.keep: list = []
        if parent:
            parent.children[self] = None

    @property
    def is_dead(self) -> bool:
        """Whether it is of the process that this one was forked from."""
        return self._forks != _forks

    @property
    def lock(self) -> Any:
        """The lock of the cache or the handle, which a thread of a child would wait for in vain."""
        if self.is_dead:
            raise Invalid("this %s was opened before os.fork(), by the parent of this process; open a "
                          "Runtime in the child, or start processes with \"spawn\"" % self.what)
        return self._lock

    def check(self) -> int:
        """The handle, or an error if it is closed or dead."""
        if self.is_dead:
            return self.lock
        if self.handle is None:
            raise Invalid("this %s is closed" % self.what)
        return self.handle

    def close(self) -> None:
        """Close children, newest first, then the handle. Nothing happens the second time."""
        if self.is_dead:
            self.handle = None
            return
        with self._lock:
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
        if self.is_dead:
            return
        if not getattr(here, "in_policy", False) and self._lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._lock.release()
        else:
            threading.Thread(target=self.close).start()


class Handle:
    """Methods of every object of the library: `close()`, `with`, `closed`."""

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
