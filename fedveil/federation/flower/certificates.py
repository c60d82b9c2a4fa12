"""Certificates for a federation on loopback: a CA and the SuperLink's TLS certificate."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

VALID = timedelta(days=2)
SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class Certificates:
    """PEM files: the CA, and the server's certificate with its key."""

    ca: Path
    certificate: Path
    key: Path


def write_certificates(directory: Path) -> Certificates:
    """Write a CA and a certificate for localhost, valid for two days. The CA's key is not kept."""
    from cryptography.hazmat.primitives.asymmetric import ec

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = _signed("fedveil loopback CA", authority.public_key(), None, authority)
    leaf = _signed("localhost", server.public_key(), ca, authority)
    files = Certificates(*(directory / name for name in ("ca.pem", "server.pem", "server.key")))
    _write(files.ca, _pem(ca))
    _write(files.certificate, _pem(leaf))
    _write(files.key, _key_pem(server), 0o600)
    return files


def _signed(
    name: str,
    public: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """A certificate for `public`, signed with `key`; of a CA if it has no issuer."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(issuer is None, None), critical=True)
    )
    if issuer is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return builder.sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    path.touch(mode=mode)
    path.write_bytes(content)
