"""`fedveil compare`: train several runs at the same privacy budget, and rank them."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError, unknown

if TYPE_CHECKING:
    from fedveil.comparing.members import Comparison

OUT = Path("comparisons")
WIDTH = 13

Targets = Annotated[
    list[Path] | None,
    typer.Argument(help="Settings files to train and compare, or directories of finished runs."),
]
Algorithms = Annotated[
    str | None,
    typer.Option(
        help="Algorithms, separated by commas; see `fedveil algorithms`.",
        rich_help_panel="Algorithm",
    ),
]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        help="Parameter and values to vary, such as --grid clip=0.5,1,2 (repeatable).",
        rich_help_panel="Algorithm",
    ),
]
Seeds = Annotated[
    str,
    typer.Option(
        help="Number of seeds, or the seeds themselves, separated by commas.",
        rich_help_panel="Training",
    ),
]
Jobs = Annotated[
    int | None, typer.Option(help="Number of runs at a time. [default: number of cores]")
]
Out = Annotated[
    Path | None, typer.Option(help="New directory for the comparison. [default: comparisons/…]")
]
Resume = Annotated[Path | None, typer.Option(help="Resume the comparison in this directory.")]
Cut = Annotated[
    bool,
    typer.Option("--cut", help="Train only as many runs as the budget of the data set allows."),
]
SelectPrivately = Annotated[
    bool,
    typer.Option(
        "--select-privately",
        help="Train a random number of randomly drawn runs, and keep only the best one.",
    ),
]
Expect = Annotated[
    float | None,
    typer.Option(help="Expected number of runs to draw. [default: twice the members]"),
]
Law = Annotated[
    str | None,
    typer.Option(
        "--distribution",
        "--law",
        help="Distribution of that number: geometric, logarithmic or poisson. [default: geometric]",
    ),
]
Eta = Annotated[
    float | None,
    typer.Option(
        help="η > -1 of a truncated negative binomial distribution, instead of --distribution."
    ),
]


@dataclass(frozen=True)
class Execution:
    """How a comparison is run, whatever it compares."""

    jobs: int
    ledger: Path | None
    cut: bool
    as_json: bool


@flags.from_settings(
    "parameters", *flags.DATA, "model", "loss", "rounds", "engine", *flags.GUARANTEE, "noise",
    "account", "metric", "evaluate_every", "patience", "checkpoint_every",
    parameters="Parameter of all algorithms, or of one: --set dp_fedavg.clip=1 (repeatable).",
)  # fmt: skip
def compare(
    targets: Targets = None,
    algorithms: Algorithms = None,
    grid: Grid = None,
    seeds: Seeds = "3",
    asked: flags.Asked = flags.NOTHING,
    jobs: Jobs = None,
    out: Out = None,
    resume: Resume = None,
    cut: Cut = False,
    select_privately: SelectPrivately = False,
    expect: Expect = None,
    law: Law = None,
    eta: Eta = None,
    ledger: flags.Ledger = None,
    as_json: flags.AsJson = False,
) -> None:
    """Compare algorithms at the same privacy budget.

    Trains algorithms × settings × seeds on the same split of the data, and compares them. For
    example:

    fedveil compare --algorithms dp_fedavg,dp_norm_fedavg --epsilon 4 --seeds 5
    """
    _refuse_torchrun()
    selection = flags.given(expect=expect, law=law, eta=eta)
    if selection and not select_privately:
        raise UserError(f"--{next(iter(selection))} needs --select-privately. Pass both.")
    files = targets or []
    names = [name.strip() for name in (algorithms or "").split(",") if name.strip()]
    execution = Execution(workers(jobs), ledger, cut, as_json)
    new = bool(asked or names or grid or out is not None or select_privately)
    if resume is not None:
        _refuse_settings(new or bool(files), "--resume uses the comparison's own settings")
        _resume(resume, execution)
    elif files and all(target.is_dir() for target in files):
        other = asked.keys() - {"metric"} or names or grid or out or select_privately
        _refuse_settings(bool(other), "Finished runs are compared as they are")
        _compare_finished(files, asked.get("metric"), execution)
    else:
        comparison = _planned(files, names, asked, grid or [], seeds)
        if select_privately:
            comparison = selecting(comparison, **selection)
        _start(comparison, out, execution)


def _refuse_torchrun() -> None:
    from fedveil.engines.ranks import rank_and_size

    if rank_and_size()[1] > 1:
        raise UserError(
            "fedveil compare starts its own processes. Run it directly, without torchrun."
        )


def _refuse_settings(given: bool, why: str) -> None:
    if given:
        raise UserError(f"{why}; leave out all other settings.")


def _planned(
    files: list[Path], algorithms: list[str], asked: flags.Asked, grid: list[str], seeds: str
) -> Comparison:
    from fedveil.comparing.members import planned

    if not (files or algorithms or grid or asked):
        raise UserError("Nothing to compare. Pass --algorithms, settings files or runs.")
    for file in files:
        if file.is_dir():
            raise UserError(
                f"{file} is a directory, and other targets are not. Compare settings files with "
                "each other, or runs."
            )
    axes = [flags.assignments(text) for text in grid]
    return planned(files, algorithms, dict(asked), axes, _seeds(seeds))


def _seeds(text: str) -> list[int]:
    """`3` is 0, 1, 2; `4,7` is 4 and 7.

    >>> _seeds("3"), _seeds("4,7")
    ([0, 1, 2], [4, 7])
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--seeds {text}: pass a number of seeds, or seeds such as 0,1,2.")
    numbers = [int(part) for part in parts]
    return list(range(numbers[0])) if len(numbers) == 1 else numbers


def workers(asked: int | None) -> int:
    """The number of runs at a time. [default: number of cores]"""
    from fedveil.threads import cores

    if asked is not None and asked < 1:
        raise UserError(f"--jobs {asked}: it must be at least 1.")
    return asked or cores()


def selecting(
    comparison: Comparison,
    expect: float | None = None,
    law: str | None = None,
    eta: float | None = None,
) -> Comparison:
    """The comparison with private selection among its members."""
    from fedveil.privacy.selection import LAWS, law_of

    if law is not None and law not in LAWS:
        raise unknown("distribution", law, LAWS)
    if law is not None and eta is not None:
        raise UserError("--distribution and --eta both choose a distribution. Pass one of them.")
    mean = 2.0 * len(comparison.members) if expect is None else expect
    chosen: dict[str, Any] = {"name": law or "geometric", "mean": mean, **flags.given(eta=eta)}
    law_of(**chosen)  # refused before the long work
    return replace(comparison, selection=chosen)


def _start(comparison: Comparison, out: Path | None, execution: Execution) -> None:
    """Check the budget, write the comparison down in a new directory, and run it."""
    refuse_taken(out)
    check_budget(comparison, execution)
    _run(comparison, new_directory(comparison, out), execution)


def refuse_taken(out: Path | None) -> None:
    """Refuse a directory for the comparison that is not empty."""
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{out} is not empty. Choose another --out, or resume with `{_resuming(out)}`."
        )


def check_budget(comparison: Comparison, execution: Execution) -> None:
    """Refuse what the budget of the data has no room for, before anything is written."""
    from fedveil.commands.progress import entry, waiting
    from fedveil.comparing.costs import new_account, refuse_unequal_noise, room_for
    from fedveil.ledger.ledger import ledger_path

    ledger = ledger_path(execution.ledger)
    with waiting("Checking the budget …"):
        refuse_unequal_noise(comparison, ledger)
        if comparison.selection is None:
            room_for(comparison, ledger, execution.cut)
        note = new_account(comparison, ledger)
    if note and not execution.as_json:
        entry("Account", note, WIDTH)


def new_directory(comparison: Comparison, out: Path | None) -> Path:
    """The directory of the comparison, with its comparison.toml."""
    import tomli_w

    from fedveil.comparing.members import FILE
    from fedveil.comparing.outcome import write
    from fedveil.runs.directory import MODE, RunDirectory, saving

    if out is None:
        out = RunDirectory.fresh(OUT, comparison.members[0].label.partition("-")[0]).path
    with saving(out):
        out.mkdir(parents=True, exist_ok=True)
        out.chmod(MODE)
    write(out / FILE, tomli_w.dumps(comparison.plain()))
    return out


def _resume(directory: Path, execution: Execution) -> None:
    from fedveil.comparing.members import read_comparison

    _run(read_comparison(directory), directory, execution)


def _run(comparison: Comparison, directory: Path, execution: Execution) -> None:
    """Train what is left of a comparison; an interrupted one exits with code 130."""
    from fedveil.commands.comparison_runs import conclude, train_members

    if comparison.selection is not None:
        _select(comparison, directory, execution)
        return
    with _json_only(execution.as_json):
        pool = train_members(comparison, directory, execution.jobs, execution.ledger, execution.cut)
    any_finished = conclude(comparison, directory, execution.ledger, execution.as_json)
    if not execution.as_json:
        _show_end(directory, pool.problems, pool.stopped, any_finished)
    if pool.stopped:
        sys.exit(130)
    if pool.problems:
        name, problem = next(iter(pool.problems.items()))
        raise UserError(f"{len(pool.problems)} runs did not finish, the first is {name}: {problem}")


def _select(comparison: Comparison, directory: Path, execution: Execution) -> None:
    """Private selection: what was drawn and all runs but the best one are deleted at the end."""
    from fedveil.commands.comparison_runs import conclude_selection
    from fedveil.commands.progress import waiting
    from fedveil.comparing.selecting import forget, select

    refuse_second_draw(directory)
    try:
        with _json_only(execution.as_json), waiting("Training a secret number of runs …"):
            chosen, run, price = select(comparison, directory, execution.jobs, execution.ledger)
    except KeyboardInterrupt:
        print(f"{_resuming(directory)}   resume where it stopped", file=sys.stderr)
        sys.exit(130)
    conclude_selection(comparison, directory, chosen, run, price, execution.as_json)
    forget(directory)


def refuse_second_draw(directory: Path) -> None:
    """Refuse to select again: a second draw would be a second release."""
    from fedveil.comparing.outcome import FILE
    from fedveil.comparing.selecting import forget

    if (directory / FILE).is_file():
        forget(directory)
        raise UserError(
            f"{directory} has already selected a run, and a second draw would be a second release. "
            f"Its result is in {directory / FILE}."
        )


def _compare_finished(runs: list[Path], metric: str | None, execution: Execution) -> None:
    from fedveil.commands.comparison_runs import show_outcome
    from fedveil.comparing.existing import compared

    show_outcome(*compared(runs, metric, execution.ledger), execution.as_json)


@contextlib.contextmanager
def _json_only(as_json: bool) -> Iterator[None]:
    """Nothing on standard output but the JSON to come."""
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _show_end(directory: Path, problems: dict[str, str], stopped: bool, finished: bool) -> None:
    """Runs that failed, where everything is, and what to do next."""
    from fedveil.commands.progress import entry, show_next

    for name, problem in problems.items():
        if problem != "stopped":
            entry("Failed", f"{name}: {problem}", WIDTH)
    entry("Saved", f"{directory}", WIDTH)
    commands = []
    if problems or stopped:
        commands.append(f"{_resuming(directory)}   resume where it stopped")
    if finished:
        report = f"fedveil report {shlex.quote(str(directory))}"
        commands.append(f"{report}   an HTML report of the comparison")
    show_next(commands)


def _resuming(directory: Path) -> str:
    return f"fedveil compare --resume {shlex.quote(str(directory))}"
