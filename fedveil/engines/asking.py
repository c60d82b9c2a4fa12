"""Ask the parts of a recipe, and check what they return.

A part from outside fedveil sees copies of the loop's tensors, and its answer is copied: it may
write to what it is given, keep it, and return the same tensor every time. An answer that the loop
cannot use is refused with the part's name, what it returned and what it must return
(docs/privacy.md, "User-defined parts").
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.norms import Limits, Norms
from fedveil.errors import UserError, told
from fedveil.models.side_effects import refusing_draws
from fedveil.parts.bound import Bound
from fedveil.parts.checks import count, number
from fedveil.parts.cohort import Cohort
from fedveil.parts.local import Local, LocalPlan
from fedveil.parts.memory import Memory
from fedveil.parts.noise import Noise
from fedveil.parts.part import Begin, Part, Tensors, foreign
from fedveil.parts.quantize import Quantize
from fedveil.parts.report import Report
from fedveil.parts.server import Output, Server

ONE_AT_A_TIME = threading.RLock()  # for parts from outside fedveil, which may share a buffer
STORED = (  # the types of numbers that a checkpoint can hold
    *(torch.float32, torch.float64, torch.float16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


@contextmanager
def held_to_its_stream(part: Part) -> Iterator[None]:
    """Let a part from outside run in one thread at a time, and draw only from its own stream."""
    if not foreign(part):
        yield
        return
    with ONE_AT_A_TIME, refusing_draws(called(part)):
        try:
            yield
        except UserError:
            raise
        except Exception as problem:  # of the user's own code
            why = str(problem).partition("\n")[0]
            raise UserError(
                f"{called(part)} failed with {type(problem).__name__}: {why}. Correct that part."
            ) from problem


def ask(part: Part, question: str, *given: Any) -> Any:
    """What a part answers. One from outside sees copies, and its answer is copied."""
    if not foreign(part):
        return getattr(part, question)(*given)
    with held_to_its_stream(part):
        return copied(getattr(part, question)(*copied(given)))


def of_each(
    part: Part, function: Callable[..., Tensor], *rows: Tensor, width: int | None = None
) -> Tensor:
    """A function of a part on rows of clients, each of whom gets a row of `width` numbers.

    One from outside sees copies of one client's rows at a time. By default, an answer has the shape
    of the first of them.
    """
    if not foreign(part):
        return function(*rows)
    shape = rows[0].shape[1:] if width is None else (width,)
    found = [rows[0].new_zeros((0, *shape))]
    with held_to_its_stream(part):
        for each in zip(*rows, strict=True):
            answer = function(*(row[None].clone() for row in each))
            refuse_other_shape(part, answer, (1, *shape))
            found.append(copied(answer))
    return torch.cat(found)


def copied(value: Any) -> Any:
    """The same value in memory of its own, as far as it has tensors or arrays."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {name: copied(leaf) for name, leaf in value.items()}
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    return replace(value, x=copied(value.x)) if isinstance(value, Begin) else value


def called(part: object) -> str:
    """The kind and the class of a part, as in "Noise Gaussian"."""
    while (inside := getattr(part, "stranger", None)) is not None:
        part = inside
    kinds = (base.__name__ for base in type(part).__mro__ if Part in base.__bases__)
    return f"{next(kinds, 'Part')} {type(part).__name__}"


def refused(part: object, found: object, wanted: str) -> UserError:
    """The error for an answer that the loop cannot use."""
    return UserError(f"{called(part)} returned {_seen(found)}. Return {wanted}.")


def _seen(found: object) -> str:
    if isinstance(found, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(found, Tensor) else "an array"
        return f"{kind} of shape {tuple(found.shape)} and type {found.dtype}"
    return told(found)


def refuse_other_shape(
    part: Part, found: object, shape: tuple[int, ...], *kinds: torch.dtype
) -> None:
    """Refuse what is not a tensor of this shape: a coordinate must not count more than once."""
    if isinstance(found, Tensor) and tuple(found.shape) == shape:
        typed = found.dtype in kinds if kinds else not found.is_complex()
        if typed and found.device.type == "cpu":
            return
    kind = f" and type {kinds[0]}" if kinds else ""
    raise refused(part, found, f"a tensor of shape {shape}{kind}")


# States


def first_state(part: Part, begin: Begin) -> Tensors:
    """The state of a part before the first round, which a checkpoint can hold."""
    found: Tensors = ask(part, "initial_state", begin)
    if foreign(part):
        refuse_unsaved(part, found)
    if foreign(part) and isinstance(part, Output):
        _refuse_no_model(part, found, begin.x)
    return found


def next_state(part: Part, before: Tensors, found: Tensors) -> Tensors:
    """The state after a round, with the names, shapes and types of the one before it."""
    if foreign(part):
        refuse_unsaved(part, found)
        refuse_other_form(part, before, found)
    return found


def refuse_unsaved(part: Part, state: object) -> None:
    """Refuse a state that a checkpoint cannot hold: the run could not be resumed."""
    if not isinstance(state, dict):
        raise refused(part, state, "its state as a dictionary of tensors")
    for name, leaf in state.items():
        if not isinstance(name, str) or not isinstance(leaf, Tensor):
            raise UserError(
                f"{called(part)} keeps {told(name)} as {_seen(leaf)} in its state. Keep a tensor "
                "under a name, such as {'rounds': torch.tensor(0)}."
            )
        plain = leaf.layout == torch.strided and leaf.device.type == "cpu"
        if leaf.dtype not in STORED or not plain:
            raise UserError(
                f"{called(part)} keeps '{name}' as {leaf.layout} {leaf.dtype} on {leaf.device}, "
                "which a checkpoint cannot hold. Keep a dense tensor on the CPU, such as float32."
            )


def refuse_other_form(part: Part, before: Tensors, after: Tensors) -> None:
    """Refuse a state that changes its names, shapes or types: the run could not be resumed."""
    if before.keys() != after.keys():
        raise UserError(
            f"{called(part)} kept {sorted(before)} and then {sorted(after)}. Return every tensor "
            "of the state from initial_state and from each step."
        )
    for name, leaf in after.items():
        first = before[name]
        if (first.shape, first.dtype) != (leaf.shape, leaf.dtype):
            raise UserError(
                f"{called(part)} kept {name} as {tuple(first.shape)} {first.dtype} and then as "
                f"{tuple(leaf.shape)} {leaf.dtype}. Keep the shape and type of initial_state."
            )


def _refuse_no_model(part: Part, state: Tensors, x: Tensor) -> None:
    model = state.get("model")
    if model is None or (model.shape, model.dtype) != (x.shape, x.dtype):
        raise UserError(
            f"{called(part)} keeps {_seen(model)} as its model. Keep the released model as "
            f"'model', a tensor of shape {tuple(x.shape)} and type {x.dtype}."
        )


def _pair(part: Part, found: object, before: Tensors) -> tuple[Any, Tensors]:
    """A vector and the next state."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise refused(part, found, "two values: a tensor and the next state")
    return found[0], next_state(part, before, found[1])


# Cohorts


def expected_of(cohort: Cohort, population: int) -> float:
    """The public denominator, a number above 0."""
    found = cohort.expected(population)
    if not number(found) or not 0 < found < math.inf:
        raise UserError(
            f"{called(cohort)} expects {told(found)} of {population} clients. Return a number "
            "above 0 from `expected`."
        )
    return float(found)


def honest_of(cohort: Cohort, population: int) -> int:
    """The least number of honest clients in a round, a whole number from 1 to the population."""
    found = cohort.min_honest(population)
    if not isinstance(found, int) or not 1 <= found <= population:
        raise UserError(
            f"{called(cohort)} relies on {told(found)} of {population} clients. Return a whole "
            "number from 1 to the population from `min_honest`."
        )
    return found


def draw_of(
    cohort: Cohort, population: int, rng: np.random.Generator, state: Tensors
) -> np.ndarray:
    """The cohort of a round, a set of clients."""
    return _a_set(cohort, ask(cohort, "draw", population, rng, state), population)


def cohort_after(cohort: Cohort, state: Tensors, drawn: np.ndarray) -> Tensors:
    """The state of a cohort after a draw."""
    return next_state(cohort, state, ask(cohort, "step", state, drawn.copy()))


def width_of(memory: Memory, dim: int) -> int:
    """How many numbers a client keeps."""
    found: int = ask(memory, "width", dim)
    count(called(memory), "width", found)
    return found


def workers_of(memory: Memory, cohort: np.ndarray, population: int) -> np.ndarray:
    """The clients that work in a round, a set with the cohort in it."""
    found = _a_set(memory, ask(memory, "workers", cohort.copy(), population), population)
    if not np.isin(cohort, found, assume_unique=True).all():
        raise UserError(
            f"{called(memory)} leaves out members of the cohort. Return the cohort from `workers`, "
            "or the cohort and other clients."
        )
    return found


def _a_set(part: Part, drawn: object, population: int) -> np.ndarray:
    """Indexes of clients. A client that is drawn twice would count twice in the sum."""
    listed = isinstance(drawn, np.ndarray) and drawn.ndim == 1 and drawn.dtype.kind == "i"
    if listed:  # without a sign, differences wrap around
        found: np.ndarray = drawn  # type: ignore[assignment]
        inside = not len(found) or (found[0] >= 0 and found[-1] < population)
        if inside and (np.diff(found) > 0).all():
            return found
    what = str(drawn[:8]) if isinstance(drawn, np.ndarray) else _seen(drawn)
    raise UserError(
        f"{called(part)} drew {what} of {population} clients. Return each index below {population} "
        "at most once, in ascending order, as a NumPy array of integers."
    )


# Local work and updates


def plan_of(local: Local, size: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
    """The plan of one client, with its own examples only."""
    if not foreign(local):
        return local.plan(size[None], round, rng)
    rate_of(local, round)  # `plan` may rely on it
    plan = ask(local, "plan", size[None], round, rng)
    if not isinstance(plan, LocalPlan):
        raise refused(local, plan, "a LocalPlan")
    index, rates = copied(plan.index), copied(plan.rates)
    if not _fits(index, rates):
        raise UserError(
            f"{called(local)} plans {_seen(index)} with rates in {_seen(rates)} for one client. "
            "Use int64 indexes [1, steps or 1, width] and finite rates [1, steps] of at least 0."
        )
    if (index >= size).any() or (index < -1).any():
        raise UserError(
            f"{called(local)} plans examples of other clients: indexes from {int(index.min())} to "
            f"{int(index.max())} for a client with {int(size)}. Use indexes below its size, and -1 "
            "for padding."
        )
    return replace(plan, index=index, rates=rates.float())


def _fits(index: object, rates: object) -> bool:
    if not isinstance(index, Tensor) or not isinstance(rates, Tensor):
        return False
    shaped = index.ndim == 3 and rates.ndim == 2 and len(index) == len(rates) == 1
    typed = index.dtype == torch.int64 and rates.is_floating_point()
    if not shaped or not typed or index.shape[1] not in (1, rates.shape[1]):
        return False
    return bool((rates.isfinite() & (rates >= 0)).all())


def rate_of(local: Local, round: int) -> float:
    """The rate by which updates of a round are divided."""
    found: float = ask(local, "rate", round)
    if not number(found) or not 0 <= found < math.inf:
        raise UserError(
            f"{called(local)} has the rate {told(found)} in round {round + 1}. Return a number of "
            "at least 0 from `rate`."
        )
    return found


def affine_of(report: Report, local: Local, round: int) -> tuple[float, float]:
    """(scale, share) of a round's updates."""
    found = ask(report, "affine", rate_of(local, round))
    pair = isinstance(found, tuple) and len(found) == 2
    if not pair or not all(number(each) and math.isfinite(each) for each in found):
        raise refused(report, found, "two finite numbers, (scale, share), from `affine`")
    return found[0], found[1]


# Bounds, quantizers and noise


def bound_at(bound: Bound, state: Tensors) -> Bound:
    """The bound of one round, for one that adapts."""
    found: Bound = ask(bound, "at", state)
    if foreign(bound) and not isinstance(found, Bound):
        raise refused(bound, found, "the bound of the round from `at`")
    if foreign(bound) and found.threshold is not None and not number(found.threshold):
        raise UserError(
            f"{called(found)} has the threshold {told(found.threshold)}. Return a number, or None."
        )
    return found


def bound_after(
    bound: Bound, state: Tensors, short: int, came: int, expected: float, rng: np.random.Generator
) -> Tensors:
    """The next state of a bound that adapts."""
    return next_state(bound, state, ask(bound, "step", state, short, came, expected, rng))


def message_of(quantize: Quantize, row: Tensor, limits: Limits, rng: np.random.Generator) -> Tensor:
    """q_i of one client, [1, dim], of the type that its norms say."""
    if not foreign(quantize):
        return quantize(row[None], limits.bounded, rng)
    found = copied(quantize(row[None].clone(), limits.bounded, rng))
    kind = row.dtype if limits.message.grid is None else torch.int64
    refuse_other_shape(quantize, found, (1, len(row)), kind)
    return found  # type: ignore[no-any-return]


def noise_of_client(noise: Noise, message: Norms, rng: np.random.Generator) -> np.ndarray:
    """The noise that one client adds to its message, int64 grid steps [dim]."""
    found = copied(noise.each(message, rng))
    if isinstance(found, np.ndarray) and found.shape == (message.dim,) and found.dtype == np.int64:
        return found
    raise refused(noise, found, f"an array of shape ({message.dim},) and type int64 from `each`")


def noise_of_round(
    noise: Noise,
    message: Norms,
    came: int,
    expected: float,
    rng: np.random.Generator,
    state: Tensors,
) -> tuple[Tensor, Tensors]:
    """The noise on a round's sum, and the next state."""
    found = ask(noise, "step", message, came, expected, rng, state)
    drawn, after = _pair(noise, found, state)
    refuse_unfit_noise(noise, drawn, message.dim)
    return drawn, after


def refuse_unfit_noise(noise: Noise, drawn: object, dim: int) -> None:
    """Refuse noise that is not one number for each coordinate of the sum."""
    kinds = (torch.int64 if noise.needs_grid else torch.float64,) if foreign(noise) else ()
    refuse_other_shape(noise, drawn, (dim,), *kinds)
    if foreign(noise) and isinstance(drawn, Tensor) and not drawn.isfinite().all():
        raise UserError(f"{called(noise)} drew a number that is not finite. Draw finite noise.")


# What follows from the noisy mean


def direction_of(memory: Memory, state: Tensors, mean: Tensor) -> tuple[Tensor, Tensors]:
    """The server's direction from the noisy mean, and the next state of its memory."""
    found, after = _pair(memory, ask(memory, "step", state, mean), state)
    refuse_other_shape(memory, found, (len(mean),), mean.dtype)
    return found, after


def descent_of(report: Report, direction: Tensor, x: Tensor) -> Tensor:
    """The direction that the server descends along."""
    found = ask(report, "descent", direction, x)
    refuse_other_shape(report, found, (len(x),), x.dtype)
    return found  # type: ignore[no-any-return]


def model_after(
    server: Server, x: Tensor, descent: Tensor, state: Tensors, round: int
) -> tuple[Tensor, Tensors]:
    """The next model, and the next state of the server step."""
    found, after = _pair(server, ask(server, "step", x, descent, state, round), state)
    refuse_other_shape(server, found, (len(x),), x.dtype)
    return found, after


def output_after(output: Output, state: Tensors, x: Tensor, round: int) -> Tensors:
    """The state of the output after a round that ended at x."""
    return next_state(output, state, ask(output, "follow", state, x, round))
