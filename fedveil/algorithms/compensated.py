"""Smoothed normalization with error compensation: α-NormEC and Fed-α-NormEC."""

from __future__ import annotations

from typing import Annotated, Literal, Unpack

from fedveil.algorithms.published import Default, published
from fedveil.algorithms.shared import GaussianNoise, ServerMomentum, gaussian, step
from fedveil.errors import UserError, unknown
from fedveil.parts.bound import SmoothNormalize
from fedveil.parts.cohort import Cohort, Everyone, Poisson
from fedveil.parts.local import GD, IncrementalGradient, Local, MiniBatchGD
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.report import PseudoGradient
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import NormalizedStep, Server
from fedveil.recipe import Recipe

Beta = Annotated[float, "Step size β of the memories."]
Alpha = Annotated[float, "Smoothing α of the normalization."]
Batch = Annotated[int | None, "Local batch size of gd; all of a client's examples if None."]


class Compensated(ServerMomentum, GaussianNoise, total=False):
    """Smoothed normalization of what the memory does not know yet."""

    learning_rate: Annotated[
        float | Schedule, Default(0.1), "Local learning rate γ: a number or a schedule."
    ]
    server_rate: Annotated[
        float | Schedule | None, Default(None), "Server learning rate η; learning_rate if None."
    ]
    normalize_server: Annotated[bool, Default(False), "Normalize the server's direction v̂."]
    private: Annotated[bool, Default(True), "Add noise; also added if noise_multiplier is given."]


@published(normalize_server=True, private=False)
def alpha_normec(beta: Beta = 0.1, alpha: Alpha = 0.01, **options: Unpack[Compensated]) -> Recipe:
    """Δ_i = Norm_α(∇f_i(x) − v_i), v_i ← v_i + βΔ_i, v̂ ← v̂ + β·mean(Δ), x ← x − η·v̂/‖v̂‖.

    Shulgin et al. 2025, Alg. 1, lines 3–12 with T = 1 and p = 1 (α-NormEC).
    """
    local = GD(schedule(options["learning_rate"]), 1)
    memory = ErrorCompensation(beta, "everyone")
    return _compensated("alpha_normec", local, Everyone(), memory, alpha, options)


@published()
def fed_alpha_normec(
    rate: Annotated[float, "Probability p that a client takes part in a round."] = 1.0,
    beta: Beta = 0.01,
    alpha: Alpha = 0.01,
    *,
    steps: Annotated[int, "Local gradient steps T per round."] = 1,
    local: Annotated[Literal["gd", "ig"], "Full gradients, or one example after the other."] = "gd",
    batch: Batch = None,
    update: Annotated[
        Literal["participants", "everyone"], "Whose memory changes in a round."
    ] = "participants",
    **options: Unpack[Compensated],
) -> Recipe:
    """Δ_i = Norm_α((x − T_i(x))/γ − v_i), sent with probability p; x ← x − η·v̂ or η·v̂/‖v̂‖.

    Shulgin et al. 2025, Alg. 1, lines 3–12; local GD as in Thm. 1, local IG as in App. C.
    update='everyone' is the algorithm as written, 'participants' what a deployment can do.
    """
    work = _local(schedule(options["learning_rate"]), steps, batch, local)
    cohort = Everyone() if rate == 1 else Poisson(rate)
    memory = ErrorCompensation(beta, update)
    return _compensated("fed_alpha_normec", work, cohort, memory, alpha, options)


def _compensated(
    name: str,
    local: Local,
    cohort: Cohort,
    memory: ErrorCompensation,
    alpha: float,
    options: Compensated,
) -> Recipe:
    noise = gaussian(options["private"], options["noise_multiplier"])
    bound, server = SmoothNormalize(alpha), _server(options)
    return Recipe(name, local, cohort, PseudoGradient(), memory, bound, noise=noise, server=server)


def _local(gamma: Schedule, steps: int, batch: int | None, local: str) -> Local:
    if local not in ("gd", "ig"):
        raise unknown("local operator", local, ("gd", "ig"))
    if local == "gd":
        return GD(gamma, steps) if batch is None else MiniBatchGD(gamma, steps, batch)
    if batch is not None:
        raise UserError("local='ig' uses one example per step. Remove batch, or use local='gd'.")
    return IncrementalGradient(gamma)


def _server(options: Compensated) -> Server:
    rate = options["server_rate"]
    eta = schedule(options["learning_rate"] if rate is None else rate)
    if not options["normalize_server"]:
        return step(eta, options["server_momentum"])
    if options["server_momentum"]:
        raise UserError("normalize_server has no momentum. Remove server_momentum, or set it off.")
    return NormalizedStep(eta)
