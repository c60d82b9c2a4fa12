"""What a plan says of parts that answer little, and of cohorts with a cap."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fedveil import algorithms
from fedveil.commands.plan_output import lines, planned
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.parts.cohort import Cohort, FixedSize, Poisson
from fedveil.parts.noise import Noise
from fedveil.planning import plan as planning
from fedveil.planning.facts import PublicFacts, SizeOptions
from fedveil.planning.forecast import Case, current, forecast, varied
from fedveil.planning.pilot import Material, run_pilot
from fedveil.planning.plan import Plan, PlanOptions, moves
from fedveil.planning.signal import AssumedUpdates, Spread
from fedveil.planning.verdict import WORKS, clients_for, judged
from fedveil.recipe import Recipe
from fedveil.training.settings import DataSettings, Settings
from fedveil.training.start import train
from tests.conftest import Run
from tests.contracts import own_parts as own

UPDATES = AssumedUpdates(0.2)
BASE = algorithms.dp_fedavg(clients=20, noise_multiplier=2.0)


@dataclass(frozen=True)
class Twenty(Cohort):
    """Twenty clients, drawn without replacement."""

    cap: int | None = None
    fixed = True

    def expected(self, population: int) -> float:
        return 20.0

    def draw(self, population: int, rng: np.random.Generator, state: Any = None) -> np.ndarray:
        return np.sort(rng.choice(population, 20, replace=False))


@dataclass(frozen=True)
class Fickle(Twenty):
    """Knows its own population only."""

    def with_population(self, factor: float) -> Cohort | None:
        return self if factor == 1 else None


@dataclass(frozen=True)
class Unsized(own.OwnNoise):
    """Does not say how large it is."""

    deviation_of_sum = Noise.deviation_of_sum
    event = own.OwnNoise.event
    scaled = own.OwnNoise.scaled


@dataclass(frozen=True)
class Sigma(own.OwnNoise):
    """Noise on the sum with a field of that name, in no grid steps."""

    sigma: float = 5.0
    deviation_of_sum = own.OwnNoise.deviation_of_sum
    event = own.OwnNoise.event


def case(recipe: Recipe, population: int = 100, rounds: int = 20, dim: int = 650) -> Case:
    return Case(recipe, dim, population, rounds, UPDATES, delta=1e-5)


def told(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> tuple[Plan, str]:
    """The plan of a recipe, and its lines."""
    monkeypatch.setattr("fedveil.training.settings.resolve_recipe", lambda settings: recipe)
    settings = Settings(rounds=20, data=DataSettings(clients=100), **changed)
    made = planning.make(settings, PlanOptions(SizeOptions(dim=650)))
    return made, "\n".join(f"{label} {text}" for label, text in lines(made))


# Other numbers of clients


@pytest.mark.parametrize("cohort", [Twenty(), Fickle()])
def test_how_many_clients_it_would_take_is_not_known_of_a_cohort_that_does_not_say(
    cohort: Cohort, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, text = told(replace(BASE, cohort=cohort), monkeypatch)
    assert made.verdict.word in ("hard", "hopeless")
    assert made.verdict.clients is None
    kind = type(cohort).__name__
    assert f"not known, because cohort {kind} does not define `with_population`" in text
    assert "No number" not in text
    assert "clients" not in moves(case(replace(BASE, cohort=Twenty())))
    with pytest.raises(UserError, match="no clients to sweep"):
        planning.sweep_of(case(replace(BASE, cohort=Twenty())), "clients")


def test_a_cohort_that_says_how_it_grows_has_a_number() -> None:
    @dataclass(frozen=True)
    class Growing(Twenty):
        size: float = 20.0

        def expected(self, population: int) -> float:
            return self.size

        def with_population(self, factor: float) -> Cohort:
            return Growing(size=self.size * factor)

    found = judged(case(replace(BASE, cohort=Growing()))).clients
    assert found == judged(case(BASE)).clients
    assert found is not None
    assert 100 < found < math.inf
    assert clients_for(case(BASE), 1e15) == math.inf  # no number of people


@pytest.mark.parametrize(("clients", "population"), [(33, 99), (1, 3)])
def test_clients_that_stay_apart_are_planned_for_other_populations(
    clients: int, population: int
) -> None:
    ftrl = algorithms.dp_ftrl(clients=clients, separation=3, noise_multiplier=2.0)
    fewer, now, more = moves(case(ftrl, population))["clients"]
    assert (fewer is None) == (clients == 1)  # one of three rounds is one of three clients
    assert now is not None
    assert more is not None
    assert judged(case(ftrl, population)).clients is not None


# Caps


@pytest.mark.parametrize("cohort", [Poisson(0.2, cap=3), FixedSize(20, cap=3)], ids=repr)
def test_a_capped_run_is_planned_with_those_who_take_part(cohort: Cohort) -> None:
    capped, free = (
        forecast(case(replace(BASE, cohort=c))) for c in (cohort, replace(cohort, cap=None))
    )  # type: ignore[call-arg]
    assert capped.ratio == free.ratio  # of round 1, where nobody has reached it
    share = cohort.participants(100, 20).mean / 20
    assert capped.run_ratio is not None
    assert free.run_ratio is not None
    # The noise stays, the common direction shrinks by the share and sampling variance by its root.
    assert share < capped.run_ratio / free.run_ratio < min(1.05 * share, math.sqrt(share))


def test_the_signal_of_few_is_that_of_drawn_ones() -> None:
    """8 of 40 are expected, 4 take part on average, and the sum is divided by 8."""
    rng = np.random.default_rng(0)
    updates = rng.normal(scale=0.3, size=(40, 6)) + 0.5 * np.eye(6)[0]
    mean = updates.mean(axis=0)
    spread = Spread(float(mean @ mean), float((updates**2).sum(axis=1).mean()))
    sums = [updates[rng.random(40) < 0.1].sum(axis=0) / 8 for _ in range(6000)]
    drawn = math.sqrt(np.mean(np.square(sums).sum(axis=1)))
    recipe = replace(algorithms.clipped_fedavg(clip=9.0), cohort=Poisson(0.2))
    assert spread.signal(recipe, 6, 40, 4.0) == pytest.approx(drawn, rel=0.03)


def test_a_capped_plan_meets_the_participants_of_a_run(blobs: Federated) -> None:
    recipe = algorithms.dp_fedavg(rate=0.5, cap=3, noise_multiplier=2.0, steps=1)
    counts = [
        record.participants
        for seed in range(4)
        for record in train(recipe, blobs, rounds=16, seed=seed).records
    ]
    planned = recipe.cohort.participants(blobs.clients, 16)
    assert np.mean(counts) == pytest.approx(planned.mean, rel=0.05)
    assert planned.mean < 0.5 * recipe.cohort.expected(blobs.clients)


def test_noise_in_messages_becomes_less_with_fewer_of_them() -> None:
    secagg = algorithms.dp_norm_fedavg_secagg(clients=20, sigma=2.0, support=20)
    capped = replace(secagg, cohort=FixedSize(20, cap=3))
    exact, summed = (
        forecast(case(capped)).below_cap,
        forecast(case(replace(BASE, cohort=FixedSize(20, cap=3)))),
    )
    assert summed.below_cap < exact < 1  # √0.75 of the noise is left, beside 0.75 of the signal


def test_the_lines_of_a_capped_plan_say_means_and_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    made, exact = told(replace(BASE, cohort=Poisson(0.2, cap=3)), monkeypatch)
    mean = made.participants
    assert "dp_fedavg: 14 of 100 clients per round on average (20 in round 1, fewer as" in exact
    assert made.plain()["participants"] == mean == Poisson(0.2, cap=3).participants(100, 20).mean
    assert f"{2600 * mean / 1000:.4g} kB up per round" in exact
    assert "at most" not in exact
    assert "times because of the cap" in exact
    made, bound = told(replace(BASE, cohort=Twenty(cap=3)), monkeypatch)
    assert "dp_fedavg: at most 15 of 100 clients per round on average (20 in round 1" in bound
    assert "over the run is at most" in bound
    assert "at most 39 kB up per round, at most 780 kB in total" in bound
    assert not made.plain()["participants_exact"]


def test_a_cap_that_nobody_can_reach_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, with_cap = told(replace(BASE, cohort=FixedSize(20, cap=20)), monkeypatch)
    _, without = told(BASE, monkeypatch)
    assert planned(told(BASE, monkeypatch)[0]).startswith(
        "dp_fedavg: 20 of 100 clients per round, 20"
    )
    assert with_cap.partition("\nPrivacy")[0] == without.partition("\nPrivacy")[0]


# Noise


def test_without_the_size_of_the_noise_a_plan_tells_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, text = told(replace(BASE, noise=Unsized()), monkeypatch, epsilon=8.0)
    assert made.verdict.word == "not known"
    assert "noise Unsized does not define `deviation_of_sum`" in text
    assert "Noise not known, against a signal of" in text
    assert 7.9 < made.guarantee.epsilon <= 8.0
    assert "Privacy ε = 7.9" in text
    assert "52 kB up per round" in text
    assert repr(made) == "Plan(dp_fedavg: 20 of 100 clients per round, 20 rounds, not known)"
    plain = made.plain()
    assert plain["noise"] is plain["signal_to_noise"] is plain["signal_to_noise_of_run"] is None
    assert plain["signal"] > 0


def test_what_needs_the_size_of_the_noise_is_refused(run: Run, blobs: Federated) -> None:
    recipe = replace(BASE, cohort=Poisson(0.5), noise=Unsized(2.0))
    known = planning.facts(Settings(data=DataSettings(dataset="synthetic", clients=12)),
                           SizeOptions(), "client")  # fmt: skip
    assert isinstance(known, PublicFacts)
    with pytest.raises(UserError, match=r"a pilot needs\. Define its method deviation_of_sum"):
        run_pilot(recipe, known, Material(blobs, "others"), 3)
    asked = ("--algorithm", "tests.unit.planning.test_plan:unsized", "--dim", 650, "--epsilon", 8)
    refused = run("plan", *asked, "--sweep", "rounds")
    assert refused.code == 2
    assert "Unsized does not define `deviation_of_sum`" in refused.err


def unsized(multiplier: float | None = None) -> Recipe:
    """Noise of an unknown size."""
    return replace(own.dp_own(), noise=Unsized(multiplier))


def test_a_field_called_sigma_is_not_taken_for_grid_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = told(replace(BASE, noise=Sigma(2.0)), monkeypatch)
    assert "grid steps" not in text
    discrete = algorithms.dp_norm_fedavg_secagg(clients=20, sigma=200.0, support=4000)
    _, text = told(discrete, monkeypatch)
    assert "DiscreteGaussian, σ = 200 grid steps per message" in text


def test_a_case_without_a_size_of_noise_has_no_ratio() -> None:
    found = forecast(case(replace(BASE, noise=Unsized(2.0))))
    assert (found.noise, found.ratio, found.run_ratio, found.mean_ratio) == (None,) * 4
    assert judged(case(replace(BASE, noise=Unsized(2.0)))).clients is None
    enough = case(replace(BASE, noise=own.OwnNoise(0.01)))
    assert (forecast(enough).run_ratio or 0) >= WORKS
    assert current(enough, "clients") == 100
    assert varied(enough, "clients", 200) is not None
