"""Federations in memory share their model and engine, which take most of a start."""

from __future__ import annotations

from typing import Any

import pytest

from fedveil.federation import participant as clients
from fedveil.training import prepare as preparing


@pytest.fixture
def one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare model and engine once: thousands of processes are started here."""
    kept: dict[str, Any] = {}

    def once(name: str, make: Any) -> Any:
        def get(*arguments: Any) -> Any:
            if name not in kept:
                kept[name] = make(*arguments)
            return kept[name]

        return get

    for name in ("make_task", "choose_engine"):
        cached = once(name, getattr(preparing, name))
        monkeypatch.setattr(preparing, name, cached)
        monkeypatch.setattr(clients, name, cached)
