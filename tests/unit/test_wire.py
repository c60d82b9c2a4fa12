"""Messages take t bits per coordinate and come back as they were."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil import wire
from fedveil.errors import UserError

widths = st.integers(1, wire.MOST)
shapes = st.tuples(st.integers(0, 4), st.one_of(st.integers(0, 3), st.integers(0, 300)))


def lows(bits: int) -> st.SearchStrategy[int]:
    ends = st.sampled_from([0, -(2 ** (bits - 1)), -(2**63), 2**63 - 2**bits])
    return st.one_of(ends, st.integers(-(2**63), 2**63 - 2**bits))


def drawn(bits: int, low: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Uniform levels, with both extremes among them."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(low, low + 2**bits - 1, size=shape, endpoint=True)
    extreme = rng.random(shape)
    levels[extreme < 0.1] = low
    levels[extreme > 0.9] = low + 2**bits - 1
    return levels


def by_hand(message: np.ndarray, bits: int, low: int) -> bytes:
    """One message as one long number, lowest coordinate first."""
    number = sum((int(level) - low) << bits * place for place, level in enumerate(message))
    return number.to_bytes(math.ceil(bits * len(message) / 8), "little")


@given(st.data(), widths, shapes, st.integers(0, 2**32))
def test_what_is_packed_comes_back(
    data: st.DataObject, bits: int, shape: tuple[int, int], seed: int
) -> None:
    low = data.draw(lows(bits))
    levels = drawn(bits, low, shape, seed)
    packed = wire.pack(levels, bits, low)
    assert packed.dtype == np.uint8
    assert packed.shape == (shape[0], math.ceil(bits * shape[1] / 8))
    assert [row.tobytes() for row in packed] == [by_hand(row, bits, low) for row in levels]
    back = wire.unpack(packed, bits, low, shape[1])
    assert back.dtype == np.int64
    np.testing.assert_array_equal(back, levels)


@pytest.mark.parametrize("bits", [1, 9, 11, 21, 62])
def test_messages_of_more_than_one_chunk(bits: int) -> None:
    shape = (40, wire.CHUNK // 16)
    levels = drawn(bits, -5, shape, seed=bits)
    packed = wire.pack(levels, bits, -5)
    assert packed.nbytes == 40 * wire.length(bits, shape[1])
    np.testing.assert_array_equal(wire.unpack(packed, bits, -5, shape[1]), levels)


def test_rows_need_not_be_contiguous_nor_of_64_bits() -> None:
    levels = drawn(5, -7, (30, 6), seed=0)
    expected = wire.pack(np.ascontiguousarray(levels.T), 5, -7)
    np.testing.assert_array_equal(wire.pack(levels.T.astype(np.int8), 5, -7), expected)
    sparse = np.repeat(expected, 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(wire.unpack(sparse, 5, -7, 30), levels.T)


@given(st.integers(-(10**30), 10**30), st.integers(0, 10**30))
def test_bits_for_is_enough_and_not_one_too_many(low: int, width: int) -> None:
    bits = wire.bits_for(low, low + width)
    assert width < 2**bits
    assert bits == 1 or width >= 2 ** (bits - 1)


@given(widths, st.lists(st.integers(-(2**61), 2**61 - 1), max_size=8))
def test_a_modular_sum_unwraps_to_the_true_sum_if_it_fits(bits: int, terms: list[int]) -> None:
    total = np.zeros(1, dtype=np.int64)
    for term in terms:
        wrapped = wire.wrap(np.array([term]), bits)
        assert 0 <= wrapped[0] < 2**bits
        total = (total + wrapped) % 2**bits
    (result,) = wire.unwrap(total, bits)
    half = 2 ** (bits - 1)
    assert -half <= result < half
    assert (int(result) - sum(terms)) % 2**bits == 0
    assert (int(result) == sum(terms)) == (-half <= sum(terms) < half)


def test_wrapped_numbers_travel_in_as_many_bits() -> None:
    levels = drawn(12, -2048, (20, 33), seed=1)
    received = wire.unpack(wire.pack(wire.wrap(levels, 17), 17, 0), 17, 0, 33)
    np.testing.assert_array_equal(wire.unwrap(received.sum(axis=0), 17), levels.sum(axis=0))


@pytest.mark.parametrize(
    ("levels", "bits", "low", "reason"),
    [
        (np.array([[0, 4]]), 2, 0, "levels range from 0 to 4, but 2 bits from 0 hold only 0 to 3"),
        (np.array([[-2, 1]]), 2, -1, "levels range from -2 to 1"),
        (np.array([[2**63 - 1, -(2**63)]]), 62, 0, "levels range from -9223372036854775808"),
        (np.array([[0]]), 0, 0, "0 bits per coordinate"),
        (np.array([[0]]), 63, 0, "63 bits per coordinate"),
        (np.array([[2**63 - 1]]), 2, 2**63 - 1, "range of 64-bit numbers"),
        (np.array([[0.0]]), 2, 0, "type float64"),
        (np.array([0, 1]), 2, 0, "1 dimensions"),
    ],
)
def test_levels_that_do_not_fit_are_refused(
    levels: np.ndarray, bits: int, low: int, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as refusal:
        wire.pack(levels, bits, low)
    assert str(refusal.value).count(". ") <= 1


def bytes_of(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.uint8)


@pytest.mark.parametrize(
    ("packed", "bits", "dim", "reason"),
    [
        (bytes_of(1, 2), 9, 2, "a message has 2 bytes, but 2 coordinates of 9 bits need 3"),
        (bytes_of(1, 2, 0, 0), 9, 2, "a message has 4 bytes"),
        (bytes_of(1), 9, 0, "a message has 1 bytes"),
        (bytes_of(), 9, -1, "-1 coordinates"),
        (bytes_of(1, 2, 4), 9, 2, "are not zero"),
        (np.array([[1, 2, 0], [1, 2, 128]], dtype=np.uint8), 9, 2, "are not zero"),
        (np.array([[1, 2, 3]]), 9, 2, "type int64"),
        (np.array([1, 2, 3], dtype=np.uint8), 9, 2, "1 dimensions"),
        (bytes_of(1), 63, 0, "63 bits per coordinate"),
    ],
)
def test_malformed_messages_are_refused(
    packed: np.ndarray, bits: int, dim: int, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        wire.unpack(packed, bits, 0, dim)


def test_the_padding_is_the_only_thing_unread() -> None:
    """Every one-bit change of a message is refused or changes what is read."""
    levels = drawn(5, -16, (1, 7), seed=2)
    packed = wire.pack(levels, 5, -16)
    for bit in range(8 * packed.size):
        changed = packed.copy()
        changed[0, bit // 8] ^= np.uint8(1 << bit % 8)
        if bit < 35:
            assert (wire.unpack(changed, 5, -16, 7) != levels).sum() == 1
        else:
            with pytest.raises(UserError, match="are not zero"):
                wire.unpack(changed, 5, -16, 7)


@pytest.mark.parametrize("convert", [wire.wrap, wire.unwrap])
def test_wrapping_refuses_what_is_not_whole_or_too_wide(convert: object) -> None:
    assert callable(convert)
    with pytest.raises(UserError, match="type float64"):
        convert(np.array([0.5]), 4)
    for bits in (0, -1, 63):
        with pytest.raises(UserError, match="bits per coordinate"):
            convert(np.array([1]), bits)


def test_bits_for_an_empty_range_is_refused() -> None:
    with pytest.raises(UserError, match="below low"):
        wire.bits_for(3, 2)
