"""A part is a value: its fields say everything about it, and are plain.

The fields identify the noise of a run (`serialization.codec.identified`) and are all that
recipe.toml keeps. So nothing else may distinguish two parts.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fedveil.errors import UserError, told
from fedveil.parts.part import foreign

PLAIN = (bool, int, float, str)
INSTEAD: tuple[tuple[Any, str], ...] = (
    (np.ndarray | Tensor, "Write a tuple, such as tuple(values.tolist())."),
    (list | set | frozenset, "Write a tuple."),
    (Mapping, "Write a tuple of tuples, such as tuple(values.items())."),
    (types.NoneType, "recipe.toml has no value for it. Write a number or a text."),
    (types.FunctionType | types.MethodType, "Write a frozen dataclass that defines `__call__`."),
)


def is_plain(value: object) -> bool:
    """Whether a value is a number, a text, or true or false.

    >>> is_plain(0.5), is_plain(np.float32(0.5)), is_plain(None), is_plain(np.ones(2))
    (True, True, False, False)
    """
    return type(value) in PLAIN or isinstance(value, np.bool_ | np.integer | np.floating)


def has_fields(value: object) -> bool:
    """Whether it is an instance of a dataclass."""
    return is_dataclass(value) and not isinstance(value, type)


def frozen(kind: type) -> bool:
    """Whether it is a frozen dataclass."""
    return is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def refuse_unplain(part: Any) -> None:
    """Refuse a part unless its fields are plain values, tuples of these, or parts, deeply.

    A user-defined part must also be what its fields say: a frozen dataclass that is built again,
    equal, from its fields, and that keeps nothing beside them.
    """
    if foreign(type(part)):
        _refuse_other_class(type(part))
    for field in fields(part) if has_fields(part) else ():
        if (value := getattr(part, field.name)) is not None:
            _refuse_unplain_value(type(part).__name__, field.name, value)
    if foreign(type(part)):
        _refuse_hidden(part)
        _refuse_changed(part)


def _refuse_unplain_value(kind: str, name: str, value: Any) -> None:
    if is_plain(value):
        return
    if type(value) is tuple:
        for item in () if set(map(type, value)) <= set(PLAIN) else value:  # which may be long
            _refuse_unplain_value(kind, f"an item of {name}", item)
    elif has_fields(value):
        refuse_unplain(value)
    else:
        fix = next((fix for kinds, fix in INSTEAD if isinstance(value, kinds)), None)
        raise UserError(
            f"{kind}: {name} is {told(value)}. "
            f"{fix or 'Write numbers, texts, tuples of these, or frozen dataclasses.'}"
        )


def _refuse_other_class(kind: type) -> None:
    if not frozen(kind):
        raise UserError(
            f"{kind.__name__} is not a frozen dataclass, so its settings could change and could "
            "not be saved. Put @dataclasses.dataclass(frozen=True) above the class, and declare "
            "its settings as fields."
        )


def _refuse_hidden(part: Any) -> None:
    """What is kept beside the fields would not be saved. A cached property follows from them."""
    known = {field.name for field in fields(part)}
    for name in getattr(part, "__dict__", ()):
        if name not in known and not isinstance(getattr(type(part), name, None), cached_property):
            raise UserError(
                f"{type(part).__name__} keeps `{name}` beside its fields, so it would not be "
                "saved. Declare it as a field, or compute it in a cached property."
            )


def _refuse_changed(part: Any) -> None:
    kind = type(part)
    try:
        same = kind(**{field.name: getattr(part, field.name) for field in fields(part)}) == part
    except UserError:
        raise
    except Exception as problem:  # it is the user's own code
        raise UserError(
            f"{kind.__name__} cannot be built again from its fields: {problem}. Let "
            "@dataclasses.dataclass write __init__, and only check fields in __post_init__."
        ) from problem
    if not same:
        raise UserError(
            f"{kind.__name__} changes when it is built again from its fields. Compare by fields "
            "(no eq=False), and only check fields in __post_init__."
        )
