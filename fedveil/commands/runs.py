"""`fedveil runs`: list, filter and delete runs on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.accounting.rounding import short
from fedveil.commands import flags
from fedveil.errors import UserError, unknown

if TYPE_CHECKING:
    from rich.table import Table

    from fedveil.runs.listing import Listed

PLACES = (Path("runs"), Path("comparisons"))


@dataclass(frozen=True)
class Filter:
    """Which runs to list; None matches every run."""

    algorithm: str | None = None
    data: str | None = None
    state: str | None = None
    min_accuracy: float | None = None
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        from fedveil.runs.listing import STATES

        low, high = self.min_accuracy, self.max_epsilon
        if self.state is not None and self.state not in STATES:
            raise unknown("state", self.state, STATES)
        if low is not None and not 0 <= low <= 1:
            raise UserError(f"--min-accuracy {short(low)}: it must be between 0 and 1.")
        if high is not None and not high > 0:
            raise UserError(f"--max-epsilon {short(high)}: it must be above 0.")

    def matches(self, run: Listed) -> bool:
        """Whether a run meets all conditions; one without the number in question does not."""
        words = ((self.algorithm, run.algorithm), (self.data, run.data), (self.state, run.state))
        low, high = self.min_accuracy, self.max_epsilon
        spent = None if run.at_least else run.epsilon
        return (
            all(wanted in (None, found) for wanted, found in words)
            and (low is None or (run.accuracy is not None and run.accuracy >= low))
            and (high is None or (spent is not None and spent <= high))
        )


Places = Annotated[
    list[Path] | None,
    typer.Argument(help="Runs, or directories of runs. [default: runs and comparisons]"),
]


def runs(
    places: Places = None,
    algorithm: Annotated[str | None, typer.Option(help="Only runs of this algorithm.")] = None,
    data: Annotated[str | None, typer.Option(help="Only runs on this data set.")] = None,
    state: Annotated[
        str | None, typer.Option(help="Only runs in this state: finished, stopped or broken.")
    ] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(help="Only runs with at least this accuracy, such as 0.8.")
    ] = None,
    max_epsilon: Annotated[
        float | None, typer.Option(help="Only private runs that spent at most this ε.")
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete the listed runs, after confirmation.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without confirmation.")] = False,
    as_json: flags.AsJson = False,
) -> None:
    """List, filter and delete runs.

    Shows each run's progress, accuracy and privacy spending.
    """
    from fedveil.commands.progress import show_json
    from fedveil.runs.listing import find_runs, listed

    wanted = Filter(algorithm, data, state, min_accuracy, max_epsilon)
    if remove and as_json:
        raise UserError("--remove asks for confirmation, and --json is for programs. Pass one.")
    where = list(places) if places else [place for place in PLACES if place.is_dir()]
    found = [listed(path) for path in find_runs(where)]
    chosen = [run for run in found if wanted.matches(run)]
    if as_json:
        show_json([run.plain() for run in chosen])
        return
    _show(chosen, len(found))
    if remove and chosen:
        _remove(chosen, yes)


def _show(chosen: list[Listed], found: int) -> None:
    from fedveil.commands.progress import entry
    from fedveil.data.origin import footnote
    from fedveil.runs.listing import AT_LEAST_NOTE, NOISY_NOTE

    if not chosen:
        print(f"None of the {found} runs here matches." if found else "No runs found.")
        return
    _print_rows([_row(run) for run in chosen])
    if note := footnote(run.origin for run in chosen if run.epsilon is not None):
        entry("", note, width=0)
    if any(run.at_least for run in chosen):
        entry("", AT_LEAST_NOTE, width=0)
    if any(run.noisy for run in chosen):
        entry("", NOISY_NOTE, width=0)
    for run in chosen:
        if run.problem:
            entry("Broken", run.problem, width=13)


def _row(run: Listed) -> dict[str, str]:
    """A run's cells by column."""
    from fedveil.commands.progress import printable

    rounds, score, spent = _numbers(run)
    cells = {"name": str(run.path), "algorithm": run.algorithm, "data": run.data, "rounds": rounds}
    cells |= {"accuracy": score, "ε": spent, "state": run.state}
    return {head: printable(cell) for head, cell in cells.items()}


def _print_rows(rows: list[dict[str, str]]) -> None:
    """The widest table that fits; if none does, each name gets a line of its own.

    Names are never wrapped, so that they can be copied.
    """
    from rich.measure import Measurement

    from fedveil.commands.comparison_table import wide
    from fedveil.commands.progress import entry, plain_output

    out = wide()
    for left_out in ((), ("data",), ("data", "algorithm")):
        table = _table(rows, left_out)
        needed = Measurement.get(out, out.options.update(width=10_000), table).maximum
        if plain_output() or needed <= out.width:
            out.width = max(out.width, needed)
            out.print(table)
            if left_out:
                note = f"Not shown on {out.width} columns: {' and '.join(left_out)}. See --json."
                entry("", note, width=0)
            return
    for row in rows:
        out.print(row["name"], markup=False, soft_wrap=True)
        spent = row["ε"] and f"ε {row['ε']}".replace("ε not", "not")
        rest = filter(None, (row["rounds"], row["accuracy"], spent, row["state"]))
        out.print("   ", "  ".join(rest), markup=False, soft_wrap=True)


def _table(rows: list[dict[str, str]], left_out: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    heads = [head for head in rows[0] if head not in left_out]
    for head in heads:
        number = head in ("rounds", "accuracy", "ε")
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[head]) for head in heads))
    return table


def _numbers(run: Listed) -> tuple[str, str, str]:
    from fedveil.accounting.rounding import rounded_up

    if run.state == "broken":
        return "", "", ""
    score = "" if run.loss is None else f"loss {run.loss:.3g}"
    if run.accuracy is not None:
        score = f"{run.accuracy:.2%}"
    score += run.mark if score else ""
    ended = run.rounds and run.loss is not None and not run.untold
    spent = "not private" if not run.private else "∞" if ended else ""
    if run.epsilon is not None:
        least, leak = "≥ " * run.at_least, " + leak" * run.leaks
        spent = f"{least}{rounded_up(run.epsilon)}{run.origin.mark}{leak}"
    return f"{run.rounds}/{run.planned}", score, spent


def _remove(chosen: list[Listed], yes: bool) -> None:
    """Delete runs after confirmation; this does not refund their ε."""
    from fedveil.commands.progress import entry
    from fedveil.runs.listing import remove_run

    count = "this run" if len(chosen) == 1 else f"these {len(chosen)} runs"
    if not yes and not typer.confirm(f"Delete {count}?", default=False):
        print("Nothing was deleted.")
        raise typer.Exit(1)
    problems = []
    for run in chosen:
        try:
            left = remove_run(run.path)
        except UserError as problem:
            problems.append(str(problem))
            continue
        kept = f"; kept files that are not part of a run: {', '.join(left)}" if left else ""
        entry("", f"Deleted {run.path}{kept}.", width=0)
    if any(run.private for run in chosen):
        note = "Deleting runs does not refund their privacy spending: the ledger still counts it."
        entry("", note, width=0)
    if problems:
        raise UserError(problems[0])
