"""Contract checks for parts and recipes: pass your own part, and the check tries to break it.

    from fedveil.testing import check_bound

    check_bound(MyBound(1.0))

A check returns if it found no mistake and raises `AssertionError` with a sentence otherwise. It
runs the part on inputs chosen against it and on random ones, so it can refute a contract but not
prove it (docs/contracts.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedveil.testing.bounds import check_bound
    from fedveil.testing.cohorts import check_cohort
    from fedveil.testing.memories import check_memory
    from fedveil.testing.noises import check_noise
    from fedveil.testing.quantizers import check_quantizer
    from fedveil.testing.recipes import check_recipe
    from fedveil.testing.servers import check_server

_NAMES = {
    "check_bound": "bounds",
    "check_cohort": "cohorts",
    "check_memory": "memories",
    "check_noise": "noises",
    "check_quantizer": "quantizers",
    "check_recipe": "recipes",
    "check_server": "servers",
}


def __getattr__(name: str) -> Any:
    """Load a check when it is first used."""
    if name not in _NAMES:
        raise AttributeError(f"module 'fedveil.testing' has no attribute '{name}'")
    try:
        module = importlib.import_module(f"fedveil.testing.{_NAMES[name]}")
    except ModuleNotFoundError as missing:
        if missing.name != "hypothesis":
            raise
        raise ImportError(
            f"{name} needs hypothesis, which is not installed. Run: pip install 'fedveil[test]'."
        ) from missing
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(_NAMES)


__all__ = [
    "check_bound",
    "check_cohort",
    "check_memory",
    "check_noise",
    "check_quantizer",
    "check_recipe",
    "check_server",
]
