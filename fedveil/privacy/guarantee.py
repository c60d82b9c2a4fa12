"""(ε, δ) of a recipe in one adversary view, and the sentence that states it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.rounding import rounded_up, short
from fedveil.data.federated import Federated
from fedveil.data.origin import REAL, Origin
from fedveil.recipe import Recipe, View

VIEWS: tuple[View, ...] = ("models", "sum", "messages")
SEEN: dict[str, str] = {
    "models": "sees every released model but no individual message",
    "sum": "sees the list of participants and the sum of their messages, but no individual message",
    "messages": "sees every client's message and who sent it",
}
BRIEFLY: dict[str, str] = {
    "models": "against anyone who sees the released models only",
    "sum": "against anyone who sees the list of participants and the sum of their messages",
    "messages": "against anyone who sees every message and its sender",
}


@dataclass(frozen=True)
class Rounds:
    """The rounds that a guarantee is for, fixed before the run, and how many have been run.

    Stopping earlier, for whatever reason, is post-processing of the planned run: the ε of
    `counted` rounds holds, that of the rounds run so far does not (docs/privacy.md, "Stopping").
    """

    planned: int
    run: int
    redrawn: int = 0  # lost in a crash and drawn again with other noise; counted in addition
    limited: bool = False  # the run's own ε limits the rounds, no matter when rounds are lost

    @classmethod
    def all(cls, planned: int) -> Rounds:
        """The rounds of a complete run, or of no run in particular."""
        return cls(planned, planned)

    @property
    def whole(self) -> bool:
        """Whether every planned round has been run exactly once."""
        return self.run >= self.planned and not self.redrawn

    def sentence(self, counted: int) -> str:
        """The number of rounds, for the statement."""
        if self.whole:
            return f"Rounds: {counted:,}."
        told = f"Rounds: {self.planned:,} planned, {self.run:,} run"
        if self.redrawn:
            told += f", {self.redrawn:,} more lost in a crash and drawn again"
        if self.limited:
            return f"{told}. This ε limits the run, no matter when rounds are lost."
        return f"{told}. ε is that of {counted:,} rounds."


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ) for a unit, an adjacency and a view; ε = ∞ with a reason if there is no guarantee.

    `epsilon` holds however often the unit was drawn, up to `most` rounds. In a view that shows who
    takes part, `drawn` is the ε over the random choice of participants, if it was fair. `capped` is
    the ε if clients themselves refuse to take part more than `cap` times.
    """

    epsilon: float
    delta: float
    unit: str
    adjacency: str
    view: View
    rounds: int
    population: int
    reason: str = ""
    hidden: bool = True  # whether this view hides who takes part
    most: int = 0
    drawn: float | None = None
    cap: int | None = None  # only in a view that does not rely on the cap
    capped: float | None = None
    course: Rounds | None = None  # None if there is no run
    origin: Origin = REAL
    silos: tuple[float, ...] = ()  # ε of each silo, or one for all; empty if units are not records

    @property
    def private(self) -> bool:
        """Whether there is a finite ε."""
        return math.isfinite(self.epsilon)

    def sentence(self) -> str:
        """The guarantee as sentences."""
        if not self.private:
            return f"No privacy guarantee: {self.reason}.{self._by_clients()}"
        return (
            f"{self.warning()}{self._subject()} "
            f"({rounded_up(self.epsilon)}, {rounded_up(self.delta)})"
            f"-differentially private per {self.unit} against anyone who {self._seen()}. "
            f"Adjacency: {written(self.adjacency)}. {self._course().sentence(self.rounds)}"
            f"{self._public()}{self._in_silos()}{self._attended()}{self._by_clients()}"
        )

    def _subject(self) -> str:
        """The subject of the claim. A simulation and exclusions are named before the claim."""
        excluded = self.origin.excluded
        apart = f"apart from {excluded}, read from private data without noise, " if excluded else ""
        if self.origin.simulated:
            return (
                "Simulation: clients are simulated, so no real person is protected. For real "
                f"clients, {apart}this training would be"
            )
        claim = f"{apart}this training is"
        return claim[:1].upper() + claim[1:]

    def _seen(self) -> str:
        seen = SEEN[self.view]
        return seen.replace("client", "silo") if self.silos else seen

    def _course(self) -> Rounds:
        return self.course or Rounds.all(self.rounds)

    def _public(self) -> str:
        if self.silos:
            many = f" ({self.population:,})" if self.population else ""
            return f" Public: the number of silos{many} and of the records in each."
        return (
            f" Public: the number of {self.unit}s ({self.population:,})." if self.population else ""
        )

    def _in_silos(self) -> str:
        """The ε of each silo."""
        if not self.silos:
            return ""
        if len(self.silos) == 1:
            return " It holds in every silo: a silo's own noise protects its records."
        each = ", ".join(f"{i}: {rounded_up(one)}" for i, one in enumerate(self.silos, start=1))
        return f" A silo's own noise protects its records. ε of silo {each}."

    def _by_clients(self) -> str:
        if self.capped is None or self.cap is None:
            return ""
        return (
            " The server enforces the participation cap, so this view does not rely on it. If "
            f"{self.unit}s themselves refuse to take part in more than {in_rounds(self.cap)}, ε is "
            f"{rounded_up(self.capped)}."
        )

    def _attended(self) -> str:
        if self.hidden or (self.drawn is None and self.most == self.rounds):
            return ""
        often = "every round" if self.most == self.rounds else in_rounds(self.most)
        holds = f" It holds for any {self.unit} that takes part in {often}."
        if self.drawn is None:
            return holds
        return (
            f"{holds} If the server samples participants fairly, which is not verified in "
            f"this view, ε over the sampling is {rounded_up(self.drawn)}."
        )

    def warning(self) -> str:
        """A warning about δ, if it is too large: before the claim, which it devalues."""
        if self.delta * self.population < 1 or self.silos:  # the population is of silos
            return ""
        return (
            f"WARNING: δ = {short(self.delta)} is at least 1/{self.population:,}. Publishing all "
            f"data of a {self.unit} chosen at random would satisfy this guarantee. Use "
            f"δ = {short(1 / (10 * self.population), 1)} or less. "
        )


def guarantee(
    recipe: Recipe,
    dim: int,
    population: int,
    rounds: int,
    delta: float,
    view: View | None = None,
    origin: Origin = REAL,
    course: Rounds | None = None,
) -> Guarantee:
    """The guarantee of `rounds` rounds of a recipe with calibrated noise, in a view."""
    view = view or recipe.view
    people = population or 1
    silos = of_each_silo(recipe, dim, people, rounds, delta, view)
    spent = recipe.spent(dim, people, rounds, view)
    epsilon = max(silos) if silos else accounting.epsilon(spent, delta)
    hidden = recipe.hidden(view)
    attended = None if hidden else recipe.participation_mixture(dim, people, rounds, view)
    kept = recipe.kept_by_clients(dim, people, rounds, view)
    capped = math.inf if kept is None else accounting.epsilon(kept, delta)
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        unit=recipe.unit,
        adjacency=recipe.adjacency(view),
        view=view,
        rounds=rounds,
        population=population,
        reason="" if math.isfinite(epsilon) else _reason(recipe.release(dim, people, view)),
        hidden=hidden,
        most=recipe.max_participations(rounds, view),
        drawn=None if attended is None else min(accounting.epsilon(attended, delta), epsilon),
        cap=recipe.cap if math.isfinite(capped) else None,
        capped=capped if math.isfinite(capped) else None,
        course=course,
        origin=origin,
        silos=silos,
    )


def units(recipe: Recipe, data: Federated) -> int:
    """The number of protected units: clients, or the records of all silos."""
    return len(data.labels) if recipe.by_record else data.clients


def of_each_silo(
    recipe: Recipe, dim: int, population: int, rounds: int, delta: float, view: View | None = None
) -> tuple[float, ...]:
    """ε of the records of each silo; of one silo if all work alike, of none without silos."""
    if not recipe.by_record:
        return ()
    composed = recipe.spent(dim, population, rounds, view)
    if not (isinstance(composed, events.Composed) and isinstance(composed.event, events.InSilos)):
        return ()
    event = composed.event
    alone = (replace(composed, event=replace(event, silos=(silo,))) for silo in event.silos)
    return tuple(accounting.epsilon(one, delta) for one in alone)


def _reason(event: events.Release) -> str:
    if isinstance(event, events.NonPrivate):
        return event.reason
    return "there is too little noise for this δ"


def written(adjacency: str) -> str:
    """An adjacency as papers write it.

    >>> written("add-remove"), written("zero-out")
    ('add/remove', 'zero-out')
    """
    return adjacency.replace("add-remove", "add/remove")


def in_rounds(count: int) -> str:
    """
    >>> in_rounds(1), in_rounds(1000)
    ('1 round', '1,000 rounds')
    """
    return f"{count:,} round{'' if count == 1 else 's'}"
