"""Losses are per example, agree with torch, have exact slopes, and are the same in every engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import choose
from fedveil.engines.task import Task
from fedveil.engines.updates import Group
from fedveil.errors import UserError
from fedveil.models.catalog import build
from fedveil.models.loss import Huber, Loss
from fedveil.models.losses import LOSSES, Own, as_loss, correct, loss_named, target_of
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.training.prepare import prepare
from fedveil.training.start import train

TEXTS = [
    "cross_entropy", "cross_entropy(weights=[1.0, 2.0, 0.5, 1.0, 9.0])",
    "cross_entropy(smoothing=0.1)", "cross_entropy(ignore=2)", "focal(gamma=1.0)",
    "focal(weights=[1.0, 2.0, 0.5, 1.0, 9.0], gamma=0.5)", "binary(positive=3.0)", "half_squared",
    "mse", "huber(delta=0.3)",
]  # fmt: skip


def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
    gap = targets - outputs.reshape(targets.shape)
    return torch.maximum(0.9 * gap, -0.1 * gap)


def mean_of_all(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(targets.shape) - outputs.mean()).square() + 0 * targets


def made(loss: Loss, length: int | None = None, n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    shape = (n,) if length is None else (n, length)
    of_classes = loss.target == "class"
    outputs = torch.randn(*shape, *((5,) if of_classes else ()), generator=rng)
    labels = torch.randint(5, shape, generator=rng)
    targets = {"class": labels, "label": (labels > 2).float(), "number": labels.float()}
    return outputs, targets[loss.target], torch.rand(n, generator=rng)


def test_cross_entropy_of_equal_logits_is_the_log_of_the_classes() -> None:
    losses = LOSSES["cross_entropy"](torch.zeros(3, 5), torch.tensor([0, 2, 4]))
    torch.testing.assert_close(losses, torch.full((3,), math.log(5)))


def test_cross_entropy_of_a_sequence_is_the_mean_over_its_positions() -> None:
    outputs = torch.tensor([[[0.0, 0.0], [100.0, 0.0]], [[0.0, 100.0], [0.0, 0.0]]])
    losses = LOSSES["cross_entropy"](outputs, torch.tensor([[0, 0], [0, 1]]))
    expected = torch.tensor([math.log(2) / 2, (100 + math.log(2)) / 2])
    torch.testing.assert_close(losses, expected)


def test_half_squared_takes_columns_without_broadcasting() -> None:
    outputs, targets = torch.tensor([[1.0], [5.0]]), torch.tensor([3.0, 4.0])
    assert LOSSES["half_squared"](outputs, targets).tolist() == [2.0, 0.5]


def test_correct_counts_examples_and_positions() -> None:
    outputs = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    assert correct(outputs, torch.tensor([1, 1])).tolist() == [1.0, 0.0]
    assert correct(outputs[None], torch.tensor([[1, 1]])).tolist() == [0.5]


def test_positions_labelled_minus_100_count_neither_in_the_loss_nor_in_its_slope() -> None:
    loss = LOSSES["cross_entropy"]
    outputs = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, -100, 2, 3], [-100] * 4, [1, 2, 3, 4]])
    losses, kept = loss(outputs, labels), [0, 2, 3]
    torch.testing.assert_close(losses[:1], loss(outputs[:1, kept], labels[:1, kept]))
    assert float(losses[1]) == 0
    outputs.requires_grad_()
    weights = torch.tensor([0.2, 0.3, 0.5])
    (loss(outputs, labels) * weights).sum().backward()
    torch.testing.assert_close(loss.slope(outputs.detach(), labels, weights), outputs.grad)
    assert float(correct(outputs, labels)[1]) == 0


def test_ignored_positions_count_neither_in_the_loss_nor_in_the_accuracy() -> None:
    loss = loss_named("cross_entropy(ignore=-100)")
    outputs, labels, _ = made(loss, length=4)
    hidden = labels.clone()
    hidden[0, 1:], hidden[1] = -100, -100
    expected = F.cross_entropy(outputs[0, :1], labels[0, :1])
    found = loss(outputs, hidden)
    torch.testing.assert_close(found[0], expected)
    assert found[1] == 0
    right = loss.correct(outputs, hidden)
    assert right is not None
    assert right[0] == float(outputs[0, 0].argmax() == labels[0, 0])


def test_a_focal_loss_without_focus_is_cross_entropy_and_focus_forgets_easy_examples() -> None:
    outputs, labels, _ = made(LOSSES["focal"])
    plain = LOSSES["cross_entropy"](outputs, labels)
    torch.testing.assert_close(loss_named("focal(gamma=0)")(outputs, labels), plain)
    easy = torch.tensor([[9.0, 0.0]])
    assert LOSSES["focal"](easy, torch.tensor([0])) < 1e-3 * LOSSES["cross_entropy"](
        easy, torch.tensor([0])
    )
    certain = torch.tensor([[200.0, 0.0]])
    slope = loss_named("focal(gamma=0.5)").slope(certain, torch.tensor([0]), torch.ones(1))
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("length", [None, 4])
def test_slopes_are_the_gradients_of_weighted_losses(text: str, length: int | None) -> None:
    loss = loss_named(text)
    outputs, targets, weights = made(loss, length)
    leaf = outputs.clone().requires_grad_()
    (expected,) = torch.autograd.grad((loss(leaf, targets) * weights).sum(), leaf)
    torch.testing.assert_close(loss.slope(outputs, targets, weights), expected)


@pytest.mark.parametrize("text", TEXTS)
def test_each_loss_depends_on_its_own_example_only(text: str) -> None:
    loss = loss_named(text)
    outputs, targets, _ = made(loss)
    alone = torch.cat([loss(outputs[j : j + 1], targets[j : j + 1]) for j in range(len(outputs))])
    torch.testing.assert_close(loss(outputs, targets), alone)


@pytest.mark.parametrize("text", TEXTS)
def test_a_loss_is_read_back_from_its_text(text: str) -> None:
    assert str(loss_named(text)) == text
    assert loss_named(str(loss_named(text))) == loss_named(text)


def people(target: str, classes: int = 5) -> Federated:
    rng = torch.Generator().manual_seed(3)
    inputs = torch.randn(30, 4, generator=rng)
    labels = torch.randint(5, (30,), generator=rng)
    sums = inputs.sum(1)
    found = {"class": labels, "label": (sums > 0).float(), "number": sums}[target]
    loss = {"class": "cross_entropy", "label": "binary", "number": "half_squared"}[target]
    wide = classes if target == "class" else 1
    offsets = torch.tensor([0, 3, 10, 12, 30])
    return Federated("people", inputs, found, offsets, Examples(inputs, found), wide, loss)


@pytest.mark.parametrize("text", [*TEXTS, "own"])
def test_all_engines_agree(text: str) -> None:
    loss = as_loss(pinball, "number") if text == "own" else loss_named(text)
    data = people(loss.target)
    task = Task(build("mlp-6", data, torch.Generator().manual_seed(0)), data.loss, given=loss)
    local = SGD(Constant(0.2), steps=3, batch=2)
    plan = local.plan(data.sizes, 0, np.random.default_rng(0))
    group = Group(data, np.arange(data.clients), plan)
    x = task.flatten()
    found = [
        choose(name, task, data, local).engine.updates(x, group).rows()
        for name in ("loop", "dense", "factored")
    ]
    assert found[0].norm() > 0.01
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found[2], found[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_weights_that_would_cancel_are_refused(kind: type[nn.Module]) -> None:
    """torch divides by the weight of the only example. Before, they had no effect."""
    weights = torch.tensor([1.0, 20.0, 1.0])
    with pytest.raises(UserError, match="divides by the sum of the weights"):
        as_loss(kind(weight=weights), "class")
    loss = as_loss(kind(weight=weights, reduction="none"), "class")
    outputs, labels = torch.randn(4, 3).log_softmax(-1), torch.tensor([0, 1, 2, 1])
    wanted = kind(weight=weights, reduction="none")(outputs, labels)
    torch.testing.assert_close(loss(outputs, labels), wanted)


def test_torch_s_cross_entropy_is_the_one_by_name() -> None:
    """So that positions that do not count give 0 and not NaN."""
    known = as_loss(nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1), "class")
    assert known == loss_named("cross_entropy(ignore=2, smoothing=0.1)")
    assert as_loss(nn.CrossEntropyLoss(), "class") == loss_named("cross_entropy")


def test_a_loss_of_one_s_own_has_the_targets_of_the_data() -> None:
    data = people("label")
    training = prepare(
        algorithms.fedavg(), data, nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), rounds=1,
        loss=nn.BCEWithLogitsLoss(), metric="auc",
    )  # fmt: skip
    assert training.task.loss_of_examples.target == "label"


def test_a_loss_of_the_user_s_own_sees_one_example_at_a_time() -> None:
    """It would otherwise carry one client's outputs to another's gradient."""
    loss = as_loss(mean_of_all, "number")
    outputs = torch.arange(4.0)
    assert loss(outputs, torch.zeros(4)).tolist() == [0.0, 0.0, 0.0, 0.0]
    with pytest.raises(UserError, match="returned a tensor of shape"):
        as_loss(lambda o, t: torch.stack([o, t]), "number")(outputs, torch.zeros(4))


def test_two_losses_of_the_same_name_do_not_share_noise() -> None:
    def of(share: float) -> str:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return share * (outputs.reshape(targets.shape) - targets).abs()

        made = prepare(algorithms.fedavg(), people("number"), "linear", rounds=1, loss=loss)
        return made.spec.identity

    assert of(1.0) == of(1.0)
    assert of(1.0) != of(1.0000001)
    huber = [
        prepare(
            algorithms.fedavg(), people("number"), "linear", rounds=1, loss=f"huber(delta={delta})"
        ).spec.identity
        for delta in (1, 2)
    ]
    assert huber[0] != huber[1]


CAP = 50.0


def capped(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(targets.shape) - targets).square().clamp(max=CAP)


class Robust:
    """A loss that is a method of an object."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.reshape(targets.shape) - targets).square().clamp(max=self.cap)


class Doubled(Huber):
    """It has the name of a stock loss and another formula."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * super().__call__(outputs, targets)


def key_of(loss: Any) -> str:
    return prepare(
        algorithms.fedavg(), people("number"), "linear", rounds=1, loss=loss
    ).spec.identity


def test_losses_that_differ_in_what_they_refer_to_do_not_share_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Globals, the object of a method, the formula of a subclass."""
    assert key_of(Robust(50.0).loss) == key_of(Robust(50.0).loss)
    assert key_of(Robust(50.0).loss) != key_of(Robust(100.0).loss)
    assert key_of(Huber()) == key_of("huber") != key_of(Doubled())
    before = key_of(capped)
    monkeypatch.setitem(globals(), "CAP", 100.0)
    assert key_of(capped) != before


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("hubert", "Did you mean 'huber'"),
        ("huber", "does not fit 'people', whose targets are classes"),
        ("cross_entropy(weights=[1, 2])", "has 2 weights, but the data have 5 classes"),
        ("cross_entropy(weights=[1, 2, 3, 4, 0])", "Give positive numbers"),
        ("cross_entropy(weight=[1])", "Did you mean 'weights'"),
        ("focal(gamma=)", "cannot be read"),
        ("focal(gamma='a')", "is not a number"),
        ("no_such_losses:loss", "no module 'no_such_losses'"),
        (7, "loss is 7"),
    ],
)
def test_a_bad_loss_is_one_sentence(loss: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(algorithms.fedavg(), people("class"), rounds=1, loss=loss)


def test_targets_decide_what_a_loss_may_be() -> None:
    assert [target_of(text) for text in ("focal", "binary", "mse")] == ["class", "label", "number"]
    assert target_of(str(Own("a:b", "class"))) == "class"
    with pytest.raises(UserError, match="needs 0 and 1"):
        prepare(algorithms.fedavg(), people("number"), "linear", rounds=1, loss="binary")


@pytest.mark.parametrize(("model", "loss"), [
    ("softmax", "mse"), ("softmax", "huber(delta=2.0)"), ("mlp-8", "half_squared"),
    ("mlp-8", "mse"), ("linear", "huber(delta=2.0)"),
])  # fmt: skip
def test_models_learn_numbers(model: str, loss: str, tmp_path: Path) -> None:
    """Models know nothing of the loss: every model and every loss, not all their pairs."""
    data = people("number")
    recipe = algorithms.fedavg(learning_rate=0.05)
    result = train(recipe, data, model, rounds=5, loss=loss, save=tmp_path / "a", metric="rmse")
    first, last = result.records[0].loss, result.records[-1].loss
    assert first is not None
    assert last is not None
    assert last < first
    assert result.evaluation is not None
    assert result.evaluation.metric == "rmse"
