"""Noise, rounds and cohorts for a budget: on the right side of ε, and within one percent of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.errors import UserError
from fedveil.parts.cohort import Everyone, FixedSize, Poisson
from fedveil.parts.discrete import Binomial, DiscreteGaussian, TruncatedDiscreteLaplace
from fedveil.parts.noise import Gaussian, Noise, RoundedGaussian
from fedveil.privacy.calibrate import (
    MOST_ROUNDS,
    TOLERANCE,
    Budget,
    calibrate,
    calibrated,
    largest_cohort,
    least_level,
    most_rounds,
)
from fedveil.privacy.secure import secured
from fedveil.recipe import Recipe, View

DIM, CLIENTS, DELTA = 20, 500, 1e-5


@dataclass(frozen=True)
class Case:
    """A recipe without noise, and the budget of a run."""

    recipe: Recipe
    epsilon: float
    rounds: int

    @property
    def budget(self) -> Budget:
        return Budget(self.epsilon, DELTA)

    def calibrate(self) -> Recipe:
        return calibrate(self.recipe, self.budget, self.rounds, DIM, CLIENTS)

    def spends(self, recipe: Recipe, rounds: int | None = None) -> float:
        spent = recipe.spent(DIM, CLIENTS, self.rounds if rounds is None else rounds)
        return accounting.epsilon(spent, DELTA)


secagg, discrete = algorithms.dp_norm_fedavg_secagg, algorithms.dp_norm_fedavg_discrete
qtdl, binomial = algorithms.dp_norm_fedavg_qtdl, algorithms.dp_norm_fedavg_binomial
CASES = {
    "models, Poisson": Case(algorithms.dp_fedavg(rate=0.1), 2.0, 50),
    "models, fixed size": Case(algorithms.dp_norm_fedavg(clients=50), 2.0, 50),
    "models, capped Poisson": Case(algorithms.dp_fedavg(rate=0.1, cap=3), 2.0, 50),
    "models, capped fixed size": Case(algorithms.dp_fedavg(clients=50, cap=3), 3.0, 50),
    "models, everyone": Case(algorithms.alpha_normec(private=True), 4.0, 30),
    "models, rounded": Case(algorithms.dp_fedavg(rate=0.2, levels=64), 1.0, 20),
    "models, adaptive": Case(algorithms.dp_fedavg_adaptive(rate=0.1), 2.0, 20),
    "models, qtdl": Case(qtdl(clients=20, levels=4), 4.0, 3),
    "sum, fixed size": Case(secagg(clients=50), 4.0, 10),
    "sum, honest Poisson": Case(secagg(rate=0.1, honest=20), 4.0, 10),
    "sum, capped": Case(secagg(rate=0.1, honest=20, cap=2), 4.0, 10),
    "messages, Poisson": Case(discrete(rate=0.1), 8.0, 10),
    "messages, capped": Case(discrete(rate=0.1, cap=2), 8.0, 10),
    "messages, fixed size": Case(discrete(clients=50), 8.0, 10),
    "messages, qtdl": Case(replace(qtdl(clients=20, levels=4), view="messages"), 20.0, 3),
    "messages, binomial": Case(replace(binomial(clients=20, levels=16), view="messages"), 8.0, 3),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def some(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


def with_less(noise: Noise, factor: float) -> Noise:
    """The same noise, so many times smaller."""
    match noise:
        case Gaussian(multiplier) | RoundedGaussian(multiplier):
            return replace(noise, multiplier=multiplier / factor)
        case TruncatedDiscreteLaplace(alpha):
            return replace(noise, alpha=alpha * factor)
        case DiscreteGaussian(sigma):
            return replace(noise, sigma=sigma / factor)
        case Binomial(trials):
            return Binomial(2 * math.floor(trials / factor**2 / 2))
    raise AssertionError(noise)


# ---- noise


@ALL
def test_settled_noise_keeps_the_budget_and_one_percent_less_breaks_it(case: Case) -> None:
    recipe = case.calibrate()
    assert recipe.noise.calibrated
    assert 0.97 * case.epsilon < case.spends(recipe) <= case.epsilon
    less = replace(recipe, noise=with_less(recipe.noise, 1.01))
    assert case.spends(less) > case.epsilon
    assert replace(recipe, noise=case.recipe.noise) == case.recipe  # nothing else has changed


@some("sum, fixed size", "messages, Poisson", "messages, qtdl")
def test_a_larger_budget_needs_less_noise_and_more_rounds_need_more(case: Case) -> None:
    def deviation(epsilon: float, rounds: int) -> float:
        noise = calibrate(case.recipe, Budget(epsilon, DELTA), rounds, DIM, CLIENTS).noise
        match noise:
            case TruncatedDiscreteLaplace(alpha):
                return 1 / alpha
            case DiscreteGaussian(sigma):
                return sigma
        raise AssertionError(noise)

    here = deviation(case.epsilon, case.rounds)
    assert deviation(1.2 * case.epsilon, case.rounds) < here
    assert deviation(case.epsilon, 2 * case.rounds) > here


def test_a_capped_unit_needs_less_noise_where_the_server_is_trusted() -> None:
    def sigma(cap: int | None, view: View) -> float:
        recipe = replace(discrete(rate=0.5, cap=cap), view=view)
        return calibrate(recipe, Budget(8.0, DELTA), 32, DIM, CLIENTS).noise.sigma

    assert sigma(2, "models") == pytest.approx(sigma(None, "models") / 4, rel=0.1)  # √(32/2)
    assert sigma(32, "models") == sigma(None, "models")
    assert sigma(2, "messages") == sigma(None, "messages")


@settings(max_examples=200, deadline=None)
@given(
    scale=st.floats(1e-3, 1e3),
    power=st.floats(0.5, 2.5),
    target=st.floats(1e-2, 1e2),
    guess=st.floats(1e-2, 1e2),
)
def test_the_least_level_is_least_to_half_a_percent(scale, power, target, guess) -> None:
    def epsilon(level: float) -> float:
        return math.inf if level < 1e-4 else scale / level**power

    level = least_level(epsilon, target, guess)
    assert epsilon(level) <= target
    assert epsilon(level / (1 + TOLERANCE) * (1 - 1e-12)) > target


@pytest.mark.parametrize("guess", [0.01, 1.0, 300.0])
def test_the_least_level_of_an_epsilon_that_falls_in_steps(guess: float) -> None:
    """As that of whole trials does: never on the wrong side, whatever the steps."""
    for width in (0.5, 3.0, 17.0):
        level = least_level(lambda level, w=width: 100 / (w * math.ceil(level / w)), 3.3, guess)
        assert 100 / (width * math.ceil(level / width)) <= 3.3


@pytest.mark.parametrize("rounding", [1 - 1e-13, 1 + 1e-13])
def test_the_last_bits_of_epsilon_do_not_change_the_level(rounding: float) -> None:
    """They depend on the processor, and noise is seeded by the recipe with its level."""
    level = least_level(lambda level: 6.0 / level**1.3, 3.0, 0.7)
    found = least_level(lambda level: 6.0 * rounding / level**1.3, 3.0, 0.7 * rounding)
    assert found == level


def test_what_no_noise_can_do_is_refused() -> None:
    with pytest.raises(UserError, match="No amount of noise"):
        least_level(lambda level: math.inf, 1.0)
    recipe = replace(algorithms.dp_fedavg(rate=0.1), view="messages")
    with pytest.raises(UserError, match="no guarantee in view 'messages'"):
        calibrate(recipe, Budget(2.0, DELTA), 5, DIM, CLIENTS)


def test_settled_recipes_keep_their_noise_or_are_refused() -> None:
    case = CASES["models, everyone"]
    recipe = case.calibrate()
    assert calibrated(recipe, None, case.rounds, DIM, CLIENTS) is recipe
    assert calibrated(recipe, case.budget, case.rounds, DIM, CLIENTS) is recipe
    assert calibrated(case.recipe, case.budget, case.rounds, DIM, CLIENTS) == recipe
    with pytest.raises(
        UserError, match=r"spends ε = 4\.07 in 31 rounds, more than the budget of 4"
    ):
        calibrated(recipe, case.budget, case.rounds + 1, DIM, CLIENTS)
    with pytest.raises(UserError, match="alpha_normec has no privacy budget"):
        calibrated(case.recipe, None, case.rounds, DIM, CLIENTS)
    with pytest.raises(UserError, match="adds no noise"):
        calibrated(algorithms.fedavg(), case.budget, case.rounds, DIM, CLIENTS)


# ---- rounds


@some(
    "models, Poisson", "models, fixed size", "models, everyone", "models, rounded",
    "models, qtdl", "sum, fixed size", "sum, honest Poisson", "messages, Poisson",
    "messages, fixed size", "messages, qtdl", "messages, binomial",
)  # fmt: skip
def test_one_more_round_than_the_most_breaks_the_budget(case: Case) -> None:
    recipe, budget = case.calibrate(), Budget(1.7 * case.epsilon, DELTA)
    rounds = most_rounds(recipe, budget, DIM, CLIENTS)
    assert rounds > case.rounds
    assert case.spends(recipe, rounds) <= budget.epsilon < case.spends(recipe, rounds + 1)


@some("models, capped fixed size")
def test_capped_units_can_be_asked_for_ever(case: Case) -> None:
    assert most_rounds(case.calibrate(), case.budget, DIM, CLIENTS) == MOST_ROUNDS


@some("sum, capped", "messages, capped")
def test_an_adversary_who_keeps_the_cap_cannot_ask_for_ever(case: Case) -> None:
    assert most_rounds(case.calibrate(), case.budget, DIM, CLIENTS) == case.rounds


def test_too_little_noise_for_a_single_round_is_refused() -> None:
    recipe = algorithms.dp_fedavg(rate=0.5, noise_multiplier=0.3)
    with pytest.raises(UserError, match="a single round already"):
        most_rounds(recipe, Budget(0.5, DELTA), DIM, CLIENTS)


# ---- cohorts


@some("models, Poisson")
def test_one_percent_more_than_the_largest_rate_breaks_the_budget(case: Case) -> None:
    recipe, budget = case.calibrate(), Budget(1.6 * case.epsilon, DELTA)
    found = largest_cohort(recipe, budget, case.rounds, DIM, CLIENTS)
    assert isinstance(found.cohort, Poisson)
    assert case.spends(found) <= budget.epsilon
    more = replace(found, cohort=Poisson(1.01 * found.cohort.rate))
    assert case.spends(more) > budget.epsilon
    assert isinstance(recipe.cohort, Poisson)
    assert found.cohort.rate > 1.2 * recipe.cohort.rate
    assert replace(found, cohort=recipe.cohort) == recipe


@some("models, fixed size", "models, qtdl")
def test_one_client_more_than_the_largest_size_breaks_the_budget(case: Case) -> None:
    recipe, budget = case.calibrate(), Budget(1.3 * case.epsilon, DELTA)
    found = largest_cohort(recipe, budget, case.rounds, DIM, CLIENTS)
    assert isinstance(found.cohort, FixedSize)
    assert case.spends(found) <= budget.epsilon
    more = replace(found, cohort=FixedSize(found.cohort.clients + 1))
    assert case.spends(more) > budget.epsilon


def test_a_capped_rate_grows_until_the_cap_is_what_protects() -> None:
    """Hidden coins and the cap are two proofs: beyond some rate only the second counts."""
    case = CASES["models, capped Poisson"]
    recipe = case.calibrate()
    found = largest_cohort(recipe, case.budget, case.rounds, DIM, CLIENTS)
    assert isinstance(found.cohort, Poisson)
    assert found.cohort.cap == 3
    assert case.spends(found) <= case.epsilon
    assert case.spends(replace(found, cohort=Poisson(1.01 * found.cohort.rate, 3))) > case.epsilon
    noisy = replace(recipe, noise=Gaussian(8.0))
    everyone = largest_cohort(noisy, case.budget, case.rounds, DIM, CLIENTS)
    assert everyone.cohort == Poisson(1.0, 3)


@some("sum, fixed size", "sum, capped", "messages, Poisson", "messages, capped", "messages, qtdl")
def test_where_no_one_is_hidden_everyone_may_come(case: Case) -> None:
    found = largest_cohort(case.calibrate(), case.budget, case.rounds, DIM, CLIENTS)
    assert found.cohort.expected(CLIENTS) == CLIENTS
    assert case.spends(found) <= case.epsilon


def test_cohorts_that_cannot_be_chosen_are_refused() -> None:
    recipe = replace(algorithms.dp_fedavg(noise_multiplier=0.5), cohort=Everyone())
    with pytest.raises(
        UserError, match=r"cohort Everyone cannot be chosen.*Use Poisson or FixedSize"
    ):
        largest_cohort(recipe, Budget(1.0, DELTA), 5, DIM, CLIENTS)
    for little in (discrete(rate=0.1, sigma=1.0, support=9), qtdl(20, alpha=1.0, support=200)):
        with pytest.raises(UserError, match="even the smallest cohort exceeds"):
            largest_cohort(little, Budget(0.5, DELTA), 50, DIM, CLIENTS)


# ---- what was found once is not sought again

ANSWERS: list[Callable[[Case], object]] = [
    lambda case: case.calibrate(),
    lambda case: most_rounds(case.calibrate(), case.budget, DIM, CLIENTS),
    lambda case: largest_cohort(case.calibrate(), case.budget, case.rounds, DIM, CLIENTS),
]


@pytest.mark.parametrize("ask", ANSWERS, ids=["settle", "most_rounds", "largest_cohort"])
@some("models, qtdl", "sum, fixed size", "messages, Poisson")
def test_the_same_question_is_not_accounted_twice(case: Case, ask, monkeypatch) -> None:
    first = ask(case)

    def never(*_: object) -> float:
        raise AssertionError("accounted again")

    monkeypatch.setattr(accounting, "epsilon", never)
    monkeypatch.setattr(accounting, "quick_epsilon", never)
    assert ask(case) == first
    with pytest.raises(AssertionError, match="accounted again"):
        ask(replace(case, epsilon=1.001 * case.epsilon))


# ---- adaptive clips


@pytest.mark.parametrize("make", [lambda recipe: recipe, secured], ids=["seeded", "secure"])
def test_a_count_with_too_little_noise_is_named_and_so_is_enough(
    make: Callable[[Recipe], Recipe],
) -> None:
    """Six of sixty clients a round: a twentieth of them is next to no noise for the count."""
    budget = Budget(2.0, DELTA)
    with pytest.raises(UserError, match=r"noise with standard deviation 0\.3") as told:
        calibrate(make(algorithms.dp_fedavg_adaptive()), budget, 20, DIM, 60)
    advised = re.search(r"Give count_noise = (\S+) or more", str(told.value))
    assert advised is not None
    enough = make(algorithms.dp_fedavg_adaptive(count_noise=float(advised[1])))
    found = calibrate(enough, budget, 20, DIM, 60)
    assert accounting.epsilon(found.spent(DIM, 60, 20), DELTA) <= 2.0


def test_what_renyi_divergences_cannot_show_is_still_looked_for() -> None:
    """The quick guess finds no level for this budget, and the exact accounting does."""
    recipe = algorithms.dp_fedavg_adaptive()
    found = calibrate(recipe, Budget(8.0, DELTA), 5, DIM, 60)
    assert 7.5 < accounting.epsilon(found.spent(DIM, 60, 5), DELTA) <= 8.0
