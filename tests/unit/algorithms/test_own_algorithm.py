"""Algorithms and parts of the user's own: by name in settings, and back from recipe.toml."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor

import fedveil as fv
from fedveil.accounting.norms import Norms
from fedveil.algorithms.calling import call, method_named
from fedveil.errors import UserError
from fedveil.parts.bound import Bound, Clip, within
from fedveil.parts.noise import Gaussian
from fedveil.parts.statistics import Statistics
from fedveil.privacy.statement import statement
from fedveil.recipe import Recipe
from fedveil.serialization.code import code_of
from fedveil.serialization.codec import identified, recipe_from_plain, to_plain
from fedveil.training.prepare import prepare
from fedveil.training.settings import Settings, read_settings, resolve_recipe

SOURCE = '''
import dataclasses
import hashlib
from fedveil import algorithms
from fedveil.parts.bound import Bound, Clip
from fedveil.recipe import Recipe
from fedveil.serialization.codec import to_plain

CALLED = []


@dataclasses.dataclass(frozen=True)
class Half(Bound):
    norm: float
    inner: Clip = Clip(1.0)

    def scale(self, norms):
        return Clip(self.norm / 2).scale(norms)

    def norms(self, dim):
        return Clip(self.norm / 2).norms(dim)


@dataclasses.dataclass
class Thawed(Half.__mro__[1]):
    norm: float = 1.0
    def scale(self, norms): return norms
    def norms(self, dim): return Clip(self.norm).norms(dim)


@dataclasses.dataclass(frozen=True)
class Else:
    norm: float = 1.0

    def __post_init__(self):
        CALLED.append("constructed")


def dp_half(norm: float = 1.0, *, steps: int = 1, **options) -> Recipe:
    """x ← x − β·half."""
    return dataclasses.replace(
        algorithms.dp_fedavg(steps=steps, **options), name="dp_half", bound=Half(norm)
    )


def needy(norm: float) -> Recipe:
    return dp_half(norm)


def local_class() -> Recipe:
    @dataclasses.dataclass(frozen=True)
    class Inner(Half):
        pass
    return dataclasses.replace(dp_half(), bound=Inner(1.0))


def broken() -> Recipe:
    raise KeyError("lost")


def lying() -> Recipe:
    return 3


def dangerous(steps: int = 1):
    CALLED.append("called")


def changed() -> Recipe:
    return dataclasses.replace(dp_half(), bound=Half(1.0, 3))
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The modules fedveil_test_own and fedveil_test_other in the current directory."""
    for name in ("fedveil_test_own", "fedveil_test_other"):
        (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVEIL_LEDGER", str(tmp_path / "ledger.sqlite"))
    yield tmp_path
    for name in ("fedveil_test_own", "fedveil_test_other"):
        sys.modules.pop(name, None)


def half(module: str = "fedveil_test_own", **parameters: Any) -> Recipe:
    return call(f"{module}:dp_half", parameters)


def plain_half(**bound: Any) -> dict[str, Any]:
    return {**to_plain(fv.algorithms.dp_fedavg()), "bound": bound}


@pytest.mark.usefixtures("own")
def test_a_recipe_with_a_part_of_one_s_own_survives_toml() -> None:
    recipe = half(norm=0.3)
    plain = tomllib.loads(tomli_w.dumps(to_plain(recipe)))
    assert plain["bound"] == {
        "kind": "fedveil_test_own:Half", "norm": 0.3, "inner": {"kind": "Clip", "norm": 1.0},
    }  # fmt: skip
    assert recipe_from_plain(plain) == recipe


@pytest.mark.usefixtures("own")
def test_an_own_algorithm_is_called_from_settings_and_its_recipe_is_checked_against_it() -> None:
    settings = Settings(algorithm="fedveil_test_own:dp_half", parameters={"norm": 2, "rate": 0.3})
    recipe = resolve_recipe(settings)
    assert (recipe.name, recipe.bound.norm) == ("dp_half", 2)  # type: ignore[attr-defined]
    written = settings.model_copy(update={"recipe": to_plain(recipe)})
    assert resolve_recipe(written) == recipe
    edited = to_plain(dataclasses.replace(recipe, bound=Clip(9.0)))
    with pytest.raises(UserError, match="does not match their algorithm and parameters"):
        resolve_recipe(settings.model_copy(update={"recipe": edited}))


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a typing error in a word": ("dp_half", {"norm": "much"}, "norm is 'much'; it must be a num"),
    "a wrong kind behind a star": ("dp_half", {"steps": 1.5}, "steps is 1.5; it must be a whole"),
    "a parameter that nobody takes": ("dp_half", {"stepz": 1}, "dp_fedavg: .*argument 'stepz'"),
    "the stars themselves": ("needy", {"norm": 1.0, "options": 1}, "named 'options'"),
    "a needed one left out": ("needy", {}, "needs norm. Pass it with --set norm="),
    "one that raises": ("broken", {}, "failed with KeyError"),
    "one that gives something else": ("lying", {}, "returned a int, not a fedveil.Recipe"),
    "a class in a function": ("local_class", {}, "Move it to the top level of a module"),
    "a field that is no value": ("changed", {}, "inner is 3; it must be a part of kind Clip"),
    "a function that is not there": ("dp_halv", {}, "'dp_halv'. Did you mean 'dp_half'"),
}  # fmt: skip


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("name", "parameters", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(name: str, parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        call(f"fedveil_test_own:{name}", parameters)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "name", ["fedveil_test_own:dangerous", "shutil:rmtree", "os:getcwd", "fedveil_test_own:Half"]
)
def test_a_function_that_does_not_say_it_makes_recipes_is_never_called(name: str) -> None:
    with pytest.raises(UserError, match="annotated with -> Recipe"):
        call(name, {})
    with pytest.raises(UserError, match="annotated with -> Recipe"):
        method_named(name)
    module = sys.modules.get("fedveil_test_own")
    assert module is None or module.CALLED == []


def test_a_statement_says_that_own_parts_are_taken_on_trust() -> None:
    recipe = dataclasses.replace(call("dp_fedavg", {"noise_multiplier": 2.0}), name="mine")
    told = f"User-defined parts ({__name__}:Third) do what they claim"
    assert told not in statement(recipe, 10, 100, 1, 1e-5).text()
    mine = dataclasses.replace(recipe, bound=Third())
    assert mine.foreign == (f"{__name__}:Third",)
    assert told in statement(mine, 10, 100, 1, 1e-5).text()


@dataclasses.dataclass(frozen=True)
class Third(Bound):
    """A third of every update, and of the bound."""

    def scale(self, norms: Tensor) -> Tensor:
        return Clip(1 / 3).scale(norms)

    def norms(self, dim: int) -> Norms:
        return within(1 / 3, dim)


def test_an_unknown_algorithm_s_sentence_says_that_one_can_bring_one_s_own() -> None:
    with pytest.raises(UserError, match=r"package[.]module:function"):
        call("dp_sofd", {})


PARTS: dict[str, tuple[str, str]] = {
    "of a script": ("__main__:Half", "Move it to the top level of a module"),
    "of a function": ("fedveil_test_own:f.<locals>.Half", "Move it to the top level of a module"),
    "not frozen": (
        "fedveil_test_own:Thawed",
        "not a frozen dataclass defined in 'fedveil_test_own'",
    ),
    "imported there": (
        "fedveil_test_own:Clip",
        "not a frozen dataclass defined in 'fedveil_test_own'",
    ),
    "a function": ("fedveil_test_own:dp_half", "not a frozen dataclass"),
    "a function of the system": ("os:system", "not a frozen dataclass"),
    "no module": ("fedveil_absent:Half", "There is no module 'fedveil_absent'"),
    "no class": ("fedveil_test_own:Halv", "no class 'Halv'. Did you mean 'Half'"),
    "no name": ("fedveil_test_own:Half()", "does not name a part"),
    "another kind of part": ("fedveil_test_own:Else", "it must be a part of kind AdaptiveClip"),
}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("kind", "sentence"), PARTS.values(), ids=PARTS)
def test_what_is_no_part_is_refused_and_not_called(kind: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        recipe_from_plain(plain_half(kind=kind, norm=1.0))
    module = sys.modules.get("fedveil_test_own")
    assert module is None or module.CALLED == []


@pytest.mark.usefixtures("own")
def test_fields_of_an_own_part_are_checked() -> None:
    kind = "fedveil_test_own:Half"
    with pytest.raises(UserError, match=r"recipe.bound.norm is 'x'; it must be a number"):
        recipe_from_plain(plain_half(kind=kind, norm="x"))
    with pytest.raises(UserError, match=r"There is no field in .recipe.bound. named 'nrm'"):
        recipe_from_plain(plain_half(kind=kind, nrm=1.0))
    with pytest.raises(UserError, match="Building a Half from"):
        recipe_from_plain(plain_half(kind=kind))


@pytest.mark.usefixtures("own")
def test_equal_names_of_two_modules_share_no_noise() -> None:
    here, there = half(), half("fedveil_test_other")
    assert str(here) == str(there)
    assert identified(here) != identified(there)
    data = fv.synthetic(clients=4, examples=3, features=2, classes=2)
    keys = {
        prepare(dataclasses.replace(r, noise=Gaussian(1.0)), data, rounds=1, engine="dense").key
        for r in (here, there, here)
    }
    assert len(keys) == 2


def test_other_code_under_the_same_name_draws_other_noise(own: Path) -> None:
    before = identified(half())
    assert identified(half()) == before
    (own / "fedveil_test_own.py").write_text(SOURCE.replace("self.norm / 2", "self.norm / 4"))
    sys.modules.pop("fedveil_test_own")
    assert identified(half()) != before


def test_code_without_a_file_is_told_by_its_methods() -> None:
    def made(body: str) -> type:
        space: dict[str, Any] = {"__name__": "fedveil_test_typed"}
        exec(f"class Typed:\n    def scale(self, norms):\n        return {body}\n", space)
        found: type = space["Typed"]
        return found

    first, same, other = made("norms / 2"), made("norms / 2"), made("norms / 4")
    assert code_of(first) == code_of(same) != code_of(other)


def test_a_recipe_of_fedveil_s_parts_has_the_key_it_always_had() -> None:
    assert identified(fv.algorithms.dp_fedavg()) == (
        "Recipe(name='dp_fedavg', local=SGD(learning_rate=Constant(rate=0.1), steps=10, "
        "epochs=None, batch=None, momentum=0.0, weight_decay=0.0), cohort=Poisson(rate=0.1, "
        "cap=None, honest=None), report=GradientScale(), memory=NoMemory(), bound=Clip(norm=1.0), "
        "quantize=Exact(), noise=Gaussian(multiplier=None, at='server'), "
        "server=Step(rate=Constant(rate=0.1)), output=LastIterate(), unit='client', view='models')"
    )


def test_statistics_and_evaluations_are_part_of_the_key_as_they_always_were() -> None:
    plain = fv.algorithms.dp_fedavg(noise_multiplier=1.0)
    first, last = Statistics(0.1, 1e-9), Statistics(0.2, 0.0)
    both = dataclasses.replace(plain, statistics=first, evaluation=last)
    assert identified(both) == (
        f"{identified(plain)}Statistics(ratio=0.1, escape=1e-09, joint=False) evaluated by "
        "Statistics(ratio=0.2, escape=0.0, joint=False)"
    )
    assert hashlib.sha256(identified(both).encode()).hexdigest().startswith("9934f9c42413b83f")


@dataclasses.dataclass(frozen=True)
class Clumsy(Bound):
    """A bound with a field that TOML cannot hold, and one that is called as the kind is."""

    table: Any = 1.0
    kind: str = "mine"
    numbers: tuple[float, ...] = (1.0, 2.0)
    pairs: tuple[tuple[int, float], ...] = ((1, 0.5),)
    inner: tuple[Clip, ...] = (Clip(1.0), Clip(2.0))

    def scale(self, norms: Tensor) -> Tensor:
        return Clip(1.0).scale(norms)

    def norms(self, dim: int) -> Norms:
        return within(1.0, dim)


BASE = fv.algorithms.dp_fedavg(noise_multiplier=1.0)


def test_a_run_whose_class_cannot_be_imported_is_saved_and_reading_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDVEIL_LEDGER", str(tmp_path / "ledger.sqlite"))

    class Inner(Clumsy):
        pass

    data = fv.synthetic(clients=4, examples=3, features=2, classes=2)
    recipe = dataclasses.replace(BASE, bound=Inner())
    fv.train(recipe, data, rounds=1, save=tmp_path / "inner")
    assert (tmp_path / "inner" / "model.safetensors").is_file()
    with pytest.raises(UserError, match="defined in a script, a function or another class"):
        resolve_recipe(read_settings(tmp_path / "inner" / "recipe.toml", {}))


def test_tuples_of_tuples_and_of_parts_survive_toml() -> None:
    recipe = dataclasses.replace(BASE, bound=Clumsy(numbers=(0.1,), inner=(Clip(3.0),)))
    assert recipe_from_plain(tomllib.loads(tomli_w.dumps(to_plain(recipe)))) == recipe
    wrong = {**to_plain(recipe), "bound": {**to_plain(recipe.bound), "pairs": [[1, 0.5, 2]]}}
    with pytest.raises(UserError, match=r"recipe.bound.pairs is"):
        recipe_from_plain(wrong)


@pytest.mark.parametrize("table", [torch.ones(2), [1.0], {"a": 1}, None.__class__, (1, None)])
def test_what_toml_cannot_hold_is_never_written_as_another_text(table: Any) -> None:
    with pytest.raises(UserError, match=r"cannot be written to recipe.toml\. Use numbers"):
        to_plain(Clumsy(table))


def test_a_recipe_that_cannot_be_read_back_is_refused_before_its_first_round() -> None:
    data = fv.synthetic(clients=4, examples=3, features=2, classes=2)
    for bound, words in (
        (Clumsy(numbers=("x",)), r"recipe.bound.numbers is \('x',\); it must be"),  # type: ignore[arg-type]
        (Clumsy(table=None), "changes when it is written to recipe.toml and read back"),
    ):
        with pytest.raises(UserError, match=words):
            prepare(dataclasses.replace(BASE, bound=bound), data, rounds=1)


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    import numpy as np

    plain = to_plain(Clumsy(np.float32(0.5), numbers=(np.float64(0.25),)))
    assert (plain["table"], plain["numbers"]) == (0.5, [0.25])
    assert {type(plain["table"]), type(plain["numbers"][0])} == {float}


def test_limits_that_differ_share_no_noise() -> None:
    """A tuple is written in full, however long."""
    limits = tuple(0.02 for _ in range(4510))
    other = (*limits[:2000], 0.05, *limits[2001:])
    one, two = (dataclasses.replace(BASE, bound=Clumsy(numbers=n)) for n in (limits, other))
    assert identified(one) != identified(two)


def through_a_function(limit: Any) -> Recipe:
    """A class whose method calls a function that captured a value."""

    def found(dim: int) -> Norms:
        first = limit[0] if isinstance(limit, tuple) else limit
        return within(getattr(first, "norm", first), dim)

    @dataclasses.dataclass(frozen=True)
    class Local(Clumsy):
        def norms(self, dim: int) -> Norms:
            return found(dim)

    return dataclasses.replace(BASE, bound=Local())


def test_classes_of_one_function_are_told_apart_by_what_they_captured() -> None:
    def made(limit: float, *, attribute: bool = False, by_default: bool = False) -> Recipe:
        @dataclasses.dataclass(frozen=True)
        class Local(Clumsy):
            known = limit if attribute else 0.0

            def norms(self, dim: int, scale: float = limit if by_default else 1.0) -> Norms:
                return within(scale * (1.0 if attribute or by_default else limit), dim)

        return dataclasses.replace(BASE, bound=Local())

    for options in ({}, {"attribute": True}, {"by_default": True}):
        one, same, other = (made(limit, **options) for limit in (1.0, 1.0, 2.0))
        assert identified(one) == identified(same) != identified(other)
    assert identified(through_a_function(1.0)) != identified(through_a_function(2.0))
    assert identified(through_a_function((1, 2))) != identified(through_a_function((2, 1)))
    assert identified(through_a_function(Clip(1.0))) != identified(through_a_function(Clip(2.0)))
    with pytest.raises(UserError, match="Local uses limit, a Tensor, of the function"):
        identified(made(torch.ones(1)))  # type: ignore[arg-type]


def test_an_annotation_that_cannot_be_read_is_not_checked(own: Path) -> None:
    text = SOURCE.replace("    inner: Clip = Clip(1.0)", "    inner: 'Absent | Clip' = Clip(1.0)")
    (own / "fedveil_test_own.py").write_text(text)
    recipe = half()
    assert recipe_from_plain(to_plain(recipe)) == recipe
