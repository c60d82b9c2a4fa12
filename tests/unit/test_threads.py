"""Work on threads: answers in order, one core each, nothing left behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

from fedveil import algorithms, threads
from fedveil.data.federated import Examples, Federated
from fedveil.engines import choose
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.loop import begin, run_round
from fedveil.parts.bound import Clip
from fedveil.parts.cohort import FixedSize
from fedveil.parts.local import SGD
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.noise import Gaussian
from fedveil.parts.quantize import NoQuantization, Quantize, StochasticRound
from fedveil.parts.report import Difference
from fedveil.parts.schedule import Constant
from fedveil.random.samplers import PIECE, normals
from fedveil.recipe import Recipe
from fedveil.threads import cores, equal_shares, in_order
from fedveil.training.start import train


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_answers_come_in_order_although_a_later_one_is_ready_first() -> None:
    second_done, first_began = threading.Event(), threading.Event()

    def work(item: int) -> tuple[int, int]:
        if item == 0:
            first_began.set()
            assert second_done.wait(10)
        elif item == 1:
            assert first_began.wait(10)
            second_done.set()
        return item, torch.get_num_threads()

    assert list(in_order(work, range(7))) == [(item, 1) for item in range(7)]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_reaches_the_caller_and_threads_are_as_before() -> None:
    def work(item: int) -> int:
        return 1 // (3 - item)

    with pytest.raises(ZeroDivisionError):
        list(in_order(work, range(20)))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("count", "most"), [(0, 4), (1, 4), (5, 3), (25, 4), (100, 7), (600, 1000)]
)
def test_shares_are_complete_small_enough_and_even(count: int, most: int) -> None:
    shares = equal_shares(count, most)
    assert [i for share in shares for i in range(count)[share]] == list(range(count))
    sizes = [share.stop - share.start for share in shares]
    assert all(1 <= size <= most for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(shares) % cores() == 0 or len(shares) == count


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("count", "most", "least", "sizes"),
    [
        (30, 100, 31, [30]), (30, 100, 15, [15, 15]), (30, 100, 11, [15, 15]),
        (30, 8, 31, [7, 8, 7, 8]), (3, 100, 2, [3]), (0, 100, 5, []),
    ],
)  # fmt: skip
def test_shares_that_are_not_worth_a_core_are_joined(
    monkeypatch: pytest.MonkeyPatch, count: int, most: int, least: int, sizes: list[int]
) -> None:
    """As far as one group may grow."""
    monkeypatch.setattr(threads, "cores", lambda: 2)
    shares = equal_shares(count, most, least)
    assert [share.stop - share.start for share in shares] == sizes


def population() -> Federated:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.random((60, 1, 8, 8), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, 60))
    return Federated("p", inputs, labels, torch.arange(0, 61, 3), Examples(inputs, labels), 3)


ENGINES = {"factored": FactoredEngine, "dense": DenseEngine, "loop": LoopEngine}


def played(
    engine: str, threads: int, quantize: Quantize, beta: float | None, group: int = 2
) -> torch.Tensor:
    """The model after two rounds in groups of so many at most."""
    data = population()
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)
    )
    with torch.no_grad():
        for leaf in module.parameters():
            leaf.copy_(torch.linspace(-0.3, 0.4, leaf.numel()).reshape(leaf.shape))
    task = Task(module, "cross_entropy")
    memory = {} if beta is None else {"memory": ErrorCompensation(beta, "everyone")}
    recipe = Recipe(
        "threads", SGD(Constant(0.5), epochs=2, batch=2), FixedSize(9), Difference(),
        bound=Clip(0.3), quantize=quantize, noise=Gaussian(0.1), **memory,
    )  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        state = begin(recipe, task.flatten(), data, 2, 7)
        for _ in range(2):
            state, _ = run_round(recipe, state, data, ENGINES[engine](task, group), 7)
    finally:
        torch.set_num_threads(before)
    return state.x


MESSAGES: dict[str, tuple[Quantize, float | None]] = {
    "sum": (NoQuantization(), None),
    "memory": (NoQuantization(), 0.5),
    "rounded": (StochasticRound(64), None),
}


SMALL = [(engine, message, 2) for engine in ENGINES for message in MESSAGES]
LARGE = [(engine, message, 100) for engine, message in zip(ENGINES, MESSAGES, strict=True)]


@pytest.mark.parametrize(("engine", "message", "group"), [*SMALL, *LARGE])
def test_a_run_is_the_same_on_any_number_of_threads(engine: str, message: str, group: int) -> None:
    """Many groups of two, of everything; one large group of each engine and each message."""
    quantize, beta = MESSAGES[message]
    one = played(engine, 1, quantize, beta, group)
    for _ in range(2):
        assert torch.equal(played(engine, 3, quantize, beta, group), one)


@pytest.mark.parametrize(("quantize", "beta"), MESSAGES.values(), ids=MESSAGES)
def test_runs_of_other_recipes_differ(quantize: Quantize, beta: float | None) -> None:
    """So that the check above has power."""
    one, other = (played("factored", 1, quantize, each) for each in (beta, 0.1))
    assert float((one - other).abs().max()) > 1e-3


class Shifted(nn.Module):
    """A linear model with a buffer, of which each thread has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(64))
        self.last = nn.Linear(64, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(inputs.flatten(1) - self.shift)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_that_nobody_writes_are_no_state_on_any_thread(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread's copy is compared after every round with what it was when it was made."""
    monkeypatch.setattr(choose, "SETTING_OUT", dict.fromkeys(choose.SETTING_OUT, 0.0))
    recipe = algorithms.fedavg(steps=2)
    result = train(recipe, population(), Shifted(), rounds=2, engine=engine)
    assert len(result.records) == 2


def test_long_noise_does_not_depend_on_the_number_of_threads() -> None:
    def drawn(threads: int) -> np.ndarray:
        torch.set_num_threads(threads)
        return normals(3 * PIECE + 5, np.random.Generator(np.random.Philox(3)))

    before = torch.get_num_threads()
    try:
        one, three = drawn(1), drawn(3)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(one, three)
    pieces = [one[start : start + PIECE] for start in range(0, 3 * PIECE, PIECE)]
    for i, piece in enumerate(pieces):
        assert abs(piece.mean()) < 5 / PIECE**0.5
        assert abs(piece.std() - 1) < 5 / PIECE**0.5
        for other in pieces[:i]:
            assert abs(np.corrcoef(piece, other)[0, 1]) < 5 / PIECE**0.5
