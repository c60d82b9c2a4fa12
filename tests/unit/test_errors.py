"""An unknown name is answered with the name that was meant."""

from __future__ import annotations

import pytest

from fedveil.errors import unknown

METRICS = ("accuracy", "auc", "average_precision", "f1", "package.module:function")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("acc", "accuracy"),
        ("Acc", "accuracy"),
        ("average", "average_precision"),
        ("auk", "auc"),
        ("soft.dp_soft_fedavg", "soft:dp_soft_fedavg"),
        ("my.package.cost", "my.package:cost"),
    ],
)
def test_a_name_that_is_begun_misspelled_or_without_its_colon(given: str, meant: str) -> None:
    assert f"Did you mean '{meant}'?" in str(unknown("metric", given, METRICS))


def test_a_dotted_name_is_no_function_where_none_is_allowed() -> None:
    assert "Did you mean" not in str(unknown("part", "soft.dp", ("Clip", "Poisson")))
