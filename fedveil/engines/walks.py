"""α̃_i, the scale of a client's expected update, estimated by repeated local training.

Zhang et al. 2022, Thm. 3.1, compare α_i = s(‖u_i‖) with α̃_i = s(‖E u_i‖). For two further updates
from independent batches E⟨u′, u″⟩ = ‖E u‖², so some participants train twice more every few rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedveil.engines.dropout import DropoutStreams
from fedveil.engines.updates import Engine, Group
from fedveil.parts.bound import Bound
from fedveil.random.streams import Key, stream
from fedveil.threads import equal_shares, in_order

if TYPE_CHECKING:
    from fedveil.data.federated import Federated
    from fedveil.engines.processes import Team
    from fedveil.recipe import Recipe

EVERY = 4  # rounds
SHARE = 0.1  # of the participants; two repeats each, about a twentieth of all local work


@dataclass(frozen=True, eq=False)
class Walked:
    """α̃_i of some participants: their positions in the cohort, and their scales."""

    places: Tensor
    scales: Tensor


def walk_again(
    recipe: Recipe,
    bound: Bound,
    x: Tensor,
    round: int,
    data: Federated,
    engine: Engine,
    cohort: np.ndarray,
    key: Key,
    team: Team,
) -> Walked | None:
    """α̃_i of a tenth of the cohort, in most rounds of none; None where it equals α_i.

    Draws from its own streams, so that nothing else in the round changes.
    """
    if not bound.radial or bound.threshold is None or recipe.memory.kept or not recipe.local.random:
        return None
    if round % EVERY:
        return Walked(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64))
    count = min(len(cohort), max(2, math.ceil(SHARE * len(cohort))))
    rng = stream(key, round, "diagnosis: who walks again")
    places = np.sort(rng.choice(len(cohort), size=count, replace=False))
    chosen = cohort[places]
    sizes = data.sizes[torch.from_numpy(chosen)]
    plans = [
        recipe.local.plan(sizes, round, stream(key, round, f"diagnosis: walk {walk}"))
        for walk in (1, 2)
    ]
    affine = recipe.report.affine(recipe.local.rate(round))
    mine = team.share(chosen)

    def products(share: slice) -> Tensor:
        start, stop = mine.start + share.start, mine.start + share.stop
        clients = chosen[start:stop]
        first, second = (
            engine.updates(
                x,
                Group(
                    data,
                    clients,
                    plan.group(start, stop),
                    DropoutStreams(key, round, clients, f"diagnosis: dropout {walk}"),
                ),
            )
            .affine(*affine, x)
            .rows()
            for walk, plan in enumerate(plans)
        )
        return (first.double() * second.double()).sum(dim=1)

    squares = torch.zeros(count, dtype=torch.float64)
    shares = equal_shares(mine.stop - mine.start, engine.group_size, engine.least_group)
    parts = list(in_order(products, shares))
    if parts:
        squares[mine] = torch.cat(parts)
    team.add(squares)
    sound = torch.isfinite(squares)
    scales = bound.scale(torch.where(sound, squares, 0.0).clamp_min(0).sqrt())
    return Walked(torch.from_numpy(places), torch.where(sound, scales, torch.nan))
