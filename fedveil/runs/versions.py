"""The versions that a run's numbers depend on."""

from __future__ import annotations

import importlib.metadata
import platform

from fedveil import __version__

LIBRARIES = ("torch", "numpy", "dp-accounting")


def versions() -> dict[str, str]:
    """Of fedveil, Python, and the libraries that compute and account."""
    return {
        "fedveil": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
    }
