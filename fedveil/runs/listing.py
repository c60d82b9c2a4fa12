"""List runs on disk: their algorithm, data, progress and results, and whether they are intact."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedveil.data.origin import REAL, Origin
from fedveil.errors import UserError
from fedveil.ledger.stated import resumed_epsilon
from fedveil.ledger.tracing import traced
from fedveil.parts.bound import Unbounded
from fedveil.parts.noise import NoNoise
from fedveil.recipe import View
from fedveil.runs.directory import RunDirectory, saving
from fedveil.runs.saved import FILES, MEMORY, RECIPE, SUMMARY, SavedRun, reading
from fedveil.serialization.codec import class_of

State = Literal["finished", "stopped", "broken"]
STATES: tuple[State, ...] = ("finished", "stopped", "broken")
PATTERNS = (MEMORY, ".*.partial")
DEPTH = 2  # the runs of a comparison are one level below it
PENDING = Origin(exclusions=("what its statement names when the run has ended",))
NOISY = "‡"  # the mark of a noisy score
NOISY_NOTE = (
    f"{NOISY} Noisy: of a private evaluation, which the run's ε covers. `fedveil report` shows its "
    "95% interval."
)
AT_LEAST_NOTE = (
    "≥ The run has not ended, and its ledger was not found or does not match, so rounds that were "
    "lost in a crash are not counted. Name the ledger with FEDVEIL_LEDGER."
)
HIDDEN = "out-of-sight"  # drawn runs of a private selection, whose number must stay secret


@dataclass(frozen=True)
class Listed:
    """One run, without loading its data."""

    path: Path
    state: State
    algorithm: str = ""
    data: str = ""
    rounds: int = 0
    planned: int = 0
    accuracy: float | None = None
    loss: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    view: str = ""
    adjacency: str = ""  # of ε, if the run has ended
    unit: str = ""
    private: bool = False
    leaks: bool = False  # whether its clipping threshold was taken from the data: no ε covers it
    seed: int = 0
    origin: Origin = REAL  # whether its clients are real, and what its ε does not cover
    untold: bool = False  # whether the ε of its planned rounds is not recorded
    at_least: bool = False  # whether no ledger was found that knows what was lost in a crash
    problem: str = ""  # of a broken run
    noisy: bool = False  # whether its scores are of private evaluations
    metric: str = ""  # the name of its main metric, if it has ended and was evaluated
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by name

    def score(self, name: str) -> float | None:
        """The value of a metric; None if it was not measured or is not finite."""
        if name in ("accuracy", "loss"):
            return self.accuracy if name == "accuracy" else self.loss
        found = self.metrics.get(name)
        return None if found is None else found["value"]

    @property
    def mark(self) -> str:
        """The mark of a noisy score; NOISY_NOTE explains it."""
        return NOISY if self.noisy else ""

    def plain(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {**asdict(self), "path": str(self.path)}


def find_runs(places: list[Path]) -> list[Path]:
    """The runs in these directories, or the directories themselves, sorted by name."""
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place} is not a directory. Name a run, or a directory of runs.")
        for path in _below(place, DEPTH):
            found.setdefault(path)
    return list(found)


def listed(path: Path) -> Listed:
    """One run. A run that cannot be read is listed as broken, with the error."""
    try:
        return _listed(path)
    except UserError as problem:
        return Listed(path, "broken", problem=str(problem))


def none_ended(directory: Path) -> UserError:
    """The error for a comparison without results."""
    again = f"fedveil compare --resume {shlex.quote(str(directory))}"
    return UserError(f"No run of {directory} has ended yet. Resume it with `{again}`.")


def remove_run(path: Path) -> list[str]:
    """Delete the files of a run, and its directory if it is then empty.

    Return the names of the files that are left, which the run did not write.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link. Remove the run that it points to.")
    directory = RunDirectory.open(path)
    directory.claim()
    with contextlib.closing(_Releasing(directory)), saving(path):
        for file in _own(path):
            file.unlink()
        left = sorted(file.name for file in path.iterdir())
        if not left:
            path.rmdir()
    return left


class _Releasing:
    """An adapter, so that `closing` releases a directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self.close = directory.release


def _own(path: Path) -> Iterator[Path]:
    """The files of a run, the recipe last: after an interrupted removal it is still a run."""
    others = [name for name in FILES if name != RECIPE]
    files = [path / name for name in others]
    files += [file for pattern in PATTERNS for file in path.glob(pattern)]
    for file in [*files, path / RECIPE]:
        if file.is_file() and not file.is_symlink():
            yield file


def _below(place: Path, depth: int) -> Iterator[Path]:
    if (place / RECIPE).is_file():
        yield place
    elif depth:
        for path in sorted(place.iterdir()):
            if path.is_dir() and not path.is_symlink() and path.name != HIDDEN:
                yield from _below(path, depth - 1)


def _listed(path: Path) -> Listed:
    run = SavedRun.open(path)
    plain = run.settings
    with reading(run.file(RECIPE)):
        recipe, planned = plain["recipe"], int(plain["rounds"])
        data = plain.get("data", {})
        facts: dict[str, Any] = {
            "algorithm": str(recipe["name"]),
            "data": str(data.get("dataset") or Path(data.get("path", "")).name),
            "planned": planned,
            "delta": plain.get("delta"),
            "view": str(recipe.get("view", "models")),
            "private": class_of(recipe.get("noise", {}), NoNoise).private,
            "leaks": class_of(recipe.get("bound", {}), Unbounded).leaks,
            "seed": int(plain.get("seed", 0)),
            "noisy": recipe.get("evaluation") is not None,
        }
    return _ended(run, facts) if run.ended else _unfinished(run, facts)


def _ended(run: SavedRun, facts: dict[str, Any]) -> Listed:
    """A run that has written its summary."""
    summary = run.summary
    with reading(run.file(SUMMARY)):
        privacy = summary["privacy"]
        guarantee = privacy["views"][privacy["view"]]
        facts |= {
            "algorithm": summary["algorithm"],
            "data": summary["data"],
            "view": privacy["view"],
            "accuracy": summary["accuracy"],
            "loss": summary["loss"],
            "delta": privacy["delta"],
        }
        facts |= {"adjacency": guarantee["adjacency"], "unit": guarantee["unit"]}
        facts |= {"leaks": facts["leaks"] or "Leak" in privacy.get("statement", {})}
        facts |= {"origin": Origin.from_plain(privacy.get("origin"))}
        facts |= _metrics(summary.get("evaluation"))
        rounds = int(summary["rounds"])
        epsilon = guarantee["epsilon"] if facts["private"] else None
    if rounds:
        run.refuse_damaged()
    early = bool(summary.get("stopped_early", False))
    state: State = "finished" if early or rounds >= facts["planned"] else "stopped"
    # Versions before 0.2 stated the ε of the rounds run, which is not valid for a stopped run.
    untold = state == "stopped" and privacy.get("course") is None
    spent = None if untold else epsilon
    return Listed(run.path, state, rounds=rounds, epsilon=spent, untold=untold, **facts)


def _metrics(evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
    """The main metric and all others; nothing for a run of an earlier version."""
    if evaluation is None:
        return {}
    return {
        "metric": str(evaluation["metric"]),
        "metrics": {str(m["name"]): dict(m) for m in evaluation["metrics"]},
    }


def _unfinished(run: SavedRun, facts: dict[str, Any]) -> Listed:
    """A run that was stopped before it wrote a summary: its last evaluated round is listed.

    Its ε is that of all planned rounds, because the time of stopping may depend on the results.
    Rounds that were drawn after the checkpoint count as lost, and the ledger knows how many.
    """
    rounds, rows = run.rounds, run.rows
    evaluated = [row for row in rows[:rounds] if row.get("loss") is not None]
    last = evaluated[-1] if evaluated else {}
    accuracy, planned = last.get("accuracy"), last.get("epsilon_planned")
    lost = None if planned is None else _with_lost_rounds(run, facts["view"], planned)
    epsilon = planned if lost is None else lost
    return Listed(
        run.path,
        "stopped",
        rounds=rounds,
        accuracy=None if accuracy is None or math.isnan(accuracy) else accuracy,
        loss=last.get("loss"),
        epsilon=None if epsilon is None or math.isinf(epsilon) else epsilon,
        untold=epsilon is None,
        at_least=planned is not None and lost is None,
        origin=PENDING,
        **facts,
    )


def _with_lost_rounds(run: SavedRun, view: View, planned: float) -> float | None:
    """The ε that a run would state if it were resumed; None without the ledger that records it."""
    try:
        trace = run.trace
        if trace is None:
            return None
        with traced(trace) as ledger:
            return resumed_epsilon(
                ledger, trace["run"], view, run.rounds, run.settings.get("epsilon"), planned
            )
    except UserError:
        return None
