"""Secure noise: the same recipe on a fine grid with whole-number noise (docs/privacy.md)."""

from __future__ import annotations

from dataclasses import replace

from fedveil.errors import UserError
from fedveil.parts.noise import Gaussian, RoundedGaussian
from fedveil.parts.quantize import Exact, TowardZero
from fedveil.recipe import Recipe, foreign


def secured(recipe: Recipe) -> Recipe:
    """The recipe whose released sums are whole numbers: no float of the noise is ever seen.

    The guarantee is the same: cutting messages towards zero makes none longer, and rounding
    Gaussian noise is post-processing.
    """
    noise = recipe.noise
    if not recipe.private:
        raise UserError(f"{recipe.name} adds no noise, so there is none to make secure.")
    if foreign(noise):
        raise UserError(
            f"{recipe.name}: noise {type(noise).__name__} is not fedveil's own, so how it is drawn "
            "is not known; for secure noise use Gaussian or a noise of whole numbers."
        )
    if not isinstance(noise, Gaussian):
        return recipe  # whole numbers already
    if noise.at == "client":
        raise UserError(
            f"{recipe.name}: Gaussian noise at the clients is only simulated, as one draw; for "
            "secure noise use noise at the server, or dp_norm_fedavg_secagg."
        )
    quantize = TowardZero() if isinstance(recipe.quantize, Exact) else recipe.quantize
    return replace(recipe, quantize=quantize, noise=RoundedGaussian(noise.multiplier))
