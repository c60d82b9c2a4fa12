"""The primitives of secure aggregation: X25519, Ed25519, HKDF-SHA256, AES-256-GCM, AES-256-CTR.

All come from the package `cryptography`, which only this module imports.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedveil.errors import UserError
from fedveil.federation.secagg.refusals import Refusal

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import CTR
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise UserError(
        "Secure aggregation needs the package `cryptography`, which is not installed. Install it "
        "with pip install 'fedveil[federation]'."
    ) from None

KEY = 32  # bytes of every key, public or private
SIGNATURE = 64
TAG = 16
ONCE = bytes(12)  # the nonce of a box: its key seals one box only
CURVE = 2**255 - 19
LOW_ORDER = frozenset(
    {
        0,
        1,
        CURVE - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    }
)  # the u-coordinates below CURVE whose shared secret is zero with every key
CHUNK = 2**18  # bytes of a mask at a time, so that they stay in the cache
ZEROS = bytes(CHUNK)


class Identity:
    """A client's Ed25519 key pair, whose public half is in the roster; the other is not shown.

    >>> Identity(bytes(32))
    Identity(not shown)
    """

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return "Identity(not shown)"

    def sign(self, text: bytes) -> bytes:
        """The signature of a text."""
        return self._key.sign(text)


def is_signed(identity: bytes, signature: bytes, text: bytes) -> bool:
    """Whether the holder of this public key has signed the text."""
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_point(public: bytes) -> bool:
    """Whether this is the canonical form of an X25519 public key that is not of low order."""
    number = int.from_bytes(public, "little")
    return len(public) == KEY and number < CURVE and number not in LOW_ORDER


class Pair:
    """An X25519 key pair; `seed` is the private half."""

    def __init__(self, seed: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()

    @property
    def seed(self) -> bytes:
        """The private half."""
        return self._key.private_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """The secret shared with the holder of a public key; refused if it is zero."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise Refusal("keys", "A public key has low order. The round was refused.") from None


def derive(secret: bytes, session: bytes, label: bytes) -> bytes:
    """HKDF-SHA256 of a secret, with the session as salt: a key for this label only."""
    return HKDF(SHA256(), KEY, session, label).derive(secret)


def seal(key: bytes, text: bytes, associated: bytes) -> bytes:
    """AES-256-GCM under a key that seals nothing else."""
    return AESGCM(key).encrypt(ONCE, text, associated)


def unseal(key: bytes, box: bytes, associated: bytes) -> bytes:
    """The text of a box; refused if the box was not sealed with this key and these facts."""
    try:
        return AESGCM(key).decrypt(ONCE, box, associated)
    except InvalidTag:
        raise Refusal("boxes", "A box of shares cannot be opened. The round was refused.") from None


def words(bits: int) -> np.dtype[np.unsignedinteger]:
    """The smallest little-endian unsigned type of at least `bits` bits.

    Adding in it wraps modulo 2^8, 2^16, …, which is also right modulo 2^bits.
    """
    return np.dtype(f"<u{next(size for size in (1, 2, 4, 8) if 8 * size >= bits)}")


def add_masks(total: np.ndarray, plus: Iterable[bytes], minus: Iterable[bytes]) -> None:
    """total += Σ PRG(plus) − Σ PRG(minus), in place, wrapping.  PRG is AES-256-CTR from zero."""
    buffer = bytearray(CHUNK + 15)
    for operation, keys in ((np.add, plus), (np.subtract, minus)):
        for key in keys:
            _add_mask(total, key, operation, buffer)


def _add_mask(total: np.ndarray, key: bytes, operation: np.ufunc, buffer: bytearray) -> None:
    stream = Cipher(AES256(key), CTR(bytes(16))).encryptor()
    size = total.itemsize
    mask = np.frombuffer(buffer, total.dtype, CHUNK // size)
    for start in range(0, len(total), CHUNK // size):
        piece = total[start : start + CHUNK // size]
        stream.update_into(memoryview(ZEROS)[: len(piece) * size], buffer)
        operation(piece, mask[: len(piece)], out=piece)
