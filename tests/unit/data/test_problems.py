from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil.data.problems import (
    QuadraticProblem,
    das2022_quadratics,
    heterogeneous_quadratic,
    zhang2022_claim21,
    zhang2022_table4,
)
from fedveil.errors import UserError
from fedveil.models.losses import half_squared

PROBLEMS = {
    "das2022_quadratics": lambda: das2022_quadratics(0),
    "small das2022_quadratics": lambda: das2022_quadratics(1, "near", 30, dim=12, rank=3),
    "zhang2022_table4": zhang2022_table4,
    "zhang2022_claim21": lambda: zhang2022_claim21(2.0, 5.0),
    "heterogeneous_quadratic": lambda: heterogeneous_quadratic(5, 4, seed=0),
}


@pytest.fixture(scope="module", params=PROBLEMS)
def problem(request: pytest.FixtureRequest) -> QuadraticProblem:
    return PROBLEMS[request.param]()


def client_loss(problem: QuadraticProblem, client: int, x: Tensor) -> Tensor:
    examples = problem.data.client(client)
    return half_squared(examples.inputs.double() @ x, examples.labels.double()).mean()


def mean_loss(problem: QuadraticProblem, x: Tensor) -> Tensor:
    clients = range(problem.data.clients)
    return torch.stack([client_loss(problem, client, x) for client in clients]).mean()


def test_gradient_vanishes_at_the_optimum_and_nowhere_near_the_start(
    problem: QuadraticProblem,
) -> None:
    norms = []
    for point in (problem.optimum, problem.start.double()):
        x = point.clone().requires_grad_()
        norms.append(float(torch.autograd.grad(mean_loss(problem, x), x)[0].norm()))
    assert norms[0] < 1e-10
    assert norms[1] > 1e-3


def test_loss_is_the_mean_over_clients_and_suboptimality_its_excess(
    problem: QuadraticProblem,
) -> None:
    x = problem.start + 0.5
    assert problem.loss(x) == pytest.approx(float(mean_loss(problem, x.double())), rel=1e-10)
    excess = problem.loss(x) - problem.loss(problem.optimum)
    assert problem.suboptimality(x) == pytest.approx(excess, rel=1e-6)
    assert problem.suboptimality(problem.optimum) == 0


def test_model_is_at_the_start_and_computes_the_rows_products(problem: QuadraticProblem) -> None:
    inputs = problem.data.inputs
    outputs = problem.model(inputs).detach()
    torch.testing.assert_close(outputs, inputs @ problem.start, rtol=1e-4, atol=1e-4)
    assert (inputs.dtype, problem.start.dtype) == (torch.float32, torch.float32)
    assert (problem.data.labels.dtype, problem.optimum.dtype) == (torch.float32, torch.float64)


def test_das2022_clients_are_the_papers_quadratics() -> None:
    clients, dim, rank = 6, 8, 3
    problem = das2022_quadratics(5, clients=clients, dim=dim, rank=rank)
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(clients, dim))
    factors = rng.normal(scale=1 / rank, size=(clients, dim, rank))
    w = rng.normal(size=dim)
    for i in range(clients):
        q = factors[i] @ factors[i].T
        expected = 0.5 * (w - centres[i]) @ q @ (w - centres[i])
        actual = float(client_loss(problem, i, torch.from_numpy(w)))
        assert actual == pytest.approx(expected, rel=1e-5)


def test_das2022_has_the_papers_sizes_and_laws() -> None:
    problem = das2022_quadratics(0)
    assert problem.data.clients == 100
    assert problem.data.inputs.shape == (2000, 200)
    spread = float(problem.data.inputs.std())
    assert spread == pytest.approx(math.sqrt(20) / 20, rel=0.01)


def test_das2022_starts_lie_in_the_unit_box_above_the_optimum() -> None:
    far, near = das2022_quadratics(3), das2022_quadratics(3, "near")
    z = far.start.double() - far.optimum
    assert 0 <= float(z.min()) < 0.05
    assert 0.95 < float(z.max()) <= 1 + 1e-6
    torch.testing.assert_close(5 * (near.start.double() - near.optimum), z, rtol=0, atol=1e-5)


def test_das2022_is_a_function_of_its_seed() -> None:
    first, again, other = (das2022_quadratics(s, clients=20, dim=5) for s in (1, 1, 2))
    assert torch.equal(first.data.inputs, again.data.inputs)
    assert torch.equal(first.start, again.start)
    assert not torch.equal(first.data.inputs, other.data.inputs)


def test_table4_is_equation_24() -> None:
    problem = zhang2022_table4()
    assert problem.optimum.tolist() == [0.0]
    for x in (-1.0, 0.0, 2.5):
        point = torch.tensor([x], dtype=torch.float64)
        values = [float(client_loss(problem, i, point)) for i in range(3)]
        expected = [(x - 4) ** 2 / 2, (2 * x - 1) ** 2 / 2, (6 * x + 1) ** 2 / 2]
        assert values == pytest.approx(expected)


def test_claim21_has_its_optimum_beyond_the_threshold() -> None:
    problem = zhang2022_claim21(c=2.0, k=5.0)
    assert problem.optimum.tolist() == [pytest.approx(8 / 3)]
    assert problem.start.tolist() == [0.0]
    assert problem.data.labels.tolist() == [-1.0, -1.0, 10.0]


def test_heterogeneous_clients_are_strongly_convex_smooth_and_disagree() -> None:
    problem = heterogeneous_quadratic(6, 4, seed=1)
    for client in range(6):
        rows = problem.data.client(client).inputs.double()
        eigenvalues = torch.linalg.eigvalsh(rows.T @ rows / len(rows))
        assert float(eigenvalues.min()) >= 0.5 - 1e-5
        assert float(eigenvalues.max()) <= 2 + 1e-5
    assert problem.loss(problem.optimum) > 0.1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: das2022_quadratics(0, "fat"), "Did you mean 'far'"),
        (lambda: das2022_quadratics(0, rank=0), "rank is 0"),
        (lambda: heterogeneous_quadratic(0, 3, 0), "clients is 0"),
        (lambda: zhang2022_claim21(0.0, 5.0), "c > 0"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], QuadraticProblem], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()
