"""Results of a comparison: mean ± standard error, the best member, significant differences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.comparing.costs import Cost
from fedveil.comparing.members import Comparison, Member, is_private
from fedveil.data.origin import REAL, Origin
from fedveil.errors import UserError
from fedveil.runs.listing import Listed, listed

FILE = "comparison.json"
LEVEL = 0.05
LEAST_SEEDS = 3  # of a test: the t quantile of two is 12.7 standard errors


@dataclass(frozen=True)
class Measure:
    """The metric that members are compared by."""

    name: str
    higher_is_better: bool = True
    share: bool = True  # whether it lies between 0 and 1

    def __str__(self) -> str:
        return self.name

    @property
    def sign(self) -> int:
        """1 if higher is better, else −1."""
        return 1 if self.higher_is_better else -1

    @property
    def worst(self) -> float:
        """The value of a run that diverged."""
        return 0.0 if self.share and self.higher_is_better else -self.sign * math.inf


ACCURACY, LOSS = Measure("accuracy"), Measure("loss", higher_is_better=False, share=False)


def measure_of(runs: Sequence[Listed], asked: str | None = None) -> Measure:
    """The metric that was asked for, the main metric that all runs share, or accuracy or loss."""
    mains = {run.metric for run in runs if run.metric}
    name = (asked or "").rpartition(":")[2] or (mains.pop() if len(mains) == 1 else "accuracy")
    if name == "accuracy" and runs and all(run.accuracy is None for run in runs):
        name = "loss"
    if name in ("accuracy", "loss"):
        return ACCURACY if name == "accuracy" else LOSS
    for run in runs:
        if name not in run.metrics:
            known = ", ".join(run.metrics) or "accuracy or loss"
            raise UserError(
                f"{run.path} did not measure '{name}'. Compare by {known}, or train it again with "
                f"--metric {name}."
            )
    if not runs:
        return Measure(name)
    facts = runs[0].metrics[name]
    return Measure(name, bool(facts["higher_is_better"]), bool(facts["share"]))


@dataclass(frozen=True)
class MemberResult:
    """One member over its seeds; `significant` refers to its difference from the best."""

    label: str
    algorithm: str
    parameters: Mapping[str, Any]
    runs: tuple[str, ...] = ()  # finished ones
    seeds: tuple[int, ...] = ()
    accuracy: tuple[float | None, ...] = ()
    loss: tuple[float | None, ...] = ()
    scores: tuple[float | None, ...] = ()  # of the measure, if it is neither of these
    mean: float | None = None
    standard_error: float | None = None
    epsilon: float | None = None  # maximum over its runs
    adjacency: str = ""  # of ε
    unit: str = ""
    origin: Origin = REAL  # whether its clients are real, and what ε does not cover
    noisy: bool = False  # whether its scores are of private evaluations
    private: bool = True  # False: a baseline without noise, which is not ranked
    best: bool = False
    p: float | None = None  # against the best, corrected
    significant: bool | None = None

    def values(self, measure: Measure) -> dict[int, float]:
        """Values by seed; a run that diverged counts as the worst possible value."""
        known = {"accuracy": self.accuracy, "loss": self.loss}
        pairs = zip(self.seeds, known.get(measure.name, self.scores), strict=True)
        return {seed: measure.worst if value is None else value for seed, value in pairs}


def member_results(comparison: Comparison, directory: Path) -> tuple[list[MemberResult], Measure]:
    """The result of every member from its runs on disk, and the measure they are compared by."""
    finished = [_finished(m, comparison.seeds, directory) for m in comparison.members]
    measure = measure_of([run for runs in finished for _, run in runs])
    pairs = zip(comparison.members, finished, strict=True)
    found = [averaged(_gathered(member, runs, measure), measure) for member, runs in pairs]
    return judged(found, measure), measure


def judged(found: Sequence[MemberResult], measure: Measure) -> list[MemberResult]:
    """Mark the best mean, and test every other member against it.

    Beside private members, one that is not private is a baseline: neither best nor tested. The
    test is a two-sided paired t-test over common seeds, with Holm's correction for several
    members. With fewer than three common seeds there is no test.
    """
    contest = [s for s in found if s.private] or list(found)
    ranked = [s for s in contest if s.mean is not None and math.isfinite(s.mean)]
    if not ranked:
        return list(found)
    top = max(ranked, key=lambda s: measure.sign * (s.mean or 0.0))
    best = top.values(measure)
    raw = {s.label: paired(best, s.values(measure)) for s in contest if s is not top}
    known = holm({label: p for label, p in raw.items() if p is not None})
    return [
        replace(s, best=s is top, p=known.get(s.label), significant=_mark(known.get(s.label)))
        for s in found
    ]


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """P(|T| ≥ |t|), t = mean(d)/(s_d/√n), d over common seeds, T Student's with n − 1 degrees.

    >>> paired({0: 3.0, 1: 4.0}, {0: 1.0, 1: 2.0}) is None
    True
    >>> round(paired({0: 3.0, 1: 5.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0}), 4)
    0.0742
    """
    from scipy.special import stdtr

    common = [seed for seed in one if seed in other]
    if len(common) < LEAST_SEEDS:
        return None
    d = np.array([one[seed] - other[seed] for seed in common])
    if not np.isfinite(d).all():
        return None
    error = d.std(ddof=1) / math.sqrt(len(d))
    if error == 0:
        return 1.0 if d[0] == 0 else 0.0
    return float(2 * stdtr(len(d) - 1, -abs(d.mean() / error)))


def holm(raw: Mapping[str, float]) -> dict[str, float]:
    """Holm-corrected p-values: the i-th smallest of m times m − i + 1, made monotone.

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
    found: Sequence[MemberResult],
    measure: Measure,
    cost: Cost,
    selection: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """comparison.json."""
    first = comparison.reference.settings
    together = dict(cost) if isinstance(cost, Mapping) else None
    known = (together or selection or {}).get("delta")
    budget = None if first.epsilon is None else [first.epsilon, first.delta or known]
    return {
        "members": [_member(result) for result in found],
        "varied": list(comparison.varied),
        "rounds": max(member.settings.rounds for member in comparison.members),
        "budget": budget,
        "view": _view(comparison.reference),
        "selection": None if selection is None else dict(selection),
        "seeds": list(comparison.seeds),
        "measure": measure.name,
        "higher_is_better": measure.higher_is_better,
        "together": together,
        "test": f"paired t test over seeds against the best, two-sided, Holm, level {LEVEL}",
    }


def save(directory: Path, found: Mapping[str, Any]) -> None:
    """Write comparison.json atomically."""
    text = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write(directory / FILE, text)


def write(file: Path, text: str) -> None:
    """Write a file atomically: to a temporary file, which then replaces it."""
    from fedveil.runs.directory import saving

    with saving(file.parent):
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)


def _finished(member: Member, seeds: Sequence[int], directory: Path) -> list[tuple[int, Listed]]:
    """The finished runs of a member, by seed."""
    finished: list[tuple[int, Listed]] = []
    for seed in seeds:
        path = directory / member.directory(seed)
        if path.is_dir() and (run := listed(path)).state == "finished":
            finished.append((seed, run))
    return finished


def _gathered(
    member: Member, finished: Sequence[tuple[int, Listed]], measure: Measure
) -> MemberResult:
    spent = [run.epsilon for _, run in finished if run.epsilon is not None]
    return MemberResult(
        member.label,
        finished[0][1].algorithm if finished else member.settings.algorithm,
        dict(member.parameters),
        tuple(run.path.name for _, run in finished),
        tuple(seed for seed, _ in finished),
        tuple(run.accuracy for _, run in finished),
        tuple(run.loss for _, run in finished),
        tuple(run.score(measure.name) for _, run in finished),
        epsilon=max(spent, default=None),
        adjacency=finished[0][1].adjacency if finished else "",
        unit=finished[0][1].unit if finished else "",
        origin=finished[0][1].origin if finished else REAL,
        noisy=any(run.noisy for _, run in finished),
        private=is_private(member),
    )


def averaged(result: MemberResult, measure: Measure) -> MemberResult:
    """The result with mean and standard error, if all its values are finite."""
    values = np.array(list(result.values(measure).values()))
    if not len(values) or not np.isfinite(values).all():
        return result
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return replace(result, mean=float(values.mean()), standard_error=error)


def _mark(p: float | None) -> bool | None:
    return None if p is None else p < LEVEL


def _member(result: MemberResult) -> dict[str, Any]:
    values = asdict(result)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _view(member: Member) -> str:
    from fedveil.training.settings import resolve_recipe

    return resolve_recipe(member.settings).view
