"""What the papers prove or print, as tests of the algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedveil import algorithms
from fedveil.data.problems import (
    QuadraticProblem,
    das2022_quadratics,
    heterogeneous_quadratic,
    zhang2022_claim21,
    zhang2022_table4,
)
from fedveil.engines.dense import DenseEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine
from fedveil.loop import Info, State, begin, run_round
from fedveil.parts.noise import NoNoise
from fedveil.privacy.calibrate import Budget, calibrate
from fedveil.recipe import Recipe
from tests.statistics.least_squares import LeastSquaresEngine


def walk(
    recipe: Recipe,
    problem: QuadraticProblem,
    rounds: int,
    key: int = 0,
    engine: Engine | None = None,
) -> Iterator[tuple[State, Info]]:
    """The state and what was seen after each round."""
    data = problem.data.by_example() if recipe.unit == "example" else problem.data
    engine = engine or LeastSquaresEngine()
    state = begin(recipe, problem.start, data, rounds, key)
    for _ in range(rounds):
        state, info = run_round(recipe, state, data, engine, key)
        yield state, info


def solve(recipe: Recipe, problem: QuadraticProblem, rounds: int, key: int = 0) -> list[Tensor]:
    """The models x_0 … x_K."""
    return [problem.start, *(state.x for state, _ in walk(recipe, problem, rounds, key))]


PROBLEMS = {
    "zhang2022_table4": zhang2022_table4,
    "zhang2022_claim21": lambda: zhang2022_claim21(1.0, 5.0),
    "heterogeneous_quadratic": lambda: heterogeneous_quadratic(10, 5, 0),
    "das2022_quadratics": lambda: das2022_quadratics(0),
}


@pytest.fixture(scope="module", params=PROBLEMS)
def problem(request: pytest.FixtureRequest) -> QuadraticProblem:
    return PROBLEMS[request.param]()


@pytest.mark.parametrize("recipe", [
    algorithms.clipped_fedavg(0.5, learning_rate=1e-3, steps=20),
    algorithms.alpha_normec(beta=0.1, alpha=0.1, learning_rate=0.02),
    algorithms.dp_sgd(clip=0.3, rate=0.5, learning_rate=0.2, noise_multiplier=0.5),
], ids=lambda recipe: recipe.name)  # fmt: skip
def test_the_engine_of_these_tests_is_fedveil_s_own(
    problem: QuadraticProblem, recipe: Recipe
) -> None:
    """Three rounds by the dense engine, which other tests hold to all others."""
    dense = DenseEngine(Task(problem.model, "half_squared"), 256)
    expected = [state.x for state, _ in walk(recipe, problem, 3, engine=dense)]
    for found, true in zip(solve(recipe, problem, 3)[1:], expected, strict=True):
        assert torch.allclose(found, true, rtol=1e-4, atol=1e-5)
        assert not torch.equal(true, problem.start)


@pytest.mark.parametrize(
    ("steps", "rate", "clip", "limit"),
    [
        (1, 0.02, None, 0.0),
        (300, 0.05, None, 13 / 9),
        (1, 1.0, 1.0, 1 / 2),
        (300, 0.05, 1.0, 2 / 3),
    ],
    ids=["Q=1,c=∞", "Q=∞,c=∞", "Q=1,c=1", "Q=∞,c=1"],
)
def test_zhang_2022_table_4(steps: int, rate: float, clip: float | None, limit: float) -> None:
    """The four stationary points of clipped FedAvg; 300 local steps stand for Q = ∞ (0.95^300).

    The server's rate only sets the speed, so half a step makes the walk to the limit steady.
    """
    length = {"learning_rate": rate, "steps": steps, "server_rate": 0.5}
    recipe = (
        algorithms.fedavg(**length) if clip is None else algorithms.clipped_fedavg(clip, **length)
    )
    problem = zhang2022_table4()
    assert float(solve(recipe, problem, 60)[-1]) == pytest.approx(limit, abs=2e-4)
    at_limit = dataclasses.replace(problem, start=torch.tensor([limit], dtype=torch.float32))
    assert float(solve(recipe, at_limit, 1)[-1]) == pytest.approx(limit, abs=1e-5)


@pytest.mark.parametrize(("c", "k"), [(1.0, 5.0), (0.5, 8.0)])
@pytest.mark.parametrize(("rate", "steps"), [(0.3, 1), (0.2, 4)])
def test_zhang_2022_claim_2_1(c: float, k: float, rate: float, steps: int) -> None:
    """Model clipping stops at λc/(3 − 2λ).  A round leaves 2λ/3 of the way, less than half."""
    problem = zhang2022_claim21(c, k)
    factor = (1 - rate) ** steps
    models = algorithms.model_clipped_fedavg(c, learning_rate=rate, steps=steps)
    stopped = float(solve(models, problem, 60)[-1])
    assert stopped == pytest.approx(factor * c / (3 - 2 * factor), rel=1e-4)


@pytest.mark.parametrize(("c", "k"), [(1.0, 5.0), (0.5, 8.0)])
def test_zhang_2022_claim_2_2(c: float, k: float) -> None:
    """Clipping differences reaches (k − 1)c/3, beyond c.

    It asks for a rate at which no difference is clipped at the optimum: 0.1/k. With the server's
    rate of 5 each round leaves 1 − 0.5/k of the distance; 200 rounds leave 3e-6 at most.
    """
    problem = zhang2022_claim21(c, k)
    optimum = (k - 1) * c / 3
    assert float(problem.optimum) == pytest.approx(optimum)
    gentle = algorithms.clipped_fedavg(c, learning_rate=0.1 / k, steps=1, server_rate=5.0)
    assert float(solve(gentle, problem, 200)[-1]) == pytest.approx(optimum, rel=1e-3)


def test_error_compensation_reaches_the_optimum_where_clipping_stops_short() -> None:
    problem = heterogeneous_quadratic(clients=10, dim=5, seed=0)
    # The server's rate only sets the speed: what clipping ends at depends on C and η.
    clipped = algorithms.clipped_fedavg(clip=0.01, learning_rate=0.1, steps=1, server_rate=10.0)
    path = solve(clipped, problem, 600)
    stuck = problem.suboptimality(path[-1])
    assert stuck == pytest.approx(problem.suboptimality(path[-100]), rel=1e-2)  # it has ended there
    normec = algorithms.alpha_normec(
        beta=0.1, alpha=0.1, learning_rate=0.02, server_rate=0.04, normalize_server=False
    )
    reached = problem.suboptimality(solve(normec, problem, 500)[-1])
    assert reached < 1e-5
    assert stuck > 100 * max(reached, 1e-7)


def test_fed_alpha_normec_with_one_step_and_full_participation_is_alpha_normec() -> None:
    problem = heterogeneous_quadratic(clients=8, dim=4, seed=1)
    options = {"beta": 0.2, "alpha": 0.05, "learning_rate": 0.1, "noise_multiplier": 0.3}
    for normalize in (True, False):
        one = algorithms.alpha_normec(**options, normalize_server=normalize)
        other = algorithms.fed_alpha_normec(
            rate=1.0, steps=1, **options, normalize_server=normalize, update="everyone"
        )
        for x, y in zip(solve(one, problem, 30), solve(other, problem, 30), strict=True):
            assert torch.equal(x, y)


def test_dp_lsgd_with_one_step_is_dp_sgd() -> None:
    problem = heterogeneous_quadratic(clients=8, dim=4, seed=2)
    options = {"clip": 0.3, "rate": 0.5, "learning_rate": 0.2, "noise_multiplier": 0.5}
    one = solve(algorithms.dp_sgd(**options), problem, 20)
    other = solve(algorithms.dp_lsgd(**options, steps=1), problem, 20)
    more = solve(algorithms.dp_lsgd(**options, steps=2), problem, 20)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert not torch.equal(one[-1], more[-1])


def test_dp_sgd_is_dp_fedavg_over_single_examples() -> None:
    problem = heterogeneous_quadratic(clients=8, dim=4, seed=3)
    sgd = algorithms.dp_sgd(clip=0.3, rate=0.5, learning_rate=0.2, noise_multiplier=0.5)
    fedavg = algorithms.dp_fedavg(
        clip=0.3, rate=0.5, learning_rate=0.2, steps=1, noise_multiplier=0.5,
        report=sgd.report,
    )  # fmt: skip
    single = dataclasses.replace(problem, data=problem.data.by_example())
    for x, y in zip(solve(sgd, problem, 20), solve(fedavg, single, 20), strict=True):
        assert torch.equal(x, y)


def test_dp_sgd_is_the_textbook_formula() -> None:
    """Without noise: x − (1/(nq))·Σ clip(η∇f_j(x), c) over all examples when q = 1."""
    problem = heterogeneous_quadratic(clients=5, dim=3, seed=4)
    recipe = dataclasses.replace(
        algorithms.dp_sgd(clip=0.4, rate=1.0, learning_rate=0.5), noise=NoNoise()
    )
    x = problem.start
    inputs, targets = problem.data.inputs, problem.data.labels
    gradients = 0.5 * inputs * (inputs @ x - targets)[:, None]
    factor = (0.4 / gradients.norm(dim=1)).clamp_max(1.0)
    expected = x - (factor[:, None] * gradients).sum(dim=0) / len(targets)
    assert torch.allclose(solve(recipe, problem, 1)[1], expected, atol=1e-5)


@pytest.mark.parametrize(("c", "seed"), [(40.0, 0), (100.0, 2)])
def test_das_2022_section_5_3_normalizing_never_ends_above_clipping(c: float, seed: int) -> None:
    """Nor does its signal to noise lie below (Fig. 1 and 2).

    n = 100, d = 200, E = 20, K = 500, (5, 1e-6), full participation, the same noise for both. One
    problem each for the smallest and the largest C: papers/das2022/figure1.toml and figure2.toml
    have all C on six problems.
    """
    problem = das2022_quadratics(seed)
    options = {"rate": 1.0, "learning_rate": 1e-3, "steps": 20}
    clip = calibrate(algorithms.dp_fedavg(clip=c, **options), Budget(5, 1e-6), 500, 200, 100)
    normalize = dataclasses.replace(algorithms.dp_norm_fedavg(scale=c, **options), noise=clip.noise)
    clipped = list(walk(clip, problem, 500, key=seed))
    normalized = list(walk(normalize, problem, 500, key=seed))
    ends = [problem.suboptimality(path[-1][0].x) for path in (clipped, normalized)]
    assert ends[1] <= ends[0]
    ratios = [[info.signal / info.noise for _, info in path] for path in (clipped, normalized)]
    # Signal to noise, smoothed over ten rounds as the paper's figure is over three runs.
    smooth = [torch.tensor(ratio).reshape(50, 10).mean(dim=1) for ratio in ratios]
    assert (smooth[1] >= smooth[0] * (1 - 1e-3)).all()
