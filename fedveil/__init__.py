"""fedveil: federated training with differential privacy guarantees that hold.

>>> import fedveil as fv
>>> fv.algorithms.dp_fedavg(clip=1.0, noise_multiplier=1.0).bound
Clip(norm=1.0)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedveil import algorithms, models, parts, privacy
    from fedveil.commands.compared import ComparisonOutcome
    from fedveil.commands.python import compare, diagnose, plan, report, resume, train
    from fedveil.data import problems
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
    from fedveil.reporting.figures import charts, plot
    from fedveil.runs.opened import open_run
    from fedveil.training import loggers
    from fedveil.training.metrics import Metric
    from fedveil.training.result import Result
    from fedveil.training.statistics import statistics

__version__ = "0.2.0"

_MODULES = {
    "algorithms": "algorithms",
    "loggers": "training.loggers",
    "models": "models",
    "parts": "parts",
    "privacy": "privacy",
    "problems": "data.problems",
}
_NAMES = {
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
    "plan": "commands.python",
    "compare": "commands.python",
    "diagnose": "commands.python",
    "report": "commands.python",
    "resume": "commands.python",
    "Budget": "privacy.calibrate",
    "Metric": "training.metrics",
    "charts": "reporting.figures",
    "plot": "reporting.figures",
    "Recipe": "recipe",
    "Result": "training.result",
    "open_run": "runs.opened",
    "UserError": "errors",
    "statistics": "training.statistics",
    "train": "commands.python",
    "ComparisonOutcome": "commands.compared",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import fedveil` is fast."""
    if name in _MODULES:
        return importlib.import_module(f"fedveil.{_MODULES[name]}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"fedveil.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'fedveil' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_NAMES, "__version__"])


__all__ = [
    "Budget",
    "ByKey",
    "ComparisonOutcome",
    "Dataset",
    "Dirichlet",
    "Examples",
    "Federated",
    "Iid",
    "MajorityClasses",
    "Metric",
    "Origin",
    "Recipe",
    "Result",
    "Shards",
    "UserError",
    "__version__",
    "algorithms",
    "charts",
    "compare",
    "describe",
    "diagnose",
    "load",
    "load_path",
    "load_table",
    "loggers",
    "models",
    "open_federated",
    "open_run",
    "parts",
    "plan",
    "plot",
    "privacy",
    "problems",
    "report",
    "resume",
    "save_clients",
    "save_federated",
    "statistics",
    "synthetic",
    "train",
    "verify_federated",
]
