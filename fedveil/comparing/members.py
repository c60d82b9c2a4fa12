"""What is compared: members at one budget, on one split, towards one view, over the same seeds."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.errors import UserError, unknown
from fedveil.runs.directory import reading
from fedveil.runs.versions import refuse_newer
from fedveil.settings import Settings, read_settings, refuse_unnamed_data, resolve_recipe

FILE = "comparison.toml"
VARIABLE = ("rounds", "model", "engine", "epsilon", "delta", "view")  # settings beside parameters
SYMBOLS = {  # what papers call parameters (docs/notation.md), and what these are called here
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
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Member:
    """One recipe with its settings; its runs differ in the seed alone."""

    label: str
    settings: Settings
    parameters: Mapping[str, Any] = field(default_factory=dict)  # those that were varied

    def at(self, seed: int) -> Settings:
        """The settings of one of its runs."""
        return self.settings.model_copy(update={"seed": seed})

    def directory(self, seed: int) -> str:
        """The name of one of its runs."""
        return f"{self.label}-s{seed}"


@dataclass(frozen=True)
class Comparison:
    """Members and seeds."""

    members: tuple[Member, ...]
    seeds: tuple[int, ...]
    varied: tuple[str, ...] = ()
    selection: Mapping[str, Any] | None = None  # how one is to be selected privately

    def runs(self) -> Iterator[tuple[Member, int]]:
        """All runs, seed by seed, so that a comparison cut short has compared something."""
        for seed in self.seeds:
            for member in self.members:
                yield member, seed

    def paths(self, directory: Path) -> list[Path]:
        """Where all its runs are, or will be."""
        return [directory / member.directory(seed) for member, seed in self.runs()]

    def plain(self) -> dict[str, Any]:
        """As TOML has it."""
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
    """Files × algorithms × grid × seeds; members that cannot be compared are refused."""
    axes = dict(grid)
    if len(axes) < len(grid):
        raise UserError("--grid names a parameter twice; give all of its values at once.")
    seeds = _seeds(seeds, axes.pop("seed", axes.pop("seeds", None)))
    bases = list(_bases(files, algorithms, flags))
    whose = _whose(axes, [name for name, _ in bases])
    members = [m for name, base in bases for m in _points(name, base, axes, whose)]
    _refuse_same(members)
    if len(members) * len(seeds) > MOST_RUNS:
        raise UserError(
            f"That would be {len(members) * len(seeds):,} runs; compare at most {MOST_RUNS:,}."
        )
    varied = dict.fromkeys(name for member in members for name in member.parameters)
    comparison = Comparison(tuple(members), tuple(seeds), tuple(varied))
    refuse_unequal(members)
    return comparison


def read_comparison(directory: Path) -> Comparison:
    """The comparison that a directory was begun with."""
    file = directory / FILE
    if not file.is_file():
        raise UserError(
            f"{directory} is not a comparison: it has no {FILE}; name a comparison's directory."
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
    """Settings as plain values, which name their data from any directory."""
    plain = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if settings.data.path is not None:
        plain["data"]["path"] = str(settings.data.path.resolve())
    return plain


def refuse_unequal(members: Sequence[Member]) -> None:
    """An accuracy is compared at equal data, unit, budget and view, or not at all."""
    recipes = [resolve_recipe(member.settings) for member in members]
    bare = [m.label for m, recipe in zip(members, recipes, strict=True) if not recipe.private]
    if bare and len(bare) < len(members):
        raise UserError(
            f"{bare[0]} is not private, so it has no ε to compare at; train it alone and put both "
            "on one page: `fedveil report COMPARISON RUN`."
        )
    first = _terms(members[0])
    for member in members[1:]:
        for what, value in _terms(member).items():
            if value != first[what]:
                raise UserError(
                    f"{members[0].label} and {member.label} cannot be compared: {what} is "
                    f"{first[what]} for one and {value} for the other; make them equal."
                )


def _terms(member: Member) -> dict[str, str]:
    """What must be equal, in words."""
    settings = member.settings
    recipe = resolve_recipe(settings)
    if not recipe.private:
        budget = "none, for it adds no noise"
    elif settings.epsilon is None:
        budget = "what its own noise comes to"
    else:
        delta = "its default" if settings.delta is None else f"{settings.delta:g}"
        each = " a round" if settings.per_round else ""
        budget = f"epsilon = {settings.epsilon:g}, delta = {delta}{each}"
    data = settings.data.model_dump(mode="json", exclude_defaults=True)
    named = ", ".join(f"{name}={value}" for name, value in data.items()) or "the default"
    return {
        "the data": named,
        "the unit that is protected": recipe.unit,
        "the budget": budget,
        "the view": recipe.view,
        "the randomness": settings.noise,
    }


def _bases(
    files: Sequence[Path], algorithms: Sequence[str], flags: Mapping[str, Any]
) -> Iterator[tuple[str, Settings]]:
    """Named settings before the grid."""
    sources: list[Path | None] = [*files] or [None]
    names: list[str | None] = [*algorithms] or [None]
    for file, algorithm in itertools.product(sources, names):
        named = {} if algorithm is None else {"algorithm": algorithm}
        settings = read_settings(file, {**_fitting(algorithm, flags), **named})
        refuse_unnamed_data(settings, f"{file}", "name them with --dataset or --path")
        yield _name(file if len(files) > 1 else None, algorithm, settings), settings


def _name(file: Path | None, algorithm: str | None, settings: Settings) -> str:
    """The algorithm; where there are several files, the file's name tells them apart."""
    if file is None:
        return algorithm or resolve_recipe(settings).name
    return file.stem if algorithm is None else f"{file.stem}-{algorithm}"


def _fitting(algorithm: str | None, flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """`--set dp_fedavg.clip=2` is for one algorithm, `--set rate=0.2` for all of them."""
    parameters = flags.get("parameters")
    if parameters is None:
        return flags
    mine = {}
    for name, value in parameters.items():
        whose, dot, own = name.rpartition(".")
        if not dot or whose == algorithm:
            mine[own] = value
    return {**flags, "parameters": mine}


def _whose(axes: Mapping[str, list[Any]], names: list[str]) -> dict[str, list[str]]:
    """For each axis the members it is for: `dp_fedavg.clip` for one, `clip` for all."""
    found = {}
    for axis in axes:
        whose, dot, _ = axis.rpartition(".")
        if dot and whose not in names:
            raise unknown("member to vary named", whose, names)
        found[axis] = [whose] if dot else names
    return found


def _points(
    name: str, base: Settings, axes: Mapping[str, list[Any]], whose: Mapping[str, list[str]]
) -> Iterator[Member]:
    """Every combination of the values of the axes that are for this base."""
    mine = {axis.rpartition(".")[2]: v for axis, v in axes.items() if name in whose[axis]}
    for values in itertools.product(*mine.values()):
        point = dict(zip(mine, values, strict=True))
        yield Member(_label(name, point), _varied(base, point), point)


def _varied(base: Settings, point: Mapping[str, Any]) -> Settings:
    """The settings with a point's values in place of their own."""
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
    plain.pop("recipe", None)  # made anew, from the algorithm and its parameters
    return read_settings(None, plain)


def _refuse_symbol(algorithm: str, name: str, known: Iterable[str]) -> None:
    """A paper's letter for a parameter, or another algorithm's word for it, is told its name."""
    meant = [word for word in SYMBOLS.get(name, ()) if word in known]
    if meant:
        raise UserError(
            f"There is no parameter of {algorithm} named '{name}'; here it is called "
            f"'{meant[0]}': --grid {meant[0]}=…."
        )


def _label(name: str, point: Mapping[str, Any]) -> str:
    """`dp_fedavg-clip=0.5`: also the name of a directory.

    >>> _label("dp_fedavg", {"clip": 0.5, "model": "a/b:C"})
    'dp_fedavg-clip=0.5-model=a_b_C'
    """
    parts = [f"{key}={value}" for key, value in point.items()]
    return re.sub(r"[^\w.=+-]+", "_", "-".join([name, *parts]))[:150]


def _seeds(seeds: Sequence[int], grid: list[Any] | None) -> tuple[int, ...]:
    chosen = seeds if grid is None else grid
    if not chosen:
        raise UserError("There are no seeds to compare over; give at least one, such as --seeds 3.")
    wrong = [s for s in chosen if not isinstance(s, int) or isinstance(s, bool) or s < 0]
    if wrong:
        raise UserError(f"A seed is {wrong[0]!r}; seeds are whole numbers from 0 on.")
    if len(set(chosen)) < len(chosen):
        raise UserError("A seed is named twice; equal runs would count as independent ones.")
    return tuple(chosen)


def _refuse_same(members: Sequence[Member]) -> None:
    seen: set[str] = set()
    for member in members:
        if member.label in seen:
            raise UserError(
                f"Two members are called '{member.label}'; "
                "leave one out, or name their files apart."
            )
        seen.add(member.label)
