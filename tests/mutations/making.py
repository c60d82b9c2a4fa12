"""Make a mistake in the code on purpose, and require that a guard notices it.

A guard is a check that passes on the code as it is. A mistake is a line of that code changed; if
the line is gone, its mutation fails loudly and has to be rewritten.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from fedveil.accounting import accountant
from fedveil.errors import UserError

Owner = type | ModuleType


@dataclass(frozen=True)
class Mutation:
    """A mistake, and the guard that must notice it."""

    mistake: str
    make: Callable[[Any], None]
    guard: str
    check: Callable[[], Any]


def named(mutation: Mutation) -> str:
    """The test's name."""
    return f"{mutation.mistake} | {mutation.guard}"


def require_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard passes on the code as it is, and fails once the mistake is made."""
    if _known(mutation.check) not in PASSED:
        mutation.check()
        PASSED.add(_known(mutation.check))
    accountant._epsilon.cache_clear()  # neither the right ε may be remembered nor the wrong
    try:
        with monkeypatch.context() as patch:
            mutation.make(patch)
            with pytest.raises((AssertionError, UserError)):
                mutation.check()
    finally:
        accountant._epsilon.cache_clear()


PASSED: set[Any] = set()  # guards that this process has seen pass on the code as it is


def _known(check: Callable[[], Any]) -> Any:
    """Equal for equal guards: the same code with the same values, written in several places."""
    if not isinstance(check, FunctionType):
        return check
    values = tuple(cell.cell_contents for cell in check.__closure__ or ())
    code = check.__code__
    known = check.__module__, code.co_code, code.co_names, repr(code.co_consts), values
    try:
        hash(known)
    except TypeError:
        return check
    return known


def mutate(patch: pytest.MonkeyPatch, owner: Owner, name: str, *changes: tuple[str, str]) -> None:
    """Put a function with some of its text changed in the place of the real one."""
    real = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(getattr(real, "__wrapped__", real)))
    for old, new in changes:
        assert source.count(old) == 1, f"{owner.__name__}.{name} does not say {old!r} just once"
        source = source.replace(old, new)
    module = owner if isinstance(owner, ModuleType) else sys.modules[owner.__module__]
    scope = dict(vars(module))
    exec(compile("from __future__ import annotations\n" + source, name, "exec"), scope)
    patch.setattr(owner, name, scope[name])


def in_folder(test: Callable[..., None], *given: Any) -> Callable[[], None]:
    """A test that needs an empty directory, as a guard; that nothing was refused is a failure."""

    def check() -> None:
        with tempfile.TemporaryDirectory() as name:
            try:
                test(Path(name), *given)
            except pytest.fail.Exception as failure:
                raise AssertionError(failure.msg) from None

    return check


def line(owner: Owner, name: str, *changes: tuple[str, str]) -> Callable[[Any], None]:
    return lambda patch: mutate(patch, owner, name, *changes)


def returning(owner: Owner, name: str, instead: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda patch: patch.setattr(owner, name, instead)
