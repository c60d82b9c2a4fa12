"""Train the runs of a comparison, save comparison.json and show the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.commands import comparison_table as table
from fedveil.commands.progress import entry, show_json
from fedveil.comparing import outcome
from fedveil.comparing.costs import Cost, room_for, total_cost
from fedveil.comparing.members import Comparison, Member, plain_settings
from fedveil.comparing.outcome import Measure, MemberResult
from fedveil.comparing.pool import NoDisplay, Pool, RunTask
from fedveil.runs.listing import Listed, listed
from fedveil.training.metrics import titled
from fedveil.training.settings import resolve_recipe

if TYPE_CHECKING:
    from fedveil.comparing.selecting import SelectionCost


def train_members(
    comparison: Comparison,
    directory: Path,
    jobs: int,
    ledger: Path | None,
    cut: bool = False,
    quiet: bool = False,
) -> Pool:
    """Train the unfinished runs: in parallel, or one at a time if the data set has a budget."""
    from fedveil.ledger.ledger import ledger_path

    room = room_for(comparison, ledger_path(ledger), cut)
    tasks = [_task(directory, member, seed) for member, seed in comparison.runs()]
    left = [task for task in tasks[: room.runs] if not _finished(task.path)]
    jobs = 1 if room.budgeted else jobs
    if quiet:
        pool = Pool(jobs, ledger, NoDisplay())
        pool.run(left)
        return pool
    if room.budgeted:
        entry("", f"These data have a budget: {room.runs} runs, one at a time.", width=0)
    with table.display(len(left)) as display:
        pool = Pool(jobs, ledger, display)
        pool.run(left)
    return pool


def conclude(comparison: Comparison, directory: Path, ledger: Path | None, as_json: bool) -> bool:
    """Save and show the results so far; returns whether any run has finished."""
    found, measure, cost = summed_up(comparison, directory, ledger)
    show_outcome(comparison, found, measure, cost, as_json)
    return any(standing.runs for standing in found)


def summed_up(
    comparison: Comparison, directory: Path, ledger: Path | None
) -> tuple[Sequence[MemberResult], Measure, Cost]:
    """Save the results so far, and return them with their cost."""
    found, measure = outcome.member_results(comparison, directory)
    view = resolve_recipe(comparison.reference.settings).view
    cost = total_cost(comparison.paths(directory), view, ledger)
    outcome.save(directory, outcome.plain(comparison, found, measure, cost))
    return found, measure, cost


def show_outcome(
    comparison: Comparison,
    found: Sequence[MemberResult],
    measure: Measure,
    cost: Cost,
    as_json: bool,
) -> None:
    """The table for a person, JSON for a program."""
    if as_json:
        show_json(outcome.plain(comparison, found, measure, cost))
    else:
        table.show(comparison, found, measure, cost)


def conclude_selection(
    comparison: Comparison,
    directory: Path,
    chosen: Member | None,
    run: Listed | None,
    price: SelectionCost,
    as_json: bool,
) -> None:
    """Save and show the selected run and its cost, and nothing about the others."""
    plain, measure = save_selection(comparison, directory, chosen, run, price)
    if as_json:
        show_json(plain)
        return
    if chosen is None or run is None:
        entry("Selected", "none: no run was drawn, which can happen by chance.", width=13)
    else:
        value = run.score(measure.name)
        noisy = "noisy " if run.noisy else ""
        shown = "diverged" if value is None else _shown(value, measure)
        score = shown if value is None else f"{noisy}{titled(measure.name)} {shown}"
        entry("Selected", f"{chosen.label}, {score}", width=13)
        entry("Saved", f"{run.path}", width=13)
    entry("Privacy", price.sentence(), width=13)
    entry("Assumptions", price.assumed, width=13)


def save_selection(
    comparison: Comparison,
    directory: Path,
    chosen: Member | None,
    run: Listed | None,
    price: SelectionCost,
) -> tuple[Mapping[str, Any], Measure]:
    """Write the selected run and its cost to comparison.json, and nothing about the others."""
    found, measure = _alone(comparison, chosen, run)
    plain = outcome.plain(comparison, found, measure, None, price.plain())
    outcome.save(directory, plain)
    return plain, measure


def _shown(value: float, measure: Measure) -> str:
    return f"{value:.2%}" if measure.share else f"{value:.4g}"


def _alone(
    comparison: Comparison, chosen: Member | None, run: Listed | None
) -> tuple[list[MemberResult], Measure]:
    measure = outcome.measure_of([] if run is None else [run])
    if chosen is None or run is None:
        return [], measure
    standing = MemberResult(
        chosen.label, run.algorithm, dict(chosen.parameters), (run.path.name,), (run.seed,),
        (run.accuracy,), (run.loss,), (run.score(measure.name),), run.score(measure.name),
        epsilon=run.epsilon, origin=run.origin, noisy=run.noisy, best=True,
    )  # fmt: skip
    return [standing], measure


def _task(directory: Path, member: Member, seed: int) -> RunTask:
    name = member.directory(seed)
    settings = plain_settings(member.at(seed))
    return RunTask(name, directory / name, settings, member.settings.rounds)


def _finished(path: Path) -> bool:
    return path.is_dir() and listed(path).state == "finished"
