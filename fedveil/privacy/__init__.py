"""What is said about a recipe: guarantee, statement, calibration, composition, selection.

The module is also a function: `fv.privacy(epsilon=5, rate=0.2, rounds=200)` is the command
`fedveil privacy` (fedveil/commands/python.py).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that can be called, since the function and the package have one name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("fedveil.commands.python").privacy(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
