"""Published algorithms: shared parameters are defined once and listed in full everywhere."""

from __future__ import annotations

import ast
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.algorithms import (
    ALGORITHMS,
    dp_fedavg,
    dp_fedavg_adaptive,
    dp_norm_fedavg_qtdl,
    fed_alpha_normec,
)
from fedveil.algorithms.published import meanings
from fedveil.errors import UserError
from fedveil.parts import Constant, MiniBatchGD, Piecewise
from fedveil.serialization.codec import check_value, hints_of

LINES = 25  # docstring and decorator included; 20 without the docstring


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_parameter_has_a_meaning_a_default_that_fits_and_a_line_of_help(name: str) -> None:
    method = ALGORITHMS[name]
    parameters, said, hints = (
        inspect.signature(method).parameters,
        meanings(method),
        hints_of(method),
    )
    assert not {p.kind for p in parameters.values()} & {inspect.Parameter.VAR_KEYWORD}
    assert set(said) == set(parameters)
    for parameter in parameters.values():
        assert said[parameter.name].endswith(".")
        assert f"\n    {parameter.name}: {said[parameter.name]}" in (method.__doc__ or "")
        if parameter.default is not parameter.empty:
            check_value(parameter.default, hints[parameter.name], parameter.name)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_short(name: str) -> None:
    source = inspect.getsource(inspect.unwrap(ALGORITHMS[name]))
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    docstring = function.body[0]
    documented = (docstring.end_lineno or 0) - docstring.lineno + 1
    assert len(source.splitlines()) <= LINES
    assert len(source.splitlines()) - documented <= 20


def test_shared_parameters_reach_the_parts() -> None:
    recipe = dp_fedavg(rate=0.3, cap=4, steps=2, weight_decay=0.1, server_momentum=0.5)
    assert (recipe.cohort.rate, recipe.cohort.cap) == (0.3, 4)  # type: ignore[attr-defined]
    assert (recipe.local.steps, recipe.local.weight_decay) == (2, 0.1)  # type: ignore[attr-defined]
    assert recipe.server.momentum == 0.5  # type: ignore[attr-defined]


def test_wrong_parameters_are_named_with_their_algorithm() -> None:
    with pytest.raises(UserError, match=r"dp_fedavg: got an unexpected keyword argument 'clop'"):
        dp_fedavg(clop=1.0)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"dp_fedavg_adaptive: .*'levels'"):
        dp_fedavg_adaptive(levels=3)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"dp_norm_fedavg_qtdl: missing .*'clients'"):
        dp_norm_fedavg_qtdl()  # type: ignore[call-arg]
    with pytest.raises(UserError, match="levels is 'many'"):
        dp_fedavg(levels="many")  # type: ignore[arg-type]


EVEN = {
    "local": ("learning_rate", "momentum", "weight_decay"),
    "server": ("server_momentum",),
}
WITHOUT = {  # parameters that make no sense for an algorithm
    "model_clipped_fedavg": ("server_momentum",),  # the server's model is the mean of models
    "alpha_normec": ("momentum", "weight_decay"),  # its local step is an exact gradient
    "fed_alpha_normec": ("momentum", "weight_decay"),
    "clip21_sgd2m": ("momentum", "weight_decay", "server_momentum"),  # it has two of its own
    **dict.fromkeys(("scaffold", "dp_scaffold"), ("momentum", "server_momentum")),  # controls
    **dict.fromkeys(("silo_dp_fedavg", "mr_mtl"), ("momentum", "server_momentum")),  # x is a mean
    **{  # `first` is their momentum
        f"{private}{name}": ("server_momentum",)
        for private in ("", "dp_")
        for name in ("fedadagrad", "fedadam", "fedyogi")
    },
}
DECAYS = sorted(name for name, method in ALGORITHMS.items() if "decay" in meanings(method))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_local_and_server_options_are_the_same_wherever_they_make_sense(name: str) -> None:
    known = inspect.signature(ALGORITHMS[name]).parameters
    wanted = {p for group in EVEN.values() for p in group} - {*WITHOUT.get(name, ())}
    assert wanted <= known.keys()
    means = ("model_clipped_fedavg", "clip21_sgd2m", "silo_dp_fedavg", "mr_mtl")
    assert name in means or "server_rate" in known


def test_learning_rates_decay_in_all_algorithms_whose_theory_has_no_constant_one() -> None:
    assert ALGORITHMS.keys() - DECAYS <= WITHOUT.keys()


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - WITHOUT.keys()))
def test_momentum_decay_and_weight_decay_reach_the_parts(name: str) -> None:
    needed = {"clients": 5} if "qtdl" in name or "binomial" in name or "secagg" in name else {}
    recipe = ALGORITHMS[name](
        momentum=0.3, weight_decay=0.2, decay=0.5, server_momentum=0.7, server_rate=2.0, **needed
    )
    local, server = recipe.local, recipe.server
    assert (local.momentum, local.weight_decay) == (0.3, 0.2)  # type: ignore[attr-defined]
    assert local.rate(1) == local.rate(0) / 2
    assert (server.inertia, server.rate_at(0)) == (0.7, 2.0)


def test_smoothed_normalization_takes_mini_batches_and_momentum() -> None:
    recipe = fed_alpha_normec(batch=8, steps=2, server_momentum=0.9)
    assert recipe.local == MiniBatchGD(Constant(0.1), 2, 8)
    plan = recipe.local.plan(torch.tensor([20, 5]), 0, np.random.default_rng(0))
    assert plan.rates.tolist() == [[pytest.approx(0.05)] * 2] * 2  # γ/T
    assert (plan.index >= 0).sum(dim=2).tolist() == [[8, 8], [5, 5]]
    with pytest.raises(UserError, match="one example per step"):
        fed_alpha_normec(local="ig", batch=8)
    with pytest.raises(UserError, match="has no momentum"):
        fed_alpha_normec(normalize_server=True, server_momentum=0.5)


def test_piecewise_rates_need_one_rate_more_than_changes() -> None:
    rate = Piecewise((1.0, 0.5, 0.1), at=(100, 200))
    assert [rate(k) for k in (0, 99, 100, 199, 200)] == [1.0, 1.0, 0.5, 0.5, 0.1]
    for wrong in ((), (200, 100), (100, 100)):
        with pytest.raises(UserError, match="do not fit"):
            Piecewise((1.0, 0.5, 0.1), at=wrong)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"learning_rate": -1}, "dp_fedavg: learning_rate is -1; it must be 0 or a number above"),
        ({"learning_rate": -1, "decay": 0.5}, "dp_fedavg: learning_rate is -1;"),
        ({"decay": -2.0}, "dp_fedavg: decay is -2.0;"),
        ({"server_rate": -1.0}, "dp_fedavg: server_rate is -1.0;"),
        ({"clip": -1.0}, "dp_fedavg: clip is -1.0;"),
        ({"clip": math.nan}, "dp_fedavg: clip is nan;"),
        ({"rate": 2.0}, "dp_fedavg: rate is 2.0;"),
        ({"noise_multiplier": -1, "weight_decay": -1}, "dp_fedavg: noise_multiplier is -1;"),
    ],
)
def test_a_refused_value_is_named_by_the_parameter_and_not_by_a_field(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        dp_fedavg(**given)
