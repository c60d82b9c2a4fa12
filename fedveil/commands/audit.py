"""`fedveil audit` and `fedveil conform`: test a privacy claim by experiment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.accounting.rounding import short
from fedveil.commands import flags
from fedveil.errors import UserError
from fedveil.serialization.imports import module_named

if TYPE_CHECKING:
    from fedveil.audit.report import Audit


def audit(
    target: Annotated[Path, typer.Argument(help="Settings file (TOML), or a run's directory.")],
    canaries: Annotated[
        int, typer.Option(help="Number of canaries to add to the population.")
    ] = 500,
    kind: Annotated[
        str,
        typer.Option(help="Kind of canary: direction, or mislabelled (for example-level privacy)."),
    ] = "direction",
    method: Annotated[
        str, typer.Option(help="Auditing method: auto, gaussian or one-run.")
    ] = "auto",
    confidence: Annotated[float, typer.Option(help="Confidence of the lower bound.")] = 0.95,
    rounds: Annotated[
        int | None,
        typer.Option(help="Number of rounds, instead of the settings'. Noise is recalibrated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed, instead of the settings'.")] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Train with canaries, and bound ε from below empirically.

    Shows the empirical lower bound next to the proven ε. Exits with code 1 if they contradict each
    other. The model of an audited run is discarded.
    """
    from fedveil.commands.progress import entry, show_json, waiting

    if not 0.5 < confidence < 1:
        raise UserError(
            f"--confidence is {short(confidence)}. Give a number between 0.5 and 1, such as 0.95."
        )
    asked = flags.given(rounds=rounds, seed=seed)
    with waiting("Training with canaries …"):
        found = _audited(target, asked, canaries, kind, method, round(1 - confidence, 12))
    if as_json:
        show_json(found.plain())
    else:
        for label, text in found.entries():
            entry(label, text, width=13)
    if found.alarm:
        raise typer.Exit(1)


def conform(
    module: Annotated[str, typer.Argument(help="Adapter: my_adapter.py or package.my_adapter.")],
) -> None:
    """Test another framework's aggregator against its contract.

    Checks the privacy contract that the aggregator claims, clause by clause. The module is an
    adapter with a list AGGREGATORS of classes, like examples/flower_adapter.py.
    Exits with code 1 if a clause is broken.
    """
    from fedveil.audit.conform import conform as checked
    from fedveil.commands.progress import entry

    broken = 0
    for make in aggregators(module):
        entry(make().name, "", width=0)
        for verdict in checked(make):
            broken += not verdict.kept
            entry("  kept" if verdict.kept else "  BROKEN", f"{verdict.clause}.", width=11)
            entry("", f"{verdict.measured}.", width=11)
    if broken:
        raise typer.Exit(1)


def _audited(
    target: Path, asked: dict[str, Any], canaries: int, kind: Any, method: Any, alpha: float
) -> Audit:
    from fedveil.audit.run import audited, place_canaries
    from fedveil.runs.saved import settings_file
    from fedveil.training.settings import (
        from_settings,
        read_settings,
        refuse_unnamed_data,
        resolve_recipe,
    )
    from fedveil.training.sources import load_for

    settings = read_settings(settings_file(target), asked)
    refuse_unnamed_data(settings, f"{target}", "Audit it from Python")
    recipe = resolve_recipe(settings)
    data = load_for(settings)
    mixed, places = place_canaries(recipe, data, canaries, kind, settings.seed)
    return audited(from_settings(settings, mixed), places, kind, method, alpha)


def aggregators(name: str) -> list[Any]:
    """The classes in AGGREGATORS of a module, by its file or its dotted name."""
    module = _imported(name)
    found = getattr(module, "AGGREGATORS", None)
    if not isinstance(found, list | tuple) or not found:
        raise UserError(
            f"The module '{name}' has no list AGGREGATORS of adapters. Define one, as in "
            "examples/flower_adapter.py."
        )
    for make in found:
        missing = [
            field
            for field in ("name", "clip", "noise_multiplier", "cohort")
            if not hasattr(make, field)
        ]
        if missing or not callable(make):
            raise UserError(
                f"An adapter of '{name}' lacks {', '.join(missing) or 'a class'}. Define name, "
                "clip, noise_multiplier and cohort as attributes of its class."
            )
    return list(found)


def _imported(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return module_named(name, "adapter")
    try:
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except Exception as problem:  # it is somebody else's code
        why = str(problem).partition("\n")[0]
        if isinstance(problem, ModuleNotFoundError) and problem.name == "flwr":
            raise UserError(
                f"The adapter '{name}' needs flwr, which is not installed. Install it with "
                "`pip install 'fedveil[federation]'`."
            ) from problem
        raise UserError(
            f"Importing the adapter '{name}' failed with {type(problem).__name__}: {why}. Correct "
            "the name or the module."
        ) from problem
