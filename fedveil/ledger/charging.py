"""Charge training runs to the ledger: which runs are recorded, and what they are charged."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.rounding import rounded_up, short
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.ledger.anchor import Anchor
from fedveil.ledger.chain import Chain
from fedveil.ledger.entering import entered, refuse_shared_clients
from fedveil.ledger.ledger import (
    VIEWS,
    Account,
    Facts,
    Ledger,
    ledger_path,
    open_ledger,
)
from fedveil.ledger.session import BudgetError, Session
from fedveil.ledger.tracing import Trace, traced_path
from fedveil.loop import State
from fedveil.privacy.answers import Answers, answers, require_unchanged
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.composition import Way, plan, ways
from fedveil.privacy.guarantee import Rounds, in_rounds, units
from fedveil.privacy.statement import RECORDED, UNRECORDED
from fedveil.random.streams import Key, SecretKey, run_key
from fedveil.recipe import Recipe


@dataclass(frozen=True, eq=False, kw_only=True)
class Terms:
    """What a run is charged for: fixed before its first round."""

    recipe: Recipe  # with calibrated noise
    data: Federated
    fingerprint: str  # of the data
    dim: int  # of the model
    rounds: int
    delta: float
    budget: Budget | None  # the run's own
    identity: str  # of everything that must stay the same when the run is resumed
    account_name: str | None = None  # None: the account of the data
    key: Key  # of the run's random streams
    answers: Answers = field(init=False, repr=False)  # of its parts, which must not change

    def __post_init__(self) -> None:
        object.__setattr__(self, "answers", answers(self.recipe, *self.size))

    def require_unchanged(self) -> None:
        """Refuse a recipe whose parts answer differently than when the run was prepared."""
        require_unchanged(self.recipe, *self.size, self.answers)

    @property
    def size(self) -> tuple[int, int]:
        """Dimension and population, the inputs of an event."""
        return self.dim, self.data.clients

    @property
    def account(self) -> Account:
        """The account that the run is charged to."""
        if self.account_name or self.data.source:
            return Account.of(self.data, self.account_name, self.recipe.unit)
        return Account(self.fingerprint, self.recipe.unit)  # hashed once

    @property
    def secret(self) -> bool:
        """Whether the key is secret, so that nobody can draw the run's noise again."""
        return isinstance(self.key, SecretKey)


@dataclass(eq=False)
class Enrolment:
    """The enrolment of a run in the ledger: its terms, and a session if the run is recorded.

    `head` is the ledger's newest entry when it was last read without a budget for these data.
    """

    terms: Terms
    ledger: Path
    head: bytes
    session: Session | None


def enrol(
    terms: Terms,
    state: State,
    path: Path | None = None,
    saved: bool = False,
    trace: Trace | None = None,
) -> Enrolment:
    """Enrol a run in the ledger, if it must be recorded and may continue from a state.

    A private run that is saved is recorded. On data with a budget, every run is recorded, or it is
    refused.
    """
    terms.require_unchanged()
    if saved and trace is None and state.round and terms.secret:
        raise UserError(
            "This run's ledger.json is missing, which records how much of its secret noise was "
            "drawn. Restore it, or start a new run."
        )
    where = ledger_path(path) if trace is None else traced_path(trace, path)
    head = Anchor(where).raw()  # read before the ledger, so that later entries are noticed
    return Enrolment(terms, where, head, _session(terms, state, where, saved, trace))


def _session(
    terms: Terms, state: State, where: Path, saved: bool, trace: Trace | None
) -> Session | None:
    """The run's session with the ledger; None if the run is not recorded."""
    recorded = saved and terms.recipe.private
    if not recorded and not Chain.exists(where):
        return None
    with entered(where, terms.account, terms.data, trace) as ledger:
        if not recorded and not ledger.limits(terms.account):
            ledger.close()
            return None
        run = secrets.token_hex(16) if trace is None else str(trace["run"])
        # Unrecorded rounds without noise are not entered: they would exceed every later budget.
        completed = state.round if terms.recipe.private else 0
        contents = functools.cache(terms.data.contents)
        facts = named(facts_of(terms, state.round), terms, ledger)
        session = Session(ledger, facts, run, completed, contents)
    try:
        _check_start(terms, state, session)
    except BaseException:
        session.close()
        raise
    return session


@dataclass(frozen=True)
class Charge:
    """The recipe and the rounds that a statement accounts for."""

    recipe: Recipe
    course: Rounds
    drawn: int  # rounds so far, including lost ones

    @property
    def rounds(self) -> int:
        """Planned and redrawn rounds: fixed before the run ends."""
        return self.course.planned + self.course.redrawn


def charged(terms: Terms, session: Session | None, completed: int) -> Charge:
    """What the statement of a run accounts for after this many completed rounds.

    All planned rounds count, since when a run ends may depend on what it has released. Rounds that
    were drawn and lost in a crash count as well, and are added to a cap. So do rounds of a seeded
    run that were published in another version.
    """
    terms.require_unchanged()
    lost, drawn = (0, 0) if session is None else (session.redrawn, session.rounds)
    drawn = max(drawn, completed)
    limited = bool(lost) and _limited(terms, terms.rounds + lost, drawn, lost)
    course = Rounds(terms.rounds, completed, lost, limited)
    return Charge(redrawn(terms.recipe, lost), course, drawn)


def redrawn(recipe: Recipe, rounds: int) -> Recipe:
    """The recipe after this many redrawn rounds, which its cap, if any, does not limit."""
    return replace(recipe, lost=rounds) if rounds else recipe


def recorded(enrolment: Enrolment | None) -> str | None:
    """Where the run is recorded, for its statement; None before its enrolment."""
    if enrolment is None:
        return None
    session = enrolment.session
    if session is None:
        return UNRECORDED
    kept = [
        f"ε = {short(limit.budget.epsilon)}, δ = {short(limit.budget.delta)} (view {limit.view}"
        f"{f', silo {limit.account.silo}' * bool(limit.account.silo)})"
        for limit in session.limits
    ]
    if not kept:
        return RECORDED
    return f"{RECORDED} It counts against the budget {' and '.join(kept)}."


def reserve(enrolment: Enrolment, terms: Terms, round: int) -> None:
    """Charge a round to the budgets of the run and of its data, or refuse it."""
    if enrolment.terms is not terms:
        raise UserError(
            "The recipe, data, model, rounds or key of this training were replaced after its "
            "enrolment, so the ledger would charge another run. Prepare a new training."
        )
    terms.require_unchanged()
    if enrolment.session is None:
        _refuse_on_new_budget(enrolment, round)
        return
    _keep_own_budget(terms, enrolment.session, round)
    enrolment.session.reserve(round)


def reserve_statistics(enrolment: Enrolment, terms: Terms) -> None:
    """Charge the statistics of the data, with the first round, before they are written anywhere."""
    if terms.recipe.statistics is not None:
        reserve(enrolment, terms, 0)


def refuse_on_budget(data: Federated, what: str, ledger: Path | None = None) -> None:
    """Refuse computations on data with a budget that no ledger would record."""
    where = ledger_path(ledger)
    if not Chain.exists(where):
        return
    with contextlib.closing(open_ledger(where)) as books:
        related = books.related_budget(data.contents)
        refuse_shared_clients(books, Account.of(data), data)
    if related is not None:
        raise UserError(
            f"A budget is set for these data ('{related.data}'), and {what} would not be charged "
            f"to it. Use other data, or remove the budget: `{related.lift_command}`."
        )


def check(enrolment: Enrolment, round: int, state: State) -> str:
    """The digest of what a round will publish; a repeated round is charged unless it is equal.

    A round in which a part has changed is not published: its noise may not be what was charged. Nor
    is another version of a round of a run with private evaluation, whose noise is charged once.
    """
    enrolment.terms.require_unchanged()
    if enrolment.session is None:
        return ""
    terms, session, released = enrolment.terms, enrolment.session, digest(state)
    if terms.recipe.evaluation is not None:
        session.commit(round, released, once=True)
        return released
    session.check(round, released)
    if session.repeats(round, released):  # one more release, charged before anyone sees it
        _keep_own_budget(terms, session, round, again=1)
        session.commit(round, released)
    return released


def commit(enrolment: Enrolment, round: int, released: str) -> None:
    """Record that a round was published."""
    if enrolment.session is not None:
        enrolment.session.commit(round, released)


def digest(state: State) -> str:
    """A hash of what a round has released."""
    found = hashlib.blake2b(state.x.numpy().tobytes(), digest_size=16)
    for _, released in sorted(state.parts["bound"].items()):  # what it keeps of the data is noisy
        found.update(released.numpy().tobytes())
    return found.hexdigest()


def named(facts: Facts, terms: Terms, ledger: Ledger) -> Facts:
    """The facts with the run's clients or silos, as hashes of this ledger."""
    silos = ledger.silos(terms.data, terms.account) if terms.recipe.by_record else None
    return replace(facts, people=ledger.people(terms.data), silos=silos)


def facts_of(terms: Terms, round: int = 0) -> Facts:
    """The run as the ledger records it, from a round on if its key is new there."""
    if terms.secret:
        stream = f"secret {secrets.token_hex(16)}"  # a random name for a secret key
    else:
        stream = f"seeded {run_key('ledger', terms.identity)}"
    origin, first = terms.data.origin, round if terms.secret else 0
    plans = {view: plan(terms.recipe, *terms.size, view, origin) for view in VIEWS}
    return Facts(
        account=terms.account,
        data=terms.data.name,
        population=units(terms.recipe, terms.data),
        recipe=terms.recipe.name,
        stream=stream,
        rounds=terms.rounds,
        delta=terms.delta,
        plans={view: plans[view].resumed(first) for view in VIEWS},
    )


def _refuse_on_new_budget(enrolment: Enrolment, round: int) -> None:
    """End an unrecorded run if a budget is set for its examples, in any split."""
    terms, head = enrolment.terms, Anchor(enrolment.ledger).raw()
    if head == enrolment.head or not Chain.exists(enrolment.ledger):
        return
    with contextlib.closing(Ledger(enrolment.ledger)) as ledger:
        account, contents = terms.account, terms.data.contents
        budgeted = bool(ledger.limits(account)) or ledger.related_budget(contents) is not None
    if budgeted:
        raise BudgetError(
            f"Round {round + 1} was not run: a budget was set for '{terms.data.name}', but this "
            "run is not recorded. Start a new private run, which is then recorded."
        )
    enrolment.head = head


def _check_start(terms: Terms, state: State, session: Session) -> None:
    """Refuse a run without room for its next round, and a state that was not released."""
    if state.round:
        session.check(state.round - 1, digest(state))
    if state.round < terms.rounds:
        session.require(state.round)


def _keep_own_budget(terms: Terms, session: Session, round: int, again: int = 0) -> None:
    """Refuse a round beyond the run's own ε, if rounds were lost and drawn again.

    `again` is 1 for a round that is drawn and would be published in another version.

    This is a filter: how many rounds it allows was fixed before the first one, by one proof. So it
    holds whatever the crashes depended on.
    """
    lost = session.redrawn + again
    if terms.budget is None or not lost:
        return
    fresh = 0 if session.drew(round) else 1  # an equal run's rounds are not among its own
    needed = _own_epsilon(terms, max(session.rounds, round) + fresh + again, lost)
    if needed > terms.budget.epsilon:
        raise BudgetError(
            f"Round {round + 1} of {terms.recipe.name} was not {'published' if again else 'run'}: "
            f"with {in_rounds(lost)} lost in a crash and drawn again, it would bring the run to "
            f"ε = {rounded_up(needed, 4)}, over its own {short(terms.budget.epsilon)}."
        )


def _limited(terms: Terms, rounds: int, drawn: int, lost: int) -> bool:
    """Whether the run is within its own ε so far, and that ε ends it before all rounds."""
    if terms.budget is None:
        return False
    spent, all_of_it = (_own_epsilon(terms, count, lost) for count in (drawn, rounds))
    # Lost rounds of correlated noise are counted as if lost one by one, which they were not.
    within = spent <= terms.budget.epsilon or terms.recipe.noise.correlated
    return within and terms.budget.epsilon < all_of_it


def _own_epsilon(terms: Terms, rounds: int, lost: int) -> float:
    """ε in the run's own view, by the proof that is best for the planned rounds.

    Taking the better of two proofs for the rounds that were run would not be a filter: the run
    could end by either, and each uses all of δ.
    """
    proofs = ways(terms.recipe, *terms.size, terms.recipe.view)

    def epsilon(proof: Way, count: int) -> float:
        return accounting.epsilon(proof.spent(count), terms.delta)

    best = min(proofs, key=lambda proof: epsilon(proof, terms.rounds))
    if lost and isinstance(best.event, events.CyclicSampled):
        return math.inf  # without sampling it would be another proof
    return epsilon(best.redrawn(lost), rounds)
