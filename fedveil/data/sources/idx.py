"""The IDX format of MNIST and related data sets: magic number, sizes, values; big-endian."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from fedveil.errors import UserError

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_BYTES = 2**31  # the largest known IDX file, EMNIST byclass, has 5.5e8
_CHUNK = 2**20


def read_idx(source: Path | str | bytes) -> np.ndarray:
    """The array of an IDX file, gzipped or not, in the machine's byte order.

    Memory use is limited by the bytes actually present, whatever the header declares.
    """
    name = "the given bytes" if isinstance(source, bytes) else f"'{source}'"
    try:
        with _open(source) as stream:
            return _parse(stream, name)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"Cannot read the IDX file {name} ({error}). Download it again.") from None


def _open(source: Path | str | bytes) -> BinaryIO:
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    raw = io.BytesIO(content)
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if content[:2] == b"\x1f\x8b" else raw


def _parse(stream: BinaryIO, name: str) -> np.ndarray:
    dtype, shape = _header(stream, name)
    declared = dtype.itemsize * prod(shape)
    spanned = dtype.itemsize * prod(max(size, 1) for size in shape)  # a size of 0 hides the others
    if spanned > MAX_BYTES:
        raise UserError(f"The IDX file {name} declares {spanned} bytes, more than any known file.")
    content = _read_at_most(stream, declared + 1)
    if len(content) != declared:
        has = "more" if len(content) > declared else f"only {len(content)}"
        raise UserError(
            f"The IDX file {name} declares {declared} bytes but has {has}. Download it again."
        )
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _header(stream: BinaryIO, name: str) -> tuple[np.dtype, tuple[int, ...]]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or not 1 <= magic[3] <= 8:
        raise UserError(f"{name} is not an IDX file: it starts with the bytes '{magic.hex(' ')}'.")
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise UserError(f"The IDX file {name} ends inside its header. Download it again.")
    return np.dtype(TYPES[magic[2]]), struct.unpack(f">{magic[3]}I", sizes)


def _read_at_most(stream: BinaryIO, limit: int) -> bytearray:
    """Up to `limit` bytes, read in chunks so that a false header allocates nothing."""
    content = bytearray()
    while len(content) < limit and (piece := stream.read(min(_CHUNK, limit - len(content)))):
        content += piece
    return content
