"""The command line: its commands and exit codes."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer
import typer.core

from fedveil.commands import budget, client, federate
from fedveil.commands.audit import audit, conform
from fedveil.commands.bench import bench
from fedveil.commands.compare import compare
from fedveil.commands.diagnose import diagnose
from fedveil.commands.export import export
from fedveil.commands.flags import Command
from fedveil.commands.listings import algorithms, datasets
from fedveil.commands.plan import plan
from fedveil.commands.predict import predict
from fedveil.commands.privacy import privacy
from fedveil.commands.report import report
from fedveil.commands.reproduce import reproduce
from fedveil.commands.runs import runs
from fedveil.commands.stats import stats
from fedveil.commands.train import train
from fedveil.engines.ranks import end_at_once, one_voice, tells
from fedveil.errors import LostError, UserError, for_command_line

COMMANDS = (
    plan, train, diagnose, compare, reproduce, report, predict, export, runs, privacy, stats, audit,
    conform, bench,
    datasets, algorithms,
)  # fmt: skip
typer.core.HAS_RICH = False  # with it, typer puts a backslash before [required] in plain help
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    suggest_commands=False,  # click already does
)
for command in COMMANDS:
    app.command(cls=Command)(command)
app.add_typer(budget.app, name="budget")
app.add_typer(federate.app, name="federate")
app.add_typer(client.app, name="client")


def main() -> None:
    """Run a command and exit."""
    try:
        _main()
    except SystemExit as ended:
        end_at_once(ended)
        raise


def _main() -> None:
    """Run a command; bad input exits with one message and code 2, Ctrl-C with 130.

    Under torchrun one process prints; if a process is lost, the others exit with code 1.
    """
    for sink in (sys.stdout, sys.stderr):
        if isinstance(sink, io.TextIOWrapper):
            sink.reconfigure(errors="replace")  # printing an ε on an ASCII terminal must not fail
    # Waiting threads sleep: threads that spin slow a busy machine down many times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with one_voice(), for_command_line():
            app()
    except UserError as problem:
        if tells(problem):
            _complain(f"fedveil: {problem}")
        sys.exit(1 if isinstance(problem, LostError) else 2)


def _complain(sentence: str) -> None:
    """Print an error: on one line, or wrapped between words on a terminal."""
    from rich.console import Console

    from fedveil.commands.progress import printable, wrapped

    lines = [printable(sentence)]
    if sys.stderr.isatty():
        lines = wrapped(lines[0], Console(stderr=True).width)
    sys.stderr.write("\n".join(lines) + "\n")  # in one piece: other processes may write here too


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Train models on many people's data with differential privacy."""
    if version:
        from fedveil import __version__

        print(f"fedveil {__version__}")
        raise typer.Exit
