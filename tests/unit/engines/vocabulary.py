"""Another module of a user's, whose functions keep what they are called with."""

from __future__ import annotations

from functools import cache

TABLE: dict[float, int] = {}


def index(value: float) -> int:
    """The number of values seen before this one."""
    return TABLE.setdefault(value, len(TABLE))


@cache
def slot(value: float) -> int:
    """The same, in the cache of the function."""
    return slot.cache_info().currsize


class Vocabulary:
    """The same, in a table of the class."""

    table: dict[float, int] = {}  # noqa: RUF012

    @classmethod
    def index(cls, value: float) -> int:
        """The number of values seen before this one."""
        return cls.table.setdefault(value, len(cls.table))


def forget() -> None:
    """Empty all tables."""
    TABLE.clear()
    slot.cache_clear()
    Vocabulary.table.clear()
