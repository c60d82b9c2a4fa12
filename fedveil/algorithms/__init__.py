"""Every published method as a function of a few lines that returns a Recipe.

The first line of a docstring is the rule, then comes the citation. Where a paper's privacy claim
is false or silent, the recipe runs the paper's rule and the accounting is ours.
"""

from __future__ import annotations

from collections.abc import Callable

from fedveil.algorithms.compensated import alpha_normec, fed_alpha_normec
from fedveil.algorithms.discrete import (
    dp_norm_fedavg_binomial,
    dp_norm_fedavg_discrete,
    dp_norm_fedavg_qtdl,
    dp_norm_fedavg_secagg,
)
from fedveil.algorithms.examples import dp_lsgd, dp_sgd
from fedveil.algorithms.noisy import dp_fedavg, dp_fedavg_adaptive, dp_norm_fedavg
from fedveil.algorithms.plain import (
    clipped_fedavg,
    fedavg,
    fedprox,
    model_clipped_fedavg,
    norm_fedavg,
)
from fedveil.recipe import Recipe

ALGORITHMS: dict[str, Callable[..., Recipe]] = {
    method.__name__: method
    for method in (
        fedavg,
        fedprox,
        model_clipped_fedavg,
        clipped_fedavg,
        dp_fedavg,
        dp_fedavg_adaptive,
        norm_fedavg,
        dp_norm_fedavg,
        dp_norm_fedavg_discrete,
        dp_norm_fedavg_secagg,
        dp_norm_fedavg_qtdl,
        dp_norm_fedavg_binomial,
        alpha_normec,
        fed_alpha_normec,
        dp_sgd,
        dp_lsgd,
    )
}

__all__ = [
    "ALGORITHMS",
    "alpha_normec",
    "clipped_fedavg",
    "dp_fedavg",
    "dp_fedavg_adaptive",
    "dp_lsgd",
    "dp_norm_fedavg",
    "dp_norm_fedavg_binomial",
    "dp_norm_fedavg_discrete",
    "dp_norm_fedavg_qtdl",
    "dp_norm_fedavg_secagg",
    "dp_sgd",
    "fed_alpha_normec",
    "fedavg",
    "fedprox",
    "model_clipped_fedavg",
    "norm_fedavg",
]
