"""Client-level private averaging with Gaussian noise: by clipping, normalizing, adapting."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Unpack

from fedveil.algorithms.published import published
from fedveil.algorithms.shared import (
    Capped,
    Correlation,
    FewBits,
    FixedCohort,
    GaussianNoise,
    LocalMomentum,
    LocalTraining,
    PrivateAveraging,
    ReleasedModel,
    ServerStep,
    averaged,
    clip_at,
    correlated,
    few_bits,
    sampled,
    sgd,
    spaced,
)
from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip, ClipCoordinates, Normalize
from fedveil.parts.cohort import Cohort, Everyone
from fedveil.parts.noise import Noise
from fedveil.parts.quantize import NoQuantization, Quantize
from fedveil.parts.report import PseudoGradient, Report
from fedveil.recipe import Recipe


class FollowedLeader(
    FixedCohort,
    Capped,
    LocalTraining,
    LocalMomentum,
    ServerStep,
    GaussianNoise,
    Correlation,
    ReleasedModel,
    total=False,
):
    """Averaging of a fixed number of clients with correlated noise."""


class RoundedAveraging(PrivateAveraging, FewBits, total=False):
    """Private averaging whose messages may be rounded to a few bits."""


@published()
def dp_fedavg(
    clip: Annotated[
        float | Literal["probe"], "Clipping threshold C; 'probe' measures it, which leaks."
    ] = 1.0,
    *,
    report: Annotated[Report | None, "What a client sends; pseudo-gradients by default."] = None,
    **options: Unpack[RoundedAveraging],
) -> Recipe:
    """x ← x − β_k·(Σ clip((x − y_i)/η_k, C) + noise)/(q·n).

    Das et al. 2022, Alg. 1, lines 3–12. With report=Difference() and clients=P it is
    Zhang et al. 2022, Alg. 3, lines 3–12, there with a server rate of 1 and clip="probe", which
    leaks. With levels, messages are rounded to 2·levels + 1 values, and noise is integer-valued.
    """
    report = report or PseudoGradient()
    rate = options["learning_rate"] if report.divides else 1.0
    cohort, quantize, noise = _released(options)
    local = sgd(options, options["decay"])
    return Recipe(
        "dp_fedavg", local, cohort, report, bound=clip_at(clip), quantize=quantize,
        noise=noise, server=averaged(options, rate), output=options["output"],
    )  # fmt: skip


def _released(options: RoundedAveraging) -> tuple[Cohort, Quantize, Noise]:
    """Who takes part, how messages are rounded, and the noise on their sum."""
    who, multiplier = (
        (options["rate"], options["clients"], options["cap"]),
        options["noise_multiplier"],
    )
    if options["noise"] == "independent":
        return sampled(*who), *few_bits(options, multiplier)
    if options["levels"] is not None or options["noise_at"] != "server":
        raise UserError(
            "levels and noise_at cannot be combined with correlated noise, which the server adds "
            "to the sum. Remove them, or use noise='independent'."
        )
    return spaced(*who, options), NoQuantization(), correlated(multiplier, options)


@published(noise="banded", clients=None)
def dp_ftrl(
    clip: Annotated[float, "Clipping threshold C."] = 1.0, **options: Unpack[FollowedLeader]
) -> Recipe:
    """x ← x − β_k·(Σ clip((x − y_i)/η_k, C) + (C⁻¹z)_k)/m: noise that cancels over the rounds.

    Choquette-Choo et al. 2023, Alg. 1 (MF-DP-FTRL); banded square-root noise as in Kalinin and
    Lampert 2024, Thm. 1, blt as in Dvijotham et al. 2024, §4. `clients` take part per round, each
    at least `separation` rounds after its last time; all of them in every round by default.
    """
    given: Any = {**options, "clients": options["clients"] or 1}
    recipe = dp_fedavg(clip, **given)
    cohort = recipe.cohort if options["clients"] else Everyone()
    return replace(recipe, name="dp_ftrl", cohort=cohort)


@published()
def dp_norm_fedavg(
    scale: Annotated[float, "Length C of every normalized update."] = 1.0,
    **options: Unpack[RoundedAveraging],
) -> Recipe:
    """x ← x − β_k·(Σ C·u_i/‖u_i‖ + noise)/(q·n), u_i = (x − y_i)/η_k.

    Das et al. 2022, Alg. 2, lines 3–12. With levels, messages are rounded to 2·levels + 1 values,
    and noise is integer-valued.
    """
    recipe = dp_fedavg(**options)
    return replace(recipe, name="dp_norm_fedavg", bound=Normalize(scale))


@published()
def dp_fedavg_adaptive(
    start: Annotated[float, "Clipping threshold C of the first round."] = 1.0,
    quantile: Annotated[float, "Fraction γ of updates to leave unclipped."] = 0.5,
    clip_rate: Annotated[float, "Learning rate η_C of the threshold."] = 0.2,
    count_noise: Annotated[
        float | None, "Noise on the count of unclipped updates; cohort/20 by default."
    ] = None,
    *,
    report: Annotated[Report | None, "What a client sends; pseudo-gradients by default."] = None,
    **options: Unpack[PrivateAveraging],
) -> Recipe:
    """DP-FedAvg with C ← C·exp(−η_C·(b̃ − γ)), b̃ the noisy fraction of updates no longer than C.

    Andrew et al. 2021, Alg. 1: the threshold follows the γ-quantile of the update norms; the noise
    of the count is in the accounting.
    """
    recipe = dp_fedavg(start, report=report, **options)
    bound = AdaptiveClip(start, quantile, clip_rate, count_noise)
    return replace(recipe, name="dp_fedavg_adaptive", bound=bound)


@published()
def dp_fedavg_coordinatewise(
    limit: Annotated[float, "Largest absolute value of a coordinate of an update."] = 0.01,
    **options: Unpack[RoundedAveraging],
) -> Recipe:
    """x ← x − β_k·(Σ min(max(u_i, −limit), limit) + noise)/(q·n), u_i = (x − y_i)/η_k.

    Das et al. 2022, Alg. 1, lines 3–12, with clipping by coordinate (ℓ∞) instead of by norm: a
    large coordinate does not shorten the others. Noise follows limit·√d, the largest norm of a
    message.
    """
    recipe = dp_fedavg(**options)
    return replace(recipe, name="dp_fedavg_coordinatewise", bound=ClipCoordinates(limit))
