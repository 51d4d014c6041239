"""The files of a checkpoint, written and verified, each identified by its size and digest.

A data file is in the safetensors format, so that stock tools read it: eight bytes of header length, a JSON
header with the dtype, shape and offsets of every tensor, then the tensors. It is written here, since the
safetensors package computes no digest: each block is hashed while it is in the cache, without a second copy.
The package reads it: it checks the header and maps the file.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

BLOCK_BYTES = 1 << 20
# Errors of file systems that sync files, and no directories.
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Record(NamedTuple):
    """A file's size in bytes, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> Record:
    """Write ``tensors`` and ``notes`` as a new safetensors file, and wait until it is on disk.

    Raises OSError if the file exists, or cannot be written, and ValueError if names and texts are too long.
    """
    # Widest elements first, so that every tensor begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name in names:
        tensor = tensors[name]
        start = end
        end = end + tensor.nbytes
        dtype = DTYPES[tensor.dtype]
        shape = list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > 100_000_000:  # the largest header that the safetensors package reads
        raise ValueError(f"names and texts take {len(text)} bytes, expected at most 100000000")
    head = len(text).to_bytes(8, "little") + text
    return _write(path, _blocks(head, [tensors[name] for name in names]))


def _blocks(head: bytes, tensors: list[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        plain = tensor.as_subclass(torch.Tensor)  # state of an optimizer may be marked as a gradient's piece
        raw = plain.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(raw), BLOCK_BYTES):
            yield raw[start : start + BLOCK_BYTES]


def write_text(path: Path, text: str) -> None:
    """Write a new text file, and wait until it is on disk."""
    _write(path, [memoryview(text.encode())])


def _write(path: Path, blocks: Iterable[memoryview]) -> Record:
    with path.open("xb", buffering=0) as file:

        def write(block: memoryview) -> None:
            while block:  # a disk that is nearly full writes only a part
                block = block[os.write(file.fileno(), block) :]

        record = _record(blocks, write)
        os.fsync(file.fileno())
    return record


def _record(blocks: Iterable[Any], take: Callable[[Any], object] = len) -> Record:
    """Hash ``blocks``, and pass each to ``take`` while it is in the cache. Return the file's record."""
    digest = hashlib.sha256()
    size = 0
    for block in blocks:
        digest.update(block)
        size += len(block)
        take(block)
    return Record(size, digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Wait until the names in the directory ``path`` are on disk, if the file system can sync directories."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def read_text(path: Path, most_bytes: int) -> str:
    """Read a plain UTF-8 file of at most ``most_bytes``. Raises ValueError if it is none."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"{path.name} has {size} bytes, expected at most {most_bytes}")
        try:
            return file.readall().decode()
        except UnicodeDecodeError:
            raise ValueError(f"{path.name} is not UTF-8 text") from None


def verify(path: Path, record: Record) -> None:
    """Raise ValueError or OSError unless ``path`` is the file that ``record`` describes."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != record.bytes:
            raise ValueError(f"{path.name} has {size} bytes, expected {record.bytes}")
        content = _record(iter(partial(file.read, BLOCK_BYTES), b""))
    if content.sha256 != record.sha256:
        raise ValueError(f"{path.name} does not match its digest")


def open_plain(path: Path) -> io.FileIO:
    """Open a plain file. Raises ValueError for anything else; a symbolic link could lead anywhere."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except OSError as error:
        reason = "is a symbolic link" if path.is_symlink() else f"cannot be opened: {error.strerror}"
        raise ValueError(f"{path.name} {reason}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path.name} is not a regular file")
    return io.FileIO(handle)
