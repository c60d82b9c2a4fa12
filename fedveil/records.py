"""A run in numbers: a Record for each round, as metrics.parquet has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """One round in numbers; test results and ε where the round was evaluated."""

    round: int  # rounds played so far, this one included
    participants: int
    rejected: int
    norm: float
    shrunk: float
    signal: float
    noise: float
    seconds: float
    sent: int = 0  # bytes of all messages of the round
    threshold: float | None = None  # of an adaptive clip
    void: bool = False  # too few came for the noise that was promised, so nothing was released
    loss: float | None = None
    accuracy: float | None = None
    epsilon: float | None = None  # so far: valid only if the round of stopping was fixed before
    epsilon_planned: float | None = None  # of all planned rounds: holds whenever the run stops
    # Diagnostics (docs/diagnosis.md), where they are recorded and mean something.
    norm_median: float | None = None  # of ‖w_i‖ before the bound
    norm_deviation: float | None = None
    cosine: float | None = None  # mean cos ∠(y_i − x_k, x_k − x_{k−1})
    bias_own: float | None = None  # mean |α_i − α̃_i|
    bias_shared: float | None = None  # mean |α̃_i − ᾱ|
    incremental_norm: float | None = None  # mean Ψ_i
    second_moment: float | None = None  # B
    memory_error: float | None = None  # mean ‖u_i − v_i‖
    heterogeneity: float | None = None  # mean Δ_i*
    distance: float | None = None  # ‖x − x*‖ after the round
    position_0: float | None = None  # x itself in two dimensions
    position_1: float | None = None
