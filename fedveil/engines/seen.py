"""Statistics of each client in one round, and their summary (docs/diagnosis.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.engines.walks import Walked

Numbers = dict[str, float | None]


@dataclass(frozen=True, eq=False)
class Seen:
    """For each participant, in client order: ‖w_i‖, s_i and the cosine of its angle.

    A rejected update has the norm NaN; an undefined angle has the cosine NaN.
    """

    clients: np.ndarray
    norms: Tensor  # ‖w_i‖ before the bound, float64
    scales: Tensor  # s_i
    cosines: Tensor  # of y_i − x_k and x_k − x_{k−1}
    remembers: bool = False  # whether w_i = u_i − v_i is a memory error
    clip: float | None = None  # the threshold c of a clip; other bounds have no clipping bias
    walked: Walked | None = None  # for some participants, where batches are random

    def summary(self) -> Numbers:
        """The fields of a `Record` that these statistics determine."""
        sound = self.norms[~self.norms.isnan()]
        own, shared = self._bias()
        spread = float(sound.std(correction=0)) if len(sound) else None
        return {
            "norm_median": float(sound.quantile(0.5)) if len(sound) else None,
            "norm_deviation": spread,
            "cosine": mean(self.cosines),
            "bias_own": own,
            "bias_shared": shared,
            "memory_error": mean(self.norms) if self.remembers else None,
            **self._incremental(sound),
        }

    def _incremental(self, norms: Tensor) -> Numbers:
        """Ψ_i = max(‖w_i‖ − c, 0), DP-LSGD, Definition 4; B = √mean Ψ², DP-LSGD, Definition 5."""
        if self.clip is None or not len(norms):
            return {"incremental_norm": None, "second_moment": None}
        psi = (norms - self.clip).clamp_min(0)
        moment = float(psi.square().mean().sqrt())
        return {"incremental_norm": float(psi.mean()), "second_moment": moment}

    def _bias(self) -> tuple[float | None, float | None]:
        """mean |α_i − α̃_i| and mean |α̃_i − ᾱ|.  Zhang et al. 2022, Thm. 3.1."""
        if self.clip is None or self.remembers:
            return None, None
        alpha = self.scales[~self.norms.isnan()]
        expected = alpha
        if self.walked is not None:
            alpha, expected = self.scales[self.walked.places], self.walked.scales
        if not len(alpha):
            return None, None
        return mean((alpha - expected).abs()), mean((expected - expected.nanmean()).abs())


def mean(numbers: Tensor) -> float | None:
    """Mean of the finite numbers; None if there is none."""
    found = numbers[~numbers.isnan()]
    return float(found.mean()) if len(found) else None


def direction(moved: Tensor | None) -> Tensor | None:
    """The last global update as a unit vector; None if there was none or it was zero."""
    length = 0.0 if moved is None else float(moved.double().norm())
    if moved is None or not 0 < length < torch.inf:
        return None
    return (moved.double() / length).float()
