"""Runs and comparisons as they were saved, read for a report; what cannot be told is refused."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.accounting.rounding import rounded_up, short
from fedveil.comparing.outcome import ACCURACY, LEAST_SEEDS, LOSS, Measure
from fedveil.data.origin import Origin
from fedveil.errors import UserError
from fedveil.parts.bound import Bound, Normalize, SmoothNormalize
from fedveil.reporting.chart import shortened
from fedveil.runs.listing import none_ended
from fedveil.runs.saved import CLIENTS, EVALUATION, METRICS, SUMMARY, SavedRun, lost, reading
from fedveil.serialization.codec import recipe_from_plain
from fedveil.training.scoring import Evaluation

COMPARISON = "comparison.json"
MOST_LETTERS = 100  # of a label
Floats = np.ndarray


@dataclass(frozen=True, eq=False)
class Run:
    """One run's directory, read."""

    path: Path
    toml: str  # recipe.toml as it stands there
    settings: dict[str, Any]
    summary: dict[str, Any]
    columns: dict[str, Floats]  # of metrics.parquet, as floats with NaN for null
    evaluation: dict[str, Any] | None

    @property
    def seed(self) -> int:
        """Of its random streams."""
        return int(self.summary["seed"])

    @property
    def private(self) -> bool:
        """Whether it has a finite ε towards the view it is for."""
        return self.guarantee["epsilon"] is not None

    @property
    def scores(self) -> Evaluation | None:
        """All metrics of its last model; None for a run of an earlier version."""
        known = self.summary.get("evaluation")
        return None if known is None else Evaluation.from_plain(known)

    def score(self, name: str) -> float | None:
        """The value of a metric at the end; None where it was not measured."""
        if name in ("accuracy", "loss"):
            return self.summary.get(name)
        found = {} if self.scores is None else {m.name: m.value for m in self.scores.metrics}
        return found.get(name)

    @property
    def guarantee(self) -> dict[str, Any]:
        """Towards the view it is for."""
        privacy = self.summary["privacy"]
        found: dict[str, Any] = privacy["views"][privacy["view"]]
        return found

    @property
    def origin(self) -> Origin:
        """Whether its clients are real, and what its ε leaves out."""
        return Origin.from_plain(self.summary["privacy"].get("origin"))

    @property
    def bound(self) -> float | None:
        """The C beyond which updates were shortened, where the recipe fixes one and says so."""
        bound = self._bound
        return None if bound is None or bound.adapts else bound.threshold

    @property
    def normalizes(self) -> bool:
        """Whether the bound changes every update."""
        return isinstance(self._bound, Normalize | SmoothNormalize)

    @property
    def _bound(self) -> Bound | None:
        try:
            return recipe_from_plain(self.settings.get("recipe", {})).bound
        except UserError:  # of a part whose module is gone
            return None

    @property
    def budget(self) -> float | None:
        """The ε that was asked for all rounds together, if one was."""
        selected = "selection" in self.summary  # which cost more than was asked for one run
        apart = selected or self.settings.get("per_round")
        asked = None if apart else self.settings.get("epsilon")
        return float(asked) if isinstance(asked, int | float) else None

    def series(self, name: str) -> Floats | None:
        """A column of the metrics; None where nothing of it was recorded."""
        found = self.columns.get(name)
        return None if found is None or not np.isfinite(found).any() else found

    def clients(self) -> Any:
        """clients.parquet as a data frame; None without one."""
        saved = SavedRun(self.path)
        frame = saved.clients()
        if frame is None:
            return None
        with reading(saved.file(CLIENTS)):
            return frame.select("round", "client", "norm", "scale", "cosine")


def _spent(guarantee: dict[str, Any]) -> float:
    return math.inf if guarantee["epsilon"] is None else float(guarantee["epsilon"])


@dataclass(frozen=True, eq=False)
class ReportMember:
    """Runs that differ in their seed only."""

    label: str
    parameters: dict[str, Any]  # those in which members differ
    runs: tuple[Run, ...]
    tested: tuple[bool, float] | None = None  # worse than the best, and p, where it was tested
    measure: Measure = ACCURACY  # that members are ranked by

    @property
    def first(self) -> Run:
        """The one that speaks for all where their seeds do not matter."""
        return self.runs[0]

    @property
    def costliest(self) -> Run:
        """The one that has spent most: a guarantee for all of them is its guarantee."""
        return max(self.runs, key=lambda run: _spent(run.guarantee))

    def results(self, name: str = "") -> list[float]:
        """A metric at the end, by default the measure, one of each run that has it."""
        found = [run.score(name or self.measure.name) for run in self.runs]
        return [float(v) for v in found if v is not None and math.isfinite(v)]


@dataclass(frozen=True, eq=False)
class Story:
    """What one report tells of."""

    members: tuple[ReportMember, ...]
    selection: dict[str, Any] | None = None  # how a comparison's best was chosen
    together: dict[str, Any] | None = None  # what all its private runs cost

    @property
    def alone(self) -> ReportMember | None:
        """The member, where there is one only."""
        return self.members[0] if len(self.members) == 1 else None

    @property
    def measure(self) -> Measure:
        """The metric that its members are ranked by."""
        return self.members[0].measure

    @property
    def varied(self) -> list[str]:
        """The names of what members differ in."""
        return list(dict.fromkeys(name for m in self.members for name in m.parameters))


def load_story(paths: Sequence[Path]) -> Story:
    """Runs' and comparisons' directories; those of different data or budgets are refused."""
    members: list[ReportMember] = []
    loose: list[Run] = []
    selection, together = None, None
    for path in paths:
        if (path / COMPARISON).is_file():
            found, selection, together = _comparison(path)
            members += found
        elif (path / "comparison.toml").is_file():
            raise none_ended(path)
        else:
            loose.append(load_run(path))
    members += _grouped(loose)
    refuse_unequal([run for member in members for run in member.runs])
    if len(paths) > 1:  # what was found out of one comparison does not hold for several
        members, together = [replace(member, tested=None) for member in members], None
    measure = measure_of([run for member in members for run in member.runs])
    told = [replace(member, measure=measure) for member in _readable(_shorter(members))]
    return Story(tuple(told), selection, together)


def measure_of(runs: Sequence[Run]) -> Measure:
    """The main metric that all runs share, or accuracy, or the loss where there is none."""
    known = [run.scores.main for run in runs if run.scores is not None]
    if len(known) == len(runs) and len({m.name for m in known}) == 1:
        return Measure(known[0].name, known[0].higher_is_better, known[0].share)
    return ACCURACY if any(run.summary.get("accuracy") is not None for run in runs) else LOSS


def _readable(members: Sequence[ReportMember]) -> list[ReportMember]:
    """Labels without signs that turn the writing around, and none longer than two lines."""
    plain = [
        "".join(c for c in member.label if unicodedata.category(c) not in ("Cc", "Cf"))
        for member in members
    ]
    short = shortened(plain, MOST_LETTERS)
    return [replace(m, label=label) for m, label in zip(members, short, strict=True)]


def _shorter(members: Sequence[ReportMember]) -> list[ReportMember]:
    """`steps 5, rate 0.1` is enough of a label where all members are of one algorithm."""
    told = [", ".join(_settings(member.parameters)) for member in members]
    kinds = {str(member.first.summary["algorithm"]) for member in members}
    if len(members) == 1 or len(kinds) > 1 or not all(told) or len(set(told)) < len(members):
        return list(members)
    return [replace(m, label=label) for m, label in zip(members, told, strict=True)]


def _settings(parameters: dict[str, Any]) -> Iterator[str]:
    for name, value in parameters.items():
        if not isinstance(value, dict | list):
            yield f"{name.replace('_', ' ')} {value}"


def load_run(path: Path) -> Run:
    """One run; refused when it is not one, is half-written, newer than this, or has no rounds."""
    if not path.exists():
        raise UserError(f"{path} does not exist. Name the directory of a run or of a comparison.")
    saved = SavedRun.open(path)
    settings, summary = saved.settings, saved.summary
    with reading(saved.file(SUMMARY)):
        played = int(summary["rounds"])
        for name in ("algorithm", "data", "seed", "rounds_planned", "bytes_sent"):
            summary[name]
        for view in summary["privacy"]["views"].values():
            view["epsilon"], view["delta"], view["adjacency"], view["unit"]
        if summary.get("evaluation") is not None:
            Evaluation.from_plain(summary["evaluation"]).main  # noqa: B018
        summary["privacy"]["statement"].items()
        _mark_stopped(path, summary)
    if played < 1:
        raise UserError(
            f"{path} has completed no rounds, so there is nothing to report. Resume it with "
            f"`fedveil train --resume {path}`."
        )
    return Run(path, saved.toml, settings, summary, _columns(saved), _evaluation(saved))


def _mark_stopped(path: Path, summary: dict[str, Any]) -> None:
    """Versions before 0.2 stated the ε of the rounds run, which a choice to stop does not keep."""
    privacy = summary["privacy"]
    if privacy.get("course") is None and summary["rounds"] < summary["rounds_planned"]:
        for view in privacy["views"].values():
            view["sentence"] = (
                f"This ε is that of the rounds run, not of the planned rounds. `fedveil privacy "
                f"{path}` reports the ε that holds. {view['sentence']}"
            )


def _columns(saved: SavedRun) -> dict[str, Floats]:
    import polars
    from polars import selectors

    file, frame = saved.file(METRICS), saved.metrics
    if frame is None:
        raise lost(file)
    with reading(file):
        numeric = frame.select(selectors.numeric() | selectors.boolean())
        cast = numeric.cast(polars.Float64).fill_null(float("nan"))
        found = {name: cast[name].to_numpy() for name in cast.columns}
        found["round"], found["sent"], found["participants"]
    if not len(frame):
        raise UserError(f"{file} has no rounds, so there is nothing to report. Start a new run.")
    return found


def _evaluation(saved: SavedRun) -> dict[str, Any] | None:
    found = saved.evaluation
    if found is None:
        return None
    with reading(saved.file(EVALUATION)):
        table, served = found["confusion"], found["client_accuracy"]
        names = [str(name) for name in found["classes"]]
        if table is not None and np.asarray(table, dtype=np.int64).shape != (len(names),) * 2:
            raise ValueError("the confusion is not a square of the classes")
        if served is not None and len(served["examples"]) != len(served["accuracy"]):
            raise ValueError("the numbers of clients and of their accuracies differ")
        return {**found, "classes": names}


def _comparison(
    path: Path,
) -> tuple[list[ReportMember], dict[str, Any] | None, dict[str, Any] | None]:
    """Its members, how one was selected, and what all of them cost."""
    with reading(path / COMPARISON):
        found = json.loads((path / COMPARISON).read_text(encoding="utf-8"))
        listed = [
            (str(m["label"]), dict(m["parameters"]), list(m["runs"]), _tested(m))
            for m in found["members"]
        ]
        selection, together = found.get("selection"), found.get("together")
        if together is not None:
            float(together["epsilon"] or 0.0), float(together["delta"]), int(together["runs"])
        if not listed and selection is None:
            raise ValueError("it names no runs")
    members = [
        ReportMember(
            label, parameters, tuple(load_run(path / _inside(path, r)) for r in runs), tested
        )
        for label, parameters, runs, tested in listed
        if runs
    ]
    if not listed:
        raise UserError(
            f"{path} selected no run, so there is nothing to report. Start a new comparison."
        )
    if not members:
        raise none_ended(path)
    return members, selection, together


def _tested(member: dict[str, Any]) -> tuple[bool, float] | None:
    """Its test, unless two seeds are all there is: their p-values say nothing."""
    if member.get("significant") is None or member.get("p") is None:
        return None
    if len(member["runs"]) < LEAST_SEEDS:
        return None
    return bool(member["significant"]), float(member["p"])


def _inside(path: Path, run: str) -> str:
    if Path(run).is_absolute() or ".." in Path(run).parts:
        raise UserError(
            f"{path / COMPARISON} lists the run '{run}', which is outside of {path}. Correct it."
        )
    return run


def _grouped(runs: Sequence[Run]) -> list[ReportMember]:
    """Runs that say the same but for their seed become one member each."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_told(run), sort_keys=True, default=str), []).append(run)
    flat = [dict(_flat(_told(group[0]))) for group in groups.values()]
    names = {name for facts in flat for name in facts}
    differing = [n for n in sorted(names) if len({repr(facts.get(n)) for facts in flat}) > 1]
    members = []
    for facts, group in zip(flat, groups.values(), strict=True):
        chosen = {n.removeprefix("parameters."): facts[n] for n in differing if n in facts}
        chosen.pop("algorithm", None)
        members.append(ReportMember(_label(group[0], chosen), chosen, tuple(group)))
    return _told_apart(members)


def _told(run: Run) -> dict[str, Any]:
    """The settings that make a member: what the user chose, or the whole recipe without those."""
    chosen = ("algorithm", "parameters", "model", "rounds", "noise")
    told = {name: run.settings[name] for name in chosen if name in run.settings}
    if "algorithm" in told:
        return told
    parts = run.settings.get("recipe", {})
    return {**told, "recipe": {k: v for k, v in parts.items() if k != "name"}}


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict) and name in ("parameters", "recipe"):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _label(run: Run, parameters: dict[str, Any]) -> str:
    told = ", ".join(f"{k} = {v}" for k, v in parameters.items() if not isinstance(v, dict | list))
    return f"{run.summary['algorithm']} ({told})" if told else str(run.summary["algorithm"])


def _told_apart(members: list[ReportMember]) -> list[ReportMember]:
    """Members with equal labels are called by the name of their first directory."""
    labels = [member.label for member in members]
    return [
        ReportMember(f"{m.label} – {m.first.path.name}", m.parameters, m.runs)
        if labels.count(m.label) > 1
        else m
        for m in members
    ]


def refuse_unequal(runs: Sequence[Run]) -> None:
    """Only runs on the same data and under the same budget may stand beside each other.

    One without privacy may stand beside private ones: it says what privacy costs.
    """
    for asked, what in ((_data, "data"), (_budget, "budgets")):
        known = [(run, asked(run)) for run in runs if asked(run) is not None]
        for run, facts in known[1:]:
            if facts != known[0][1]:
                raise UserError(
                    f"{known[0][0].path} and {run.path} cannot be in one report, because their "
                    f"{what} differ: {known[0][1]}, and {facts}. Report on them separately."
                )


def _data(run: Run) -> str:
    privacy = run.summary["privacy"]
    mark = str(run.summary.get("fingerprint", ""))[:12]
    counted = privacy.get("population_of", privacy["unit"])  # before 0.4, always the unit
    return f"{run.summary['data']} with {privacy['population']:,} {counted}s" + (
        f" (fingerprint {mark}…)" if mark else ""
    )


def _budget(run: Run) -> str | None:
    """What was asked for, or spent where a noise was given instead; None without privacy."""
    if not run.private:
        return None
    said = run.guarantee
    epsilon = rounded_up(said["epsilon"], 2) if run.budget is None else f"{run.budget:g}"
    return f"({epsilon}, {short(said['delta'])}) in view {said['view']}"
