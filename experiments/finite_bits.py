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
from fedveil.privacy import accounting, events
from fedveil.privacy.calibrate import Budget, least_level, settled
from fedveil.privacy.statement import rounded_up
from fedveil.recipe import Recipe, View
from fedveil.training import Result

SEEDS = (0, 1)
CAP = 25
COHORT = Poisson(0.2, cap=CAP, honest=450)  # about 600 come, 520 when many have reached the cap
DIM, CLIENTS = 7850, 3000
HEADER = """# Few bits

What a message of few bits costs in accuracy, against continuous Gaussian noise at the same (ε, δ)
and towards the same view. Fashion-MNIST over 3000 clients of five shards, softmax regression
(d = 7850), updates normalized, Poisson cohorts of 600, 20 local steps, server momentum 0.8, weight
decay 1e-4, (5, 1e-5) for a client; seeds 0 and 1. Made by `experiments/finite_bits.py`.

- `models`: 200 rounds, C = 62.5, η = 0.016·0.99^k; the server adds the noise, sampling amplifies.
- `sum`, `messages`: the clients add the noise, who takes part is seen; 100 rounds, C = 31.25,
  η = 0.032·0.98^k, and a sum holds the noise of at least 450 clients. Nobody takes part more than
  25 times: the noise is for clients who keep this cap themselves (ε if kept). A cap that the server
  keeps does not count towards these views, so ε is that of 100 rounds.

| view | recipe | bits a coordinate | bytes | noise on the mean | ε | ε if kept | accuracy, % |
|---|---|---|---|---|---|---|---|
"""

FOOTER = """
The discrete Gaussian's ε of 100 rounds in view `sum` is ∞: its noise is cut off as 25 rounds allow.
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
    kept = "–" if stated.main.capped is None else rounded_up(stated.main.capped)
    return (
        f"| {case.recipe.view} | {case.label} | {bits} | {stated.message_bytes:,} | {noise:.3g} | "
        f"{rounded_up(stated.main.epsilon)} | {kept} | {scores} |"
    )


def with_noise(case: Case) -> Recipe:
    """Enough for the budget; towards sums and messages if clients keep the cap."""
    if case.recipe.view == "models":
        return settled(case.recipe, Budget(5.0, 1e-5), case.rounds, DIM, CLIENTS)

    def at(level: float) -> Recipe:
        return case.recipe.with_noise(level, DIM, CLIENTS, 5.0, 1e-5 / case.rounds)

    def epsilon(level: float) -> float:
        return accounting.epsilon(events.Composed(at(level).release(DIM, CLIENTS), CAP), 1e-5)

    return at(least_level(epsilon, 5.0))


def main() -> None:
    """Run every case with every seed."""
    data = fv.load("fashion-mnist").split(fv.Shards(3000, 5), 0)
    print(HEADER, end="", flush=True)
    for case in cases():
        results, recipe = [], with_noise(case)
        for seed in SEEDS:
            results.append(fv.train(recipe, data, "softmax", case.rounds, delta=1e-5, seed=seed))
            print(case.label, case.recipe.view, seed, results[-1], file=sys.stderr)
        print(row(case, results), flush=True)
    print(FOOTER, end="")


if __name__ == "__main__":
    main()
