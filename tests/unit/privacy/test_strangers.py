"""Parts of the user's own: what is not known of them gets the answer that cannot be false."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.norms import Adjacency, Norms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.ledger.charging import redrawn
from fedveil.ledger.ledger import Account, open_ledger
from fedveil.ledger.verify import verify
from fedveil.parts.bound import Clip
from fedveil.parts.cohort import Cohort, FixedSize, Poisson
from fedveil.parts.memory import ErrorCompensation, Memory
from fedveil.parts.noise import Gaussian
from fedveil.parts.part import Tensors
from fedveil.parts.quantize import Quantize
from fedveil.parts.report import PseudoGradient
from fedveil.planning.forecast import Case, varied
from fedveil.planning.signal import AssumedUpdates
from fedveil.privacy import composition
from fedveil.privacy.calibrate import Budget, largest_cohort
from fedveil.privacy.composition import Charged, ReleasePlan, covered, plan
from fedveil.privacy.secure import secured
from fedveil.privacy.statement import statement
from fedveil.recipe import Recipe
from fedveil.testing.recipes import check_neighbours
from fedveil.training.start import finish
from tests.unit.ledger.test_stopping import lost_rounds

DELTA = 1e-5
SAMPLED = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)


@dataclass(frozen=True)
class Fifth(Cohort):
    """A cohort of one's own: everybody with probability 0.2, and says so in its event."""

    cap: int | None = None
    kind: Adjacency = "add-remove"
    fixed = False
    honest = None
    independent = True

    @property
    def adjacency(self) -> Adjacency:  # type: ignore[override]
        return self.kind

    def expected(self, population: int) -> float:
        return 0.2 * population

    def min_honest(self, population: int) -> int:
        return 1

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        return Poisson(0.2, self.cap).draw(population, rng, state)

    def amplify(self, event: events.Round, population: int) -> events.Round:
        return Poisson(0.2, self.cap).amplify(event, population)


@dataclass(frozen=True)
class Lopsided(Poisson):
    """A subclass of fedveil's own cohort that draws in another way."""

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        return np.arange(population // 2)


@dataclass(frozen=True)
class Shaped(Gaussian):
    """A subclass of fedveil's own noise that draws something else."""

    def draw(self, message: Norms, arrived: int, expected: float, rng: object) -> Tensor:
        return torch.zeros(message.dim, dtype=torch.float64)


@dataclass(frozen=True)
class Remembering(Memory):
    """A memory of one's own."""

    kept = True

    def workers(self, cohort: np.ndarray, population: int) -> np.ndarray:
        return cohort

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        return remembered + message


# The statement


@pytest.mark.parametrize("cohort", [Fifth(), Fifth(cap=4)])
def test_an_unknown_cohort_is_described_as_itself(cohort: Fifth) -> None:
    said = statement(replace(SAMPLED, cohort=cohort), 30, 200, 10, DELTA)
    told = dict(said.entries())["Sampling"]
    assert told.startswith(f"{cohort!r}: 40 of 200 clients on average per round")
    assert ("at most 4 times per run" in told) == (cohort.cap == 4)
    assert "every client" not in told
    unknown = statement(replace(SAMPLED, cohort=cohort), 30, 0, 10, DELTA)
    assert "0.2 times the number of clients" in dict(unknown.entries())["Sampling"]


def test_only_everyone_is_said_to_take_part_in_every_round() -> None:
    everyone = algorithms.fed_alpha_normec(noise_multiplier=5.0)
    told = dict(statement(everyone, 30, 200, 10, DELTA).entries())
    assert told["Sampling"] == "Every client takes part in every round."


def test_a_subclass_is_not_described_as_what_it_is_derived_from() -> None:
    recipe = replace(SAMPLED, cohort=Lopsided(0.5), noise=Shaped(3.0))
    said = statement(recipe, 30, 200, 10, DELTA)
    told = dict(said.entries())
    assert told["Sampling"].startswith("Lopsided(")
    assert told["Noise"].startswith("Shaped(")
    assert said.multiplier is None
    assert "test_strangers:Lopsided" in told["Assumptions"]


# After a crash


@pytest.mark.parametrize("cap", [1, 2])
@pytest.mark.parametrize("kind", [Fifth, partial(Poisson, 0.2)])
def test_after_a_crash_statement_and_ledger_count_any_capped_cohort_by_one_rule(
    blobs: Federated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[..., Cohort],
    cap: int,
) -> None:
    """All drawn rounds, sampled; or the cap and the lost rounds, unsampled."""
    recipe = replace(SAMPLED, cohort=kind(cap=cap))
    training = lost_rounds(recipe, blobs, tmp_path / "a", monkeypatch)
    assert training.charge().course.redrawn == 3
    result, size = finish(training), (training.task.dim, blobs.clients)
    release, sampled = recipe.release(*size), recipe.event(*size)
    rule = events.Composed(sampled, 8 + 3), events.Composed(release, cap + 3)
    assert result.guarantee.epsilon == min(accounting.epsilon(way, DELTA) for way in rule)
    told = dict(result.statement.entries())
    assert "Participations in lost rounds count in addition" in told["Sampling"]
    assert training.session is not None
    with contextlib.closing(open_ledger(training.session.ledger.path)) as books:
        assert verify(books).problems == []
        spent = books.spent(Account(blobs.fingerprint(), "client"), "models", DELTA)
    assert spent >= result.guarantee.epsilon
    streams = plan(recipe, *size, "models")  # the same proofs, for the rounds of each key
    assert spent == composition.epsilon([Charged(streams, 8, 6), Charged(streams, 8, 5)], DELTA)


def test_lost_rounds_raise_the_cap_of_any_cohort() -> None:
    for cohort in (Fifth(cap=2), Poisson(0.2, 2), FixedSize(5, 2)):
        capped = replace(SAMPLED, cohort=cohort)
        assert redrawn(capped, 0) is capped
        after = redrawn(capped, 3)
        assert (after.cohort, after.cap) == (cohort, 5)
        (known,) = [way for way in after.spent(30, 100, 9).ways if way.count == 5]
        assert known.event == events.GaussianRelease(
            3.0 if cohort.adjacency != "replace-one" else 1.5
        )
        plans = plan(after, 30, 100, "models"), plan(capped, 30, 100, "models").redrawn(3)
        assert plans[0] == plans[1]
    uncapped = replace(SAMPLED, cohort=Fifth())
    assert redrawn(uncapped, 3).spent(30, 100, 9) == uncapped.spent(30, 100, 9)


def test_a_stranger_s_plan_comes_back() -> None:
    capped = plan(replace(SAMPLED, cohort=Fifth(cap=2)), 30, 100, "models")
    assert ReleasePlan.from_plain(capped.plain()) == capped
    assert capped.redrawn(0) == capped


@dataclass(frozen=True)
class Sure(Fifth):
    """Says that a unit surely reaches the cap, in rounds that no crash is added to."""

    def until_cap(
        self, hidden: events.Composed, cap: int | None = None
    ) -> tuple[events.Composed, ...]:
        return (events.Composed(hidden.event, 1),)


def test_a_stranger_is_not_asked_when_its_cap_is_reached() -> None:
    for lost in (0, 3):
        recipe = redrawn(replace(SAMPLED, cohort=Sure(cap=2)), lost)
        assert [way.count for way in recipe.spent(30, 100, 9).ways] == [9, 2 + lost]


# Other answers by default


def test_neighbours_of_unknown_parts_are_their_own_alone() -> None:
    """That removing is blanking out needs the other units' coins to stay as they are."""
    assert covered(SAMPLED, "models") == ("add-remove", "zero-out")
    assert covered(replace(SAMPLED, cohort=Fifth()), "models") == ("add-remove",)
    assert covered(replace(SAMPLED, cohort=Fifth(kind="zero-out")), "models") == ("zero-out",)
    assert covered(replace(SAMPLED, cohort=Fifth(kind="replace-one")), "models") == ("replace-one",)


def test_what_an_unknown_memory_remembers_is_not_amplified() -> None:
    recipe = replace(SAMPLED, memory=Remembering())
    assert recipe.event(30, 100) == events.GaussianRelease(3.0)
    assert recipe.spent(30, 100, 7) == events.Composed(events.GaussianRelease(3.0), 7)


class Dependent(Fifth):
    """The same draws, but does not say that they are independent."""

    independent = False


def test_memory_of_participants_needs_draws_that_are_known_to_be_independent() -> None:
    memory = ErrorCompensation(0.5)
    recipe = replace(SAMPLED, report=PseudoGradient())
    assert replace(recipe, memory=memory).private
    with pytest.raises(
        UserError, match=r"cohort Dependent do not fit.*only if clients are drawn independently"
    ):
        replace(recipe, cohort=Dependent(), memory=memory)


def test_unknown_noise_of_the_clients_is_not_said_to_be_topped_up_by_the_server() -> None:
    own, known = (replace(SAMPLED, noise=kind(3.0, "client")) for kind in (Shaped, Gaussian))
    assert known.noise_shares(100, "models") == 50
    assert own.noise_shares(100, "models") == 1
    assert replace(SAMPLED, noise=Shaped(3.0)).noise_shares(100, "models") == 50


def test_unknown_noise_is_not_said_to_be_secure() -> None:
    with pytest.raises(UserError, match="Shaped is user-defined and does not define `secured`"):
        secured(replace(SAMPLED, noise=Shaped(3.0)))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"noise": Shaped(3.0)}, "is added at 'nowhere'; it must be 'server' or 'client'"),
        ({"cohort": Fifth(kind="swap")}, "has adjacency 'swap'; it must be add-remove"),
    ],
)
def test_words_that_nobody_knows_are_refused(
    parts: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "noise" in parts:
        object.__setattr__(parts["noise"], "at", "nowhere")
    with pytest.raises(UserError, match=words):
        replace(SAMPLED, **parts)  # type: ignore[arg-type]


def test_a_plan_does_not_resize_a_cohort_that_it_does_not_know() -> None:
    recipe = replace(SAMPLED, cohort=Fifth())
    with pytest.raises(
        UserError, match="cohort Fifth cannot be chosen, because it does not define `with_size`"
    ):
        largest_cohort(recipe, Budget(5.0, DELTA), 10, 30, 100)
    case = Case(recipe, 30, 100, 10, AssumedUpdates(1.0))
    assert varied(case, "cohort", 10.0) is None


def test_a_bound_of_one_s_own_is_planned_by_its_own_norms() -> None:
    @dataclass(frozen=True)
    class Half(Clip):
        """Promises more than it says."""

    recipe = replace(SAMPLED, bound=Half(1.0))
    assert isinstance(recipe, Recipe)
    assert covered(recipe, "models") == ("add-remove",)
    assert math.isfinite(statement(recipe, 30, 200, 10, DELTA).main.epsilon)


def test_a_quantizer_from_outside_is_always_applied() -> None:
    """Otherwise it would earn smaller norms, and the sum would be that of unquantized messages."""

    @dataclass(frozen=True)
    class Halving(Quantize):
        rows_needed = False

        def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
            return rows / 2

        def norms(self, bound: Norms) -> Norms:
            return replace(bound, l2=bound.l2 / 2)

    check_neighbours(replace(SAMPLED, quantize=Halving()))
