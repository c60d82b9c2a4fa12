"""Public facts about model and data that a plan uses, from settings or flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedveil.data.federated import Examples, Federated
from fedveil.data.origin import REAL, Origin
from fedveil.engines.task import Task
from fedveil.errors import UserError, unknown
from fedveil.models.catalog import build, suggest
from fedveil.parts.checks import count
from fedveil.random.streams import torch_generator
from fedveil.training.prepare import with_loss

if TYPE_CHECKING:
    from fedveil.training.settings import DataSettings, Settings

CLIENTS, EXAMPLES, CLASSES = 100, 20, 10  # the defaults of `fedveil train`
SHAPE = (1, 28, 28)
LENGTH = 80  # tokens of a sequence


@dataclass(frozen=True)
class SizeOptions:
    """Sizes given by flags, in addition to the settings."""

    dim: int | None = None
    shape: str | None = None
    classes: int | None = None
    examples: int | None = None  # per client
    pilot: str | None = None


@dataclass(frozen=True, eq=False)
class PublicFacts:
    """Sizes of a population and a model."""

    clients: int
    examples: float  # mean per client
    unit: str
    dim: int
    model: str = ""  # empty if only its dimension is known
    task: Task | None = None
    sample: Federated | None = None  # two all-zero examples of the right shape and type
    data: Federated | None = None  # the data named in the settings, if loaded

    @property
    def population(self) -> int:
        """The number of units to protect."""
        return round(self.clients * self.examples) if self.unit == "example" else self.clients

    @property
    def origin(self) -> Origin:
        """The origin of the named data; without data, the plan assumes real clients."""
        if self.data is None:
            return REAL
        return self.data.origin.by_example() if self.unit == "example" else self.data.origin


def facts(settings: Settings, sizes: SizeOptions, unit: str) -> PublicFacts:
    """PublicFacts from the data if the settings name them, otherwise from flags and defaults."""
    if sizes.dim is not None and settings.model is not None:
        raise UserError("Both --model and --dim are given. Give one of them.")
    named = settings.data.dataset is not None or settings.data.path is not None
    if sizes.dim is not None:
        return _of_dimension(settings, sizes, unit, sizes.dim)
    if named:
        return _of_data(settings, sizes, unit)
    clients, examples = _sizes(settings, sizes, unit)
    sample = _zeros(settings.model or "softmax", sizes)
    return _with_model(settings, sample, PublicFacts(clients, examples, unit, 1))


def _of_dimension(settings: Settings, sizes: SizeOptions, unit: str, dim: int) -> PublicFacts:
    count("The plan", "dim", dim)
    for name in ("shape", "classes", "pilot"):
        if getattr(sizes, name) is not None:
            raise UserError(
                f"--{name} needs a model, but only --dim is given. Give --model instead."
            )
    clients, examples = _sizes(settings, sizes, unit)
    return PublicFacts(clients, examples, unit, dim)


def _of_data(settings: Settings, sizes: SizeOptions, unit: str) -> PublicFacts:
    """Read only the numbers of clients and examples, the input shape and the classes."""
    for name in ("shape", "classes", "examples"):
        if getattr(sizes, name) is not None:
            raise UserError(f"--{name} is determined by the data. Remove the flag.")
    data = loaded(settings.data, settings)
    if unit == "client":
        data.refuse_by_example(settings.algorithm)
    known = PublicFacts(data.clients, len(data.labels) / data.clients, unit, 1, data=data)
    return _with_model(settings, _few(data), known)


def loaded(settings: DataSettings, run: Settings | None = None) -> Federated:
    """Load data that are on this machine; a plan downloads nothing.

    Of the data of a run to plan, statistics are computed as the run would compute them.
    """
    from fedveil.data.catalog import CATALOG
    from fedveil.training.settings import SYNTHETIC
    from fedveil.training.sources import load_data, load_for

    name = settings.dataset
    if settings.path is None and name is not None and name != SYNTHETIC:
        if name not in CATALOG:
            raise unknown("data set", name, CATALOG, "`fedveil datasets` lists all.")
        if not CATALOG[name].here():
            raise UserError(
                f"The data set '{name}' is not on this machine, and a plan downloads nothing. "
                "Put it where `fedveil datasets` looks, or give --clients, --shape and --classes."
            )
    return load_data(settings) if run is None else load_for(run)


def _with_model(settings: Settings, sample: Federated, known: PublicFacts) -> PublicFacts:
    name = settings.model or suggest(sample)
    sample, loss = with_loss(sample, settings.loss)
    module = build(name, sample, torch_generator(settings.seed, "model"))
    task = Task(module, sample.loss, given=loss)
    return replace(known, dim=task.dim, model=name, task=task, sample=sample)


def _sizes(settings: Settings, sizes: SizeOptions, unit: str) -> tuple[int, int]:
    """Clients and examples per client; if the unit is an example, one client holds them all."""
    alone = 1 if unit == "example" and sizes.examples is not None else CLIENTS
    clients = alone if settings.data.clients is None else settings.data.clients
    examples = settings.data.examples or EXAMPLES if sizes.examples is None else sizes.examples
    count("The plan", "clients", clients)
    count("The plan", "examples", examples)
    return clients, examples


def _few(data: Federated) -> Federated:
    """Two all-zero examples with the shape and type of these data."""
    inputs = torch.zeros(2, *data.inputs.shape[1:], dtype=data.inputs.dtype)
    labels = torch.zeros(2, *data.labels.shape[1:], dtype=data.labels.dtype)
    return _federated(data.name, inputs, labels, data.classes, data.loss)


def _zeros(model: str, sizes: SizeOptions) -> Federated:
    """Two all-zero examples of the requested shape."""
    shape, classes = _shape(sizes.shape), CLASSES if sizes.classes is None else sizes.classes
    count("The plan", "classes", classes)
    if model == "lstm":
        tokens = torch.zeros(2, *(shape if sizes.shape else (LENGTH,)), dtype=torch.int64)
        return _federated("the plan", tokens, tokens, classes, "cross_entropy")
    inputs = torch.zeros(2, *shape)
    if model == "linear":
        return _federated("the plan", inputs.flatten(1), torch.zeros(2), 1, "half_squared")
    return _federated("the plan", inputs, torch.zeros(2, dtype=torch.int64), classes)


def _federated(
    name: str, inputs: torch.Tensor, labels: torch.Tensor, classes: int, loss: str = "cross_entropy"
) -> Federated:
    offsets = torch.tensor([0, 1, 2])
    return Federated(name, inputs, labels, offsets, Examples(inputs, labels), classes, loss)


def _shape(text: str | None) -> tuple[int, ...]:
    """`1x28x28` as numbers.

    >>> _shape("3x32x32"), _shape(None)
    ((3, 32, 32), (1, 28, 28))
    """
    if text is None:
        return SHAPE
    parts = text.lower().replace("×", "x").split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(
            f"--shape {text} is not a shape. Write sizes separated by x, such as 1x28x28."
        )
    return tuple(int(part) for part in parts)
