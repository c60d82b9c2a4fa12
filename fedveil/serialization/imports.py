"""Import a user-defined class or function by its name, `package.module:name`.

Modules are imported from the Python path or the current directory, and never from the directory of
a run, comparison or federation: looking at somebody else's does not execute a file in it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from fedveil.errors import UserError

_ASIDE = " (this is the directory of a run or federation; code is never imported from there)"
MARKS = ("recipe.toml", "comparison.toml", "federation.toml")  # of a run, comparison, federation


def imported(name: str, what: str, kind: str, such: str) -> Any:
    """Import the `kind` (class or function) `package.module:name`, for a `what` (such as a model).

    >>> imported("math:sqrt", "model", "class", "mymodels:Net")(4)
    2.0
    """
    path, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not _dotted(path):
        raise UserError(
            f"'{name[:80]}' does not name {_article(what)} {what}. Write package.module:"
            f"{'Class' if kind == 'class' else kind}, such as {such}."
        )
    module = module_named(path, f"{what} '{name}'")
    found = getattr(module, attribute, None)
    if not callable(found):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"Did you mean '{near[0]}'?" if near else "Define it there, or correct the name."
        raise UserError(f"The module '{path}' has no {kind} '{attribute}'. {hint}")
    return found


def module_named(path: str, use: str) -> ModuleType:
    """Import the module at a dotted path; `use` names its purpose in errors."""
    try:
        with _current_directory_importable(), redirect_stdout(sys.stderr):  # it may print
            return _step_by_step(path, use)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise _failed(path, use, error) from error
        aside = "" if _run_above(Path.cwd() / path) is None else _ASIDE
        raise UserError(
            f"There is no module '{error.name}' for the {use}{aside}. Run from the directory that "
            f"contains {error.name.split('.')[0]}, or install it."
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(path, use, error) from error


def _step_by_step(path: str, use: str) -> ModuleType:
    """Import one package after the other, and check the location of each before executing it."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                _refuse_from_a_run(Path(spec.origin), name, use)
        module = importlib.import_module(name)
    return module


def _refuse_from_a_run(file: Path, name: str, use: str) -> None:
    """Refuse a module in a run's directory, unless it is installed with this Python."""
    if file.resolve().is_relative_to(Path(sys.prefix).resolve()):
        return
    if (run := _run_above(file)) is not None:
        raise UserError(
            f"The module '{name}' for the {use} is in {run}, which has a recipe.toml, "
            "comparison.toml or federation.toml like the directory of a run. Code is never "
            "imported from there. "
            "Move the module, or rename your settings file."
        )


def _run_above(file: Path) -> Path | None:
    """The directory of a run or comparison that contains a file, also through a link."""
    above = (*file.absolute().parents, *file.resolve().parents)
    return next((p for p in above if any((p / mark).is_file() for mark in MARKS)), None)


def _dotted(path: str) -> bool:
    return all(part.isidentifier() for part in path.split("."))


def _article(what: str) -> str:
    return "an" if what[0] in "aeiou" else "a"


def _failed(path: str, use: str, error: BaseException) -> UserError:
    return UserError(
        f"Importing '{path}' for the {use} failed with {type(error).__name__}: {error}. Correct "
        "that module."
    )


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Put the current directory on the path, unless it is a run's: imported modules import too."""
    here = os.getcwd()
    importlib.invalidate_caches()
    if here in sys.path or "" in sys.path or _run_above(Path(here, "file")) is not None:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)
