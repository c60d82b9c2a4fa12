"""Zhang's probe: a clipping threshold from a run without bound or noise.  It leaks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedveil.data.federated import Federated
from fedveil.engines.processes import ALONE, Team
from fedveil.engines.updates import Engine
from fedveil.errors import UserError
from fedveil.loop import begin, play_round
from fedveil.parts.bound import ProbedClip, Unbounded
from fedveil.parts.noise import Silent
from fedveil.parts.quantize import Exact
from fedveil.recipe import Recipe
from fedveil.streams import run_key


def probed(
    recipe: Recipe,
    x: Tensor,
    data: Federated,
    engine: Engine,
    rounds: int,
    seed: int,
    team: Team = ALONE,
) -> Recipe:
    """c = factor·mean‖u_i‖ over all clients and rounds of the same training, bare.

    Zhang et al. 2022, §3.1. No ε covers this look at the data; the statement says so.
    """
    if not isinstance(recipe.bound, ProbedClip):
        raise UserError(f"{recipe.name} has no threshold to probe for; use clip='probe'.")
    bare = replace(recipe, bound=Unbounded(), quantize=Exact(), noise=Silent())
    key = run_key("probe", seed, bare, rounds, data.fingerprint())
    state = begin(bare, x.clone(), data, rounds, key)
    total, count = 0.0, 0
    for _ in range(rounds):
        state, info = play_round(bare, state, data, engine, key, team)
        total, count = total + float(info.norms.sum()), count + len(info.norms)
    if not total > 0:
        raise UserError(
            f"{recipe.name}: without bound and noise no update had a finite length above 0, so "
            "there is no threshold to be had from them; lower the learning rate, or give clip."
        )
    # Four digits: the last ones depend on the order of sums, and a run's key on the threshold.
    norm = float(f"{recipe.bound.factor * total / count:.4g}")
    return replace(recipe, bound=replace(recipe.bound, norm=norm))
