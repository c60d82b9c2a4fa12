"""What a person sees while a run goes on, and the summary at its end."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from fedveil.records import Record
    from fedveil.result import Result
    from fedveil.training import Training


class Watcher(Protocol):
    """Sees every round."""

    def __call__(self, training: Training, record: Record) -> None:
        """After a round."""

    def __enter__(self) -> Watcher:
        """Begin to show."""

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""


def plain_output() -> bool:
    """Whether output goes to something that is not a terminal a person looks at in colour."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("CI")
    return bool(plain) or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()


def watcher() -> Watcher:
    """A live line for a terminal, plain lines for everything else."""
    return PlainLines() if plain_output() else LiveLine()


class LiveLine:
    """One line that follows the run: round, accuracy, ε so far of ε allowed, time left."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("round {task.completed:>3}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[epsilon]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console(),
        )
        self._job = self._bar.add_task("", total=None, accuracy="", epsilon="")

    def __enter__(self) -> LiveLine:
        self._bar.start()
        return self

    def __call__(self, training: Training, record: Record) -> None:
        """Move the bar; accuracy and ε change when the round was evaluated."""
        self._bar.update(self._job, completed=record.round, total=training.rounds)
        if record.loss is not None:
            accuracy, epsilon = quality(record), spending(training, record)
            self._bar.update(self._job, accuracy=accuracy, epsilon=epsilon)

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class PlainLines:
    """A line for each evaluation."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> PlainLines:
        return self

    def __call__(self, training: Training, record: Record) -> None:
        """Print what an evaluated round came to."""
        self._first = record.round - 1 if self._first is None else self._first
        if record.loss is None:
            return
        done = record.round - self._first
        left = (time.monotonic() - self._started) / done * (training.rounds - record.round)
        width = len(str(training.rounds))
        parts = [f"round {record.round:>{width}}/{training.rounds}", quality(record)]
        parts += [spending(training, record), f"{clock(left)} left"]
        print("  ".join(part for part in parts if part), flush=True)

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put away."""


def quality(record: Record) -> str:
    """Accuracy where there are classes, else the loss."""
    if record.accuracy is None or math.isnan(record.accuracy):
        return "" if record.loss is None else f"loss {record.loss:.4g}"
    return f"accuracy {record.accuracy:.1%}"


def spending(training: Training, record: Record) -> str:
    """ε so far, of ε allowed where a budget was set; it holds if the run is to stop here anyway."""
    if record.epsilon is None:
        return "not private"
    if math.isinf(record.epsilon):
        return "no guarantee"
    allowed = f" of {training.budget.epsilon:g}" if training.budget else ""
    return f"ε so far {math.ceil(record.epsilon * 100) / 100:.2f}{allowed}"


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(75)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def console() -> Console:
    """Standard output, without escape codes where it is plain; FORCE_COLOR does not change that."""
    return Console(highlight=False, force_terminal=False if plain_output() else None)


def waiting(for_what: str) -> AbstractContextManager[object]:
    """A moving sign on a terminal while nothing else can be shown."""
    return nullcontext() if plain_output() else console().status(for_what)


def getting_ready() -> AbstractContextManager[object]:
    """What every command that plays waits for first."""
    return waiting("Loading the data and settling the noise …")


def show_json(plain: object) -> None:
    """For a program: whole, readable, and without numbers that JSON does not know."""
    print(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))


def printable(text: str) -> str:
    """With blanks in place of control characters, so that no text commands the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def wrapped(text: str, room: int) -> list[str]:
    """Lines that part between words only.

    >>> wrapped("see runs/dp_norm_fedavg-1/summary.json", 20)
    ['see', 'runs/dp_norm_fedavg-1/summary.json']
    """
    return textwrap.wrap(text, max(room, 20), break_long_words=False, break_on_hyphens=False)


def entry(label: str, text: str, width: int = 9) -> None:
    """A label and its text, whose further lines stand below its first one.

    The text is shown as it is: brackets in it are no markup, and control characters no commands.
    """
    out = console()
    lines = [printable(text)]
    if sys.stdout.isatty():
        lines = wrapped(lines[0], out.width - width)
    body = ("\n" + " " * width).join(lines)
    out.print(Text.assemble((label.ljust(width), "bold"), body), soft_wrap=True)


def show_start(training: Training) -> None:
    """What the data are like, and what is about to run."""
    for note in training.data.notes:
        entry("", note, width=0)
    entry(
        "",
        f"{training.recipe.name} on {training.data.name}: {training.data.clients:,} "
        f"{training.data.unit}s, {training.task.dim:,} parameters, {training.rounds:,} rounds, "
        f"engine {training.engine.name}",
        width=0,
    )
    left = range(training.state.round, training.rounds)
    if training.session is not None and not training.session.affordable(left):
        room = f"{training.session.room:,.0f} more rounds"
        entry("", f"The budget of these data has room for {room} only.", width=0)


def show_summary(result: Result, advice: list[str]) -> None:
    """Accuracy, the guarantee, where it is, what to try next."""
    print()
    whole = len(result.records) == result.rounds
    ended = "" if whole else f" (stopped after {len(result.records):,} of {result.rounds:,} rounds)"
    score = f"loss {result.loss:.4g}"
    if not math.isnan(result.accuracy):
        score = f"test accuracy {result.accuracy:.2%}, {score}"
    entry("Result", score + ended, width=13)
    for label, text in result.statement.entries():
        entry(label, text, width=13)
    rejected = sum(record.rejected for record in result.records)
    if rejected:
        entry("Rejected", f"{rejected} updates that were not finite numbers.", width=13)
    if result.path is not None:
        files = sorted(file.name for file in result.path.iterdir())
        entry("Saved", f"{result.path} ({', '.join(files)})", width=13)
    for index, line in enumerate(advice):
        entry("" if index else "Next", line, width=13)
