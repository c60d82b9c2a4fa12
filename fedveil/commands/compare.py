"""`fedveil compare`: several runs at one budget, and who is best."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError, unknown

if TYPE_CHECKING:
    from fedveil.comparing.members import Comparison

OUT = Path("comparisons")


def compare(
    targets: Annotated[
        list[Path] | None,
        typer.Argument(help="Settings files to compare; or runs' directories, to tell them apart."),
    ] = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Names with commas between; see `fedveil algorithms`.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="A parameter and its values: --grid clip=0.5,1,2 (repeatable)."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="How many seeds, or which ones, with commas between.")
    ] = "3",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A parameter of all algorithms, or of one: dp_fedavg.clip=1."),
    ] = None,
    dataset: flags.Dataset = None,
    path: flags.OwnData = None,
    client: flags.ClientColumn = None,
    label: flags.LabelColumn = None,
    partition: flags.Partition = None,
    clients: flags.Clients = None,
    simulate_clients: flags.SimulateClients = None,
    data_: flags.DataSettings = None,
    model: flags.Model = None,
    rounds: flags.Rounds = None,
    epsilon: Annotated[float | None, typer.Option(help="The ε each run may spend.")] = None,
    delta: flags.Delta = None,
    noise_multiplier: flags.NoiseMultiplier = None,
    view: flags.View = None,
    noise: flags.Noise = None,
    engine: flags.Engine = None,
    checkpoint_every: flags.CheckpointEvery = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time; as many as there are cores if not said.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new directory; comparisons/… if none.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a comparison.")] = None,
    cut: Annotated[
        bool, typer.Option("--cut", help="Play as many runs as the data's budget has room for.")
    ] = False,
    select_privately: Annotated[
        bool,
        typer.Option(
            "--select-privately",
            help="Play a random number of randomly drawn runs, and keep the best one alone.",
        ),
    ] = False,
    expect: Annotated[
        float | None, typer.Option(help="How many runs to expect then; twice the members.")
    ] = None,
    law: Annotated[
        str | None, typer.Option(help="Of that number: geometric, logarithmic or poisson.")
    ] = None,
    eta: Annotated[
        float | None, typer.Option(help="Or a truncated negative binomial's η, above -1.")
    ] = None,
    ledger: flags.Ledger = None,
    as_json: flags.AsJson = False,
) -> None:
    """Play recipes × settings × seeds at one budget, compare them.

    All on the same split of the data. For example:

    fedveil compare --algorithms dp_fedavg,dp_norm_fedavg --epsilon 4 --seeds 5
    """
    from fedveil.ranks import rank_and_size

    if rank_and_size()[1] > 1:
        raise UserError("fedveil compare starts its own processes; call it without torchrun.")
    settings = flags.gathered(
        set_, data_, noise_multiplier,
        dataset=dataset, path=path, client=client, label=label, partition=partition,
        clients=clients, simulate_clients=simulate_clients, model=model, rounds=rounds,
        epsilon=epsilon, delta=delta, view=view, noise=noise, engine=engine,
        checkpoint_every=checkpoint_every,
    )  # fmt: skip
    asked = flags.given(expect=expect, law=law, eta=eta)
    if asked and not select_privately:
        raise UserError(f"--{next(iter(asked))} is about --select-privately; give both.")
    wanted = [*(targets or [])]
    named = [name.strip() for name in (algorithms or "").split(",") if name.strip()]
    if resume is not None:
        if settings or asked or wanted or named or grid or out is not None or select_privately:
            raise UserError("--resume goes on with a comparison as it was; it takes no settings.")
        _go_on(resume, _jobs(jobs), ledger, cut, as_json)
    elif wanted and all(target.is_dir() for target in wanted):
        if settings or asked or named or grid or out is not None or select_privately:
            raise UserError("Runs that were played are compared as they are; leave settings out.")
        _told(wanted, as_json)
    elif not (wanted or named or grid or settings):
        raise UserError("There is nothing to compare; name --algorithms, settings files or runs.")
    else:
        comparison = _planned(wanted, named, settings, grid or [], seeds)
        if select_privately:
            comparison = _selecting(comparison, expect, law, eta)
        _begin(comparison, out, _jobs(jobs), ledger, cut, as_json)


def _planned(
    targets: list[Path], algorithms: list[str], asked: dict[str, Any], grid: list[str], seeds: str
) -> Comparison:
    from fedveil.comparing.members import planned

    for target in targets:
        if target.is_dir():
            raise UserError(
                f"{target} is a directory; compare settings files with each other, or runs."
            )
    axes = [flags.assignments(text) for text in grid]
    return planned(targets, algorithms, asked, axes, _seeds(seeds))


def _seeds(text: str) -> list[int]:
    """`3` is 0, 1, 2; `4,7` is 4 and 7.

    >>> _seeds("3"), _seeds("4,7")
    ([0, 1, 2], [4, 7])
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--seeds {text}: give a number of seeds, or seeds such as 0,1,2.")
    numbers = [int(part) for part in parts]
    return list(range(numbers[0])) if len(numbers) == 1 else numbers


def _jobs(asked: int | None) -> int:
    from fedveil.threads import cores

    if asked is not None and asked < 1:
        raise UserError(f"--jobs {asked}: at least one run is played at a time.")
    return asked or cores()


def _selecting(
    comparison: Comparison, expect: float | None, law: str | None, eta: float | None
) -> Comparison:
    from dataclasses import replace

    from fedveil.privacy.selection import LAWS, law_of

    if law is not None and law not in LAWS:
        raise unknown("law", law, LAWS)
    if law is not None and eta is not None:
        raise UserError("--law and --eta both name a law; give one.")
    mean = 2.0 * len(comparison.members) if expect is None else expect
    chosen: dict[str, Any] = {
        "name": law or "geometric",
        "mean": mean,
        **({} if eta is None else {"eta": eta}),
    }
    law_of(**chosen)  # refused before the long work
    return replace(comparison, selection=chosen)


def _begin(
    comparison: Comparison, out: Path | None, jobs: int, ledger: Path | None, cut: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """A new directory with the comparison written down, and then play it."""
    import tomli_w

    from fedveil.comparing.costs import new_account, refuse_unequal_noise, room_for
    from fedveil.comparing.members import FILE
    from fedveil.comparing.outcome import write
    from fedveil.privacy.ledger import ledger_path
    from fedveil.progress import entry, waiting
    from fedveil.runs.directory import MODE, RunDirectory, saving

    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{out} already holds something; choose another --out, or go on with `{_again(out)}`."
        )
    with waiting("Looking at the budget …"):  # refused before anything is written
        refuse_unequal_noise(comparison, ledger_path(ledger))
        if comparison.selection is None:
            room_for(comparison, ledger_path(ledger), cut)
        told = new_account(comparison, ledger_path(ledger))
    if told and not as_json:
        entry("New account", told, width=13)
    if out is None:
        out = RunDirectory.fresh(OUT, comparison.members[0].label.partition("-")[0]).path
    with saving(out):
        out.mkdir(parents=True, exist_ok=True)
        out.chmod(MODE)
    write(out / FILE, tomli_w.dumps(comparison.plain()))
    _play(comparison, out, jobs, ledger, cut, as_json)


def _go_on(directory: Path, jobs: int, ledger: Path | None, cut: bool, as_json: bool) -> None:
    from fedveil.comparing.members import read_comparison

    _play(read_comparison(directory), directory, jobs, ledger, cut, as_json)


def _play(
    comparison: Comparison, directory: Path, jobs: int, ledger: Path | None, cut: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """What is left of a comparison; a stopped one ends with 130, as Ctrl-C does."""
    from fedveil.comparing.playing import play, tell

    if comparison.selection is not None:
        _select(comparison, directory, jobs, ledger, as_json)
        return
    with _silent(as_json):
        pool = play(comparison, directory, jobs, ledger, cut)
    ended = tell(comparison, directory, as_json)
    if not as_json:
        _advise(directory, pool.problems, pool.stopped, ended)
    if pool.stopped:
        sys.exit(130)
    if pool.problems:
        name, problem = next(iter(pool.problems.items()))
        raise UserError(f"{len(pool.problems)} runs did not end, first {name}: {problem}")


def _select(
    comparison: Comparison, directory: Path, jobs: int, ledger: Path | None, as_json: bool
) -> None:
    from fedveil.comparing.outcome import FILE
    from fedveil.comparing.playing import tell_selected
    from fedveil.comparing.selecting import forget, select

    if (directory / FILE).is_file():
        forget(directory)
        raise UserError(
            f"{directory} has selected already, and a second draw would be a second release; its "
            f"result is in {directory / FILE}."
        )
    try:
        with _silent(as_json):
            chosen, run, price = select(comparison, directory, jobs, ledger)
    except KeyboardInterrupt:
        print(f"{_again(directory)}   goes on where it stopped", file=sys.stderr)
        sys.exit(130)
    tell_selected(comparison, directory, chosen, run, price, as_json)
    forget(directory)


def _told(runs: list[Path], as_json: bool) -> None:
    from fedveil.comparing.played import compared
    from fedveil.comparing.playing import say

    comparison, found, measure, cost = compared(runs)
    say(comparison, found, measure, cost, as_json)


@contextlib.contextmanager
def _silent(as_json: bool) -> Any:
    """Nothing on standard output but the JSON to come."""
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _advise(directory: Path, problems: dict[str, str], stopped: bool, ended: bool) -> None:
    from fedveil.progress import entry

    for name, problem in problems.items():
        if problem != "stopped":
            entry("Not ended", f"{name}: {problem}", width=13)
    entry("Saved", f"{directory}", width=13)
    lines = []
    if problems or stopped:
        lines.append(f"{_again(directory)}   goes on where it stopped")
    if ended:
        lines.append(f"fedveil report {shlex.quote(str(directory))}   the comparison as a page")
    for index, line in enumerate(lines):
        entry("" if index else "Next", line, width=13)


def _again(directory: Path) -> str:
    return f"fedveil compare --resume {shlex.quote(str(directory))}"
