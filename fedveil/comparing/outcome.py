"""What a comparison came to: mean ± standard error, the best, and who is significantly worse."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedveil.comparing.members import Comparison, Member
from fedveil.data.origin import REAL, Origin
from fedveil.runs.listing import Listed, listed

FILE = "comparison.json"
LEVEL = 0.05
Measure = Literal["accuracy", "loss"]


@dataclass(frozen=True)
class Standing:
    """One member over its seeds; `significant` is about its difference from the best."""

    label: str
    algorithm: str
    parameters: Mapping[str, Any]
    runs: tuple[str, ...] = ()  # those that are finished
    seeds: tuple[int, ...] = ()
    accuracy: tuple[float | None, ...] = ()
    loss: tuple[float | None, ...] = ()
    mean: float | None = None
    standard_error: float | None = None
    epsilon: float | None = None  # the largest of its runs
    adjacency: str = ""  # the neighbours that ε is about
    unit: str = ""
    origin: Origin = REAL  # whether its clients are real, and what its ε leaves out
    best: bool = False
    p: float | None = None  # against the best, corrected
    significant: bool | None = None

    def values(self, measure: Measure) -> dict[int, float]:
        """By seed; a run without a number, one that diverged, counts as the worst there is."""
        worst = 0.0 if measure == "accuracy" else math.inf
        found = self.accuracy if measure == "accuracy" else self.loss
        pairs = zip(self.seeds, found, strict=True)
        return {seed: worst if value is None else value for seed, value in pairs}


def standings(comparison: Comparison, directory: Path) -> tuple[list[Standing], Measure]:
    """Every member from its runs on disk, and by what they are compared."""
    found = [_gathered(member, comparison.seeds, directory) for member in comparison.members]
    scores = [score for standing in found for score in standing.accuracy]
    known = not scores or any(score is not None for score in scores)
    measure: Measure = "accuracy" if known else "loss"
    return judged([averaged(standing, measure) for standing in found], measure), measure


def judged(found: Sequence[Standing], measure: Measure) -> list[Standing]:
    """The best mean, and a paired t test of every other member against it.

    Over the seeds both have, two-sided, corrected for their number by Holm's method; with fewer
    than two common seeds there is no test.
    """
    sign = 1 if measure == "accuracy" else -1
    ranked = [s for s in found if s.mean is not None and math.isfinite(s.mean)]
    if not ranked:
        return list(found)
    top = max(ranked, key=lambda s: sign * (s.mean or 0.0))
    best = top.values(measure)
    raw = {s.label: paired(best, s.values(measure)) for s in found if s is not top}
    known = holm({label: p for label, p in raw.items() if p is not None})
    return [
        replace(s, best=s is top, p=known.get(s.label), significant=_mark(known.get(s.label)))
        for s in found
    ]


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """P(|T| ≥ |t|), t = mean(d)/(s_d/√n), T Student's with n − 1 degrees, d over common seeds.

    >>> paired({0: 3.0, 1: 4.0}, {0: 1.0}) is None
    True
    >>> round(paired({0: 3.0, 1: 5.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0}), 4)
    0.0742
    """
    from scipy.special import stdtr

    common = [seed for seed in one if seed in other]
    if len(common) < 2:
        return None
    d = np.array([one[seed] - other[seed] for seed in common])
    if not np.isfinite(d).all():
        return None
    error = d.std(ddof=1) / math.sqrt(len(d))
    if error == 0:
        return 1.0 if d[0] == 0 else 0.0
    return float(2 * stdtr(len(d) - 1, -abs(d.mean() / error)))


def holm(raw: Mapping[str, float]) -> dict[str, float]:
    """p-values that may all be looked at: the i-th smallest of m times m − i + 1, never falling.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, label in enumerate(sorted(raw, key=raw.__getitem__)):
        largest = max(largest, min(1.0, (len(raw) - place) * raw[label]))
        corrected[label] = largest
    return corrected


def plain(
    comparison: Comparison,
    found: Sequence[Standing],
    measure: Measure,
    cost: Mapping[str, Any] | None,
    selection: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """comparison.json."""
    first = comparison.members[0].settings
    known = (cost or selection or {}).get("delta")
    budget = None if first.epsilon is None else [first.epsilon, first.delta or known]
    return {
        "members": [_member(standing) for standing in found],
        "varied": list(comparison.varied),
        "rounds": max(member.settings.rounds for member in comparison.members),
        "budget": budget,
        "view": _view(comparison.members[0]),
        "selection": None if selection is None else dict(selection),
        "seeds": list(comparison.seeds),
        "measure": measure,
        "together": None if cost is None else dict(cost),
        "test": f"paired t test over seeds against the best, two-sided, Holm, level {LEVEL}",
    }


def save(directory: Path, found: Mapping[str, Any]) -> None:
    """comparison.json, written beside its place and moved there when complete."""
    text = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write(directory / FILE, text)


def write(file: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    from fedveil.runs.directory import saving

    with saving(file.parent):
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)


def _gathered(member: Member, seeds: Sequence[int], directory: Path) -> Standing:
    finished: list[tuple[int, Listed]] = []
    for seed in seeds:
        path = directory / member.directory(seed)
        if path.is_dir() and (run := listed(path)).state == "finished":
            finished.append((seed, run))
    spent = [run.epsilon for _, run in finished if run.epsilon is not None]
    return Standing(
        member.label,
        finished[0][1].algorithm if finished else member.settings.algorithm,
        dict(member.parameters),
        tuple(run.path.name for _, run in finished),
        tuple(seed for seed, _ in finished),
        tuple(run.accuracy for _, run in finished),
        tuple(run.loss for _, run in finished),
        epsilon=max(spent, default=None),
        adjacency=finished[0][1].adjacency if finished else "",
        unit=finished[0][1].unit if finished else "",
        origin=finished[0][1].origin if finished else REAL,
    )


def averaged(standing: Standing, measure: Measure) -> Standing:
    """With mean and standard error; without, where a run has no finite number."""
    values = np.array(list(standing.values(measure).values()))
    if not len(values) or not np.isfinite(values).all():
        return standing
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return replace(standing, mean=float(values.mean()), standard_error=error)


def _mark(p: float | None) -> bool | None:
    return None if p is None else p < LEVEL


def _member(standing: Standing) -> dict[str, Any]:
    values = asdict(standing)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _view(member: Member) -> str:
    from fedveil.settings import resolve_recipe

    return resolve_recipe(member.settings).view
