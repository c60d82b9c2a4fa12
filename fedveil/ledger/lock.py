"""An exclusive file lock that ends with its process and names its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fedveil.errors import UserError

PAUSE = 0.02  # seconds between two tries
NAME = 512  # bytes, more than the name of a host


class FileLock:
    """An exclusive lock on a file, held until `release` or until the process ends.

    The operating system releases it when the process ends in any way. The content of the file only
    names the holder, so the text of a dead process blocks nobody.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._file: int | None = None
        self.path, self.what = path, what

    def take(self, patience: float = 0.0) -> None:
        """Acquire the lock, or fail with the holder's name after `patience` seconds."""
        if self._file is not None:
            return
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait(file, patience)
        except BaseException:
            os.close(file)
            raise
        os.pwrite(file, json.dumps(_me()).encode().ljust(NAME), 0)  # over any earlier name
        self._file = file

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.release()

    @contextlib.contextmanager
    def held(self, patience: float) -> Iterator[None]:
        """Hold the lock inside a `with` block."""
        self.take(patience)
        try:
            yield
        finally:
            self.release()

    def _wait(self, file: int, patience: float) -> None:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as problem:
                if problem.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                    raise
            if time.monotonic() >= until:
                raise UserError(
                    f"{self.what} is in use by {_named(os.pread(file, NAME, 0))}. "
                    "Wait until it ends, or end it."
                )
            time.sleep(PAUSE)


def _me() -> dict[str, object]:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _named(text: bytes) -> str:
    try:
        who = json.loads(text)
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):  # the holder has not written its name yet
        return "another process"
