"""Terminal output: labelled entries, progress of a run, and the summary at its end."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, repeat
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedveil.training.records import quality, spending

if TYPE_CHECKING:
    from rich.status import Status

    from fedveil.training.records import Record
    from fedveil.training.result import Result
    from fedveil.training.run import Training
    from fedveil.training.scoring import Evaluation


class Watcher(Protocol):
    """Is called after every round."""

    def __call__(self, training: Training, record: Record) -> None:
        """After a round."""

    def __enter__(self) -> Watcher:
        """Start the display."""

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the display."""


def plain_output() -> bool:
    """Whether output has no colours and no live display: not a terminal, NO_COLOR, CI, or dumb."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("CI")
    return bool(plain) or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()


def in_notebook() -> bool:
    """Whether this is the kernel of a Jupyter notebook."""
    known = sys.modules.get("IPython")
    shell = None if known is None else known.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def seen(quiet: bool) -> bool:
    """Whether a Python function shows its progress: on a terminal and in Jupyter, by default."""
    return not quiet and (sys.stdout.isatty() or in_notebook())


def watcher() -> Watcher:
    """A live line on a terminal, plain lines everywhere else."""
    return PlainLines() if plain_output() else LiveLine()


def reached(training: Training, record: Record) -> str:
    """The metric that ranks runs after a round, and whether it carries noise."""
    from fedveil.training.metrics import titled

    spec = training.spec
    return quality(record, titled(spec.metrics.main.name), spec.evaluation is not None)


class Unseen:
    """Shows nothing."""

    def __enter__(self) -> Unseen:
        return self

    def __call__(self, training: Training, record: Record) -> None:
        """Show nothing."""

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to clean up."""


class LiveLine:
    """One live line: round, accuracy, ε of all planned rounds, time left."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("round {task.completed:>3}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[epsilon]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console(),
        )
        self._job = self._bar.add_task("", total=None, accuracy="", epsilon="")

    def __enter__(self) -> LiveLine:
        self._bar.start()
        return self

    def __call__(self, training: Training, record: Record) -> None:
        """Advance the bar; accuracy and ε change in evaluated rounds."""
        self._bar.update(self._job, completed=record.round, total=training.rounds)
        if record.loss is not None:
            accuracy = reached(training, record)
            self._bar.update(self._job, accuracy=accuracy, epsilon=spending(record))

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class PlainLines:
    """One line per evaluation."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> PlainLines:
        return self

    def __call__(self, training: Training, record: Record) -> None:
        """Print an evaluated round."""
        self._first = record.round - 1 if self._first is None else self._first
        if record.loss is None:
            return
        done = record.round - self._first
        left = (time.monotonic() - self._started) / done * (training.rounds - record.round)
        width = len(str(training.rounds))
        parts = [
            f"round {record.round:>{width}}/{training.rounds}",
            reached(training, record),
        ]
        parts += [spending(record), f"{clock(left)} left"]
        print("  ".join(part for part in parts if part), flush=True)

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to clean up."""


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
    """A spinner on a terminal during a long step."""
    return nullcontext() if plain_output() else console().status(for_what)


@contextmanager
def getting_ready() -> Iterator[None]:
    """The spinner of every command that trains, before its first round.

    It shows what is being done, such as timing engines, as the log of fedveil tells it.
    """
    if plain_output():
        yield
        return
    log = logging.getLogger("fedveil")
    before = log.level
    with console().status("Loading data and calibrating the noise …") as status:
        handler = _Shown(status)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(before)


class _Shown(logging.Handler):
    """Shows the newest message of a log beside a spinner."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self._status = status

    def emit(self, record: logging.LogRecord) -> None:
        """Replace the text of the spinner."""
        text = printable(record.getMessage())
        self._status.update(Text(f"{text[:1].upper()}{text[1:]} …"))


def show_json(plain: object) -> None:
    """Print JSON, indented, and without the numbers that JSON does not have."""
    print(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))


def printable(text: str) -> str:
    """The text with blanks for control characters, so that it cannot control the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def wrapped(text: str, room: int) -> list[str]:
    """Lines broken between words only.

    >>> wrapped("see runs/dp_norm_fedavg-1/summary.json", 20)
    ['see', 'runs/dp_norm_fedavg-1/summary.json']
    """
    return textwrap.wrap(text, max(room, 20), break_long_words=False, break_on_hyphens=False)


def entry(label: str, text: str, width: int = 9) -> None:
    """Print a label and its text; further lines of the text are aligned with its first.

    The text is printed literally: brackets are not markup, and control characters are removed.
    """
    out = console()
    lines = [printable(text)]
    if sys.stdout.isatty():
        lines = wrapped(lines[0], out.width - width)
    body = ("\n" + " " * width).join(lines)
    out.print(Text.assemble((label.ljust(width), "bold"), body), soft_wrap=True)


def show_start(training: Training, worded: Callable[[str], str] = str) -> None:
    """Show notes on the data, as `worded`, and what is about to be trained."""
    for note in training.data.notes:
        entry("", worded(note), width=0)
    entry(
        "",
        f"{training.recipe.name} on {training.data.name}: {training.data.clients:,} "
        f"{training.data.unit}s, {training.task.dim:,} parameters, {training.rounds:,} "
        f"round{'s' * (training.rounds != 1)}, "
        f"engine {training.engine.name}",
        width=0,
    )
    left = range(training.state.round, training.rounds)
    if training.session is not None and not training.session.affordable(left):
        room = f"{training.session.room:,.0f} more round{'s' * (training.session.room != 1)}"
        entry("", f"The budget of this data set allows only {room}.", width=0)


def show_summary(result: Result, advice: list[str]) -> None:
    """Show accuracy, guarantee, files, and what to do next."""
    from fedveil.diagnosis.answers import one_class

    print()
    if len(result.records) < result.rounds:
        ended = f"after {len(result.records):,} of {result.rounds:,} rounds."
        entry("Stopped", ended, width=13)
    if (useless := one_class(result.evaluation)) is not None:
        entry("Warning", f"{useless[:1].upper()}{useless[1:]}.", width=13)
    for label, line in zip(chain(["Result"], repeat("")), _scores(result), strict=False):
        entry(label, line, width=13)
    for label, text in result.statement.entries():
        entry(label, text, width=13)
    rejected = sum(record.rejected for record in result.records)
    if rejected:
        entry("Rejected", f"{rejected} updates that were not finite numbers.", width=13)
    if result.path is not None:
        files = sorted(file.name for file in result.path.iterdir())
        entry("Saved", f"{result.path} ({', '.join(files)})", width=13)
    show_next(advice)


def _scores(result: Result) -> Iterator[str]:
    """The results on test examples, the main one first."""
    from fedveil.training.result import UNTESTED

    if not result.tested:
        yield UNTESTED
        return
    noisy = "noisy " if result.recipe.evaluation is not None else ""
    lines = [*measured_lines(result.evaluation), f"loss {result.loss:.4g}"]
    if result.evaluation is None and not math.isnan(result.accuracy):
        lines.insert(0, f"accuracy {result.accuracy:.1%}")
    yield f"{noisy}test {lines[0]}"
    yield from lines[1:]


def measured_lines(found: Evaluation | None) -> Iterator[str]:
    """Each metric with its interval and its baseline, the main one first."""
    from fedveil.training.metrics import shown, titled

    if found is None:
        return
    for m in sorted(found.metrics, key=lambda m: m.name != found.metric):
        if m.value is None or m.name == "loss":
            continue
        notes = []
        if m.low is not None and m.high is not None:
            notes.append(f"95% interval {shown(m.low, m.share)} to {shown(m.high, m.share)}")
        if m.baseline is not None:
            notes.append(f"constant baseline {shown(m.baseline, m.share)}")
        told = f" ({'; '.join(notes)})" if notes else ""
        yield f"{titled(m.name)} {shown(m.value, m.share)}{told}"


def show_next(commands: Iterable[str]) -> None:
    """List the commands to try next; what one does is on its own line if it does not fit."""
    for index, command in enumerate(commands):
        fits = plain_output() or len(command) <= console().width - 13
        what, _, why = (command, "", "") if fits else command.partition("   ")
        entry("" if index else "Next", what, width=13)
        if why:
            entry("", f"  {why}", width=13)
