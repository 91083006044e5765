# SPDX-License-Identifier: Apache-2.0
"""Addresses of arrays that go into the library without a copy.

Takes NumPy arrays, torch tensors, Buffers, and whatever speaks DLPack. Knows element types, shapes,
strides and where memory is, and nothing of caches. Invariant: an address is given only for memory of
the right type and shape, contiguous, on the right device; anything else is an error that names the
argument.
"""
import ctypes
import functools
import sys
from typing import Any, Optional

import numpy as np

from .capi import Dtype
from ._errors import Invalid
from ._handles import Handle, Node

_byte, _ndarray = ctypes.c_char, np.ndarray
_of = ctypes.c_char.from_buffer
_address = ctypes.addressof

# Names of element types in NumPy, torch and DLPack (code, bits). NumPy has no bfloat16: uint16 stands
# for its bits, and ml_dtypes has a type of that name.
NAMES = {Dtype.BF16: ("bfloat16", "uint16"), Dtype.FP16: ("float16",), Dtype.FP32: ("float32",)}
NUMPY = {Dtype.BF16: np.dtype(np.uint16), Dtype.FP16: np.dtype(np.float16),
         Dtype.FP32: np.dtype(np.float32)}
_DLPACK = {(4, 16): "bfloat16", (2, 16): "float16", (2, 32): "float32", (1, 16): "uint16",
           (0, 32): "int32", (1, 32): "uint32"}
INT32 = ("int32", "uint32")
FLOAT32 = ("float32",)


class Buffer(Handle):
    """Memory of a runtime: `Runtime.memory` (of the device) or `Runtime.pinned` (seen by both sides).

    address  where the device sees it
    nbytes   its length in bytes

    Close it when no stream uses it any more.
    """

    def __init__(self, runtime: Any, address: int, host: Optional[int], nbytes: int,
                 node: Node) -> None:
        super().__init__(node)
        self.runtime, self.address, self.nbytes = runtime, address, nbytes
        self._host = host

    def numpy(self, dtype: Any, shape: Any = -1) -> np.ndarray:
        """The memory as a NumPy array, where the CPU can see it. It must not outlive the buffer."""
        if self._host is None:
            raise Invalid("this buffer is memory of the device, which NumPy cannot see: take "
                          "Runtime.pinned, or copy with Stream.copy")
        self._node.check()
        raw = (_byte * self.nbytes).from_address(self._host)
        raw.owner = self
        return np.frombuffer(raw, dtype=dtype).reshape(shape)


def describe(array: Any) -> str:
    """The value that somebody passed, in a few words."""
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if shape is None:
        return type(array).__name__
    return "%s of %s %s" % (type(array).__name__, dtype, tuple(shape))


def _wrong(name: str, shape: tuple, types: tuple, array: Any, what: str = "") -> Invalid:
    return Invalid("%s is %s: it must be %s[%s]%s" % (
        name, describe(array), types[0], ", ".join(map(str, shape)), what))


@functools.lru_cache(maxsize=None)
def _torch_name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def _fits(shape: tuple, wanted: tuple) -> bool:
    """Exact, or without a first dimension of 1."""
    return shape == wanted or (wanted[0] == 1 and shape == wanted[1:])


class Reader:
    """Reads arrays for one device and one element type.

    `address(array, name, shape, out)` is the address of `array` after all checks; what is common is
    looked at first, because every decode step comes here.
    """

    def __init__(self, dtype: Dtype, on_cuda: bool, ordinal: int) -> None:
        self.types = NAMES[dtype]
        self.numpy = None if on_cuda else NUMPY[dtype]
        self.on_cuda, self.ordinal = on_cuda, ordinal
        self.tensor: Any = None # torch.Tensor and its element type, once one was read
        self.torch: Any = None
        self.torch_device = ordinal if on_cuda else -1
        self.kept: list = [] # owners of memory, where those are not the arrays; callers take them

    def address(self, array: Any, name: str, shape: tuple, out: bool = False) -> int:
        kind = type(array)
        if kind is self.tensor:
            if array.dtype is self.torch and array.shape == shape and array.is_contiguous() and \
                    array.get_device() == self.torch_device:
                return array.data_ptr()
        elif kind is _ndarray and array.dtype is self.numpy and array.shape == shape:
            try: # refuses what is not contiguous, and what cannot be written
                return _address(_of(array))
            except (TypeError, ValueError):
                pass
        return self.any_address(array, name, shape, self.types, out)

    def any_address(self, array: Any, name: str, shape: tuple, types: tuple,
                    out: bool = False) -> int:
        """The same for every kind of array and any element type."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            return self._torch_address(array, name, shape, types)
        if isinstance(array, Buffer):
            size = int(np.prod(shape)) * (4 if types[0].endswith("32") else 2)
            if array.nbytes < size:
                raise Invalid("%s is a Buffer of %d bytes: it must have %d" % (name, array.nbytes,
                                                                              size))
            array._node.check()
            return array.address
        if isinstance(array, np.ndarray):
            return self._numpy_address(array, name, shape, types, out)
        if hasattr(array, "__dlpack__"):
            return self._dlpack_address(array, name, shape, types)
        raise _wrong(name, shape, types, array, ", as a NumPy array, a torch tensor or with DLPack")

    def _numpy_address(self, array: np.ndarray, name: str, shape: tuple, types: tuple,
                       out: bool) -> int:
        if array.dtype.name not in types or not array.dtype.isnative:
            raise _wrong(name, shape, types, array)
        if not _fits(array.shape, shape):
            raise _wrong(name, shape, types, array)
        if not array.flags.c_contiguous:
            raise _wrong(name, shape, types, array, ", contiguous: numpy.ascontiguousarray copies")
        if out and not array.flags.writeable:
            raise _wrong(name, shape, types, array, ", writable")
        if self.on_cuda:
            raise _wrong(name, shape, types, array, " on the CUDA device: a torch tensor, or a Buffer")
        return array.__array_interface__["data"][0]

    def _torch_address(self, tensor: Any, name: str, shape: tuple, types: tuple) -> int:
        if _torch_name(tensor.dtype) not in types or not _fits(tensor.shape, shape):
            raise _wrong(name, shape, types, tensor)
        if not tensor.is_contiguous():
            raise _wrong(name, shape, types, tensor, ", contiguous: tensor.contiguous() copies")
        if tensor.device.type not in ("cpu", "cuda") or tensor.get_device() != self.torch_device:
            raise _wrong(name, shape, types, tensor, " on the device %s, not on %s" % (
                "cuda:%d" % self.ordinal if self.on_cuda else "cpu", tensor.device))
        if types is self.types and type(tensor) is sys.modules["torch"].Tensor:
            self.tensor, self.torch = type(tensor), tensor.dtype
        return tensor.data_ptr()

    def _dlpack_address(self, array: Any, name: str, shape: tuple, types: tuple) -> int:
        capsule = array.__dlpack__()
        device, code, bits, got, strides, address = _read_dlpack(capsule)
        if _DLPACK.get((code, bits)) not in types or not _fits(got, shape):
            raise _wrong(name, shape, types, array)
        dense = tuple(int(np.prod(got[i + 1:])) for i in range(len(got)))
        if strides is not None and any(n > 1 and a != b for n, a, b in zip(got, strides, dense)):
            raise _wrong(name, shape, types, array, ", contiguous")
        # 1 the CPU, 2 CUDA, 3 pinned memory, 13 managed memory
        if device[0] not in ((2, 13) if self.on_cuda else (1, 3)) or \
                self.on_cuda and device[1] != self.ordinal:
            raise _wrong(name, shape, types, array, " on the device of the runtime")
        self.kept.append(capsule) # its destructor tells the array's owner that nobody reads any more
        return address


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _read_dlpack(capsule: object) -> tuple:
    """device, type code, bits, shape, strides in elements or None, address."""
    t = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = tuple(t.shape[i] for i in range(t.ndim))
    strides = tuple(t.strides[i] for i in range(t.ndim)) if t.strides else None
    bits = t.bits if t.lanes == 1 else 0
    return (t.device_type, t.device_id), t.code, bits, shape, strides, t.data + t.byte_offset


def positions_address(positions: Any, count: int) -> tuple:
    """(address, owner) of [count] positions, which the library copies in the call."""
    if positions is None:
        return None, None
    given = np.asarray(positions).reshape(-1)
    owner = np.ascontiguousarray(given, dtype=np.uint32)
    if owner.size != count:
        raise Invalid("positions has %d numbers: it must have one per token, %d" % (owner.size, count))
    wrong = owner != given
    if wrong.any():
        i = int(wrong.argmax())
        raise Invalid("positions[%d] = %s: must be a whole number from 0 to %d" % (
            i, given[i], 2**32 - 2))
    return owner.ctypes.data, owner
