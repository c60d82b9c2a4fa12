"""Measures: one number of a finished run, as the papers report it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedveil.errors import UserError, unknown
from fedveil.parts.discrete import PublishedLaplace
from fedveil.runs.saved import SavedRun

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.accounting.norms import Norms
    from fedveil.data.federated import Federated
    from fedveil.parts.noise import Noise
    from fedveil.recipe import Recipe

LAST = 5  # evaluations
POINTS = 25  # of a curve


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run and the data that it was trained on."""

    run: SavedRun
    data: Federated

    @property
    def model(self) -> dict[str, Tensor]:
        """The parameters of the released model."""
        return self.run.model()[0]

    def column(self, name: str) -> list[float | None]:
        """A column of metrics.parquet."""
        return [row.get(name) for row in self.run.rows]

    def mean(self, name: str) -> float:
        """The mean of a column over all rounds that have it."""
        known = [value for value in self.column(name) if value is not None]
        if not known:
            raise UserError(
                f"{self.run.path} has no {name}. Set diagnostics = true in the item's settings."
            )
        return float(np.mean(known))

    def last(self, name: str) -> float:
        """The mean of the last five evaluations; NaN if one of them diverged."""
        known = [value for value in self.column(name) if value is not None][-LAST:]
        return float(np.mean(known)) if known else math.nan


def accuracy(found: MeasuredRun) -> float:
    """Test accuracy in percent, mean of the last five evaluations."""
    return 100 * found.last("accuracy")


def error(found: MeasuredRun) -> float:
    """Test error in percent, mean of the last five evaluations."""
    return 100 - accuracy(found)


def final_accuracy(found: MeasuredRun) -> float:
    """Test accuracy of the released model, in percent."""
    return 100 * float(found.run.summary["accuracy"] or 0.0)


def suboptimality(found: MeasuredRun) -> float:
    """f(x) − f(x*), mean of the last five evaluations."""
    return found.last("loss") - optimal_loss(found.data)


def optimal_loss(data: Federated) -> float:
    """f(x*) of a problem with equally many examples at each client."""
    if data.optimum is None:
        raise UserError(f"'{data.name}' has no known optimum. Use another measure.")
    residuals = data.inputs[:].double() @ data.optimum.x - data.labels[:].double()
    return float(0.5 * residuals.square().mean())


def distance(found: MeasuredRun) -> float:
    """‖x − x*‖ of the last model."""
    if found.data.optimum is None:
        raise UserError(f"'{found.data.name}' has no known optimum. Use another measure.")
    (x,) = found.model.values()
    return float((x.flatten().double() - found.data.optimum.x).norm())


def position(found: MeasuredRun) -> float:
    """The only coordinate of the last model."""
    return float(next(iter(found.model.values())).flatten()[0])


def signal_to_noise(found: MeasuredRun) -> float:
    """‖mean bounded update‖/‖noise on the mean‖, mean over all rounds."""
    pairs = zip(found.column("signal"), found.column("noise"), strict=True)
    return float(np.mean([s / n for s, n in pairs if s is not None and n]))


def clipping_ratio(found: MeasuredRun) -> float:
    """B/c of DP-LSGD, Fig. 2, mean over all rounds."""
    return found.mean("second_moment") / float(found.run.settings["recipe"]["bound"]["norm"])


def update_norm(found: MeasuredRun) -> float:
    """The mean norm of an update before the bound, over all rounds."""
    return found.mean("norm")


def norm_variation(found: MeasuredRun) -> float:
    """Deviation over median of the norms of a round's updates: 0 if they are concentrated."""
    return found.mean("norm_deviation") / found.mean("norm_median")


def update_cosine(found: MeasuredRun) -> float:
    """Cosine of an update with the last step of the model, mean over clients and rounds."""
    return found.mean("cosine")


def bits(found: MeasuredRun) -> float:
    """Bits per coordinate of a message."""
    recipe, message = _message(found)
    wire = recipe.wire(message.dim, found.data.clients)
    return 32.0 if wire is None else float(wire.bits)


def true_delta(found: MeasuredRun) -> float:
    """The δ of one message of the published QTDL, at its own ε: that of any two unit vectors."""
    recipe, message = _message(found)
    sensitivity = message.sensitivity(recipe.adjacency())
    return float(_published(recipe.noise).true_delta(message, sensitivity))


def one_step_delta(found: MeasuredRun) -> float:
    """The δ of one message of the published QTDL if one coordinate changes by one level."""
    recipe, message = _message(found)
    return float(_published(recipe.noise).masses(message)[-1])


def _message(found: MeasuredRun) -> tuple[Recipe, Norms]:
    from fedveil.serialization.codec import recipe_from_plain

    recipe = recipe_from_plain(found.run.settings["recipe"])
    dim = sum(tensor.numel() for tensor in found.model.values())
    return recipe, recipe.message(dim)


def _published(noise: Noise) -> PublishedLaplace:
    if not isinstance(noise, PublishedLaplace):  # the measured claim is about this noise only
        raise UserError("Only calibration='das2021' has a claimed δ. Use another measure.")
    return noise


MEASURES: dict[str, Callable[[MeasuredRun], float]] = {
    method.__name__: method
    for method in (
        accuracy, error, final_accuracy, suboptimality, distance, position, signal_to_noise,
        clipping_ratio, update_norm, norm_variation, update_cosine, bits, true_delta,
        one_step_delta,
    )
}  # fmt: skip


def measured(name: str, path: Path, data: Federated) -> float:
    """A measure of a finished run."""
    if name not in MEASURES:
        raise unknown("measure", name, MEASURES)
    return MEASURES[name](MeasuredRun(SavedRun.open(path), data))


def curve(path: Path) -> list[tuple[int, float]]:
    """(round, test accuracy or loss) at up to 25 evaluations."""
    points = list(_evaluations(SavedRun.open(path)))
    step = max(1, len(points) // POINTS)
    return [(k, float(f"{v:.5g}")) for k, v in points[::-step][::-1]]


def _evaluations(run: SavedRun) -> Iterator[tuple[int, float]]:
    for row in run.rows:
        value = row.get("accuracy")
        value = row.get("loss") if value is None or math.isnan(value) else value
        if value is not None and math.isfinite(value):
            yield int(row["round"]), value
