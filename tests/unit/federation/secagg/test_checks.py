"""Free checks of a released sum: honest sums pass, spoiled ones do not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedveil.federation.secagg.checks import check_sum, largest_norm
from fedveil.federation.secagg.refusals import Aborted
from fedveil.federation.secagg.terms import SecAggTerms
from tests.unit.federation.secagg.world import World

LINF, SIGMA, DIM = 20, 3.0, 4000


def honest_sum(survivors: int, rng: np.random.Generator) -> np.ndarray:
    messages = rng.integers(-1, 2, (survivors, DIM))
    noise = np.rint(rng.normal(0, SIGMA, (survivors, DIM))).astype(np.int64)
    return np.asarray((messages + noise).sum(axis=0))


def test_honest_sums_pass() -> None:
    """200 sums; each exceeds the norm's limit with probability at most 2^-40."""
    limit = largest_norm(8, DIM, math.sqrt(DIM), SIGMA**2 + 0.25)
    for seed in range(200):
        check_sum(honest_sum(8, np.random.default_rng(seed)), 8, LINF, limit)


def test_the_limit_is_near_what_noise_reaches() -> None:
    """A limit far above would find nothing: noise alone comes within 15 % of it."""
    noise = np.random.default_rng(0).normal(0, SIGMA * math.sqrt(8), DIM)
    limit = largest_norm(8, DIM, 0.0, SIGMA**2)
    assert 0.85 * limit < float(np.linalg.norm(noise)) < limit


def test_a_coordinate_out_of_reach_is_spoiled() -> None:
    total = np.zeros(DIM, np.int64)
    total[7] = 8 * LINF
    check_sum(total, 8, LINF)
    total[7] = -8 * LINF - 1
    with pytest.raises(Aborted, match="Discard") as problem:
        check_sum(total, 8, LINF)
    assert problem.value.word == "spoiled"


def test_a_long_sum_is_spoiled_though_every_coordinate_is_in_reach() -> None:
    limit = largest_norm(8, DIM, 1.0, SIGMA**2)
    with pytest.raises(Aborted, match="norm"):
        check_sum(np.full(DIM, LINF, np.int64), 8, LINF, limit)


def test_one_client_that_sends_random_residues_is_recognized() -> None:
    """One malicious client can spoil a sum; the check keeps it from the model."""
    world = World(5, SecAggTerms(4, 1, 4, 12, DIM))
    world.levels = {client: np.zeros(DIM, np.int64) for client in world.cohort}
    world.levels[14] = np.random.default_rng(0).integers(0, 2**12, DIM)
    server = world.at("done")
    with pytest.raises(Aborted):
        check_sum(world.terms.wire.settle(server.total), len(server.survivors), LINF)
