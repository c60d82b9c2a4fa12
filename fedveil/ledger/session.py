"""The session of one process that trains one run, as the ledger sees it.

    reserve(round) → draw noise → publish → commit(round)

A round that would exceed a budget is refused when it is reserved, before any client is contacted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from fedveil.accounting import events
from fedveil.accounting.rounding import rounded_up, short
from fedveil.errors import UserError
from fedveil.ledger.chain import now
from fedveil.ledger.ledger import (
    ACCOUNTANT,
    Facts,
    Ledger,
    Limit,
    Stream,
    apart,
    repeated,
    spent_on,
    stream_key,
)
from fedveil.ledger.lock import FileLock
from fedveil.privacy import composition
from fedveil.recipe import View

RELEASED_BEFORE = (
    "some rounds were released before with the same seed and other bytes. The ledger charges both. "
    "If a part draws randomness of its own, that is enough. Otherwise their noise is the same: "
    "release only one of the two."
)
REPEATED = (
    "This run repeats a recorded run with the same noise. It releases nothing new, so nothing was "
    "charged."
)
PATIENCE = 1.0  # seconds: long enough for a budget that is being set, not for a run


class BudgetError(UserError):
    """The next round would exceed a budget; it was not run."""

    result: Any = None  # of the rounds before it, if any


class Session:
    """One process that trains one run: it reserves rounds, and commits what it has published.

    A round of a stream that was reserved before, by this run or an equal one, is not charged again
    unless it is published with other bytes, which `check` refuses under a budget. `contents` gives
    the hash of the examples, so that the run ends if a budget is set for them in another unit or
    split.
    """

    def __init__(
        self,
        ledger: Ledger,
        facts: Facts,
        run: str,
        completed: int = 0,
        contents: Callable[[], str] | None = None,
    ) -> None:
        self.ledger, self.facts, self.run = ledger, facts, run
        self._contents = contents
        self._body = {**facts.plain(), "run": run}
        self._completed = completed  # rounds before this process started
        self._key, self._empty = stream_key(self._body), Stream(self._body)
        self.closed = False
        self.differed = False  # whether a round differs from an earlier release of it
        self._entry: int | None = None
        self._lock: FileLock | None = None
        self._room = math.inf  # rounds of this stream that the budgets allow
        self._counted: Any = None  # the inputs of that computation
        try:
            if self.limits:
                self._lock_data()
            self._record_missing(completed)
        except BaseException:
            self.close()
            raise

    @property
    def rounds(self) -> int:
        """Rounds that this run has released or reserved, in all its processes."""
        return self.ledger.releases_of(self.run)

    @property
    def redrawn(self) -> int:
        """Rounds that this run has released in addition to those of its state.

        With a secret key, those drawn with another key. With a seed, other versions of a round.
        """
        if not self.facts.stream.startswith("secret"):
            return repeated(self._published)
        return max(self.rounds_of_other_keys - self._completed, 0)

    @property
    def repeats_earlier(self) -> bool:
        """Whether earlier runs with the same noise released all of this run's rounds, as bytes."""
        drawn = self.ledger.drawn  # in the order of the first rounds
        earlier = itertools.takewhile(lambda run: run != self.run, drawn)
        before = set().union(*(drawn[run] for run in earlier))
        mine = drawn.get(self.run, set())
        return bool(mine) and mine <= before and not repeated(self._stream.digests)

    def lost(self, kind: Callable[[int], bool]) -> int:
        """How many rounds of a kind were drawn with another key, beyond those of the state."""
        if not self.facts.stream.startswith("secret"):
            return 0  # drawn again with the same noise
        others = (r for key, r in self.ledger.drawn.get(self.run, ()) if key != self._key)
        return max(sum(map(kind, others)) - sum(map(kind, range(self._completed))), 0)

    @property
    def limits(self) -> list[Limit]:
        """The budgets that the run must keep: of its account, and of its silos."""
        silos, limits = self.facts.silos, self.ledger.limits(self.facts.account)
        if silos is None or not any(limit.account.silo for limit in limits):
            return limits
        mine = {"", *silos.ids} if apart(self._streams) else {one.account.silo for one in limits}
        return [limit for limit in limits if limit.account.silo in mine]

    @property
    def room(self) -> float:
        """How many more rounds the budgets allow; ∞ without a budget."""
        return self._room - len(self._stream.rounds)

    @property
    def _published(self) -> dict[tuple[str, int], set[str]]:
        return self.ledger.published.get(self.run, {})

    @property
    def rounds_of_other_keys(self) -> int:
        """Rounds that this run has reserved under its other keys."""
        return sum(key != self._key for key, _ in self.ledger.drawn.get(self.run, ()))

    def reserved(self, round: int) -> bool:
        """Whether a round of this stream is charged."""
        return round in self._stream.rounds

    def drew(self, round: int) -> bool:
        """Whether this run has reserved a round with its present key."""
        return (self._key, round) in self.ledger.drawn.get(self.run, ())

    def affordable(self, rounds: range) -> bool:
        """Whether all these rounds fit; rounds reserved before need no room."""
        return sum(round not in self._stream.rounds for round in rounds) <= self.room

    def reserve(self, round: int) -> None:
        """Charge a round before it starts, or refuse it."""
        if self.closed:
            raise UserError("This run has ended and released the ledger. Resume it with --resume.")
        with self.ledger.writing():
            if self._lock is not None or self.limits:
                self._lock_data()  # a budget may have been set during the run
            self._refuse_related(round)
            self.require(round)
            entry = self._add(round)
        self._entry = entry
        self.ledger.sync()

    def require(self, round: int) -> None:
        """Refuse a round that exceeds a budget; a round reserved before needs no room."""
        if round not in self._stream.rounds and self.room < 1:
            raise self._exceeded(round)

    def _refuse_related(self, round: int) -> None:
        """Refuse an uncounted round if a budget was set for the same examples."""
        if self._contents is None or self.ledger.limits(self.facts.account):
            return
        related = self.ledger.related_budget(self._contents)
        if related is not None:
            raise BudgetError(
                f"Round {round + 1} of {self.facts.recipe} was not run: a budget was set for these "
                f"examples ('{related.data}') in another unit or split over clients. Train on that "
                f"unit and split, or remove that budget: `{related.lift_command}`."
            )

    def check(self, round: int, digest: str) -> None:
        """Refuse to publish a round on a budget if it was published before with other bytes.

        Two releases with the same noise reveal their difference. Without a budget it is only
        recorded (`commit`), since a simulation may compare two engines.
        """
        self.ledger.sync()
        if self.limits:
            self._refuse_version(round, digest)

    def repeats(self, round: int, digest: str) -> bool:
        """Whether this run has published the round before, with other bytes."""
        self.ledger.sync()
        before = self._published.get((self.facts.stream, round), ())
        return bool(before) and digest not in before

    def commit(self, round: int, digest: str, once: bool = False) -> None:
        """Record that a round is published, with the digest of its release.

        `once` is for a release that is charged once, however often it is made: it is committed
        before it is published, and refused if other bytes were.
        """
        with self.ledger.writing():
            if once:
                self._refuse_version(round, digest)
            entry = self._committed(round, digest)
        self._entry = entry
        self.ledger.sync()

    def _committed(self, round: int, digest: str) -> int | None:
        """Add the digest of a round inside `writing`, unless this run has it."""
        mine = self._published.get((self.facts.stream, round), ())
        if digest in mine and digest in self._stream.digests.get(round, ()):
            return self._entry
        self.differed |= self._differs(round, digest)
        entry = self._add()  # an earlier process may have reserved the round
        self.ledger.chain.add("commit", {"run": entry, "round": round, "digest": digest})
        return entry

    def _differs(self, round: int, digest: str) -> bool:
        """Whether a round was published before with the same noise, and only with other bytes."""
        before = self.ledger.released(self._empty.noise, round)
        return bool(before) and digest not in before

    def _refuse_version(self, round: int, digest: str) -> None:
        if self._differs(round, digest):
            raise UserError(
                f"Round {round + 1} of {self.facts.recipe} was released before with other bytes, "
                "by another engine, version, machine or number of processes, or because a part "
                "draws randomness of its own. Releasing it again with the same noise would reveal "
                "the difference. Repeat it exactly as before, or start a new run with another seed "
                "or with secret noise, which is charged as a new release."
            )

    def end(self, view: View, rounds: int, epsilon: float, limited: bool = False) -> None:
        """Record what the run's own statement says, so that `verify` can recompute it.

        It covers the planned rounds, however many were run; `limited` means by the run's own ε. No
        ε is recorded if something was read from the data without noise.
        """
        if self._entry is None:
            return
        ways = self.facts.plans[view].ways
        exposed = any(isinstance(way.event, events.NonPrivate) for way in ways)
        found = None if exposed or not math.isfinite(epsilon) else epsilon
        body = {"run": self._entry, "view": view, "rounds": rounds, "redrawn": self.redrawn}
        stated = {"of": "the plan", "limited": limited, "epsilon": found, "accountant": ACCOUNTANT}
        with self.ledger.writing():
            self.ledger.chain.add("end", {**body, **stated, "at": now()})
        self.ledger.sync()

    def trace(self) -> dict[str, Any]:
        """What the run's directory stores about the ledger."""
        self.ledger.chain.sync_head()
        head = self.ledger.head
        where = {"ledger": head.ledger, "path": str(self.ledger.path.resolve())}
        return {**where, "run": self.run, "position": head.position, "hash": head.hash}

    def close(self) -> None:
        """Release the ledger, so that others may train on these data."""
        self.closed = True
        if self._lock is not None:
            self._lock.release()
        self.ledger.close()

    @property
    def _stream(self) -> Stream:
        return self.ledger.streams.get(self._key) or self._empty

    def _lock_data(self) -> None:
        """Lock these data, and compute how many rounds the budgets allow.

        Recomputed only if a budget changed, others have drawn rounds, or rounds have more versions.
        """
        if self._lock is None:
            lock = self.ledger.lock(self.facts.account)
            lock.take(PATIENCE)
            self._lock = lock
            self.ledger.sync()
        limits = self.limits
        released = sum(stream.releases for stream in self._streams)
        found = (limits, released - len(self._stream.rounds))
        if found != self._counted:
            self._counted = found
            self._room = min(map(self._allowed, limits), default=math.inf)

    def _allowed(self, limit: Limit) -> int:
        """The largest number of this stream's rounds within a budget, by bisection."""
        low, high = len(self._stream.rounds), self.facts.rounds + 1
        if self._spent(limit, self.facts.rounds) <= limit.budget.epsilon:
            return self.facts.rounds
        while high - low > 1:
            middle = (low + high) // 2
            kept = self._spent(limit, middle) <= limit.budget.epsilon
            low, high = (middle, high) if kept else (low, middle)
        return low

    @property
    def _streams(self) -> list[Stream]:
        """The account's streams and this one, in the order of their first entries."""
        streams = self.ledger.of(self.facts.account)
        return streams if self._stream in streams else [*streams, self._stream]

    def _spent(self, limit: Limit, rounds: int) -> float:
        """ε of the account, or of the silo, if this stream had this many rounds."""
        (epsilon, delta), silo = astuple(limit.budget), limit.account.silo
        mine = {self._stream: rounds}
        return spent_on(self._streams, limit.view, delta, epsilon, silo, mine)

    def _exceeded(self, round: int) -> BudgetError:
        """The error for a round that exceeds a budget."""
        more = len(self._stream.rounds) + 1
        needed, limit = max(
            ((self._spent(limit, more), limit) for limit in self.limits),
            key=lambda found: found[0] / found[1].budget.epsilon,
        )
        view, budget, silo = limit.view, limit.budget, limit.account.silo
        where = f"'{self.facts.data}', silo {silo}," if silo else f"'{self.facts.data}'"
        if self._spent(limit, more - 1) > budget.epsilon:
            spent = f"the budget of {where} is already exceeded"
        elif math.isinf(needed):
            spent = f"the spending on {where} would have no finite ε{self._why(view)}"
        else:
            spent = f"it would bring the spending on {where} to ε = {rounded_up(needed, 4)}"
        return BudgetError(
            f"Round {round + 1} of {self.facts.recipe} was not run: {spent}. "
            f"The budget is ε = {short(budget.epsilon)} at δ = {short(budget.delta)} in "
            f"view '{view}'. See `fedveil budget show`."
        )

    def _why(self, view: View) -> str:
        """The reason why there is no finite ε: of some run, or δ."""
        mine = self._stream.charged(view)
        runs = [*self.ledger.charged(self.facts.account, view), mine]
        reason = composition.reason(runs, budgeted=True)
        return f", since {reason}" if reason else " at this δ (a larger one may suffice)"

    def _record_missing(self, completed: int) -> None:
        """Charge completed rounds of the run that the ledger does not record."""
        rounds = range(completed)
        if self.facts.stream.startswith("secret"):
            rounds = range(self.rounds, completed)
        missing = [round for round in rounds if round not in self._stream.rounds]
        if missing:
            with self.ledger.writing():
                entry = self._add(*missing)
            self._entry = entry
            self.ledger.sync()

    def _add(self, *rounds: int) -> int:
        """Reserve rounds inside `writing`; returns the run's entry, created with the first."""
        from fedveil import __version__

        chain, entry = self.ledger.chain, self._entry
        if entry is None:
            body = {**self._body, "at": now(), "fedveil": __version__}
            entry = chain.add("run", body).position
        for round in rounds:
            chain.add("reserve", {"run": entry, "round": round})
        return entry
