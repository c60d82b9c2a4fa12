"""Free checks of a released sum: what no sum of honest messages can be.  They cost no privacy.

Masked messages cannot be checked one by one, so one malicious client can spoil a sum. A sum that it
has made uniformly random, or long, is recognized here before it reaches the model.
"""

from __future__ import annotations

import math

import numpy as np

from fedveil.federation.secagg.refusals import Aborted

FAILURE = 2.0**-40  # probability that a sum of honest messages exceeds `largest_norm`


def largest_norm(survivors: int, dim: int, l2: float, proxy: float) -> float:
    """s·l2 + √(s·proxy·(d + 2√(d·x) + 2x)), x = ln 2^40: ‖sum‖₂ is below, but for 2^-40.

    `l2` bounds a message without its noise. `proxy` is the noise's sub-Gaussian variance proxy per
    coordinate: σ² for Gaussian noise, M² for any noise of mean zero within ±M. The bound is that of
    Hsu, Kakade and Zhang 2012.
    """
    x = -math.log(FAILURE)
    noise = survivors * proxy * (dim + 2 * math.sqrt(dim * x) + 2 * x)
    return survivors * l2 + math.sqrt(noise)


def check_sum(total: np.ndarray, survivors: int, linf: float, l2: float = math.inf) -> None:
    """|sum_j| ≤ s·linf and ‖sum‖₂ ≤ l2, or `Aborted("spoiled")`.

    `total` has its signs back (`wire.settle`). `linf` bounds a coordinate of one message with its
    noise, `l2` the norm of the whole sum (`largest_norm`).
    """
    farthest = int(np.abs(total).max(initial=0))
    if farthest > survivors * linf:
        raise Aborted(
            "spoiled",
            f"A coordinate of the sum is {farthest}, but {survivors} clients can reach only "
            f"{survivors * linf:g}: a client is not honest. Discard the sum.",
        )
    norm = float(np.linalg.norm(total.astype(np.float64)))
    if norm > l2:
        raise Aborted(
            "spoiled",
            f"The norm of the sum is {norm:.4g}, but honest messages reach only {l2:.4g}: a client "
            "is not honest. Discard the sum.",
        )
