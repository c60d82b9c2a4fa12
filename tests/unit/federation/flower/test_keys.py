"""Node keys and certificates, as Flower expects them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedveil.errors import UserError
from fedveil.federation.flower.certificates import write_certificates
from fedveil.federation.flower.keys import node_key, read_node_key, write_node_key


def test_a_written_key_is_read_again_and_private(tmp_path: Path) -> None:
    path = tmp_path / "node"
    public = write_node_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    own = (
        read_node_key(path)
        .public_key()
        .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    assert node_key(own) == node_key(public) == node_key(path.with_suffix(".pub").read_bytes())


def test_a_key_is_not_overwritten(tmp_path: Path) -> None:
    write_node_key(tmp_path / "node")
    with pytest.raises(FileExistsError):
        write_node_key(tmp_path / "node")


def test_flower_registers_such_a_key(tmp_path: Path) -> None:
    from flwr.cli.supernode.register import try_load_public_key

    public = write_node_key(tmp_path / "node")
    assert node_key(try_load_public_key(tmp_path / "node.pub")) == node_key(public)


def other_kind() -> str:
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.mark.parametrize(
    "key",
    ["", "garbage", "-----BEGIN PUBLIC KEY-----\n", other_kind(), b"\xff"],
    ids=["empty", "garbage", "cut", "another kind", "no text"],
)
def test_what_is_not_a_node_key_is_refused(key: str | bytes) -> None:
    with pytest.raises(UserError, match="is not a node key"):
        node_key(key)


def test_a_file_that_has_no_node_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot read the node key"):
        read_node_key(tmp_path / "none")
    (tmp_path / "text").write_text("text")
    with pytest.raises(UserError, match="is not a node key"):
        read_node_key(tmp_path / "text")


def test_the_certificate_is_signed_by_the_ca_whose_key_is_not_kept(tmp_path: Path) -> None:
    files = write_certificates(tmp_path)
    ca, leaf = (
        x509.load_pem_x509_certificate(path.read_bytes()) for path in (files.ca, files.certificate)
    )
    leaf.verify_directly_issued_by(ca)
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert len(list(tmp_path.iterdir())) == 3
