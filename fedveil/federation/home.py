"""Home: the directory of a client, with its keys, data settings, ledger and what it accepted.

client.toml   name and data            identity   Ed25519 private key, readable by its owner only
public.toml   what the server may know  node       private key of the Flower SuperNode
offers/HASH   agreements it was shown   accepted.toml, ledger.sqlite, answered, memory.safetensors
lock          held by the one process that answers
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import UserError
from fedveil.federation.agreement import (
    AGREEMENT,
    ROSTER,
    Agreement,
    Seat,
    read_toml,
    write_toml,
)
from fedveil.federation.secagg.primitives import Identity
from fedveil.ledger.lock import FileLock
from fedveil.privacy.calibrate import Budget

SETTINGS, PUBLIC, IDENTITY = "client.toml", "public.toml", "identity"
ACCEPTED, LEDGER, ANSWERED, MEMORY = (
    "accepted.toml", "ledger.sqlite", "answered", "memory.safetensors"
)  # fmt: skip
LOCK = "lock"
SEED = 32  # bytes of an Ed25519 private key


@dataclass(frozen=True)
class Accepted:
    """The agreement that a client has accepted, and the ε that it allows in all."""

    hash: str
    epsilon: float
    delta: float


@dataclass(frozen=True)
class Home:
    """A client's own directory."""

    path: Path

    @classmethod
    def create(cls, path: Path, name: str, data: Mapping[str, Any], node: str = "") -> Home:
        """A new directory with a fresh identity; one in use is refused."""
        if (path / SETTINGS).exists():
            raise UserError(f"{path} already contains a client. Name another directory.")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = cls(path)
        write_secret(path / IDENTITY, secrets.token_bytes(SEED))
        write_toml(path / SETTINGS, {"name": name, "data": dict(data)})
        write_toml(path / PUBLIC, asdict(Seat(name, home.identity.public.hex(), node)))
        return home

    @classmethod
    def open(cls, path: Path) -> Home:
        """The home of a client."""
        if not (path / SETTINGS).is_file():
            raise UserError(
                f"{path} is not the home of a client. Make one with `fedveil client init --home "
                f"{path}`."
            )
        return cls(path)

    @property
    def identity(self) -> Identity:
        """The key that signs for this client."""
        file = self.path / IDENTITY
        try:
            if file.stat().st_mode & 0o077:
                raise UserError(f"Others can read {file}. Run `chmod 600 {file}`.")
            return Identity(file.read_bytes())
        except OSError as problem:
            raise UserError(f"Could not read {file}: {problem.strerror}.") from problem
        except ValueError as problem:
            raise (
                problem
                if isinstance(problem, UserError)
                else UserError(f"{file} is not a private key. Make a new home.")
            ) from problem

    @property
    def name(self) -> str:
        """The client's name."""
        return str(read_toml(self.path / SETTINGS).get("name", ""))

    @property
    def data(self) -> dict[str, Any]:
        """The client's own data settings."""
        return dict(read_toml(self.path / SETTINGS).get("data", {}))

    def offer(self, directory: Path) -> Agreement:
        """Keep a copy of an agreement that was shown, so that exactly this one can be accepted."""
        offered = Agreement.read(directory)
        self.seat(offered)
        kept = self.path / "offers" / offered.hash
        kept.mkdir(parents=True, exist_ok=True)
        for name in (AGREEMENT, ROSTER):
            (kept / name).write_bytes((directory / name).read_bytes())
        if Agreement.read(kept).hash != offered.hash:
            raise UserError(f"{directory} changed while it was read. Check it again.")
        return offered

    def offered(self, hash: str) -> Agreement:
        """The agreement with this hash, or its beginning, among those that were shown."""
        shown = sorted(path.name for path in (self.path / "offers").glob("*"))
        found = [name for name in shown if len(hash) >= 8 and name.startswith(hash.lower())]
        if len(found) != 1:
            raise UserError(
                f"No agreement with hash {hash[:80]} was checked. Run `fedveil client check` on "
                "its directory, and accept the hash that it prints."
            )
        agreement = Agreement.read(self.path / "offers" / found[0])
        if agreement.hash != found[0]:
            raise UserError(
                f"The agreement {found[0][:16]}… was changed since it was checked, or its "
                "user-defined parts were. Check it again."
            )
        return agreement

    def accept(self, hash: str, epsilon: float, delta: float | None = None) -> Agreement:
        """Pin an agreement that was checked, with the ε that this client allows in all."""
        agreement = self.offered(hash)
        if not agreement.complete:
            raise UserError(
                f"The roster has {len(agreement.roster)} of {agreement.clients} clients. Accept "
                "the agreement once it is complete."
            )
        if agreement.recipe.private:
            Budget(epsilon, agreement.delta if delta is None else delta)  # refuses impossible ones
        limit = Accepted(agreement.hash, epsilon, agreement.delta if delta is None else delta)
        with self.lock().held(0.0):  # a running client would not notice
            write_toml(self.path / ACCEPTED, asdict(limit))
        return agreement

    def lock(self) -> FileLock:
        """The lock of the one process that answers for this client."""
        return FileLock(self.path / LOCK, f"The client's home {self.path}")

    @property
    def accepted(self) -> Accepted:
        """What was accepted last."""
        file = self.path / ACCEPTED
        if not file.exists():
            raise UserError(
                "No agreement is accepted. Run `fedveil client accept HASH --epsilon …`."
            )
        plain = read_toml(file)
        try:
            return Accepted(str(plain["hash"]), float(plain["epsilon"]), float(plain["delta"]))
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{file} is damaged. Accept the agreement again.") from None

    def seat(self, agreement: Agreement) -> int:
        """This client's index in an agreement."""
        index = agreement.roster.index(self.identity.public)
        if index is None:
            raise UserError(
                f"This client is not on the roster of '{agreement.name}'. Send "
                f"{self.path / PUBLIC} to the coordinator."
            )
        return index


def write_secret(file: Path, content: bytes) -> None:
    """Write a new file that only its owner can read."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as sink:
        sink.write(content)
        sink.flush()
        os.fsync(sink.fileno())


def read_seat(file: Path) -> Seat:
    """The public keys of a client, from its public.toml."""
    plain = read_toml(file)
    if plain.keys() != {"name", "identity", "node"} or not all(
        isinstance(value, str) for value in plain.values()
    ):
        raise UserError(
            f"{file} is not the public.toml of a client: it needs name, identity, node."
        )
    return Seat(**plain)
