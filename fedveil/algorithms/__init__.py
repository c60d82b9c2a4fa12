"""Every published method as a function of a few lines that returns a Recipe.

The first line of a docstring is the rule, then comes the citation. Where a paper's privacy claim
is false or silent, the recipe runs the paper's rule and the accounting is ours.
"""

from __future__ import annotations

from collections.abc import Callable

from fedveil.algorithms.adaptive import (
    dp_fedadagrad,
    dp_fedadam,
    dp_fedyogi,
    fedadagrad,
    fedadam,
    fedyogi,
)
from fedveil.algorithms.compensated import alpha_normec, fed_alpha_normec
from fedveil.algorithms.controlled import clip21_sgd2m, dp_scaffold, scaffold
from fedveil.algorithms.discrete import (
    dp_norm_fedavg_binomial,
    dp_norm_fedavg_discrete,
    dp_norm_fedavg_qtdl,
    dp_norm_fedavg_secagg,
)
from fedveil.algorithms.examples import dp_lsgd, dp_sgd
from fedveil.algorithms.noisy import (
    dp_fedavg,
    dp_fedavg_adaptive,
    dp_fedavg_coordinatewise,
    dp_ftrl,
    dp_norm_fedavg,
)
from fedveil.algorithms.plain import (
    clipped_fedavg,
    fedavg,
    fedprox,
    model_clipped_fedavg,
    norm_fedavg,
)
from fedveil.algorithms.silos import mr_mtl, silo_dp_fedavg
from fedveil.recipe import Recipe

ALGORITHMS: dict[str, Callable[..., Recipe]] = {
    method.__name__: method
    for method in (
        fedavg,
        fedprox,
        fedadagrad,
        fedadam,
        fedyogi,
        scaffold,
        model_clipped_fedavg,
        clipped_fedavg,
        dp_fedavg,
        dp_fedavg_adaptive,
        dp_fedavg_coordinatewise,
        dp_fedadagrad,
        dp_fedadam,
        dp_fedyogi,
        dp_ftrl,
        dp_scaffold,
        norm_fedavg,
        dp_norm_fedavg,
        dp_norm_fedavg_discrete,
        dp_norm_fedavg_secagg,
        dp_norm_fedavg_qtdl,
        dp_norm_fedavg_binomial,
        alpha_normec,
        fed_alpha_normec,
        clip21_sgd2m,
        dp_sgd,
        dp_lsgd,
        silo_dp_fedavg,
        mr_mtl,
    )
}

__all__ = [
    "ALGORITHMS",
    "alpha_normec",
    "clip21_sgd2m",
    "clipped_fedavg",
    "dp_fedadagrad",
    "dp_fedadam",
    "dp_fedavg",
    "dp_fedavg_adaptive",
    "dp_fedavg_coordinatewise",
    "dp_fedyogi",
    "dp_ftrl",
    "dp_lsgd",
    "dp_norm_fedavg",
    "dp_norm_fedavg_binomial",
    "dp_norm_fedavg_discrete",
    "dp_norm_fedavg_qtdl",
    "dp_norm_fedavg_secagg",
    "dp_scaffold",
    "dp_sgd",
    "fed_alpha_normec",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedprox",
    "fedyogi",
    "model_clipped_fedavg",
    "mr_mtl",
    "norm_fedavg",
    "scaffold",
    "silo_dp_fedavg",
]
