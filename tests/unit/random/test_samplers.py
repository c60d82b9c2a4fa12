"""Normals: every call on a stream has numbers of its own, whatever its size and the generator."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fedveil.random.samplers import PIECE, normals
from fedveil.random.streams import SecretKey, stream

LONG = 2 * PIECE + 3
SIZES = [(LONG, LONG), (5, LONG), (LONG, 5), (PIECE, PIECE + 1), (PIECE + 1, 2 * PIECE)]
STREAMS = {
    "public": lambda: stream(0, 3, "noise"),
    "secret": lambda: stream(SecretKey(), 3, "noise"),
    "PCG64": lambda: np.random.default_rng(0),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(0)),  # cannot be divided into parts
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_call_on_a_stream_repeats_the_numbers_of_an_earlier_one(sizes, kind: str) -> None:
    """Else a noise that adds up two draws is correlated in large models and not in small ones."""
    rng = STREAMS[kind]()
    drawn = np.concatenate([normals(size, rng) for size in (*sizes, 7)])
    assert len(drawn) == sum(sizes) + 7
    assert len(np.unique(drawn)) == len(drawn)
    assert abs(drawn.std() - 1) < 6 / len(drawn) ** 0.5


def test_the_first_draw_of_a_public_stream_is_what_it_was() -> None:
    """Seeded runs keep their numbers from version to version (but for a logarithm's last digit)."""
    drawn = normals(LONG, stream(0, 3, "noise"))
    assert hashlib.sha256(drawn.astype(np.float32).tobytes()).hexdigest()[:16] == "d6fba0f4ac0d5316"
    assert np.array_equal(drawn[:PIECE], normals(PIECE, stream(0, 3, "noise")))
