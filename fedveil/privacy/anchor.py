"""A ledger's head in a file of its own, which an older copy of the ledger would not fit."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedveil.errors import UserError

SLOT = 256  # bytes of one of the head's two places
SYNC = getattr(os, "fdatasync", os.fsync)  # where there is no such call, one that does more


class Head(NamedTuple):
    """How far a ledger has come: the position and the hash of its newest entry."""

    ledger: str
    position: int
    hash: str


class Anchor:
    """The head in a file of its own, in two places written in turn: a torn write spoils one."""

    def __init__(self, ledger: Path) -> None:
        self.path = beside(true_path(ledger), ".head")

    def create(self, head: Head) -> None:
        """The file, at this head; at position 0 it promises nothing yet."""
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
        """Note the head where the older one stands: no room is needed on a full disk."""
        with self._open() as file:
            newest = _newest(os.pread(file, 2 * SLOT, 0))
            place = 0 if newest is None else 1 - newest[1]
            os.pwrite(file, _slot(head), place * SLOT)

    def sync(self) -> None:
        """What was written is on disk."""
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
        """Both places as they are; empty without the file."""
        try:
            with self.path.open("rb") as file:
                return file.read(2 * SLOT)
        except FileNotFoundError:
            return b""

    def read(self) -> Head:
        """The newest head that is whole."""
        newest = _newest(self.raw())
        if newest is None:
            raise UserError(
                f"{self.path} is damaged, and without it an old copy of the ledger cannot be told "
                "from the newest; restore it from a backup, or, if you are sure of the database, "
                "run `fedveil budget verify --anchor-anew`."
            )
        return newest[0]


def true_path(path: Path) -> Path:
    """Where symbolic links lead to."""
    return Path(os.path.realpath(path))


def beside(path: Path, suffix: str) -> Path:
    """The file of this name and a suffix."""
    return path.with_name(path.name + suffix)


def _sync_directory(path: Path) -> None:
    """Make names in a directory as durable as the files they name."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _slot(head: Head) -> bytes:
    text = json.dumps([*head, _check(head)])
    return text.encode().ljust(SLOT)


def _newest(text: bytes) -> tuple[Head, int] | None:
    """The newest head that is whole, and its place."""
    heads = [_read_slot(text[start : start + SLOT]) for start in (0, SLOT)]
    whole = [(head, place) for place, head in enumerate(heads) if head is not None]
    return max(whole, key=lambda pair: pair[0].position, default=None)


def _read_slot(slot: bytes) -> Head | None:
    try:
        ledger, position, hash, check = json.loads(slot)
    except (ValueError, TypeError):
        return None
    head = Head(ledger, position, hash)
    return head if check == _check(head) else None


def _check(head: Head) -> str:
    return hashlib.sha256(f"{head.ledger} {head.position} {head.hash}".encode()).hexdigest()[:16]
