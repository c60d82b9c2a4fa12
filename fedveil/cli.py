"""The command line: the commands in the order of work, and how each ends."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer
import typer.core

from fedveil.commands import budget
from fedveil.commands.audit import audit, conform
from fedveil.commands.bench import bench
from fedveil.commands.compare import compare
from fedveil.commands.diagnose import diagnose
from fedveil.commands.listings import algorithms, datasets
from fedveil.commands.plan import plan
from fedveil.commands.privacy import privacy
from fedveil.commands.report import report
from fedveil.commands.runs import runs
from fedveil.commands.train import train
from fedveil.errors import LostError, UserError
from fedveil.ranks import end_at_once, one_voice, tells

COMMANDS = (
    plan, train, diagnose, compare, report, runs, privacy, audit, conform, bench, datasets,
    algorithms,
)  # fmt: skip
typer.core.HAS_RICH = False  # with it, typer puts a backslash before [required] in plain help
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    suggest_commands=False,  # click does it too, and the same would be said twice
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(budget.app, name="budget")


def main() -> None:
    """Run a command, and end."""
    try:
        _main()
    except SystemExit as ended:
        end_at_once(ended)
        raise


def _main() -> None:
    """Run a command; bad input ends with one sentence and exit code 2, Ctrl-C with 130.

    Of the processes that torchrun started one speaks; if one is lost, the others end with 1.
    """
    for sink in (sys.stdout, sys.stderr):
        if isinstance(sink, io.TextIOWrapper):
            sink.reconfigure(errors="replace")  # an ε must not end a run on an ASCII terminal
    # Threads that wait asleep: spinning ones make a busy machine many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with one_voice():
            app()
    except UserError as problem:
        if tells(problem):
            _complain(f"fedveil: {problem}")
        sys.exit(1 if isinstance(problem, LostError) else 2)


def _complain(sentence: str) -> None:
    """On one line; on a terminal on several, which part between words."""
    from rich.console import Console

    from fedveil.progress import printable, wrapped

    lines = [printable(sentence)]
    if sys.stderr.isatty():
        lines = wrapped(lines[0], Console(stderr=True).width)
    print(*lines, sep="\n", file=sys.stderr)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Train models over many people's data with a privacy guarantee that is true."""
    if version:
        from fedveil import __version__

        print(f"fedveil {__version__}")
        raise typer.Exit
