"""What a person sees of a comparison: one display while it goes on, and the table at its end."""

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

from fedveil.comparing.outcome import LEVEL, Measure, Standing
from fedveil.comparing.pool import Task
from fedveil.data.origin import footnote
from fedveil.privacy.session import RELEASED_BEFORE
from fedveil.privacy.statement import rounded_up
from fedveil.progress import console, entry, plain_output

if TYPE_CHECKING:
    from fedveil.comparing.members import Comparison

PLOT = 25  # characters of the little plot


class Lines:
    """A line for each run that ended, where output is no terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._last: dict[str, str] = {}
        self._one = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def started(self, task: Task) -> None:
        """Nothing to tell yet."""

    def moved(self, task: Task, answer: Mapping[str, Any]) -> None:
        """Remember what the last evaluated round came to."""
        self._last[task.name] = answer.get("said", self._last.get(task.name, ""))

    def ended(self, task: Task, problem: str | None) -> None:
        """Tell."""
        with self._one:
            self.done += 1
            said = self._last.get(task.name, "") if problem is None else problem
            print(f"run {self.done}/{self.total}  {task.name}  {said}".rstrip(), flush=True)

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put away."""


class Bars:
    """All runs in one bar, and below it one for each that is being played."""

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

    def started(self, task: Task) -> None:
        """One more bar."""
        with self._one:
            self._jobs[task.name] = self._bars.add_task(
                f"  {task.name}", total=task.rounds, count="", said="getting ready"
            )

    def moved(self, task: Task, answer: Mapping[str, Any]) -> None:
        """Move its bar; what is said changes when the round was evaluated."""
        round, rounds = answer["round"], answer["rounds"]
        changed = {"said": answer["said"]} if "said" in answer else {}
        job = self._jobs[task.name]
        self._bars.update(job, completed=round, count=f"{round}/{rounds}", **changed)

    def ended(self, task: Task, problem: str | None) -> None:
        """Put its bar away; a problem stays to be read."""
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


class Quiet:
    """A moving sign alone: how many runs there are is not told (private selection)."""

    def __init__(self) -> None:
        from fedveil.progress import waiting

        self._sign = waiting("Playing a secret number of runs …")

    def __enter__(self) -> Self:
        self._sign.__enter__()
        return self

    def started(self, task: Task) -> None:
        """Not told."""

    def moved(self, task: Task, answer: Mapping[str, Any]) -> None:
        """Not told."""

    def ended(self, task: Task, problem: str | None) -> None:
        """Not told."""

    def __exit__(
        self, kind: type | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sign.__exit__(kind, problem, trace)


def display(total: int) -> Lines | Bars:
    """Bars for a terminal, plain lines for everything else."""
    return Lines(total) if plain_output() else Bars(total)


def wide() -> Console:
    """A console for tables: what is not a terminal has no edge to fold at."""
    out = console()
    if plain_output():
        out.width = 200
    return out


def show(
    comparison: Comparison,
    found: Sequence[Standing],
    measure: Measure,
    cost: Mapping[str, Any] | None,
) -> None:
    """The table, what its marks mean, and what looking at it costs."""
    print()
    wide().print(table(comparison, found, measure))
    for label, text in notes(comparison, found, measure, cost):
        entry(label, text, width=13)


def table(comparison: Comparison, found: Sequence[Standing], measure: Measure) -> Table:
    """A row for each member, the best first."""
    ends = _ends(found) if wide().width >= 100 else None
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("member", overflow="fold")
    shown.add_column("seeds", justify="right")
    shown.add_column(f"{measure} ± s.e.", justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    shown.add_column(_span(ends, measure), no_wrap=True)
    shown.add_column("ε", justify="right")
    sign = -1 if measure == "accuracy" else 1
    for s in sorted(found, key=lambda s: math.inf if s.mean is None else sign * s.mean):
        shown.add_row(
            Text(_named(s), "bold" if s.best else ""),
            f"{len(s.runs)}/{len(comparison.seeds)}",
            _score(s, measure),
            _sign(s),
            _plot(s, ends),
            "" if s.epsilon is None else f"{rounded_up(s.epsilon)}{s.origin.mark}",
        )
    return shown


def notes(
    comparison: Comparison,
    found: Sequence[Standing],
    measure: Measure,
    cost: Mapping[str, Any] | None,
) -> list[tuple[str, str]]:
    """What the marks mean, what all runs cost together, and what choosing by them means."""
    lines = [("Marks", _marks(found)), *(("Note", text) for text in _unequal(found))]
    if told := footnote(s.origin for s in found if s.epsilon is not None):
        lines.append(("Note", told))
    if cost is None:
        return [*lines, ("Privacy", _unknown(comparison))]
    mark = max((s.origin.mark for s in found), default="")
    lines += [("Together", _together(cost, mark)), ("Choosing", _choosing(measure))]
    return [*lines, ("Note", RELEASED_BEFORE)] if cost.get("released_twice") else lines


def _named(s: Standing) -> str:
    """Name and varied parameters, which may be folded between."""
    varied = (f"{name}={value}" for name, value in s.parameters.items())
    bare = s.label
    for name, value in reversed(list(s.parameters.items())):
        bare = bare.removesuffix(f"-{name}={value}")
    return " ".join([bare, *(varied if bare != s.label else ())])


def _marks(found: Sequence[Standing]) -> str:
    if all(s.significant is None for s in found):
        why = "none: a test needs at least two seeds of two members"
        return f"{why}; differences here may be chance."
    few = ""
    if max(len(s.runs) for s in found) == 2:
        few = f" {_few_seeds()}"
    return (
        f"* the best mean; ↓ differs from it (p < {LEVEL:g}, paired t test over seeds, two-sided, "
        "Holm's correction); ~ may be chance. Seeds vary first model, cohorts and noise, not the "
        "data; the best of several is best partly by luck."
        f"{few}"
    )


def _few_seeds() -> str:
    """By Student's quantiles with n − 1 degrees: what a mean difference must exceed to count."""
    from scipy.special import stdtrit

    two, five = (float(stdtrit(seeds - 1, 1 - LEVEL / 2)) for seeds in (2, 5))
    return (
        "Two seeds can hardly tell members apart: a difference counts from "
        f"{two:.1f} of its standard errors on, with five from {five:.1f} on; take five."
    )


def _unequal(found: Sequence[Standing]) -> Iterator[str]:
    """Where one ε is not the other's promise: other neighbours, or examples instead of clients."""
    told = [s for s in found if s.epsilon is not None and s.adjacency]
    whose: dict[str, dict[str, None]] = {}
    for s in told:
        whose.setdefault(s.adjacency, {})[s.algorithm] = None
    if len(whose) > 1:
        each = (f"of {', '.join(names)} for {kind}" for kind, names in whose.items())
        yield f"ε is for other neighbours: {', '.join(each)} ones (docs/privacy.md)."
    if any(s.unit == "example" for s in told):
        yield "ε is for one example; all examples of one client may weigh more."


def _unknown(comparison: Comparison) -> str:
    from fedveil.settings import resolve_recipe

    if not resolve_recipe(comparison.members[0].settings).private:
        return "none of these runs is private."
    return (
        "no ledger here knows these runs, so what they cost together cannot be told; it is more "
        "than the ε of one, and whoever picks one by looking at them all has spent it."
    )


def _together(cost: Mapping[str, Any], mark: str) -> str:
    spent = "∞" if cost["epsilon"] is None else f"{rounded_up(cost['epsilon'])}{mark}"
    text = (
        f"all {cost['runs']} runs have spent ε = {spent} at δ = "
        f"{rounded_up(cost['delta'])} in view '{cost['view']}'"
    )
    text += f" ({cost['adjacency']})" if cost["adjacency"] else " (their neighbours do not fit)"
    text += f", since {cost['reason']}" if cost.get("reason") else ""
    if cost["others"]:
        account = "∞" if cost["account"] is None else f"{rounded_up(cost['account'])}{mark}"
        text += f"; with {cost['others']} earlier ones on these data, ε = {account}"
    if cost["unrecorded"]:
        text += f"; {cost['unrecorded']} more that no ledger here knows are not counted"
    return (
        f"{text}, by the ledger. This is a figure to look at; only a budget that is set before the "
        "runs is a guarantee."
    )


def _choosing(measure: Measure) -> str:
    return (
        f"whoever picks a member by its {measure} here has used all of these runs: what is then "
        "released costs the ε of all of them together, not that of one run; a score on test "
        "examples of protected people is not covered by any ε. `--select-privately` costs less."
    )


def _score(s: Standing, measure: Measure) -> str:
    if s.mean is None:
        return "diverged" if s.runs else "not finished"
    if measure == "loss":
        error = "" if s.standard_error is None else f" ± {s.standard_error:.2g}"
        return f"{s.mean:.4g}{error}"
    error = "" if s.standard_error is None else f" ± {100 * s.standard_error:.2f}"
    return f"{100 * s.mean:.2f}{error} %"


def _sign(s: Standing) -> str:
    if s.best:
        return "*"
    return "" if s.significant is None else "↓" if s.significant else "~"


def _ends(found: Sequence[Standing]) -> tuple[float, float] | None:
    """The span of all means and their errors."""
    known = [(s.mean, s.standard_error or 0.0) for s in found if s.mean is not None]
    if len(known) < 2:
        return None
    low, high = min(m - e for m, e in known), max(m + e for m, e in known)
    return (low, high) if high > low else None


def _span(ends: tuple[float, float] | None, measure: Measure) -> str:
    if ends is None:
        return ""
    low, high = ((f"{100 * e:.1f}" if measure == "accuracy" else f"{e:.3g}") for e in ends)
    return low + high.rjust(PLOT - len(low))


def _plot(s: Standing, ends: tuple[float, float] | None) -> str:
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
