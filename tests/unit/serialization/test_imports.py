"""Names of the user's own code: found where Python looks, and never in a run's directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.serialization.imports import imported, module_named

TRAP = "raise SystemExit('code of a run was executed')\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory that is not on the import path; what is imported is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def thing(name: str) -> object:
    return imported(name, "model", "class", "mymodels:Net")


def test_a_module_of_the_current_directory_is_found_and_the_path_is_as_before(here: Path) -> None:
    (here / "fedveil_test_own.py").write_text("class Thing:\n    pass\n")
    before = list(sys.path)
    found = thing("fedveil_test_own:Thing")
    assert isinstance(found, type)
    assert found.__module__ == "fedveil_test_own"
    assert sys.path == before


@pytest.mark.parametrize(
    "name",
    ["os.path;x:y", "..x:y", ":y", "x:", "x:y.z", "x:y()", "a b:c", "../x:y", "x/y:z", "x:__y:z"],
)
def test_names_are_dotted_identifiers_alone(name: str) -> None:
    with pytest.raises(UserError, match=r"does not name a model\. Write package\.module:Class"):
        thing(name)


@pytest.mark.parametrize("mark", ["recipe.toml", "comparison.toml"])
@pytest.mark.parametrize("below", ["", "deep/er"])
@pytest.mark.parametrize("on_path", [False, True])
def test_nothing_is_executed_from_the_directory_of_a_run_one_stands_in(
    here: Path, mark: str, below: str, on_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / mark).touch()
    place = here / below
    place.mkdir(parents=True, exist_ok=True)
    (place / "fedveil_test_trap.py").write_text(TRAP)
    monkeypatch.chdir(place)
    if on_path:  # as with `python -m fedveil`
        monkeypatch.syspath_prepend(str(place))
    with pytest.raises(UserError, match="ode is never imported from there"):
        thing("fedveil_test_trap:Thing")
    assert "fedveil_test_trap" not in sys.modules


def test_what_a_module_imports_in_its_turn_is_not_taken_from_a_run_either(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("installed", "run"):
        (here / place).mkdir()
    (here / "run" / "recipe.toml").touch()
    (here / "run" / "fedveil_test_helper.py").write_text(TRAP)
    (here / "installed" / "fedveil_test_helper.py").write_text("NUMBER = 3\n")
    (here / "installed" / "fedveil_test_user.py").write_text("from fedveil_test_helper import *\n")
    monkeypatch.syspath_prepend(str(here / "installed"))
    monkeypatch.chdir(here / "run")
    assert module_named("fedveil_test_user", "part").NUMBER == 3


@pytest.mark.parametrize("on_path", [False, True])
@pytest.mark.parametrize("name", ["fedveil_runs.a.trap", "fedveil_runs.a.inner.trap"])
@pytest.mark.parametrize("package", [False, True])
def test_a_run_s_directory_is_no_package(
    here: Path, name: str, package: bool, on_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes any directory below the current one for a package."""
    if on_path:
        monkeypatch.syspath_prepend(str(here))
    run = here / "fedveil_runs" / "a"
    (run / "inner").mkdir(parents=True)
    (run / "recipe.toml").touch()
    for directory in (run, run / "inner"):
        (directory / "trap.py").write_text(TRAP)
        if package:
            (directory / "__init__.py").write_text(TRAP)
    with pytest.raises(UserError, match="ode is never imported from there"):
        module_named(name, "part")


def test_a_link_does_not_lead_into_a_run(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "recipe.toml").touch()
    (here / "run" / "trap.py").write_text(TRAP)
    (here / "fedveil_test_link.py").symlink_to(here / "run" / "trap.py")
    with pytest.raises(UserError, match="ode is never imported from there"):
        module_named("fedveil_test_link", "part")


def test_a_module_that_is_not_there_and_one_that_breaks(here: Path) -> None:
    (here / "fedveil_test_broken.py").write_text("import fedveil_absent_thing\n")
    with pytest.raises(UserError, match="There is no module 'fedveil_absent' for the adapter"):
        module_named("fedveil_absent.sub", "adapter")
    with pytest.raises(UserError, match="failed with ModuleNotFoundError"):
        module_named("fedveil_test_broken", "adapter")
