"""A user's own class or function by its name, `package.module:name`.

A module comes from the Python path or the current directory, and never from a directory that holds
a run or a comparison: opening somebody else's run does not execute a file that came with it.
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

_ASIDE = " (this directory is a run's, and code is never taken from there)"
MARKS = ("recipe.toml", "comparison.toml")  # what makes a directory a run's or a comparison's


def imported(name: str, what: str, kind: str, such: str) -> Any:
    """The `kind` (a class, a function) that `package.module:name` names, for a `what`.

    >>> imported("math:sqrt", "model", "class", "mymodels:Net")(4)
    2.0
    """
    path, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not _dotted(path):
        raise UserError(
            f"'{name[:80]}' does not name {_article(what)} {what}; write package.module:"
            f"{'Class' if kind == 'class' else kind}, as in {such}."
        )
    module = module_named(path, f"{what} '{name}'")
    found = getattr(module, attribute, None)
    if not callable(found):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "define it there or correct the name."
        raise UserError(f"The module '{path}' has no {kind} '{attribute}'; {hint}")
    return found


def module_named(path: str, use: str) -> ModuleType:
    """The module at a dotted path; `use` says in a refusal what it was wanted for."""
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
            f"There is no module '{error.name}' for the {use}{aside}; run from the directory "
            f"that holds {error.name.split('.')[0]}, or install it."
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(path, use, error) from error


def _step_by_step(path: str, use: str) -> ModuleType:
    """Package after package, each looked at before any of it is executed."""
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
    """What is installed with this Python is its user's own; the rest must not lie in a run."""
    if file.resolve().is_relative_to(Path(sys.prefix).resolve()):
        return
    if (run := _run_above(file)) is not None:
        raise UserError(
            f"The module '{name}' for the {use} lies in {run}, which has a recipe.toml or "
            "comparison.toml as a run's directory has, and code is never taken from there; "
            "move the module, or rename your settings."
        )


def _run_above(file: Path) -> Path | None:
    """The directory of a run or comparison that a file lies in, also by a link."""
    above = (*file.absolute().parents, *file.resolve().parents)
    return next((p for p in above if any((p / mark).is_file() for mark in MARKS)), None)


def _dotted(path: str) -> bool:
    return all(part.isidentifier() for part in path.split("."))


def _article(what: str) -> str:
    return "an" if what[0] in "aeiou" else "a"


def _failed(path: str, use: str, error: BaseException) -> UserError:
    return UserError(
        f"Importing '{path}' for the {use} failed with {type(error).__name__}: {error}; "
        "correct that module."
    )


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """But for a run's: what a module imports in its turn would be looked for there first."""
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
