"""Primitives: low-order points are known, masks cancel, keys serve one purpose."""

from __future__ import annotations

import builtins
import importlib
import itertools
import random
import sys
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedveil.errors import UserError
from fedveil.federation.secagg import derived, primitives
from fedveil.federation.secagg.keys import RoundKeys
from fedveil.federation.secagg.primitives import CHUNK, CURVE, LOW_ORDER, Pair, add_masks, words
from fedveil.federation.secagg.refusals import Refusal
from fedveil.federation.secagg.terms import place

DRAW = random.Random(3).randbytes


def test_low_order_points_are_those_whose_secret_is_zero() -> None:
    """The package refuses each of them too, and doubling one gives another, or infinity."""
    key = X25519PrivateKey.from_private_bytes(DRAW(32))
    for number in LOW_ORDER:
        point = number.to_bytes(32, "little")
        assert not primitives.is_point(point)
        with pytest.raises(ValueError, match=r"exchange|shared"):
            key.exchange(X25519PublicKey.from_public_bytes(point))
        with pytest.raises(Refusal):
            Pair(DRAW(32)).agree(point)
    a = 486662  # y² = x³ + a·x² + x: points of order 8 double to x = ±1
    for x in LOW_ORDER - {0}:
        doubled = (x * x - 1) ** 2 * pow(4 * x * (x * x + a * x + 1), CURVE - 2, CURVE) % CURVE
        assert doubled in LOW_ORDER


def test_ordinary_points_are_taken() -> None:
    assert all(primitives.is_point(Pair(DRAW(32)).public) for _ in range(50))
    assert not primitives.is_point(bytes(31) + b"\x09\x00")
    assert not primitives.is_point(b"\x09" + bytes(30))


@pytest.mark.parametrize("bits", [1, 8, 9, 16, 17, 32, 33, 62])
@pytest.mark.parametrize("dim", [1, 1000, CHUNK // 8 + 3])
def test_masks_cancel(bits: int, dim: int) -> None:
    total = np.zeros(dim, words(bits))
    keys = [DRAW(32) for _ in range(3)]
    add_masks(total, keys, [])
    assert dim == 1 or total.any()
    add_masks(total, [], keys[::-1])
    assert not total.any()


def test_masks_do_not_depend_on_chunks() -> None:
    """A mask of several chunks is one key stream."""
    key, size = DRAW(32), CHUNK // 4 * 2 + 5
    total = np.zeros(size, words(20))
    add_masks(total, [key], [])
    stream = Cipher(AES256(key), CTR(bytes(16))).encryptor().update(bytes(4 * size))
    assert total.tobytes() == stream


def test_masks_are_aes_256_in_counter_mode() -> None:
    """The first block of the stream is AES-256 of zeros: known, for a key of zeros."""
    total = np.zeros(16, words(8))
    add_masks(total, [bytes(32)], [])
    assert total.tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_every_key_has_one_purpose() -> None:
    """Over purposes, clients, directions and sessions, no two keys are equal."""
    one, other, seed = Pair(DRAW(32)), Pair(DRAW(32)), DRAW(32)
    keys = []
    for session in (bytes(32), b"s" * 32):
        secret = one.agree(other.public)
        for a, b in itertools.permutations((1, 2, 256), 2):
            keys.append(primitives.derive(secret, session, derived.box_label(a, b)))
        for a, b in itertools.combinations((1, 2, 256), 2):
            keys.append(derived.mask_key(one, other.public, session, (a, b)))
        for client in (1, 2, 256):
            keys.append(derived.self_mask_key(seed, session, client))
            keys.append(derived.check_value(seed, session, client))
    assert len(set(keys)) == len(keys)


def test_signatures_name_their_client() -> None:
    """Also if two clients of a roster have the same identity."""
    first, second = (derived.survivors_text(bytes(32), c, (1, 2), (1, 2)) for c in (1, 2))
    assert first != second
    where, own = place(bytes(32), bytes(16), 0), primitives.Identity(DRAW(32))
    record = RoundKeys.draw(where, 0, 1, own, DRAW).record
    assert record.signed(where, 1, own.public)
    assert not record.signed(where, 2, own.public)


def test_both_clients_derive_the_same_mask() -> None:
    one, other = Pair(DRAW(32)), Pair(DRAW(32))
    session = DRAW(32)
    assert derived.mask_key(one, other.public, session, (3, 9)) == derived.mask_key(
        other, one.public, session, (9, 3)
    )


def test_a_box_opens_with_its_key_and_its_facts_only() -> None:
    key, box = bytes(32), primitives.seal(bytes(32), b"shares", b"facts")
    assert primitives.unseal(key, box, b"facts") == b"shares"
    for wrong in ((b"k" * 32, box, b"facts"), (key, box, b"other"), (key, box[:-1], b"facts")):
        with pytest.raises(Refusal):
            primitives.unseal(*wrong)


def test_signatures_of_wrong_keys_and_lengths_are_none() -> None:
    own = primitives.Identity(DRAW(32))
    good = own.sign(b"text")
    assert primitives.is_signed(own.public, good, b"text")
    for bad in (
        (own.public, good, b"texT"),
        (own.public, good[:-1], b"text"),
        (b"", good, b"text"),
    ):
        assert not primitives.is_signed(*bad)


def test_secrets_are_not_shown() -> None:
    seed = b"secret" + bytes(26)
    for holder in (primitives.Identity(seed), Pair(seed)):
        assert "secret" not in repr(holder)
        assert seed.hex()[:12] not in repr(holder)


def test_without_cryptography_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "fedveil.federation.secagg.primitives")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'fedveil\[federation\]'"):
        importlib.import_module("fedveil.federation.secagg.primitives")
