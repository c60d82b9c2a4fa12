"""Mistakes that let two purposes, runs or coordinates draw the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedveil import loop
from fedveil.random import samplers, streams
from fedveil.testing.recipes import check_streams
from tests.contracts.examples import PRIVATE
from tests.mutations.making import Mutation, line, mutate, named, require_caught
from tests.statistics.random import test_samplers as drawn
from tests.unit.random import test_streams as keyed


def streams_of(name: str) -> Callable[[], None]:
    return lambda: check_streams(PRIVATE[name])


def check_normals() -> None:
    drawn.test_no_block_of_a_long_vector_repeats_another(
        lambda count, rng: samplers.normals(count, rng), samplers.PIECE
    )


def check_rounded() -> None:
    drawn.test_no_block_of_a_long_vector_repeats_another(
        lambda count, rng: samplers.rounded_gaussian(50.0, count, rng), samplers.BLOCK
    )


def repeated_blocks(patch: pytest.MonkeyPatch) -> None:
    real = samplers._rounded_block

    def block(sigma: float, size: int, rng: np.random.Generator) -> np.ndarray:
        return real(sigma, size, np.random.default_rng(0))

    patch.setattr(samplers, "_rounded_block", block)


def unseparated(patch: pytest.MonkeyPatch) -> None:
    mutate(patch, streams, "run_key", ('"\\x00".join', '"".join'))
    patch.setattr(keyed, "run_key", streams.run_key)  # which the guard knows by name


MUTATIONS = [
    Mutation(
        "long noise repeats its first block",
        line(samplers, "normals", ("own.jumped(block)", "own.jumped(0)")),
        "check_normals",
        check_normals,
    ),
    Mutation(
        "exact noise repeats its first block", repeated_blocks, "check_rounded", check_rounded
    ),
    Mutation(
        "the facts of a run's key run into one another",
        unseparated,
        "test_a_run_s_key_tells_where_one_fact_ends",
        keyed.test_a_run_s_key_tells_where_one_fact_ends,
    ),
    Mutation(
        "the count drawn from the sum's noise",
        line(loop, "conclude_round", ('"count"', '"noise"')),
        "check_streams",
        streams_of("dp_fedavg_adaptive"),
    ),
    Mutation(
        "batches drawn from the cohort's coins",
        line(loop, "local_plan", ('f"batches from {named[0]}"', '"cohort"')),
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
