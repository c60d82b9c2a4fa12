"""A comparison played from its directory, and told: table, notes and comparison.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.comparing import outcome, table
from fedveil.comparing.costs import room_for, together_of
from fedveil.comparing.members import Comparison, Member, plain_settings
from fedveil.comparing.outcome import Measure, Standing
from fedveil.comparing.pool import Pool, Task
from fedveil.progress import entry, show_json
from fedveil.runs.listing import Listed, listed
from fedveil.settings import resolve_recipe

if TYPE_CHECKING:
    from fedveil.comparing.selecting import Priced


def play(
    comparison: Comparison, directory: Path, jobs: int, ledger: Path | None, cut: bool = False
) -> Pool:
    """Play the runs that are not finished: side by side, or in turn where a budget stands."""
    from fedveil.privacy.ledger import ledger_path

    room = room_for(comparison, ledger_path(ledger), cut)
    tasks = [_task(directory, member, seed) for member, seed in comparison.runs()]
    left = [task for task in tasks[: room.runs] if not _finished(task.path)]
    if room.standing:
        entry("", f"A budget stands for these data: {room.runs} runs, one at a time.", width=0)
        jobs = 1
    with table.display(len(left)) as display:
        pool = Pool(jobs, ledger, display)
        pool.play(left)
    return pool


def tell(comparison: Comparison, directory: Path, as_json: bool) -> bool:
    """What there is so far: comparison.json, and the table or the JSON on standard output.

    Gives whether any run has ended.
    """
    found, measure = outcome.standings(comparison, directory)
    view = resolve_recipe(comparison.members[0].settings).view
    cost = together_of(comparison.paths(directory), view)
    outcome.save(directory, outcome.plain(comparison, found, measure, cost))
    say(comparison, found, measure, cost, as_json)
    return any(standing.runs for standing in found)


def say(
    comparison: Comparison,
    found: Sequence[Standing],
    measure: Measure,
    cost: Mapping[str, Any] | None,
    as_json: bool,
) -> None:
    """The table for a person, JSON for a program."""
    if as_json:
        plain = outcome.plain(comparison, found, measure, cost)
        show_json(plain)
    else:
        table.show(comparison, found, measure, cost)


def tell_selected(
    comparison: Comparison,
    directory: Path,
    chosen: Member | None,
    run: Listed | None,
    price: Priced,
    as_json: bool,
) -> None:
    """The run that was selected and what that cost; nothing of the others."""
    from fedveil.comparing.selecting import ASSUMED

    found, measure = _alone(comparison, chosen, run)
    plain = outcome.plain(comparison, found, measure, None, price.plain())
    outcome.save(directory, plain)
    if as_json:
        show_json(plain)
        return
    if chosen is None or run is None:
        entry("Selected", "nothing: no run was drawn, which the law allows.", width=13)
    else:
        score = f"loss {run.loss:.4g}" if run.accuracy is None else f"accuracy {run.accuracy:.2%}"
        entry("Selected", f"{chosen.label}, {score}", width=13)
        entry("Saved", f"{run.path}", width=13)
    entry("Privacy", price.sentence(), width=13)
    entry("Assumed", ASSUMED, width=13)


def _alone(
    comparison: Comparison, chosen: Member | None, run: Listed | None
) -> tuple[list[Standing], Measure]:
    measure: Measure = "loss" if run is not None and run.accuracy is None else "accuracy"
    if chosen is None or run is None:
        return [], measure
    standing = Standing(
        chosen.label, run.algorithm, dict(chosen.parameters), (run.path.name,), (run.seed,),
        (run.accuracy,), (run.loss,), run.accuracy if measure == "accuracy" else run.loss,
        epsilon=run.epsilon, origin=run.origin, best=True,
    )  # fmt: skip
    return [standing], measure


def _task(directory: Path, member: Member, seed: int) -> Task:
    name = member.directory(seed)
    settings = plain_settings(member.at(seed))
    return Task(name, directory / name, settings, member.settings.rounds)


def _finished(path: Path) -> bool:
    return path.is_dir() and listed(path).state == "finished"
