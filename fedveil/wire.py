"""Packs whole numbers into bytes, t bits per coordinate, and adds modulo 2^t.

Coordinate j of a message takes the bits t·j to t·j + t − 1, counted from the lowest bit of its
first byte; the remaining bits of its last byte are zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedveil.errors import UserError

WORD = 64
MOST = 62  # bits per coordinate; the sum of two such numbers fits in an int64
CHUNK = 2**17  # coordinates processed at a time, so that they fit in the cache


def bits_for(low: int, high: int) -> int:
    """⌈log2(high − low + 1)⌉, at least 1: the bits that hold every whole number low..high.

    >>> bits_for(-73, 73), bits_for(0, 0), bits_for(0, 256)
    (8, 1, 9)
    """
    if high < low:
        raise UserError(f"bits_for: high = {high} is below low = {low}. Give the lower one first.")
    return max((high - low).bit_length(), 1)


def length(bits: int, dim: int) -> int:
    """⌈bits·dim/8⌉: the number of bytes of one message.

    >>> length(9, 7850)
    8832
    """
    return -(-bits * dim // 8)


def pack(levels: np.ndarray, bits: int, low: int) -> np.ndarray:
    """Whole numbers low..low + 2^bits − 1, [messages, dim], as uint8 [messages, ⌈bits·dim/8⌉].

    Each message has its own bytes, and `unpack` restores the same numbers.

    >>> pack(np.array([[-1, 0, 2]]), bits=2, low=-1)
    array([[52]], dtype=uint8)
    """
    _check_levels(levels, bits, low)
    messages, dim = levels.shape
    packed = np.empty((messages, length(bits, dim)), dtype=np.uint8)
    for rows in _slices(messages, dim):
        lanes = _padded(levels[rows], bits, low)
        *narrow, lane = _widths(bits)
        for width in narrow:  # two neighbouring lanes become one of twice the width
            lanes = lanes[:, ::2] | lanes[:, 1::2] << np.uint64(width)
        packed[rows] = _joined(lanes, lane).view(np.uint8)[:, : packed.shape[1]]
    return packed


def unpack(packed: np.ndarray, bits: int, low: int, dim: int) -> np.ndarray:
    """The packed whole numbers, int64 [messages, dim].

    Refuses bytes that `pack` cannot produce: a wrong number of them, or nonzero padding.

    >>> unpack(np.array([[52]], dtype=np.uint8), bits=2, low=-1, dim=3)
    array([[-1,  0,  2]])
    """
    _check_packed(packed, bits, low, dim)
    levels = np.empty((len(packed), dim), dtype=np.int64)
    for rows in _slices(len(packed), dim):
        *narrow, lane = _widths(bits)
        lanes = _split(_words(packed[rows], bits, dim), lane)
        for width in reversed(narrow):
            lanes = _halved(lanes, width)
        np.add(lanes[:, :dim].view(np.int64), low, out=levels[rows])
    return levels


def wrap(levels: np.ndarray, bits: int) -> np.ndarray:
    """levels mod 2^bits, in 0..2^bits − 1.  Wrapping numbers does not change their sum mod 2^bits.

    >>> wrap(np.array([-3, 5, 8]), bits=3)
    array([5, 5, 0])
    """
    _check_bits(bits)
    _check_whole(levels, "the numbers")
    return np.asarray(levels.astype(np.int64) & (2**bits - 1))


def unwrap(total: np.ndarray, bits: int) -> np.ndarray:
    """The number congruent to total mod 2^bits that lies in [−2^(bits−1), 2^(bits−1)).

    A sum of wrapped numbers, modulo 2^bits or not, unwraps to the true sum if that fits.

    >>> unwrap(wrap(np.array([-3, 1]), bits=3).sum(keepdims=True), bits=3)
    array([-2])
    """
    _check_bits(bits)
    half = 2 ** (bits - 1)
    return np.asarray(wrap(wrap(total, bits) + half, bits) - half)


@dataclass(frozen=True)
class Wire:
    """The format of integer messages: `bits` per coordinate, starting at `low`, or residues.

    `modular` is for secure aggregation: each message is a residue, and the sum of all messages is
    recovered if it fits.

    >>> wire = Wire(4, modular=True)
    >>> parts = [wire.receive(wire.send(np.array([[x]])), 1) for x in (-3, 5, -4)]
    >>> int(wire.settle(sum(parts))[0, 0])
    -2
    """

    bits: int
    low: int = 0
    modular: bool = False

    def send(self, levels: np.ndarray) -> np.ndarray:
        """Bytes of each message, uint8 [messages, ⌈bits·dim/8⌉]."""
        return pack(wrap(levels, self.bits) if self.modular else levels, self.bits, self.low)

    def receive(self, packed: np.ndarray, dim: int) -> np.ndarray:
        """The whole numbers, or residues, of each message."""
        return unpack(packed, self.bits, self.low, dim)

    def settle(self, total: np.ndarray) -> np.ndarray:
        """The sum of all messages, from the sum of what was received."""
        return unwrap(total, self.bits) if self.modular else total


def _widths(bits: int) -> list[int]:
    """bits, 2·bits, 4·bits, … up to a word."""
    return [bits << doubling for doubling in range((WORD // bits).bit_length())]


def _slices(messages: int, dim: int) -> Iterator[slice]:
    step = max(CHUNK // max(dim, 1), 1)
    return (slice(start, start + step) for start in range(0, messages, step))


def _blocks(bits: int, dim: int) -> tuple[int, int]:
    """Coordinates that fill a whole number of words, and the number of such blocks for dim."""
    block = WORD // math.gcd(WORD, bits)
    return block, -(-dim // block)


def _padded(levels: np.ndarray, bits: int, low: int) -> np.ndarray:
    """levels − low as uint64, with zeros up to whole blocks."""
    block, blocks = _blocks(bits, levels.shape[1])
    lanes = np.zeros((len(levels), block * blocks), dtype=np.uint64)
    np.subtract(
        levels.astype(np.int64, copy=False), low, out=lanes.view(np.int64)[:, : levels.shape[1]]
    )
    return lanes


def _words(packed: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """The bytes as little-endian words, with zeros up to whole blocks."""
    block, blocks = _blocks(bits, dim)
    words = np.zeros((len(packed), block * blocks * bits // WORD), dtype="<u8")
    words.view(np.uint8)[:, : packed.shape[1]] = packed
    return words


def _places(width: int) -> Iterator[tuple[int, int, int]]:
    """For each lane of a block: its index, the word it starts in, and the bit."""
    lanes = WORD // math.gcd(WORD, width)
    return ((lane, *divmod(lane * width, WORD)) for lane in range(lanes))


def _joined(lanes: np.ndarray, width: int) -> np.ndarray:
    """Lanes of `width` bits, concatenated without gaps, as little-endian words."""
    common = math.gcd(WORD, width)
    blocks = lanes.reshape(-1, WORD // common)
    words = np.zeros((len(blocks), width // common), dtype="<u8")
    for lane, word, bit in _places(width):
        words[:, word] |= blocks[:, lane] << np.uint64(bit)
        if bit + width > WORD:
            words[:, word + 1] |= blocks[:, lane] >> np.uint64(WORD - bit)
    return words.reshape(len(lanes), -1)


def _split(words: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `_joined`."""
    common = math.gcd(WORD, width)
    blocks = words.reshape(-1, width // common)
    lanes = np.empty((len(blocks), WORD // common), dtype=np.uint64)
    for lane, word, bit in _places(width):
        lanes[:, lane] = blocks[:, word] >> np.uint64(bit)
        if bit + width > WORD:
            lanes[:, lane] |= blocks[:, word + 1] << np.uint64(WORD - bit)
    lanes &= np.uint64(2**width - 1)
    return lanes.reshape(len(words), -1)


def _halved(lanes: np.ndarray, width: int) -> np.ndarray:
    """Each lane as its low `width` bits and the rest."""
    halves = np.empty((len(lanes), 2 * lanes.shape[1]), dtype=np.uint64)
    np.bitwise_and(lanes, np.uint64(2**width - 1), out=halves[:, ::2])
    np.right_shift(lanes, np.uint64(width), out=halves[:, 1::2])
    return halves


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MOST:
        raise UserError(f"wire: {bits} bits per coordinate. Give a number from 1 to {MOST}.")


def _check_range(bits: int, low: int) -> None:
    """Check that low..low + 2^bits − 1 fit in 64 bits."""
    _check_bits(bits)
    if not -(2**63) <= low <= 2**63 - 2**bits:
        raise UserError(
            f"wire: low = {low} with {bits} bits exceeds the range of 64-bit numbers. "
            "Give a low nearer to 0."
        )


def _check_whole(levels: np.ndarray, what: str) -> None:
    if not np.issubdtype(levels.dtype, np.integer):
        raise UserError(f"wire: {what} have type {levels.dtype}. Give whole numbers.")


def _check_table(array: np.ndarray, what: str) -> None:
    if array.ndim != 2:
        raise UserError(f"wire: {what} have {array.ndim} dimensions. Give one row per message.")


def _check_levels(levels: np.ndarray, bits: int, low: int) -> None:
    _check_range(bits, low)
    _check_whole(levels, "levels")
    _check_table(levels, "levels")
    high = low + 2**bits - 1
    if levels.size and not low <= int(levels.min()) <= int(levels.max()) <= high:
        raise UserError(
            f"wire: levels range from {levels.min()} to {levels.max()}, but {bits} bits from "
            f"{low} hold only {low} to {high}. Give more bits or another low."
        )


def _check_packed(packed: np.ndarray, bits: int, low: int, dim: int) -> None:
    _check_range(bits, low)
    _check_table(packed, "messages")
    if packed.dtype != np.uint8:
        raise UserError(f"wire: messages have type {packed.dtype}. Give bytes (uint8).")
    wanted = length(bits, max(dim, 0))
    if dim < 0 or packed.shape[1] != wanted:
        raise UserError(
            f"wire: a message has {packed.shape[1]} bytes, but {dim} coordinates of {bits} bits "
            f"need {wanted}. The message is malformed."
        )
    used = bits * dim % 8
    if used and (packed[:, -1] >> used).any():
        raise UserError(
            "wire: the bits after a message's last coordinate are not zero. The message is "
            "malformed."
        )
