"""Between a training and the ledger: which runs are recorded, and what they have been charged."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.loop import State
from fedveil.parts.cohort import Cohort, FixedSize, Poisson
from fedveil.privacy import accounting, events
from fedveil.privacy.anchor import Anchor
from fedveil.privacy.chain import Chain
from fedveil.privacy.ledger import (
    ENVIRONMENT,
    VIEWS,
    Account,
    Facts,
    Ledger,
    ledger_path,
    open_ledger,
)
from fedveil.privacy.norms import Adjacency
from fedveil.privacy.session import BudgetError, Session
from fedveil.privacy.statement import RECORDED, UNRECORDED, Rounds, rounded_up
from fedveil.privacy.together import Way, plan, ways
from fedveil.recipe import Recipe, foreign
from fedveil.streams import SecretKey, run_key

if TYPE_CHECKING:
    from fedveil.training import Training

Trace = Mapping[str, Any]  # what a run's directory remembers of the ledger


@dataclass(frozen=True, eq=False)
class Entered:
    """What was looked at when a run was enrolled, and must stay so; and the ledger's head then."""

    fixed: tuple[Any, ...]
    ledger: Path
    head: bytes

    @staticmethod
    def of(training: Training, path: Path | None, trace: Trace | None) -> Entered:
        """The training as it is now."""
        where = _where(path, trace)
        return Entered(_fixed(training), where, Anchor(where).raw())


def enrol(
    training: Training, path: Path | None = None, saved: bool = False, trace: Trace | None = None
) -> Session | None:
    """The training's session with the ledger; None for a run that is not recorded.

    A private run that is saved is recorded. On data with a budget every run is, or it is refused.
    """
    if saved and trace is None and training.state.round and isinstance(training.key, SecretKey):
        raise UserError(
            "This run's ledger.json is missing, which tells how much of its secret noise was drawn "
            "before; restore it, or train anew."
        )
    where = _where(path, trace)
    recorded = saved and training.recipe.private
    if not recorded and not Chain.exists(where):
        return None
    ledger = open_ledger(where)
    try:
        if trace is not None:
            ledger.recognise(trace)
        account = Account(training.fingerprint, training.recipe.unit)
        refuse_other_split(ledger, account, training.data)
        if not recorded and not ledger.budgets(account):
            ledger.close()
            return None
        run = secrets.token_hex(16) if trace is None else str(trace["run"])
        # Rounds without noise that nobody recorded are not entered: no budget could stand again.
        played = training.state.round if training.recipe.private else 0
        contents = functools.cache(training.data.contents)
        session = Session(ledger, facts_of(training, account), run, played, contents)
    except BaseException:
        ledger.close()
        raise
    try:
        _check_start(training, session)
    except BaseException:
        session.close()
        raise
    return session


@dataclass(frozen=True)
class Charge:
    """The recipe and the rounds that a statement has to speak of."""

    recipe: Recipe
    course: Rounds
    drawn: int  # rounds so far, those that were lost among them

    @property
    def rounds(self) -> int:
        """All that are planned, and those that are drawn again: fixed before the run ends."""
        return self.course.planned + self.course.redrawn


def charged(training: Training) -> Charge:
    """What a statement of this run has to account for.

    The planned rounds, however many were run: when a run ends may depend on what it has released.
    Rounds that were drawn and lost in a crash count as well, and come on top of a cap.
    """
    session, state, planned = training.session, training.state, training.rounds
    lost, drawn = (0, 0) if session is None else (session.redrawn, session.rounds)
    drawn = max(drawn, state.round)
    limited = bool(lost) and _limited(training, planned + lost, drawn, lost)
    course = Rounds(planned, state.round, lost, limited)
    return Charge(redrawn(training.recipe, lost), course, drawn)


def redrawn(recipe: Recipe, rounds: int) -> Recipe:
    """The recipe whose cap, if it has one, is not kept by so many rounds that were drawn anew."""
    cohort = recipe.cohort
    if not rounds or cohort.cap is None:
        return recipe
    if isinstance(cohort, Poisson | FixedSize) and not foreign(cohort):
        return replace(recipe, cohort=replace(cohort, cap=cohort.cap + rounds))
    return replace(recipe, cohort=Stranded(cohort))


@dataclass(frozen=True)
class Stranded:
    """A capped cohort of somebody else's, after a crash: nothing it promised over a run counts.

    Nobody knows how it keeps its cap, nor whether its amplification relies on that; so a unit may
    take part in every round, and sampling hides nothing.
    """

    stranger: Cohort
    cap = None

    @property
    def adjacency(self) -> Adjacency:
        """As before."""
        return self.stranger.adjacency

    @property
    def fixed(self) -> bool:
        """As before."""
        return self.stranger.fixed

    @property
    def honest(self) -> int | None:
        """As before."""
        return self.stranger.honest

    def expected(self, population: int) -> float:
        """As before."""
        return self.stranger.expected(population)

    def sure(self, population: int) -> int:
        """As before."""
        return self.stranger.sure(population)

    def draw(
        self, population: int, rng: np.random.Generator, taken: np.ndarray | None = None
    ) -> np.ndarray:
        """As before."""
        return self.stranger.draw(population, rng, taken)

    def amplify(self, event: events.Round, population: int) -> events.Round:
        """Nothing is gained."""
        return event

    def __repr__(self) -> str:
        return f"{self.stranger!r}, of which rounds were lost in a crash"


def recorded(training: Training) -> str | None:
    """Where the run is recorded, for its statement; None as long as the ledger was not asked."""
    session = training.session
    if session is None:
        return UNRECORDED if training.enrolled else None
    kept = [f"ε = {b.epsilon:g} at δ = {b.delta:g}, view {v}" for v, b in session.budgets.items()]
    if not kept:
        return f"{RECORDED}."
    return f"{RECORDED}; it counts against the budget {' and '.join(kept)}."


def reserve(training: Training) -> None:
    """Charge the next round to the run's own budget and to its data's, or refuse it."""
    _refuse_changed(training)
    if training.session is None:
        _refuse_on_new_budget(training)
        return
    _keep_own_budget(training, training.session)
    training.session.reserve(training.state.round)


def refuse_on_budget(data: Federated, what: str, ledger: Path | None = None) -> None:
    """Refuse work on data with a budget that would be recorded nowhere."""
    where = ledger_path(ledger)
    if not Chain.exists(where):
        return
    with contextlib.closing(open_ledger(where)) as books:
        kin = books.kin(data.contents)
    if kin is not None:
        raise UserError(
            f"A budget stands for these data ('{kin.data}'), and {what} would be counted nowhere; "
            f"do it with other data, or end the budget: `{kin.lifting}`."
        )


def check(training: Training, state: State) -> str:
    """The digest of what a round is about to publish; a round played again must come out equal."""
    if training.session is None:
        return ""
    released = digest(state)
    training.session.check(training.state.round, released)
    return released


def commit(training: Training, round: int, released: str) -> None:
    """Note that a round was published."""
    if training.session is not None:
        training.session.commit(round, released)


def digest(state: State) -> str:
    """A hash of what a round has released."""
    found = hashlib.blake2b(state.x.numpy().tobytes(), digest_size=16)
    if state.threshold is not None:
        found.update(state.threshold.numpy().tobytes())
    return found.hexdigest()


def _where(path: Path | None, trace: Trace | None) -> Path:
    if path is None and trace is not None and ENVIRONMENT not in os.environ:
        path = Path(trace["path"])
    where = ledger_path(path)
    if trace is not None and not Chain.exists(where):
        raise UserError(
            f"This run is recorded in the ledger that was at {trace['path']}, and {where} is not "
            "there; restore it, or name it with --ledger."
        )
    return where


def facts_of(training: Training, account: Account) -> Facts:
    """The run as it is entered in the ledger."""
    recipe, size = training.recipe, (training.task.dim, training.data.clients)
    if isinstance(training.key, SecretKey):
        stream = f"secret {secrets.token_hex(16)}"  # a name, of a key that nobody else has
    else:
        stream = f"seeded {run_key('ledger', training.identity)}"
    return Facts(
        account=account,
        data=training.data.name,
        population=training.data.clients,
        recipe=recipe.name,
        stream=stream,
        rounds=training.rounds,
        delta=training.delta,
        plans={view: plan(recipe, *size, view, training.data.origin) for view in VIEWS},
    )


def refuse_other_split(ledger: Ledger, account: Account, data: Federated) -> None:
    """Data with a budget, dealt out anew, are no data without a budget."""
    if ledger.budgets(account):
        return
    kin = ledger.kin(data.contents)
    if kin is not None:
        raise UserError(
            f"A budget stands for these examples ('{kin.data}'), but for another unit or another "
            "split over clients; train on the data as they were, set a budget for this way too "
            f"(`fedveil budget set` with its settings file), or end that one: `{kin.lifting}`."
        )


def _fixed(training: Training) -> tuple[Any, ...]:
    return training.recipe, training.data, training.key, training.task, training.rounds


def _refuse_changed(training: Training) -> None:
    """What is charged is what was enrolled."""
    entered = training.entered
    if entered is None or any(
        now is not then for now, then in zip(_fixed(training), entered.fixed, strict=True)
    ):
        raise UserError(
            "This training's recipe, data, model, rounds or key were exchanged after the ledger "
            "was asked, so it would be charged for another one; prepare a new training."
        )


def _refuse_on_new_budget(training: Training) -> None:
    """A run that is not recorded ends where a budget is set for its examples, in any split."""
    entered = training.entered
    assert entered is not None
    head = Anchor(entered.ledger).raw()
    if head == entered.head or not Chain.exists(entered.ledger):
        return
    account = Account(training.fingerprint, training.recipe.unit)
    with contextlib.closing(Ledger(entered.ledger)) as ledger:
        stands = bool(ledger.budgets(account)) or ledger.kin(training.data.contents) is not None
    if stands:
        raise BudgetError(
            f"A budget was set for '{training.data.name}' while this run went on without being "
            f"recorded, so round {training.state.round + 1} was not played; start a private run "
            "that is."
        )
    training.entered = replace(entered, head=head)


def _check_start(training: Training, session: Session) -> None:
    """Refuse what has no room at all, and a state that is not the one that was released."""
    if training.state.round:
        session.check(training.state.round - 1, digest(training.state))
    if not training.finished:
        session.require(training.state.round)


def _keep_own_budget(training: Training, session: Session) -> None:
    """Where rounds were lost and drawn again, a run's own ε does not last for all of its rounds.

    This is a filter: how many rounds it allows was fixed before the first one, by one proof, so
    it holds whatever the crashes depended on.
    """
    if training.budget is None or not session.redrawn:
        return
    drawn = max(session.rounds, training.state.round)
    needed = _own_epsilon(training, drawn + 1, session.redrawn)
    if needed > training.budget.epsilon:
        raise BudgetError(
            f"Round {training.state.round + 1} of {training.recipe.name} would bring the run to "
            f"epsilon = {rounded_up(needed, 4)}, over its own {training.budget.epsilon:g}, since "
            f"{session.redrawn} rounds were lost in a crash and drawn anew; it was not played."
        )


def _limited(training: Training, rounds: int, drawn: int, lost: int) -> bool:
    """Whether the run's own ε has been kept so far and ends it before so many rounds."""
    if training.budget is None:
        return False
    spent, all_of_it = (_own_epsilon(training, count, lost) for count in (drawn, rounds))
    return spent <= training.budget.epsilon < all_of_it


def _own_epsilon(training: Training, rounds: int, lost: int) -> float:
    """ε towards the run's own view, by the proof that was the best one for its plan.

    The better of two for the rounds that happened to be run would be no filter: a run could end by
    either, and each takes all of δ.
    """
    size = (training.task.dim, training.data.clients)
    if foreign(training.recipe.cohort):
        proofs = ways(redrawn(training.recipe, lost), *size, training.recipe.view)
    else:
        proofs = ways(training.recipe, *size, training.recipe.view)

    def epsilon(proof: Way, count: int) -> float:
        return accounting.epsilon(proof.spent(count), training.delta)

    best = min(proofs, key=lambda proof: epsilon(proof, training.rounds))
    return epsilon(best.redrawn(lost), rounds)
