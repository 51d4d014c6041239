"""Files of a checkpoint: created once, written to the end, known by size and digest.

A data file is in the safetensors format, so that stock tools read it: eight bytes of header length, a JSON
header with every tensor's dtype, shape and place, then the tensors. Writing it takes a few lines, which
hash each block while it is in the cache and hold no second copy of anything; the package's own writer has
no digest. Reading is the package's, which checks the header and maps the file instead of loading it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

BLOCK_BYTES = 1 << 20

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
    """What a file must be: ``bytes`` long, with this SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> Record:
    """Write ``tensors`` and ``notes`` as a new safetensors file that is on the disk on return.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    # Widest elements first, so that every tensor lies at a multiple of its element size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return _write(path, _blocks(len(text).to_bytes(8, "little") + text, [tensors[name] for name in names]))


def write_text(path: Path, text: str) -> Record:
    """Write a new text file that is on the disk on return."""
    return _write(path, iter([memoryview(text.encode())]))


def _blocks(head: bytes, tensors: list[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        raw = flat.view(torch.uint8).numpy().data
        for start in range(0, len(raw), BLOCK_BYTES):
            yield raw[start : start + BLOCK_BYTES]


def _write(path: Path, blocks: Iterator[memoryview]) -> Record:
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        for block in blocks:
            digest.update(block)
            size += len(block)
            while block:  # a disk that is nearly full takes a part
                block = block[os.write(handle, block) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return Record(size, digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Return once the names in ``path`` are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_text(path: Path, most_bytes: int) -> str:
    """The text of a plain file of at most ``most_bytes``.

    Raises:
        ValueError: the file is missing, no plain file, too large or not UTF-8.
    """
    handle, size = _open(path)
    with os.fdopen(handle, "rb") as file:
        if size > most_bytes:
            raise ValueError(f"{path.name} has {size} bytes, expected at most {most_bytes}")
        try:
            return file.read().decode()
        except UnicodeDecodeError:
            raise ValueError(f"{path.name} is not UTF-8 text") from None


def problem_with(path: Path, record: Record) -> str:
    """What keeps ``path`` from being the file that ``record`` describes; empty if it is."""
    try:
        handle, size = _open(path)
    except ValueError as error:
        return str(error)
    with os.fdopen(handle, "rb", buffering=0) as file:
        if size != record.bytes:
            return f"{path.name} has {size} bytes, expected {record.bytes}"
        try:
            found = _digest(file)
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror}"
    return "" if found == record.sha256 else f"{path.name} does not match its digest"


def _digest(file: io.FileIO) -> str:
    digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
    view = memoryview(block)
    while size := file.readinto(block):
        digest.update(view[:size])
    return digest.hexdigest()


def _open(path: Path) -> tuple[int, int]:
    """A plain file and its size. A link is not followed: it could lead anywhere."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except OSError as error:
        link = "is a symbolic link" if path.is_symlink() else f"cannot be opened: {error.strerror}"
        raise ValueError(f"{path.name} {link}") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise ValueError(f"{path.name} is no plain file")
    return handle, status.st_size
