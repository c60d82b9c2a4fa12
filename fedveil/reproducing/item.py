"""A published table or figure as a TOML file: settings, published values, claims and scales."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.comparing.linked import linked
from fedveil.errors import UserError, unknown
from fedveil.training.settings import Settings, read_settings

FOLDER = Path("papers")
RESULTS = "results"
SCALES = ("ci", "small", "full")
Kind = Literal["order", "gap", "level", "trend", "exact"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(_Part):
    """One row or curve: an algorithm with its settings, and what was published for it."""

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)  # chosen on held-out training examples
    open: tuple[str, ...] = ()  # parameters of the grid whose range is ours: its ends count as ends
    published: float | None = None
    spread: float | None = None  # one standard deviation, as published


class Claim(_Part):
    """What is claimed of the arms, and the rule that decides it (see `judging`)."""

    kind: Kind
    text: str
    arms: tuple[str, ...]  # order and gap: the better one first; trend: best to worst
    at_least: float | None = None  # of a gap or a level
    tolerance: float = 0.0  # of an order, a level or an exact value
    value: float | None = None  # exact
    tuned: bool = False  # whether it is about tuned arms: a loser at an end of its grid is not
    source: Literal["paper", "ours"] = "paper"  # "ours": a question that the paper does not ask


class Power(_Part):
    """A baseline that must reach a level first: a run that is undertrained decides nothing."""

    arm: str
    at_least: float


class Scale(_Part):
    """A size at which the item is run, and what it changes."""

    changes: str
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seeds: tuple[int, ...] = (100,)
    settings: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] | None = None  # instead of the arms' own
    arms: tuple[str, ...] | None = None  # all by default
    power: Power | None = None
    decides: bool = True  # False: its runs show that the item works, and decide no claim


class Item(_Part):
    """One table or figure of a paper."""

    title: str
    citation: str
    measure: str
    better: Literal["higher", "lower", "equal"] = "higher"
    unit: str = ""
    silent: tuple[str, ...] = ()  # what the paper does not say, and what was chosen
    not_run: str = ""  # why it cannot be run here, if it cannot
    runs_of: str = ""  # another item, whose runs this one measures differently
    problem_per_seed: bool = False  # whether a seed also draws the data, as of random quadratics
    settings: dict[str, Any]
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    scales: dict[str, Scale]
    note: str = ""
    name: str = ""

    def scale(self, name: str) -> Scale:
        """A scale by its name."""
        if name not in self.scales:
            raise unknown(f"scale of {self.name}", name, self.scales)
        return self.scales[name]

    def arms_at(self, scale: Scale) -> list[Arm]:
        """The arms that a scale runs."""
        return [arm for arm in self.arms if scale.arms is None or arm.name in scale.arms]

    def points(self, arm: Arm, scale: Scale) -> list[Settings]:
        """The settings of an arm at a scale: one for each point of its grid."""
        axes = arm.grid if scale.grid is None else scale.grid
        plain = merged(self.settings, arm.settings, scale.settings)
        known = set(plain.get("parameters", {})) | set(arm.grid)
        own = {name: values for name, values in axes.items() if name in known}
        combined = itertools.product(*own.values())
        return [self._settings(plain, dict(zip(own, values, strict=True))) for values in combined]

    def at_ends(self, arm: Arm, scale: Scale, chosen: Settings) -> tuple[str, ...]:
        """The parameters chosen at an end of what a scale tries, where there is more to try.

        There is where the arm's grid goes on, and always beyond the range of an open parameter.
        """
        tried = arm.grid if scale.grid is None else {**arm.grid, **scale.grid}
        fixed = scale.settings.get("parameters", {})
        found = []
        for name, every in arm.grid.items():
            value = chosen.parameters[name]
            here = [fixed[name]] if name in fixed else tried[name]
            below = value == min(here) and (name in arm.open or value > min(every))
            above = value == max(here) and (name in arm.open or value < max(every))
            found += [name] if below or above else []
        return tuple(found)

    def _settings(self, plain: Mapping[str, Any], point: Mapping[str, Any]) -> Settings:
        return linked(read_settings(None, merged(plain, {"parameters": point} if point else {})))


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Later tables win, key by key and within tables; an algorithm replaces the parameters.

    >>> merged({"a": 1, "data": {"b": 1, "c": 2}}, {"data": {"b": 3}})
    {'a': 1, 'data': {'b': 3, 'c': 2}}
    """
    found: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
            found[name] = merged(found[name], value) if both else value
    return found


def read_item(file: Path) -> Item:
    """The item in a file."""
    try:
        plain = tomllib.loads(file.read_text(encoding="utf-8"))
        item = Item.model_validate({**plain, "name": f"{file.parent.name}/{file.stem}"})
    except (OSError, ValueError, ValidationError) as problem:
        raise UserError(f"{file} is not an item: {problem}. Correct it.") from problem
    names = {arm.name for arm in item.arms}
    for claim in item.claims:
        for arm in claim.arms:
            if arm not in names:
                raise unknown(f"arm of {item.name}", arm, sorted(names))
    return item


def papers_folder(given: Path | None = None) -> Path:
    """The folder of all items: the one given, ./papers, or that of the clone of this package."""
    places = [given] if given is not None else [FOLDER, Path(__file__).parents[2] / FOLDER]
    for place in places:
        if any(place.glob("*/*.toml")):
            return place
    raise UserError(
        f"No items were found in {places[0]}. Run the command in a clone of fedveil, or pass "
        "--papers."
    )


def items(folder: Path) -> Iterator[Item]:
    """All items, by name."""
    for file in sorted(folder.glob("*/*.toml")):
        yield read_item(file)


def item_named(folder: Path, name: str) -> Item:
    """The item `paper/item`."""
    file = folder / f"{name}.toml"
    if not file.is_file() or name.count("/") != 1:
        raise unknown("item", name, [item.name for item in items(folder)])
    return read_item(file)
