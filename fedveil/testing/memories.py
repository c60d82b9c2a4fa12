"""The contract of a memory: a client's is made of its own messages, the server's of releases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedveil.parts.memory import Memory
from fedveil.parts.part import Begin, Tensors
from fedveil.testing.states import check_same_form, copied, first_state

CLIENTS, DIM, ROUNDS = 9, 7, 5


def check_memory(memory: Memory) -> None:
    """Raise unless a client's memory looks at it alone, and `step` at what was released.

    A client's memory keeps its shape, stays float32 and finite, and is the same whether it is
    computed alone or beside others. The server's direction and state depend on the released means
    alone, not on what clients learned in between, and the state can be saved and resumed. The
    `workers` of a round are a set that contains the cohort.

    It cannot show that sampling hides what clients remember: `amplified` is a theorem about the
    whole recipe. Leave it False unless you have proved it.
    """
    _keeps_its_form(memory)
    _looks_at_one_client(memory)
    _server_sees_releases_alone(memory)
    _workers_are_a_set(memory)
    if not memory.kept:
        return
    _rounds_look_at_one_client(memory)
    assert memory.rate > 0, f"{memory} remembers {memory.rate} of a message"


def _rows(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.logspace(-6, 6, CLIENTS)[:, None]
    return torch.randn(CLIENTS, DIM, generator=generator) * lengths


def _begin(memory: Memory) -> Tensors:
    rng = np.random.default_rng(0)
    return first_state(memory, Begin(torch.zeros(DIM), CLIENTS, ROUNDS, rng))


def _keeps_its_form(memory: Memory) -> None:
    for message in (_rows(1), torch.zeros(CLIENTS, DIM), torch.full((CLIENTS, DIM), 1e6)):
        learned = memory.learn(torch.zeros(CLIENTS, DIM), message)
        assert learned.shape == (CLIENTS, DIM), (
            f"{memory} remembers {tuple(learned.shape)} of {CLIENTS} clients with {DIM} numbers"
        )
        assert learned.dtype == torch.float32, f"{memory} remembers {learned.dtype}, not float32"
        assert torch.isfinite(learned).all(), f"{memory} remembers a number that is not finite"


def _looks_at_one_client(memory: Memory) -> None:
    """What one client remembers is the same with other clients beside it, or with none."""
    remembered, message = _rows(2), _rows(3)
    before = remembered.clone(), message.clone()
    together = memory.learn(remembered, message)
    alone = torch.cat(
        [memory.learn(v[None], b[None]) for v, b in zip(remembered, message, strict=True)]
    )
    assert torch.allclose(together, alone, rtol=1e-6, atol=0), (
        f"{memory}: what a client remembers depends on other clients"
    )
    again = memory.learn(remembered, message)
    assert torch.equal(together, again), f"{memory} learns something else the second time"
    unharmed = torch.equal(remembered, before[0]) and torch.equal(message, before[1])
    assert unharmed, f"{memory} changes what it is given in place. Return a new tensor"


def _rounds_look_at_one_client(memory: Memory) -> None:
    """What a round makes of a client's memory does not depend on the clients beside it."""
    state, width = _begin(memory), memory.width(DIM)
    remembered = torch.cat([_rows(seed) for seed in range(-(-width // DIM))], dim=1)[:, :width]
    update, message = _rows(7), _rows(8)
    calls: dict[str, tuple[Callable[..., Tensor], int]] = {
        "compare": (lambda v, u, b: memory.compare(v, u), DIM),
        "correction": (lambda v, u, b: memory.correction(v, state), DIM),
        "after": (lambda v, u, b: memory.after(v, u, b, state), width),
    }
    for name, (call, wanted) in calls.items():
        if name == "correction" and not memory.corrects:
            continue
        together = call(remembered, update, message)
        assert together.shape == (CLIENTS, wanted), (
            f"{memory}.{name} gives {tuple(together.shape)}, not {(CLIENTS, wanted)}"
        )
        assert torch.isfinite(together).all(), f"{memory}.{name} is not finite"
        each = zip(remembered, update, message, strict=True)
        alone = torch.cat([call(v[None], u[None], b[None]) for v, u, b in each])
        assert torch.allclose(together, alone, rtol=1e-6, atol=0), (
            f"{memory}.{name}: one client's depends on other clients"
        )


def _server_sees_releases_alone(memory: Memory) -> None:
    """The same means give the same directions, whatever clients learned between the rounds."""
    courses = []
    for seed in (None, 4, 5):
        state, found = _begin(memory), []
        for round, mean in enumerate(_rows(6)[:ROUNDS]):
            if seed is not None:
                memory.learn(_rows(seed + round), _rows(seed + round + 1))
            direction, after = memory.step(copied(state), mean.clone())
            assert direction.shape == (DIM,), f"{memory} gives a direction of {direction.shape}"
            assert direction.dtype == torch.float32, f"{memory} gives {direction.dtype}"
            check_same_form(memory, state, after)
            state = after
            found += [direction, *(after[name].float() for name in sorted(after))]
        courses.append(torch.cat([leaf.flatten() for leaf in found]))
    first, *others = courses
    assert all(torch.equal(first, other) for other in others), (
        f"{memory}: the server's direction depends on messages that were not released"
    )


def _workers_are_a_set(memory: Memory) -> None:
    for cohort in (np.arange(0), np.array([2, 5]), np.arange(CLIENTS)):
        workers = memory.workers(cohort, CLIENTS)
        ascending = (np.diff(workers) > 0).all() if len(workers) else True
        assert ascending, f"{memory}: workers {workers} are not ascending, or one is there twice"
        assert np.isin(cohort, workers).all(), f"{memory}: of {cohort} only {workers} work"
        inside = not len(workers) or (workers[0] >= 0 and workers[-1] < CLIENTS)
        assert inside, f"{memory}: workers {workers} are not among {CLIENTS} clients"
