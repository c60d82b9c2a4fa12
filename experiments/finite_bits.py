"""Accuracy, ε and bytes of messages of few bits beside continuous Gaussian noise, view by view.

Fashion-MNIST over 3000 clients, softmax regression, (5, 1e-5), the setting of Das et al. 2022, §6.
Writes docs/bits.md in about 40 minutes:  python experiments/finite_bits.py > docs/bits.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

import fedveil as fv
from fedveil import algorithms
from fedveil.parts.cohort import Poisson
from fedveil.recipe import Recipe, View
from fedveil.training import Result

SEEDS = (0, 1)
COHORT = Poisson(0.2, cap=25, honest=450)  # about 600 come, 520 when many have reached the cap
HEADER = """# Few bits

What a message of few bits costs in accuracy, against continuous Gaussian noise at the same (ε, δ)
and towards the same view. Fashion-MNIST over 3000 clients of five shards, softmax regression
(d = 7850), updates normalized, Poisson cohorts of 600, 20 local steps, server momentum 0.8, weight
decay 1e-4, (5, 1e-5) for a client; seeds 0 and 1. Made by `experiments/finite_bits.py`.

- `models`: 200 rounds, C = 62.5, η = 0.016·0.99^k; the server adds the noise, sampling amplifies.
- `sum`, `messages`: the clients add the noise, who takes part is seen; 100 rounds, C = 31.25,
  η = 0.032·0.98^k, nobody takes part more than 25 times, and a sum holds the noise of at least 450
  clients.

| view | recipe | bits a coordinate | bytes a message | noise on the mean | ε | accuracy, % |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Case:
    """A recipe to run, and how long."""

    recipe: Recipe
    label: str
    rounds: int


def long(**more: object) -> Recipe:
    """Towards released models: the server adds the noise."""
    common = {"rate": 0.2, "steps": 20, "learning_rate": 0.016, "decay": 0.99, "scale": 62.5}
    return algorithms.dp_norm_fedavg(**common, server_momentum=0.8, weight_decay=1e-4, **more)  # type: ignore[arg-type]


def short(view: View, discrete: bool) -> Recipe:
    """Towards a server that sees sums or messages: the clients add the noise."""
    common = {"rate": 0.2, "steps": 20, "learning_rate": 0.032, "decay": 0.98, "scale": 31.25}
    heavy = {"server_momentum": 0.8, "weight_decay": 1e-4}
    if discrete:
        recipe = algorithms.dp_norm_fedavg_discrete(**common, **heavy, view=view)  # type: ignore[arg-type]
    else:
        recipe = algorithms.dp_norm_fedavg(**common, **heavy, noise_at="client")  # type: ignore[arg-type]
    return replace(recipe, cohort=COHORT, view=view)


def cases() -> Iterator[Case]:
    """The rows of the table."""
    yield Case(long(), "continuous Gaussian", 200)
    yield Case(long(levels="auto"), "rounded, 2√d levels", 200)
    yield Case(long(levels=32), "rounded, 32 levels", 200)
    for view in ("sum", "messages"):
        yield Case(short(view, False), "continuous Gaussian", 100)
        yield Case(short(view, True), "discrete Gaussian", 100)


def row(case: Case, results: list[Result]) -> str:
    """One line of the table."""
    stated = results[0].statement
    bits = "32" if stated.bits is None else str(stated.bits)
    noise = mean(record.noise for result in results for record in result.records)
    scores = ", ".join(f"{100 * result.accuracy:.2f}" for result in results)
    return (
        f"| {case.recipe.view} | {case.label} | {bits} | {stated.message_bytes:,} | {noise:.3g} | "
        f"{stated.main.epsilon:.3g} | {scores} |"
    )


def main() -> None:
    """Run every case with every seed."""
    data = fv.load("fashion-mnist").split(fv.Shards(3000, 5), 0)
    print(HEADER, end="", flush=True)
    for case in cases():
        results = []
        for seed in SEEDS:
            results.append(fv.train(case.recipe, data, "softmax", case.rounds, 5.0, 1e-5, seed))
            print(case.label, case.recipe.view, seed, results[-1], file=sys.stderr)
        print(row(case, results), flush=True)


if __name__ == "__main__":
    main()
