"""Recommended algorithms and settings, each with the committed result that supports it.

A recommendation is no more than its evidence: `papers/results` has every run behind it
(docs/reproductions.md), and a test compares what is said here with those files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.algorithms.calling import method_named, parameters_of
from fedveil.errors import UserError
from fedveil.training.settings import Settings, resolve_recipe


@dataclass(frozen=True)
class Evidence:
    """The verdict on a claim in a committed result; one may speak against a recommendation."""

    item: str
    scale: str
    claim: str
    verdict: str
    interval: tuple[float, float, float]  # mean, lower and upper end, in points of accuracy

    def described(self) -> str:
        """One sentence for the terminal."""
        mean, low, high = self.interval
        measured = f"{mean:.3g} points of accuracy, 95% interval {low:.3g} to {high:.3g}"
        return f"{self.claim} {self.verdict.capitalize()}: {measured} ({self.item}, {self.scale})."


@dataclass(frozen=True)
class Recommendation:
    """An algorithm with its settings, where it was measured, and the evidence."""

    algorithm: str
    parameters: Mapping[str, Any]
    measured_on: str
    evidence: tuple[Evidence, ...]

    def applied(self, settings: Settings) -> Settings:
        """The settings with this algorithm; given parameters that it has too are kept."""
        known = parameters_of(method_named(self.algorithm))
        kept = {name: value for name, value in settings.parameters.items() if name in known}
        parameters = {**self.parameters, **kept}
        return settings.model_copy(update={"algorithm": self.algorithm, "parameters": parameters})

    def plain(self) -> dict[str, Any]:
        """The recommendation as plain values, for JSON."""
        return {
            "algorithm": self.algorithm,
            "parameters": dict(self.parameters),
            "measured_on": self.measured_on,
            "evidence": [vars(one) for one in self.evidence],
        }


RECOMMENDED = {
    "client": Recommendation(
        "dp_norm_fedavg",
        {
            "steps": 20, "learning_rate": 0.064, "decay": 0.99, "scale": 31.25,
            "server_momentum": 0.8, "weight_decay": 1e-4,
        },
        "Fashion-MNIST and MNIST, softmax regression, 3,000 clients with 20 examples each, rate "
        "0.2, 40 rounds",
        (
            Evidence(
                "das2022/table1a", "small",
                "At ε = 5 normalizing is better than clipping, both tuned.", "holds",
                (1.25, 0.853, 1.65),
            ),
            Evidence(
                "das2022/table1a-wide", "small",
                "At ε = 5 normalizing, tuned on the paper's grid, is better than clipping tuned "
                "beyond it.", "holds",
                (0.485, 0.172, 0.798),
            ),
            Evidence(
                "das2022/table1a-1.5", "small",
                "At ε = 1.5 normalizing is better than clipping, both tuned.", "inconclusive",
                (0.328, -0.295, 0.951),
            ),
            Evidence(
                "das2022/table1a-mnist", "small",
                "At ε = 5 normalizing is better than clipping, with settings chosen on "
                "Fashion-MNIST.", "holds",
                (0.965, 0.57, 1.36),
            ),
            Evidence(
                "das2022/table1a-mnist", "small",
                "At ε = 1.5 normalizing is better than clipping, with settings chosen on "
                "Fashion-MNIST.", "inconclusive",
                (0.585, -0.2, 1.37),
            ),
        ),
    ),
}  # fmt: skip


def recommended(settings: Settings) -> Recommendation:
    """What the committed results support for these settings."""
    recipe = resolve_recipe(settings)
    if settings.epsilon is None:
        raise UserError("Recommendations are about private training. Give --epsilon.")
    if recipe.view != "models":
        raise UserError(
            f"The results behind recommendations are for view 'models', not '{recipe.view}'. "
            "Leave --view or --recommend out."
        )
    if recipe.unit not in RECOMMENDED:
        raise UserError(
            f"No committed result supports a recommendation for unit '{recipe.unit}'. "
            "Leave --recommend out, and compare algorithms with `fedveil compare`."
        )
    return RECOMMENDED[recipe.unit]
