"""Entries that are only ever added, each holding the hash of the one before: SQLite on disk.

    hash_k = SHA-256(hash_{k−1}, k, kind, body)

The newest hash also stands in a small file beside the database (`.head`), so that an older copy of
the database, or one that lost its end, is not taken for the whole. Every entry is synced before the
head is written; the head itself is synced when somebody relies on it (`settle`), for if a power cut
takes it back it only promises less.
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
from fedveil.privacy.anchor import Anchor, Head, beside, true_path
from fedveil.privacy.hold import Hold

PATIENCE = 20.0  # seconds that a writer waits for another one's entry
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
    """One line of the ledger."""

    position: int
    kind: str
    body: dict[str, Any]
    hash: str


class Chain:
    """A ledger's entries on disk; whole and unaltered when it is opened, or refused.

    Only with `trusting` is the database taken for the whole without its head.
    """

    def __init__(self, path: Path, trusting: bool = False) -> None:
        self.path = path = true_path(path)  # one ledger, one head and one lock, by any name
        self.id, self.head = "", Head("", 0, START)
        self._anchor = Anchor(path)
        self._hold = Hold(beside(path, ".lock"), f"The ledger {path}")
        self._new: list[Entry] = []
        self._settled = True
        if path.is_dir():
            raise _unusable(path, "it is a directory")
        with self._sentences():
            promised = None if trusting else self._promised()
            self._database = _connected(path)
            self._check_kind()
            self._catch_up()
        if promised is not None:
            self._check_promise(promised)

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether there is a ledger, or what is left of one."""
        path = true_path(path)
        return path.exists() or beside(path, ".head").exists()

    def take_new(self) -> list[Entry]:
        """All entries since the last call, the first call from the first entry on."""
        with self._sentences():
            self._catch_up()
        new, self._new = self._new, []
        return new

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Alone among all writers; what is added inside is on disk at the end.

        SQLite would keep others out by itself, even where somebody has removed the lock's file.
        """
        with self._sentences(), self._hold.held(PATIENCE):
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
                self._settled = False
                self._anchor.write(self.head)

    def settle(self) -> None:
        """The head is on disk."""
        if not self._settled:
            with self._sentences():
                self._anchor.sync()
            self._settled = True

    def add(self, kind: str, body: dict[str, Any]) -> Entry:
        """The next entry; inside `writing` only."""
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        position = self.head.position + 1
        row = (position, kind, text, digest(self.head.hash, position, kind, text))
        self._database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", row)
        entry = Entry(position, kind, body, row[3])
        self.head = Head(self.id, position, entry.hash)
        self._new.append(entry)
        return entry

    def entries(self) -> Iterator[Entry]:
        """All of them, from the first on."""
        with self._sentences():
            query = "SELECT position, kind, body, hash FROM entries ORDER BY position"
            for position, kind, text, hash in self._database.execute(query):
                yield Entry(position, kind, json.loads(text), hash)

    def hash_at(self, position: int) -> str | None:
        """The hash of an entry; None where there is none."""
        if not 0 < position <= self.head.position:
            return None
        with self._sentences():
            query = "SELECT hash FROM entries WHERE position = ?"
            row = self._database.execute(query, (position,)).fetchone()
        return None if row is None else str(row[0])

    def check_file(self) -> None:
        """SQLite's own check of every page."""
        with self._sentences():
            (answer,) = self._database.execute("PRAGMA integrity_check").fetchone()
        if answer != "ok":
            raise damaged(self.path, f"SQLite says: {str(answer).splitlines()[0]}")

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()
        with contextlib.suppress(UserError):  # it would only promise less
            self.settle()

    def anchor_anew(self) -> None:
        """Take the database as it is for the whole, and note that this was done."""
        with self._sentences(), self._hold.held(PATIENCE):
            self._anchor.create(self.head)
        with self.writing():
            self.add("anchored", {"at": now()})

    def _promised(self) -> Head:
        """The head, read before the database, which others may add to."""
        if not self.path.exists() or not self._anchor.path.exists():
            self._create()
        if self._anchor.read().position == 0:
            self._create()
        return self._anchor.read()

    def _create(self) -> None:
        """A new ledger; one whose making was cut short, before anything was promised, is made anew.

        The head comes first and promises nothing: a database without a head is not a new ledger.
        """
        with self._hold.held(PATIENCE):
            promised = self._anchor.read() if self._anchor.path.exists() else None
            if promised is None and self.path.exists():
                raise UserError(
                    f"The ledger {self.path} has lost its {self._anchor.path.name}, without which "
                    "an old copy cannot be told from the newest; restore it from a backup, or, if "
                    "you are sure of the database, run `fedveil budget verify --anchor-anew`."
                )
            if promised is not None and promised.position > 0:
                if self.path.exists():
                    return  # another process has just made it
                raise UserError(
                    f"The ledger {self.path} is gone, but {self._anchor.path.name} tells of "
                    f"{promised.position} entries; restore it from a backup, or move both away to "
                    "begin a new one, in which nothing is known of what was spent."
                )
            if self.path.exists() and _entries(self.path) > 1:
                raise damaged(self.path, f"{self._anchor.path.name} promises nothing")
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
                f"{self.path} is a database, but not a ledger; name another file with --ledger "
                "or FEDVEIL_LEDGER."
            )

    def _catch_up(self) -> None:
        """Read on from the head, and check every hash on the way."""
        query = (
            "SELECT position, kind, body, hash FROM entries WHERE position > ? ORDER BY position"
        )
        for position, kind, text, hash in self._database.execute(query, (self.head.position,)):
            sound = position == self.head.position + 1
            if not sound or hash != digest(self.head.hash, position, kind, text):
                raise damaged(self.path, f"entry {position} is not what was written there")
            body = json.loads(text)
            if position == 1:
                self._check_first(kind, body)
            self.head = Head(self.id, position, hash)
            self._new.append(Entry(position, kind, body, hash))

    def _check_first(self, kind: str, body: dict[str, Any]) -> None:
        if kind != "ledger" or body.get("format") != FORMAT:
            raise UserError(
                f"The ledger {self.path} was written by another version of fedveil; use that one."
            )
        self.id = str(body["ledger"])

    def _check_promise(self, promised: Head) -> None:
        """The head of an earlier entry must be found again; the database may be ahead of it."""
        if promised.position > self.head.position:
            raise damaged(
                self.path,
                f"it ends at entry {self.head.position}, but had {promised.position} of them: "
                "this is an old copy, or its end is lost",
            )
        if promised.ledger != self.id:
            raise damaged(self.path, f"{self._anchor.path.name} belongs to another ledger")
        if self.hash_at(promised.position) != promised.hash:
            raise damaged(self.path, f"entry {promised.position} was written anew")

    def _undo(self, before: Head) -> None:
        added = self.head.position - before.position
        self.head, self._new = before, self._new[: len(self._new) - added]
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        """Turn what SQLite and the disk say into a sentence."""
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
    """The refusal of a ledger that is not whole."""
    return UserError(
        f"The ledger {path} cannot be trusted: {why}; restore the newest backup of it with its "
        ".head, or move both away to begin a new one, in which nothing is known of what was spent."
    )


def now() -> str:
    """For readers only: nothing is decided by it, so a clock that jumps does no harm."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _connected(path: Path) -> sqlite3.Connection:
    """WAL with a sync at every commit; all transactions are begun by hand."""
    database = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    return database


def _entries(path: Path) -> int:
    """How many there are in what a making that was cut short has left."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        try:
            (count,) = database.execute("SELECT COUNT(*) FROM entries").fetchone()
        except sqlite3.OperationalError:  # no such table
            return 0
    return int(count)


def _unusable(path: Path, why: str) -> UserError:
    return UserError(
        f"Could not use the ledger {path}: {why}; nothing was released that is not in it, so make "
        "it writable or free some space, or name another with --ledger or FEDVEIL_LEDGER."
    )
