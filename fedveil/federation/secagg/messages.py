"""Messages of secure aggregation, byte by byte.  Every reader accepts exactly what a writer makes.

All numbers are big-endian. A message is `fvsa`, version, kind, and the fields below. Lists of
clients ascend strictly, so they hold no duplicates and have one form. A reader raises `Refusal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from fedveil.errors import UserError
from fedveil.federation.secagg.keys import RECORD, KeyRecord
from fedveil.federation.secagg.primitives import KEY, SIGNATURE, TAG
from fedveil.federation.secagg.refusals import WORDS, Refusal, Word
from fedveil.federation.secagg.shamir import ELEMENT, PRIME
from fedveil.federation.secagg.terms import (
    HASH,
    MOST_CLIENTS,
    RoundContext,
    SecAggTerms,
    check_place,
    is_ascending,
    place,
)

MAGIC = b"fvsa\1"
BOX = 2 * ELEMENT + TAG  # bytes
SESSION = HASH
T = TypeVar("T")


class Kind(IntEnum):
    """What a message is. A reply has its request's kind plus 16."""

    KEYS = 1
    SHARES = 2
    MASKED = 3
    CONSISTENCY = 4
    REVEAL = 5
    KEYS_REPLY = 17
    SHARES_REPLY = 18
    MASKED_REPLY = 19
    CONSISTENCY_REPLY = 20
    REVEAL_REPLY = 21
    REFUSAL = 31


def kind_of(content: bytes) -> Kind:
    """The kind of a message; refused if there is none."""
    known = isinstance(content, bytes) and content[:5] == MAGIC and len(content) > 5
    if not known or content[5] not in list(Kind):
        raise Refusal("malformed", "A message does not start as one of secure aggregation.")
    return Kind(content[5])


class Reader:
    """Takes fields from the front of a message of one kind; `end` refuses what is left over."""

    def __init__(self, content: bytes, kind: Kind) -> None:
        if kind_of(content) != kind:
            raise Refusal("stage", f"A message is not a {kind.name.lower()}. It was refused.")
        self._content, self._place = content, 6

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        taken = self._content[self._place : self._place + size]
        if len(taken) != size:
            raise Refusal("malformed", "A message is too short. It was refused.")
        self._place += size
        return taken

    def number(self, size: int = 4) -> int:
        """The next number."""
        return int.from_bytes(self.take(size), "big")

    def count(self) -> int:
        """The length of a list, at most a cohort."""
        if (count := self.number()) > MOST_CLIENTS:
            raise Refusal("malformed", f"A list claims {count} clients. It was refused.")
        return count

    def clients(self) -> tuple[int, ...]:
        """A list of clients."""
        return ascending(tuple(self.number() for _ in range(self.count())))

    def table(self, size: int) -> dict[int, bytes]:
        """A list of clients with `size` bytes each."""
        rows = [(self.number(), self.take(size)) for _ in range(self.count())]
        ascending(tuple(client for client, _ in rows))
        return dict(rows)

    def element(self) -> int:
        """A number below Shamir's prime."""
        return element(self.take(ELEMENT))

    def place(self) -> tuple[bytes, bytes, int]:
        """Agreement, opening and round."""
        found = self.take(HASH), self.take(self.number(1)), self.number(8)
        valid("malformed", check_place, *found)
        return found

    def rest(self) -> bytes:
        """Everything that is left."""
        taken, self._place = self._content[self._place :], len(self._content)
        return taken

    def end(self) -> None:
        """Refuse bytes that are left over."""
        if self._place != len(self._content):
            raise Refusal("malformed", "A message is too long. It was refused.")


def written(kind: Kind, *fields: bytes) -> bytes:
    """The bytes of a message."""
    return b"".join((MAGIC, bytes([kind]), *fields))


@dataclass(frozen=True)
class SharesRequest:
    """The context of a round, and the key records of the clients that are there."""

    context: RoundContext
    records: Mapping[int, KeyRecord]

    def write(self) -> bytes:
        """The bytes that `read` reads."""
        asked, terms = self.context, self.context.terms
        numbers = (terms.threshold, terms.corrupt, terms.enough, terms.bits, terms.dim)
        rows = {client: record.plain() for client, record in self.records.items()}
        return written(
            Kind.SHARES,
            place(asked.agreement, asked.opening, asked.round),
            asked.model,
            b"".join(map(_four, numbers)),
            write_clients(asked.cohort),
            write_table(rows),
        )

    @classmethod
    def read(cls, content: bytes) -> SharesRequest:
        """The request in these bytes."""
        reader = Reader(content, Kind.SHARES)
        (agreement, opening, round), model = reader.place(), reader.take(HASH)
        terms = valid("terms", SecAggTerms, *(reader.number() for _ in range(5)))
        cohort = reader.clients()
        rows = reader.table(RECORD)
        reader.end()
        context = valid("terms", RoundContext, agreement, opening, round, model, cohort, terms)
        return cls(context, {client: KeyRecord.parse(row) for client, row in rows.items()})


@dataclass(frozen=True)
class SharesReply:
    """A check value of the self-mask seed, and one box for every other client, in order."""

    session: bytes
    check: bytes
    boxes: tuple[bytes, ...]

    def write(self) -> bytes:
        """The bytes that `read` reads."""
        return written(Kind.SHARES_REPLY, self.session, self.check, *self.boxes)

    @classmethod
    def read(cls, content: bytes, boxes: int) -> SharesReply:
        """The reply in these bytes, with this number of boxes."""
        reader = Reader(content, Kind.SHARES_REPLY)
        session, check = reader.take(SESSION), reader.take(KEY)
        found = cls(session, check, tuple(reader.take(BOX) for _ in range(boxes)))
        reader.end()
        return found


@dataclass(frozen=True)
class RevealReply:
    """One share for every client that sent boxes, in order, and next round's keys."""

    session: bytes
    shares: tuple[int, ...]
    record: KeyRecord

    def write(self) -> bytes:
        """The bytes that `read` reads."""
        shares = map(write_element, self.shares)
        return written(Kind.REVEAL_REPLY, self.session, *shares, self.record.plain())

    @classmethod
    def read(cls, content: bytes, shares: int) -> RevealReply:
        """The reply in these bytes, with this number of shares."""
        reader = Reader(content, Kind.REVEAL_REPLY)
        session = reader.take(SESSION)
        values = tuple(reader.element() for _ in range(shares))
        record = reader.take(RECORD)
        reader.end()
        return cls(session, values, KeyRecord.parse(record))


def keys_request(agreement: bytes, opening: bytes, round: int) -> bytes:
    """Ask for the keys of a round."""
    return written(Kind.KEYS, place(agreement, opening, round))


def read_keys_request(content: bytes) -> tuple[bytes, bytes, int]:
    """Agreement, opening and round."""
    reader = Reader(content, Kind.KEYS)
    found = reader.place()
    reader.end()
    return found


def read_record(content: bytes) -> KeyRecord:
    """The record in a reply to `keys_request`."""
    reader = Reader(content, Kind.KEYS_REPLY)
    record = reader.take(RECORD)
    reader.end()
    return KeyRecord.parse(record)


def read_table(content: bytes, kind: Kind, size: int) -> tuple[bytes, dict[int, bytes]]:
    """Session and rows of a request that has a table: boxes, or signatures."""
    reader = Reader(content, kind)
    found = reader.take(SESSION), reader.table(size)
    reader.end()
    return found


def read_survivors(content: bytes) -> tuple[bytes, tuple[int, ...]]:
    """Session and clients of a request to sign the survivors."""
    reader = Reader(content, Kind.CONSISTENCY)
    found = reader.take(SESSION), reader.clients()
    reader.end()
    return found


def read_masked(content: bytes) -> tuple[bytes, bytes]:
    """Session and packed residues of a masked message."""
    reader = Reader(content, Kind.MASKED_REPLY)
    return reader.take(SESSION), reader.rest()


def read_signature(content: bytes) -> tuple[bytes, bytes]:
    """Session and signature of a reply to the survivors."""
    reader = Reader(content, Kind.CONSISTENCY_REPLY)
    found = reader.take(SESSION), reader.take(SIGNATURE)
    reader.end()
    return found


def refusal(word: Word) -> bytes:
    """What a client sends instead of a reply: a word of the fixed list, as its number."""
    return written(Kind.REFUSAL, bytes([WORDS.index(word)]))


def read_refusal(content: bytes) -> Word:
    """The word of a refusal."""
    reader = Reader(content, Kind.REFUSAL)
    number = reader.number(1)
    reader.end()
    if number >= len(WORDS):
        raise Refusal("malformed", "A refusal has an unknown word. It was refused.")
    return WORDS[number]


def write_clients(clients: tuple[int, ...]) -> bytes:
    """The number of clients, and their indexes."""
    return _four(len(clients)) + b"".join(map(_four, clients))


def write_table(rows: Mapping[int, bytes]) -> bytes:
    """The number of rows, and index and bytes of each."""
    return _four(len(rows)) + b"".join(_four(client) + rows[client] for client in sorted(rows))


def write_element(value: int) -> bytes:
    """A number below Shamir's prime."""
    return value.to_bytes(ELEMENT, "big")


def element(content: bytes) -> int:
    """The number below Shamir's prime in these bytes; refused if it is not below."""
    if (value := int.from_bytes(content, "big")) >= PRIME:
        raise Refusal("malformed", "A share is not below the prime. It was refused.")
    return value


def ascending(clients: tuple[int, ...]) -> tuple[int, ...]:
    """The clients; refused if they do not ascend strictly."""
    if not is_ascending(clients):
        raise Refusal("malformed", "A list of clients does not ascend. It was refused.")
    return clients


def _four(number: int) -> bytes:
    return number.to_bytes(4, "big")


def valid(word: Word, make: Callable[..., T], *values: object) -> T:
    """make(*values); what it does not accept is refused with this word."""
    try:
        return make(*values)
    except UserError as problem:
        raise Refusal(word, str(problem)) from None
