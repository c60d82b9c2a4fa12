"""The head of a ledger in a file of its own, which detects older copies of the ledger."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedveil.errors import UserError

SLOT = 256  # bytes of one of the head's two slots
SYNC = getattr(os, "fdatasync", os.fsync)  # fsync where fdatasync does not exist


class Head(NamedTuple):
    """Position and hash of a ledger's newest entry."""

    ledger: str
    position: int
    hash: str


class Anchor:
    """The file of the head, with two slots written in turn: a torn write damages only one."""

    def __init__(self, ledger: Path) -> None:
        self.path = beside(true_path(ledger), ".head")

    def create(self, head: Head) -> None:
        """Create the file with this head; position 0 promises no entries."""
        partial = beside(self.path, ".partial")
        file = os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        try:
            os.write(file, _slot(head) * 2)
            os.fsync(file)
        finally:
            os.close(file)
        partial.replace(self.path)
        _sync_directory(self.path.parent)

    def write(self, head: Head) -> None:
        """Overwrite the older slot with the head, which works on a full disk."""
        with self._open() as file:
            newest = _newest(os.pread(file, 2 * SLOT, 0))
            slot = 0 if newest is None else 1 - newest[1]
            os.pwrite(file, _slot(head), slot * SLOT)

    def sync(self) -> None:
        """Flush the file to disk."""
        with self._open() as file:
            SYNC(file)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        file = os.open(self.path, os.O_RDWR)
        try:
            yield file
        finally:
            os.close(file)

    def raw(self) -> bytes:
        """The bytes of both slots; empty if there is no file."""
        try:
            with self.path.open("rb") as file:
                return file.read(2 * SLOT)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as problem:
            why = problem.strerror or problem
            raise UserError(f"{self.path} cannot be read: {why}. Make it readable.") from problem

    def read(self) -> Head:
        """The newest intact head."""
        newest = _newest(self.raw())
        if newest is None:
            raise UserError(
                f"{self.path} is damaged. Without it, an old copy of the ledger cannot be "
                "distinguished from the newest. Restore it from a backup. If you are sure that the "
                "database is the newest, run `fedveil budget verify --trust-without-head`."
            )
        return newest[0]


def true_path(path: Path) -> Path:
    """The path with symbolic links resolved."""
    return Path(os.path.realpath(path))


def beside(path: Path, suffix: str) -> Path:
    """The path with a suffix appended to its name."""
    return path.with_name(path.name + suffix)


def _sync_directory(path: Path) -> None:
    """Flush the names in a directory to disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _slot(head: Head) -> bytes:
    text = json.dumps([*head, _check(head)])
    return text.encode().ljust(SLOT)


def _newest(text: bytes) -> tuple[Head, int] | None:
    """The newest intact head, and its slot."""
    heads = [_read_slot(text[start : start + SLOT]) for start in (0, SLOT)]
    intact = [(head, slot) for slot, head in enumerate(heads) if head is not None]
    return max(intact, key=lambda pair: pair[0].position, default=None)


def _read_slot(slot: bytes) -> Head | None:
    try:
        ledger, position, hash, check = json.loads(slot)
    except (ValueError, TypeError):
        return None
    head = Head(ledger, position, hash)
    return head if check == _check(head) else None


def _check(head: Head) -> str:
    return hashlib.sha256(f"{head.ledger} {head.position} {head.hash}".encode()).hexdigest()[:16]
