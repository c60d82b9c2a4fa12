"""fedveil: federated and differentially private training with a guarantee that is true.

>>> import fedveil as fv
>>> fv.algorithms.dp_fedavg(clip=1.0, noise_multiplier=1.0).bound
Clip(norm=1.0)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedveil import algorithms, models, parts, problems
    from fedveil.data.catalog import load, load_path
    from fedveil.data.describe import describe
    from fedveil.data.federated import Dataset, Examples, Federated
    from fedveil.data.origin import Origin
    from fedveil.data.partition import ByKey, Dirichlet, Iid, MajorityClasses, Shards
    from fedveil.data.save import save_clients, save_federated
    from fedveil.data.saved import open_federated, verify_federated
    from fedveil.data.synthetic import synthetic
    from fedveil.data.table import load_table
    from fedveil.errors import UserError
    from fedveil.privacy.calibrate import Budget
    from fedveil.recipe import Recipe
    from fedveil.result import Result
    from fedveil.runs.opened import open_run
    from fedveil.training import train

__version__ = "0.1.0"

_PUBLIC = {
    "algorithms": "",
    "models": "",
    "parts": "",
    "problems": "",
    "load": "data.catalog",
    "load_path": "data.catalog",
    "load_table": "data.table",
    "describe": "data.describe",
    "Dataset": "data.federated",
    "Examples": "data.federated",
    "Federated": "data.federated",
    "Origin": "data.origin",
    "ByKey": "data.partition",
    "Dirichlet": "data.partition",
    "Iid": "data.partition",
    "MajorityClasses": "data.partition",
    "Shards": "data.partition",
    "save_clients": "data.save",
    "save_federated": "data.save",
    "open_federated": "data.saved",
    "verify_federated": "data.saved",
    "synthetic": "data.synthetic",
    "Budget": "privacy.calibrate",
    "Recipe": "recipe",
    "Result": "result",
    "open_run": "runs.opened",
    "UserError": "errors",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `import fedveil` is quick."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedveil' has no attribute '{name}'")
    if not _PUBLIC[name]:
        return importlib.import_module(f"fedveil.{name}")
    return getattr(importlib.import_module(f"fedveil.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, "__version__"])


__all__ = [
    "Budget",
    "ByKey",
    "Dataset",
    "Dirichlet",
    "Examples",
    "Federated",
    "Iid",
    "MajorityClasses",
    "Origin",
    "Recipe",
    "Result",
    "Shards",
    "UserError",
    "__version__",
    "algorithms",
    "describe",
    "load",
    "load_path",
    "load_table",
    "models",
    "open_federated",
    "open_run",
    "parts",
    "problems",
    "save_clients",
    "save_federated",
    "synthetic",
    "train",
    "verify_federated",
]
