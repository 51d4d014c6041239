"""Memory that the ranks of a host share. A process that a rank forks gets copies of its own.

`signals.py` decides who shares what. A child inherits mappings, and ``MAP_SHARED`` would let it write into
the weights of all ranks: a worker of a data loader, a process of ``multiprocessing``, an optimizer's step
there. So the child maps each file anew, at the same address, with ``MAP_PRIVATE``: no view moves, and only
pages that it writes are copied. What it has not written it sees as it is now, with later changes by ranks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import NamedTuple

import torch

# Linux's numbers, which Python's mmap does not name: at this address; take no memory in advance.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PRIVATE = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapping(NamedTuple):
    """Memory that other ranks map, too, and its file, which stays open for children."""

    address: int
    length: int
    file: int


# Process-wide like the memory: what a child must not share.
_shared = set[_Mapping]()


def map_shared(file: int, length: int) -> torch.Tensor:
    """Map ``length`` bytes of ``file``, which is closed once the tensor and its views are gone: uint8."""
    address = _C.mmap(None, length, _PROTECTION, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        os.close(file)
        raise _error(length)
    mapping = _Mapping(address, length, file)
    memory = (ctypes.c_uint8 * length).from_address(address)
    _shared.add(mapping)
    # Not at exit, when tensors may still use it.
    weakref.finalize(memory, _unmap, mapping).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _unmap(mapping: _Mapping) -> None:
    _shared.discard(mapping)
    _C.munmap(mapping.address, mapping.length)
    os.close(mapping.file)


def _make_private() -> None:
    """Replace all shared mappings of a child by private ones. Its own children inherit copies of these."""
    for mapping in _shared:
        if _C.mmap(mapping.address, mapping.length, _PROTECTION, _PRIVATE, mapping.file, 0) == _FAILED:
            os.write(2, f"shardtrain: {_error(mapping.length)}; this child ends\n".encode())
            os._exit(1)  # it would write into the weights of all ranks, and no caller would see an exception
    _shared.clear()


def _error(length: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"mapping {length} bytes failed: {os.strerror(number)}")


os.register_at_fork(after_in_child=_make_private)
