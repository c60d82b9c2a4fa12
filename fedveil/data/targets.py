"""Numeric targets of a table: one number per row, scaled by a public range if one is declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedveil.data.cells import cells_of
from fedveil.data.encoding import numbers_of
from fedveil.errors import UserError

if TYPE_CHECKING:
    import polars as pl

LARGEST = 3e38  # of a float32
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, eq=False)
class NumericTargets:
    """Each row's target: a function of its own cell and of the declared range."""

    label: str
    column: Tensor  # float32; 0 where there is no number
    known: np.ndarray  # which rows have one
    range: tuple[float, float] | None  # scaled from this range to 0…1, and clipped

    def notes(self, kept: np.ndarray) -> list[str]:
        """What was left out, and how targets are scaled."""
        gone = int((kept & ~self.known).sum())
        notes = [f"Left out {gone} rows whose '{self.label}' is not a number."] if gone else []
        if self.range is not None:
            low, high = self.range
            return [*notes, f"'{self.label}' is scaled from {low:g} … {high:g} to 0 … 1."]
        return [
            *notes,
            f"'{self.label}' is not scaled. If its range is public, declare it for faster "
            f"training: --data ranges='{{{self.label}=[0,100]}}'",
        ]


def others(ranges: Ranges, label: str) -> dict[str, tuple[float, float]]:
    """The declared ranges of input columns."""
    return {name: span for name, span in ranges.items() if name != label}


def numeric_targets(column: pl.Series, label: str, ranges: Ranges) -> NumericTargets:
    """float32 targets; with a declared range, (y − low)/(high − low), clipped to 0…1."""
    found = numbers_of(cells_of(column))
    known = np.abs(found) <= LARGEST
    if not known.any():
        raise UserError(
            f"No cell of the label column '{label}' is a number. Name a numeric column, or leave "
            "out the numeric loss or target."
        )
    values, span = np.where(known, found, 0.0), ranges.get(label)
    if span is not None:
        low, high = span
        if not -LARGEST < low < high < LARGEST:
            raise UserError(f"The range of '{label}' is {low} to {high}. Give low < high.")
        values = ((values - low) / (high - low)).clip(0, 1)
    return NumericTargets(label, torch.from_numpy(values.astype(np.float32)), known, span)


def refuse_classes(classes: Sequence[str] | None, label: str) -> None:
    """Refuse declared classes of a numeric target."""
    if classes is not None:
        raise UserError(f"classes is given, but '{label}' is a numeric target. Remove classes.")
