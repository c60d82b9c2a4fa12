"""The contract of a server step: a function of what was released, which a checkpoint can resume."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from fedveil.parts.part import Begin, Tensors
from fedveil.parts.server import Server
from fedveil.testing.states import check_same_form, copied, first_state

DIM, ROUNDS, STOP = 6, 8, 3
SCALES = (0.0, 1e-20, 1e-3, 1.0, 1e6)


def check_server(server: Server) -> None:
    """Raise unless `step` is a function of (x, descent, state, round) alone, and stays finite.

    The model keeps its shape and type, finite input gives a finite model, nothing given is
    changed in place, and the state keeps its names and shapes. A run that is stopped after any
    round and resumed from its saved state by a new server is the same, bit by bit.

    It says nothing about convergence. Privacy does not depend on this part: it sees only what
    was released.
    """
    _keeps_the_model_s_form(server)
    _function_of_its_arguments(server)
    _resumes(server)


def _begin(server: Server, x: Tensor) -> Tensors:
    return first_state(server, Begin(x, 8, ROUNDS, np.random.default_rng(0), noise=0.5))


def _descents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(DIM, generator=generator) for _ in range(ROUNDS)]


def _keeps_the_model_s_form(server: Server) -> None:
    for scale in SCALES:
        x = torch.ones(DIM)
        state = _begin(server, x)
        for round, descent in enumerate(_descents()):
            x, after = server.step(x, scale * descent, state, round)
            assert x.shape == (DIM,), f"{server} gives a model of {tuple(x.shape)}, not {(DIM,)}"
            assert x.dtype == torch.float32, f"{server} gives a model of {x.dtype}, not float32"
            assert torch.isfinite(x).all(), (
                f"{server}: round {round + 1} gives {x.tolist()} for a direction of scale {scale:g}"
            )
            check_same_form(server, state, after)
            state = after


def _function_of_its_arguments(server: Server) -> None:
    """Asked twice it answers the same, and leaves what it was given alone."""
    x = torch.ones(DIM)
    state = _begin(server, x)
    for round, descent in enumerate(_descents()):
        given = x.clone(), descent.clone(), copied(state)
        first, after = server.step(x, descent, state, round)
        kept = torch.equal(x, given[0]) and torch.equal(descent, given[1])
        assert kept, f"{server} changes the model or the direction in place. Return a new tensor"
        assert _equal(state, given[2]), f"{server} changes its state in place. Return a new one"
        second, other = server.step(*given, round)
        same = torch.equal(first, second) and _equal(after, other)
        assert same, f"{server}: round {round + 1} gives two models for the same direction"
        x, state = first, after


def _resumes(server: Server) -> None:
    """All that a later round depends on is in the state: a copy of it takes over at any round."""
    whole = _course(server, stop=None)
    for stop in (1, STOP, ROUNDS - 1):
        assert torch.equal(_course(server, stop), whole), (
            f"{server}: stopped after round {stop} and resumed, it ends with another model. Keep "
            "everything between rounds in the state"
        )


def _course(server: Server, stop: int | None) -> Tensor:
    pristine, x = copy.deepcopy(server), torch.ones(DIM)
    working, state = copy.deepcopy(server), _begin(server, x)
    for round, descent in enumerate(_descents()):
        if round == stop:
            working, state = pristine, copied(state)
        x, state = working.step(x, descent, state, round)
    return x


def _equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
