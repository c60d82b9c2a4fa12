"""Zhang's probe: a clipping threshold from a run without bound or noise. It leaks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedveil.data.federated import Federated
from fedveil.engines.processes import ALONE, Team
from fedveil.engines.updates import Engine
from fedveil.errors import UserError
from fedveil.loop import begin, run_round
from fedveil.parts.bound import Bound, Unbounded
from fedveil.parts.noise import NoNoise
from fedveil.parts.quantize import NoQuantization
from fedveil.random.streams import run_key
from fedveil.recipe import Recipe
from fedveil.serialization.codec import identified


def probed(
    recipe: Recipe,
    x: Tensor,
    data: Federated,
    engine: Engine,
    rounds: int,
    seed: int,
    team: Team = ALONE,
) -> Recipe:
    """c = factor·mean‖u_i‖ over all clients and rounds of the same training without bound or noise.

    Zhang et al. 2022, §3.1. No ε covers this probe of the data, and the statement says so.
    """
    if not recipe.bound.awaits_probe:
        raise UserError(f"{recipe.name} has no threshold to probe. Use clip='probe'.")
    _require_leak(recipe.bound)
    bare = replace(recipe, bound=Unbounded(), quantize=NoQuantization(), noise=NoNoise())
    key = run_key("probe", seed, identified(bare), rounds, data.fingerprint())
    state = begin(bare, x.clone(), data, rounds, key)
    total, count = 0.0, 0
    for _ in range(rounds):
        state, info = run_round(bare, state, data, engine, key, team)
        total, count = total + float(info.norms.sum()), count + len(info.norms)
    if not total > 0:
        raise UserError(
            f"{recipe.name}: without bound and noise, no update had a finite norm above 0, so the "
            "probe found no threshold. Lower the learning rate, or give clip."
        )
    found = recipe.bound.probed_at(total / count)
    _require_leak(found)
    return replace(recipe, bound=found)


def _require_leak(bound: Bound) -> None:
    """Refuse a bound that takes its threshold from the data and does not say so."""
    if not bound.leaks:
        kind = type(bound).__name__
        raise UserError(
            f"Bound {kind} has its threshold measured on the data without noise (`awaits_probe`), "
            "which no ε covers, but says leaks = False. Set leaks = True."
        )
