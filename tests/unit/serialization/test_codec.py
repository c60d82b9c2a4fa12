from __future__ import annotations

import tomllib
from typing import Any, Literal

import pytest
import tomli_w

from fedveil.algorithms import ALGORITHMS
from fedveil.errors import UserError
from fedveil.parts.bound import Clip
from fedveil.parts.cohort import Poisson
from fedveil.parts.noise import NoNoise
from fedveil.parts.quantize import NoQuantization
from fedveil.parts.schedule import Constant, Decay, Schedule, Steps
from fedveil.parts.server import (
    Adam,
    LastIterate,
    Momentum,
    MovingAverage,
    Output,
    Server,
    Step,
)
from fedveil.recipe import Recipe
from fedveil.serialization.codec import (
    PARTS,
    check_value,
    part_from_plain,
    recipe_from_plain,
    to_plain,
)

NEEDED: dict[str, dict[str, Any]] = {
    "dp_norm_fedavg_qtdl": {"clients": 5},
    "dp_norm_fedavg_binomial": {"clients": 5, "trials": 10},
    "dp_norm_fedavg_secagg": {"clients": 5},
}


def example(name: str = "dp_fedavg") -> Recipe:
    return ALGORITHMS[name](**NEEDED.get(name, {}))


def plain(**changes: Any) -> dict[str, Any]:
    return {**to_plain(example()), **changes}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_survives_toml(name: str) -> None:
    recipe = example(name)
    text = tomli_w.dumps(to_plain(recipe))
    assert recipe_from_plain(tomllib.loads(text)) == recipe


def test_numbers_survive_toml_to_the_last_bit() -> None:
    recipe = example().with_noise(0.1 + 0.2, 10, 100, 1.0, 1e-5)
    again = recipe_from_plain(tomllib.loads(tomli_w.dumps(to_plain(recipe))))
    assert again.noise == recipe.noise


@pytest.mark.parametrize("part", [Momentum(momentum=0.0), Adam(first=0.0), MovingAverage(0.0)])
def test_a_zero_survives_toml_where_the_default_is_another_number(part: Any) -> None:
    assert part_from_plain(tomllib.loads(tomli_w.dumps(to_plain(part))), "server") == part


def test_a_schedule_with_a_list_survives_toml() -> None:
    part = Steps(0.5, (10, 20))
    assert part_from_plain(tomllib.loads(tomli_w.dumps(to_plain(part))), "rate") == part


def test_all_kinds_of_parts_are_known() -> None:
    kinds = {"Poisson", "SGD", "Difference", "NoMemory", "Clip", "NoNoise", "Gaussian", "Step"}
    assert kinds | {"LastIterate", "Constant", "Decay", "Steps"} <= set(PARTS)
    assert not {"LocalPlan", "Recipe", "Norms", "ClientMemory"} & set(PARTS)


def with_bound(**fields: Any) -> dict[str, Any]:
    return plain(bound=fields)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown kind": (with_bound(kind="Clap", norm=1.0), "Did you mean 'Clip'"),
    "no kind": (with_bound(norm=1.0), r"\[recipe\.bound\] has no kind\. Add one"),
    "a kind that is no text": (with_bound(kind=3), r"\[recipe\.bound\] has no kind\. Add one"),
    "an unknown field": (with_bound(kind="Clip", radius=1.0), "named 'radius'"),
    "a missing field": (with_bound(kind="Clip"), "Building a Clip from"),
    "a word for a number": (with_bound(kind="Clip", norm="one"), r"recipe\.bound\.norm is 'one'"),
    "true for a number": (with_bound(kind="Clip", norm=True), "it must be a number"),
    "a list for a number": (with_bound(kind="Clip", norm=[1.0]), "it must be a number"),
    "a number that will not do": (with_bound(kind="Clip", norm=-1.0), "norm is -1.0"),
    "a part in the wrong place": (
        with_bound(kind="Poisson", rate=0.5),
        "a part of kind AdaptiveClip, Clip",
    ),
    "a number for a part": (plain(cohort=3), "it must be a part of kind CyclicPoisson, Everyone"),
    "an unknown place of a recipe": (plain(luck=1), "'luck'"),
    "a unit that is none": (plain(unit="house"), "'client' or 'example'"),
    "parts that do not fit": (plain(bound={"kind": "Unbounded"}), "do not fit"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_recipe_is_one_sentence(name: str) -> None:
    recipe, words = BAD[name]
    with pytest.raises(UserError, match=words) as refusal:
        recipe_from_plain(recipe)
    assert "\n" not in str(refusal.value)


def test_a_recipe_without_local_work_is_refused() -> None:
    with pytest.raises(UserError, match="Building a Recipe from"):
        recipe_from_plain({"name": "x"})


FITS = [
    (1, float),
    (1.5, float | None),
    (None, float | None),
    (2, int),
    (True, bool),
    ("ig", Literal["gd", "ig"]),
    ("x", str),
    ((1, 2), tuple[int, ...]),
    (Decay(0.1), Schedule),
    (0.1, float | Schedule),
    (Step(Constant(1.0)), Server),
    (LastIterate(), Output),
]
MISFITS = [
    ("1", float),
    (True, float),
    (1, bool),
    (1.0, int),
    ("gg", Literal["gd", "ig"]),
    ((1, "x"), tuple[int, ...]),
    (1, tuple[int, ...]),
    (Clip(1.0), Schedule),
    (Poisson(0.5), float | Schedule),
    (Step(Constant(1.0)), Output),
    (LastIterate(), Server),
    (Schedule, Schedule),
]


@pytest.mark.parametrize(("value", "hint"), FITS)
def test_a_value_that_fits_is_taken(value: Any, hint: Any) -> None:
    check_value(value, hint, "here")


@pytest.mark.parametrize(("value", "hint"), MISFITS)
def test_a_value_that_does_not_fit_is_refused(value: Any, hint: Any) -> None:
    with pytest.raises(UserError, match=r"^here is .*; it must be "):
        check_value(value, hint, "here")


@pytest.mark.parametrize(("old", "part"), [("Silent", NoNoise()), ("Exact", NoQuantization())])
def test_parts_of_version_0_1_are_read_under_their_old_names(old: str, part: object) -> None:
    assert part_from_plain({"kind": old}, "recipe", type(part)) == part
