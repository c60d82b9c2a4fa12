"""The versions that the results of a run depend on, and the refusal of files of newer versions."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from fedveil import __version__
from fedveil.errors import UserError

LIBRARIES = ("torch", "numpy", "dp-accounting")


def versions() -> dict[str, str]:
    """The versions of fedveil, Python, and the libraries for computation and accounting."""
    return {
        "fedveil": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def refuse_newer(file: Path, version: Any) -> None:
    """Refuse a file of a newer version, which may have a meaning unknown to this one."""
    if version is not None and _numbers(str(version)) > _numbers(__version__):
        raise UserError(
            f"{file} was written by fedveil {str(version)[:20]}, which is newer than the installed "
            f"{__version__}. Use that version."
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> _numbers("1.10.2rc1"), _numbers("1.9")
    ((1, 10, 2), (1, 9))
    """
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)
