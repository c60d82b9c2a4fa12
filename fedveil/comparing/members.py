"""What is compared: members with equal budget, data, split, view and seeds."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.accounting.rounding import short
from fedveil.comparing.linked import linked
from fedveil.errors import UserError, told, unknown
from fedveil.runs.saved import reading
from fedveil.serialization.versions import refuse_newer
from fedveil.training.settings import Settings, read_settings, refuse_unnamed_data, resolve_recipe

FILE = "comparison.toml"
VARIABLE = (
    "rounds",
    "model",
    "engine",
    "epsilon",
    "delta",
    "view",
)  # settings that a grid may vary, besides parameters
SYMBOLS = {  # symbols of papers (docs/notation.md) and the parameters they stand for
    **dict.fromkeys(("K", "E", "Q", "T"), ("steps",)),
    **dict.fromkeys(("eta", "η", "eta_l", "eta_k", "gamma", "γ", "lr"), ("learning_rate",)),
    **dict.fromkeys(("C", "c"), ("clip", "scale")),
    "clip": ("scale",),
    "scale": ("clip",),
    **dict.fromkeys(("q", "p"), ("rate",)),
    **dict.fromkeys(("r", "P", "B"), ("clients",)),
    **dict.fromkeys(("eta_g", "beta_k"), ("server_rate",)),
    "s": ("levels",),
    "α": ("alpha",),
    "β": ("beta",),
    **dict.fromkeys(("z", "σ", "sigma"), ("noise_multiplier",)),
}
MAX_RUNS = 10_000
SHARED_BY_ALL = ("the data", "the unit that is protected")  # also by members without noise
OF_PRIVATE = ("epsilon", "delta", "view", "per_round")  # flags that baselines do not take


@dataclass(frozen=True)
class Member:
    """One algorithm with its settings; its runs differ only in the seed."""

    label: str
    settings: Settings
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the varied ones

    def at(self, seed: int) -> Settings:
        """The settings of one of its runs."""
        return self.settings.model_copy(update={"seed": seed})

    def directory(self, seed: int) -> str:
        """The directory name of one of its runs."""
        return f"{self.label}-s{seed}"


@dataclass(frozen=True)
class Comparison:
    """Members and seeds."""

    members: tuple[Member, ...]
    seeds: tuple[int, ...]
    varied: tuple[str, ...] = ()
    selection: Mapping[str, Any] | None = None  # parameters of private selection, if used

    def runs(self) -> Iterator[tuple[Member, int]]:
        """All runs, seed by seed, so that an interrupted comparison has compared all members."""
        for seed in self.seeds:
            for member in self.members:
                yield member, seed

    @property
    def reference(self) -> Member:
        """The member that states budget and view: the first private one, or the first."""
        return next((member for member in self.members if is_private(member)), self.members[0])

    def paths(self, directory: Path) -> list[Path]:
        """The directories of all runs."""
        return [directory / member.directory(seed) for member, seed in self.runs()]

    def plain(self) -> dict[str, Any]:
        """As plain values, for TOML."""
        from fedveil import __version__

        chosen = {} if self.selection is None else {"selection": dict(self.selection)}
        return {
            "fedveil": __version__,
            "seeds": list(self.seeds),
            "varied": list(self.varied),
            **chosen,
            "members": [
                {
                    "label": member.label,
                    "parameters": dict(member.parameters),
                    "settings": plain_settings(member.settings),
                }
                for member in self.members
            ],
        }


def planned(
    files: Sequence[Path],
    algorithms: Sequence[str],
    flags: Mapping[str, Any],
    grid: Sequence[tuple[str, list[Any]]],
    seeds: Sequence[int],
) -> Comparison:
    """Files × algorithms × grid × seeds; refuses members that cannot be compared."""
    axes = dict(grid)
    if len(axes) < len(grid):
        raise UserError(
            "--grid names a parameter twice. List all its values once: --grid NAME=1,2,4."
        )
    seeds = _seeds(seeds, axes.pop("seed", axes.pop("seeds", None)))
    bases = list(_bases(files, algorithms, flags))
    members_of = _members_of(axes, [name for name, _ in bases])
    members = [m for name, base in bases for m in _points(name, base, axes, members_of)]
    _refuse_same(members)
    if len(members) * len(seeds) > MAX_RUNS:
        raise UserError(
            f"This comparison has {len(members) * len(seeds):,} runs. Compare at most {MAX_RUNS:,}."
        )
    varied = dict.fromkeys(name for member in members for name in member.parameters)
    comparison = Comparison(tuple(members), tuple(seeds), tuple(varied))
    refuse_unequal(members)
    return comparison


def read_comparison(directory: Path) -> Comparison:
    """The comparison saved in a directory."""
    file = directory / FILE
    if not file.is_file():
        raise UserError(
            f"{directory} is not a comparison: it has no {FILE}. Name a comparison's directory."
        )
    with reading(file):
        plain = tomllib.loads(file.read_text(encoding="utf-8"))
        refuse_newer(file, plain.get("fedveil"))
        members = tuple(
            Member(m["label"], Settings.model_validate(m["settings"]), m["parameters"])
            for m in plain["members"]
        )
        seeds, varied = tuple(plain["seeds"]), tuple(plain["varied"])
        return Comparison(members, seeds, varied, plain.get("selection"))


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Settings as plain values, with the data path made absolute."""
    plain = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if settings.data.path is not None:
        plain["data"]["path"] = str(settings.data.path.resolve())
    return plain


def refuse_unequal(members: Sequence[Member]) -> None:
    """Refuse members that differ in data, unit, budget, view or randomness.

    Members that are not private are baselines: of them, only data and unit must be equal.
    """
    private = [member for member in members if is_private(member)]
    first = (private or list(members))[0]
    wanted = _terms(first)
    for member in members:
        shared = wanted if is_private(member) == is_private(first) else SHARED_BY_ALL
        terms = _terms(member)
        for what in shared:
            if terms[what] != wanted[what]:
                raise UserError(
                    f"{first.label} and {member.label} cannot be compared: {what} is "
                    f"{wanted[what]} for one and {terms[what]} for the other. Make them equal."
                )


def is_private(member: Member) -> bool:
    """Whether a member's recipe adds noise, so that it has an ε."""
    return resolve_recipe(member.settings).private


def _terms(member: Member) -> dict[str, str]:
    """The properties that must be equal, as text."""
    settings = member.settings
    recipe = resolve_recipe(settings)
    if not recipe.private:
        budget = "none, since it adds no noise"
    elif settings.epsilon is None:
        budget = "the one of its own noise"
    else:
        delta = "its default" if settings.delta is None else short(settings.delta)
        each = " per round" if settings.per_round else ""
        budget = f"ε = {short(settings.epsilon)}, δ = {delta}{each}"
    data = settings.data.model_dump(mode="json", exclude_defaults=True)
    named = ", ".join(f"{name}={value}" for name, value in data.items()) or "the default"
    return {
        "the data": named,
        "the unit that is protected": "example" if recipe.by_record else recipe.unit,
        "the budget": budget,
        "the view": recipe.view,
        "the randomness": settings.noise,
    }


def _bases(
    files: Sequence[Path], algorithms: Sequence[str], flags: Mapping[str, Any]
) -> Iterator[tuple[str, Settings]]:
    """Names and settings of the members before the grid."""
    sources: list[Path | None] = [*files] or [None]
    names: list[str | None] = [*algorithms] or [None]
    for file, algorithm in itertools.product(sources, names):
        named = {} if algorithm is None else {"algorithm": algorithm}
        settings = _without_budget(
            read_settings(file, {**_fitting(algorithm, flags), **named}), len(names) > 1
        )
        refuse_unnamed_data(settings, f"{file}", "Name them with --dataset or --path")
        yield _name(file if len(files) > 1 else None, algorithm, settings), settings


def _without_budget(settings: Settings, several: bool) -> Settings:
    """Beside other algorithms, one without noise is a baseline, which takes no budget."""
    if not several or resolve_recipe(settings).private:
        return settings
    kept = settings.model_fields_set - {*OF_PRIVATE}
    return Settings.model_validate(settings.model_dump(include=kept, exclude_unset=True))


def _name(file: Path | None, algorithm: str | None, settings: Settings) -> str:
    """The algorithm, or the name of the file if there are several."""
    if file is None:
        return algorithm or resolve_recipe(settings).name
    return file.stem if algorithm is None else f"{file.stem}-{algorithm}"


def _fitting(algorithm: str | None, flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """The flags for an algorithm: `--set dp_fedavg.clip=2` is for one, `--set rate=0.2` for all."""
    parameters = flags.get("parameters")
    if parameters is None:
        return flags
    mine = {}
    for name, value in parameters.items():
        whose, dot, own = name.rpartition(".")
        if not dot or whose == algorithm:
            mine[own] = value
    return {**flags, "parameters": mine}


def _members_of(axes: Mapping[str, list[Any]], names: list[str]) -> dict[str, list[str]]:
    """The members that each axis varies: `dp_fedavg.clip` one, `clip` all."""
    found = {}
    for axis in axes:
        if not isinstance(axis, str):
            raise UserError(f"The grid varies {told(axis)}. Give the name of a parameter.")
        whose, dot, _ = axis.rpartition(".")
        if dot and whose not in names:
            raise unknown("member to vary named", whose, names)
        found[axis] = [whose] if dot else names
    return found


def _points(
    name: str, base: Settings, axes: Mapping[str, list[Any]], members_of: Mapping[str, list[str]]
) -> Iterator[Member]:
    """The members of one base: every combination of the values of its axes."""
    mine = {axis.rpartition(".")[2]: v for axis, v in axes.items() if name in members_of[axis]}
    for values in itertools.product(*mine.values()):
        point = dict(zip(mine, values, strict=True))
        found = linked(_varied(base, point))
        shown = {key: found.parameters.get(key, value) for key, value in point.items()}
        yield Member(_label(name, shown), found, shown)


def _varied(base: Settings, point: Mapping[str, Any]) -> Settings:
    """The settings with the values of a grid point."""
    from fedveil.algorithms.calling import method_named, parameters_of, takes_others

    if not point:
        return base
    method = method_named(base.algorithm)
    known = parameters_of(method)
    plain = base.model_dump(exclude_unset=True)
    for name, value in point.items():
        if name in known or (name not in VARIABLE and takes_others(method)):
            plain["parameters"] = {**plain.get("parameters", {}), name: value}
        elif name in VARIABLE:
            plain[name] = value
        else:
            _refuse_symbol(base.algorithm, name, known)
            raise unknown(f"parameter of {base.algorithm} to vary named", name, [*known, *VARIABLE])
    plain.pop("recipe", None)  # rebuilt from the algorithm and its parameters
    return read_settings(None, plain)


def _refuse_symbol(algorithm: str, name: str, known: Iterable[str]) -> None:
    """Refuse a paper's symbol or another algorithm's name for a parameter, and give its name."""
    meant = [word for word in SYMBOLS.get(name, ()) if word in known]
    if meant:
        raise UserError(
            f"{algorithm} has no parameter '{name}'. Its name is '{meant[0]}': --grid {meant[0]}=…."
        )


def _label(name: str, point: Mapping[str, Any]) -> str:
    """`dp_fedavg-clip=0.5`, also used as a directory name.

    >>> _label("dp_fedavg", {"clip": 0.5, "model": "a/b:C"})
    'dp_fedavg-clip=0.5-model=a_b_C'
    """
    parts = [f"{key}={value}" for key, value in point.items()]
    return re.sub(r"[^\w.=+-]+", "_", "-".join([name, *parts]))[:150]


def _seeds(seeds: Sequence[int], grid: list[Any] | None) -> tuple[int, ...]:
    chosen = seeds if grid is None else grid
    if not chosen:
        raise UserError("There are no seeds to compare over. Pass at least one, such as --seeds 3.")
    wrong = [s for s in chosen if not isinstance(s, int) or isinstance(s, bool) or s < 0]
    if wrong:
        raise UserError(f"The seed {wrong[0]!r} is not valid. Use integers from 0 on.")
    if len(set(chosen)) < len(chosen):
        raise UserError(
            "A seed is named twice. Use different seeds: equal runs are not independent."
        )
    return tuple(chosen)


def _refuse_same(members: Sequence[Member]) -> None:
    seen: set[str] = set()
    for member in members:
        if member.label in seen:
            raise UserError(
                f"Two members have the name '{member.label}'. Remove one, or rename its file."
            )
        seen.add(member.label)
