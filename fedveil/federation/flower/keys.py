"""Node keys: the EC keys with which Flower authenticates nodes, in one form for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

MODE = 0o600


def node_key(key: bytes | str) -> bytes:
    """A public node key as DER, from OpenSSH or PEM. Equal keys give equal bytes."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    text = key.encode() if isinstance(key, str) else key
    pem = text.lstrip().startswith(b"-----")
    load = serialization.load_pem_public_key if pem else serialization.load_ssh_public_key
    try:
        public = load(text.strip())
    except (ValueError, UnsupportedAlgorithm):
        public = None
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise UserError(
            f"'{text[:40].decode(errors='replace')}…' is not a node key. Give the public key of an "
            "ECDSA key pair, such as one from `ssh-keygen -t ecdsa -b 384`."
        )
    return public.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def write_node_key(path: Path) -> str:
    """Write a fresh P-384 private key (mode 0600) and `path`.pub, and return the public key.

    The files have the form of `ssh-keygen -t ecdsa -b 384`, which Flower expects.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP384R1())
    secret = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.touch(mode=MODE, exist_ok=False)
    path.write_bytes(secret)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")
    return public.decode()


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key in a file that `write_node_key` or ssh-keygen wrote."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as problem:
        raise UserError(f"Cannot read the node key {path}: {problem.strerror}.") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"{path} is not a node key. Give an unencrypted ECDSA private key in OpenSSH format."
        )
    return key
