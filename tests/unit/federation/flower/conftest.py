from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.federation.flower.fakes import identity


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with identity():
        yield
