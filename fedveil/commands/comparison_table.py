"""A comparison on the terminal: progress of its runs, and the table at the end."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedveil.accounting.rounding import rounded_up, short
from fedveil.commands.progress import console, entry, plain_output
from fedveil.comparing.costs import Cost
from fedveil.comparing.outcome import LEAST_SEEDS, LEVEL, Measure, MemberResult
from fedveil.comparing.pool import RunTask
from fedveil.data.origin import footnote
from fedveil.ledger.session import RELEASED_BEFORE
from fedveil.privacy.guarantee import written
from fedveil.runs.listing import NOISY, NOISY_NOTE
from fedveil.training.metrics import titled

if TYPE_CHECKING:
    from fedveil.comparing.members import Comparison

PLOT = 25  # characters of the little plot


class Lines:
    """One line per finished run, where output is not a terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._last: dict[str, str] = {}
        self._one = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def started(self, task: RunTask) -> None:
        """Nothing to show yet."""

    def moved(self, task: RunTask, answer: Mapping[str, Any]) -> None:
        """Keep the last evaluated round."""
        self._last[task.name] = answer.get("said", self._last.get(task.name, ""))

    def ended(self, task: RunTask, problem: str | None) -> None:
        """Print the run's line."""
        with self._one:
            self.done += 1
            said = self._last.get(task.name, "") if problem is None else problem
            print(f"run {self.done}/{self.total}  {task.name}  {said}".rstrip(), flush=True)

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to clean up."""


class Bars:
    """One bar for all runs, and below it one per run in progress."""

    def __init__(self, total: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
            console=console(),
        )
        self._all = self._bars.add_task("all runs", total=total, count=f"0/{total}", said="")
        self._jobs: dict[str, TaskID] = {}
        self._total = total
        self._one = threading.Lock()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def started(self, task: RunTask) -> None:
        """Add a bar."""
        with self._one:
            self._jobs[task.name] = self._bars.add_task(
                f"  {task.name}", total=task.rounds, count="", said="preparing"
            )

    def moved(self, task: RunTask, answer: Mapping[str, Any]) -> None:
        """Advance its bar; its text changes in evaluated rounds."""
        round, rounds = answer["round"], answer["rounds"]
        changed = {"said": answer["said"]} if "said" in answer else {}
        job = self._jobs[task.name]
        self._bars.update(job, completed=round, count=f"{round}/{rounds}", **changed)

    def ended(self, task: RunTask, problem: str | None) -> None:
        """Remove its bar; print its problem, if any."""
        with self._one:
            self._bars.remove_task(self._jobs.pop(task.name))
            if problem is None:
                self._bars.advance(self._all)
            done = int(self._bars.tasks[0].completed)
            self._bars.update(self._all, count=f"{done}/{self._total}")
        if problem not in (None, "stopped"):
            self._bars.console.print(Text(f"{task.name}: {problem}"))

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def display(total: int) -> Lines | Bars:
    """Bars on a terminal, plain lines everywhere else."""
    return Lines(total) if plain_output() else Bars(total)


def wide() -> Console:
    """A console for tables; output that is not a terminal is wide enough not to wrap."""
    out = console()
    if plain_output():
        out.width = 200
    return out


def show(
    comparison: Comparison,
    found: Sequence[MemberResult],
    measure: Measure,
    cost: Cost,
) -> None:
    """Print the table, the meaning of its marks, and its privacy cost."""
    print()
    wide().print(table(comparison, found, measure))
    for label, text in notes(comparison, found, measure, cost):
        entry(label, text, width=13)


def table(comparison: Comparison, found: Sequence[MemberResult], measure: Measure) -> Table:
    """One row per member, best first."""
    ends = _ends(found) if wide().width >= 100 else None
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("configuration", overflow="fold")
    shown.add_column("seeds", justify="right")
    shown.add_column(f"{titled(measure.name)} ± s.e.", justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    shown.add_column(_span(ends, measure), no_wrap=True)
    shown.add_column("ε", justify="right")
    tested = any(s.significant is not None for s in found)
    for s in sorted(found, key=lambda s: math.inf if s.mean is None else -measure.sign * s.mean):
        shown.add_row(
            Text(_named(s), "bold" if s.best else ""),
            f"{len(s.runs)}/{len(comparison.seeds)}",
            _score(s, measure),
            _sign(s) if tested else "",
            _plot(s, ends),
            _epsilon(s),
        )
    return shown


def _epsilon(s: MemberResult) -> str:
    if not s.private:
        return "not private"
    return "" if s.epsilon is None else f"{rounded_up(s.epsilon)}{s.origin.mark}"


def notes(
    comparison: Comparison,
    found: Sequence[MemberResult],
    measure: Measure,
    cost: Cost,
) -> list[tuple[str, str]]:
    """What the marks mean, what all runs cost in total, and what choosing among them costs."""
    lines = [("Marks", _marks(found)), *(("Note", text) for text in _unequal(found))]
    if (bare := [s.label for s in found if not s.private]) and len(bare) < len(found):
        lines.append(("Baseline", f"{', '.join(bare)}: not private, so neither ranked nor tested."))
    if note := footnote(s.origin for s in found if s.epsilon is not None):
        lines.append(("Note", note))
    if any(s.noisy for s in found):
        lines.append(("Note", NOISY_NOTE))
    if cost is None or isinstance(cost, str):
        return [*lines, ("Privacy", _unknown(comparison, cost))]
    mark = max((s.origin.mark for s in found), default="")
    exact = not all(s.noisy for s in found)
    lines += [("Total cost", _total_cost(cost, mark)), ("Choosing", _choosing(measure, exact))]
    return [*lines, ("Note", RELEASED_BEFORE)] if cost.get("released_twice") else lines


def _named(s: MemberResult) -> str:
    """Name and varied parameters, separated by blanks so that they can wrap."""
    varied = (f"{name}={value}" for name, value in s.parameters.items())
    bare = s.label
    for name, value in reversed(list(s.parameters.items())):
        bare = bare.removesuffix(f"-{name}={value}")
    return " ".join([bare, *(varied if bare != s.label else ())])


def _marks(found: Sequence[MemberResult]) -> str:
    if all(s.significant is None for s in found):
        why = f"not tested: a test needs two configurations with at least {LEAST_SEEDS} seeds each"
        return f"{why}. Differences here may be chance."
    return (
        f"* best mean; ↓ significantly different from it (p < {LEVEL:g}, two-sided paired t-test "
        "over seeds, Holm's correction); ~ may be chance. Seeds vary the initial model, cohorts "
        "and noise, not the data. The best of several is best partly by luck."
    )


def _unequal(found: Sequence[MemberResult]) -> Iterator[str]:
    """Notes on ε that differ in meaning: other adjacency, or examples instead of clients."""
    private = [s for s in found if s.epsilon is not None and s.adjacency]
    whose: dict[str, dict[str, None]] = {}
    for s in private:
        whose.setdefault(s.adjacency, {})[s.algorithm] = None
    if len(whose) > 1:
        each = (f"{written(kind)} for {', '.join(names)}" for kind, names in whose.items())
        yield f"Adjacency differs between configurations: {'; '.join(each)} (docs/privacy.md)."
    if any(s.unit in ("example", "record") for s in private):
        yield "ε protects one example. All examples of one client together may be protected less."


def _unknown(comparison: Comparison, mismatch: str | None) -> str:
    from fedveil.training.settings import resolve_recipe

    if not any(resolve_recipe(member.settings).private for member in comparison.members):
        return "none of these runs is private."
    unknown = "no ledger here records these runs, so their total cost is unknown."
    if mismatch is not None:
        unknown = f"the total cost of these runs is unknown. {mismatch}"
    return (
        f"{unknown} It is more than the ε of one run, and choosing one by looking at all of them "
        "spends it."
    )


def _total_cost(cost: Mapping[str, Any], mark: str) -> str:
    spent = "∞" if cost["epsilon"] is None else f"{rounded_up(cost['epsilon'])}{mark}"
    delta = rounded_up(cost["delta"])
    text = f"all {cost['runs']} runs together have spent ε = {spent} at δ = {delta}"
    text += f" in view '{cost['view']}'"
    text += (
        f" ({written(cost['adjacency'])})"
        if cost["adjacency"]
        else " (their adjacencies cannot be combined)"
    )
    text += f", because {cost['reason']}" if cost.get("reason") else ""
    if cost["others"]:
        account = "∞" if cost["account"] is None else f"{rounded_up(cost['account'])}{mark}"
        text += f"; with {cost['others']} earlier runs on these data, ε = {account}"
    if cost["unrecorded"]:
        text += f"; {cost['unrecorded']} more runs, which no ledger here records, are not counted"
    return (
        f"{text}, according to the ledger. This is for information only: a guarantee needs a "
        "budget set before the runs."
    )


def _choosing(measure: Measure, exact: bool) -> str:
    uncovered = (
        " No ε covers an exact score on test examples of protected people (see "
        "--private-evaluation)."
    )
    return (
        f"choosing a configuration by its {titled(measure.name)} uses all of these runs. Releasing "
        f"it costs their composed ε, not that of one run.{uncovered if exact else ''} "
        "`--select-privately` costs less."
    )


def _score(s: MemberResult, measure: Measure) -> str:
    if s.mean is None:
        return "diverged" if s.runs else "not finished"
    if not measure.share:
        error = "" if s.standard_error is None else f" ± {short(s.standard_error, 2)}"
        return f"{short(s.mean, 4)}{error}{NOISY * s.noisy}"
    error = "" if s.standard_error is None else f" ± {100 * s.standard_error:.2f}"
    return f"{100 * s.mean:.2f}{error} %{NOISY * s.noisy}"


def _sign(s: MemberResult) -> str:
    if s.best:
        return "*"
    return "" if s.significant is None else "↓" if s.significant else "~"


def _ends(found: Sequence[MemberResult]) -> tuple[float, float] | None:
    """The range of all means with their errors."""
    known = [(s.mean, s.standard_error or 0.0) for s in found if s.mean is not None]
    if len(known) < 2:
        return None
    low, high = min(m - e for m, e in known), max(m + e for m, e in known)
    return (low, high) if high > low else None


def _span(ends: tuple[float, float] | None, measure: Measure) -> str:
    if ends is None:
        return ""
    low, high = ((f"{100 * e:.1f}" if measure.share else short(e, 3)) for e in ends)
    return low + high.rjust(PLOT - len(low))


def _plot(s: MemberResult, ends: tuple[float, float] | None) -> str:
    """Mean and standard error on a line: ├─●─┤."""
    if ends is None or s.mean is None:
        return ""
    low, width = ends[0], ends[1] - ends[0]
    error = s.standard_error or 0.0
    places = [s.mean - error, s.mean, s.mean + error]
    first, middle, last = (round((place - low) / width * (PLOT - 1)) for place in places)
    line = [" "] * PLOT
    line[first : last + 1] = "─" * (last + 1 - first)
    line[first], line[last], line[middle] = "├", "┤", "●"
    return "".join(line)
