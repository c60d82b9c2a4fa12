"""Write constraints-hashed.txt: what `.[dev]` installs here, pinned, with the SHA-256 of each file.

    python -m scripts.hashes

Versions are those of constraints.txt. Files are those that pip selects on this machine, with its
own configuration. On another kind of machine (system, Python) it adds that machine's hashes to the
same pins. Hashes of versions that are no longer pinned are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
HASHED = ROOT / "constraints-hashed.txt"
WANTED = (".[dev]", "setuptools")  # setuptools builds fedveil itself without another download
HEAD = """\
# Made by `python -m scripts.hashes` from constraints.txt; do not edit. For CI and `HASHES=1 make`:
# pip refuses every file whose SHA-256 is not here. Files of Linux on x86-64 with Python 3.11.
"""
Pins = dict[str, set[str]]


def reported() -> list[dict[str, Any]]:
    """What pip would install into an empty environment, without installing it."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report)]
        command += ["--constraint", "constraints.txt", *WANTED]
        subprocess.run(command, cwd=ROOT, check=True)
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installs


def pins_of(installs: list[dict[str, Any]]) -> Pins:
    """{"name==version": {sha256, …}} of all but fedveil itself, without local versions."""
    archives = [entry for entry in installs if "archive_info" in entry["download_info"]]
    return {_pin(entry["metadata"]): {_sha256(entry["download_info"])} for entry in archives}


def read_pins(text: str) -> Pins:
    """The pins and hashes of a file that `written` produced."""
    pins: Pins = {}
    for line in text.replace("\\\n", " ").splitlines():
        if found := re.match(r"(\S+==\S+)", line):
            pins[found[1]] = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return pins


def written(pins: Pins) -> str:
    """The pins as a requirements file."""
    lines = (
        " \\\n    ".join([pin, *(f"--hash=sha256:{known}" for known in sorted(hashes))])
        for pin, hashes in sorted(pins.items(), key=lambda item: item[0].lower())
    )
    return HEAD + "\n".join(lines) + "\n"


def _pin(metadata: dict[str, Any]) -> str:
    version = metadata["version"].partition("+")[0]  # the CPU build of torch is 2.x+cpu
    return f"{metadata['name']}=={version}"


def _sha256(download: dict[str, Any]) -> str:
    known = download["archive_info"].get("hashes", {}).get("sha256")
    if known is not None:
        return str(known)
    path = Path(unquote(urlsplit(download["url"]).path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Write the file."""
    pins = pins_of(reported())
    before = read_pins(HASHED.read_text()) if HASHED.is_file() else {}
    HASHED.write_text(written({pin: new | before.get(pin, set()) for pin, new in pins.items()}))
    print(f"{HASHED.name}: {len(pins)} pins")


if __name__ == "__main__":
    main()
