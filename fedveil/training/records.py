"""Record: the metrics of one round, a row of metrics.parquet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.accounting.rounding import rounded_up


@dataclass(frozen=True)
class Record:
    """The metrics of one round. Only evaluated rounds have test results and ε."""

    round: int  # counted from 1
    participants: int
    rejected: int
    norm: float | None  # None, here and below: not known to the server of a federation
    clipped_fraction: float | None
    signal: float | None
    noise: float | None
    seconds: float
    sent: int = 0  # bytes of all messages of the round
    threshold: float | None = None  # C_k of an adaptive clip
    aborted: bool = False  # too few clients arrived for the required noise; nothing was released
    loss: float | None = None
    accuracy: float | None = None
    metric: float | None = None  # the run's chosen metric, if it is neither accuracy nor loss
    metric_low: float | None = None  # 95 % interval of the metric that ranks runs, if these
    metric_high: float | None = None  # results carry noise
    epsilon: float | None = None  # so far: valid only if the stopping round was fixed in advance
    epsilon_planned: float | None = None  # of all planned rounds: holds whenever the run stops
    # Diagnostics (docs/diagnosis.md), if they are recorded and defined.
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
    along: float | None = None  # x − x* on the line to the start, and its distance from that line
    across: float | None = None


def recent(values: Sequence[float | None], count: int = 5) -> float | None:
    """The mean of the last `count` values that were measured; None if there is none.

    Das et al. 2022, Table 1 and Das et al. 2021, Table 2 average the last five rounds.

    >>> recent([0.1, None, 0.2, 0.4], count=2)
    0.30000000000000004
    """
    known = [value for value in values if value is not None and not math.isnan(value)][-count:]
    return sum(known) / len(known) if known else None


def quality(record: Record, metric: str = "", noisy: bool = False) -> str:
    """The chosen metric, or the accuracy if there are classes, else the loss."""
    how = "noisy " if noisy else ""
    if record.metric is not None and metric:
        return f"{how}{metric} {record.metric:.4g}"
    if record.accuracy is None or math.isnan(record.accuracy):
        return "" if record.loss is None else f"{how}loss {record.loss:.4g}"
    return f"{how}accuracy {record.accuracy:.1%}"


def spending(record: Record) -> str:
    """The ε of all planned rounds, which holds whenever the run stops."""
    if record.epsilon_planned is None:
        return "not private"
    if math.isinf(record.epsilon_planned):
        return "no guarantee"
    return f"planned ε = {rounded_up(record.epsilon_planned)}"
