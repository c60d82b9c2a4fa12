"""Reproduce an item: choose settings on held-out examples, train all seeds, measure every run.

Every run is an ordinary one in a directory of its own. Killed in the middle, the next call keeps
what is finished and resumes what is not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.comparing.members import plain_settings
from fedveil.comparing.worker import deciding_data, load_once, train_task
from fedveil.errors import UserError
from fedveil.reproducing.item import Arm, Item
from fedveil.reproducing.measures import curve, measured
from fedveil.runs.listing import listed
from fedveil.runs.saved import RECIPE, SavedRun
from fedveil.training.settings import Settings, read_run

HELD_OUT = 0.1  # of the training examples, to choose settings
CPU = "cpu.json"
DEFAULTED = ("delta", "evaluate_every")  # which a run writes out if they are not set
Say = Callable[[str], None]


@dataclass(frozen=True)
class Attempt:
    """One run of an arm: its settings, and the value that was measured."""

    arm: str
    parameters: Mapping[str, Any]
    seed: int
    path: Path
    value: float = float("nan")


@dataclass(frozen=True)
class ArmResult:
    """An arm at the settings that were chosen."""

    arm: Arm
    settings: Settings
    attempts: tuple[Attempt, ...]

    @property
    def values(self) -> dict[int, float]:
        """Values by seed."""
        return {attempt.seed: attempt.value for attempt in self.attempts}


@dataclass(frozen=True)
class Outcome:
    """All runs of an item at a scale."""

    item: Item
    scale: str
    arms: tuple[ArmResult, ...]
    tuning: tuple[Attempt, ...]
    cpu_seconds: float
    fingerprint: str

    @property
    def values(self) -> dict[str, dict[int, float]]:
        """Values of each arm by seed."""
        return {result.arm.name: result.values for result in self.arms}


class Reproduction:
    """The runs of an item at a scale, in a directory."""

    def __init__(
        self, item: Item, scale: str, folder: Path, ledger: Path | None, say: Say = print
    ) -> None:
        self.item, self.name, self.scale = item, scale, item.scale(scale)
        self.folder = folder / (item.runs_of or item.name) / scale
        self.ledger, self.say = ledger, say
        self.tuning: list[Attempt] = []

    def run(self) -> Outcome:
        """Train what is not finished, and measure everything: first the grids, then all seeds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        chosen = [(arm, self._chosen(arm)) for arm in self.item.arms_at(self.scale)]
        arms = [self._arm(arm, settings) for arm, settings in chosen]
        first = arms[0].attempts[0].path
        return Outcome(
            self.item,
            self.name,
            tuple(arms),
            tuple(self.tuning),
            self._seconds([*self.tuning, *(one for arm in arms for one in arm.attempts)]),
            str(SavedRun.open(first).summary["fingerprint"]),
        )

    def _arm(self, arm: Arm, settings: Settings) -> ArmResult:
        attempts = [
            self._attempt(arm, settings, seed, self.folder / "final") for seed in self.scale.seeds
        ]
        return ArmResult(arm, settings, tuple(attempts))

    def _chosen(self, arm: Arm) -> Settings:
        """The best point of the arm's grid on held-out training examples, mean over its seeds."""
        points = self.item.points(arm, self.scale)
        if len(points) == 1:
            return points[0]
        means = []
        for point in points:
            held = point.data.model_copy(update={"held_out": HELD_OUT})
            tuned = point.model_copy(update={"data": held})
            found = [
                self._attempt(arm, tuned, seed, self.folder / "tuning")
                for seed in self.scale.tuning_seeds
            ]
            self.tuning += found
            means.append(float(np.mean([attempt.value for attempt in found])))
        sign = -1.0 if self.item.better == "lower" else 1.0
        return points[int(np.argmax(np.nan_to_num(sign * np.array(means), nan=-np.inf)))]

    def _attempt(self, arm: Arm, settings: Settings, seed: int, folder: Path) -> Attempt:
        own = settings.model_copy(update={"seed": seed, **self._data(settings, seed)})
        attempt = Attempt(
            arm.name, dict(own.parameters), seed, folder / f"{_label(arm, own)}-s{seed}"
        )
        data = load_once(deciding_data(own))
        self._train(own, attempt.path)
        value = measured(self.item.measure, attempt.path, data)
        self.say(f"{self.item.name} {folder.name} {attempt.path.name}: {value:.5g}")
        return replace(attempt, value=value)

    def _data(self, settings: Settings, seed: int) -> dict[str, Any]:
        """The data of a seed, where each seed draws its own problem."""
        if not self.item.problem_per_seed:
            return {}
        return {"data": settings.data.model_copy(update={"seed": seed})}

    def _train(self, settings: Settings, path: Path) -> None:
        """Train or resume a run in this process; its CPU time is added up over interruptions."""
        _refuse_other_settings(settings, path)
        if path.is_dir() and listed(path).state == "finished":
            return
        answers: list[Mapping[str, Any]] = []
        ledger = None if self.ledger is None else str(self.ledger)
        task = {"settings": plain_settings(settings), "path": str(path), "ledger": ledger}
        before = time.process_time()
        goes_on = train_task(task, answers.append)
        self._add_cpu(path.name, time.process_time() - before)
        if "problem" in answers[-1]:
            raise UserError(f"{path.name} of {self.item.name}: {answers[-1]['problem']}")
        if not goes_on:
            raise KeyboardInterrupt

    def _seconds(self, attempts: Iterable[Attempt]) -> float:
        """CPU time of these runs; other items may have runs of their own in the same folder."""
        known = self._cpu()
        return sum(known[name] for name in {attempt.path.name for attempt in attempts})

    def _cpu(self) -> dict[str, float]:
        file = self.folder / CPU
        found: dict[str, float] = json.loads(file.read_text()) if file.is_file() else {}
        return found

    def _add_cpu(self, name: str, seconds: float) -> None:
        known = self._cpu()
        known[name] = round(known.get(name, 0.0) + seconds, 2)
        (self.folder / CPU).write_text(json.dumps(known, indent=1))


def _refuse_other_settings(settings: Settings, path: Path) -> None:
    """A run that was trained before the item changed is not one of this item's."""
    run = SavedRun(path)
    if not run.has(RECIPE):
        return
    added = {"recipe", "fedveil"} | {name for name in DEFAULTED if getattr(settings, name) is None}
    known, asked = (
        one.model_dump(mode="json", exclude=added) for one in (read_run(run.file(RECIPE)), settings)
    )
    if known != asked:
        changed = ", ".join(name for name in asked if known[name] != asked[name])
        raise UserError(
            f"{path} was trained with other settings than the item has now ({changed}). Remove it, "
            "or pass another --out."
        )


def _label(arm: Arm, settings: Settings) -> str:
    """The arm and the parameters that its grid varies, as a directory name."""
    varied = (f"{n}={settings.parameters[n]}" for n in arm.grid if n in settings.parameters)
    return "-".join([arm.name, *varied]).replace("/", "_")[:150]


def curves(results: Iterable[ArmResult]) -> dict[str, list[tuple[int, float]]]:
    """The curve of the first seed of each arm."""
    return {result.arm.name: curve(result.attempts[0].path) for result in results}
