"""The ledger: what has been released about each data set, and what may still be.

Entries are a chain (`chain`), and only a `session` of a run adds rounds to it. What is reserved is
spent, whether or not it was committed; what has been spent is counted from the entries (`together`)
and kept nowhere else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from fedveil.errors import UserError
from fedveil.privacy import together
from fedveil.privacy.anchor import Head
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.chain import Chain, Entry, damaged, now
from fedveil.privacy.hold import Hold
from fedveil.privacy.together import Charged, Plan
from fedveil.recipe import View

ENVIRONMENT = "FEDVEIL_LEDGER"
VIEWS: tuple[View, ...] = get_args(View)


@dataclass(frozen=True)
class Account:
    """Whose privacy is counted: the units of one data set."""

    fingerprint: str
    unit: str

    def __str__(self) -> str:
        return f"{self.fingerprint[:12]}/{self.unit}"


@dataclass(frozen=True)
class Facts:
    """A run as it is entered: whose data, which noise stream, and what it releases to each view."""

    account: Account
    data: str
    population: int
    recipe: str
    stream: str  # names the key that all noise of the run comes from, without giving it away
    rounds: int  # planned to be drawn from this stream
    delta: float
    plans: Mapping[View, Plan]

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        names = ("data", "population", "recipe", "stream", "rounds", "delta")
        views = {view: self.plans[view].plain() for view in VIEWS}
        account = {"fingerprint": self.account.fingerprint, "unit": self.account.unit}
        return {**account, **{name: getattr(self, name) for name in names}, "views": views}


@dataclass(eq=False)
class Stream:
    """All rounds drawn from one noise stream: the same round again is the same release again."""

    body: dict[str, Any]  # of the first run that drew from it
    rounds: set[int] = field(default_factory=set)
    digests: dict[int, set[str]] = field(default_factory=dict)

    @property
    def account(self) -> Account:
        """Whose data they were about."""
        return Account(self.body["fingerprint"], self.body["unit"])

    @property
    def noise(self) -> tuple[Account, str]:
        """Whose noise it is: equal for a run's rounds before and after they were accounted anew."""
        return self.account, str(self.body["stream"])

    @functools.cached_property
    def plans(self) -> dict[View, Plan]:
        """What each round released, towards each view."""
        return {view: Plan.from_plain(self.body["views"][view]) for view in VIEWS}

    def charged(self, view: View) -> Charged:
        """As the accounting has it."""
        return Charged(self.plans[view], int(self.body["rounds"]), len(self.rounds))


@dataclass(frozen=True)
class Granted:
    """A budget that stands, and what data it was set for."""

    budget: Budget
    data: str
    contents: str  # of the examples, however they are split
    sketch: tuple[str, ...] = ()  # by which changed versions of the data are recognised


@dataclass(frozen=True)
class Kin:
    """A budget for the same examples, in this unit and split or in another one."""

    data: str
    account: Account
    view: View

    @property
    def lifting(self) -> str:
        """The command that ends it."""
        return f"fedveil budget set {self.account} --view {self.view} --lift"


class Books:
    """What the entries say, one after another: who drew how much, and what is allowed."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.granted: dict[Account, dict[View, Granted]] = {}
        self.drawn: dict[str, set[tuple[str, int]]] = {}  # by each run: (stream, round)
        self._runs: dict[int, tuple[str, str]] = {}  # a run's entry: its stream and its name

    def accounts(self) -> list[Account]:
        """All of them, in the order they came up."""
        known = [*(stream.account for stream in self.streams.values()), *self.granted]
        return list(dict.fromkeys(known))

    def of(self, account: Account) -> list[Stream]:
        """The account's streams in the order they began."""
        mine = (stream for stream in self.streams.values() if stream.account == account)
        return [stream for stream in mine if stream.rounds]

    def budgets(self, account: Account) -> dict[View, Budget]:
        """Those that stand for these units."""
        return {view: g.budget for view, g in self.granted.get(account, {}).items()}

    def kin(self, contents: Callable[[], str]) -> Kin | None:
        """A budget that stands for the same examples, however they are split.

        What they contain is computed only where some budget stands.
        """
        if not any(self.granted.values()):
            return None
        wanted = contents()
        for account, views in self.granted.items():
            for view, granted in views.items():
                if granted.contents == wanted:
                    return Kin(granted.data, account, view)
        return None

    def charged(self, account: Account, view: View) -> list[Charged]:
        """The account's streams as the accounting has them."""
        return [stream.charged(view) for stream in self.of(account)]

    def spent(
        self, account: Account, view: View, delta: float, target: float | None = None
    ) -> float:
        """ε at δ of all that was reserved on these data, towards a view."""
        return together.epsilon(self.charged(account, view), delta, target)

    def released(self, noise: tuple[Account, str], round: int) -> set[str]:
        """The digests of what was published of a round under this noise, however accounted."""
        alike = (stream for stream in self.streams.values() if stream.noise == noise)
        return set().union(*(stream.digests.get(round, ()) for stream in alike))

    def stream_of(self, entry: int) -> Stream:
        """What a run's entry drew from."""
        return self.streams[self._runs[entry][0]]

    def entries_of(self, noise: tuple[Account, str]) -> list[int]:
        """The entries of the runs that drew this noise."""
        return [entry for entry in self._runs if self.stream_of(entry).noise == noise]

    def apply(self, entry: Entry) -> None:
        """The next entry."""
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
                digests = self.stream_of(body["run"]).digests
                digests.setdefault(body["round"], set()).add(body["digest"])
            case "budget":
                self._apply_budget(body)
            case "ledger" | "anchored" | "end":
                pass
            case unknown:
                raise UserError(
                    f"The ledger has an entry of kind '{unknown}', which this version of fedveil "
                    "does not know; use the version that wrote it."
                )

    def _apply_budget(self, body: dict[str, Any]) -> None:
        standing = self.granted.setdefault(Account(body["fingerprint"], body["unit"]), {})
        standing.pop(body["view"], None)
        if body["budget"] is not None:
            budget = Budget(*body["budget"])
            sketch = tuple(body.get("sketch", ()))
            standing[body["view"]] = Granted(budget, body["data"], body["contents"], sketch)


class Ledger(Books):
    """The books on disk, checked when they are opened; and the one way to enter more."""

    def __init__(self, path: Path, trusting: bool = False) -> None:
        super().__init__()
        self.chain = Chain(path, trusting)
        self.sync()

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.chain.path

    @property
    def head(self) -> Head:
        """How far it has come."""
        return self.chain.head

    def grant(
        self,
        account: Account,
        view: View,
        budget: Budget | None,
        data: str,
        contents: str,
        sketch: Sequence[str] = (),
    ) -> None:
        """Set a budget for all runs on these data from now on, or lift it."""
        body = {
            "fingerprint": account.fingerprint,
            "unit": account.unit,
            "data": data,
            "contents": contents,
            "sketch": list(sketch),
            "view": view,
            "budget": None if budget is None else [budget.epsilon, budget.delta],
            "at": now(),
        }
        with self.lock(account).held(0.0), self.writing():
            self.chain.add("budget", body)
        self.chain.settle()
        self.sync()

    def lock(self, account: Account) -> Hold:
        """Held by the one process that may work on data with a budget."""
        name = f"{self.path.name}.{account.fingerprint[:12]}-{account.unit}.lock"
        return Hold(self.path.with_name(name), f"The budget of {account} in {self.path}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Alone among all writers, with everything read that others have entered."""
        with self.chain.writing():
            self.sync()
            yield

    def sync(self) -> None:
        """Read what has been entered since."""
        for entry in self.chain.take_new():
            try:
                self.apply(entry)
            except (KeyError, TypeError, ValueError) as problem:
                raise damaged(self.path, f"entry {entry.position} makes no sense") from problem

    def recognise(self, trace: Mapping[str, Any]) -> None:
        """Refuse to be the ledger of a run that was recorded elsewhere, or later than here."""
        if trace["ledger"] != self.chain.id:
            raise UserError(
                f"This run is recorded in the ledger that was at {trace['path']}, and {self.path} "
                f"is another one; name the right one with --ledger or {ENVIRONMENT}."
            )
        if self.chain.hash_at(int(trace["position"])) != trace["hash"]:
            raise UserError(
                f"This run knows entry {trace['position']} of the ledger {self.path}, which is not "
                f"there as it was ({self.head.position} entries): an old copy was put in its "
                "place; restore the newest one."
            )

    def close(self) -> None:
        """Let go of the file."""
        self.chain.close()


def stream_key(body: Mapping[str, Any]) -> str:
    """What one noise stream on one account is known by: its name and what its rounds release."""
    names = ("fingerprint", "unit", "stream", "rounds", "views")
    text = json.dumps([body[name] for name in names], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def released_twice(streams: Iterable[Stream]) -> dict[tuple[Account, str], list[int]]:
    """The rounds that were published in two versions under the same noise, by that noise."""
    found: dict[tuple[Account, str], dict[int, set[str]]] = {}
    for stream in streams:
        for round, digests in stream.digests.items():
            found.setdefault(stream.noise, {}).setdefault(round, set()).update(digests)
    twice = {
        noise: sorted(round for round, digests in rounds.items() if len(digests) > 1)
        for noise, rounds in found.items()
    }
    return {noise: rounds for noise, rounds in twice.items() if rounds}


def ledger_path(given: Path | None = None) -> Path:
    """The ledger that is named, or the environment's, or the user's own."""
    named = given or os.environ.get(ENVIRONMENT)
    if named:
        return Path(os.path.expanduser(named))
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "fedveil" / "ledger.sqlite"
    try:
        return Path.home() / ".local" / "state" / "fedveil" / "ledger.sqlite"
    except RuntimeError as problem:
        raise UserError(
            f"There is no home directory to keep the ledger in; name a file with {ENVIRONMENT}."
        ) from problem


def open_ledger(path: Path) -> Ledger:
    """The ledger at a path, made if it is not there, in a directory for its owner alone."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(
            f"Could not make a place for the ledger {path}: {problem.strerror}; "
            f"name another with --ledger or {ENVIRONMENT}."
        ) from problem
    return Ledger(path)
