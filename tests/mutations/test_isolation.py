"""Mistakes that let one client's data into another's message, or into a file that is released."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil import algorithms
from fedveil.engines import factored, interception, stores
from fedveil.engines import isolation as trying
from fedveil.engines import task as tasks
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.errors import UserError
from fedveil.models import side_effects
from fedveil.parts.bound import Clip, Normalize
from fedveil.training import prepare as preparing
from fedveil.training import run as training
from fedveil.training import settings
from fedveil.training import start as starting
from tests.mutations.making import Mutation, line, named, require_caught, returning
from tests.unit.engines import test_factored as messages
from tests.unit.engines import test_isolation as isolation
from tests.unit.engines.test_isolation import MIXING, OF_TOKENS, STATEFUL, Mixing, people, rows

RECIPE = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)


def check_isolation() -> None:
    """A client's update is the same beside an outlier as beside anybody else."""
    torch.manual_seed(0)
    task = Task(Mixing(MIXING["standardized"]), "cross_entropy")
    everyone, others = np.arange(6), np.array([0, 1, 3, 4, 5])
    engine = FactoredEngine(task, 6)
    found = [rows(engine, task, people(outlier=out), everyone)[others] for out in (None, 1e4)]
    assert torch.equal(*found), "one client's data changed another one's update"


def check_refused(kind: str) -> None:
    """A module that keeps something is refused before it sees data.

    Also with secret noise, whose key accepts what cannot be read, such as a coroutine.
    """
    module = Mixing(STATEFUL[kind]())
    module.linear.stats = torch.zeros(2)
    try:
        preparing.prepare(RECIPE, people(), module, 2, engine="loop", noise="secure")
    except UserError:
        return
    raise AssertionError(f"a module with {kind} was accepted")


def note(module: nn.Module) -> None:
    module.seen = True


def trade(module: nn.Module) -> None:
    """Write where neither the version nor the sum of a tensor shows it."""
    module.large.data[:2] = torch.tensor([1.0, 0.0])  # before: 0 and 1


def check_rare_state(write: Callable[[nn.Module], None]) -> None:
    """State that only rare data write ends the round."""

    def rarely(module: Mixing, x: Tensor) -> Tensor:
        if float(x.abs().max()) == 77.0:
            write(module)
        return x

    module = Mixing(rarely)
    module.large = torch.arange(float(side_effects.FEW))
    run = preparing.prepare(RECIPE, people(outlier=77.0), module, 2, engine="loop")
    try:
        run.step()
    except UserError:
        return
    raise AssertionError("a round was released although the module kept something of a client")


def check_resetting(kind: str) -> None:
    """State that only rare data write ends the round, also if it is reset within it."""
    isolation.SKIPS[0] = 0
    skip = isolation.RESETTING[kind]()
    module = Mixing(lambda _, x: x * skip(x))
    run = preparing.prepare(RECIPE, people(outlier=77.0), module, 2, engine="loop")
    try:
        run.step()
    except UserError:
        return
    raise AssertionError("a round was released although a client changed the ones after it")


def check_loss() -> None:
    """A loss that keeps something is refused, also where no number is compared."""
    loss = isolation.SkippingLoss()
    try:
        preparing.prepare(RECIPE, people(), nn.Linear(4, 3), 2, loss=loss, noise="secure")
    except UserError as refused:
        if "The loss" in str(refused):
            return
    raise AssertionError("a loss that keeps something was accepted")


def check_evaluated() -> None:
    isolation.test_state_of_an_evaluation_ends_the_next_round_before_a_client_is_called()


def check_steps(engine: str) -> None:
    try:
        isolation.test_state_that_is_reset_between_the_steps_of_a_group_is_found(engine)
    except pytest.fail.Exception as failure:
        raise AssertionError(failure.msg) from None


def check_first_batch() -> None:
    isolation.test_a_model_that_starts_from_its_first_batch_starts_from_made_up_numbers()


def check_copies() -> None:
    """Two threads never compute with one object."""
    task = Task(nn.Sequential(isolation.Shared(2, 2)), "cross_entropy")
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(task.here).result()
    except UserError:
        return
    raise AssertionError("a thread's copy of a model shares a part with the model")


def check_sizes() -> None:
    """A larger client beside the others changes nothing of theirs."""
    torch.manual_seed(0)
    task = Task(Mixing(MIXING["standardized"]), "cross_entropy")
    everyone, others = np.arange(6), np.array([0, 1, 3, 4, 5])
    engine = DenseEngine(task, 6)
    found = [rows(engine, task, people(more=more), everyone)[others] for more in (0, 20)]
    assert torch.allclose(*found, atol=1e-5), "one client's size changed another one's update"


def check_recipe_toml() -> None:
    """recipe.toml says which engine was asked for, not which one was quickest."""
    asked = preparing.prepare(RECIPE, people(), rounds=1)
    with tempfile.TemporaryDirectory() as place:
        ledger, run = Path(place) / "ledger.sqlite", Path(place) / "run"
        asked.ledger = ledger
        starting.start(asked, run).close()
        text = (run / "recipe.toml").read_text()
        assert settings.read_settings(run / "recipe.toml", {}).engine == "auto", text
    assert asked.engine.name not in text, "recipe.toml tells which engine was quickest"


def check_extremes(case: int) -> None:
    """The message of an update at the limits of float32 is finite and no longer than the bound."""
    for kind in (Clip, Normalize):
        messages.test_messages_of_extreme_updates_are_finite_and_keep_the_bound(
            kind, *messages.EXTREMES[case]
        )


def all_rows_together(self: interception.Work, inputs: Tensor, seeds: object = None) -> Tensor:
    """The module sees all clients' rows as one batch."""
    self.anchor = torch.zeros((), requires_grad=True)
    answer: Tensor = self.module(inputs)
    return answer


MUTATIONS = [
    Mutation(
        "the module is called on all clients' rows together",
        returning(interception.Work, "outputs", all_rows_together),
        "check_isolation",
        check_isolation,
    ),
    Mutation(
        "no module is tried for state",
        returning(preparing, "refuse_memory", lambda *_: None),
        "check_refused",
        lambda: check_refused("attribute"),
    ),
    Mutation(
        "only versions of tensors are compared",
        returning(side_effects, "_digest", lambda tensor: tensor._version),
        "check_refused",
        lambda: check_refused("through .data"),
    ),
    Mutation(
        "closures are not looked into",
        returning(side_effects, "_parts", lambda function: {}),
        "check_refused",
        lambda: check_refused("iterator in a closure"),
    ),
    Mutation(
        "globals are not looked at",
        line(side_effects._Walk, "_function", ("if name in space", "if False")),
        "check_refused",
        lambda: check_refused("global"),
    ),
    Mutation(
        "other modules are not looked into",
        line(side_effects._Walk, "_code", ("self._modules.append(value)", "pass")),
        "check_refused",
        lambda: check_refused("table in another module"),
    ),
    Mutation(
        "caches of functions are not looked at",
        line(side_effects, "_state", ("size.misses, size.currsize", "None")),
        "check_refused",
        lambda: check_refused("table in a cache"),
    ),
    Mutation(
        "all synthetic tokens are equal",
        line(trying, "made_up", ("inputs.random_(int(low), int(high) + 1", "inputs.random_(1")),
        "check_mixing",
        lambda: isolation.test_mixing_is_found_in_models_of_tokens(OF_TOKENS["centered"]),
    ),
    Mutation(
        "updates that are not finite count as equal",
        line(
            trying, "_agree", ("True if bool((sound & (crowd.sizes > 1)).any()) else None", "True")
        ),
        "check_mixing",
        isolation.test_mixing_is_found_where_only_positive_numbers_have_gradients,
    ),
    Mutation(
        "the rounding of products of factors is left out of a norm",
        line(stores.Factors, "squares", ("exact + lost + small", "exact + small")),
        "check_cancelling",
        lambda: messages.test_a_message_of_factors_that_cancel_keeps_the_bound(
            *messages.CANCELLING[-1]
        ),
    ),
    Mutation(
        "scales leave the range in which factors keep their digits",
        returning(factored, "_in_range", lambda scale: scale),
        "check_extremes",
        lambda: check_extremes(2),
    ),
    Mutation(
        "what underflows in products of factors is left out of a norm",
        line(stores.Factors, "squares", ("exact + lost + small", "exact + lost")),
        "check_extremes",
        lambda: check_extremes(3),
    ),
    Mutation(
        "global randomness is not noticed",
        returning(side_effects, "_generators", list),
        "check_refused",
        lambda: check_refused("NumPy's randomness"),
    ),
    Mutation(
        "a model is not asked the same again",
        returning(Task, "_answer", lambda *_: torch.zeros(1)),
        "check_refused",
        lambda: check_refused("coroutine"),
    ),
    Mutation(
        "a model is tried on real examples first",
        line(preparing, "_check_fit", ("made_up(data, 2)", "data.client(0)")),
        "check_first_batch",
        check_first_batch,
    ),
    Mutation(
        "evaluation hands out the model itself",
        line(Task, "at", ("x.clone()", "x")),
        "check_evaluation",
        isolation.test_evaluation_leaves_the_released_model_as_it_is,
    ),
    Mutation(
        "a client's batch is shown with what fills it up",
        returning(DenseEngine, "_loss", lambda self, mode, *batch: self.task.loss(*batch)),
        "check_sizes",
        check_sizes,
    ),
    Mutation(
        "copies of a model may share parts",
        returning(tasks, "_copied", lambda module: module),
        "check_copies",
        check_copies,
    ),
    Mutation(
        "state is looked for before the run only",
        line(training, "simulated", ("training.task.refuse_side_effects()", "pass")),
        "check_rare_state",
        lambda: check_rare_state(trade),
    ),
    Mutation(
        "state is looked for after the round only, and not in attributes",
        line(side_effects._Walk, "_module", ("partial(vars, module)", "dict")),
        "check_rare_state",
        lambda: check_rare_state(note),
    ),
    Mutation(
        "state of an evaluation is not looked for",
        line(training, "simulated", ("training.task.refuse_change()", "pass")),
        "check_evaluated",
        check_evaluated,
    ),
    Mutation(
        "state is not looked for between clients",
        line(LoopEngine, "updates", ("self.task.refuse_change()", "pass")),
        "check_resetting",
        lambda: check_resetting("attribute"),
    ),
    Mutation(
        "the sum of a large tensor is not compared between clients",
        returning(side_effects, "_sum", lambda numbers: None),
        "check_resetting",
        lambda: check_resetting("numbers of a large tensor"),
    ),
    Mutation(
        "objects with another identity count as the same",
        line(side_effects, "alike", ("return isinstance(now, SCALARS) and", "return True or")),
        "check_loss",
        check_loss,
    ),
    Mutation(
        "a loss has no footprint",
        line(Task, "_footprints", ("Footprint.of(known,", "Footprint.of(None,")),
        "check_loss",
        check_loss,
    ),
    Mutation(
        "state is not looked for between the steps of a group",
        line(DenseEngine, "updates", ("self.task.refuse_change()", "pass")),
        "check_steps",
        lambda: check_steps("dense"),
    ),
    Mutation(
        "the chosen engine in a run's spec",
        line(preparing, "prepare", ("engine=engine,", "engine=choice.engine.name,")),
        "check_recipe_toml",
        check_recipe_toml,
    ),
    Mutation(
        "the chosen engine in recipe.toml",
        line(
            starting,
            "start",
            (
                "save_settings(training.spec.plain())",
                'save_settings({**training.spec.plain(), "engine": training.engine.name})',
            ),
        ),
        "check_recipe_toml",
        check_recipe_toml,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_a_mistake_is_caught_by_its_guard(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_caught(mutation, monkeypatch)


def test_a_model_that_only_computes_is_trained() -> None:
    """The guards above refuse for what they find, not everything."""
    assert fv.train(RECIPE, people(), Mixing(lambda m, x: x.relu()), 2).records
