"""Compare existing runs: runs that differ only in their seeds form one member."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from fedveil.comparing import outcome
from fedveil.comparing.costs import Cost, refuse_apart, total_cost
from fedveil.comparing.members import Comparison, Member, read_comparison, refuse_unequal
from fedveil.comparing.outcome import Measure, MemberResult
from fedveil.errors import UserError
from fedveil.runs.listing import Listed, find_runs, listed, none_ended
from fedveil.runs.saved import RECIPE
from fedveil.training.settings import Settings, read_settings, resolve_recipe

Compared = tuple[Comparison, list[MemberResult], Measure, Cost]
OWN = {"seed", "fedveil", "engine", "checkpoint_every", "evaluate_every", "metric"}


def compared(
    places: Sequence[Path], metric: str | None = None, ledger: Path | None = None
) -> Compared:
    """Compare the runs of a comparison's directory, or any given runs, by a metric of theirs."""
    if metric is None and len(places) == 1 and (places[0] / "comparison.toml").is_file():
        return _of_directory(places[0], ledger)
    runs = [_finished_run(path) for path in find_runs(list(places))]
    if len(runs) < 2:
        raise UserError(
            f"There is nothing to compare in {', '.join(map(str, places))}. Name two or more runs."
        )
    groups: dict[str, list[tuple[Listed, Settings]]] = {}
    for run, settings in runs:
        groups.setdefault(_settings_key(settings), []).append((run, settings))
    members = [_member(group, len(groups)) for group in groups.values()]
    refuse_unequal(members)
    _refuse_other_terms(runs)
    seeds = sorted({run.seed for run, _ in runs})
    comparison = Comparison(tuple(members), tuple(seeds))
    measure = outcome.measure_of([run for run, _ in runs], metric)
    found = [_result(m, g, measure) for m, g in zip(members, groups.values(), strict=True)]
    averaged = [outcome.averaged(result, measure) for result in found]
    view = resolve_recipe(comparison.reference.settings).view
    cost = total_cost([run.path for run, _ in runs], view, ledger)
    return comparison, outcome.judged(averaged, measure), measure, cost


def _of_directory(directory: Path, ledger: Path | None) -> Compared:
    comparison = read_comparison(directory)
    if comparison.selection is not None:
        raise UserError(
            f"{directory} selects one run privately, so there is nothing to compare. Show it with "
            f"`fedveil report {directory}`, or resume with `fedveil compare --resume {directory}`."
        )
    found, measure = outcome.member_results(comparison, directory)
    if not any(result.runs for result in found):
        raise none_ended(directory)
    view = resolve_recipe(comparison.reference.settings).view
    return comparison, found, measure, total_cost(comparison.paths(directory), view, ledger)


def _finished_run(path: Path) -> tuple[Listed, Settings]:
    """A finished run and its settings; unfinished runs are refused."""
    run = listed(path)
    if run.state == "broken":
        raise UserError(run.problem)
    if run.state == "stopped":
        raise UserError(
            f"{path} has finished {run.rounds} of {run.planned} rounds. Resume it first: "
            f"`fedveil train --resume {path}`."
        )
    return run, read_settings(path / RECIPE, {})


def _settings_key(settings: Settings) -> str:
    """A key from all settings except those in which runs of one member may differ."""
    plain = settings.model_dump(mode="json", exclude_none=True, exclude=OWN)
    return json.dumps(plain, sort_keys=True)


def _member(group: Sequence[tuple[Listed, Settings]], groups: int) -> Member:
    run, settings = group[0]
    seeds = [run.seed for run, _ in group]
    if len(set(seeds)) < len(seeds):
        raise UserError(
            f"{run.path} and another run have equal settings and the same seed. Name one of them."
        )
    return Member(run.path.name if groups > 1 else run.algorithm, settings)


def _refuse_other_terms(runs: Sequence[tuple[Listed, Settings]]) -> None:
    """Refuse runs that differ in what settings do not contain: data used, default δ, view, ε."""
    first, _ = next((one for one in runs if one[0].private), runs[0])
    for run, settings in runs:
        if run.private and settings.epsilon is None:
            refuse_apart([str(first.path), str(run.path)], [_spent(first), _spent(run)])
        for what in ("data", "delta", "view") if run.private == first.private else ("data",):
            one, other = getattr(first, what), getattr(run, what)
            if one != other:
                raise UserError(
                    f"{first.path} and {run.path} cannot be compared: {what} is {one} for one and "
                    f"{other} for the other. Make them equal."
                )


def _spent(run: Listed) -> float:
    return math.inf if run.epsilon is None else run.epsilon


def _result(
    member: Member, group: Sequence[tuple[Listed, Settings]], measure: Measure
) -> MemberResult:
    runs = sorted((run for run, _ in group), key=lambda run: run.seed)
    spent = [run.epsilon for run in runs if run.epsilon is not None]
    return MemberResult(
        member.label,
        runs[0].algorithm,
        {},
        tuple(str(run.path) for run in runs),
        tuple(run.seed for run in runs),
        tuple(run.accuracy for run in runs),
        tuple(run.loss for run in runs),
        tuple(run.score(measure.name) for run in runs),
        epsilon=max(spent, default=None),
        adjacency=runs[0].adjacency,
        unit=runs[0].unit,
        origin=runs[0].origin,
        noisy=any(run.noisy for run in runs),
        private=runs[0].private,
    )
