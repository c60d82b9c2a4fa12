"""Runs that were played before, compared as they are: equal but for their seeds is one member."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.comparing import outcome
from fedveil.comparing.costs import refuse_apart, together_of
from fedveil.comparing.members import Comparison, Member, read_comparison, refuse_unequal
from fedveil.comparing.outcome import Measure, Standing
from fedveil.errors import UserError
from fedveil.runs.listing import Listed, find_runs, listed, none_ended
from fedveil.settings import Settings, read_settings, resolve_recipe

Compared = tuple[Comparison, list[Standing], Measure, dict[str, Any] | None]
OWN = {"seed", "fedveil", "engine", "checkpoint_every", "evaluate_every"}


def compared(places: Sequence[Path]) -> Compared:
    """One comparison's directory as it stands, or runs wherever they lie."""
    if len(places) == 1 and (places[0] / "comparison.toml").is_file():
        return _as_it_stands(places[0])
    runs = [_readable(path) for path in find_runs(list(places))]
    if len(runs) < 2:
        raise UserError(
            f"There is nothing to compare in {', '.join(map(str, places))}; name two runs or more."
        )
    groups: dict[str, list[tuple[Listed, Settings]]] = {}
    for run, settings in runs:
        groups.setdefault(_kind(settings), []).append((run, settings))
    members = [_member(group, len(groups)) for group in groups.values()]
    refuse_unequal(members)
    _refuse_other_terms(runs)
    seeds = sorted({run.seed for run, _ in runs})
    comparison = Comparison(tuple(members), tuple(seeds))
    found = [_standing(m, g) for m, g in zip(members, groups.values(), strict=True)]
    classes = any(run.accuracy is not None for run, _ in runs)
    measure: Measure = "accuracy" if classes else "loss"
    averaged = [outcome.averaged(standing, measure) for standing in found]
    cost = together_of([run.path for run, _ in runs], resolve_recipe(members[0].settings).view)
    return comparison, outcome.judged(averaged, measure), measure, cost


def _as_it_stands(directory: Path) -> Compared:
    comparison = read_comparison(directory)
    if comparison.selection is not None:
        raise UserError(
            f"{directory} selects one run privately, so there is nothing to compare; see it with "
            f"`fedveil report {directory}`, or go on with `fedveil compare --resume {directory}`."
        )
    found, measure = outcome.standings(comparison, directory)
    if not any(standing.runs for standing in found):
        raise none_ended(directory)
    view = resolve_recipe(comparison.members[0].settings).view
    return comparison, found, measure, together_of(comparison.paths(directory), view)


def _readable(path: Path) -> tuple[Listed, Settings]:
    """A finished run; half a run is no result."""
    run = listed(path)
    if run.state == "broken":
        raise UserError(run.problem)
    if run.state == "stopped":
        raise UserError(
            f"{path} has played {run.rounds} of {run.planned} rounds; go on with it first: "
            f"`fedveil train --resume {path}`."
        )
    return run, read_settings(path / "recipe.toml", {})


def _kind(settings: Settings) -> str:
    """All settings but those in which runs of one member may differ."""
    plain = settings.model_dump(mode="json", exclude_none=True, exclude=OWN)
    return json.dumps(plain, sort_keys=True)


def _member(group: Sequence[tuple[Listed, Settings]], groups: int) -> Member:
    run, settings = group[0]
    seeds = [run.seed for run, _ in group]
    if len(set(seeds)) < len(seeds):
        raise UserError(
            f"{run.path} and another of these runs are the same with the same seed; name one."
        )
    return Member(run.path.name if groups > 1 else run.algorithm, settings)


def _refuse_other_terms(runs: Sequence[tuple[Listed, Settings]]) -> None:
    """What settings alone do not tell: data that stood in for others, δ by default, ε spent."""
    first, _ = runs[0]
    for run, settings in runs[1:]:
        if run.private and settings.epsilon is None:
            refuse_apart([str(first.path), str(run.path)], [_spent(first), _spent(run)])
        for what in ("data", "delta", "view"):
            one, other = getattr(first, what), getattr(run, what)
            if one != other:
                raise UserError(
                    f"{first.path} and {run.path} cannot be compared: {what} is {one} for one and "
                    f"{other} for the other; make them equal."
                )


def _spent(run: Listed) -> float:
    return math.inf if run.epsilon is None else run.epsilon


def _standing(member: Member, group: Sequence[tuple[Listed, Settings]]) -> Standing:
    runs = sorted((run for run, _ in group), key=lambda run: run.seed)
    spent = [run.epsilon for run in runs if run.epsilon is not None]
    return Standing(
        member.label,
        runs[0].algorithm,
        {},
        tuple(str(run.path) for run in runs),
        tuple(run.seed for run in runs),
        tuple(run.accuracy for run in runs),
        tuple(run.loss for run in runs),
        epsilon=max(spent, default=None),
        adjacency=runs[0].adjacency,
        unit=runs[0].unit,
        origin=runs[0].origin,
    )
