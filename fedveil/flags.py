"""What people type behind flags: name=value, and several values."""

from __future__ import annotations

import tomllib
from typing import Any

from fedveil.errors import UserError


def assignment(text: str, flag: str = "--set", such: str = "clip=1.0") -> tuple[str, Any]:
    """`name=value` with the value as TOML has it, or as a word.

    >>> assignment("clip=1.5"), assignment("local=ig")
    (('clip', 1.5), ('local', 'ig'))
    """
    name, value = _halves(text, flag, such)
    return name, _value(value)


def assignments(text: str, flag: str = "--grid") -> tuple[str, list[Any]]:
    """`name=value,value,…`; a comma within brackets, braces or quotes parts nothing.

    >>> assignments("clip=0.5,1"), assignments("local=ig,[1, 2]")
    (('clip', [0.5, 1]), ('local', ['ig', [1, 2]]))
    """
    name, values = _halves(text, flag, "clip=0.5,1,2")
    parts = _parted(values)
    if not all(parts):
        raise UserError(f"{flag} {text}: write values with commas between, such as clip=0.5,1,2.")
    return name, [_value(part) for part in parts]


def given(**flags: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in flags.items() if value is not None}


def _halves(text: str, flag: str, such: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise UserError(f"{flag} {text}: write it as name=value, such as {flag} {such}.")
    return name.strip(), value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _parted(text: str) -> list[str]:
    parts, depth, quoted = [""], 0, ""
    for c in text:
        if quoted:
            quoted = "" if c == quoted else quoted
        elif c in "'\"":
            quoted = c
        depth += 0 if quoted else (c in "[{") - (c in "]}")
        if c == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]
