"""A pilot: a small run of the plan that measures the norms of updates and how far clients agree.

Fewer clients train the planned recipe from the planned initial model. The noise on the mean and the
variance from client sampling are those of the planned cohort. `signal.Spread` then converts what
the pilot measures to the planned sampling. No ε covers a pilot on private data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.data.columns import DataColumn
from fedveil.data.federated import Examples, Federated, same_contents
from fedveil.engines.updates import taken
from fedveil.errors import UserError
from fedveil.loop import Info, begin, run_round
from fedveil.models.losses import target_of
from fedveil.parts.checks import count
from fedveil.parts.cohort import Cohort, Everyone, Poisson
from fedveil.parts.noise import Gaussian, NoNoise
from fedveil.parts.quantize import NoQuantization
from fedveil.planning.compute import engine_for
from fedveil.planning.facts import PublicFacts, loaded
from fedveil.planning.noise import deviation
from fedveil.planning.signal import MeasuredUpdates, Spread
from fedveil.random.streams import run_key
from fedveil.recipe import Recipe
from fedveil.serialization.codec import identified

if TYPE_CHECKING:
    from fedveil.training.settings import DataSettings, Settings

OWN, SYNTHETIC = "own", "synthetic"
CLIENTS, ROUNDS = 200, 50  # default maximum
LEAK = (
    "The pilot read private data without noise. No ε covers its results or settings chosen from "
    "them. A pilot on synthetic or public data costs no privacy."
)


@dataclass(frozen=True, eq=False)
class Material:
    """The data of a pilot."""

    data: Federated
    source: str
    private: bool = False


def material(name: str, settings: Settings, known: PublicFacts, clients: int = CLIENTS) -> Material:
    """Synthetic data, the data of the settings, a public data set, or those of a settings file."""
    count("The pilot", "clients", clients)
    rng = np.random.default_rng(settings.seed)
    if name == SYNTHETIC:
        return Material(_synthetic(known, clients, settings.data.alpha), "synthetic data")
    if name == OWN:
        if known.data is None:
            raise UserError(
                "--pilot own needs data, but the settings name none. Name them with --dataset or "
                "--path, or use --pilot synthetic."
            )
        return _drawn_from(known, known.data, "the planned data", clients, rng)
    if name.endswith(".toml"):
        from fedveil.training.settings import read_settings

        other = read_settings(Path(name), {}).data
        return _drawn_from(known, loaded(other), f"the data of {name}", clients, rng)
    return _drawn_from(known, loaded(_public(name, settings.data)), name, clients, rng)


def _drawn_from(
    known: PublicFacts, data: Federated, source: str, clients: int, rng: np.random.Generator
) -> Material:
    """A sample of the units of real data; private if it is the data to be trained on."""
    from fedveil.ledger.charging import refuse_on_budget

    if known.unit == "client":
        data.refuse_by_example("This pilot")
    refuse_on_budget(data, "a pilot")
    return Material(_fitting(known, data, clients, rng), source, _same(known.data, data))


def _same(own: Federated | None, data: Federated) -> bool:
    """Whether these are the examples to be trained on, in any split over clients."""
    if own is None or len(own.labels) != len(data.labels):
        return False
    return own is data or same_contents(own.contents(), data.contents())


def _public(name: str, like: DataSettings) -> DataSettings:
    """A public data set, partitioned over clients like the planned data."""
    split = like.model_dump(include={"partition", "per_client", "alpha", "examples", "seed"})
    clients = like.simulate_clients or like.clients if like.partition else None
    return type(like)(dataset=name, clients=clients, **split)


def run_pilot(
    recipe: Recipe,
    known: PublicFacts,
    chosen: Material,
    rounds: int,
    limit: int = ROUNDS,
    seed: int = 0,
) -> MeasuredUpdates:
    """Train the recipe (with calibrated noise) on the pilot's clients for its first rounds."""
    count("The pilot", "rounds", limit)
    assert known.task is not None
    data, trained = chosen.data, min(rounds, limit)
    small = _small(recipe, known, data.clients, rounds)
    engine = engine_for(known.task, data, small.local)
    key = run_key("pilot", seed, identified(small), data.fingerprint())
    state = begin(small, known.task.flatten(), data, rounds, key)
    norms, cosines = [], []
    for _ in range(trained):
        state, info = run_round(small, state, data, engine, key)
        if not len(info.norms):
            continue
        norms.append(info.norms * _to_start(small, info))
        cosines.append(_spread(small, data.clients, info).cosine)
    if not norms or not all(math.isfinite(cosine) for cosine in cosines):
        raise UserError(
            "The pilot produced no update with a finite norm. Lower the learning rate, or use more "
            "clients: --pilot-clients."
        )
    source = f"a pilot of {trained} rounds with {data.clients} {known.unit}s of {chosen.source}"
    return MeasuredUpdates(tuple(norms), tuple(cosines), source)


def _small(recipe: Recipe, known: PublicFacts, clients: int, rounds: int) -> Recipe:
    """The recipe for the pilot, with the planned noise and sampling variance on the mean."""
    cohort = _small_cohort(recipe, known, clients)
    amount = deviation(recipe, known.dim, known.population, rounds)
    amount /= recipe.cohort.expected(known.population)
    if amount == 0:
        return replace(recipe, cohort=cohort, quantize=NoQuantization(), noise=NoNoise())
    bound = recipe.bound.norms(known.dim).l2
    noise = Gaussian(amount * cohort.expected(clients) / bound)
    return replace(recipe, cohort=cohort, quantize=NoQuantization(), noise=noise, view="models")


def _small_cohort(recipe: Recipe, known: PublicFacts, clients: int) -> Cohort:
    """p of the pilot's N with 1/p − 1/N = (1 − q)/r: the sampling variance is the planned one.

    Clients with memory are sampled at the planned rate instead.
    """
    expected = recipe.cohort.expected(known.population)
    if recipe.memory.kept:
        rate = max(expected / known.population, min(2 / clients, 1.0))
    else:
        rate = 1 / (1 + clients * (1 - expected / known.population) / expected)
    return Everyone() if rate == 1 else Poisson(rate)


def _to_start(recipe: Recipe, info: Info) -> float:
    """The factor that rescales norms of an adaptive bound to its first threshold."""
    first = recipe.bound.threshold
    return first / info.threshold if first and info.threshold else 1.0


def _spread(recipe: Recipe, clients: int, info: Info) -> Spread:
    square = float((info.scales * info.norms).square().mean())
    return Spread.measured(info.signal or 0.0, square, recipe.cohort, clients)


def _synthetic(known: PublicFacts, clients: int, alpha: float) -> Federated:
    from fedveil.data.synthetic import synthetic

    sample = known.sample
    if sample is None or not sample.inputs.dtype.is_floating_point:
        raise UserError("There are no synthetic token sequences. Name public data with --pilot.")
    if target_of(sample.loss) != "class":
        raise UserError("There are no synthetic data with numeric targets. Use --pilot own.")
    shape = tuple(sample.inputs.shape[1:])
    each = max(1, round(known.examples))
    people = clients
    if known.unit == "example":
        each = min(each, clients)
        people = -(-clients // each)
    made = synthetic(people, each, math.prod(shape), sample.classes, alpha)
    inputs, labels = made.inputs[:].reshape(-1, *shape), made.labels[:]
    data = replace(made, inputs=inputs, labels=labels, test=Examples(inputs[:1], labels[:1]))
    return data.by_example() if known.unit == "example" else data


def _fitting(
    known: PublicFacts, data: Federated, clients: int, rng: np.random.Generator
) -> Federated:
    """A sample of the units, if the planned model accepts the data."""
    assert known.sample is not None
    sample = known.sample
    wanted = tuple(sample.inputs.shape[1:]), sample.classes, target_of(sample.loss)
    given = tuple(data.inputs.shape[1:]), data.classes, target_of(data.loss)
    if wanted != given:
        raise UserError(
            f"The pilot's data '{data.name}' have inputs of shape {list(given[0])} and {given[1]} "
            f"classes, but the planned model expects {list(wanted[0])} and {wanted[1]}. Use data "
            "of the same shape, or --pilot synthetic."
        )
    if known.unit == "example":
        data = data.by_example()
    return _some(data, min(clients, data.clients), rng)


def _some(data: Federated, clients: int, rng: np.random.Generator) -> Federated:
    """A sample of the units, drawn without replacement."""
    chosen = torch.from_numpy(np.sort(rng.choice(data.clients, clients, replace=False)))
    sizes = data.sizes[chosen]
    ends = sizes.cumsum(0)
    rows = torch.arange(int(ends[-1])) + (data.offsets[chosen] - ends + sizes).repeat_interleave(
        sizes
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    return replace(
        data, inputs=_rows(data.inputs, rows), labels=_rows(data.labels, rows), offsets=offsets
    )


def _rows(column: DataColumn, rows: torch.Tensor) -> torch.Tensor:
    return taken(column, rows)
