"""A cap on participation: what sampled rounds are left once it is almost surely reached."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm

from fedveil import algorithms, loop
from fedveil.accounting import events
from fedveil.accounting.accountant import delta, epsilon
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.ledger import charging
from fedveil.ledger.ledger import open_ledger
from fedveil.ledger.verify import verify
from fedveil.parts import cohort
from fedveil.parts.cohort import NOT_YET, Cohort, FixedSize, Poisson
from fedveil.parts.noise import Gaussian
from fedveil.privacy import composition as together
from fedveil.privacy import selection
from fedveil.privacy.composition import Charged, ReleasePlan, Way, plan
from fedveil.recipe import Recipe
from fedveil.training.start import finish
from tests.unit.accounting.test_integers import hockey_stick
from tests.unit.ledger.test_stopping import lost_rounds

ROUNDS, EPSILONS = 11, (0.0, 0.2, 0.5, 1.0, 2.0, 3.0)


def capped_laws(rate: float, cap: int, own: float) -> tuple[np.ndarray, np.ndarray]:
    """All outputs of randomized responses: a bit that leans to 1 if the unit takes part, else to 0.

    By enumeration of coins, of which the first `cap` that come up count; and without the unit.
    """
    lean = 1 / (1 + math.exp(-own))
    outputs = np.array(list(itertools.product((0, 1), repeat=ROUNDS)))
    absent = np.where(outputs == 1, 1 - lean, lean)
    present = 1 - absent
    with_unit = np.zeros(len(outputs))
    for coins in itertools.product((0, 1), repeat=ROUNDS):
        takes_part = np.array(coins) & (np.cumsum(coins) <= cap)
        chance = np.prod([rate if coin else 1 - rate for coin in coins])
        with_unit += chance * np.where(takes_part, present, absent).prod(axis=1)
    return with_unit, absent.prod(axis=1)


def ways(rate: float, cap: int, own: float) -> tuple[events.Composed, ...]:
    release = events.ApproximateRelease(own, 0.0)
    sampled = events.Composed(events.PoissonSampled(rate, release), ROUNDS)
    return Poisson(rate, cap=cap).until_cap(sampled, cap)


@pytest.mark.parametrize(("rate", "cap", "own"), [(0.9, 1, 1.0), (0.9, 1, 3.0), (0.95, 2, 2.0)])
def test_rounds_until_the_cap_cover_a_run_by_enumeration(rate, cap, own: float) -> None:
    with_unit, without = capped_laws(rate, cap, own)
    found = ways(rate, cap, own)
    assert found
    for way in found:
        assert way.count < ROUNDS
        for eps in EPSILONS:
            true = hockey_stick(with_unit, without, eps)
            assert true <= delta(way, eps) * (1 + 1e-9)


@pytest.mark.parametrize("chance", [0.8, 0.05])
def test_what_is_set_aside_is_needed_on_both_sides(chance: float) -> None:
    """With a likely remainder: δ_t(ε) + e^ε·chance covers it, and δ_t(ε) alone does not."""
    rate, cap, own = 0.3, 1, 3.0
    with_unit, without = capped_laws(rate, cap, own)
    rounds = cohort.rounds_until(rate, cap, chance)
    assert rounds < ROUNDS
    sampled = events.PoissonSampled(rate, events.ApproximateRelease(own, 0.0))
    short = []
    for eps in EPSILONS:
        true = hockey_stick(with_unit, without, eps)
        early = delta(events.Composed(sampled, rounds), eps)
        assert true <= early + math.exp(eps) * chance
        short.append(true > early)
    assert any(short) == (chance == 0.8)


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("cap", [1, 7, 40])
@pytest.mark.parametrize("chance", NOT_YET)
def test_the_rounds_are_the_least_that_reach_the_cap(rate, cap: int, chance: float) -> None:
    rounds = cohort.rounds_until(rate, cap, chance)
    assert binom.cdf(cap - 1, rounds, rate) <= chance
    assert binom.cdf(cap - 1, rounds - 1, rate) > chance * (1 - 1e-5)


def test_a_run_far_beyond_its_cap_costs_what_the_rounds_before_it_do() -> None:
    capped = algorithms.dp_fedavg(rate=0.1, cap=20, noise_multiplier=4.0)
    spent = capped.spent(10, 1000, 2000)
    assert isinstance(spent, events.Either)
    hidden, known, *early = spent.ways
    old = min(epsilon(hidden, 1e-5), epsilon(known, 1e-5))
    counts = [cohort.rounds_until(0.1, 20, chance) for chance in NOT_YET]
    assert [way.count for way in early] == counts
    assert epsilon(spent, 1e-5) < 0.55 * old
    more = capped.spent(10, 1000, 20_000)
    assert epsilon(more, 1e-5) == epsilon(spent, 1e-5)


def test_a_short_run_and_other_cohorts_are_counted_as_before() -> None:
    capped = algorithms.dp_fedavg(rate=0.1, cap=5, noise_multiplier=1.0)
    short = capped.spent(10, 1000, 50)
    assert isinstance(short, events.Either)
    assert len(short.ways) == 2
    fixed = dataclasses.replace(capped, cohort=FixedSize(10, cap=5))
    found = fixed.spent(10, 1000, 50_000)
    assert isinstance(found, events.Either)
    assert len(found.ways) == 2

    class Rare(Poisson):
        """Its rate is what it promises at most; nothing says that it comes up as often."""

    own = dataclasses.replace(capped, cohort=Rare(0.1, cap=5))
    assert len(own.spent(10, 1000, 50_000).ways) == 2


# Rounds that were lost

CAPPED = algorithms.dp_fedavg(rate=0.1, cap=20, noise_multiplier=4.0)
OTHER = algorithms.dp_fedavg(rate=0.1, noise_multiplier=8.0)
SIZE, DELTA = (10, 1000), 1e-5


def histories(rounds: int, lost: int) -> Iterator[list[int]]:
    """Every course of a run: how many rounds the state has, for each round that is drawn.

    After any round the process may die, and goes on from any earlier state. At most `lost` rounds
    are lost.
    """

    def after(course: list[int], state: int, spare: int) -> Iterator[list[int]]:
        if state == rounds:
            yield course
            return
        for back in range(min(spare, state + 1) + 1):
            yield from after([*course, state], state + 1 - back, spare - back)

    return after([], 0, lost)


def participations(course: list[int], coins: Sequence[int], cap: int) -> np.ndarray:
    """Where the unit takes part: its coin comes up, and its state has it below the cap."""
    taken, found = [0], []
    for state, coin in zip(course, coins, strict=True):
        comes = bool(coin and taken[state] < cap)
        taken = [*taken[: state + 1], taken[state] + comes]
        found.append(comes)
    return np.array(found)


def course_laws(course: list[int], rate: float, cap: int, own: float) -> tuple[np.ndarray, ...]:
    """All outputs of randomized responses over a course, with the unit and without it."""
    lean, drawn = 1 / (1 + math.exp(-own)), len(course)
    outputs = np.array(list(itertools.product((0, 1), repeat=drawn)))
    absent = np.where(outputs == 1, 1 - lean, lean)
    with_unit = np.zeros(len(outputs))
    for coins in itertools.product((0, 1), repeat=drawn):
        chance = np.prod([rate if coin else 1 - rate for coin in coins])
        came = participations(course, coins, cap)
        with_unit += chance * np.where(came, 1 - absent, absent).prod(axis=1)
    return with_unit, absent.prod(axis=1)


@dataclasses.dataclass(frozen=True)
class Coins(Cohort):
    """A user's own cohort of coins with a cap."""

    rate: float
    cap: int | None = None
    adjacency = "add-remove"
    independent = True

    def expected(self, population: int) -> float:
        return self.rate * population

    def draw(self, population: int, rng: np.random.Generator, state: Any = None) -> np.ndarray:
        return Poisson(self.rate, self.cap).draw(population, rng, state)

    def amplify(self, event: events.Round, population: int) -> events.Round:
        return events.PoissonSampled(self.rate, event)


@dataclasses.dataclass(frozen=True)
class Answering(Gaussian):
    """A user's own noise, of which only its ε is known."""

    epsilon: float = 1.0

    def event(self, *_: Any) -> events.Release:
        return events.ApproximateRelease(self.epsilon, 0.0)


@pytest.mark.parametrize(("rate", "own"), [(0.2, 0.5), (0.6, 1.0), (0.9, 2.0)])
@pytest.mark.parametrize("cap", [1, 2])
def test_lost_rounds_of_any_cohort_cost_no_more_than_is_charged(cap, rate, own: float) -> None:
    """All coins, outputs and crashes of 3 rounds, of which up to 2 are lost."""
    recipe = dataclasses.replace(CAPPED, cohort=Coins(rate, cap), noise=Answering(1.0, epsilon=own))
    for course in histories(3, 2):
        lost = len(course) - 3
        charged = plan(recipe, *SIZE, "models").redrawn(lost).spent(len(course))
        assert charged == charging.redrawn(recipe, lost).spent(*SIZE, len(course))
        assert [way.count for way in charged.ways] == [len(course), min(len(course), cap + lost)]
        laws = course_laws(course, rate, cap, own)
        for way in charged.ways:
            for eps in EPSILONS:
                assert hockey_stick(*laws, eps) <= delta(way, eps) * (1 + 1e-9) + 1e-12


def test_a_cap_without_lost_rounds_would_be_exceeded() -> None:
    worst = max(participations(course, [1] * len(course), 1).sum() for course in histories(3, 2))
    assert worst == 1 + 2


@dataclasses.dataclass(frozen=True)
class Scripted(Coins):
    """A cohort whose draws are given, and which ignores its cap."""

    script: ClassVar[list[tuple[int, ...]]] = []

    def draw(self, population: int, rng: np.random.Generator, state: Any = None) -> np.ndarray:
        return np.array(self.script.pop(0), dtype=np.int64)


def test_the_loop_keeps_any_cohort_within_its_cap_and_the_lost_rounds() -> None:
    """All draws of two clients over all crashes: the loop refuses each one beyond the cap."""
    recipe = dataclasses.replace(CAPPED, cohort=Scripted(0.5, 1))
    sets, allowed = ((), (0,), (1,), (0, 1)), 0
    for course in histories(2, 2):
        for script in itertools.product(sets, repeat=len(course)):
            Scripted.script[:] = script
            states, taken = [{"taken": torch.zeros(2, dtype=torch.int64)}], np.zeros(2, int)
            try:
                for place in course:
                    state = loop.State(0, torch.zeros(1), {"cohort": {}, loop.LOOP: states[place]})
                    drawn = loop.cohort_of(recipe, state, 2, 0)
                    after = loop._after_draw(recipe, state.parts, drawn)[loop.LOOP]
                    states, taken[drawn] = [*states[: place + 1], after], taken[drawn] + 1
            except UserError:
                continue
            allowed += 1
            assert taken.max() <= 1 + len(course) - 2
    assert allowed


@pytest.mark.parametrize("lost", [0, 1, 7, 50])
def test_a_plan_and_a_recipe_agree_on_lost_rounds(lost: int) -> None:
    """What `verify` derives from a plan is what a statement derives from the recipe."""
    planned = plan(CAPPED, *SIZE, "models").redrawn(lost)
    for rounds in (100, 1000):
        stated = charging.redrawn(CAPPED, lost).spent(*SIZE, rounds + lost)
        derived = planned.spent(rounds + lost)
        assert epsilon(derived, DELTA) == pytest.approx(epsilon(stated, DELTA), rel=1e-12)
        counts = [way.count for way in stated.ways]
        assert [way.count for way in derived.ways] == counts


def test_lost_rounds_raise_the_cap_by_which_it_is_almost_surely_reached() -> None:
    planned = plan(CAPPED, *SIZE, "models")
    redrawn = planned.redrawn(7)
    assert [way.cap for way in planned.ways] == [None, None, *4 * [20]]
    for before, after in zip(planned.ways, redrawn.ways, strict=True):
        if before.cap is None:
            assert after.most == (None if before.most is None else before.most + 7)
        else:
            chance = before.event.distance * before.most
            assert binom.cdf(26, after.most, 0.1) <= chance * (1 + 1e-9)
            assert after.event.distance * after.most == pytest.approx(chance)
            assert after.cap == 27
    assert planned.redrawn(0) == planned
    twice, once = redrawn.redrawn(3).ways, planned.redrawn(10).ways
    assert [(way.most, way.cap) for way in twice] == [(way.most, way.cap) for way in once]
    assert epsilon(planned.spent(2000), DELTA) == epsilon(CAPPED.spent(*SIZE, 2000), DELTA)
    assert epsilon(redrawn.spent(2000), DELTA) > epsilon(planned.spent(2000), DELTA)


def test_plans_without_a_recorded_cap_are_still_read() -> None:
    """The cap follows from the proof that counts the unit's releases one by one."""
    planned = plan(CAPPED, *SIZE, "models")
    plain = json.loads(json.dumps(planned.plain()))
    assert ReleasePlan.from_plain(plain) == planned
    for way in plain["ways"]:
        way.pop("cap", None)
    assert ReleasePlan.from_plain(plain) == planned


def own(rounds: int, drawn: int, lost: int, recipe: Recipe, delta: float) -> float:
    terms = SimpleNamespace(recipe=recipe, size=(10, 1000), rounds=rounds, delta=delta)
    return charging._own_epsilon(terms, drawn, lost)


def test_no_kill_rule_beats_a_run_s_own_epsilon() -> None:
    """An attacker who kills what looks like participation keeps the cap from being reached.

    Rounds release N(1, z²) if the unit takes part and N(0, z²) if not; a checkpoint follows each,
    and the process is killed where the release is above a threshold. Then the cap counts the rounds
    alone in which the unit took part and looked absent. Until it is reached, the run cannot be told
    from one without a cap, so the attack's δ is at least that of all the sampled rounds, less the
    chances that the cap is reached or that more rounds are killed than stated.
    """
    rate, cap, z, drawn, alarm = 0.001, 200, 0.6, 600_000, 0.2
    often = algorithms.dp_fedavg(rate=rate, cap=cap, noise_multiplier=z)
    seen = norm.sf(norm.isf(alarm) - 1 / z)  # that participation is noticed
    lost = int(binom.isf(1e-12, drawn, rate * seen + (1 - rate) * alarm))
    short = 1e-12 + binom.sf(cap - 1, drawn, rate * (1 - seen))
    sampled = events.Composed(often.event(*SIZE), drawn)

    def attack(at: float) -> float:
        return delta(sampled, at) - short

    (proof,) = [way for way in plan(often, *SIZE, "models").ways if way.most == 322_160]
    naive = events.Composed(proof.event, 322_160 + lost)
    assert naive.count < drawn
    assert attack(epsilon(naive, DELTA)) > 30 * DELTA  # lost rounds on top of those until the cap
    claimed = own(drawn - lost, drawn, lost, often, DELTA)
    assert attack(claimed) <= DELTA
    assert claimed == pytest.approx(17.232, abs=1e-3)


def test_the_chance_to_miss_a_raised_cap_covers_every_kill_rule() -> None:
    """Whoever even sees the coins, and kills each round in which the unit takes part."""
    rng, lost = np.random.default_rng(0), 40
    proof = plan(CAPPED, *SIZE, "models").ways[2].redrawn(lost)
    assert proof.most is not None
    late = 0
    for _ in range(2000):
        coins, kept, kills = rng.random(2000) < 0.1, 0, 0
        for drawn in np.flatnonzero(coins):
            if kept == 20:
                break
            late += drawn >= proof.most
            kept, kills = (kept, kills + 1) if kills < lost else (kept + 1, kills)
    assert late == 0
    naive = plan(CAPPED, *SIZE, "models").ways[2].most + lost
    assert binom.cdf(19 + lost, naive, 0.1) > 0.5  # with lost rounds on top it would be likely


def test_a_run_s_own_epsilon_is_not_below_an_attack_by_killing() -> None:
    """40,000 rounds, and 4,535 more that look like participation and are killed.

    With lost rounds on top of those until the cap, 17.745 was claimed. In 20,000 simulated runs the
    attack's δ there was (1.7 ± 0.4)e-3, where 1e-3 is stated. The raised cap is not surely reached
    in all these rounds, so all of them count.
    """
    often = algorithms.dp_fedavg(rate=0.003, cap=30, noise_multiplier=0.5)
    sampled = events.Composed(often.event(*SIZE), 44_535)
    assert own(40_000, 44_535, 4535, often, 1e-3) >= epsilon(sampled, 1e-3) > 17.8


@pytest.mark.parametrize("drawn", [300, 500, 1007])
def test_a_run_s_own_epsilon_pays_for_a_missed_cap_in_whole(drawn: int) -> None:
    """The chance is one of the whole run: a part of it for a part of the rounds is no filter."""
    (proof,) = [way for way in plan(CAPPED, *SIZE, "models").ways if way.most == 492]
    redrawn = proof.redrawn(7)
    counted = min(drawn, redrawn.most)
    paid = events.Dominated(CAPPED.event(*SIZE), distance=3e-7 / counted)
    found = own(1000, drawn, 7, CAPPED, DELTA)
    assert found == pytest.approx(epsilon(events.Composed(paid, counted), DELTA), rel=1e-9)


def test_a_run_s_own_epsilon_is_what_its_statement_derives() -> None:
    stated = charging.redrawn(CAPPED, 7).spent(*SIZE, 1007)
    assert own(1000, 1007, 7, CAPPED, DELTA) == pytest.approx(epsilon(stated, DELTA), rel=1e-12)


def test_verify_derives_the_statement_of_a_capped_run_that_crashed(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = algorithms.dp_fedavg(rate=0.2, cap=8, noise_multiplier=4.0, steps=1)
    path = tmp_path / "a"
    training = lost_rounds(often, blobs, path, monkeypatch, rounds=250, evaluate_every=250)
    result = finish(training)
    assert result.guarantee.rounds == 253
    until = charging.redrawn(often, 3).spent(training.task.dim, blobs.clients, 253).ways[2:]
    assert result.guarantee.epsilon in [epsilon(way, DELTA) for way in until]
    assert training.session is not None
    books = open_ledger(training.session.ledger.path)
    assert verify(books).problems == []
    books.close()


# Several runs


def test_two_capped_runs_have_a_finite_epsilon_together() -> None:
    run = Charged(plan(CAPPED, *SIZE, "models"), 1000, 1000)
    first = Charged(plan(OTHER, *SIZE, "models"), 10, 10)
    assert together.epsilon([run, run], DELTA) == pytest.approx(6.1265, abs=1e-3)
    assert together.epsilon([first, run], DELTA, 6.0) == pytest.approx(4.2033, abs=1e-3)
    law = selection.law_of("geometric", 10)
    assert epsilon(selection.selection([run], law), DELTA) == pytest.approx(6.982, abs=1e-3)


def test_what_is_set_aside_once_is_not_used_over_several_runs() -> None:
    """η/t a round would pay η·k/t for k rounds, and the cap may be missed with chance η."""
    event = CAPPED.event(*SIZE)
    until = Way(events.Dominated(event, distance=1e-16 / 50), 50, 20)
    both = ReleasePlan((Way(event, None), until), ("zero-out",))
    alone = ReleasePlan((Way(event, None),), ("zero-out",))
    beside = Charged(plan(OTHER, *SIZE, "models"), 10, 10)
    for rounds in (20, 1000):
        found, wanted = (
            together.epsilon([Charged(one, 1000, rounds), beside], DELTA) for one in (both, alone)
        )
        assert found == wanted < math.inf
    assert together.curve(Charged(both, 1000, 20)).distance == 0
    assert together.epsilon([Charged(both, 1000, 1000)], DELTA) < together.epsilon(
        [Charged(alone, 1000, 1000)], DELTA
    )  # a single stream may use it


def test_the_chance_that_the_cap_is_not_reached_is_set_aside() -> None:
    for way in ways(0.9, 1, 1.0):
        assert isinstance(way.event, events.Dominated)
        chance = way.count * way.event.distance
        assert chance >= binom.cdf(0, way.count, 0.9)
        early = events.Composed(way.event.by, way.count)
        for eps in EPSILONS:
            paid = delta(early, eps) + math.exp(eps) * chance
            assert delta(way, eps) >= paid * (1 - 1e-12)
