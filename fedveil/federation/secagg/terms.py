"""Terms and context of secure aggregation: what all parties of a round must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from itertools import pairwise

from fedveil.errors import UserError
from fedveil.wire import MOST as MOST_BITS
from fedveil.wire import Wire

VERSION = b"fedveil/secagg/1"  # starts every hash, signature and key label
MOST_CLIENTS = 1000  # of a cohort; the cost is designed for 300
MOST_DIM = 2**28
MOST_ROUND = 2**63 - 1
MOST_INDEX = 2**32 - 1
HASH = 32  # bytes
OPENING = range(16, 65)  # bytes


def least_threshold(clients: int, corrupt: int) -> int:
    """⌊(n + corrupt)/2⌋ + 1: the least t with 2t > n + corrupt, which tolerates most dropouts.

    >>> least_threshold(100, 10)
    56
    """
    return (clients + corrupt) // 2 + 1


@dataclass(frozen=True)
class SecAggTerms:
    """t, corrupt, enough, bits and d of a federation.  Fixed by the agreement, checked by clients.

    `threshold` shares restore a secret. At most `corrupt` clients of any cohort collude with the
    server. No sum of fewer than `enough` = honest + corrupt clients is revealed.
    """

    threshold: int
    corrupt: int
    enough: int
    bits: int
    dim: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not int:
                raise UserError(f"Secure aggregation: {field.name} must be a whole number.")
        _require(self.corrupt >= 0, f"corrupt = {self.corrupt} is negative. Give 0 or more.")
        _require(
            self.enough > self.corrupt,
            f"enough = {self.enough} does not exceed corrupt = {self.corrupt}. Give the number of "
            "honest clients that the noise relies on, plus corrupt.",
        )
        _require(
            1 <= self.bits <= MOST_BITS,
            f"{self.bits} bits per coordinate. Give 1 to {MOST_BITS}.",
        )
        _require(1 <= self.dim <= MOST_DIM, f"dim = {self.dim}. Give 1 to {MOST_DIM}.")

    @property
    def needed(self) -> int:
        """max(t, enough): the least number of clients in every list of a round."""
        return max(self.threshold, self.enough)

    @property
    def wire(self) -> Wire:
        """The format of a masked message."""
        return Wire(self.bits, modular=True)

    def check(self, clients: int) -> None:
        """2t > n + corrupt, t ≤ n and enough ≤ n, or it is refused for a cohort of n."""
        _require(
            2 <= clients <= MOST_CLIENTS,
            f"a cohort of {clients} clients. Give 2 to {MOST_CLIENTS}.",
        )
        least = least_threshold(clients, self.corrupt)
        _require(
            least <= self.threshold <= clients,
            f"threshold = {self.threshold} with {clients} clients of whom {self.corrupt} may be "
            f"corrupt. Give {least} to {clients}.",
        )
        _require(
            self.enough <= clients,
            f"enough = {self.enough} exceeds the {clients} clients of the cohort. Invite more.",
        )


@dataclass(frozen=True)
class RoundContext:
    """Agreement, opening, round, model, cohort and terms of one round; `digest` names them all.

    The digest is part of every signature, key and box after the keys. So clients that were shown
    different contexts cannot be used together.
    """

    agreement: bytes  # hash of what the clients have accepted
    opening: bytes  # of this server process
    round: int
    model: bytes  # hash of the model that the messages are computed on
    cohort: tuple[int, ...]
    terms: SecAggTerms

    def __post_init__(self) -> None:
        check_place(self.agreement, self.opening, self.round)
        _require(_is_hash(self.model), f"the model's hash must have {HASH} bytes.")
        _require(is_ascending(self.cohort), "the cohort must be client indexes in ascending order.")
        self.terms.check(len(self.cohort))

    def digest(self, roster: Mapping[int, bytes]) -> bytes:
        """SHA-256 of everything in the context, and of the identities of the cohort."""
        told = hashlib.sha256(VERSION + b"/context")
        told.update(place(self.agreement, self.opening, self.round) + self.model)
        told.update(b"".join(number.to_bytes(4, "big") for number in astuple(self.terms)))
        told.update(len(self.cohort).to_bytes(4, "big"))
        for client in self.cohort:
            told.update(client.to_bytes(4, "big") + roster[client])
        return told.digest()

    def point(self, client: int) -> int:
        """The point at which a client's Shamir shares are taken: 1, 2, … in the cohort's order."""
        return self.cohort.index(client) + 1


def place(agreement: bytes, opening: bytes, round: int) -> bytes:
    """Agreement, opening and round as unambiguous bytes."""
    return agreement + bytes([len(opening)]) + opening + round.to_bytes(8, "big")


def check_place(agreement: bytes, opening: bytes, round: int) -> None:
    """Refuse hashes, openings and rounds that have no canonical bytes."""
    _require(_is_hash(agreement), f"the agreement's hash must have {HASH} bytes.")
    _require(
        isinstance(opening, bytes) and len(opening) in OPENING,
        f"an opening must have {OPENING.start} to {OPENING.stop - 1} bytes.",
    )
    _require(type(round) is int and 0 <= round <= MOST_ROUND, "a round must be a number from 0.")


def check_roster(roster: Mapping[int, bytes]) -> None:
    """Refuse a roster in which an identity has the wrong length, or belongs to two clients."""
    _require(
        all(isinstance(key, bytes) and len(key) == HASH for key in roster.values()),
        f"an identity of the roster does not have {HASH} bytes. Register public Ed25519 keys.",
    )
    _require(
        len(set(roster.values())) == len(roster),
        "two clients of the roster have the same identity. Register one key per client.",
    )


def is_ascending(clients: tuple[int, ...]) -> bool:
    """Whether these are client indexes, each larger than the one before: no duplicates."""
    whole = all(type(client) is int and 0 <= client <= MOST_INDEX for client in clients)
    return whole and all(a < b for a, b in pairwise(clients))


def _is_hash(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == HASH


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise UserError(f"Secure aggregation: {problem}")
