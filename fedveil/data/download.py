"""Downloads with limits on time and size; a file is kept only if its SHA-256 matches."""

from __future__ import annotations

import gzip
import hashlib
import os
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

TIMEOUT = 20.0  # seconds without a byte before a download is abandoned
DEADLINE = 3600.0  # seconds for one complete file
MAX_BYTES = 2**31  # of one download
_CHUNK = 2**18


def data_directory() -> Path:
    """Where data sets are stored: `FEDVEIL_DATA`, or ~/.cache/fedveil."""
    return Path(os.environ.get("FEDVEIL_DATA") or Path.home() / ".cache/fedveil").expanduser()


@dataclass(frozen=True)
class RemoteFile:
    """A public file and the SHA-256 of its bytes, or of its decompressed content if `gzipped`.

    Gzip stores a date and a level in the file, so only the content is the same everywhere.
    """

    url: str
    sha256: str
    gzipped: bool = False

    @property
    def name(self) -> str:
        """File name: the last part of the URL."""
        return self.url.rsplit("/", 1)[-1]


def fetch(
    file: RemoteFile, folder: Path, timeout: float = TIMEOUT, deadline: float = DEADLINE
) -> Path:
    """Download into `folder`; the file appears there only complete and with the right SHA-256."""
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
        raise ValueError("only http and https URLs are supported")
    with _ask(url, timeout) as answer, target.open("wb") as out:
        while piece := answer.read1(_CHUNK):
            out.write(piece)
            if time.monotonic() > end:
                raise TimeoutError("the download took too long")
            if out.tell() > MAX_BYTES:
                raise ValueError("the file is larger than any known data set")
        expected = answer.headers.get("Content-Length")
        if expected and out.tell() != int(expected):
            raise ValueError(f"the connection closed after {out.tell()} of {expected} bytes")


def _ask(url: str, timeout: float) -> HTTPResponse:
    try:
        return cast(HTTPResponse, urllib.request.urlopen(url, timeout=timeout))
    except urllib.error.HTTPError as error:
        error.close()  # the error is also the open response
        raise OSError(f"HTTP status {error.code}") from None


def _check_sha256(file: RemoteFile, path: Path) -> None:
    digest = hashlib.sha256()
    try:
        with cast(BinaryIO, gzip.open(path) if file.gzipped else path.open("rb")) as stream:
            while piece := stream.read(_CHUNK):
                digest.update(piece)
    except (OSError, EOFError, zlib.error):
        raise UserError(f"{file.url} did not return a gzip file. Nothing was saved.") from None
    if digest.hexdigest() != file.sha256:
        raise UserError(
            f"The file from {file.url} does not have the published SHA-256 {file.sha256[:12]}…. "
            "Nothing was saved."
        )
