"""Refuse user-defined parts whose draws visibly contradict what they are accounted as.

Made-up rounds before the first one show the common mistakes: a rate in percent, a cohort that is
not drawn as its theorem needs, too little noise, or noise that depends on earlier noise. A correct
part is refused with a probability below 1e-6. `fedveil.testing` has the sharper checks, and
neither is a proof (docs/privacy.md, "User-defined parts").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting import events
from fedveil.accounting.deviation import least_deviation
from fedveil.accounting.norms import Norms
from fedveil.engines.asking import (
    ask,
    bound_at,
    called,
    cohort_after,
    draw_of,
    noise_of_round,
    of_each,
)
from fedveil.errors import UserError
from fedveil.parts.bound import Bound
from fedveil.parts.cohort import Cohort
from fedveil.parts.noise import Noise
from fedveil.parts.part import Begin, Tensors, foreign
from fedveil.recipe import Recipe

ROUNDS = 64  # made-up rounds from which a law is judged
NUMBERS = 4096  # drawn for a deviation, whose error is then about 1%
ENOUGH = 0.8  # of a deviation or variance
RARE = 1e-9  # the probability that a correct cohort shows such a client
EXAMPLES = 20  # of a silo in a trial
Law = Callable[[int, np.random.Generator], Tensor]  # noise, from the arrived clients and a stream


def refuse_other_laws(recipe: Recipe, x: Tensor, population: int, rounds: int) -> None:
    """Refuse user-defined cohorts, bounds and noise that do other than they are accounted as."""

    def begun(part: Cohort | Bound | Noise) -> Tensors:
        public = recipe.cohort.expected(population), recipe.noise_of_mean(len(x), population)
        rng = np.random.default_rng(0)
        found: Tensors = ask(part, "initial_state", Begin(x, population, rounds, rng, *public))
        return found

    cohort, bound, noise = recipe.cohort, recipe.bound, recipe.noise
    if foreign(cohort) and _relies_on_draws(recipe, len(x), population):
        _check_cohort(cohort, population, begun(cohort))
    if recipe.by_record:
        for inner in recipe.insides(population):
            refuse_other_laws(inner, x, EXAMPLES, rounds)
        return
    if foreign(bound):
        _check_bound(recipe, bound, begun(bound), len(x), population)
    now = bound_at(bound, begun(bound)) if bound.adapts else bound
    message = recipe.message(len(x), now) if noise.calibrated else None
    if foreign(noise) and recipe.private and message is not None and message.bounded:
        _check_noise(noise, message, recipe.cohort.expected(population), begun(noise))


# Cohorts


def _relies_on_draws(recipe: Recipe, dim: int, population: int) -> bool:
    """Whether the accounting uses that units are drawn at random."""
    cohort, release = recipe.cohort, recipe.release(dim, population, "models")
    if isinstance(release, events.NonPrivate) or cohort.expected(population) >= population:
        return False
    return cohort.coin(population) is not None or cohort.amplify(release, population) != release


def _check_cohort(cohort: Cohort, population: int, state: Tensors) -> None:
    """Units come as often as `expected` says, in the first round and, uncapped, in later ones."""
    _check_sizes(cohort, population, state)
    if cohort.cap is not None:
        return
    for round in range(5):
        drawn = draw_of(cohort, population, np.random.default_rng(ROUNDS + round), state)
        state = cohort_after(cohort, state, drawn)
    _check_sizes(cohort, population, state)


def _check_sizes(cohort: Cohort, population: int, state: Tensors) -> None:
    """Sizes have the mean and the variance of the theorem, and no unit comes too often."""
    from scipy.stats import binom

    expected = cohort.expected(population)
    sizes, taken = [], np.zeros(population, dtype=np.int64)
    for seed in range(ROUNDS):
        drawn = draw_of(cohort, population, np.random.default_rng(seed), state)
        taken[drawn] += 1
        sizes.append(len(drawn))
    rate = min(expected / population, 1.0)
    spread = 0.0 if cohort.fixed else population * rate * (1 - rate)
    seats = ROUNDS * population
    least, most = binom.ppf(RARE, seats, rate), binom.isf(RARE, seats, rate)
    if cohort.fixed:
        least = most = ROUNDS * expected
    if not least * (1 - 1e-9) <= sum(sizes) <= most * (1 + 1e-9):
        raise _other_law(
            cohort, f"drew {np.mean(sizes):.4g} units on average, but expects {expected:.4g}"
        )
    if spread >= 1 and not 0.2 < np.var(sizes) / spread < 4:
        raise _other_law(
            cohort,
            f"drew cohorts whose sizes vary by {np.var(sizes):.3g}, but independent draws vary by "
            f"{spread:.3g}",
        )
    if taken.max() > binom.isf(RARE / population, ROUNDS, rate):
        raise _other_law(
            cohort,
            f"drew one unit in {taken.max()} of {ROUNDS} rounds, but the rate is {rate:.3g}",
        )


def _other_law(cohort: Cohort, found: str) -> UserError:
    return UserError(
        f"{called(cohort)} {found} in made-up rounds, so its `amplify` or `coin` does not hold. "
        "Correct the draws, or do not define these methods."
    )


# Bounds


def _check_bound(recipe: Recipe, bound: Bound, state: Tensors, dim: int, population: int) -> None:
    """What a bound does to an update does not depend on other updates, or is accounted."""
    _refuse_unaccounted_counts(recipe, bound, state, population)
    now = bound_at(bound, state) if bound.adapts else bound
    direction = torch.ones(1, dim) / math.sqrt(dim)

    def answer(length: float) -> Tensor:
        if now.radial:
            return of_each(now, now.scale, torch.tensor([length], dtype=torch.float64))
        return of_each(now, now.rows, direction * length)

    for length, other in ((1.0, 1e6), (1e6, 1.0)):
        before, _, after = answer(length), answer(other), answer(length)
        if not torch.equal(before.nan_to_num(), after.nan_to_num()):
            raise UserError(
                f"{called(now)} bounds an update of norm {length:g} otherwise after one of norm "
                f"{other:g}, so a client's message depends on other clients. Keep nothing between "
                "calls."
            )


def _refuse_unaccounted_counts(
    recipe: Recipe, bound: Bound, state: Tensors, population: int
) -> None:
    if not bound.adapts or not recipe.private:
        return
    release, expected = events.GaussianRelease(1.0), recipe.cohort.expected(population)
    arrived = max(round(expected), 1)
    found = [
        ask(bound, "step", state, short, arrived, expected, np.random.default_rng(0))
        for short in (0, arrived)
    ]
    counts = any(not torch.equal(found[0][name], found[1][name]) for name in found[0])
    if counts and bound.joined(release, recipe.adjacency(), expected) == release:
        raise UserError(
            f"{called(bound)} uses in `step` how many updates were short, which depends on every "
            "client, but `joined` accounts for nothing. Add noise to the count, and account for it."
        )


# Noise


def _check_noise(noise: Noise, message: Norms, expected: float, state: Tensors) -> None:
    """Every round has the noise of its event, whoever arrives and whatever was drawn before."""
    if noise.on_messages:
        _check_amount(noise, partial(_of_message, noise, message), message, 1.0, expected, 1)
        return
    for arrived in {0, max(round(expected), 1), 3 * max(round(expected), 1)}:
        law = partial(_on_sum, noise, message, expected, state)
        _check_amount(noise, law, message, expected, expected, arrived)
    if noise.at == "client":
        _check_shares(noise, message, expected, state)
    if not noise.correlated:
        _check_later_rounds(noise, message, expected, state)


def _on_sum(
    noise: Noise,
    message: Norms,
    expected: float,
    state: Tensors,
    arrived: int,
    rng: np.random.Generator,
) -> Tensor:
    grid = (message.grid or 1.0) if noise.needs_grid else 1.0
    return noise_of_round(noise, message, arrived, expected, rng, state)[0].double() * grid


def _of_message(noise: Noise, message: Norms, arrived: int, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(ask(noise, "each", message, rng)).double() * (message.grid or 1.0)


def _needed(noise: Noise, message: Norms, shares: float, expected: float) -> float:
    return least_deviation(noise.event(message, message, shares, expected), message.l2)


def _check_amount(
    noise: Noise, law: Law, message: Norms, shares: float, expected: float, arrived: int
) -> None:
    needed = _needed(noise, message, shares, expected)
    if needed == 0:
        return
    drawn = _sample(law, message.dim, arrived)
    found = float(drawn.square().mean().sqrt())
    if found < ENOUGH * needed:
        raise UserError(
            f"{called(noise)} drew a standard deviation of {found:.4g} when {arrived} of "
            f"{expected:.4g} clients arrived, but its event is that of {needed:.4g}. Correct "
            "`event`, or the draws."
        )
    alone = drawn.square().mean(0).sqrt()
    if float((alone < 0.1 * needed).double().mean()) > 0.5:
        raise UserError(
            f"{called(noise)} adds no noise to most coordinates. Draw a number for each of them."
        )
    if message.dim > 1 and float((drawn[:, 1:] * drawn[:, :-1]).mean()) > 0.5 * found**2:
        raise UserError(
            f"{called(noise)} adds the same noise to neighbouring coordinates, and their "
            "differences show. Draw a number for each coordinate."
        )


def _sample(law: Law, dim: int, arrived: int) -> Tensor:
    """Several draws, float64 [draws, dim]."""
    streams = max(math.ceil(NUMBERS / dim), 4)
    return torch.stack([law(arrived, np.random.default_rng(seed)) for seed in range(streams)])


def _check_shares(noise: Noise, message: Norms, expected: float, state: Tensors) -> None:
    """If one client's noise is accounted alone, the sum has the noise of all that arrived."""
    arrived = max(round(expected), 1)
    needed = math.sqrt(arrived) * _needed(noise, message, 1.0, expected)
    drawn = _sample(partial(_on_sum, noise, message, expected, state), message.dim, arrived)
    found = float(drawn.square().mean().sqrt())
    if found < ENOUGH * needed:
        raise UserError(
            f"{called(noise)} is added by each client, but the noise of {arrived} clients together "
            f"has a standard deviation of {found:.4g}, and `event` with noise_shares = 1 is that "
            f"of {needed:.4g}. Account for noise_shares of the expected clients."
        )


def _check_later_rounds(noise: Noise, message: Norms, expected: float, state: Tensors) -> None:
    """Noise is a function of the round's stream, and no less of it in later rounds."""
    arrived = max(round(expected), 1)
    later = list(_states(noise, message, expected, state, arrived))
    law = [partial(_on_sum, noise, message, expected, kept) for kept in later]
    one, other = (law[n](arrived, np.random.default_rng(0)) for n in (0, 1))
    if not torch.equal(one, other):
        raise UserError(
            f"{called(noise)} draws noise that depends on the noise of earlier rounds, but is "
            "accounted as independent. Draw from the rng alone, or use BandedNoise or BLTNoise."
        )
    for each in law:
        _check_amount(noise, each, message, expected, expected, arrived)


def _states(
    noise: Noise, message: Norms, expected: float, state: Tensors, arrived: int
) -> Iterator[Tensors]:
    """Two states after one round each, with other noise, and one after four rounds."""
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        yield noise_of_round(noise, message, arrived, expected, rng, state)[1]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        state = noise_of_round(noise, message, arrived, expected, rng, state)[1]
    yield state
