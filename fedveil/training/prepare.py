"""prepare: check the arguments, calibrate the noise, and build a training at round 0."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedveil.accounting.accountant import check_delta
from fedveil.accounting.rounding import short
from fedveil.data.columns import span
from fedveil.data.encoding import TableEncoder
from fedveil.data.federated import Examples, Federated
from fedveil.data.origin import Origin
from fedveil.engines.asking import called, expected_of, honest_of
from fedveil.engines.choose import EngineChoice, choose
from fedveil.engines.devices import PlacedEngine, device_of, refuse_float64
from fedveil.engines.isolation import SCALES, made_up, refuse_memory, uniform
from fedveil.engines.loop import LoopEngine
from fedveil.engines.processes import ALONE, Team
from fedveil.engines.task import Task, alike_everywhere
from fedveil.engines.where import explained
from fedveil.errors import UserError, unknown
from fedveil.ledger import charging
from fedveil.loop import begin, rehearse
from fedveil.models.catalog import build
from fedveil.models.check import refuse_unfit
from fedveil.models.contents import Contents, contents
from fedveil.models.loss import Loss
from fedveil.models.losses import KINDS, LOSSES, Function, Own, as_loss, target_of
from fedveil.models.side_effects import refuse_parameters_of_others
from fedveil.parts.local import Local
from fedveil.parts.part import foreign
from fedveil.privacy.calibrate import Budget, calibrated, sensible_delta
from fedveil.privacy.guarantee import units
from fedveil.privacy.secure import secured
from fedveil.privacy.statement import Setting
from fedveil.random.streams import SecretKey, run_key, torch_generator
from fedveil.recipe import Recipe
from fedveil.serialization.codec import identified, readable
from fedveil.training.metrics import Chosen, Metric, Score, chosen
from fedveil.training.own_laws import refuse_other_laws
from fedveil.training.own_randomness import refuse_own_randomness
from fedveil.training.private_evaluation import evaluated_rounds, planned_evaluation, released
from fedveil.training.private_evaluation import identity as evaluated_on
from fedveil.training.probe import probed
from fedveil.training.run import Source, Training, local_work
from fedveil.training.scoring import tried
from fedveil.training.spec import RunSpec
from fedveil.training.state import RunState

EVALUATIONS = 20  # the default number of evaluations per run, at most


def prepare(
    recipe: Recipe,
    data: Federated,
    model: str | nn.Module = "softmax",
    rounds: int = 100,
    epsilon: float | None = None,
    delta: float | None = None,
    seed: int = 0,
    engine: str = "auto",
    evaluate_every: int | None = None,
    start: Tensor | None = None,
    noise: Literal["seeded", "secure"] = "seeded",
    per_round: bool = False,
    team: Team = ALONE,
    diagnostics: bool | None = None,
    ledger: Path | None = None,
    checkpoint_every: int | None = None,
    named: Mapping[str, Any] | None = None,
    account: str | None = None,
    source: Source | None = None,
    loss: str | Loss | Function | None = None,
    metric: str | Metric | Score | None = None,
    metrics: Mapping[str, Score] | Iterable[Metric] | None = None,
    setting: Setting = (),
    device: str = "auto",
    private_evaluation: float | None = None,
    patience: int | None = None,
) -> Training:
    """Check the arguments, calibrate the noise to (ε, δ) if given, and build a training.

    With per_round the budget applies to a single round, and the cost of all rounds is reported.
    By default, diagnostics are recorded unless noise is secure. They are private data
    (docs/diagnosis.md). A recipe that probes norms without noise is refused if the ledger has a
    budget for the data. `named` are the settings that recipe.toml repeats. `account` names the
    account that is charged. `source` computes rounds instead of the simulation, and `setting` is
    what the statement says about it. `device` is where clients train; neither the guarantee nor any
    random draw depends on it. `loss` replaces the loss of the data. `metric` ranks runs, and
    `metrics` are reported beside the usual ones (docs/metrics.md). `private_evaluation` is the ε of
    all evaluations by themselves, which then carry noise. `patience` is the number of evaluations
    without a better result after which the run stops.
    """
    place = device_of(device)
    team.place(place)
    _check_arguments(recipe, data, rounds, evaluate_every, checkpoint_every, noise)
    asked, data = _fitted(recipe, data)
    recipe = asked
    data, compared = with_loss(data, loss)
    task = make_task(model, data, seed, compared)
    scores = _scores(metric, metrics, task, data)
    delta = sensible_delta(units(recipe, data)) if delta is None else delta
    check_delta(delta)
    budget = None if epsilon is None else Budget(epsilon, delta)
    every = evaluate_every or math.ceil(rounds / EVALUATIONS)
    plan = None
    if private_evaluation is not None:
        refuse_per_round(per_round)
        plan = planned_evaluation(
            private_evaluation, delta, recipe, data, task.loss_of_examples, scores,
            evaluated_rounds(rounds, every), patience,
        )  # fmt: skip
        recipe = replace(recipe, evaluation=released(private_evaluation, delta, recipe))
    if patience is not None:
        _check_patience(patience, recipe, data, plan is not None)
    x = task.flatten() if start is None else start.clone()
    data = replace(data, notes=(*data.notes, *_warnings(recipe, data, delta, budget, named)))
    refuse_float64(task, place)
    placed = task.to(place)
    choice = choose_engine(engine, placed, *local_work(recipe, data), rounds)
    if recipe.bound.awaits_probe:
        charging.refuse_on_budget(data, "probing norms without noise", ledger)
        recipe = probed(recipe, x, data, choice.engine, rounds, seed, team)
    if noise == "secure":
        recipe = secured(recipe)
    recipe = recipe.planned(rounds, data.clients)
    recipe = calibrated(recipe, budget, 1 if per_round else rounds, task.dim, data.clients)
    _refuse_unreadable(asked, recipe)
    refuse_own_randomness(recipe, x, data.clients, rounds)
    refuse_other_laws(recipe, x, data.clients, rounds)
    fingerprint = data.fingerprint()
    facts = _model_facts(task, x, data, hidden=noise == "secure" or not recipe.private)
    identity = run_key(
        seed, identified(readable(recipe)), rounds, facts, fingerprint, noise, delta,
        *_noise_of(data), *(() if plan is None else evaluated_on(plan, data)),
    )  # fmt: skip
    team.require_same(identity)
    spec = RunSpec(
        recipe=recipe,
        data=data,
        fingerprint=fingerprint,
        dim=task.dim,
        rounds=rounds,
        delta=delta,
        budget=None if per_round else budget,
        identity=identity,
        key=SecretKey.agreed(team.secret) if noise == "secure" else identity,
        task=placed,
        model=model if isinstance(model, str) else None,
        seed=seed,
        engine=engine,
        device=device,
        evaluate_every=every,
        evaluation=plan,
        patience=patience,
        checkpoint_every=checkpoint_every or 0,
        diagnostics=noise != "secure" if diagnostics is None else diagnostics,
        named=named or {},
        metrics=scores,
        account_name=account,
        setting=setting,
    )
    first = begin(recipe, x, data, rounds, spec.key)
    rehearse(recipe, first, data)
    return Training(spec, RunState(first), choice.engine, choice.reason, team, ledger, source)


def _fitted(recipe: Recipe, data: Federated) -> tuple[Recipe, Federated]:
    """Data in the recipe's unit, and the recipe with what was released about them."""
    if recipe.unit == "example" and data.unit == "client":
        data = data.by_example()
    recipe = with_statistics(recipe, data.origin)
    expected_of(recipe.cohort, data.clients)  # refuses a cohort larger than the population
    honest_of(recipe.cohort, data.clients)
    return recipe, data


def _refuse_unreadable(asked: Recipe, found: Recipe) -> None:
    """Refuse parts that a saved run could not be compared with: it could not be read again."""
    for before, after in ((asked.bound, found.bound), (asked.cohort, found.cohort)):
        if foreign(before) and before.found_as(after) != after:  # type: ignore[arg-type]
            raise UserError(
                f"{called(before)} became {after!r} when the run was prepared, but its `found_as` "
                "does not return that for it, so the saved run could not be read. Define "
                "`found_as` beside `planned` or `probed_at`."
            )


def _check_patience(patience: int, recipe: Recipe, data: Federated, noisy: bool) -> None:
    """Refuse a stop that would show protected test examples without noise."""
    if not isinstance(patience, int) or patience < 1:
        raise UserError(f"patience is {patience}. Give a number of evaluations, at least 1.")
    if not len(data.test):
        raise UserError(f"'{data.name}' has no test examples to stop by. Remove patience.")
    if recipe.private and data.tested_on_clients and data.unit == "client" and not noisy:
        raise UserError(
            f"The test examples of '{data.name}' may belong to its clients, so the round at which "
            "the run stops would show them without noise. Give private_evaluation, or remove "
            "patience."
        )


def refuse_per_round(per_round: bool) -> None:
    """Refuse evaluations, which belong to the whole run, beside a budget of one round."""
    if per_round:
        raise UserError(
            "A private evaluation is charged to the whole run, but per_round gives epsilon to one "
            "round. Remove one of them."
        )


def with_statistics(recipe: Recipe, origin: Origin) -> Recipe:
    """The recipe with the statistics that were released about the data, which its ε covers."""
    if origin.statistics is not None and recipe.view != "models":
        raise UserError(
            f"Statistics of these data were computed by a trusted server, but view '{recipe.view}' "
            "does not trust it. Declare public ranges, categories and classes, without statistics."
        )
    known = origin.statistics
    if known is not None and recipe.unit == "record":  # its change replaces a client
        known = known.of_examples()
    return replace(recipe, statistics=known, evaluation=None)


def _check_arguments(
    recipe: Recipe,
    data: Federated,
    rounds: int,
    evaluate_every: int | None,
    checkpoint_every: int | None,
    noise: str,
) -> None:
    if isinstance(recipe, Recipe) and type(recipe) is not Recipe:
        raise UserError(
            f"recipe is of class {type(recipe).__name__}, which could override the accounting. "
            "Give a Recipe itself, such as algorithms.fedavg()."
        )
    if not isinstance(recipe, Recipe):
        raise UserError(f"recipe is {recipe!r}. Give a Recipe, such as algorithms.fedavg().")
    if not isinstance(data, Federated):
        raise UserError(
            f"data is a {type(data).__name__}, which is not split over clients. Give a Federated, "
            "such as load('digits').split(Iid(100))."
        )
    if recipe.unit == "client" or recipe.by_record:
        data.refuse_by_example(recipe.name)
    if recipe.by_record:
        data.origin.by_example()  # refuses copies of one record in several silos
    if not isinstance(rounds, int) or rounds < 1:
        raise UserError(f"rounds is {rounds}; it must be a whole number, at least 1.")
    if evaluate_every is not None and evaluate_every < 1:
        raise UserError(f"evaluate_every is {evaluate_every}; it must be at least 1 round.")
    every = checkpoint_every
    if every is not None and (not isinstance(every, int) or every < 1):
        raise UserError(f"checkpoint_every is {every}; it must be at least 1 round.")
    if noise not in ("seeded", "secure"):
        raise unknown("noise", noise, ("seeded", "secure"))


def _warnings(
    recipe: Recipe,
    data: Federated,
    delta: float,
    budget: Budget | None,
    named: Mapping[str, Any] | None,
) -> Iterator[str]:
    """What the user should know before the first round."""
    people = units(recipe, data)
    if recipe.private and delta * people >= 1:
        yield (
            f"delta is {short(delta)}, at least 1/{people:,}: it allows the release of a "
            f"whole {recipe.unit}. Use {short(0.1 / people, 1)} or less."
        )
    if budget is not None and recipe.noise.calibrated and "recipe" not in (named or {}):
        yield (
            "Both epsilon and the amount of noise are given. The noise is used as it is, and "
            "epsilon is only a limit. Remove one of them to calibrate the noise."
        )
    inputs = data.inputs
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and len(inputs):
        broken = ~torch.isfinite(inputs.flatten(1)).all(dim=1)
        if count := int(broken.sum()):
            yield (
                f"{count:,} of {len(inputs):,} examples have inputs that are NaN or infinite. An "
                "update that is not finite counts as zero. Replace these values."
            )


def with_loss(data: Federated, loss: str | Loss | Function | None) -> tuple[Federated, Loss]:
    """The data with this loss instead of their own, if it fits their targets."""
    whole = data.labels.dtype.is_floating_point is False
    target = "class" if whole else target_of(data.loss)
    known = as_loss(data.loss if loss is None else loss, target)
    if (known.target == "class") != whole:
        kind = "classes" if whole else "numbers"
        fitting = [name for name, one in LOSSES.items() if (one.target == "class") == whole]
        raise UserError(
            f"The loss '{known.name}' does not fit '{data.name}', whose targets are {kind}. Use "
            f"one of {', '.join(fitting)}" + (", or a table with --data target=number." * whole)
        )
    known.check(data.classes)
    if known.target == "label" and loss is not None:
        _refuse_no_labels(data)
    return (data if loss is None else replace(data, loss=str(known))), known


def _refuse_no_labels(data: Federated) -> None:
    low, high = span(data.labels)
    if low < 0 or high > 1:
        raise UserError(
            f"'{data.name}' has targets from {low:g} to {high:g}, but the loss 'binary' needs 0 "
            "and 1. Use mse or huber, or recode the targets."
        )


def make_task(model: str | nn.Module, data: Federated, seed: int, loss: Loss | None = None) -> Task:
    """The model and its loss, tested on made-up examples."""
    if isinstance(model, str):
        module = build(model, data, torch_generator(seed, "model"))
    else:
        module = _copied(model)
    refuse_unfit(module)
    refuse_parameters_of_others(module)
    own = isinstance(model, str) and ":" not in model
    task = Task(module, data.loss, data.layout, loss)
    _check_fit(task, data)
    if not own:  # after a first call, which fills what later calls would find
        task.read_contents()
    return task


def _copied(model: nn.Module) -> nn.Module:
    """A copy, which leaves the caller's module untrained for a second run."""
    try:
        module = copy.deepcopy(model)
    except Exception as problem:  # an attribute may be anything
        raise UserError(
            f"The model {type(model).__name__} cannot be copied: {explained(problem)}. Remove "
            "attributes that Python cannot copy, such as locks, generators and modules."
        ) from problem
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder):  # its nested tensors suit one engine only
            part.enable_nested_tensor = part.use_nested_tensor = False
    return module


def _scores(
    metric: str | Metric | Score | None,
    metrics: Mapping[str, Score] | Iterable[Metric] | None,
    task: Task,
    data: Federated,
) -> Chosen:
    target = target_of(data.loss)
    sequence = target == "class" and len(data.labels.shape) > 1
    return tried(chosen(metric, metrics, target, data.classes, sequence), task, data)


def choose_engine(
    engine: str, task: Task, data: Federated, local: Local, participants: float, rounds: int = 100
) -> EngineChoice:
    """The requested engine, or the fastest one, after testing the module for hidden state."""
    refuse_memory(task, PlacedEngine.on(LoopEngine(task), task.device), data)
    task.unwatch()
    choice = choose(engine, task, data, local, participants, rounds=rounds)
    refuse_memory(task, choice.engine, data)
    return choice


def _noise_of(data: Federated) -> tuple[str, ...]:
    """The name of the noise of the data's statistics; none of earlier versions.

    Statistics that were drawn twice are two releases, also where both drew the same.
    """
    if data.encoder is None or data.origin.statistics is None:
        return ()
    name = TableEncoder.from_json(data.encoder).noise
    return (name,) if name else ()


def _model_facts(task: Task, x: Tensor, data: Federated, hidden: bool) -> str:
    """What identifies the model and its loss. The task is on the CPU: keys are equal everywhere.

    It is part of the key of the noise, because two different releases must not share noise. Models
    and losses of fedveil need no code and no probes, so that runs of earlier versions are resumed.
    With `hidden` noise, which no two runs share, contents that cannot be read are accepted.
    """
    facts, loss = task.fingerprint(x, made_up(data, 1).inputs[0]), task.loss_of_examples
    if task.contents is not None:
        name = f"model {type(task.module).__name__}"
        facts += f"{_read(name, task.contents, hidden)} {_probed(Task.answers, task, x, data)}"
    if type(loss) not in KINDS.values() or isinstance(loss, Own):
        known = contents(loss.resolved() if isinstance(loss, Own) else loss)
        facts += f"{loss} {_read(f'loss {loss}', known, hidden)} "
        facts += _probed(_losses, task, x, data)
    return facts


def _read(name: str, known: Contents, hidden: bool) -> str:
    """The digest of a model's or a loss's contents, if it has all of them."""
    if known.unread and not hidden:
        raise UserError(
            f"The {name} uses {known.unread[0]}, whose contents cannot be read, so two that differ "
            "only there would be trained with the same seeded noise. Remove it from the code, or "
            "use noise='secure'."
        )
    return known.digest


def _losses(task: Task, x: Tensor, examples: Examples) -> list[Tensor]:
    with torch.no_grad():
        outputs = task.outputs(task.at(x), examples.inputs[:])
        return [task.loss_of_examples(outputs, examples.labels[:])]


def _probed(
    answers: Callable[[Task, Tensor, Examples], list[Tensor]],
    task: Task,
    x: Tensor,
    data: Federated,
) -> str:
    """What a task answers beside x to synthetic examples of several scales."""
    beside = x + 0.1 * torch.rand(len(x), generator=torch.Generator().manual_seed(1))
    crowd = [uniform(data, 4, scale) for scale in SCALES]
    try:
        found = alike_everywhere(
            lambda one: [part for few in crowd for part in answers(one, beside, few)], task
        )
    except Exception as problem:  # a user's own module may raise anything
        return type(problem).__name__
    return hashlib.sha256(found).hexdigest()


@torch.no_grad()
def _check_fit(task: Task, data: Federated) -> None:
    """Try model and loss on made-up examples, so that a misfit is reported before round 1."""
    few, loss = made_up(data, 2), task.loss_of_examples
    try:
        outputs = task.outputs(task.at(task.flatten()), few.inputs[:])
    except UserError:
        raise
    except Exception as problem:  # a user's own module may raise anything
        raise _misfit(task, data, explained(problem)) from problem
    if different := _different(outputs, few.labels[:], loss, data.classes):
        raise _misfit(task, data, different)
    try:
        loss(outputs, few.labels[:])
    except UserError:
        raise
    except Exception as problem:  # and so may a user's own loss
        if not isinstance(loss, Own):
            raise _misfit(task, data, explained(problem)) from problem
        raise UserError(
            f"The loss {loss.function} raised {type(problem).__name__} on made-up examples: "
            f"{explained(problem)}. A loss takes (outputs, targets), in this order, and returns "
            "one number per example."
        ) from problem


def _misfit(task: Task, data: Federated, reason: str) -> UserError:
    inputs = f"of shape {list(data.inputs.shape[1:])}" if data.layout is None else data.layout
    return UserError(
        f"The model {type(task.module).__name__} does not fit '{data.name}', which has inputs "
        f"{inputs} and {data.classes} classes: {reason}. Use a "
        "model for these inputs and classes."
    )


def _different(outputs: Tensor, targets: Tensor, loss: Loss, classes: int) -> str:
    """How outputs differ from one per class of each target, or from one per number or label.

    Empty if they do not. Only a user's own loss of numbers may read several outputs per number.
    """
    if loss.target == "class":
        wanted = (*targets.shape, classes)
        if outputs.shape[:-1] == targets.shape and outputs.shape[-1] != classes:
            count = outputs.shape[-1]
            return f"it returns {count} output{'s' * (count != 1)} for {classes} classes"
    else:
        wanted, own = tuple(targets.shape), isinstance(loss, Own) and loss.target == "number"
        if own or outputs.numel() == targets.numel():
            return ""
    if outputs.shape == wanted:
        return ""
    shape = list(outputs.shape)
    return f"its outputs for {len(targets)} examples have shape {shape}, not {list(wanted)}"
