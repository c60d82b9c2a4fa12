"""Mistakes that let two purposes draw the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedveil import loop

from ..contracts.examples import PRIVATE
from ..contracts.recipes import check_streams
from .making import Mutation, line, named, require_caught


def streams_of(name: str) -> Callable[[], None]:
    return lambda: check_streams(PRIVATE[name])


MUTATIONS = [
    Mutation(
        "the count drawn from the sum's noise",
        line(loop, "_next_threshold", ('"count"', '"noise"')),
        "check_streams",
        streams_of("dp_fedavg_adaptive"),
    ),
    Mutation(
        "batches drawn from the cohort's coins",
        line(loop, "_sum_of_messages", ('"batches"', '"cohort"')),
        "check_streams",
        streams_of("dp_fedavg"),
    ),
    Mutation(
        "all clients round alike",
        line(loop._Work, "_quantized", ('f"rounding of {client}"', '"rounding"')),
        "check_streams",
        streams_of("dp_norm_fedavg_secagg"),
    ),
    Mutation(
        "rounding drawn from a client's noise",
        line(loop._Work, "_quantized", ('f"rounding of {client}"', 'f"noise of {client}"')),
        "check_streams",
        streams_of("dp_norm_fedavg_secagg"),
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
