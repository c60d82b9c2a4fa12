"""What user-defined parts get is theirs, and what they return is what the loop can use."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil.data.federated import Federated
from fedveil.engines.asking import of_each
from fedveil.errors import UserError
from fedveil.loop import begin, rehearse, run_round
from fedveil.parts import (
    AdaptiveClip,
    Clip,
    Cohort,
    Gaussian,
    Noise,
    Poisson,
    RandomIterate,
    Server,
    StochasticRound,
    Tensors,
)
from fedveil.parts.local import SGD, LocalPlan
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.report import Difference, PseudoGradient
from fedveil.parts.schedule import Constant
from fedveil.parts.server import LastIterate, Momentum
from fedveil.recipe import Recipe
from fedveil.testing.recipes import check_neighbours
from fedveil.testing.replay import Scripted, normal_answers, people
from fedveil.training.checkpoint import write_round
from fedveil.training.prepare import prepare
from fedveil.training.start import finish, resume, start, train

CLIENTS, DIM, ROUNDS = 8, 6, 5
LOCAL = SGD(Constant(0.1), steps=1)
RECIPE = Recipe("own", local=LOCAL, cohort=Poisson(0.5), bound=Clip(0.7), noise=Gaussian(2.0))


def odd(base: type, *fields: Any, **members: Any) -> Any:
    """A part of the user's own class `Odd`, with some members changed."""
    kind = type("Odd", (base,), {"__module__": __name__, **members})
    return dataclass(frozen=True)(kind)(*fields)


def rounds(recipe: Recipe, count: int = ROUNDS) -> dict[str, Tensor]:
    """The state after some rounds of scripted clients, by slot and name."""
    data, engine = people(CLIENTS), Scripted(normal_answers(CLIENTS, DIM))
    state = begin(recipe, torch.zeros(DIM), data, count, 0)
    for _ in range(count):
        state, _ = run_round(recipe, state, data, engine, 0, diagnostics=True)
    kept = {
        f"{slot}.{name}": leaf for slot, own in state.parts.items() for name, leaf in own.items()
    }
    assert state.moved is not None
    return {"x": state.x, "moved": state.moved, **kept}


# What parts do to the tensors of the loop


@dataclass(frozen=True)
class InPlaceStep(Momentum):
    """As Momentum, in the tensors that it is given."""

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        state["momentum"].mul_(self.momentum).add_(descent)
        descent.zero_()
        return x.sub_(self.rate(round) * state["momentum"]), state


@dataclass(frozen=True)
class InPlaceLearning(ErrorCompensation):
    """As ErrorCompensation, in the tensors that it is given."""

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        return remembered.add_(self.beta * message)

    def step(self, state: Tensors, mean: Tensor) -> tuple[Tensor, Tensors]:
        self.learn(state["direction"], mean)
        mean.zero_()
        return state["direction"], state


@dataclass(frozen=True)
class InPlaceDescent(Difference):
    """As Difference, and the model is changed on the way."""

    def descent(self, mean: Tensor, x: Tensor) -> Tensor:
        x.zero_()
        return mean.neg_()


@dataclass(frozen=True)
class InPlaceOutput(RandomIterate):
    """As RandomIterate, with a model of its own."""

    def follow(self, kept: Tensors, x: Tensor, round: int) -> Tensors:
        if round + 1 <= int(kept["chosen"]):
            kept["model"].copy_(x)
        x.zero_()
        return kept


@dataclass(frozen=True)
class BufferedNoise(Gaussian):
    """As Gaussian, and the same tensor in every round, which the next draw overwrites."""

    def draw(self, *given: Any) -> Tensor:
        drawn = super().draw(*given)
        if not hasattr(self, "buffer"):
            object.__setattr__(self, "buffer", torch.zeros_like(drawn))
        return self.buffer.copy_(drawn)  # type: ignore[attr-defined, no-any-return]

    event = Gaussian.event


@dataclass(frozen=True)
class InPlaceCohort(Poisson):
    """As Poisson, and the state is reset after each draw."""

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        drawn = super().draw(population, rng, state)
        if state:
            state["taken"].zero_()
        return drawn

    def step(self, state: Tensors, drawn: np.ndarray) -> Tensors:
        after = super().step(state, drawn)
        drawn.fill(0)
        return after


ITERATE = replace(RECIPE, output=RandomIterate())
IN_PLACE: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "server": (replace(ITERATE, server=Momentum()), {"server": InPlaceStep()}),
    "memory": (
        replace(ITERATE, memory=ErrorCompensation(0.1)),
        {"memory": InPlaceLearning(0.1), "server": InPlaceStep(momentum=0.0)},
    ),
    "report": (ITERATE, {"report": InPlaceDescent()}),
    "output": (ITERATE, {"output": InPlaceOutput()}),
    "noise": (ITERATE, {"noise": BufferedNoise(2.0)}),
    "cohort": (replace(ITERATE, cohort=Poisson(0.5, cap=2)), {"cohort": InPlaceCohort(0.5, cap=2)}),
}


@pytest.mark.parametrize("slot", IN_PLACE)
def test_a_part_that_writes_to_what_it_is_given_changes_nothing_else(slot: str) -> None:
    recipe, own = IN_PLACE[slot]
    wanted, found = rounds(recipe), rounds(replace(recipe, **own))
    assert float(wanted["moved"].norm()) > 0
    for name in wanted.keys() & found.keys() - {"server.momentum"}:
        assert torch.equal(wanted[name], found[name]), name


def test_a_part_keeps_no_tensor_of_the_loop() -> None:
    kept: list[Tensor] = []

    def step(self: Any, x: Tensor, descent: Tensor, state: Tensors, round: int) -> Any:
        for one in kept:
            one.fill_(1e9)
        kept.extend((x, descent, *state.values()))
        model = x - descent
        kept.append(model)
        return model, state

    after = rounds(replace(RECIPE, server=odd(Server, step=step)))
    assert all(bool((leaf.abs() < 1e3).all()) for leaf in after.values())


# What parts return


def giving(answer: Any) -> Callable[..., Any]:
    return lambda self, *given: answer(*given) if callable(answer) else answer


def with_odd(slot: str, base: type, method: str, *fields: Any, **members: Any) -> Any:
    """A recipe by the answer of one of its parts."""
    return lambda answer: replace(
        RECIPE, **{slot: odd(base, *fields, **{method: giving(answer), **members})}
    )


MEAN = {"expected": lambda self, population: 2.0}
EVENT = {"event": lambda self, *given: Gaussian(2.0).event(*given)}
cohort = with_odd("cohort", Cohort, "draw", **MEAN)
noise = with_odd("noise", Noise, "draw", **EVENT)
server = with_odd("server", Server, "step")
output = with_odd("output", LastIterate, "follow")
scaled = with_odd("bound", Clip, "scale", 0.7)
bounded = with_odd("bound", Clip, "rows", 0.7, radial=False)
adapted = with_odd("bound", AdaptiveClip, "at", 0.7, joined=AdaptiveClip.joined)
followed = with_odd("bound", AdaptiveClip, "step", 0.7, joined=AdaptiveClip.joined)
norms = with_odd("quantize", StochasticRound, "norms", 16)
rounding = with_odd("quantize", StochasticRound, "__call__", 16)
planned = with_odd("local", SGD, "plan", Constant(0.1), 1)
rated = with_odd("local", SGD, "rate", Constant(0.1), 1)
affine = with_odd("report", PseudoGradient, "affine")
descent = with_odd("report", Difference, "descent")
workers, width, step, learn, compare, after = (
    with_odd("memory", ErrorCompensation, method, 0.1)
    for method in ("workers", "width", "step", "learn", "compare", "after")
)
X, ONE = torch.zeros(DIM), torch.ones(1, DIM)
WHOLE = torch.zeros(1, 1, 1, dtype=torch.int64)
NUMBERS = r"Return a tensor of shape \(6,\)"

WRONG: dict[str, tuple[Recipe, str]] = {
    "no norms": (norms(0.7), r"Odd declares 0\.7 as its norms\. Return Norms"),
    "a list of clients": (cohort([0, 1]), r"Cohort Odd drew \[0, 1\] of 8 clients\. Return each"),
    "no clients": (cohort(None), "drew None of 8 clients"),
    "clients as a tensor": (cohort(torch.arange(2)), r"drew a tensor of shape \(2,\)"),
    "a mask of clients": (cohort(np.zeros(8, dtype=bool)), r"drew \[False False"),
    "clients as floats": (cohort(np.array([0.0, 1.0])), r"drew \[0\. 1\.\] of 8"),
    "a client below 0": (cohort(np.array([-1, 2])), r"drew \[-1  2\]"),
    "a client beyond all": (cohort(np.array([1, 8])), r"drew \[1 8\] of 8"),
    "a client twice": (cohort(np.array([1, 1])), r"drew \[1 1\]"),
    "clients out of order": (cohort(np.array([2, 1])), r"drew \[2 1\]"),
    "clients in a table": (cohort(np.array([[0], [1]])), "drew"),
    "no workers": (workers(None), "Memory Odd drew None"),
    "workers without the cohort": (
        workers(lambda cohort, n: np.arange(0)),
        "leaves out members of the cohort",
    ),
    "no noise": (noise(None), "Noise Odd returned None. " + NUMBERS),
    "noise as an array": (noise(np.zeros(DIM)), "returned an array .* " + NUMBERS),
    "noise of one number": (noise(torch.zeros(1).double()), r"shape \(1,\) .* " + NUMBERS),
    "noise in a table": (noise(torch.zeros(1, DIM).double()), r"shape \(1, 6\) .* " + NUMBERS),
    "noise in float32": (noise(torch.zeros(DIM)), "float32. Return .* type torch.float64"),
    "noise in float16": (noise(torch.zeros(DIM).half()), "float16. Return .* type torch.float64"),
    "noise in steps": (noise(torch.zeros(DIM).long()), "int64. Return .* type torch.float64"),
    "noise of NaN": (noise(torch.full((DIM,), math.nan).double()), "Odd drew .* not finite"),
    "no pair": (server(X), r"Server Odd returned a tensor .* Return two values"),
    "no model": (server((None, {})), "returned None. " + NUMBERS),
    "a model in float64": (server((X.double(), {})), "float64. Return .* type torch.float32"),
    "a shorter model": (server((X[1:], {})), r"shape \(5,\) .* " + NUMBERS),
    "a model of one number": (server((X[:1], {})), r"shape \(1,\) .* " + NUMBERS),
    "no state": (server((X, None)), "returned None. Return its state as a dictionary"),
    "a state that was not begun": (server((X, {"m": X})), r"kept \[\] and then \['m'\]"),
    "no direction": (step((None, {})), r"kept \['direction'\] and then \[\]"),
    "a shorter direction": (
        step(lambda state, mean: (mean[1:], state)),
        r"Memory Odd returned .*\(5,\) .* " + NUMBERS,
    ),
    "no memory": (learn(None), "returned None. Return a tensor of shape"),
    "nothing compared": (compare(None), r"returned None\. .* shape \(1, 6\)"),
    "compared in one number": (compare(ONE[:, :1]), r"\(1, 1\) .* \(1, 6\)"),
    "remembered too little": (after(ONE[:, 1:]), r"\(1, 5\) .* \(1, 6\)"),
    "no width": (width(None), "Memory Odd: width is None"),
    "half a number wide": (width(0.5), "width is 0.5"),
    "no scale": (scaled(None), r"Bound Odd returned None. Return a tensor of shape \(1,\)"),
    "a scale as a number": (scaled(0.5), "returned 0.5. Return a tensor"),
    "two scales": (scaled(torch.ones(2)), r"shape \(2,\) .* shape \(1,\)"),
    "no rows": (bounded(None), "Bound Odd returned None"),
    "rows of complex numbers": (bounded(ONE.cfloat()), "complex64. Return"),
    "a shorter row": (bounded(ONE[:, 1:]), r"\(1, 5\) .* \(1, 6\)"),
    "two rows": (bounded(torch.ones(2, DIM)), r"\(2, 6\) .* \(1, 6\)"),
    "no bound": (adapted(None), "Bound Odd returned None. Return the bound of the round"),
    "no threshold": (followed({}), r"kept \['threshold'\] and then \[\]"),
    "a threshold as a number": (followed({"threshold": 0.5}), "keeps 'threshold' as 0.5"),
    "no steps": (rounding(None), "Quantize Odd returned None"),
    "steps in floats": (rounding(lambda row, *_: row), r"float32. Return .* type torch.int64"),
    "steps of all": (rounding(torch.zeros(DIM).long()), r"\(6,\) .* \(1, 6\)"),
    "no plan": (planned(None), "Local Odd returned None. Return a LocalPlan"),
    "a plan without rates": (planned(LocalPlan(WHOLE, None)), "with rates in None"),  # type: ignore[arg-type]
    "a plan of floats": (planned(LocalPlan(WHOLE.float(), ONE)), "Use int64 indexes"),
    "a rate that is NaN": (planned(LocalPlan(WHOLE, ONE * math.nan)), "finite rates"),
    "an example below -1": (planned(LocalPlan(WHOLE - 2, ONE[:, :1])), "of other clients"),
    "no rate": (rated(None), "Local Odd has the rate None in round 1"),
    "a rate below 0": (rated(-1.0), r"has the rate -1\.0"),
    "no scale of a report": (affine(None), "Report Odd returned None"),
    "an infinite share": (affine((1.0, math.inf)), r"returned \(1.0, inf\). Return two finite"),
    "a shorter descent": (descent(X[1:]), r"Report Odd returned .*\(5,\)"),
    "no output": (output(None), "Output Odd returned None"),
    "an output without a model": (output({}), r"kept \['model'\] and then \[\]"),
    "an output of a shorter model": (output({"model": X[1:]}), r"kept model as \(6,\) .*\(5,\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused_with_its_part_and_the_fix(name: str) -> None:
    recipe, words = WRONG[name]
    with pytest.raises(UserError, match=words):
        rounds(recipe, 1)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused_before_a_round_is_charged(name: str) -> None:
    recipe, words = WRONG[name]
    data = people(CLIENTS)
    with pytest.raises(UserError, match=words):
        rehearse(recipe, begin(recipe, torch.zeros(DIM), data, 1, 0), data)


@pytest.mark.parametrize("share", [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_refused_before_a_round_is_charged(
    share: float, blobs: Federated
) -> None:
    recipe = server(lambda x, descent, state, round: (x + share, state))
    with pytest.raises(UserError, match="Server Odd returned a model that is not finite"):
        prepare(recipe, blobs, rounds=1)


@pytest.mark.parametrize("expected", [0, 0.0, -1.0, math.nan, math.inf, None, "2"], ids=repr)
def test_a_denominator_is_a_number_above_zero(expected: Any, blobs: Federated) -> None:
    part = odd(Poisson, 0.5, expected=lambda self, n: expected)
    with pytest.raises(UserError, match=r"Cohort Odd expects .* Return a number above 0"):
        prepare(replace(RECIPE, cohort=part), blobs, rounds=1)


def test_a_part_is_not_asked_about_nobody() -> None:
    part = odd(Clip, 0.7, rows=lambda self, rows: torch.ones(3, DIM), radial=False)
    assert of_each(part, part.rows, torch.zeros(0, DIM)).shape == (0, DIM)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float16, torch.float32])
def test_scales_of_any_real_type_are_held_to_the_norms(kind: torch.dtype) -> None:
    part = odd(Clip, 0.7, scale=lambda self, norms: torch.ones(1, dtype=kind))
    check_neighbours(replace(RECIPE, bound=part))


# States


def with_state(state: Any, after: Callable[[Any], Any] = lambda state: state) -> Recipe:
    def step(self: Any, x: Tensor, descent: Tensor, state: Any, round: int) -> Any:
        return x - descent, after(state)

    begun = {"initial_state": lambda self, begin: state, "step": step}
    return replace(RECIPE, server=odd(Server, **begun))


STATES: dict[str, tuple[Recipe, str]] = {
    "a number": (with_state({"rounds": 0}), "Server Odd keeps 'rounds' as 0 in its state"),
    "a list": (with_state([]), r"Odd returned \[\]. Return its state as a dictionary"),
    "nothing": (with_state(None), "returned None. Return its state as a dictionary"),
    "an array": (with_state({"m": np.zeros(2)}), r"keeps 'm' as an array of shape \(2,\)"),
    "a nameless one": (with_state({0: X}), "keeps 0 as a tensor"),
    "a type that no file has": (with_state({"m": X.bfloat16()}), "'m' as .*bfloat16 on cpu"),
    "complex numbers": (with_state({"m": X.cfloat()}), "complex64 on cpu, which a checkpoint"),
    "a sparse one": (with_state({"m": X.to_sparse()}), "'m' as torch.sparse_coo"),
    "one on no device": (with_state({"m": X.to("meta")}), "on meta"),
}
CHANGED: dict[str, tuple[Recipe, str]] = {
    "a growing one": (
        with_state({"m": X[:0]}, lambda state: {"m": torch.cat([state["m"], X])}),
        r"Server Odd kept m as \(0,\) torch.float32 and then as \(6,\)",
    ),
    "another type": (with_state({"m": X}, lambda _: {"m": X.double()}), "then as .*float64"),
    "another name": (with_state({"m": X}, lambda _: {"n": X}), r"kept \['m'\] and then \['n'\]"),
    "a number": (with_state({"m": X}, lambda _: {"m": 0}), "keeps 'm' as 0"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_cannot_be_saved_is_refused_when_it_begins(name: str) -> None:
    recipe, words = STATES[name]
    with pytest.raises(UserError, match=words):
        begin(recipe, torch.zeros(DIM), people(CLIENTS), 1, 0)


@pytest.mark.parametrize("name", CHANGED)
def test_a_state_that_changes_its_form_is_refused_before_it_is_charged(
    name: str, blobs: Federated
) -> None:
    recipe, words = CHANGED[name]
    with pytest.raises(UserError, match=words):
        rounds(recipe, 1)
    with pytest.raises(UserError, match=words):
        prepare(recipe, blobs, rounds=1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_any_number_in_a_state_can_be_resumed(
    value: float, blobs: Federated, tmp_path: Path
) -> None:
    def after(state: Any) -> Any:
        return {"least": state["least"], "rounds": state["rounds"] + 1}

    first = {"least": torch.tensor(value), "rounds": torch.tensor(0)}
    recipe = with_state(first, after)
    whole = train(recipe, blobs, rounds=4)
    training = start(prepare(recipe, blobs, rounds=4, checkpoint_every=1), tmp_path / "a")
    for _ in range(2):
        write_round(training, training.step())
    training.close()
    again = resume(prepare(recipe, blobs, rounds=4, checkpoint_every=1), tmp_path / "a")
    assert int(again.state.parts["server"]["rounds"]) == 2
    result = finish(again)
    for one, other in zip(whole.model.parameters(), result.model.parameters(), strict=True):
        assert torch.equal(one, other)


# Randomness


def from_torch(*_: Any) -> Tensor:
    return torch.randn(DIM, dtype=torch.float64)


def from_numpy(*_: Any) -> Tensor:
    return torch.from_numpy(np.random.normal(size=DIM))  # noqa: NPY002


def from_python(*_: Any) -> Tensor:
    return torch.tensor([random.gauss(0, 1) for _ in range(DIM)], dtype=torch.float64)


GLOBAL = {"torch": from_torch, "NumPy": from_numpy, "Python": from_python}


@pytest.mark.parametrize("name", GLOBAL)
def test_noise_from_a_global_generator_is_refused_by_its_own_name(
    name: str, blobs: Federated
) -> None:
    recipe = noise(lambda message, *rest: GLOBAL[name]().new_zeros(message.dim))
    with pytest.raises(UserError, match=f"Noise Odd draws from {name}'s global random"):
        rounds(recipe, 1)
    with pytest.raises(UserError, match=f"Noise Odd draws from {name}'s global random"):
        prepare(recipe, blobs, rounds=1)


DRAWING: dict[str, Recipe] = {
    "Cohort": cohort(lambda n, *_: torch.randperm(n)[:2].sort().values.numpy()),
    "Server": server(lambda x, d, state, round: (x - torch.rand(DIM) * d, state)),
    "Bound": scaled(lambda norms: torch.rand(1)),
    "Quantize": rounding(lambda row, *_: (row * torch.rand(1)).long()),
    "Memory": learn(lambda v, b: v + b * torch.rand(1)),
    "Local": rated(lambda round: random.random()),
    "Report": descent(lambda mean, x: mean * torch.rand(1)),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_every_part_is_held_to_its_own_stream(kind: str) -> None:
    with pytest.raises(UserError, match=f"{kind} Odd draws from .* global random generator"):
        rounds(DRAWING[kind], 1)
