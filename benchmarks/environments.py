"""Virtual environments for the peers, built once, since each peer needs its own versions."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

TORCH = "torch==2.13.0"  # exact: on indexes other than PyPI this pin finds the CPU build

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "opacus": ("opacus==1.6.0", TORCH),
    "pfl": ("pfl==0.6.0", "dp-accounting<0.6", TORCH),
    "flower": ("flwr[simulation]==1.41.0", TORCH),
    # fedjax calls functions that jax has removed, and a newer haiku needs a newer jax.
    "fedjax": (
        "fedjax==0.0.17",
        "jax==0.4.30",
        "jaxlib==0.4.30",
        "dm-haiku==0.0.12",
        "numpy<2",
    ),
}


class NotInstalledError(Exception):
    """A peer that cannot be installed here; the message is the reason in one line."""


def python_of(peer: str, root: Path, limit: float) -> Path:
    """The interpreter of a peer's environment below `root`, which is built if missing."""
    return build(root / peer, REQUIREMENTS[peer], limit)


def build(place: Path, requirements: Sequence[str], limit: float) -> Path:
    """An environment with these requirements, within `limit` seconds; keeps a complete one."""
    python, ready = place / "bin" / "python", place / "requirements.txt"
    wanted = "\n".join(requirements)
    if ready.exists() and ready.read_text() == wanted and python.exists():
        return python
    try:
        venv.create(place, with_pip=True, clear=True)
        _install(python, requirements, limit)
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"pip had not finished after {limit:.0f} s") from None
    except (OSError, subprocess.SubprocessError) as problem:
        raise NotInstalledError(reason(str(problem))) from None
    ready.write_text(wanted)
    return python


def _install(python: Path, requirements: Sequence[str], limit: float) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *requirements], capture_output=True, text=True, timeout=limit, check=False
    )
    if done.returncode:
        raise NotInstalledError(reason(done.stderr))


def reason(text: str) -> str:
    """The most informative line: pip's last error, or a program's last line.

    >>> reason("ERROR: No matching distribution found for pfl==9\\nWARNING: pip is old\\n")
    'No matching distribution found for pfl==9'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    last = (errors or lines or ["no reason given"])[-1]
    return last.replace("|", "/")[:160]
