"""Shamir's sharing: any t shares restore the secret, and fewer tell nothing about it."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.federation.secagg.shamir import ELEMENT, PRIME, combine, draw_element, split, weights

NUMBERS = st.integers(0, PRIME - 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_t_shares_restore_the_secret(data: st.DataObject) -> None:
    secret = data.draw(NUMBERS)
    threshold = data.draw(st.integers(1, 8))
    points = data.draw(st.lists(st.integers(1, 400), min_size=threshold, max_size=12, unique=True))
    others = data.draw(st.lists(NUMBERS, min_size=threshold - 1, max_size=threshold - 1))
    shares = dict(zip(points, split(secret, points, others), strict=True))
    chosen = data.draw(st.permutations(points))[:threshold]
    assert combine([shares[x] for x in chosen], weights(chosen)) == secret


def test_fewer_shares_are_distributed_alike_for_every_secret() -> None:
    """Over a small prime, all polynomials: the law of any t − 1 shares does not depend on f(0)."""
    prime, points, threshold = 7, (1, 2, 3, 4), 3
    for seen in itertools.combinations(range(4), threshold - 1):
        laws = []
        for secret in range(prime):
            law: Counter[tuple[int, ...]] = Counter()
            for others in itertools.product(range(prime), repeat=threshold - 1):
                shares = split(secret, points, others, prime)
                law[tuple(shares[at] for at in seen)] += 1
            laws.append(law)
        assert all(law == laws[0] for law in laws)
        assert len(laws[0]) == prime ** (threshold - 1)


def test_a_polynomial_of_too_low_degree_would_be_noticed() -> None:
    """The test above has power: with t − 2 coefficients the shares depend on the secret."""
    laws = [Counter(tuple(split(s, (1, 2), [a], 7)) for a in range(7)) for s in range(7)]
    assert laws[0] != laws[1]


def test_the_prime_is_the_smallest_above_two_to_the_256() -> None:
    def is_prime(number: int) -> bool:  # Miller and Rabin, with fixed bases
        odd, twos = number - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in range(2, 60):
            powers = [pow(base, odd << k, number) for k in range(twos + 1)]
            if powers[0] != 1 and number - 1 not in powers[:-1]:
                return False
        return True

    assert is_prime(PRIME)
    assert not any(is_prime(number) for number in range(2**256 + 1, PRIME))
    assert PRIME.bit_length() <= 8 * ELEMENT


def test_draws_are_below_the_prime_and_reach_beyond_256_bits() -> None:
    """Numbers of 257 bits at or above the prime are drawn again, not reduced."""
    stream = iter([b"\xff" * ELEMENT, (PRIME << 7).to_bytes(ELEMENT, "big"), b"\x00" * ELEMENT])
    assert draw_element(lambda size: next(stream)) == 0
    last = ((PRIME - 1) << 7).to_bytes(ELEMENT, "big")
    assert draw_element(lambda size: last) == PRIME - 1


def test_draws_are_uniform() -> None:
    """20,000 draws in 16 cells: χ² < 45 (p = 8e-5). Draws below 2^255 would give 20,000."""
    entropy = random.Random(0).randbytes
    cells = Counter(draw_element(entropy) * 16 // PRIME for _ in range(20_000))
    assert sum((cells[cell] - 1250) ** 2 / 1250 for cell in range(16)) < 45
