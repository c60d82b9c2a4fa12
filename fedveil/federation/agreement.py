"""Agreement: everything that the clients of a federation agree to, and its hash.

federation.toml has the calibrated recipe, the population, the rounds, δ, the model and the terms of
secure aggregation. roster.toml names the clients and their keys. One hash covers both. A client
pins it before it takes part, and every request of the server carries it.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.federated import Examples, Federated
from fedveil.data.origin import REAL, SIMULATED
from fedveil.data.population import population
from fedveil.errors import UserError, unknown
from fedveil.federation.secagg.terms import SecAggTerms
from fedveil.federation.silo import SERVER_NOT_TRUSTED, refuse_local_silos, silo_wire
from fedveil.recipe import Recipe
from fedveil.serialization.codec import identified, recipe_from_plain, to_plain
from fedveil.serialization.versions import refuse_newer
from fedveil.wire import Wire

AGREEMENT, ROSTER = "federation.toml", "roster.toml"
MOST_BYTES = 2**24  # of either file
KEY = 64  # hexadecimal digits of an Ed25519 public key
ENCODING = (
    "label", "columns", "drop", "ranges", "categories", "dates", "buckets", "size", "color",
    "classes",
)  # fmt: skip
_NOBODY = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Seat:
    """A client of the roster: its name and its public keys."""

    name: str
    identity: str  # Ed25519, hexadecimal
    node: str  # of its Flower SuperNode, as Flower writes it

    def __post_init__(self) -> None:
        if len(self.identity) != KEY or not _is_hex(self.identity):
            raise UserError(
                f"The identity of client '{self.name[:80]}' is not an Ed25519 public key of {KEY} "
                "hexadecimal digits. Copy it from the client's public.toml."
            )

    @property
    def public(self) -> bytes:
        """The Ed25519 public key."""
        return bytes.fromhex(self.identity)


@dataclass(frozen=True)
class Roster:
    """The clients of a federation. A client's index is its place in this list."""

    seats: tuple[Seat, ...] = ()

    def __post_init__(self) -> None:
        for what in ("name", "identity", "node"):
            values = [getattr(seat, what) for seat in self.seats if getattr(seat, what)]
            if len(set(values)) < len(values):
                twice = next(value for value in values if values.count(value) > 1)
                raise UserError(
                    f"Two clients of the roster have the same {what} '{twice[:80]}'. One person "
                    "with two seats would count twice. Remove one of them."
                )

    def __len__(self) -> int:
        return len(self.seats)

    @property
    def identities(self) -> dict[int, bytes]:
        """The Ed25519 public keys, by index."""
        return {index: seat.public for index, seat in enumerate(self.seats)}

    def index(self, identity: bytes) -> int | None:
        """The index of the client with this public key."""
        found = (index for index, public in self.identities.items() if public == identity)
        return next(found, None)

    def plain(self) -> dict[str, Any]:
        """roster.toml."""
        return {"client": [asdict(seat) for seat in self.seats]}

    @classmethod
    def read(cls, file: Path) -> Roster:
        """The roster in a file."""
        rows = read_toml(file).get("client", [])
        known = {one.name for one in fields(Seat)}
        if not isinstance(rows, list) or not all(
            isinstance(row, dict) and row.keys() == known and all(map(_is_text, row.values()))
            for row in rows
        ):
            raise UserError(f"{file}: every [[client]] needs name, identity and node, as texts.")
        return cls(tuple(Seat(**row) for row in rows))


@dataclass(frozen=True)
class Agreement:
    """What is computed, for whom, and who sees what. Frozen: another one has another hash."""

    name: str  # of the federation; with the roster it names the account of the ledger
    server: str  # Ed25519 public key that signs every request, hexadecimal
    recipe: Recipe  # with calibrated noise, as integers
    clients: int
    rounds: int
    delta: float
    model: str
    dim: int  # number of trained parameters
    inputs: tuple[int, ...]  # shape of one input
    classes: int
    loss: str = "cross_entropy"
    tokens: bool = False
    class_names: tuple[str, ...] = ()
    seed: int = 0  # of the first model
    epsilon: float | None = None  # the calibrated budget, in the recipe's view
    deadline: float = 60.0  # seconds for each request of a round
    threshold: int = 0  # of secure aggregation, 0 without
    corrupt: int = 0  # clients that may collude with the server
    simulated: bool = False  # whether the clients are simulated, for a trial
    records: int = 0  # of all silos together, a public number; 0 if clients are the units
    data: Mapping[str, Any] = field(default_factory=dict)  # how all clients encode a table
    roster: Roster = Roster()

    def __post_init__(self) -> None:
        _refuse_unfit(self)

    @property
    def secure_sum(self) -> bool:
        """Whether messages are masked, so that the server sees only their sum."""
        return self.recipe.view == "sum"

    @property
    def terms(self) -> SecAggTerms:
        """The terms of secure aggregation."""
        enough = self.recipe.cohort.min_honest(self.units) + self.corrupt
        return SecAggTerms(self.threshold, self.corrupt, enough, self.wire.bits, self.dim)

    @property
    def units(self) -> int:
        """How many units are protected: clients, or the records of all silos."""
        return self.records or self.clients

    @property
    def wire(self) -> Wire:
        """The form of integer messages."""
        if self.recipe.in_silos:
            return silo_wire(self.recipe, self.dim, self.records, self.clients)
        wire = self.recipe.wire(self.dim, self.clients)
        assert wire is not None  # private messages of a federation are on a grid
        return wire

    @property
    def cohort(self) -> int:
        """How many clients or silos a round of secure aggregation invites."""
        return self.clients if self.records else int(self.recipe.cohort.expected(self.clients))

    @property
    def account(self) -> str:
        """Who the clients are: their ledger account is the same under any recipe."""
        people = sorted(seat.identity for seat in self.roster.seats)
        return hashlib.sha256(json.dumps([self.name, people]).encode()).hexdigest()

    def population(self, test: Examples | None = None) -> Federated:
        """The clients as public facts."""
        return population(
            self.name, self.units, self.inputs, self.classes, self.account, self.loss,
            self.tokens, self.class_names, test, SIMULATED if self.simulated else REAL,
            "example" if self.records else "client",
        )  # fmt: skip

    @property
    def hash(self) -> str:
        """SHA-256 of the agreement, its roster, and the code of user-defined parts."""
        whole = {
            "agreement": self.plain(),
            "roster": self.roster.plain(),
            "recipe": identified(self.recipe),
        }
        try:
            text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as problem:
            raise UserError(
                f"The agreement has a value without a hash ({problem}). Ask for a new one."
            ) from None
        return hashlib.sha256(f"fedveil agreement\n{text}".encode()).hexdigest()

    def plain(self) -> dict[str, Any]:
        """federation.toml."""
        from fedveil import __version__

        named = {one.name: getattr(self, one.name) for one in fields(self)}
        del named["recipe"], named["roster"]
        listed = {"inputs": list(self.inputs), "class_names": list(self.class_names)}
        known = {key: value for key, value in {**named, **listed}.items() if value is not None}
        return {"fedveil": __version__, **known, "recipe": to_plain(self.recipe)}

    @classmethod
    def read(cls, directory: Path) -> Agreement:
        """The agreement and the roster in a directory."""
        file = directory / AGREEMENT
        plain = read_toml(file)
        refuse_newer(file, plain.pop("fedveil", None))
        known = {one.name for one in fields(cls)} - {"roster"}
        for name in plain:
            if name not in known:
                raise unknown(f"term in {file} named", name, known)
        try:
            for name in ("inputs", "class_names"):
                plain[name] = tuple(plain.get(name, ()))
            recipe = recipe_from_plain(plain.pop("recipe"))
            return cls(recipe=recipe, roster=Roster.read(directory / ROSTER), **plain)
        except (KeyError, TypeError) as problem:
            raise UserError(
                f"{file} is not a complete agreement ({problem}). Ask for a new one."
            ) from problem

    @property
    def complete(self) -> bool:
        """Whether every client is on the roster."""
        return len(self.roster) == self.clients


def read_toml(file: Path) -> dict[str, Any]:
    """A TOML file from somebody else."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise UserError(f"{file} has more than {MOST_BYTES} bytes. Ask for another file.")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"Could not read {file}: {problem.strerror}.") from problem
    except UserError:
        raise
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{file} is not valid TOML: {problem}.") from problem


def write_toml(file: Path, plain: Mapping[str, Any]) -> None:
    """Write a TOML file that replaces an older one when complete."""
    import tomli_w

    beside = file.with_name(f".{file.name}.new")
    beside.write_text(tomli_w.dumps(dict(plain)), encoding="utf-8")
    beside.replace(file)


def with_seats(roster: Roster, seats: Sequence[Seat], most: int) -> Roster:
    """The roster with more clients, at most `most`."""
    if len(roster) + len(seats) > most:
        raise UserError(
            f"The agreement is for {most} clients, but the roster would have "
            f"{len(roster) + len(seats)}. Make a new federation for more clients."
        )
    return Roster((*roster.seats, *seats))


def _refuse_unfit(agreement: Agreement) -> None:
    """Refuse terms that clients could not enforce, or that a federation cannot compute."""
    recipe = agreement.recipe
    _check_types(agreement)
    for name in agreement.data:
        if name not in ENCODING:
            raise UserError(
                f"The agreement's data has '{str(name)[:80]}', which an agreement cannot set: each "
                f"client names its own data. Use {', '.join(ENCODING)}."
            )
    refuse_local_silos(recipe)
    if recipe.unit == "example" or recipe.in_silos != bool(agreement.records):
        raise UserError(
            f"{recipe.name} protects examples. In a federation, they are records of silos: give "
            "their number, `fedveil federate new --records N`."
        )
    if recipe.in_silos and recipe.view == "models":
        raise UserError(SERVER_NOT_TRUSTED)
    if recipe.private and not recipe.noise.calibrated:
        raise UserError(f"{recipe.name}: the noise is not calibrated. Give epsilon.")
    _refuse_simulated_noise(recipe, agreement.dim)
    if recipe.memory.kept and len(recipe.memory.workers(_NOBODY, 2)):
        raise UserError(
            f"{recipe.name}: every client would have to work in every round, but a federation "
            "invites the cohort only. Use update='participants'."
        )
    if recipe.memory.corrects and not recipe.memory.shared:
        raise UserError(
            f"{recipe.name}: {type(recipe.memory).__name__} corrects the work of clients, but does "
            "not say which of the server's vectors they need. Give its field `shared`."
        )
    _refuse_unfit_correlation(recipe)
    if agreement.secure_sum and not recipe.cohort.fixed and not recipe.in_silos:
        raise UserError(
            f"{recipe.name}: in view 'sum' every round of a federation invites the same number of "
            "clients. Give clients (a fixed number per round) instead of rate."
        )
    if agreement.secure_sum:
        agreement.terms.check(agreement.cohort)


def _refuse_unfit_correlation(recipe: Recipe) -> None:
    """Refuse correlated noise but that of the server over cohorts that are apart by its draw."""
    if recipe.noise.correlated and recipe.view != "models":
        raise UserError(
            f"{recipe.name}: the server keeps the past of {type(recipe.noise).__name__}, and view "
            f"'{recipe.view}' does not trust it. Use view 'models', or independent noise."
        )
    if recipe.noise.correlated and recipe.cohort.cyclic:
        raise UserError(
            f"{recipe.name}: clients who take turns would have to charge turns that they did not "
            "see. Give clients (a fixed number per round) instead of rate."
        )


def _refuse_simulated_noise(recipe: Recipe, dim: int) -> None:
    """Refuse noise that no client adds: a simulation draws some noises of clients as one."""
    if not recipe.private:
        return
    if recipe.message(dim).grid is None or not recipe.noise.needs_grid:
        raise UserError(
            f"{recipe.name}: noise in a federation is secret integers. Use noise='secure'."
        )
    if recipe.noise.at == "client" and not recipe.noise.on_messages:
        raise UserError(
            f"{recipe.name}: clients cannot add noise {type(recipe.noise).__name__} to their own "
            "messages. Use integer noise, such as DiscreteGaussian."
        )


def _check_types(agreement: Agreement) -> None:
    kinds: dict[str, type | tuple[type, ...]] = {
        "name": str, "server": str, "clients": int, "rounds": int, "delta": float, "model": str,
        "dim": int, "classes": int, "loss": str, "tokens": bool, "seed": int, "simulated": bool,
        "deadline": (int, float), "threshold": int, "corrupt": int, "records": int,
        "data": Mapping,
    }  # fmt: skip
    for name, kind in kinds.items():
        value = getattr(agreement, name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"The agreement's {name} is {str(value)[:80]!r}. Ask for a new one.")
    whole = all(type(size) is int and size > 0 for size in agreement.inputs)
    if not whole or not all(isinstance(name, str) for name in agreement.class_names):
        raise UserError("The agreement's inputs or class_names have wrong types. Ask for others.")
    for name in ("clients", "rounds", "dim"):
        if getattr(agreement, name) < 1:
            raise UserError(f"The agreement's {name} is not positive. Ask for a new one.")
    if not 0 < agreement.delta < 1 or not 0 < agreement.deadline < 10**6:
        raise UserError("The agreement's delta or deadline is out of range. Ask for a new one.")
    if len(agreement.server) != KEY or not _is_hex(agreement.server):
        raise UserError("The agreement's server is not an Ed25519 public key.")


def _is_hex(text: str) -> bool:
    return text == text.lower() and all(digit in "0123456789abcdef" for digit in text)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) < 4096
