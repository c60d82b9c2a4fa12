"""Streams: public ones repeat, secret ones are the cipher's and stay secret."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

from fedveil.errors import UserError
from fedveil.random.streams import SecretKey, _cipher, run_key, stream, torch_generator


def keystream(key: bytes, size: int, counter: int = 0, nonce: int = 0) -> bytes:
    """ChaCha20 of RFC 8439 by another implementation; its nonce's first word is our upper half."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    start = counter.to_bytes(4, "little") + nonce.to_bytes(12, "little")
    algorithm = ciphers.algorithms.ChaCha20(key, start)
    return bytes(ciphers.Cipher(algorithm, None).encryptor().update(bytes(size)))


@pytest.mark.parametrize("key", [bytes(32), bytes(range(32)), b"\xff" * 32])
def test_the_secret_generator_is_chacha20(key: bytes) -> None:
    """Words, bytes and half-words are the keystream itself, over many blocks."""
    words = _cipher(key).integers(2**64, size=5000, dtype=np.uint64)
    assert words.astype("<u8").tobytes() == keystream(key, 40_000)
    assert _cipher(key).bytes(1000) == keystream(key, 1000)
    half = _cipher(key).integers(2**32, size=100, dtype=np.uint32)
    assert half.astype("<u4").tobytes() == keystream(key, 400)


def test_the_known_first_block() -> None:
    """RFC 8439, A.1, test vector 1: key, nonce and counter zero."""
    assert _cipher(bytes(32)).bytes(16).hex() == "76b8e0ada0f13d90405d6ae55386bd28"


@pytest.mark.parametrize("block", [1, 2**31, 2**32 - 1])
def test_far_along_the_stream_is_still_the_cipher(block: int) -> None:
    """randomgen counts words of 32 bits, 16 to a block; the 64-bit block counter carries."""
    randomgen = pytest.importorskip("randomgen")
    key = bytes(range(32))
    bits = randomgen.ChaCha(key=int.from_bytes(key, "little"), counter=16 * block, rounds=20)
    drawn = bits.random_raw(16).astype("<u8").tobytes()
    assert drawn[:64] == keystream(key, 64, block)
    following = block + 1
    assert drawn[64:] == keystream(key, 64, following % 2**32, following // 2**32)


def test_a_secret_stream_is_the_cipher_under_its_subkey() -> None:
    key = SecretKey()
    assert stream(key, 3, "noise").bytes(256) == keystream(key.subkey(3, "noise"), 256)


def test_a_public_stream_is_philox_under_the_digest_of_its_place() -> None:
    """Also copies of it, which go on where it is."""
    digest = hashlib.blake2b(b"fedveil/5/3/noise", digest_size=16).digest()
    wanted = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    found = stream(5, 3, "noise")
    assert np.array_equal(found.integers(2**64, size=9, dtype=np.uint64), wanted.integers(
        2**64, size=9, dtype=np.uint64))  # fmt: skip
    following = wanted.random(5)
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), found):
        assert np.array_equal(copied.random(5), following)


def test_subkeys_differ_by_key_round_and_purpose() -> None:
    one, other = SecretKey(), SecretKey()
    places = [(1, "noise"), (11, "noise"), (1, "cohort"), (1, "1/noise"), (0, "noise")]
    subkeys = {key.subkey(*place) for key in (one, other) for place in places}
    assert len(subkeys) == 10
    assert {len(subkey) for subkey in subkeys} == {32}
    assert one.subkey(1, "noise") == one.subkey(1, "noise")


def test_a_secret_key_is_the_operating_system_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def token(size: int) -> bytes:
        asked.append(size)
        return bytes(range(size))

    monkeypatch.setattr("fedveil.random.streams.secrets.token_bytes", token)
    key = SecretKey()
    assert asked == [32]
    expected = hashlib.blake2b(b"fedveil/7/noise", key=bytes(range(32)), digest_size=32)
    assert key.subkey(7, "noise") == expected.digest()


def test_a_secret_key_is_never_shown() -> None:
    key = SecretKey()
    shown = [repr(key), str(key), f"{key}", f"{key!r}", f"{[key]}"]
    assert {text.strip("[]") for text in shown} == {"SecretKey(not shown)"}
    assert not hasattr(key, "__dict__")


@dataclasses.dataclass(frozen=True)
class Holder:
    key: SecretKey


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_secret_key_is_not_pickled(protocol: int) -> None:
    for thing in (SecretKey(), {"key": [SecretKey()]}, Holder(SecretKey())):
        with pytest.raises(UserError, match="cannot be copied or saved"):
            pickle.dumps(thing, protocol)


def test_a_secret_key_is_not_copied_or_written() -> None:
    key = SecretKey()
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(UserError, match="cannot be copied"):
            copied(key)
    with pytest.raises(UserError, match="cannot be copied"):
        dataclasses.asdict(Holder(key))
    with pytest.raises(TypeError):
        json.dumps({"key": key})


def test_a_secret_key_does_not_become_a_public_one() -> None:
    """Its text is the same for all keys, so a run key made of it would be known to everyone."""
    with pytest.raises(UserError, match="run_key"):
        run_key(0, SecretKey())


def test_public_streams_are_what_they_were() -> None:
    """Seeded runs keep their numbers from version to version."""
    assert stream(0, 3, "noise").integers(1000, size=4).tolist() == [861, 670, 557, 961]
    assert run_key(0, "dp_sgd") == "ec25b7cdc5b2ac72a887bee9540ded55"
    assert torch_generator(0, "model").initial_seed() == 1503247736834824394


def test_a_run_s_key_tells_where_one_fact_ends() -> None:
    """Seed 1 of 23 rounds is not seed 12 of 3 rounds."""
    assert run_key(1, 23) != run_key(12, 3)
    assert run_key("a", "") != run_key("a")


def test_public_streams_differ_by_key_round_and_purpose() -> None:
    labels = [
        (0, 0, "noise"),
        (1, 0, "noise"),
        (0, 1, "noise"),
        (0, 0, "cohort"),
        ("a", 0, "noise"),
    ]
    assert len({stream(*label).bytes(16) for label in labels}) == len(labels)


def test_a_public_stream_loads_no_cipher() -> None:
    code = (
        "import sys; from fedveil.random.streams import stream; stream(0, 0, 'noise').random();"
        "sys.exit('randomgen' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
