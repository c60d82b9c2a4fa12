"""The ledger: what has been released about each data set, and its budgets.

Entries form a hash chain (`chain`). Only a run's `session` appends rounds. A reserved round is
spent, whether or not it was committed. Spending is computed from the entries (`composition`) and
stored nowhere else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from fedveil.data.federated import same_contents
from fedveil.data.sketch import sketched
from fedveil.errors import UserError
from fedveil.ledger.anchor import Head
from fedveil.ledger.chain import Chain, Entry, damaged, now
from fedveil.ledger.lock import FileLock
from fedveil.privacy import composition
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.composition import Charged, ReleasePlan
from fedveil.recipe import View

if TYPE_CHECKING:
    from fedveil.data.federated import Federated

ENVIRONMENT = "FEDVEIL_LEDGER"
VIEWS: tuple[View, ...] = get_args(View)
ACCOUNTANT = 1  # its revision: raise it when an ε changes by more than a rounding error
PEOPLE = 256  # hashes of clients' names that are kept for an account


@dataclass(frozen=True)
class Account:
    """The account of some units, to which privacy loss is charged: of a data set, or a named one.

    All data that are charged to a named account are about the same people: one person is one unit
    of the account, whichever of the data sets have rows about that person. Records of silos are
    charged by silo: `silo` names one of them, and is empty for the whole account.
    """

    fingerprint: str
    unit: str
    name: str = field(default="", compare=False)
    silo: str = ""

    def __str__(self) -> str:
        whole = f"{self.name or self.fingerprint[:12]}/{self.unit}"
        return f"{whole}/{self.silo}" if self.silo else whole

    @property
    def whole(self) -> Account:
        """The account of all silos."""
        return replace(self, silo="")

    @classmethod
    def of(cls, data: Federated, name: str | None = None, unit: str | None = None) -> Account:
        """The named account, or that of the data: of a table's rows, in any order and encoding."""
        if name:
            hashed = hashlib.sha256(f"fedveil account {name}".encode()).hexdigest()
            return cls(hashed, unit or data.unit, name)
        return cls(data.source or data.fingerprint(), unit or data.unit)

    @classmethod
    def in_entry(cls, body: Mapping[str, Any]) -> Account:
        """The account of an entry."""
        return cls(body["fingerprint"], body["unit"], body.get("account", ""), body.get("silo", ""))

    def plain(self) -> dict[str, str]:
        """As plain values."""
        named = {"account": self.name} if self.name else {}
        silo = {"silo": self.silo} if self.silo else {}
        return {"fingerprint": self.fingerprint, "unit": self.unit, **named, **silo}


@dataclass(frozen=True)
class Silos:
    """The silos of a run, in their order, whose records are charged apart.

    Silos of two runs with the same `split` are the same if their ids are equal, and have no record
    in common otherwise.
    """

    split: str
    ids: tuple[str, ...]

    @classmethod
    def in_entry(cls, body: Mapping[str, Any]) -> Silos | None:
        """The silos of an entry; None if it does not tell them apart."""
        return cls(body["split"], tuple(body["silos"])) if "silos" in body else None

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {"split": self.split, "silos": list(self.ids)}


@dataclass(frozen=True)
class Facts:
    """A run as recorded: its data, its noise stream, and what it releases in each view."""

    account: Account
    data: str
    population: int
    recipe: str
    stream: str  # a name of the key of the run's noise, which does not reveal the key
    rounds: int  # planned to be drawn from this stream
    delta: float
    plans: Mapping[View, ReleasePlan]
    people: tuple[str, ...] = ()  # a sketch of the clients' names, as salted hashes
    silos: Silos | None = None  # None: every unit is charged for every run

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        names = ("data", "population", "recipe", "stream", "rounds", "delta")
        views = {view: self.plans[view].plain() for view in VIEWS}
        known = {name: getattr(self, name) for name in names}
        people = {"people": list(self.people)} if self.people else {}
        silos = {} if self.silos is None else self.silos.plain()
        return {**self.account.plain(), **known, "views": views, **people, **silos}


@dataclass(eq=False)
class Stream:
    """All rounds drawn from one noise stream; repeating a round is the same release.

    If it was published with other bytes, it is one more release. Whether its noise was the same is
    not known: a user-defined part may draw randomness of its own.
    """

    body: dict[str, Any]  # of the first run that drew from it
    rounds: set[int] = field(default_factory=set)
    digests: dict[int, set[str]] = field(default_factory=dict)

    @property
    def account(self) -> Account:
        """The account of their data."""
        return Account.in_entry(self.body)

    @property
    def releases(self) -> int:
        """The number of rounds, each as often as it was published with other bytes."""
        return len(self.rounds) + repeated(self.digests)

    @property
    def noise(self) -> str:
        """The name of the noise, which is equal if a run is accounted or charged differently."""
        return str(self.body["stream"])

    @functools.cached_property
    def plans(self) -> dict[View, ReleasePlan]:
        """What each round releases, per view."""
        return {view: ReleasePlan.from_plain(self.body["views"][view]) for view in VIEWS}

    @functools.cached_property
    def silos(self) -> Silos | None:
        """The silos that are charged apart; None if there are none."""
        return Silos.in_entry(self.body)

    def charged(self, view: View, rounds: int | None = None) -> Charged:
        """The stream's charge in a view, for composition; of other rounds than those so far.

        Versions of a round are charged as lost rounds are: on top of a cap, of a separation, and of
        what correlated noise covers.
        """
        drawn = len(self.rounds) if rounds is None else rounds
        plan, extra = self.plans[view], repeated(self.digests)
        charged = plan.redrawn(extra) if extra else plan
        return Charged(charged, int(self.body["rounds"]), drawn + extra)


@dataclass(frozen=True)
class Granted:
    """A budget in force, and the data it was set for."""

    budget: Budget
    data: str
    contents: str  # hashes of the rows and the examples, independent of their split
    sketch: tuple[str, ...] = ()  # detects changed versions of the data
    people: tuple[str, ...] = ()  # a sketch of the clients' names, as salted hashes


@dataclass(frozen=True)
class Limit:
    """A budget that a run must keep: of its account, or of one of its silos."""

    account: Account
    view: View
    budget: Budget


@dataclass(frozen=True)
class RelatedBudget:
    """A budget for the same examples, in any unit and split."""

    data: str
    account: Account
    view: View

    @property
    def lift_command(self) -> str:
        """The command that removes it."""
        return f"fedveil budget set {self.account} --view {self.view} --lift"


class Books:
    """The state that the entries add up to: rounds per noise stream, and budgets."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.granted: dict[Account, dict[View, Granted]] = {}
        self.drawn: dict[str, set[tuple[str, int]]] = {}  # (stream, round) of each run
        self.published: dict[str, dict[tuple[str, int], set[str]]] = {}  # by run, noise and round
        self._runs: dict[int, tuple[str, str]] = {}  # stream and name of a run, by its entry

    def accounts(self) -> list[Account]:
        """All accounts, in the order of their first entries."""
        known = [*(stream.account for stream in self.streams.values()), *self.granted]
        return list(dict.fromkeys(known))

    def of(self, account: Account) -> list[Stream]:
        """The account's streams, in the order of their first entries."""
        mine = (stream for stream in self.streams.values() if stream.account == account.whole)
        return [stream for stream in mine if stream.rounds]

    def budgets(self, account: Account) -> dict[View, Budget]:
        """The account's budgets, by view."""
        return {view: g.budget for view, g in self.granted.get(account, {}).items()}

    def limits(self, account: Account) -> list[Limit]:
        """The budgets of an account and of its silos."""
        return [
            Limit(of, view, granted.budget)
            for of, views in self.granted.items()
            if of.whole == account
            for view, granted in views.items()
        ]

    def related_budget(self, contents: Callable[[], str]) -> RelatedBudget | None:
        """A budget for the same examples, in any split.

        The hash of the contents is computed only if there is any budget.
        """
        if not any(self.granted.values()):
            return None
        wanted = contents()
        for account, views in self.granted.items():
            for view, granted in views.items():
                if same_contents(granted.contents, wanted):
                    return RelatedBudget(granted.data, account, view)
        return None

    def charged(self, account: Account, view: View) -> list[Charged]:
        """The charges of the account's streams in a view, each at its worst silo."""
        return [stream.charged(view) for stream in self.of(account)]

    def spent(
        self, account: Account, view: View, delta: float, target: float | None = None
    ) -> float:
        """ε at δ of all reserved rounds on these data, in a view: of the silo that lost most."""
        return spent_on(self.of(account), view, delta, target, account.silo)

    def released(self, noise: str, round: int) -> set[str]:
        """Digests of what was published for a round with this noise, whatever was charged."""
        alike = (stream for stream in self.streams.values() if stream.noise == noise)
        return set().union(*(stream.digests.get(round, ()) for stream in alike))

    def releases_of(self, run: str) -> int:
        """Rounds that a run has reserved, each as often as it was published with other bytes."""
        return len(self.drawn.get(run, ())) + repeated(self.published.get(run, {}))

    def stream_of(self, entry: int) -> Stream:
        """The noise stream of a run's entry."""
        return self.streams[self._runs[entry][0]]

    def newest_stream(self, run: str) -> Stream:
        """The noise stream from which a run has drawn last."""
        return self.streams[[key for key, name in self._runs.values() if name == run][-1]]

    def entries_of(self, noise: str) -> list[int]:
        """The entries of the runs with this noise."""
        return [entry for entry in self._runs if self.stream_of(entry).noise == noise]

    def apply(self, entry: Entry) -> None:
        """Apply the next entry."""
        body = entry.body
        match entry.kind:
            case "run":
                key = stream_key(body)
                self.streams.setdefault(key, Stream(body))
                self._runs[entry.position] = (key, body["run"])
            case "reserve":
                key, run = self._runs[body["run"]]
                self.streams[key].rounds.add(body["round"])
                self.drawn.setdefault(run, set()).add((key, body["round"]))
            case "commit":
                key, run = self._runs[body["run"]]
                stream, round = self.streams[key], body["round"]
                stream.digests.setdefault(round, set()).add(body["digest"])
                mine = self.published.setdefault(run, {})
                mine.setdefault((stream.body["stream"], round), set()).add(body["digest"])
            case "budget":
                self._apply_budget(body)
            case "ledger" | "anchored" | "end":
                pass
            case unknown:
                raise UserError(
                    f"The ledger has an entry of kind '{unknown}', which this version of fedveil "
                    "does not know. Use the version that wrote it."
                )

    def _apply_budget(self, body: dict[str, Any]) -> None:
        budgets = self.granted.setdefault(Account.in_entry(body), {})
        budgets.pop(body["view"], None)
        if body["budget"] is not None:
            budget = Budget(*body["budget"])
            sketch = tuple(body.get("sketch", ()))
            people = tuple(body.get("people", ()))
            budgets[body["view"]] = Granted(budget, body["data"], body["contents"], sketch, people)


class Ledger(Books):
    """The ledger on disk: checked when opened, and the only way to append entries."""

    def __init__(self, path: Path, trusting: bool = False) -> None:
        super().__init__()
        self.chain = Chain(path, trusting)
        self.sync()

    @property
    def path(self) -> Path:
        """The path of the database."""
        return self.chain.path

    @property
    def head(self) -> Head:
        """Position and hash of the newest entry."""
        return self.chain.head

    def grant(
        self,
        account: Account,
        view: View,
        budget: Budget | None,
        data: str,
        contents: str,
        sketch: Sequence[str] = (),
        people: Sequence[str] = (),
    ) -> None:
        """Set the budget of a data set for all runs from now on, or remove it (None)."""
        body = {
            **account.plain(),
            "data": data,
            "contents": contents,
            "sketch": list(sketch),
            "people": list(people),
            "view": view,
            "budget": None if budget is None else [budget.epsilon, budget.delta],
            "at": now(),
        }
        with self.lock(account).held(0.0), self.writing():
            self.chain.add("budget", body)
        self.chain.sync_head()
        self.sync()

    def people(self, data: Federated) -> tuple[str, ...]:
        """The smallest salted hashes of the clients' names; empty if the data do not name them.

        The salt is the ledger's own, so hashes of two ledgers cannot be compared.
        """
        if data.names is None:
            return ()
        salt = self.chain.id.encode()
        digests = b"".join(
            hashlib.blake2b(
                str(name).encode("utf-8", "surrogatepass"), key=salt, digest_size=8
            ).digest()
            for name in data.names
        )
        return sketched(np.frombuffer(digests, dtype=">u8").astype(np.uint64), PEOPLE)

    def silos(self, data: Federated, account: Account) -> Silos | None:
        """The silos of data on an account: by position, or by name where the account fixes names.

        The rows of a table fix the names, and so does whoever names the account. Names are hashed
        with the ledger's salt.
        """
        if not account.name and not data.source:  # the fingerprint fixes the order of the silos
            return Silos("", tuple(str(place + 1) for place in range(data.clients)))
        if data.names is None:
            return None
        ids = tuple(self.silo_id(str(name)) for name in data.names)
        by = data.keyed_by if account.name else ""
        return Silos(f"{self.chain.id[:8]} {by}", ids)  # hashes of two ledgers are not compared

    def silo_id(self, name: str) -> str:
        """The salted hash of a silo's name."""
        given = name.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(given, key=self.chain.id.encode(), digest_size=6).hexdigest()

    def lock(self, account: Account) -> FileLock:
        """The lock of the one process that may train on data with a budget."""
        name = f"{self.path.name}.{account.fingerprint[:12]}-{account.unit}.lock"
        return FileLock(self.path.with_name(name), f"The budget of {account} in {self.path}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write as the only writer, after reading the entries of others."""
        with self.chain.writing():
            self.sync()
            yield

    def sync(self) -> None:
        """Read new entries."""
        for entry in self.chain.take_new():
            try:
                self.apply(entry)
            except (KeyError, TypeError, ValueError) as problem:
                raise damaged(self.path, f"entry {entry.position} is invalid") from problem

    def check_trace(self, trace: Mapping[str, Any]) -> None:
        """Refuse a run that is recorded in another ledger, or in a newer copy of this one."""
        if trace["ledger"] != self.chain.id:
            raise UserError(
                f"This run is recorded in the ledger that was at {trace['path']}, but {self.path} "
                f"is another one. Name the right one with --ledger or {ENVIRONMENT}."
            )
        if self.chain.hash_at(int(trace["position"])) != trace["hash"]:
            raise UserError(
                f"The ledger {self.path} does not contain entry {trace['position']} as this run "
                f"knows it ({self.head.position} entries): an old copy has replaced the ledger. "
                "Restore the newest one."
            )

    def close(self) -> None:
        """Close the ledger."""
        self.chain.close()


def repeated(digests: Mapping[Any, set[str]]) -> int:
    """How many more versions of rounds were published than rounds."""
    return sum(len(found) - 1 for found in digests.values())


def stream_key(body: Mapping[str, Any]) -> str:
    """The key of a noise stream on an account: its name and what its rounds release."""
    names = ("fingerprint", "unit", "stream", "rounds", "views")
    text = json.dumps([_without_reasons(body[name]) for name in names], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_reasons(plain: Any) -> Any:
    """Plain values without the sentences on why an ε is infinite: their wording may change."""
    if isinstance(plain, list):
        return [_without_reasons(item) for item in plain]
    if isinstance(plain, dict):
        return {k: _without_reasons(value) for k, value in plain.items() if k != "reason"}
    return plain


def apart(streams: Iterable[Stream]) -> bool:
    """Whether all streams tell the same silos apart, so that each silo has its own charges."""
    splits = {(s.account, s.silos and s.silos.split) for s in streams}
    return len(splits) == 1 and all(split is not None for _, split in splits)


def spent_by_silo(
    streams: Sequence[Stream],
    view: View,
    delta: float,
    target: float | None = None,
    rounds: Mapping[Stream, int] | None = None,
) -> dict[str, float]:
    """ε at δ of each silo by the streams that it is in; empty if silos are not charged apart."""
    if not apart(streams):
        return {}
    of_silo: dict[str, list[Charged]] = {}
    for stream in streams:
        charge = stream.charged(view, (rounds or {}).get(stream))
        for place, silo in enumerate(stream.silos.ids if stream.silos else ()):
            own = replace(charge, plan=charge.plan.of_silo(place))
            of_silo.setdefault(silo, []).append(own)
    kinds = {silo: tuple(charges) for silo, charges in of_silo.items()}
    spent = {
        kind: composition.epsilon(kind, delta, target) for kind in dict.fromkeys(kinds.values())
    }
    return {silo: spent[kind] for silo, kind in kinds.items()}


def spent_on(
    streams: Sequence[Stream],
    view: View,
    delta: float,
    target: float | None = None,
    silo: str = "",
    rounds: Mapping[Stream, int] | None = None,
) -> float:
    """ε at δ of the composition of streams for the silo, or for the one that lost most.

    `rounds` replaces the number of rounds of a stream. Where runs tell different silos apart, a
    record may be in any silo of each, so each run counts at its worst silo.
    """
    if apart(streams):
        each = spent_by_silo(streams, view, delta, target, rounds)
        return each.get(silo, 0.0) if silo else max(each.values())
    charges = [stream.charged(view, (rounds or {}).get(stream)) for stream in streams]
    return composition.epsilon(charges, delta, target)


def released_twice(streams: Iterable[Stream]) -> dict[str, list[int]]:
    """Rounds that were published in two versions with the same noise, by noise."""
    found: dict[str, dict[int, set[str]]] = {}
    for stream in streams:
        for round, digests in stream.digests.items():
            found.setdefault(stream.noise, {}).setdefault(round, set()).update(digests)
    twice = {
        noise: sorted(round for round, digests in rounds.items() if len(digests) > 1)
        for noise, rounds in found.items()
    }
    return {noise: rounds for noise, rounds in twice.items() if rounds}


def ledger_path(given: Path | None = None) -> Path:
    """The given path, that of the environment variable, or the user's default."""
    named = given or os.environ.get(ENVIRONMENT)
    if named:
        return Path(os.path.expanduser(named))
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "fedveil" / "ledger.sqlite"
    try:
        return Path.home() / ".local" / "state" / "fedveil" / "ledger.sqlite"
    except RuntimeError as problem:
        raise UserError(
            f"There is no home directory for the ledger. Name a file with {ENVIRONMENT}."
        ) from problem


def open_ledger(path: Path) -> Ledger:
    """Open the ledger at a path; create it if missing, in a directory only its owner can read."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(
            f"Could not create a directory for the ledger {path}: {problem.strerror}. "
            f"Name another path with --ledger or {ENVIRONMENT}."
        ) from problem
    return Ledger(path)
