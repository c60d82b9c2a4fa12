"""Parameters that several algorithms share, defined once, and the parts they make."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from fedveil.algorithms.published import Default
from fedveil.errors import UserError
from fedveil.parts.bound import Bound, Clip, ProbedClip
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.parts.correlated import BandedNoise, BufferedNoise
from fedveil.parts.local import SGD
from fedveil.parts.noise import Gaussian, Noise, NoNoise, Place, RoundedGaussian
from fedveil.parts.quantize import ConditionalRound, NoQuantization, Quantize
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import LastIterate, Momentum, Output, Server, Step
from fedveil.parts.spaced import CyclicPoisson, Separated


class LocalTraining(TypedDict, total=False):
    """What a client does with its own data."""

    learning_rate: Annotated[
        float | Schedule, Default(0.1), "Local learning rate: a number or a schedule."
    ]
    steps: Annotated[int | None, Default(None), "Local steps per round; 10 without epochs."]
    epochs: Annotated[int | None, Default(None), "Local epochs per round, instead of steps."]
    batch: Annotated[
        int | None, Default(None), "Local batch size; all of a client's examples by default."
    ]


class WeightDecay(TypedDict, total=False):
    """Regularization of local training."""

    weight_decay: Annotated[float, Default(0.0), "Weight decay of local training."]


class LocalMomentum(WeightDecay, total=False):
    """Local SGD with momentum and weight decay."""

    momentum: Annotated[float, Default(0.0), "Momentum of local training."]


class ServerMomentum(TypedDict, total=False):
    """A server step with momentum."""

    server_momentum: Annotated[float, Default(0.0), "Momentum of the server step."]


class FixedCohort(TypedDict, total=False):
    """A number of clients, or all of them."""

    clients: Annotated[int | None, Default(None), "Clients per round; all of them by default."]


class FixedStep(ServerMomentum, total=False):
    """A server step with a rate of its own."""

    server_rate: Annotated[float | Schedule, Default(1.0), "Server learning rate."]


class Capped(TypedDict, total=False):
    """A limit on participation."""

    cap: Annotated[
        int | None,
        Default(None),
        "Maximum participations of a client in the run; no limit if None.",
    ]


class PoissonSampling(TypedDict, total=False):
    """Sampling by independent coins."""

    rate: Annotated[float, Default(0.1), "Probability that a client takes part in a round."]


class FixedSizeSampling(TypedDict, total=False):
    """Sampling of a fixed number."""

    clients: Annotated[int | None, Default(None), "Clients per round, instead of rate."]


class Sampling(PoissonSampling, FixedSizeSampling, Capped, total=False):
    """A random cohort: Poisson, or of fixed size."""


class ServerStep(ServerMomentum, total=False):
    """A server step with momentum, whose rate undoes the scale of the updates by default."""

    server_rate: Annotated[
        float | Schedule | None,
        Default(None),
        "Server learning rate; by default learning_rate if updates are divided by it, else 1.",
    ]
    decay: Annotated[float, Default(1.0), "Factor on both learning rates after each round."]


class GaussianNoise(TypedDict, total=False):
    """Gaussian noise; None waits for a budget."""

    noise_multiplier: Annotated[
        float | None,
        Default(None),
        "Standard deviation of the noise over the bound on one update; calibrated to ε if None.",
    ]


class Correlation(TypedDict, total=False):
    """Noise that is correlated over the rounds, so that it cancels."""

    noise: Annotated[
        Literal["independent", "banded", "blt"],
        Default("independent"),
        "Noise across rounds: independent, or correlated (banded, or blt with a few buffers).",
    ]
    separation: Annotated[
        int | None,
        Default(None),
        "Minimum rounds between participations, for correlated noise; as many as fit if None.",
    ]
    bands: Annotated[
        int | None, Default(None), "Bands of banded noise; as many as the separation if None."
    ]
    buffers: Annotated[int, Default(3), "Buffers of blt noise."]


class ReleasedModel(TypedDict, total=False):
    """What is released at the end."""

    output: Annotated[Output, Default(LastIterate()), "Which model a run returns."]


class FewBits(TypedDict, total=False):
    """Messages of a few bits."""

    levels: Annotated[
        int | Literal["auto"] | None,
        Default(None),
        "Round messages to 2·levels + 1 values per coordinate, with integer noise; off if None.",
    ]
    noise_at: Annotated[Place, Default("server"), "Where noise is added: 'server' or 'client'."]


class PrivateAveraging(
    Sampling,
    LocalTraining,
    LocalMomentum,
    ServerStep,
    GaussianNoise,
    Correlation,
    ReleasedModel,
    total=False,
):
    """Federated averaging of a sampled cohort with Gaussian noise."""


class LocalSgd(LocalTraining, LocalMomentum, total=False):
    """Local SGD with momentum and weight decay."""


def sgd(options: LocalSgd, decay: float = 1.0) -> SGD:
    """Local SGD; ten steps when no length is given."""
    steps, epochs = local_length(options)
    rate = schedule(options["learning_rate"], decay)
    own = options["momentum"], options["weight_decay"]
    return SGD(rate, steps, epochs, options["batch"], *own)


def local_length(options: LocalTraining) -> tuple[int | None, int | None]:
    """Steps and epochs; ten steps when neither is given."""
    steps, epochs = options["steps"], options["epochs"]
    return (10, None) if steps is None and epochs is None else (steps, epochs)


def fixed(options: FixedCohort) -> Cohort:
    """A fixed number of clients, or everyone."""
    clients = options["clients"]
    return Everyone() if clients is None else FixedSize(clients)


def sampled(rate: float, clients: int | None, cap: int | None, honest: int | None = None) -> Cohort:
    """A fixed number of clients, or each with probability rate."""
    return Poisson(rate, cap, honest) if clients is None else FixedSize(clients, cap, honest)


def spaced(rate: float, clients: int | None, cap: int | None, correlation: Correlation) -> Cohort:
    """A cohort for correlated noise: a fixed number of clients, or turns with probability rate."""
    apart = correlation["separation"]
    if clients is not None:
        return Separated(clients, apart, cap)
    if correlation["noise"] == "blt" or cap is not None:
        raise UserError(
            "noise='blt' and cap need a fixed number of clients with correlated noise: sampling "
            "amplifies banded noise only, and without a cap. Give clients instead of rate."
        )
    return CyclicPoisson(rate, apart or max(int(1 / rate * (1 + 1e-9)), 1))


def correlated(multiplier: float | None, correlation: Correlation) -> Noise:
    """Banded or buffered noise."""
    if correlation["noise"] == "banded":
        return BandedNoise(multiplier, bands=correlation["bands"])
    return BufferedNoise(multiplier, buffers=correlation["buffers"])


def clip_at(norm: float | str) -> Bound:
    """Clip at a number, or at what a run without noise on the same data suggests."""
    if isinstance(norm, str):
        if norm != "probe":
            raise UserError(f"clip is '{norm}'; it must be a number, or 'probe'.")
        return ProbedClip()
    return Clip(norm)


def step(rate: Schedule, momentum: float) -> Server:
    """A server step, with momentum unless that is 0."""
    return Momentum(rate, momentum) if momentum else Step(rate)


def averaged(options: ServerStep, default: float | Schedule) -> Server:
    """A server step with momentum and decay; `default` where no rate is given."""
    rate = default if options["server_rate"] is None else options["server_rate"]
    return step(schedule(rate, options["decay"]), options["server_momentum"])


def gaussian(private: bool, multiplier: float | None) -> Noise:
    """Gaussian noise if private, or if its amount is given."""
    return Gaussian(multiplier) if private or multiplier is not None else NoNoise()


def few_bits(options: FewBits, multiplier: float | None) -> tuple[Quantize, Noise]:
    """Messages as they are with Gaussian noise, or rounded to levels with integer noise."""
    levels, at = options["levels"], options["noise_at"]
    if levels is None:
        return NoQuantization(), Gaussian(multiplier, at)
    if at == "client":
        raise UserError(
            "levels and noise_at='client' cannot be combined: the server adds rounded Gaussian "
            "noise. Use dp_norm_fedavg_discrete or dp_norm_fedavg_secagg for noise on clients."
        )
    if isinstance(levels, str) and levels != "auto":
        raise UserError(f"levels is '{levels}'; it must be a whole number, or 'auto'.")
    return ConditionalRound(None if levels == "auto" else levels), RoundedGaussian(multiplier)
