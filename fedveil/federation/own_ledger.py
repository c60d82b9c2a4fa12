"""A client's own ledger: every answer is charged before it leaves, in all federations together.

Where the server sees who takes part, an answer is charged as the round that it is. Where taking
part is hidden and amplifies, all rounds of the run are charged at first contact, those of earlier
openings too: not being asked is part of what is accounted. Where noise is correlated over the
rounds, later rounds release more of an answer, so all rounds of the opening are charged at first
contact. A silo samples inside, so its records are in the rounds that it answers, and in no others.
Another opening of the server draws fresh noise and is charged again. One process at a time works
with a client's ledger.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from fedveil.errors import UserError
from fedveil.federation.agreement import Agreement
from fedveil.federation.home import ANSWERED, LEDGER, Accepted, Home
from fedveil.federation.requests import RefusedError
from fedveil.ledger.charging import redrawn as as_redrawn
from fedveil.ledger.ledger import Account, Facts, Ledger, open_ledger
from fedveil.ledger.session import BudgetError, Session
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.composition import plan
from fedveil.privacy.guarantee import VIEWS
from fedveil.recipe import View


class OwnLedger:
    """What one client has released, and the ε that it allows."""

    def __init__(self, home: Home, agreement: Agreement, accepted: Accepted) -> None:
        """The home is locked by the caller, before it reads what is accepted."""
        self._path, self._agreement = home.path / LEDGER, agreement
        person = hashlib.sha256(b"fedveil client\n" + home.identity.public).hexdigest()
        self._account = Account(person, agreement.recipe.unit)
        self._sessions: dict[str, Session] = {}
        self._answered = Answered(home.path / ANSWERED, agreement.hash)
        if agreement.recipe.private:
            self._grant(Budget(accepted.epsilon, accepted.delta))

    def _grant(self, budget: Budget) -> None:
        """Set the client's own ε as a budget on all that it releases."""
        ledger, view = open_ledger(self._path), self._agreement.recipe.view
        try:
            self._refuse_other_unit(ledger)
            if ledger.budgets(self._account).get(view) != budget:
                name, person = self._agreement.name, self._account.fingerprint
                ledger.grant(self._account, view, budget, name, person)
        finally:
            ledger.close()

    def _refuse_other_unit(self, ledger: Ledger) -> None:
        """Refuse to charge records and clients: each budget would leave out the other's releases.

        A record is part of what its client sends, and no ε of clients composes with one of records.
        """
        mine = self._account
        for other in ledger.accounts():
            if other.fingerprint == mine.fingerprint and other != mine and ledger.of(other):
                raise UserError(
                    f"This home has answered as a {other.unit}, and the agreement protects each "
                    f"{mine.unit}. Their ε do not add up in one budget. Do not take part."
                )

    def charge(self, opening: str, round: int, since: int = 0, redrawn: int = 0) -> None:
        """Charge an answer, durably, before it is computed; refused once, or beyond the budget.

        `since` is the first round of the opening, and `redrawn` the number of rounds that earlier
        openings have drawn and lost. Only hidden participation depends on them.
        """
        if self._answered.has(opening, round) or self._charged(opening, round):
            raise RefusedError(
                "answered", f"Round {round + 1} was answered before. Nothing is sent twice."
            )
        if self._agreement.recipe.private:
            self._reserve(opening, round, since, redrawn)
        self._answered.add(opening, round)

    @property
    def _hidden(self) -> bool:
        """Whether sampling of this client amplifies, so that it is charged without being asked."""
        recipe = self._agreement.recipe
        return recipe.private and recipe.hidden(recipe.view) and not recipe.in_silos

    @property
    def _in_advance(self) -> bool:
        """Whether a client is charged for more rounds than those that it answers."""
        return self._hidden or self._agreement.recipe.noise.correlated

    def _charged(self, opening: str, round: int) -> bool:
        """Whether the ledger has this answer: one that was charged and never left stays unsent."""
        if self._in_advance or not self._agreement.recipe.private:
            return False
        return self._session(opening).reserved(round)

    def _reserve(self, opening: str, round: int, since: int, redrawn: int) -> None:
        session = self._session(opening, redrawn, since)
        rounds = range(round, round + 1)
        if self._in_advance:
            missed = max(since + redrawn - session.rounds_of_other_keys, 0) if self._hidden else 0
            rounds = range(since, self._agreement.rounds + missed)
        try:
            if not session.affordable(rounds):
                session.require(rounds[-1])  # says what it would cost
                raise BudgetError(f"The budget does not cover {len(rounds)} more rounds.")
            for each in rounds:
                if not session.reserved(each):
                    session.reserve(each)
        except BudgetError as problem:
            raise RefusedError("budget", str(problem)) from None

    def sent(self, opening: str, round: int, body: bytes) -> None:
        """Note that a charged answer leaves, with its digest."""
        if self._agreement.recipe.private:
            self._session(opening).commit(round, hashlib.sha256(body).hexdigest()[:32])

    def _session(self, opening: str, redrawn: int = 0, since: int = 0) -> Session:
        """The session of one opening of the server; an earlier one is closed."""
        if opening not in self._sessions:
            self.close()
            self._sessions[opening] = Session(
                open_ledger(self._path), self._facts(opening, redrawn, since), self._agreement.hash
            )
        return self._sessions[opening]

    def _facts(self, opening: str, redrawn: int, since: int) -> Facts:
        agreed, lost = self._agreement, redrawn if self._hidden else 0
        recipe, size = as_redrawn(agreed.recipe, lost), (agreed.dim, agreed.units)
        return Facts(
            account=self._account,
            data=agreed.name,
            population=agreed.units,
            recipe=agreed.recipe.name,
            stream=f"secret {agreed.hash} {opening}",
            rounds=agreed.rounds + lost,
            delta=agreed.delta,
            plans={view: plan(recipe, *size, self._seen(view)).resumed(since) for view in VIEWS},
        )

    def _seen(self, view: View) -> View:
        """What a view's adversary saw of this federation: at least what its own channel shows.

        A message that was sent bare is not hidden by the secure sums of a later federation.
        """
        return max(view, self._agreement.recipe.view, key=VIEWS.index)

    def spent(self) -> float:
        """ε of everything that this client has answered, in the agreement's view."""
        ledger, view = open_ledger(self._path), self._agreement.recipe.view
        try:
            return ledger.spent(self._account, view, self._agreement.delta)
        finally:
            ledger.close()

    def close(self) -> None:
        """End the sessions of all openings."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()


class Answered:
    """The rounds that a client has answered, one line each, on disk before the answer leaves."""

    def __init__(self, file: Path, agreement: str) -> None:
        self._file, self._agreement = file, agreement
        lines = file.read_text().splitlines() if file.exists() else []
        self._known = {line for line in lines if line}

    def has(self, opening: str, round: int) -> bool:
        """Whether this round of this opening was answered."""
        return self._line(opening, round) in self._known

    def add(self, opening: str, round: int) -> None:
        """Note an answer."""
        line = self._line(opening, round)
        with self._file.open("a") as sink:
            sink.write(f"\n{line}\n")  # on a line of its own, whatever a full disk left before it
            sink.flush()
            os.fsync(sink.fileno())
        self._known.add(line)

    def _line(self, opening: str, round: int) -> str:
        return json.dumps([self._agreement, opening, round])
