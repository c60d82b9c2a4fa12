"""An append-only hash chain of entries in SQLite.

    hash_k = SHA-256(hash_{k−1}, k, kind, body)

The newest hash is also in a small file next to the database (`.head`), which detects an older copy
of the database or one that lost its end. Every entry is synced before the head is written. The head
itself is synced when something relies on it (`sync_head`): if a power cut reverts it, it only
promises fewer entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedveil.errors import UserError
from fedveil.ledger.anchor import Anchor, Head, beside, true_path
from fedveil.ledger.lock import FileLock

PATIENCE = 20.0  # seconds that a writer waits for another writer
FORMAT = 1
MARK = 0x66766C31  # SQLite's application id of a ledger
START = "0" * 64
TABLES = """
CREATE TABLE entries (
    position INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, hash TEXT NOT NULL
);
CREATE TRIGGER kept BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries stay'); END;
CREATE TRIGGER whole BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries stay'); END;
"""


class Entry(NamedTuple):
    """One entry of the ledger."""

    position: int
    kind: str
    body: dict[str, Any]
    hash: str


class Chain:
    """The entries of a ledger on disk; a ledger that is incomplete or altered is refused.

    With `trusting`, the database is accepted as complete without its head.
    """

    def __init__(self, path: Path, trusting: bool = False) -> None:
        self.path = path = true_path(path)  # one head and one lock per ledger, under any name
        self.id, self.head = "", Head("", 0, START)
        self._anchor = Anchor(path)
        self._lock = FileLock(beside(path, ".lock"), f"The ledger {path}")
        self._new: list[Entry] = []
        self._head_synced = True
        if path.is_dir():
            raise _unusable(path, "it is a directory")
        with self._user_errors():
            promised = None if trusting else self._promised()
            self._database = _connected(path)
            self._check_kind()
            self._catch_up()
        if promised is not None:
            self._check_promise(promised)

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether there is a ledger, or remains of one."""
        path = true_path(path)
        return path.exists() or beside(path, ".head").exists()

    def take_new(self) -> list[Entry]:
        """All entries since the previous call; on the first call, all entries."""
        with self._user_errors():
            self._catch_up()
        new, self._new = self._new, []
        return new

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Write as the only writer; entries added inside are on disk at the end.

        SQLite excludes other writers by itself, even if the lock file was removed.
        """
        with self._user_errors(), self._lock.held(PATIENCE):
            self._database.execute("BEGIN IMMEDIATE")
            before = self.head
            try:
                self._catch_up()
                before = self.head
                yield
                self._database.execute("COMMIT")
            except BaseException:
                self._undo(before)
                raise
            if self.head != before:
                self._head_synced = False
                self._anchor.write(self.head)

    def sync_head(self) -> None:
        """Flush the head to disk."""
        if not self._head_synced:
            with self._user_errors():
                self._anchor.sync()
            self._head_synced = True

    def add(self, kind: str, body: dict[str, Any]) -> Entry:
        """Append an entry; only inside `writing`."""
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        position = self.head.position + 1
        row = (position, kind, text, digest(self.head.hash, position, kind, text))
        self._database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", row)
        entry = Entry(position, kind, body, row[3])
        self.head = Head(self.id, position, entry.hash)
        self._new.append(entry)
        return entry

    def entries(self) -> Iterator[Entry]:
        """All entries, from the first."""
        with self._user_errors():
            query = "SELECT position, kind, body, hash FROM entries ORDER BY position"
            for position, kind, text, hash in self._database.execute(query):
                yield Entry(position, kind, json.loads(text), hash)

    def hash_at(self, position: int) -> str | None:
        """The hash of an entry; None if there is no such entry."""
        if not 0 < position <= self.head.position:
            return None
        with self._user_errors():
            query = "SELECT hash FROM entries WHERE position = ?"
            row = self._database.execute(query, (position,)).fetchone()
        return None if row is None else str(row[0])

    def check_file(self) -> None:
        """SQLite's own check of every page."""
        with self._user_errors():
            (answer,) = self._database.execute("PRAGMA integrity_check").fetchone()
        if answer != "ok":
            raise damaged(self.path, f"SQLite says: {str(answer).splitlines()[0]}")

    def close(self) -> None:
        """Close the files."""
        self._database.close()
        with contextlib.suppress(UserError):  # an older head only promises fewer entries
            self.sync_head()

    def anchor_anew(self) -> None:
        """Accept the database as complete, and record that this was done."""
        with self._user_errors(), self._lock.held(PATIENCE):
            self._anchor.create(self.head)
        with self.writing():
            self.add("anchored", {"at": now()})

    def _promised(self) -> Head:
        """The head, read before the database, to which others may append."""
        if not self.path.exists() or not self._anchor.path.exists():
            self._create()
        if self._anchor.read().position == 0:
            self._create()
        return self._anchor.read()

    def _create(self) -> None:
        """Create a ledger; one whose creation was interrupted is created again.

        The head is created first and promises nothing: a database without a head is not new.
        """
        with self._lock.held(PATIENCE):
            promised = self._anchor.read() if self._anchor.path.exists() else None
            if promised is None and self.path.exists():
                raise UserError(
                    f"The ledger {self.path} has no {self._anchor.path.name}. Without it, an old "
                    "copy cannot be distinguished from the newest. Restore it from a backup. If "
                    "you are sure that the database is the newest, run `fedveil budget verify "
                    "--trust-without-head`."
                )
            if promised is not None and promised.position > 0:
                if self.path.exists():
                    return  # another process has just created it
                raise UserError(
                    f"The ledger {self.path} is missing, but {self._anchor.path.name} records "
                    f"{promised.position} entries. Restore it from a backup. To start a new "
                    "ledger, which knows nothing of earlier spending, move both files away."
                )
            if self.path.exists() and _entries(self.path) > 1:
                raise damaged(
                    self.path,
                    f"{self._anchor.path.name} records no entries, but the database has some",
                )
            self._anchor.create(Head("", 0, START))
            for name in (self.path, beside(self.path, "-wal"), beside(self.path, "-shm")):
                name.unlink(missing_ok=True)
            self._fill()

    def _fill(self) -> None:
        os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        self._database = _connected(self.path)
        self._database.executescript(f"PRAGMA application_id = {MARK};" + TABLES)
        self.id = secrets.token_hex(16)
        body = {"ledger": self.id, "format": FORMAT, "at": now()}
        self._database.execute("BEGIN IMMEDIATE")
        self.add("ledger", body)
        self._database.execute("COMMIT")
        self._anchor.write(self.head)
        self._database.close()
        self.id, self.head, self._new = "", Head("", 0, START), []

    def _check_kind(self) -> None:
        (mark,) = self._database.execute("PRAGMA application_id").fetchone()
        if mark != MARK:
            raise UserError(
                f"{self.path} is a database, but not a ledger. Name another file with --ledger "
                "or FEDVEIL_LEDGER."
            )

    def _catch_up(self) -> None:
        """Read the entries after the head, and check every hash."""
        query = (
            "SELECT position, kind, body, hash FROM entries WHERE position > ? ORDER BY position"
        )
        for position, kind, text, hash in self._database.execute(query, (self.head.position,)):
            sound = position == self.head.position + 1
            if not sound or hash != digest(self.head.hash, position, kind, text):
                raise damaged(self.path, f"entry {position} was altered")
            body = json.loads(text)
            if position == 1:
                self._check_first(kind, body)
            self.head = Head(self.id, position, hash)
            self._new.append(Entry(position, kind, body, hash))

    def _check_first(self, kind: str, body: dict[str, Any]) -> None:
        if kind != "ledger" or body.get("format") != FORMAT:
            raise UserError(
                f"The ledger {self.path} was written by another version of fedveil. Use that one."
            )
        self.id = str(body["ledger"])

    def _check_promise(self, promised: Head) -> None:
        """Refuse a database that lacks the promised entry; it may have later ones."""
        if promised.position > self.head.position:
            raise damaged(
                self.path,
                f"it ends at entry {self.head.position}, but had {promised.position} entries: this "
                "is an old copy, or its end is lost",
            )
        if promised.ledger != self.id:
            raise damaged(self.path, f"{self._anchor.path.name} belongs to another ledger")
        if self.hash_at(promised.position) != promised.hash:
            raise damaged(self.path, f"entry {promised.position} was rewritten")

    def _undo(self, before: Head) -> None:
        added = self.head.position - before.position
        self.head, self._new = before, self._new[: len(self._new) - added]
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    @contextlib.contextmanager
    def _user_errors(self) -> Iterator[None]:
        """Turn errors of SQLite and the disk into errors for the user."""
        try:
            yield
        except sqlite3.OperationalError as problem:
            raise _unusable(self.path, str(problem)) from problem
        except (sqlite3.DatabaseError, json.JSONDecodeError) as problem:
            raise damaged(self.path, str(problem)) from problem
        except OSError as problem:
            raise _unusable(self.path, problem.strerror or str(problem)) from problem


def digest(previous: str, position: int, kind: str, text: str) -> str:
    """hash_k = SHA-256(hash_{k−1}, k, kind, body)."""
    return hashlib.sha256(f"{previous}\n{position}\n{kind}\n{text}".encode()).hexdigest()


def damaged(path: Path, why: str) -> UserError:
    """The error for a ledger that is incomplete or altered."""
    return UserError(
        f"The ledger {path} cannot be trusted: {why}. Restore its newest backup together with its "
        ".head file. To start a new ledger, which knows nothing of earlier spending, move both "
        "files away."
    )


def now() -> str:
    """The time, for readers only: no decision depends on it, so the clock may jump."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _connected(path: Path) -> sqlite3.Connection:
    """A connection with WAL and a sync at every commit; transactions are explicit."""
    database = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    return database


def _entries(path: Path) -> int:
    """The number of entries left by an interrupted creation."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        try:
            (count,) = database.execute("SELECT COUNT(*) FROM entries").fetchone()
        except sqlite3.OperationalError:  # no such table
            return 0
    return int(count)


def _unusable(path: Path, why: str) -> UserError:
    return UserError(
        f"Could not use the ledger {path}: {why}. Nothing was released that it does not record. "
        "Make it writable, free some disk space, or name another ledger with --ledger or "
        "FEDVEIL_LEDGER."
    )
