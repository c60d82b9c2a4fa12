"""Public files by their address: bounded in time and size, kept only with the right SHA-256."""

from __future__ import annotations

import gzip
import hashlib
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, cast

from fedveil.errors import UserError

TIMEOUT = 20.0  # seconds without a byte before a download is given up
DEADLINE = 3600.0  # seconds for one whole file
MAX_BYTES = 2**31  # of one download
_CHUNK = 2**18


@dataclass(frozen=True)
class RemoteFile:
    """A public file and the SHA-256 of its bytes, or of what is in it when `gzipped`.

    Gzip writes its date and level into the file, so only the content is the same everywhere.
    """

    url: str
    sha256: str
    gzipped: bool = False

    @property
    def name(self) -> str:
        """The file's own name, the last part of its address."""
        return self.url.rsplit("/", 1)[-1]


def fetch(
    file: RemoteFile, folder: Path, timeout: float = TIMEOUT, deadline: float = DEADLINE
) -> Path:
    """Download into `folder`; the file appears there only whole and with the right SHA-256."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            partial = Path(scratch) / "partial"
            _stream(file.url, partial, timeout, time.monotonic() + deadline)
            _check_sha256(file, partial)
            return partial.replace(folder / file.name)
    except UserError:
        raise
    except (OSError, ValueError, HTTPException) as error:
        raise UserError(f"{file.url} could not be downloaded to '{folder}' ({error}).") from None


def _stream(url: str, target: Path, timeout: float, end: float) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError("only http and https addresses are read")
    with _ask(url, timeout) as answer, target.open("wb") as out:
        while piece := answer.read1(_CHUNK):
            out.write(piece)
            if time.monotonic() > end:
                raise TimeoutError("it took too long")
            if out.tell() > MAX_BYTES:
                raise ValueError("it is larger than any known data set")
        expected = answer.headers.get("Content-Length")
        if expected and out.tell() != int(expected):
            raise ValueError(f"the connection broke after {out.tell()} of {expected} bytes")


def _ask(url: str, timeout: float) -> HTTPResponse:
    try:
        return cast(HTTPResponse, urllib.request.urlopen(url, timeout=timeout))
    except urllib.error.HTTPError as error:
        error.close()  # it is also the open answer
        raise OSError(f"HTTP status {error.code}") from None


def _check_sha256(file: RemoteFile, path: Path) -> None:
    digest = hashlib.sha256()
    try:
        with cast(BinaryIO, gzip.open(path) if file.gzipped else path.open("rb")) as stream:
            while piece := stream.read(_CHUNK):
                digest.update(piece)
    except (OSError, EOFError, zlib.error):
        raise UserError(f"What {file.url} sent is not a gzip file; nothing was kept.") from None
    if digest.hexdigest() != file.sha256:
        raise UserError(
            f"What {file.url} sent does not have the published SHA-256 {file.sha256[:12]}…; "
            "nothing was kept."
        )
