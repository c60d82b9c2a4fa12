"""Cross-silo training: every client is a silo that protects its own records by its own noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Unpack

from fedveil.algorithms.published import Default, published
from fedveil.algorithms.shared import ReleasedModel, WeightDecay
from fedveil.parts.cohort import Everyone
from fedveil.parts.memory import PersonalModels
from fedveil.parts.records import RecordSGD, SiloGaussian
from fedveil.parts.report import Difference
from fedveil.parts.schedule import Schedule, schedule
from fedveil.recipe import Recipe

Numbers = float | tuple[float, ...]


class SiloOptions(WeightDecay, ReleasedModel, total=False):
    """DP-SGD inside each silo."""

    steps: Annotated[int, Default(10), "Steps K of DP-SGD inside a silo per round."]
    rate: Annotated[
        Numbers, Default(0.1), "Probability that a record takes part in a step, or one per silo."
    ]
    learning_rate: Annotated[
        float | Schedule, Default(0.5), "Learning rate inside silos: a number or a schedule."
    ]
    decay: Annotated[float, Default(1.0), "Factor on the learning rate after each round."]
    noise_multiplier: Annotated[
        Numbers | None,
        Default(None),
        "Standard deviation of the noise over clip, or one per silo; calibrated to ε if None.",
    ]
    budgets: Annotated[
        Numbers, Default(1.0), "Each silo's budget as a share of ε; all of ε by default."
    ]


@published()
def silo_dp_fedavg(
    clip: Annotated[float, "Clipping threshold C of one record's gradient."] = 1.0,
    **options: Unpack[SiloOptions],
) -> Recipe:
    """y_i ← K steps of DP-SGD on the records of silo i from x, x ← mean of y_i.

    FedAvg, McMahan et al. 2017, Alg. 1, with the local training of Abadi et al. 2016, Alg. 1. Liu
    et al. 2022 (arXiv 2206.07902) study it as silo-specific sample-level privacy.
    """
    return _in_silos("silo_dp_fedavg", clip, options)


@published()
def mr_mtl(
    clip: Annotated[float, "Clipping threshold C of one record's gradient."] = 1.0,
    pull: Annotated[float, "Regularization λ toward the mean; 0 trains each silo alone."] = 0.1,
    **options: Unpack[SiloOptions],
) -> Recipe:
    """y_i ← K steps of DP-SGD on f_i(y) + λ/2·‖y − x‖² from y_i, x ← mean of y_i.

    MR-MTL of Liu et al. 2022 (arXiv 2206.07902): every silo keeps a personal model, pulled to the
    mean x of all. Steps are those of Abadi et al. 2016, Alg. 1.
    """
    recipe = _in_silos("mr_mtl", clip, options, pull)
    return replace(recipe, memory=PersonalModels())


def _in_silos(name: str, clip: float, options: SiloOptions, pull: float = 0.0) -> Recipe:
    """DP-SGD inside every silo, and the mean of what silos send."""
    given = options["noise_multiplier"]
    local = RecordSGD(
        schedule(options["learning_rate"], options["decay"]),
        options["steps"], _each(options["rate"]), clip, pull, options["weight_decay"],
    )  # fmt: skip
    noise = SiloGaussian(None if given is None else _each(given), _each(options["budgets"]))
    return Recipe(
        name, local, Everyone(), Difference(), noise=noise, output=options["output"],
        unit="record", view="messages",
    )  # fmt: skip


def _each(given: Numbers) -> tuple[float, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,)
