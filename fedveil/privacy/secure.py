"""Secure noise: the same recipe on a fine grid with integer noise (docs/privacy.md)."""

from __future__ import annotations

from dataclasses import replace

from fedveil.errors import UserError
from fedveil.recipe import Recipe


def secured(recipe: Recipe) -> Recipe:
    """The recipe with integer sums, so that no floating-point noise is released.

    The guarantee is the same: rounding messages towards zero makes none longer, and rounding the
    noisy sum is post-processing.
    """
    if not recipe.private:
        raise UserError(
            f"{recipe.name} adds no noise, so noise='secure' does not apply. Use noise='seeded', "
            "or a private algorithm."
        )
    try:
        noise = recipe.noise.secured()
    except UserError as problem:
        raise UserError(f"{recipe.name}: {problem}") from None
    if noise == recipe.noise:
        return recipe  # already integers
    if recipe.by_record:
        return replace(recipe, noise=noise)  # the grid is inside silos
    return replace(recipe, quantize=recipe.quantize.on_grid(), noise=noise)
