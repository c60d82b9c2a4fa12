"""Problems with a known optimum: quadratics as federated least squares."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.data.federated import Examples, Federated, Optimum
from fedveil.data.origin import SIMULATED
from fedveil.errors import UserError, unknown
from fedveil.models.linear import LinearRegression
from fedveil.models.start import construct

_Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class QuadraticProblem:
    """f(x) = mean_i f_i(x) with f_i(x) = mean_j ½(row_j·x − target_j)² over client i's examples.

    `optimum` minimizes f to float64 accuracy; `model` holds `start` as its weights.
    """

    name: str
    data: Federated
    model: LinearRegression
    start: Tensor  # [d], float32
    optimum: Tensor  # [d], float64

    def loss(self, x: Tensor) -> float:
        """f(x), computed in float64."""
        residuals = self.data.inputs[:].double() @ x.double() - self.data.labels[:].double()
        return float(0.5 * (_weights(self.data) * residuals.square()).sum())

    def suboptimality(self, x: Tensor) -> float:
        """f(x) − f(x*) = ½(x − x*)ᵀ∇²f(x − x*).  Never negative; exact near the optimum."""
        moved = self.data.inputs[:].double() @ (x.double() - self.optimum)
        return float(0.5 * (_weights(self.data) * moved.square()).sum())


def das2022_quadratics(
    seed: int, start: str = "far", clients: int = 100, dim: int = 200, rank: int = 20
) -> QuadraticProblem:
    """f_i(w) = ½(w − w_i*)ᵀA_iA_iᵀ(w − w_i*), w_i* ~ N(0, I), A_i entries ~ N(0, 1/rank²).

    Das et al. 2022, §5.3.  Starts at w* + z ("far", I1) or w* + z/5 ("near", I2), z ~ U(0, 1).
    Client i holds `rank` examples: the rows of √rank·A_iᵀ with the targets they give at w_i*.
    """
    scales = {"far": 1.0, "near": 0.2}
    if start not in scales:
        raise unknown("start", start, scales)
    _refuse_empty(clients=clients, dim=dim, rank=rank)
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clients, dim))
    factors = rng.normal(scale=1 / rank, size=(clients, dim, rank))
    offset = scales[start] * rng.uniform(size=dim)
    rows = math.sqrt(rank) * factors.transpose(0, 2, 1)
    return _problem("das2022_quadratics", rows, _targets(rows, centres), offset=offset)


def zhang2022_table4() -> QuadraticProblem:
    """f1 = ½(x − 4)², f2 = ½(2x − 1)², f3 = ½(6x + 1)²; the optimum is 0, the start 1.

    Zhang et al. 2022, eq. (24) and Table 4.  One example for each client.
    """
    rows = np.array([1.0, 2.0, 6.0]).reshape(3, 1, 1)
    targets = np.array([[4.0], [1.0], [-1.0]])
    return _problem("zhang2022_table4", rows, targets, np.zeros(1), offset=np.ones(1))


def zhang2022_claim21(c: float, k: float) -> QuadraticProblem:
    """f_i = ½(x − b_i)² with b = (−c/2, −c/2, k·c); the optimum is (k − 1)c/3, the start 0.

    Zhang et al. 2022, proof of Claim 2.1: for k > 4 the optimum lies beyond the threshold c.
    """
    if not (math.isfinite(k) and 0 < c < math.inf):
        raise UserError(f"Claim 2.1 needs c > 0 and a finite k, but c is {c} and k is {k}.")
    targets = np.array([[-0.5 * c], [-0.5 * c], [k * c]])
    optimum = np.array([(k - 1) * c / 3])
    return _problem("zhang2022_claim21", np.ones((3, 1, 1)), targets, optimum, offset=-optimum)


def heterogeneous_quadratic(clients: int, dim: int, seed: int) -> QuadraticProblem:
    """f_i(w) = ½(w − w_i*)ᵀH_i(w − w_i*) with random H_i and w_i* ~ N(0, 9·I), starting at 0.

    The eigenvalues of every H_i lie in [1/2, 2]: each f_i is 1/2-strongly convex and 2-smooth.
    """
    _refuse_empty(clients=clients, dim=dim)
    rng = np.random.default_rng(seed)
    centres = rng.normal(scale=3.0, size=(clients, dim))
    rotations = np.linalg.qr(rng.normal(size=(clients, dim, dim)))[0]
    roots = np.sqrt(dim * rng.uniform(0.5, 2.0, size=(clients, dim, 1)))
    rows = roots * rotations
    return _problem("heterogeneous_quadratic", rows, _targets(rows, centres))


def _targets(rows: _Array, centres: _Array) -> _Array:
    """row_j·w_i*: what makes client i's loss zero at w_i*, [clients, examples]."""
    targets: _Array = np.einsum("ijd,id->ij", rows, centres)
    return targets


def _problem(
    name: str,
    rows: _Array,
    targets: _Array,
    optimum: _Array | None = None,
    offset: _Array | None = None,
) -> QuadraticProblem:
    """Rows [clients, examples, d] and targets [clients, examples]; the start is x* + offset.

    Without an offset the start is 0; without an optimum, least squares finds it.
    """
    clients, examples, dim = rows.shape
    inputs = torch.from_numpy(rows.reshape(-1, dim)).float()
    labels = torch.from_numpy(targets.reshape(-1)).float()
    offsets = torch.arange(0, clients * examples + 1, examples)
    data = Federated(
        name, inputs, labels, offsets, Examples(inputs, labels), 1, "half_squared", origin=SIMULATED
    )
    solved = _least_squares(data) if optimum is None else torch.from_numpy(optimum)
    start = torch.zeros(dim) if offset is None else (solved + torch.from_numpy(offset)).float()
    known = Optimum(solved, _gaps(rows, targets, solved.numpy()), start)
    return QuadraticProblem(name, replace(data, optimum=known), _model(start), start, solved)


def _least_squares(data: Federated) -> Tensor:
    # Solved on the float32 rows used in training, so their gradient there is zero.
    roots = _weights(data).sqrt()
    rows = (roots[:, None] * data.inputs[:].double()).numpy()
    return torch.from_numpy(np.linalg.lstsq(rows, (roots * data.labels[:]).numpy(), rcond=None)[0])


def _gaps(rows: _Array, targets: _Array, optimum: _Array) -> Tensor:
    """Δ_i* = f_i(x*) − min f_i, [clients]."""
    own = [np.linalg.lstsq(*pair, rcond=None)[0] for pair in zip(rows, targets, strict=True)]
    places = np.stack([np.broadcast_to(optimum, (len(rows), len(optimum))), np.stack(own)])
    residuals = np.einsum("ijd,sid->sij", rows, places) - targets
    losses = 0.5 * np.square(residuals).mean(axis=2)
    return torch.from_numpy(losses[0] - losses[1])


def _weights(data: Federated) -> Tensor:
    """1/(clients · examples of its client) for every example, float64: they sum to 1."""
    sizes = data.sizes
    return (1 / (data.clients * sizes.double())).repeat_interleave(sizes)


def _model(start: Tensor) -> LinearRegression:
    model = construct(lambda: LinearRegression(len(start)))
    with torch.no_grad():
        model.linear.weight.copy_(start[None])
    return model


def _refuse_empty(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"A quadratic problem needs {name} ≥ 1, but {name} is {size}.")
