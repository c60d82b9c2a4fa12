"""Control variates against client drift, and clipping with error feedback and double momentum."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Unpack

from fedveil.algorithms.noisy import dp_fedavg
from fedveil.algorithms.published import Default, published
from fedveil.algorithms.shared import (
    Capped,
    FixedCohort,
    GaussianNoise,
    PoissonSampling,
    ReleasedModel,
    WeightDecay,
    fixed,
    gaussian,
)
from fedveil.parts.bound import Clip
from fedveil.parts.cohort import Everyone
from fedveil.parts.controls import ControlVariates, DoubleMomentum
from fedveil.parts.local import SGD
from fedveil.parts.report import PseudoGradient
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import Step
from fedveil.recipe import Recipe

Steps = Annotated[int, "Local steps K per round, the same for every client."]


class ControlledTraining(WeightDecay, total=False):
    """Local training with a fixed number of steps."""

    learning_rate: Annotated[float | Schedule, Default(0.1), "Local learning rate η_l."]
    batch: Annotated[
        int | None, Default(None), "Local batch size; all of a client's examples by default."
    ]
    server_rate: Annotated[
        float | Schedule | None, Default(None), "Server rate η_g·η_l; learning_rate by default."
    ]


class Controlled(FixedCohort, ControlledTraining, total=False):
    """Some clients, or all, with a fixed number of local steps."""


class PrivateControlled(
    PoissonSampling, Capped, ControlledTraining, GaussianNoise, ReleasedModel, total=False
):
    """A Poisson cohort with a fixed number of local steps and Gaussian noise."""


class Averaged(GaussianNoise, total=False):
    """One clipped gradient of every client per round."""

    learning_rate: Annotated[float | Schedule, Default(0.1), "Step size γ of the server."]
    batch: Annotated[
        int | None, Default(None), "Local batch size; all of a client's examples by default."
    ]
    private: Annotated[bool, Default(True), "Add noise; also added if noise_multiplier is given."]


@published()
def scaffold(steps: Steps = 10, **options: Unpack[Controlled]) -> Recipe:
    """y ← y − η_l·(g_i(y) − c_i + c), c_i ← c_i − c + (x − y)/(K·η_l), x ← x + η_g·mean(y − x).

    Karimireddy et al. 2020 (SCAFFOLD), Alg. 1, lines 4–17, option II. Not private.
    """
    return Recipe(
        "scaffold", _local(steps, options), fixed(options), PseudoGradient(),
        ControlVariates(steps), server=_server(options),
    )  # fmt: skip


@published()
def dp_scaffold(
    clip: Annotated[float, "Clipping threshold C of the sum of a client's local gradients."] = 1.0,
    steps: Steps = 10,
    **options: Unpack[PrivateControlled],
) -> Recipe:
    """SCAFFOLD with x ← x − β·d, c ← c + q·(d/K − c), d = (Σ clip((x − y_i)/η_l, C) + noise)/(q·n).

    After Noble et al. 2022, Alg. 1, for clients instead of examples: controls are made of clipped
    updates, so that one release per round is enough. Karimireddy et al. 2020, Alg. 1, lines 4–17.
    """
    given: Any = {name: options[name] for name in ("rate", "cap", "noise_multiplier", "output")}
    recipe = dp_fedavg(clip, steps=steps, **given)
    return replace(
        recipe, name="dp_scaffold", local=_local(steps, options), memory=ControlVariates(steps),
        server=_server(options),
    )  # fmt: skip


@published()
def clip21_sgd2m(
    clip: Annotated[float, "Clipping threshold τ of the difference to the memory."] = 1.0,
    momentum: Annotated[float, "Share β of the newest gradient in a client's average."] = 0.1,
    beta: Annotated[float, "Fraction β̂ of a message that is added to the memories."] = 0.1,
    **options: Unpack[Averaged],
) -> Recipe:
    """v ← (1−β)v + β∇f_i(x), b = clip(v − g_i, τ), g_i ← g_i + β̂b, ĝ ← ĝ + β̂·mean(b), x ← x − γĝ.

    Islamov et al. 2025, Alg. 1 (Clip21-SGD2M), with noise on the mean of all clients' messages.
    """
    rate = schedule(options["learning_rate"])
    noise = gaussian(options["private"], options["noise_multiplier"])
    local = SGD(rate, steps=1, batch=options["batch"])
    return Recipe(
        "clip21_sgd2m", local, Everyone(), PseudoGradient(), DoubleMomentum(momentum, beta),
        Clip(clip), noise=noise, server=Step(rate),
    )  # fmt: skip


def _local(steps: int, options: ControlledTraining) -> SGD:
    rate = schedule(options["learning_rate"])
    return SGD(rate, steps, batch=options["batch"], weight_decay=options["weight_decay"])


def _server(options: ControlledTraining) -> Step:
    given = options["server_rate"]
    return Step(schedule(options["learning_rate"] if given is None else given))
