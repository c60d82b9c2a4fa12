"""The contract of a cohort: draws follow the law that its amplification is computed from."""

from __future__ import annotations

import math

import numpy as np
import torch

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.parts.checks import repeatable
from fedveil.parts.cohort import Cohort
from fedveil.parts.part import Begin, Tensors
from fedveil.testing.states import first_state

POPULATION, ROUNDS = 40, 1500
SAMPLED = {events.PoissonSampled: "add-remove", events.SampledWithoutReplacement: "replace-one"}
RELEASES: tuple[events.Release, ...] = (
    events.GaussianRelease(1.5),
    events.ApproximateRelease(1.0, 1e-6),
    events.Dominated(events.GaussianRelease(1.5), 1e-9, 1e-12),
    events.Proven((events.GaussianRelease(1.5), events.ApproximateRelease(1.0, 1e-6))),
)


def check_cohort(cohort: Cohort) -> None:
    """Raise unless the draws of 1,500 rounds, with 40 clients, are what the cohort declares.

    Every draw is a set of clients that follows from its stream alone. As many take part on average
    as `expected` says, and nobody more often than the cap. If the cohort amplifies, or calls its
    draws independent or coins, each client comes equally often, in rounds that are independent of
    each other, and the theorem behind `amplify` is one of its own adjacency at no smaller a rate.

    A law is compared by means, variances and pairs of rounds. A sampler that deviates in another
    way, or from another seed, passes.
    """
    _draws_are_sets(cohort)
    _draws_from_its_stream(cohort)
    _denominator_is_public(cohort)
    _as_many_as_expected(cohort)
    if _relies_on_its_law(cohort):
        _law_of_the_draws(cohort)
    _cap_holds(cohort)
    _amplifies_under_its_own_adjacency(cohort)
    _sure_ones_arrive(cohort)


def _draws_from_its_stream(cohort: Cohort) -> None:
    def draws(rng: np.random.Generator) -> np.ndarray:
        kept = _first_state(cohort)
        return np.concatenate([cohort.draw(POPULATION, rng, kept) for _ in range(50)])

    assert repeatable(draws), (
        f"{cohort} draws other clients from an equal stream; draw from `rng` alone"
    )


def attendance(cohort: Cohort, rounds: int = ROUNDS, seed: int = 0) -> np.ndarray:
    """Who took part: bool [rounds, population], without regard to a cap."""
    rng = np.random.default_rng(seed)
    came = np.zeros((rounds, POPULATION), dtype=bool)
    kept = _first_state(cohort)
    for row in came:
        drawn = cohort.draw(POPULATION, rng, kept)
        row[drawn] = True
        if cohort.cap is None:
            kept = cohort.step(kept, drawn)
    return came


def _first_state(cohort: Cohort) -> Tensors:
    begin = Begin(torch.zeros(1), POPULATION, ROUNDS, np.random.default_rng(9))
    return first_state(cohort, begin)


def _draws_are_sets(cohort: Cohort) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        drawn = cohort.draw(POPULATION, rng, _first_state(cohort))
        assert np.issubdtype(drawn.dtype, np.integer), f"{cohort} drew {drawn.dtype}, not indexes"
        assert (np.diff(drawn) > 0).all(), f"{cohort} drew {drawn}: not ascending, or one twice"
        inside = not len(drawn) or (drawn[0] >= 0 and drawn[-1] < POPULATION)
        assert inside, f"{cohort} drew {drawn}, beyond its population of {POPULATION}"


def _denominator_is_public(cohort: Cohort) -> None:
    """`expected` is a function of the population alone."""
    before, rng = cohort.expected(POPULATION), np.random.default_rng(2)
    for _ in range(20):
        drawn = cohort.draw(POPULATION, rng, _first_state(cohort))
        after = cohort.expected(POPULATION)
        assert after == before, (
            f"{cohort}: the denominator went from {before} to {after} after {len(drawn)} took part"
        )


def _as_many_as_expected(cohort: Cohort) -> None:
    """The statement says so, and clients bring shares of noise by it."""
    found, wanted = float(attendance(cohort).sum(axis=1).mean()), cohort.expected(POPULATION)
    error = 5 * math.sqrt(wanted / ROUNDS) + 0.01 * wanted
    assert abs(found - wanted) <= error, (
        f"{cohort}: {found:.3g} take part on average, not the expected {wanted:.3g}"
    )


def _relies_on_its_law(cohort: Cohort) -> bool:
    amplifies = any(cohort.amplify(release, POPULATION) != release for release in RELEASES)
    return amplifies or cohort.independent or cohort.coin(POPULATION) is not None


def _law_of_the_draws(cohort: Cohort) -> None:
    """Each comes with probability expected/n; rounds are independent; sizes vary as declared."""
    came = attendance(cohort)
    rate = cohort.expected(POPULATION) / POPULATION
    error = 5 * math.sqrt(rate * (1 - rate) / ROUNDS) + 1e-12
    often = came.mean(axis=0)
    assert (abs(often - rate) <= error).all(), (
        f"{cohort}: some take part in {often.max():.3f}, some in {often.min():.3f} of the rounds, "
        f"not {rate:.3f}"
    )
    coin = cohort.coin(POPULATION)
    assert coin is None or coin >= rate * (1 - 1e-9), f"{cohort}: coins of {coin}, drawn at {rate}"
    sizes = came.sum(axis=1)
    spread, wanted = float(sizes.var()), 0.0 if cohort.fixed else POPULATION * rate * (1 - rate)
    assert abs(spread - wanted) <= 0.2 * wanted, (
        f"{cohort}: cohort sizes vary by {spread:.3g}, not {wanted:.3g}"
    )
    for lag in range(1, math.ceil(1 / rate) + 2):
        _rounds_are_independent(cohort, came, rate, lag)


def _rounds_are_independent(cohort: Cohort, came: np.ndarray, rate: float, lag: int) -> None:
    """Who came in one round comes as often as anyone else `lag` rounds later."""
    again = float((came[:-lag] & came[lag:]).mean())
    pairs = (ROUNDS - lag) * POPULATION
    error = 6 * rate * math.sqrt((1 - rate**2) / pairs) + 1e-12
    assert abs(again - rate**2) <= error, (
        f"{cohort}: {again:.4f} take part in a round and again {lag} later, not {rate**2:.4f}: "
        "rounds are not independent, so this sampling does not amplify as declared"
    )


def _cap_holds(cohort: Cohort) -> None:
    """None takes part more often than the cap says; under it a sampled one is still drawn."""
    if cohort.cap is None:
        return
    taken, rng = np.zeros(POPULATION, dtype=np.int64), np.random.default_rng(3)
    kept = _first_state(cohort)
    for _ in range(ROUNDS):
        drawn = cohort.draw(POPULATION, rng, kept)
        kept = cohort.step(kept, drawn)
        taken[drawn] += 1
    assert taken.max() <= cohort.cap, f"{cohort}: a client took part {taken.max()} times"
    if _relies_on_its_law(cohort):
        least = taken.min()
        assert least == cohort.cap, f"{cohort}: a client took part {least} times only"


def _amplifies_under_its_own_adjacency(cohort: Cohort) -> None:
    rate = cohort.expected(POPULATION) / POPULATION
    for release in RELEASES:
        amplified = cohort.amplify(release, POPULATION)
        for event in amplified.ways if isinstance(amplified, events.Proven) else (amplified,):
            _check_sampling(cohort, event, rate)
        gain = accounting.epsilon(amplified, 1e-5) - accounting.epsilon(release, 1e-5)
        assert gain <= 1e-3, f"{cohort}: sampling makes {release} cost more, by {gain}"
    silence = events.NonPrivate("nothing is hidden")
    kept = cohort.amplify(silence, POPULATION)
    assert isinstance(kept, events.NonPrivate), f"{cohort} makes a release private that is not"


def _check_sampling(cohort: Cohort, event: events.Round, rate: float) -> None:
    """The theorem used fits the adjacency and the law, and its rate is not below the true one."""
    if isinstance(event, events.Dominated):
        escape = event.escape / 1e-9
        event = event.by
        sampled = isinstance(event, events.PoissonSampled | events.SampledWithoutReplacement)
        least = rate if sampled else 1.0
        assert escape >= least * (1 - 1e-9), f"{cohort}: escapes are scaled by {escape}, not {rate}"
    if not isinstance(event, events.PoissonSampled | events.SampledWithoutReplacement):
        return
    wanted = SAMPLED[type(event)]
    assert cohort.adjacency == wanted, (
        f"{cohort} is accounted as {type(event).__name__}, a theorem of {wanted} adjacency, but "
        f"its own is {cohort.adjacency}"
    )
    if isinstance(event, events.PoissonSampled):
        poisson, claimed = True, event.rate
    else:
        poisson, claimed = False, event.cohort / event.population
    assert poisson != cohort.fixed, f"{cohort} is accounted as {type(event).__name__}"
    assert claimed >= rate * (1 - 1e-9), f"{cohort}: amplified at {claimed}, drawn at {rate}"
    dependent = cohort.fixed and cohort.cap is not None
    assert not dependent, f"{cohort}: a cap makes fixed-size draws depend on earlier ones"


def _sure_ones_arrive(cohort: Cohort) -> None:
    """A fixed cohort brings at least as many as are sure; a random one promises nobody."""
    sure = cohort.min_honest(POPULATION)
    assert 1 <= sure <= POPULATION, f"{cohort} declares {sure} honest clients of {POPULATION}"
    if cohort.fixed:
        least = int(attendance(cohort, 50).sum(axis=1).min())
        assert least >= sure, f"{cohort} declares {sure} honest clients, but only {least} took part"
    elif cohort.honest is None:
        assert sure == 1, f"{cohort} declares {sure} honest clients, but may be empty"
