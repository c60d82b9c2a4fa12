"""Randomness as an argument: independent streams keyed by (run key, round, purpose).

Two different keys give independent streams. The same public key gives the same numbers on any
machine; a `SecretKey` gives numbers that nobody without it can tell from uniform.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Never

import numpy as np
import torch

from fedveil.errors import UserError


class SecretKey:
    """256 bits from the operating system, for as long as the process lives.

    It is not shown, copied, compared by value or written anywhere; what it drew cannot be drawn
    again by another process, but for those that work on one run together (`agreed`).

    >>> SecretKey()
    SecretKey(not shown)
    """

    __slots__ = ("_secret",)

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    @classmethod
    def agreed(cls, secret: Callable[[bytes], bytes]) -> SecretKey:
        """One key for all processes of a run; `secret` gives each the first one's bytes."""
        key = cls()
        key._secret = secret(key._secret)
        return key

    def __repr__(self) -> str:
        return "SecretKey(not shown)"

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UserError("A SecretKey is not copied or saved; make a new one for the next run.")

    def subkey(self, round: int, purpose: str) -> bytes:
        """BLAKE2b keyed with the secret, of (round, purpose): 256 bits, independent of others."""
        label = f"fedveil/{round}/{purpose}".encode()
        return hashlib.blake2b(label, key=self._secret, digest_size=32).digest()


Key = int | str | SecretKey


def run_key(*facts: object) -> str:
    """The key of a run: any other seed, recipe or data give streams that share nothing.

    Two releases with the same noise would reveal their difference, so noise must not depend on the
    seed alone.

    >>> run_key(0, "dp_sgd") == run_key(0, "dp_sgd"), run_key(0, "dp_sgd") == run_key(0, "dp_lsgd")
    (True, False)
    """
    if any(isinstance(fact, SecretKey) for fact in facts):
        raise UserError("run_key: a SecretKey has no public facts; give it to stream as it is.")
    label = "\x00".join(str(fact) for fact in facts)
    return hashlib.blake2b(label.encode(), digest_size=16).hexdigest()


def stream(key: Key, round: int, purpose: str) -> np.random.Generator:
    """The generator of one purpose in one round; at least 128 bits of key, so none collide.

    A public key drives Philox, fast and repeatable; a `SecretKey` the cipher ChaCha20.

    >>> stream(0, 3, "noise").integers(100) == stream(0, 3, "noise").integers(100)
    np.True_
    >>> stream(SecretKey(), 3, "noise").bytes(16) == stream(SecretKey(), 3, "noise").bytes(16)
    False
    """
    if isinstance(key, SecretKey):
        return _cipher(key.subkey(round, purpose))
    label = f"fedveil/{key}/{round}/{purpose}".encode()
    digest = hashlib.blake2b(label, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def _cipher(subkey: bytes) -> np.random.Generator:
    """The ChaCha20 keystream from block 0, nonce 0, read as little-endian words."""
    from randomgen import ChaCha

    return np.random.Generator(ChaCha(key=int.from_bytes(subkey, "little"), rounds=20))


def torch_generator(key: int, purpose: str) -> torch.Generator:
    """A torch generator for work done once a run, such as the first model's weights."""
    seed = int(stream(key, 0, purpose).integers(2**63))
    return torch.Generator().manual_seed(seed)
