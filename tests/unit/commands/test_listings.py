"""`fedveil datasets` names what is wrong with the data, before what is missing beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("command", [("datasets",), ("train", "--path")])
def test_a_table_that_does_not_exist_is_said_before_its_columns(
    refused: Callable[..., str], command: tuple[str, ...]
) -> None:
    assert "No such file: 'nope.csv'" in refused(*command, "nope.csv")
