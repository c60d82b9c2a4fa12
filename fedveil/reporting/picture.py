"""A diagram of a recipe's eight parts, drawn as SVG."""

from __future__ import annotations

import html
from collections.abc import Iterator, Set
from dataclasses import fields
from typing import Any

from fedveil.recipe import Recipe
from fedveil.reporting.chart import few_digits
from fedveil.serialization.codec import recipe_from_plain, to_plain

ORDER = ("cohort", "local", "report", "memory", "bound", "quantize", "noise", "server")
IDLE = {"NoMemory", "Unbounded", "Exact", "NoNoise"}  # parts that change nothing
DOES = {
    "cohort": "who takes part", "local": "training steps", "report": "the update",
    "memory": "kept between rounds", "bound": "limits the norm", "quantize": "rounds to a grid",
    "noise": "for privacy", "server": "updates the model",
}  # fmt: skip
WIDTH, HEIGHT, GAP = 216, 116, 32
MOST_FIELDS = 3


def pictures(plain: dict[str, Any], unlike: dict[str, Any] | None = None) -> str:
    """The parts in two rows for a wide page and in one column for a phone; CSS shows one of them.

    Parts that differ from those of another recipe are shaded.
    """
    recipe = recipe_from_plain(plain)
    other = recipe if unlike is None else recipe_from_plain(unlike)
    shaded = {part for part in ORDER if getattr(recipe, part) != getattr(other, part)}
    drawn = [_drawn(recipe, columns, n, shaded) for columns, n in ((4, "wide"), (1, "tall"))]
    return f'<div class="recipe">{"".join(drawn)}</div>'


def _drawn(recipe: Recipe, columns: int, name: str, shaded: Set[str]) -> str:
    rows = len(ORDER) // columns
    width = columns * WIDTH + (columns - 1) * GAP + 8
    height = rows * HEIGHT + (rows - 1) * GAP + 8
    boxes = "".join(
        _box(recipe, part, part in shaded, *_place(i, columns)) for i, part in enumerate(ORDER)
    )
    arrows = "".join(_arrow(i, columns) for i in range(len(ORDER) - 1))
    marker = (
        f'<defs><marker id="tip-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>'
    )
    told = html.escape("; ".join(f"{part}: {_kind(recipe, part)}" for part in ORDER))
    return (
        f'<svg class="{name}" role="img" aria-label="The recipe: {told}" '
        f'viewBox="0 0 {width} {height}" style="max-width:{width}px">'
        f"{marker}{arrows.replace('TIP', f'tip-{name}')}{boxes}</svg>"
    )


def _place(index: int, columns: int) -> tuple[int, int]:
    return 4 + index % columns * (WIDTH + GAP), 4 + index // columns * (HEIGHT + GAP)


def _arrow(index: int, columns: int) -> str:
    (x, y), (to_x, to_y) = _place(index, columns), _place(index + 1, columns)
    if y == to_y:
        path = f"M{x + WIDTH} {y + HEIGHT // 2}H{to_x}"
    elif x == to_x:
        path = f"M{x + WIDTH // 2} {y + HEIGHT}V{to_y}"
    else:
        middle = y + HEIGHT + GAP // 2
        path = f"M{x + WIDTH // 2} {y + HEIGHT}V{middle}H{to_x + WIDTH // 2}V{to_y}"
    return f'<path class="arrow" d="{path}" marker-end="url(#TIP)"/>'


def _box(recipe: Recipe, part: str, shaded: bool, x: int, y: int) -> str:
    kind = _kind(recipe, part)
    place = _where(recipe, part)
    idle = " idle" if kind in IDLE else ""
    look = idle + " shaded" * shaded
    told = [*_fields(getattr(recipe, part))][:MOST_FIELDS]
    lines = ["nothing"] if idle else told or [_formula(getattr(recipe, part))]
    texts = "".join(
        f'<text class="field" x="{x + 14}" y="{y + 66 + 17 * i}">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    formula = html.escape(" ".join((type(getattr(recipe, part)).__doc__ or "").split()))
    return (
        f'<g class="{place}{look}"><title>{formula}</title>'
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
        f'<text class="part" x="{x + 14}" y="{y + 22}">{part}: {DOES[part]}</text>'
        f'<text class="place" x="{x + WIDTH - 12}" y="{y + HEIGHT - 11}">{place}</text>'
        f'<text class="kind" x="{x + 14}" y="{y + 44}">{html.escape(kind)}</text>{texts}</g>'
    )


def _formula(part: Any) -> str:
    """The first part of its docstring, if that is a formula: `u = y − x`."""
    first = (part.__doc__ or "").partition("\n")[0].partition(":")[0].rstrip(".")
    return first if "=" in first and len(first) <= 28 else ""


def _kind(recipe: Recipe, part: str) -> str:
    return type(getattr(recipe, part)).__name__


def _where(recipe: Recipe, part: str) -> str:
    """Who does it: clients do everything between cohort and noise; noise says so itself."""
    if part == "noise":
        return recipe.noise.at
    return "server" if part in ("cohort", "server") else "client"


def _fields(part: Any) -> Iterator[str]:
    """`name = value` of the fields that differ from their defaults, or of all if none differs."""
    plain = to_plain(part)
    defaults = {field.name: field.default for field in fields(part)}
    names = [name for name in plain if name not in ("kind", "at")]
    own = [name for name in names if getattr(part, name) != defaults[name]]
    for name in own or names:
        yield f"{name.replace('_', ' ')} = {_value(plain[name])}"


def _value(value: Any) -> str:
    match value:
        case {"kind": "Constant", "rate": rate}:
            return few_digits(rate)
        case {"kind": "Decay", "rate": rate, "factor": factor}:
            return f"{few_digits(rate)} · {factor:g}^k"
        case {"kind": "Steps", "rate": rate, "factor": factor}:
            return f"{few_digits(rate)}, × {factor:g} at steps"
        case bool() | str():
            return str(value)[:18]
        case [alone]:
            return _value(alone)
        case int() | float():
            return few_digits(value)
        case _:
            return "…"
