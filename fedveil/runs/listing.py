"""Runs on disk, as facts: which they are, how far they came, and whether they are whole."""

from __future__ import annotations

import contextlib
import io
import math
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fedveil.data.origin import REAL, Origin
from fedveil.errors import UserError
from fedveil.runs.directory import RunDirectory, lost, reading, saving
from fedveil.runs.versions import refuse_newer

State = Literal["finished", "stopped", "broken"]
STATES: tuple[State, ...] = ("finished", "stopped", "broken")
FILES = (
    "recipe.toml", "metrics.parquet", "clients.parquet", "model.safetensors", "summary.json",
    "privacy.txt", "checkpoint.safetensors", "ledger.json", "encoder.json", "evaluation.json",
    "engine.json",
)  # fmt: skip
PATTERNS = ("memory-*.npy", ".*.partial")
PARQUET = b"PAR1"  # a Parquet file begins and ends with it
DEPTH = 2  # a comparison's runs lie one level below it
PENDING = Origin(exclusions=("what its statement names when the run has ended",))
HIDDEN = "out-of-sight"  # drawn runs of a private selection: how many they are is not to be told


@dataclass(frozen=True)
class Listed:
    """One run: what is known of it without loading its data."""

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
    adjacency: str = ""  # of ε, where the run ended
    unit: str = ""
    private: bool = False
    leaks: bool = False  # a clipping threshold taken from the data, which no ε covers
    seed: int = 0
    origin: Origin = REAL  # whether its clients are real, and what its ε leaves out
    untold: bool = False  # whether the ε of its planned rounds is told nowhere
    problem: str = ""  # what is broken

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "path": str(self.path)}


def find_runs(places: list[Path]) -> list[Path]:
    """The runs that places hold, or are, in the order of their names."""
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place} is not a directory; name a run, or a directory of runs.")
        for path in _below(place, DEPTH):
            found.setdefault(path)
    return list(found)


def listed(path: Path) -> Listed:
    """A run's facts; one that cannot be read is broken, with the sentence that says why."""
    try:
        return _listed(path)
    except UserError as problem:
        return Listed(path, "broken", problem=str(problem))


def none_ended(directory: Path) -> UserError:
    """The sentence for a comparison that has no result yet."""
    again = f"fedveil compare --resume {shlex.quote(str(directory))}"
    return UserError(f"No run of {directory} has ended yet; go on with `{again}`.")


def remove_run(path: Path) -> list[str]:
    """Delete what a run has written, and its directory if nothing else is in it.

    Gives the names of what was left, for it is not a run's.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a link; remove the run where it is.")
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
    """So that `closing` lets go of a directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self.close = directory.release


def _own(path: Path) -> Iterator[Path]:
    """The recipe last: what is left of a removal that was stopped is still known as a run."""
    others = [name for name in FILES if name != "recipe.toml"]
    files = [path / name for name in others]
    files += [file for pattern in PATTERNS for file in path.glob(pattern)]
    for file in [*files, path / "recipe.toml"]:
        if file.is_file() and not file.is_symlink():
            yield file


def _below(place: Path, depth: int) -> Iterator[Path]:
    if (place / "recipe.toml").is_file():
        yield place
    elif depth:
        for path in sorted(place.iterdir()):
            if path.is_dir() and not path.is_symlink() and path.name != HIDDEN:
                yield from _below(path, depth - 1)


def _listed(path: Path) -> Listed:
    directory = RunDirectory.open(path)
    file = path / "recipe.toml"
    with reading(file):
        plain = tomllib.loads(file.read_text(encoding="utf-8"))
        refuse_newer(file, plain.get("fedveil"))
        recipe, planned = plain["recipe"], int(plain["rounds"])
        data = plain.get("data", {})
        facts: dict[str, Any] = {
            "algorithm": str(recipe["name"]),
            "data": str(data.get("dataset") or Path(data.get("path", "")).name),
            "planned": planned,
            "delta": plain.get("delta"),
            "view": str(recipe.get("view", "models")),
            "private": recipe.get("noise", {}).get("kind", "Silent") != "Silent",
            "leaks": recipe.get("bound", {}).get("kind") == "ProbedClip",
            "seed": int(plain.get("seed", 0)),
        }
    if (path / "summary.json").is_file():
        return _ended(directory, facts)
    return _unfinished(directory, facts)


def _ended(directory: RunDirectory, facts: dict[str, Any]) -> Listed:
    """A run that wrote its summary."""
    summary = directory.load_summary()
    with reading(directory.path / "summary.json"):
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
        facts |= {"origin": Origin.from_plain(privacy.get("origin"))}
        rounds = int(summary["rounds"])
        epsilon = guarantee["epsilon"] if facts["private"] else None
    if rounds:
        _refuse_damaged(directory.path)
    state: State = "finished" if rounds >= facts["planned"] else "stopped"
    # Versions before 0.2 stated the rounds that were run, which holds for none that was stopped.
    untold = state == "stopped" and privacy.get("course") is None
    spent = None if untold else epsilon
    return Listed(directory.path, state, rounds=rounds, epsilon=spent, untold=untold, **facts)


def _refuse_damaged(path: Path) -> None:
    """What a run that ended leaves besides its summary, by its first and last bytes alone."""
    from safetensors import safe_open

    metrics, model = path / "metrics.parquet", path / "model.safetensors"
    for file in (metrics, model):
        if not file.is_file():
            raise lost(file)
    with reading(metrics), metrics.open("rb") as bytes_:
        first = bytes_.read(len(PARQUET))
        bytes_.seek(-len(PARQUET), io.SEEK_END)
        if not first == bytes_.read() == PARQUET:
            raise ValueError("it is no whole Parquet file")
    with reading(model), safe_open(model, framework="pt"):
        pass


def _unfinished(directory: RunDirectory, facts: dict[str, Any]) -> Listed:
    """A run that was stopped before it could conclude: its last evaluated round counts.

    ε is that of all planned rounds: when it was stopped may depend on what was seen.
    """
    rounds, rows = directory.rounds_played(), directory.load_metrics()
    evaluated = [row for row in rows[:rounds] if row.get("loss") is not None]
    last = evaluated[-1] if evaluated else {}
    accuracy = last.get("accuracy")
    epsilon = last.get("epsilon_planned")
    return Listed(
        directory.path,
        "stopped",
        rounds=rounds,
        accuracy=None if accuracy is None or math.isnan(accuracy) else accuracy,
        loss=last.get("loss"),
        epsilon=None if epsilon is None or math.isinf(epsilon) else epsilon,
        untold=epsilon is None,
        origin=PENDING,
        **facts,
    )
