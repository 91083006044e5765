# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges and a histogram of every rank in the /metrics of vLLM's server.

Ranks are other processes than the one that answers. Each writes them to files of the kind
that prometheus_client shares among processes; the one that answers reads them all. They lie where
vLLM keeps such files, if several processes answer, else in a folder that only ranks of kvferry make,
and that the first process removes; if that was killed, the next rank of any engine does.
Imports nothing of vLLM. Invariant: a counter only grows while its rank runs.
"""
import atexit
import fcntl
import functools
import glob
import math
import os
import secrets
import shutil
import tempfile
import time
from typing import IO, Any, Dict, Iterable, List, Sequence, Tuple

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

GAUGES = (
    ("host_bytes", "Host memory that is reserved for pages"),
    ("host_bytes_used", "Host memory of the pages of requests in the latest pass; what several share is counted for each"),
    ("windows", "Sinks and local windows that have room on the device"),
    ("windows_used", "Of these, those that a request has"),
    ("hit_rate", "Share of selected pages that were on the device, in the latest seconds with steps"),
    ("bytes_per_second", "Bytes that came from host memory, in the latest seconds"),
)
SELECTED = ("request_selected_tokens", "Tokens of a request's answer that selected, because the context was longer than the "
            "budget; counted when it ends or is preempted")
BUCKETS = (0, 1, 16, 64, 256, 1024, 4096, 16384, 65536)


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

        def file(kind: str) -> Any:
            return mmap_dict.MmapedDict(os.path.join(folder, "%s_kvferry%d.db" % (kind, os.getpid())))

        def keys(rows: Any, end: str) -> List[str]:
            return [mmap_dict.mmap_key("kvferry:" + name, "kvferry:%s%s" % (name, end), list(labels), list(labels.values()),
                                       text) for name, text in rows]
        self._file, self._keys = file("counter"), keys(COUNTERS, "_total")
        self._gauges, self._gauge_keys = file("gauge_mostrecent"), keys(GAUGES, "")
        name, text = SELECTED
        self._answers, self._sum_key = file("histogram"), keys([SELECTED], "_sum")[0]
        self._buckets = {most: mmap_dict.mmap_key(
            "kvferry:" + name, "kvferry:%s_bucket" % name, [*labels, "le"],
            [*labels.values(), "+Inf" if most == math.inf else "%.1f" % most], text) for most in (*BUCKETS, math.inf)}
        for key in (self._sum_key, *self._buckets.values()):
            self._answers.read_value(key) # which are 0 from now on

    def write(self, values: Iterable[float]) -> None:
        """All counters, as they are."""
        for key, value in zip(self._keys, values):
            self._file.write_value(key, value, 0.0)

    def write_gauges(self, values: Iterable[float]) -> None:
        """Likewise."""
        for key, value in zip(self._gauge_keys, values):
            self._gauges.write_value(key, value, time.time())

    def ended(self, tokens: int) -> None:
        """A request, with so many tokens that selected."""
        for key, more in ((self._buckets[min(most for most in self._buckets if tokens <= most)], 1), (self._sum_key, tokens)):
            self._answers.write_value(key, self._answers.read_value(key)[0] + more, 0.0)


class Answers:
    """Requests of passes, until they end: how many tokens of each selected.

    budget   of a step
    passes   how many may be under way at once, each with other requests
    drafts   candidates of a row at most: so many tokens may be taken back
    """

    def __init__(self, budget: int, passes: int = 1, drafts: int = 0) -> None:
        self._budget, self._passes, self._drafts, self._pass = budget, passes, drafts, 0
        self._requests: Dict[int, Tuple[int, int, int]] = {} # by number: tokens, those that selected, pass

    def follow(self, requests: Sequence[int], begins: Sequence[int], ends: Sequence[int],
               steps: Sequence[bool]) -> List[int]:
        """Tokens that selected, of requests that ended before this pass: another has their number, or none had it.

        begins, ends   tokens of every row before and after this pass
        steps          whether a row goes on by tokens of an answer
        """
        self._pass += 1
        done = []
        for number, begin, end, is_step in zip(requests, begins, ends, steps):
            if end == begin: # it fills up the pass
                continue
            was, selected, _ = self._requests.pop(number, (begin, 0, 0))
            if was - self._drafts <= begin <= was: # candidates may have been taken back
                selected = max(0, selected - (was - begin))
            else: # another request
                done.append(selected)
                selected = 0
            selected += sum(length > self._budget for length in range(begin + 1, end + 1)) if is_step else 0
            self._requests[number] = end, selected, self._pass
        gone = [number for number, (_, _, last) in self._requests.items() if last <= self._pass - self._passes]
        return done + [self._requests.pop(number)[1] for number in gone]


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
