"""Example-level private training: every sampled example works by itself, as a client would."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Unpack

from fedveil.algorithms.published import Default, published
from fedveil.algorithms.shared import (
    FixedStep,
    GaussianNoise,
    LocalMomentum,
    ReleasedModel,
    step,
)
from fedveil.parts.bound import Clip
from fedveil.parts.cohort import Poisson
from fedveil.parts.local import SGD
from fedveil.parts.noise import Gaussian
from fedveil.parts.report import Difference
from fedveil.parts.schedule import Schedule, schedule
from fedveil.recipe import Recipe


class PerExample(FixedStep, LocalMomentum, GaussianNoise, ReleasedModel, total=False):
    """Sampled examples, each clipped by itself."""

    rate: Annotated[float, Default(0.01), "Probability that an example takes part in a step."]
    learning_rate: Annotated[
        float | Schedule, Default(0.1), "Learning rate: a number or a schedule."
    ]
    decay: Annotated[float, Default(1.0), "Factor on the learning rate after each round."]


@published()
def dp_sgd(
    clip: Annotated[float, "Clipping threshold c of one example's step."] = 1.0,
    **options: Unpack[PerExample],
) -> Recipe:
    """x ← x + η_g·(Σ clip(−η·∇f_i(x), c) + N(0, (zc)²I))/(n·q) over single examples.

    DP-LSGD, Alg. 1, lines 3–10 with K = 1; Abadi et al. 2016, Alg. 1.
    """
    return replace(dp_lsgd(clip, steps=1, **options), name="dp_sgd")


@published(learning_rate=0.025)
def dp_lsgd(
    clip: Annotated[float, "Clipping threshold c of one example's update."] = 1.0,
    *,
    steps: Annotated[int, "Local steps K on one example."] = 10,
    **options: Unpack[PerExample],
) -> Recipe:
    """x ← x + η_g·(Σ clip(y_i − x, c) + N(0, (zc)²I))/(n·q), y_i: K steps on one example alone.

    DP-LSGD, Alg. 1, lines 3–10, with η_g = 1. Where every example is clipped, η only turns the
    direction, and the length of a step is set by c and η_g.
    """
    rate = schedule(options["learning_rate"], options["decay"])
    local = SGD(rate, steps, None, None, options["momentum"], options["weight_decay"])
    return Recipe(
        "dp_lsgd", local, Poisson(options["rate"]), Difference(), bound=Clip(clip),
        noise=Gaussian(options["noise_multiplier"]),
        server=step(schedule(options["server_rate"]), options["server_momentum"]),
        output=options["output"], unit="example",
    )  # fmt: skip
