from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.ledger import chain as module
from fedveil.ledger.anchor import SLOT, Anchor, Head, _newest, _read_slot
from fedveil.ledger.chain import MARK, Chain, digest


def add(chain: Chain, *numbers: int) -> None:
    with chain.writing():
        for number in numbers:
            chain.add("note", {"number": number})


def numbers(path: Path) -> list[int]:
    chain = Chain(path)
    found = [entry.body["number"] for entry in chain.take_new() if entry.kind == "note"]
    chain.close()
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with entries 0..4, closed."""
    chain = Chain(tmp_path / "ledger.sqlite")
    for number in range(5):
        add(chain, number)
    chain.close()
    return chain.path


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """The database without the guards that keep honest hands from it."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DROP TRIGGER kept")
        database.execute("DROP TRIGGER whole")
        yield database
        database.commit()


def head(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def test_entries_come_back_in_their_order(path: Path) -> None:
    assert numbers(path) == [0, 1, 2, 3, 4]
    chain = Chain(path)
    add(chain, 5, 6)
    assert numbers(path) == [0, 1, 2, 3, 4, 5, 6]
    assert [entry.position for entry in chain.entries()] == list(range(1, 9))


def test_every_hash_holds_the_one_before(path: Path) -> None:
    chain, before = Chain(path), "0" * 64
    for entry in chain.entries():
        body = json.dumps(entry.body, ensure_ascii=False, separators=(",", ":"))
        assert entry.hash == digest(before, entry.position, entry.kind, body)
        before = entry.hash
    assert chain.head.hash == before


def test_all_files_are_the_owner_s_alone(path: Path) -> None:
    chain = Chain(path)
    add(chain, 5)
    files = sorted(path.parent.iterdir())
    assert {file.name for file in files} >= {"ledger.sqlite", "ledger.sqlite-wal"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    chain.close()


def test_it_is_written_ahead_and_synced(path: Path) -> None:
    database = Chain(path)._database
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert database.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


@pytest.mark.parametrize("order", ["UPDATE entries SET body = '{}'", "DELETE FROM entries"])
def test_entries_are_not_changed_by_accident(path: Path, order: str) -> None:
    database = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="entries stay"):
        database.execute(order)
    database.close()


# Tampering


ALTERED = {
    "a body": "UPDATE entries SET body = '{\"number\":7}' WHERE position = 3",
    "a kind": "UPDATE entries SET kind = 'other' WHERE position = 3",
    "a hash": "UPDATE entries SET hash = substr(hash, 2) || substr(hash, 1, 1) WHERE position = 3",
    "an entry taken out": "DELETE FROM entries WHERE position = 3",
    "the first taken out": "DELETE FROM entries WHERE position = 1",
    "two swapped": "UPDATE entries SET position = -position WHERE position IN (3, 4)",
    "another id": "UPDATE entries SET body = replace(body, 'ledger', 'ledger ') WHERE position = 1",
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_entry_is_refused(path: Path, name: str) -> None:
    with raw(path) as database:
        database.execute(ALTERED[name])
    with pytest.raises(UserError, match=r"cannot be trusted: .*\. Restore its newest backup"):
        Chain(path)


def rewritten(path: Path, change: Callable[[int, str], str | None]) -> None:
    """As one who knows how the hashes are made, and makes them anew."""
    with raw(path) as database:
        rows = database.execute("SELECT * FROM entries ORDER BY position").fetchall()
        database.execute("DELETE FROM entries")
        before, place = "0" * 64, 0
        for _, kind, text, _ in rows:
            changed = change(place, text)
            if changed is not None:
                place += 1
                before = digest(before, place, kind, changed)
                database.execute(
                    "INSERT INTO entries VALUES (?, ?, ?, ?)", (place, kind, changed, before)
                )


def test_a_chain_that_was_made_anew_does_not_fit_its_head(path: Path) -> None:
    rewritten(path, lambda place, text: '{"number":9}' if place == 3 else text)
    with pytest.raises(UserError, match="entry 6 was rewritten"):
        Chain(path)


def test_lost_entries_are_noticed(path: Path) -> None:
    rewritten(path, lambda place, text: text if place < 4 else None)
    with pytest.raises(UserError, match=r"it ends at entry 4, but had 6 entries"):
        Chain(path)


def test_an_old_copy_is_noticed(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "copy")
    chain = Chain(path)
    add(chain, 5)
    chain.close()
    shutil.copy(tmp_path / "copy", path)
    with pytest.raises(UserError, match="it ends at entry 6, but had 7 entries: this is an old"):
        Chain(path)


def test_the_head_of_another_ledger_is_noticed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = Chain(tmp_path / "b" / "ledger.sqlite")
    shutil.copy(head(other.path), head(path))
    with pytest.raises(UserError, match=r"ledger\.sqlite\.head belongs to another ledger"):
        Chain(path)


def test_a_ledger_that_was_deleted_is_not_begun_anew(path: Path) -> None:
    path.unlink()
    with pytest.raises(UserError, match=r"is missing, but ledger\.sqlite\.head records 6 entries"):
        Chain(path)
    assert not path.exists()


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_ledger_without_its_head_is_refused_until_it_is_trusted(
    path: Path, harm: Callable[[Path], object]
) -> None:
    harm(head(path))
    with pytest.raises(UserError, match="verify --trust-without-head"):
        Chain(path)
    trusted = Chain(path, trusting=True)
    trusted.anchor_anew()
    trusted.close()
    assert [entry.kind for entry in Chain(path).entries()][-1] == "anchored"


def test_a_ledger_is_one_by_any_name(path: Path, tmp_path: Path) -> None:
    """A link to the database, and to its directory: one head and one lock."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(path)
    (tmp_path / "folder").symlink_to(path.parent)
    for number, name in enumerate(("elsewhere/link", "folder/ledger.sqlite"), 5):
        chain = Chain(tmp_path / name)
        assert Chain.exists(tmp_path / name)
        assert chain.path == path
        add(chain, number)
        chain.close()
    assert numbers(path) == [0, 1, 2, 3, 4, 5, 6]
    assert [file.name for file in (tmp_path / "elsewhere").iterdir()] == ["link"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_torn_head_leaves_the_one_before(path: Path, place: int) -> None:
    with head(path).open("r+b") as file:
        file.seek(place * SLOT + 20)
        file.write(b"\x00" * 30)
    assert numbers(path) == [0, 1, 2, 3, 4]
    chain = Chain(path)
    add(chain, 5)  # goes where the torn one was, so the whole one stays until it is there
    assert Anchor(path).read() == chain.head


def test_the_head_is_written_over_the_older_one_whoever_wrote_it(path: Path) -> None:
    one, other = Chain(path), Chain(path)
    for number, chain in enumerate((one, other, other, one, one)):
        before = Anchor(path).read()
        add(chain, number)
        text = head(path).read_bytes()
        assert _newest(text)[0] == chain.head
        assert _read_slot(text[:SLOT]) == before or _read_slot(text[SLOT:]) == before


def test_a_head_that_promises_nothing_does_not_make_a_full_ledger_new(path: Path) -> None:
    Anchor(path).create(Head("", 0, "0" * 64))
    with pytest.raises(UserError, match="records no entries"):
        Chain(path)
    assert path.exists()


def test_what_is_no_ledger_is_left_alone(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE precious (a)")
    before = path.read_bytes()
    with pytest.raises(UserError, match="is a database, but not a ledger"):
        Chain(path)
    path.write_text("precious " * 200)
    with pytest.raises(UserError, match="cannot be trusted: file is not a database"):
        Chain(path)
    assert before != path.read_bytes() == b"precious " * 200


def test_a_ledger_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORMAT", 2)
    Chain(tmp_path / "a").close()
    monkeypatch.undo()
    with pytest.raises(UserError, match="another version"):
        Chain(tmp_path / "a")


# Power cuts


PAGE, HEADER, FRAME = 4096, 32, 4096 + 24  # of a database; of its write-ahead log


def lengths(name: str, whole: int) -> set[int]:
    """Nothing, a part of each thing a file is made of, and all but a byte."""
    edges = {
        "ledger.sqlite": range(0, whole, PAGE),
        "ledger.sqlite-wal": range(HEADER, whole, FRAME),
        "ledger.sqlite.head": range(0, whole, SLOT),
    }
    near = {edge + step for edge in edges[name] for step in (-1, 0, 1)}
    return {length for length in {0, 1, 99, whole // 3, whole - 1} | near if 0 <= length < whole}


@pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite.head"])
def test_a_file_cut_short_is_never_taken_for_the_whole(
    path: Path, tmp_path: Path, name: str
) -> None:
    """Copied while it is open, so that the newest entries are in the write-ahead log alone."""
    chain = Chain(path)
    for number in (5, 6, 7):
        add(chain, number)
    refusals = []
    for length in sorted(lengths(name, path.with_name(name).stat().st_size)):
        place = tmp_path / f"cut at {length}"
        place.mkdir()
        for file in path.parent.glob("ledger.sqlite*"):
            if not file.name.endswith("-shm"):
                shutil.copy(file, place / file.name)
        os.truncate(place / name, length)
        try:
            assert numbers(place / "ledger.sqlite") == list(range(8))
        except UserError as refusal:
            refusals.append(str(refusal))
    assert refusals
    for refusal in refusals:
        assert re.search("cannot be trusted|damaged|not a ledger", refusal)


def test_a_commit_that_the_head_has_not_seen_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies between the database and the head."""
    chain = Chain(path)
    monkeypatch.setattr(Anchor, "write", lambda self, head: None)
    add(chain, 5)
    monkeypatch.undo()
    chain.close()
    assert numbers(path) == [0, 1, 2, 3, 4, 5]


def test_a_making_that_was_cut_short_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: Anchor, head: Head) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "ledger.sqlite"
    monkeypatch.setattr(Anchor, "write", cut)
    with pytest.raises(KeyboardInterrupt):
        Chain(path)
    monkeypatch.undo()
    assert path.exists()
    assert Chain(path).head.position == 1


# Disks


def test_a_full_disk_adds_nothing_and_loses_nothing(path: Path) -> None:
    chain = Chain(path)
    add(chain, 5)
    size = path.with_name(path.name + "-wal").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(UserError, match=r"Could not use the ledger .*\. Nothing was released"):
            add(chain, 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    add(chain, 7)
    chain.close()
    assert numbers(path) == [0, 1, 2, 3, 4, 5, 7]


def test_a_head_that_cannot_be_written_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    chain = Chain(path)
    monkeypatch.setattr(module.os, "pwrite", full)
    with pytest.raises(UserError, match="No space left on device"):
        add(chain, 5)
    monkeypatch.undo()
    chain.close()
    assert numbers(path) in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])


def test_a_place_that_cannot_be_written_is_one_sentence() -> None:
    with pytest.raises(UserError, match=re.escape("Could not use the ledger /proc/ledger.sqlite")):
        Chain(Path("/proc/ledger.sqlite"))


def test_a_read_only_ledger_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._connected

    def read_only(where: Path) -> sqlite3.Connection:
        database = real(where)
        database.execute("PRAGMA query_only = 1")
        return database

    monkeypatch.setattr(module, "_connected", read_only)
    with pytest.raises(UserError, match=r"readonly database\. Nothing was released"):
        add(Chain(path), 5)
    assert numbers(path) == [0, 1, 2, 3, 4]


# Others


def test_a_failed_transaction_leaves_the_chain_as_it_was(path: Path) -> None:
    chain = Chain(path)
    before = chain.head
    with pytest.raises(ValueError, match="JSON"), chain.writing():  # noqa: PT012
        chain.add("note", {"number": 5})
        chain.add("note", {"number": float("nan")})
    assert chain.head == before
    add(chain, 6)
    chain.close()
    assert numbers(path) == [0, 1, 2, 3, 4, 6]


def test_many_writers_make_one_chain(path: Path) -> None:
    """Each has the file open on its own, as processes do."""

    def work(first: int) -> None:
        chain = Chain(path)
        for number in range(first, first + 10):
            add(chain, number)
        chain.close()

    threads = [threading.Thread(target=work, args=(100 * k,)) for k in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = [100 * k + number for k in range(1, 5) for number in range(10)]
    assert sorted(numbers(path)) == [0, 1, 2, 3, 4, *written]


def test_writers_without_the_lock_s_file_still_make_one_chain(path: Path) -> None:
    one, other = Chain(path), Chain(path)
    with one.writing():
        one.add("note", {"number": 5})
        path.with_name(path.name + ".lock").unlink()
        thread = threading.Thread(target=lambda: add(Chain(path), 6))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()  # it waits for SQLite's own lock
    thread.join()
    add(other, 7)
    assert numbers(path) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_entries_are_synced_one_by_one_and_the_head_when_it_matters(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Head] = []
    monkeypatch.setattr(Anchor, "sync", lambda self: synced.append(self.read()))
    chain = Chain(path)
    add(chain, 5)
    add(chain, 6)
    assert synced == []
    chain.sync_head()
    chain.sync_head()
    assert synced == [chain.head]
    add(chain, 7)
    chain.close()
    assert synced[1:] == [chain.head]


def test_a_writer_that_does_not_let_go_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    slow, other = Chain(path), Chain(path)
    with slow.writing(), pytest.raises(UserError, match=f"in use by process {os.getpid()} on"):
        add(other, 5)


def test_a_clock_that_jumps_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for moment in ("1970-01-01T00:00:00+00:00", "2100-01-01T00:00:00+00:00"):
        monkeypatch.setattr(module, "now", lambda moment=moment: moment)
        chain = Chain(path)
        add(chain, 5)
        chain.close()
    assert numbers(path) == [0, 1, 2, 3, 4, 5, 5]


def test_sqlite_s_own_check_is_asked(path: Path) -> None:
    chain = Chain(path)
    chain.check_file()
    assert chain._database.execute("PRAGMA application_id").fetchone() == (MARK,)
