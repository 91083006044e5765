# SPDX-License-Identifier: Apache-2.0
"""Counters of every rank in the /metrics of vLLM's server.

Ranks are other processes than the one that answers. Each writes its counters to a file of the kind
that prometheus_client shares among processes; the one that answers reads them all. They lie where
vLLM keeps such files, if several processes answer, else in a folder that only ranks of kvferry make,
and that the first process removes; if that was killed, the next rank of any engine does.
Imports nothing of vLLM. Invariant: a counter only grows while its rank runs.
"""
import atexit
import fcntl
import functools
import glob
import os
import secrets
import shutil
import tempfile
from typing import IO, Any, Iterable, List, Tuple

SHARED = "PROMETHEUS_MULTIPROC_DIR" # vLLM sets it
OURS = "KVFERRY_METRICS" # the first process says it to the others
NAME, LOCK = "kvferry-metrics-", "held"
# Name and meaning; `values_of` has the same order.
COUNTERS = (
    ("steps", "Decode steps, counted per request and layer"),
    ("tokens_put", "Tokens written, counted per layer"),
    ("tokens_attended", "Tokens that decode steps attended to, summed over KV heads"),
    ("page_hits", "Selected pages that were on the device"),
    ("page_misses", "Selected pages that were fetched"),
    ("bytes_to_device", "Bytes of pages moved to the device"),
    ("bytes_prompt", "Bytes of pages that chunks of prompts read from host memory, where they had no copy"),
    ("pages_voided", "Pages on the device that a block lost to another or to a write"),
    ("tokens_brought", "Tokens fetched into local windows and sinks, summed over KV heads"),
    ("rows_lost", "Rows without an answer, counted per layer: a key or value was not finite"),
    ("heads_verified", "Query heads of decode steps compared with dense attention, counted per layer"),
    ("recall", "Share of their attention weights on attended tokens, summed over heads verified"),
)


def values_of(steps: int, stats: Any, recall: Tuple[int, float]) -> List[float]:
    """Values of decode steps, a kvferry BlocksStats and what was verified, in the order of COUNTERS."""
    return [steps, stats.tokens_put, stats.tokens_attended, stats.hits, stats.misses,
            stats.bytes_to_device, stats.bytes_prompt, stats.pages_voided, stats.tokens_brought, stats.bad_rows, *recall]


class Written:
    """The counters of one rank.

    labels   which rank of which engine it is
    """

    def __init__(self, **labels: str) -> None:
        from prometheus_client import mmap_dict # pylint: disable=import-outside-toplevel
        folder = os.environ.get(SHARED)
        if not folder:
            folder = os.environ[OURS]
            self._held = _hold(folder) # as long as this rank lives
            _remove_left()
        self._file = mmap_dict.MmapedDict(os.path.join(folder, "counter_kvferry%d.db" % os.getpid()))
        self._keys = [mmap_dict.mmap_key("kvferry:" + name, "kvferry:%s_total" % name, list(labels),
                                         list(labels.values()), text) for name, text in COUNTERS]

    def write(self, values: Iterable[float]) -> None:
        """All of them, as they are."""
        for key, value in zip(self._keys, values):
            self._file.write_value(key, value, 0.0)


class Read:
    """What /metrics of this process says about the ranks below it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def collect(self) -> Iterable[Any]:
        """As prometheus_client asks a collector."""
        from prometheus_client import multiprocess # pylint: disable=import-outside-toplevel
        return multiprocess.MultiProcessCollector.merge(glob.glob(os.path.join(self.folder, "*.db")))


@functools.lru_cache(maxsize=None)
def announce() -> None:
    """In every process: say where the counters are, and show them if this one is asked."""
    from prometheus_client import REGISTRY # pylint: disable=import-outside-toplevel
    if OURS not in os.environ: # the first
        os.environ[OURS] = os.path.join(tempfile.gettempdir(), NAME + secrets.token_hex(16))
        atexit.register(_remove, os.environ[OURS], os.getpid())
    REGISTRY.register(Read(os.environ[OURS]))


def _hold(folder: str) -> IO[str]:
    """Make the folder, and keep others from removing it while the file that is returned is open."""
    while True:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        try:
            held = open(os.path.join(folder, LOCK), "w", encoding="ascii") # pylint: disable=consider-using-with
        except FileNotFoundError: # it was taken for left
            continue
        fcntl.flock(held, fcntl.LOCK_SH)
        if os.path.exists(held.name):
            return held
        held.close()


def _remove_left() -> None:
    """Folders of this user that no rank holds: whoever made them was killed."""
    for name in glob.glob(os.path.join(tempfile.gettempdir(), NAME + "*", LOCK)):
        try:
            with open(name, "r+", encoding="ascii") as held:
                if os.lstat(os.path.dirname(name)).st_uid == os.geteuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(os.path.dirname(name), ignore_errors=True)
        except OSError: # held, another's, or gone
            continue


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner: # and not a copy of that process
        shutil.rmtree(folder, ignore_errors=True)
