"""Shamir's secret sharing over the integers modulo a prime above 2^256 (Shamir 1979).

A secret is f(0) of a random polynomial f of degree t − 1. A share is f(x) at the holder's point x.
Any t shares restore the secret. Any t − 1 shares are distributed alike for every secret.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PRIME = 2**256 + 297  # the smallest prime above 2^256
ELEMENT = 33  # bytes of a number below PRIME
Entropy = Callable[[int], bytes]  # n ↦ n uniform random bytes


def draw_element(entropy: Entropy) -> int:
    """A uniform number below PRIME, by rejection of 257-bit numbers."""
    while (number := int.from_bytes(entropy(ELEMENT), "big") >> 7) >= PRIME:
        pass
    return number


def split(
    secret: int, points: Sequence[int], others: Sequence[int], prime: int = PRIME
) -> list[int]:
    """f(x) for each point x, with f(x) = secret + others[0]·x + others[1]·x² + … mod prime.

    `others` are t − 1 uniform numbers, which make it a t-of-n sharing.

    >>> split(5, [1, 2], [3], prime=7)
    [1, 4]
    """
    shares = []
    for x in points:
        value = 0
        for coefficient in reversed(others):
            value = (value * x + coefficient) % prime
        shares.append((value * x + secret) % prime)
    return shares


def weights(points: Sequence[int], prime: int = PRIME) -> list[int]:
    """λ_i = Π_{j≠i} x_j/(x_j − x_i) mod prime, so that f(0) = Σ λ_i·f(x_i) for degree < t."""
    found = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * other % prime
                below = below * (other - x) % prime
        found.append(above * pow(below, -1, prime) % prime)
    return found


def combine(shares: Sequence[int], lagrange: Sequence[int], prime: int = PRIME) -> int:
    """f(0) = Σ λ_i·f(x_i) mod prime.

    >>> combine([1, 4], weights([1, 2], prime=7), prime=7)
    5
    """
    return sum(a * b for a, b in zip(shares, lagrange, strict=True)) % prime
