"""Memories that correct or average a client's gradients: control variates and double momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedveil.parts.checks import count, share
from fedveil.parts.memory import Memory
from fedveil.parts.part import Begin, Tensors

if TYPE_CHECKING:
    from fedveil.recipe import Recipe


@dataclass(frozen=True)
class ControlVariates(Memory):
    """g ← g − c_i + c in local steps, c_i ← c_i − c + b_i/steps, c ← c + p·(mean(b)/steps − c).

    SCAFFOLD: Karimireddy et al. 2020, Alg. 1, lines 10–17, option II. Controls follow the bounded
    message b_i, so the server's c is a function of what it releases anyway, and no second message
    is sent (docs/privacy.md, "Control variates"). p is the expected share of participants.
    """

    steps: int
    amplified = True
    compares = False
    corrects = True
    shared = ("control",)

    def __post_init__(self) -> None:
        count(self, "steps", self.steps)

    def initial_state(self, begin: Begin) -> Tensors:
        """c = 0, and p."""
        share = torch.tensor(begin.expected / begin.population)
        return {"control": torch.zeros_like(begin.x), "share": share}

    def correction(self, remembered: Tensor, state: Tensors) -> Tensor:
        """c − c_i."""
        return state["control"] - remembered

    def compare(self, remembered: Tensor, update: Tensor) -> Tensor:
        """The update itself."""
        return update

    def update_for(self, remembered: Tensor, wanted: Tensor) -> Tensor:
        """The inverse of `compare`."""
        return wanted

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        """c_i + b_i/steps."""
        return remembered + message / self.steps

    def after(self, remembered: Tensor, update: Tensor, message: Tensor, state: Tensors) -> Tensor:
        """c_i − c + b_i/steps."""
        return self.learn(remembered, message) - state["control"]

    def step(self, state: Tensors, mean: Tensor) -> tuple[Tensor, Tensors]:
        """The mean itself, and the next c."""
        control = state["control"] + state["share"] * (mean / self.steps - state["control"])
        return mean, {**state, "control": control}

    def misfit(self, recipe: Recipe) -> str | None:
        """Controls are gradients: every update is a sum of `steps` of them."""
        steps = getattr(recipe.local, "steps", None)
        if not recipe.report.divides or steps != self.steps:
            return (
                f"memory ControlVariates({self.steps}), report {type(recipe.report).__name__} and "
                f"local {type(recipe.local).__name__} do not fit: controls are means of the "
                "gradients of so many local steps. Use PseudoGradient and SGD with as many steps."
            )
        return _refused_draws(self, recipe)


@dataclass(frozen=True)
class DoubleMomentum(Memory):
    """v_i ← (1 − β)v_i + β·u_i, w = v_i − g_i, g_i ← g_i + η·b_i, ĝ ← ĝ + η·mean(b).

    Clip21-SGD2M: Islamov et al. 2025, Alg. 1. Each client keeps v_i and g_i. ‖b_i‖ is what the
    bound allows, whatever they are.
    """

    momentum: float = 0.1  # β, the share of the newest gradient
    beta: float = 0.1  # η, the share of a message that is added to the memories
    amplified = True

    def __post_init__(self) -> None:
        for field in ("momentum", "beta"):
            share(self, field, getattr(self, field))

    @property
    def rate(self) -> float:
        """η."""
        return self.beta

    def width(self, dim: int) -> int:
        """v_i, then g_i."""
        return 2 * dim

    def compare(self, remembered: Tensor, update: Tensor) -> Tensor:
        """The new v_i minus g_i."""
        momentum, known = remembered.chunk(2, dim=1)
        return torch.lerp(momentum, update, self.momentum) - known

    def update_for(self, remembered: Tensor, wanted: Tensor) -> Tensor:
        """The inverse of `compare`."""
        momentum, known = remembered.chunk(2, dim=1)
        return (wanted + known - (1 - self.momentum) * momentum) / self.momentum

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        """g + η·b."""
        return remembered + self.beta * message

    def after(self, remembered: Tensor, update: Tensor, message: Tensor, state: Tensors) -> Tensor:
        """Both vectors. A gradient that is not finite leaves v_i as it was."""
        momentum, known = remembered.chunk(2, dim=1)
        sound = update.isfinite().all(dim=1, keepdim=True)
        newest = torch.where(sound, torch.lerp(momentum, update, self.momentum), momentum)
        return torch.cat([newest, self.learn(known, message)], dim=1)

    def misfit(self, recipe: Recipe) -> str | None:
        """Draws must be independent between clients."""
        return _refused_draws(self, recipe)


def _refused_draws(memory: Memory, recipe: Recipe) -> str | None:
    """Why hidden sampling does not fit the memory of participants."""
    if not recipe.private or recipe.cohort.independent or recipe.noise.correlated:
        return None
    return (
        f"memory {type(memory).__name__} and cohort {type(recipe.cohort).__name__} do not fit: the "
        "memory of absent clients depends on who was drawn, which is covered only if clients are "
        "drawn independently. Use Poisson or Everyone."
    )
