"""`fedveil runs`: list the runs on disk, choose among them, and remove them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.commands import flags
from fedveil.errors import UserError, unknown

if TYPE_CHECKING:
    from rich.table import Table

    from fedveil.runs.listing import Listed

PLACES = (Path("runs"), Path("comparisons"))


def runs(
    places: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs, or directories of runs; runs and comparisons if none."),
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="Those of an algorithm.")] = None,
    data: Annotated[str | None, typer.Option(help="Those on a data set.")] = None,
    state: Annotated[str | None, typer.Option(help="finished, stopped or broken.")] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(help="Those of at least this accuracy, such as 0.8.")
    ] = None,
    max_epsilon: Annotated[
        float | None, typer.Option(help="Private ones that spent at most this ε.")
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete those that are listed; asks first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: flags.AsJson = False,
) -> None:
    """List the runs here, choose among them, remove them.

    How far they came, how good they are, and what they spent.
    """
    from fedveil.progress import show_json
    from fedveil.runs.listing import STATES, find_runs, listed

    if state is not None and state not in STATES:
        raise unknown("state", state, STATES)
    if min_accuracy is not None and not 0 <= min_accuracy <= 1:
        raise UserError(f"--min-accuracy {min_accuracy:g}: accuracies lie between 0 and 1.")
    if max_epsilon is not None and not max_epsilon > 0:
        raise UserError(f"--max-epsilon {max_epsilon:g}: an epsilon is above 0.")
    if remove and as_json:
        raise UserError("--remove asks and tells, and --json is for a program; give one.")
    where = list(places) if places else [place for place in PLACES if place.is_dir()]
    found = [listed(path) for path in find_runs(where)]
    chosen = [
        run
        for run in found
        if (algorithm is None or run.algorithm == algorithm)
        and (data is None or run.data == data)
        and (state is None or run.state == state)
        and (min_accuracy is None or (run.accuracy is not None and run.accuracy >= min_accuracy))
        and (max_epsilon is None or (run.epsilon is not None and run.epsilon <= max_epsilon))
    ]
    if as_json:
        show_json([run.plain() for run in chosen])
        return
    _show(chosen, len(found))
    if remove and chosen:
        _remove(chosen, yes)


def _show(chosen: list[Listed], found: int) -> None:
    from fedveil.data.origin import footnote
    from fedveil.progress import entry

    if not chosen:
        said = "No runs are here." if not found else f"None of the {found} runs here is like that."
        print(said)
        return
    _print_rows([_row(run) for run in chosen])
    if told := footnote(run.origin for run in chosen if run.epsilon is not None):
        entry("", told, width=0)
    for run in chosen:
        if run.problem:
            entry("Broken", run.problem, width=13)


def _row(run: Listed) -> dict[str, str]:
    """A run's cells by the heads of their columns."""
    from fedveil.progress import printable

    rounds, score, spent = _numbers(run)
    cells = {"name": str(run.path), "algorithm": run.algorithm, "data": run.data, "rounds": rounds}
    cells |= {"accuracy": score, "ε": spent, "state": run.state}
    return {head: printable(cell) for head, cell in cells.items()}


def _print_rows(rows: list[dict[str, str]]) -> None:
    """The widest table that fits; where none does, a name has a line of its own.

    Names are never folded, for they are there to be copied.
    """
    from rich.measure import Measurement

    from fedveil.comparing.table import wide
    from fedveil.progress import plain_output

    out = wide()
    for left_out in ((), ("data",), ("data", "algorithm")):
        table = _table(rows, left_out)
        needed = Measurement.get(out, out.options.update(width=10_000), table).maximum
        if plain_output() or needed <= out.width:
            out.width = max(out.width, needed)
            out.print(table)
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
    from fedveil.privacy.statement import rounded_up

    if run.state == "broken":
        return "", "", ""
    score = "" if run.loss is None else f"loss {run.loss:.3g}"
    if run.accuracy is not None:
        score = f"{run.accuracy:.2%}"
    ended = run.rounds and run.loss is not None and not run.untold
    spent = "not private" if not run.private else "∞" if ended else ""
    if run.epsilon is not None:
        spent = f"{rounded_up(run.epsilon)}{run.origin.mark}{' + leak' if run.leaks else ''}"
    return f"{run.rounds}/{run.planned}", score, spent


def _remove(chosen: list[Listed], yes: bool) -> None:
    """Ask, then delete one after the other; what was spent stays spent."""
    from fedveil.progress import entry
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
        kept = f"; left in place, for they are not a run's: {', '.join(left)}" if left else ""
        entry("", f"Deleted {run.path}{kept}.", width=0)
    if any(run.private for run in chosen):
        told = "What these runs have spent stays spent: the ledger keeps it, and no ε comes back."
        entry("", told, width=0)
    if problems:
        raise UserError(problems[0])
