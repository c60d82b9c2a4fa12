"""Silos: institutions that protect their own records and do not trust the server.

    message of silo s = Σ_{i ∈ S_s} q_i + z_s,   S_s a Poisson sample of its own records

Each silo clips its records' updates, samples inside, adds its own noise and keeps its own ledger.
The server sees noisy sums only. It cannot bound a silo's sum again, so records rely on their own
silo and on nobody else. On a grid, the sums of all silos add up to that of dp_sgd over the union.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fedveil.data.federated import Federated
from fedveil.engines.asking import ask, noise_of_client, refuse_unfit_noise
from fedveil.engines.processes import ALONE
from fedveil.engines.updates import Engine
from fedveil.errors import UserError
from fedveil.loop import State, cohort_of, sum_of_messages
from fedveil.parts.discrete import DiscreteGaussian
from fedveil.parts.noise import NoNoise
from fedveil.parts.quantize import ConditionalRound
from fedveil.random.streams import Key, stream
from fedveil.recipe import Recipe, View
from fedveil.wire import Wire, bits_for

SERVER_NOT_TRUSTED = (
    "Silos do not trust the server, so view 'models' does not apply. Use --view messages, or "
    "--view sum."
)
FAR = 64.0  # standard deviations of noise that a message has room for


def in_silos(recipe: Recipe, view: View, honest: int) -> Recipe:
    """An example-level recipe for records in silos.

    View `messages`: each silo adds all of the noise to its own sum. View `sum`: the noise of
    `honest` silos adds up, as integers that secure aggregation can carry.
    """
    if recipe.unit != "example":
        raise UserError(
            f"{recipe.name} protects clients. In silos, use an example-level algorithm: dp_sgd or "
            "dp_lsgd."
        )
    if view == "models":
        raise UserError(SERVER_NOT_TRUSTED)
    if view == "messages":
        return replace(recipe, unit="record", view=view)
    cohort = recipe.cohort.with_honest(honest)
    quantize, noise = ConditionalRound(), DiscreteGaussian()
    return replace(recipe, unit="record", view=view, cohort=cohort, quantize=quantize, noise=noise)


def refuse_local_silos(recipe: Recipe) -> None:
    """Refuse silos that train for several steps between messages, which is only simulated."""
    if recipe.by_record:
        raise UserError(
            f"{recipe.name} is simulated only: a federation does not carry its silos' steps. In a "
            "federation of silos, use dp_sgd with --records N, one step per round."
        )


def silo_sum(
    recipe: Recipe, state: State, data: Federated, engine: Engine, key: Key
) -> tuple[Tensor, int]:
    """Σ q_i over a sample of the silo's own records, in grid steps, and how many were sampled."""
    quiet = without_noise(recipe)
    cohort = cohort_of(quiet, state, data.clients, key)
    total = sum_of_messages(quiet, state, data, engine, cohort, key, ALONE)
    return total.sum, len(cohort)


def silo_message(recipe: Recipe, state: State, data: Federated, engine: Engine, key: Key) -> Tensor:
    """The silo's sum and its own noise, int64 grid steps [dim]."""
    total, _ = silo_sum(recipe, state, data, engine, key)
    message, rng = recipe.message(len(state.x)), stream(key, state.round, "noise")
    if recipe.noise.on_messages:
        return total + torch.from_numpy(noise_of_client(recipe.noise, message, rng))
    noise: Tensor = ask(recipe.noise, "draw", message, 1, 1.0, rng)
    refuse_unfit_noise(recipe.noise, noise, message.dim)
    return total + noise


def without_noise(recipe: Recipe) -> Recipe:
    """The recipe of the data chain alone: who adds noise adds it elsewhere."""
    cohort = replace(recipe.cohort, honest=None) if recipe.cohort.honest else recipe.cohort  # type: ignore[type-var]
    return replace(recipe, noise=NoNoise(), cohort=cohort, view="models")


def silo_wire(recipe: Recipe, dim: int, records: int, silos: int) -> Wire:
    """Room for the sum of all records and all noise, as residues."""
    message = recipe.message(dim)
    expected = recipe.cohort.expected(records)
    most = min(expected + 10 * math.sqrt(expected) + 1, records)
    noise = recipe.noise.max_magnitude(message)
    deviation = recipe.noise.deviation_of_sum(message, 1.0, 1.0)
    if not noise and deviation is not None and message.grid is not None:
        noise = math.ceil(FAR * deviation / message.grid)
    reach = math.ceil(most * message.steps.linf) + silos * noise
    return Wire(bits_for(-reach, reach), modular=True)
