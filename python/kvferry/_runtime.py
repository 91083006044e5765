# SPDX-License-Identifier: Apache-2.0
"""Runtime, Stream, Link and Disk: a machine, the order of work on it, how fast its link and a disk are.

Knows nothing of caches but that they close before it. Invariant: what work on a stream reads and
writes lives until that stream was waited for.
"""
import ctypes
import json
import os
import sys
from ctypes import byref
from typing import Any, Callable, List, Optional, Tuple, Union

import numpy as np

from . import _arrays, _policies
from .capi import (Device, DiskCase, DiskResult, LinkCase, LinkLine, LinkResult, RuntimeConfig, lib,
                   sized)
from ._errors import Invalid, checked, raise_last, without_nul
from ._handles import Handle, Node
from ._settings import fill

_wait = lib.kvf_stream_wait


def _opened(runtime: int, call: Callable, *arguments: Any) -> int:
    """A call whose last argument receives a handle or an address."""
    out = ctypes.c_void_p()
    status = call(*arguments, byref(out))
    if status:
        raise_last(runtime, status)
    return out.value


class Runtime(Handle):
    """A device, its threads, and a view of the machine. Everything else is opened from it.

    device    "host" (the CPU), "cuda", or "auto"
    log       `log(level, line)` gets a line per notable event
    settings  see `kvferry.settings("runtime")`: threads, numa_node, huge_pages, ...

    >>> with kvferry.Runtime(device="host") as runtime:
    ...     cache = kvferry.Cache(runtime, layers=1, query_heads=8, kv_heads=2, head_dim=64,
    ...                           tokens_max=4096, dtype="fp32")
    """

    def __init__(self, device: Union[str, Device, None] = None, *,
                 log: Optional[Callable[[int, str], None]] = None, **settings: Any) -> None:
        config = RuntimeConfig()
        lib.kvf_runtime_config_init_sized(*sized(config))
        keep: list = []
        self._errors: list = [] # what functions of the caller raised inside the library
        fill(config, "runtime", {"device": device, **settings}, keep)
        if log:
            keep.append(_policies.log_function(log, self._errors))
            config.log = ctypes.cast(keep[-1], ctypes.c_void_p)
        out = ctypes.c_void_p()
        checked(lib.kvf_runtime_open, byref(config), byref(out))
        super().__init__(Node("runtime", out.value, lib.kvf_runtime_close))
        self._node.keep += keep
        self.on_cuda = self.device is Device.CUDA
        self._ordinal = config.device_ordinal
        self._stream: Optional[Stream] = None
        self._wrapped: dict = {}

    @property
    def device(self) -> Device:
        """The device in force: HOST or CUDA."""
        return Device(lib.kvf_runtime_device(self._node.check()))

    @property
    def device_name(self) -> str:
        """Name of the device, e.g. "NVIDIA H200"."""
        return lib.kvf_runtime_device_name(self._node.check()).decode()

    @property
    def threads(self) -> int:
        """Compute threads in force."""
        return lib.kvf_runtime_threads(self._node.check())

    @property
    def numa_nodes(self) -> List[int]:
        """NUMA nodes that have memory, as the operating system numbers them."""
        handle = self._node.check()
        ids = (ctypes.c_int32 * lib.kvf_runtime_numa_nodes(handle, None, 0))()
        return list(ids[:lib.kvf_runtime_numa_nodes(handle, ids, len(ids))])

    def describe(self) -> dict:
        """Machine, device and build: devices, NUMA nodes, links, huge pages, optional parts."""
        handle, needed = self._node.check(), ctypes.c_size_t()
        lib.kvf_runtime_describe(handle, None, 0, byref(needed))
        text = ctypes.create_string_buffer(needed.value)
        self._must(lib.kvf_runtime_describe(handle, text, len(text), byref(needed)))
        return json.loads(text.value)

    def calibrate(self) -> None:
        """Measure the link now, a few seconds, unless that was done. Nothing on the host device."""
        self._must(lib.kvf_runtime_calibrate(self._node.check()))

    def memory(self, nbytes: int) -> _arrays.Buffer:
        """`nbytes` bytes of device memory, zeroed, aligned to 64."""
        address = _opened(self._node.check(), lib.kvf_memory_alloc, self._node.check(), nbytes)
        return self._buffer(address, None if self.on_cuda else address, nbytes, lib.kvf_memory_free)

    def pinned(self, nbytes: int) -> _arrays.Buffer:
        """`nbytes` bytes of pinned host memory, which the CPU and kernels both read and write."""
        handle, host, device = self._node.check(), ctypes.c_void_p(), ctypes.c_void_p()
        self._must(lib.kvf_pinned_alloc(handle, nbytes, byref(host), byref(device)))
        return self._buffer(device.value, host.value, nbytes, lib.kvf_pinned_free)

    def _buffer(self, address: int, host: Optional[int], nbytes: int, free: Callable) -> _arrays.Buffer:
        runtime = self._node.handle
        node = Node("buffer", host or address, lambda pointer: free(runtime, pointer), self._node)
        return _arrays.Buffer(self, address, host, nbytes, node)

    def _must(self, status: int) -> None:
        if status:
            raise_last(self._node.handle, status)

    def _stream_for(self, stream: Optional["Stream"], array: Any) -> Tuple["Stream", bool]:
        """The stream of a call, and whether the call waits for it."""
        if stream is not None:
            if stream.runtime is not self:
                raise Invalid("stream is of another runtime")
            return stream, False
        if self.on_cuda:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(array, torch.Tensor):
                return self.torch_stream(), False
        if self._stream is None:
            self._stream = Stream(self)
        return self._stream, True

    def torch_stream(self, stream: Any = None) -> "Stream":
        """A torch.cuda.Stream as a stream of this runtime; None: torch.cuda.current_stream()."""
        if stream is None:
            stream = sys.modules["torch"].cuda.current_stream(self._ordinal)
        found = self._wrapped.get(stream.cuda_stream)
        if found is None or found.closed:
            found = self._wrapped[stream.cuda_stream] = Stream(self, stream.cuda_stream)
            found.keep = None # torch reuses memory in stream order, so nothing has to be kept
        return found


def behind_work(runtime: Node, destroy: Callable[[int], None]) -> Callable[[int], None]:
    """`destroy` of what work under way may use: it waits for every stream first."""
    def close(handle: int) -> None:
        for node in list(runtime.children):
            if node.what == "stream" and node.handle is not None:
                lib.kvf_stream_wait(node.handle)
        destroy(handle)
    return close


class Stream(Handle):
    """An order of work. Calls that name a stream return at once; `wait` waits for their work.

    native  a cudaStream_t of the caller to use, as a number; it stays the caller's
    """

    def __init__(self, runtime: Runtime, native: Optional[int] = None) -> None:
        handle = runtime._node.check()
        if native is None:
            opened = _opened(handle, lib.kvf_stream_create, handle)
        else:
            opened = _opened(handle, lib.kvf_stream_wrap, handle, native)
        super().__init__(Node("stream", opened, lib.kvf_stream_destroy, runtime._node))
        self.runtime = runtime
        # Objects that enqueued work reads and writes, until it is done; of the node, so that it outlives this.
        self.keep: Optional[list] = self._node.keep

    def wait(self) -> None:
        """Wait until all work so far is done. Raises the first error that it met."""
        done = len(self.keep or ()) # other threads may enqueue meanwhile
        status = _wait(self._node.check())
        if done:
            del self.keep[:done]
        errors = self.runtime._errors
        if errors:
            _policies.raise_first(errors)
        if status:
            raise_last(self.runtime._node.handle, status)

    @property
    def native(self) -> Optional[int]:
        """Its cudaStream_t; None on the host device."""
        return lib.kvf_stream_native(self._node.check())

    def launch(self, fn: Callable[[int], None], tasks: int = 1) -> None:
        """Run `fn(0)` to `fn(tasks - 1)` in stream order on the compute threads. Host device only."""
        task = _policies.task_function(fn, self.runtime._errors)
        handle = self._node.check()
        self.runtime._must(lib.kvf_stream_launch(handle, ctypes.cast(task, ctypes.c_void_p), None, 0,
                                                 tasks))
        self._keep(task)

    def copy(self, to: Any, source: Any) -> None:
        """Copy a whole array or Buffer to another of the same size in bytes, in stream order."""
        target, size = _raw(to, "to")
        origin, source_size = _raw(source, "source")
        if size != source_size:
            raise Invalid("source has %d bytes: it must have as many as to, %d" % (source_size, size))
        self.runtime._must(lib.kvf_memory_copy(self._node.check(), target, origin, size))
        self._keep(to, source)

    def _keep(self, *owners: Any) -> None:
        if self.keep is not None:
            self.keep += owners


def _raw(array: Any, name: str) -> Tuple[int, int]:
    """Address and bytes of a contiguous array, wherever it is."""
    if isinstance(array, _arrays.Buffer):
        array._node.check()
        return array.address, array.nbytes
    if isinstance(array, np.ndarray) and array.flags.c_contiguous:
        if name == "to" and not array.flags.writeable:
            raise Invalid("to is an array that must not be written")
        return array.ctypes.data, array.nbytes
    if hasattr(array, "data_ptr") and array.is_contiguous():
        return array.data_ptr(), array.numel() * array.element_size()
    raise Invalid("%s is %s: it must be a Buffer, or a contiguous NumPy array or torch tensor" % (
        name, _arrays.describe(array)))


class Link(Handle):
    """Measures how fast scattered pages of host memory reach the device."""

    def __init__(self, runtime: Runtime) -> None:
        handle = runtime._node.check()
        super().__init__(Node("link", _opened(handle, lib.kvf_link_open, handle),
                              lib.kvf_link_close, runtime._node))
        self.runtime = runtime

    def measure(self, **case: Any) -> Tuple[LinkResult, np.ndarray]:
        """Measure one case; `kvferry.settings("link")` lists what it may say.

        Returns the result (times in ns), and the totals of all repetitions, uint64[repetitions].
        """
        row, result, keep = LinkCase(), LinkResult(), []
        lib.kvf_link_case_init_sized(*sized(row))
        fill(row, "link", case, keep)
        samples = np.zeros(row.repetitions, np.uint64)
        with self._node.lock:
            self.runtime._must(lib.kvf_link_measure_sized(
                self._node.check(), byref(row), samples.ctypes.data, *sized(result)))
        return result, samples

    @staticmethod
    def fit(x: Any, y: Any, weighted: bool = True) -> LinkLine:
        """y = intercept + slope x by least squares, each point weighted by 1 / y^2 or alike."""
        x, y = (np.ascontiguousarray(a, dtype=np.float64).reshape(-1) for a in (x, y))
        if x.size != y.size:
            raise Invalid("y has %d numbers: it must have as many as x, %d" % (y.size, x.size))
        line = LinkLine()
        if lib.kvf_link_fit(x.ctypes.data, y.ctypes.data, x.size, weighted, byref(line)):
            raise Invalid("x must have two distinct values, and y must be above 0 where weighted")
        return line


class Disk(Handle):
    """Measures how fast extents of a file reach host memory. Its file is in `folder`, without a name."""

    def __init__(self, runtime: Runtime, folder: Any = ".", bytes: int = 1 << 28) -> None: # pylint: disable=redefined-builtin
        handle = runtime._node.check()
        super().__init__(Node("disk", _opened(handle, lib.kvf_disk_open, handle,
                                              without_nul("folder", os.fsencode(folder)), bytes),
                              lib.kvf_disk_close, runtime._node))
        self.runtime = runtime

    def measure(self, **case: Any) -> DiskResult:
        """Measure one pass; `kvferry.settings("disk")` lists what it may say. Times are in ns."""
        row, result = DiskCase(), DiskResult()
        lib.kvf_disk_case_init_sized(*sized(row))
        fill(row, "disk", case, [])
        with self._node.lock:
            self.runtime._must(lib.kvf_disk_measure_sized(self._node.check(), byref(row),
                                                          *sized(result)))
        return result
