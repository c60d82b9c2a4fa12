"""One process at work on one run, as the ledger sees it.

    reserve(round) → draw noise → publish → commit(round)

A round that would exceed a budget is refused when it is reserved, before any client is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedveil.errors import UserError
from fedveil.privacy import events, together
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.chain import now
from fedveil.privacy.hold import Hold
from fedveil.privacy.ledger import Facts, Ledger, Stream, stream_key
from fedveil.privacy.statement import rounded_up
from fedveil.recipe import View

RELEASED_BEFORE = (
    "these rounds were released before, with other last bits under the same noise: release only "
    "one of the two."
)
PATIENCE = 1.0  # seconds: a budget that is just being set is no run to wait for


class BudgetError(UserError):
    """The next round would spend more than a budget allows; it was not played."""

    result: Any = None  # of the rounds before it, where there were some


class Session:
    """One process at work on one run: it reserves, and commits what it has published.

    A stream's round that was reserved before, by this run or an equal one, is not charged again:
    the same stream gives the same bytes, which `check` sees to. `contents` tells which examples the
    run is about, so that it ends where a budget is set for them in another unit or split.
    """

    def __init__(
        self,
        ledger: Ledger,
        facts: Facts,
        run: str,
        played: int = 0,
        contents: Callable[[], str] | None = None,
    ) -> None:
        self.ledger, self.facts, self.run = ledger, facts, run
        self._contents = contents
        self._body = {**facts.plain(), "run": run}
        self._played = played  # when this process began
        self._key, self._empty = stream_key(self._body), Stream(self._body)
        self.closed = False
        self.differed = False  # whether a round came out other than it was released before
        self._entry: int | None = None
        self._hold: Hold | None = None
        self._room = math.inf  # rounds of this stream that the budgets allow
        self._counted: Any = None  # what that was computed from
        try:
            if ledger.budgets(facts.account):
                self._guard()
            self._enter_unknown(played)
        except BaseException:
            self.close()
            raise

    @property
    def rounds(self) -> int:
        """How many rounds this run has reserved, in all processes that worked on it."""
        return len(self.ledger.drawn.get(self.run, ()))

    @property
    def redrawn(self) -> int:
        """How many rounds were drawn under another key of this run and are not in its state."""
        if not self.facts.stream.startswith("secret"):
            return 0
        drawn = self.ledger.drawn.get(self.run, ())
        return max(sum(key != self._key for key, _ in drawn) - self._played, 0)

    @property
    def budgets(self) -> dict[View, Budget]:
        """Those that stand for the run's data."""
        return self.ledger.budgets(self.facts.account)

    @property
    def room(self) -> float:
        """How many more rounds the budgets allow; ∞ where there is none."""
        return self._room - len(self._stream.rounds)

    def affordable(self, rounds: range) -> bool:
        """Whether there is room for all of these; those that were reserved before need none."""
        return sum(round not in self._stream.rounds for round in rounds) <= self.room

    def reserve(self, round: int) -> None:
        """Charge a round before anything of it happens, or refuse it."""
        if self.closed:
            raise UserError("This run has ended and let go of the ledger; go on with --resume.")
        with self.ledger.writing():
            if self._hold is not None or self.ledger.budgets(self.facts.account):
                self._guard()  # a budget may have been set while the run was going on
            self._refuse_kin(round)
            self.require(round)
            entry = self._add(round)
        self._entry = entry
        self.ledger.sync()

    def require(self, round: int) -> None:
        """Refuse a round that the budgets have no room for; one reserved before needs none."""
        if round not in self._stream.rounds and self.room < 1:
            raise self._reached(round)

    def _refuse_kin(self, round: int) -> None:
        """Refuse a round that no budget counts, where one was set for the same examples."""
        if self._contents is None or self.ledger.budgets(self.facts.account):
            return
        kin = self.ledger.kin(self._contents)
        if kin is not None:
            raise BudgetError(
                f"A budget was set for these examples ('{kin.data}') in another unit or split over "
                f"clients, so round {round + 1} of {self.facts.recipe} was not run; train on the "
                f"data as they are there, or end that budget: `{kin.lifting}`."
            )

    def check(self, round: int, digest: str) -> None:
        """Refuse to publish a round that was published before with other bytes.

        Two releases with the same noise would reveal their difference. Without a budget it is only
        noted (`commit`), for a simulation may well compare two engines.
        """
        before = self.ledger.released(self._empty.noise, round)
        if before and digest not in before and self.ledger.budgets(self.facts.account):
            raise UserError(
                f"Round {round + 1} of {self.facts.recipe} was released before with other bytes, "
                "by another engine, version, machine or number of processes, and the same noise "
                "twice would reveal the difference; go on as it was run before, or train with "
                "another seed."
            )

    def commit(self, round: int, digest: str) -> None:
        """Note that a round was published, and the digest of what was."""
        if digest in self._stream.digests.get(round, ()):
            return
        before = self.ledger.released(self._empty.noise, round)
        self.differed |= bool(before) and digest not in before
        with self.ledger.writing():
            self.ledger.chain.add("commit", {"run": self._entry, "round": round, "digest": digest})
        self.ledger.sync()

    def end(self, view: View, rounds: int, epsilon: float, limited: bool = False) -> None:
        """Note what the run's own statement said, for `verify` to find again.

        For the planned rounds, however many were run; `limited` to the run's own ε. What was read
        from the data without noise leaves no ε to note.
        """
        if self._entry is None:
            return
        ways = self.facts.plans[view].ways
        exposed = any(isinstance(way.event, events.NonPrivate) for way in ways)
        found = None if exposed or not math.isfinite(epsilon) else epsilon
        body = {"run": self._entry, "view": view, "rounds": rounds, "redrawn": self.redrawn}
        stated = {"of": "the plan", "limited": limited, "epsilon": found, "at": now()}
        with self.ledger.writing():
            self.ledger.chain.add("end", {**body, **stated})
        self.ledger.sync()

    def trace(self) -> dict[str, Any]:
        """What the run's directory remembers of the ledger."""
        self.ledger.chain.settle()
        head = self.ledger.head
        where = {"ledger": head.ledger, "path": str(self.ledger.path.resolve())}
        return {**where, "run": self.run, "position": head.position, "hash": head.hash}

    def close(self) -> None:
        """Let others work on these data."""
        self.closed = True
        if self._hold is not None:
            self._hold.release()
        self.ledger.close()

    @property
    def _stream(self) -> Stream:
        return self.ledger.streams.get(self._key) or self._empty

    def _guard(self) -> None:
        """Be the only one at work on these data, and see how many rounds are left.

        Counted anew only if others have drawn since, for which they must have removed the lock.
        """
        if self._hold is None:
            hold = self.ledger.lock(self.facts.account)
            hold.take(PATIENCE)
            self._hold = hold
            self.ledger.sync()
        budgets = self.ledger.budgets(self.facts.account)
        others = (s for s in self.ledger.of(self.facts.account) if s is not self._stream)
        found = (budgets, sum(len(stream.rounds) for stream in others))
        if found != self._counted:
            self._counted = found
            self._room = min(
                (self._allowed(view, budget) for view, budget in budgets.items()), default=math.inf
            )

    def _allowed(self, view: View, budget: Budget) -> int:
        """The largest number of this stream's rounds that keeps a budget, by bisection."""
        low, high = len(self._stream.rounds), self.facts.rounds + 1
        if self._spent(view, budget, self.facts.rounds) <= budget.epsilon:
            return self.facts.rounds
        while high - low > 1:
            middle = (low + high) // 2
            kept = self._spent(view, budget, middle) <= budget.epsilon
            low, high = (middle, high) if kept else (low, middle)
        return low

    def _spent(self, view: View, budget: Budget, rounds: int) -> float:
        """ε of the account if this stream had so many rounds."""
        mine, streams = self._stream, self.ledger.of(self.facts.account)
        runs = [stream.charged(view) for stream in streams if stream is not mine]
        place = streams.index(mine) if mine in streams else len(runs)
        runs.insert(place, replace(mine.charged(view), rounds=rounds))
        return together.epsilon(runs, budget.delta, budget.epsilon)

    def _reached(self, round: int) -> BudgetError:
        """The sentence for a round that no budget has room for."""
        more = len(self._stream.rounds) + 1
        budgets = self.ledger.budgets(self.facts.account)
        view, budget, needed = max(
            ((v, b, self._spent(v, b, more)) for v, b in budgets.items()),
            key=lambda found: found[2] / found[1].epsilon,
        )
        return BudgetError(
            f"Round {round + 1} of {self.facts.recipe} would bring what is spent on "
            f"'{self.facts.data}' to {_amount(needed)}, over its budget of epsilon = "
            f"{budget.epsilon:g} at delta = {budget.delta:g} in view '{view}'{self._why(view)}; "
            "it was not played: see `fedveil budget show`."
        )

    def _why(self, view: View) -> str:
        """Where no number tells it: why there is no finite ε."""
        mine = self._stream.charged(view)
        reason = together.reason([*self.ledger.charged(self.facts.account, view), mine])
        return f", since {reason}" if reason else ""

    def _enter_unknown(self, played: int) -> None:
        """Charge rounds that the run has played and the ledger does not know of."""
        rounds = range(played)
        if self.facts.stream.startswith("secret"):
            rounds = range(self.rounds, played)
        unknown = [round for round in rounds if round not in self._stream.rounds]
        if unknown:
            with self.ledger.writing():
                entry = self._add(*unknown)
            self._entry = entry
            self.ledger.sync()

    def _add(self, *rounds: int) -> int:
        """Reserve rounds, inside `writing`; the entry of this run, made with the first of them."""
        from fedveil import __version__

        chain, entry = self.ledger.chain, self._entry
        if entry is None:
            body = {**self._body, "at": now(), "fedveil": __version__}
            entry = chain.add("run", body).position
        for round in rounds:
            chain.add("reserve", {"run": entry, "round": round})
        return entry


def _amount(epsilon: float) -> str:
    return "no finite epsilon" if math.isinf(epsilon) else f"epsilon = {rounded_up(epsilon, 4)}"
