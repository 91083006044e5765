# SPDX-License-Identifier: Apache-2.0
"""Lines while host memory is reserved: tens of GiB take a while to be touched and pinned.

Imports nothing of vLLM. Invariant: what takes less than a line's time says nothing.
"""
import logging
import threading
import time
from typing import Any, Callable

from .memory import shown

log = logging.getLogger("vllm.kvferry")
SECONDS = 5.0 # between lines


def held() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as text:
        return int(text.read().split()[1]) * 4096


class Progress:
    """While it is entered another thread says how much of so many bytes is there."""

    def __init__(self, size: int, seconds: float = SECONDS, measure: Callable[[], int] = held) -> None:
        self._size, self._seconds, self._measure = size, seconds, measure
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="kvferry-progress", daemon=True)

    def _tell(self) -> None:
        before, begin = self._measure(), time.monotonic()
        while not self._done.wait(self._seconds):
            there = min(self._size, max(0, self._measure() - before))
            log.info("kvferry: reserves host memory: %s of %s after %d s", shown(there), shown(self._size),
                     time.monotonic() - begin)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
