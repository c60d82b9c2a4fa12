"""W1 to W5: what one round computes, and its number of floating-point operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

EXAMPLES = 60_000  # of Fashion-MNIST's training set, or of its replacement

# Multiplications of one example's forward pass, layer by layer.
MULTIPLICATIONS: dict[str, tuple[int, ...]] = {
    "softmax": (784 * 10,),
    "mlp": (784 * 300, 300 * 300, 300 * 10),
    "mlp-256-128": (784 * 256, 256 * 128, 128 * 10),
    "cnn": (14 * 14 * 16 * 64, 5 * 5 * 32 * 256, 512 * 32, 32 * 10),
}


@dataclass(frozen=True)
class Workload:
    """x ← x + (Σ clip(y_i − x, C) + N(0, (zC)²I)) / participants, y_i from `steps` of local SGD."""

    key: str
    title: str
    model: str
    clients: int
    per_round: int
    steps: int
    learning_rate: float
    clip: float
    noise: float  # z
    batch: int | None = None  # None: all of a client's examples
    momentum: float = 0.0
    unit: Literal["client", "example"] = "client"
    rounds: int = 5  # timed before accuracy is measured; a quick run times fewer

    @property
    def width(self) -> int:
        """Examples per local step."""
        return self.batch or EXAMPLES // self.clients

    @property
    def flops(self) -> float:
        """Operations of a round's local training without privacy.

        Two for each multiplication: forward, gradient of the weights, and gradient of the input,
        which the first layer does not need.

        >>> f"{WORKLOADS['W2'].flops:.3g}"
        '1.92e+11'
        """
        layers = MULTIPLICATIONS[self.model]
        each = 2 * (2 * sum(layers) + sum(layers[1:]))
        return float(each * self.width * self.steps * self.per_round)

    def tiny(self) -> Workload:
        """Few participants and steps and hardly any noise, to check that contestants agree."""
        few, short = min(8, self.per_round), min(3, self.steps)
        return replace(self, per_round=few, steps=short, noise=1e-6, rounds=1)


def _dp_sgd(kind: str, model: str, like: str) -> Workload:
    return Workload(
        f"W4 {kind}", f"DP-SGD, one step of 1024 examples, {like}", model,
        EXAMPLES, 1024, 1, 1.0, 1.5, 0.1, unit="example",
    )  # fmt: skip


def _dp_lsgd(kind: str, model: str, like: str) -> Workload:
    return Workload(
        f"W5 {kind}", f"DP-LSGD, K = 10, one step of 512 examples, {like}", model,
        EXAMPLES, 512, 10, 0.2, 1.0, 0.05, unit="example",
    )  # fmt: skip


_ALL = (
    Workload(
        "W1", "logistic regression, 600 of 3000 clients × 20 examples, 20 full-batch steps",
        "softmax", 3000, 600, 20, 0.05, 0.5, 1.0,
    ),
    Workload(
        "W2", "MLP 784-300-300-10, 25 of 50 clients × 1200 examples, 20 steps of 256, momentum 0.9",
        "mlp", 50, 25, 20, 0.05, 0.7, 0.01, batch=256, momentum=0.9,
    ),
    Workload(
        "W3", "CNN of 26k parameters, 100 of 1000 clients × 60 examples, 5 epochs of batch 20",
        "cnn", 1000, 100, 15, 0.1, 0.8, 0.1, batch=20,
    ),
    _dp_sgd("MLP", "mlp", "the MLP of W2"),
    _dp_sgd("CNN", "cnn", "the CNN of W3"),
    _dp_lsgd("MLP", "mlp-256-128", "MLP 784-256-128-10"),
    _dp_lsgd("CNN", "cnn", "the CNN of W3"),
)  # fmt: skip
WORKLOADS: dict[str, Workload] = {workload.key: workload for workload in _ALL}


def chosen(names: Iterable[str]) -> list[Workload]:
    """Workloads by key or prefix: W4 is both of its kinds; all if none is named.

    >>> [workload.key for workload in chosen(["W1", "W5"])]
    ['W1', 'W5 MLP', 'W5 CNN']
    """
    starts = tuple(names)
    found = [one for one in _ALL if not starts or one.key.startswith(starts)]
    if not found:
        raise SystemExit(f"No workload is called {' or '.join(starts)}. Choose from W1 to W5.")
    return found
