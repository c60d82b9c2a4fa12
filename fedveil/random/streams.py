"""Independent random streams keyed by (run key, round, purpose), passed as arguments.

Two different keys give independent streams. The same public key gives the same numbers on any
machine. Without a `SecretKey`, no one can distinguish its numbers from uniform ones.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Never

import numpy as np
import numpy.typing as npt
import torch
from numpy.random.bit_generator import ISeedSequence

from fedveil.errors import UserError


class SecretKey:
    """256 bits from the operating system that exist only while the process runs.

    The key is never shown, copied, compared by value or written. No other process can repeat its
    draws, except those that work on the same run (`agreed`).

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
        raise UserError("A SecretKey cannot be copied or saved. Create a new one for the next run.")

    def derived(self, purpose: str) -> SecretKey:
        """A key for one purpose, which tells nothing about this one."""
        key = SecretKey()
        key._secret = self.subkey(0, f"key of {purpose}")
        return key

    def subkey(self, round: int, purpose: str) -> bytes:
        """BLAKE2b of (round, purpose), keyed with the secret: 256 bits, independent of others."""
        label = f"fedveil/{round}/{purpose}".encode()
        return hashlib.blake2b(label, key=self._secret, digest_size=32).digest()


Key = int | str | SecretKey


def run_key(*facts: object) -> str:
    """The key of a run: any other seed, recipe or data gives unrelated streams.

    Two releases with the same noise would reveal their difference, so noise must not depend on the
    seed alone.

    >>> run_key(0, "dp_sgd") == run_key(0, "dp_sgd"), run_key(0, "dp_sgd") == run_key(0, "dp_lsgd")
    (True, False)
    """
    if any(isinstance(fact, SecretKey) for fact in facts):
        raise UserError("run_key: a SecretKey is not a public fact. Pass it to stream directly.")
    label = "\x00".join(str(fact) for fact in facts)
    return hashlib.blake2b(label.encode(), digest_size=16).hexdigest()


def derived(key: Key, purpose: str) -> Key:
    """The key of a part of a run, such as one silo: its streams are independent of all others."""
    return key.derived(purpose) if isinstance(key, SecretKey) else run_key(key, purpose)


def stream(key: Key, round: int, purpose: str) -> np.random.Generator:
    """The generator for one purpose in one round; keys have at least 128 bits, so none collide.

    A public key seeds Philox, which is fast and reproducible; a `SecretKey` keys ChaCha20.

    >>> stream(0, 3, "noise").integers(100) == stream(0, 3, "noise").integers(100)
    np.True_
    >>> stream(SecretKey(), 3, "noise").bytes(16) == stream(SecretKey(), 3, "noise").bytes(16)
    False
    """
    if isinstance(key, SecretKey):
        return _cipher(key.subkey(round, purpose))
    label = f"fedveil/{key}/{round}/{purpose}".encode()
    digest = hashlib.blake2b(label, digest_size=16).digest()
    seed = _PhiloxKey(digest)
    return np.random.Generator(np.random.Philox(seed))  # type: ignore[arg-type]  # takes it


class _PhiloxKey(ISeedSequence):
    """128 bits that Philox takes as its key.

    Given as `Philox(key=…)`, they are the same key, but NumPy first makes a seed that nobody uses
    from the system's entropy, which takes longer than everything else here.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def generate_state(
        self, n_words: int, dtype: npt.DTypeLike = np.uint64
    ) -> npt.NDArray[np.uint32 | np.uint64]:
        """The key as two words, the lower one first."""
        return np.frombuffer(self._key, "<u8").astype(np.uint64)


def _cipher(subkey: bytes) -> np.random.Generator:
    """The ChaCha20 keystream from block 0, nonce 0, read as little-endian words."""
    from randomgen import ChaCha

    return np.random.Generator(ChaCha(key=int.from_bytes(subkey, "little"), rounds=20))


def torch_generator(key: int, purpose: str) -> torch.Generator:
    """A torch generator for work done once per run, such as initial weights."""
    seed = int(stream(key, 0, purpose).integers(2**63))
    return torch.Generator().manual_seed(seed)
