"""Federated averaging without noise: FedAvg, FedProx, and the bounds alone.  Not private."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Unpack

from fedveil.algorithms.published import Default, published
from fedveil.algorithms.shared import (
    FixedCohort,
    FixedStep,
    LocalMomentum,
    LocalTraining,
    clip_at,
    fixed,
    local_length,
    sgd,
    step,
)
from fedveil.parts.bound import Clip, Normalize
from fedveil.parts.local import Proximal
from fedveil.parts.report import Model
from fedveil.parts.schedule import schedule
from fedveil.parts.server import Server
from fedveil.recipe import Recipe


class Averaging(FixedCohort, LocalTraining, LocalMomentum, total=False):
    """Local training of some clients, or of all."""

    decay: Annotated[float, Default(1.0), "Factor on the learning rate after each round."]


class SteppedAveraging(Averaging, FixedStep, total=False):
    """Averaging with a server learning rate."""


def _step(options: SteppedAveraging, decay: float = 1.0) -> Server:
    return step(schedule(options["server_rate"], decay), options["server_momentum"])


@published()
def fedavg(**options: Unpack[SteppedAveraging]) -> Recipe:
    """x ← x + η_g·mean(y_i − x): local SGD, then the mean difference.

    Zhang et al. 2022, Alg. 1, lines 3–10; Das et al. 2022, Alg. 3. Not private.
    """
    local = sgd(options, options["decay"])
    return Recipe("fedavg", local, fixed(options), server=_step(options))


@published()
def fedprox(
    *,
    strength: Annotated[float, "Strength of the proximal term."] = 0.1,
    **options: Unpack[SteppedAveraging],
) -> Recipe:
    """FedAvg whose local loss is f_i(y) + (strength/2)‖y − x‖².

    Li et al. 2020 (FedProx), Alg. 2, lines 4–6. Not private.
    """
    rate = schedule(options["learning_rate"], options["decay"])
    length, batch = local_length(options), options["batch"]
    own = options["momentum"], options["weight_decay"]
    local = Proximal(rate, *length, batch, *own, strength)
    return Recipe("fedprox", local, fixed(options), server=_step(options))


@published()
def model_clipped_fedavg(
    clip: Annotated[float, "Clipping threshold c of a model."] = 1.0,
    **options: Unpack[Averaging],
) -> Recipe:
    """x ← mean(clip(y_i, c)): the local models themselves are clipped.

    Zhang et al. 2022, §2.1 (model clipping). Not private; its limit is biased (Claim 2.1).
    """
    local = sgd(options, options["decay"])
    return Recipe("model_clipped_fedavg", local, fixed(options), Model(), bound=Clip(clip))


@published()
def clipped_fedavg(
    clip: Annotated[
        float | Literal["probe"], "Clipping threshold c; 'probe' measures it in a run before."
    ] = 1.0,
    **options: Unpack[SteppedAveraging],
) -> Recipe:
    """x ← x + η_g·mean(clip(y_i − x, c)): CE-FedAvg, without noise.

    Zhang et al. 2022, Alg. 2, lines 9–12. Not private.
    """
    recipe = fedavg(**options)
    return replace(recipe, name="clipped_fedavg", bound=clip_at(clip))


@published(server_rate=0.1)
def norm_fedavg(**options: Unpack[SteppedAveraging]) -> Recipe:
    """x ← x − (β_k/r)·Σ (x − y_i)/‖x − y_i‖, where decay applies to β_k as well.

    Das et al. 2021, Remark 3 (NormFedAvg): Alg. 2 without the operator of line 9. Not private.
    """
    decay = options["decay"]
    return Recipe(
        "norm_fedavg", sgd(options, decay), fixed(options), bound=Normalize(1.0),
        server=_step(options, decay),
    )  # fmt: skip
