"""Found a federation: calibrate the recipe for its clients, and write its directory."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedveil.data.population import population
from fedveil.errors import UserError
from fedveil.federation.agreement import (
    AGREEMENT,
    ROSTER,
    Agreement,
    Roster,
    Seat,
    with_seats,
    write_toml,
)
from fedveil.federation.home import SEED, write_secret
from fedveil.federation.secagg.primitives import Identity
from fedveil.federation.secagg.terms import least_threshold
from fedveil.federation.serve import SERVER, SETTINGS
from fedveil.federation.silo import in_silos, refuse_local_silos
from fedveil.parts.cohort import Everyone
from fedveil.recipe import Recipe
from fedveil.runs.opened import Interface
from fedveil.training.prepare import prepare


@dataclass(frozen=True)
class Trust:
    """Who may fail: clients that drop out of a round, and clients that collude with the server."""

    dropouts: int = 0
    corrupt: int = 0


def found(
    directory: Path,
    name: str,
    recipe: Recipe,
    interface: Interface,
    clients: int,
    model: str,
    rounds: int,
    epsilon: float | None = None,
    delta: float | None = None,
    seed: int = 0,
    trust: Trust | None = None,
    deadline: float = 60.0,
    class_names: tuple[str, ...] = (),
    data: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    records: int = 0,
    simulated: bool = False,
) -> Agreement:
    """Write a new federation: agreement, empty roster, server key. Nothing is trained.

    The noise is calibrated to (ε, δ) for `clients` clients, in the recipe's view. In view `sum` it
    relies on the clients that neither drop out nor collude. With `records`, clients are silos that
    hold this many records together, and the unit is a record.
    """
    if (directory / AGREEMENT).exists():
        raise UserError(f"{directory} has a federation already. Name another directory.")
    refuse_local_silos(recipe)
    trust = trust or _usual(recipe, clients)
    if records:
        honest = max(clients - trust.dropouts - trust.corrupt, 1)
        recipe = in_silos(recipe, recipe.view, honest)
    else:
        recipe = _tolerant(_of_all(recipe, clients), clients, trust)
    shapes = (interface.inputs, interface.classes, name, interface.loss, interface.tokens)
    unit = "example" if records else "client"
    people = population(name, records or clients, *shapes, class_names, unit=unit)
    ready = prepare(
        recipe, people, model, rounds, epsilon, delta, seed, "loop",
        noise="secure" if recipe.private else "seeded",
    ).spec  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    write_secret(directory / SERVER, secrets.token_bytes(SEED))
    agreement = Agreement(
        name=name,
        server=Identity((directory / SERVER).read_bytes()).public.hex(),
        recipe=ready.recipe,
        clients=clients,
        rounds=rounds,
        delta=ready.delta,
        model=model,
        dim=ready.dim,
        inputs=interface.inputs,
        classes=interface.classes,
        loss=interface.loss,
        tokens=interface.tokens,
        class_names=class_names,
        seed=seed,
        epsilon=epsilon,
        deadline=deadline,
        threshold=_threshold(ready.recipe, clients, trust),
        corrupt=trust.corrupt,
        records=records,
        simulated=simulated,
        data=dict(data or {}),
    )
    write_toml(directory / AGREEMENT, agreement.plain())
    write_toml(directory / ROSTER, agreement.roster.plain())
    if settings:
        write_toml(directory / SETTINGS, settings)
    return agreement


def enrol(directory: Path, seats: Sequence[Seat]) -> Agreement:
    """Add clients to the roster."""
    roster = Roster.read(directory / ROSTER)
    agreement = Agreement.read(directory)
    write_toml(directory / ROSTER, with_seats(roster, seats, agreement.clients).plain())
    return Agreement.read(directory)


def _usual(recipe: Recipe, clients: int) -> Trust:
    """A tenth of a cohort colludes and a tenth drops out, in view `sum`."""
    if recipe.view != "sum":
        return Trust()
    few = (clients if recipe.unit == "example" else int(recipe.cohort.expected(clients))) // 10
    return Trust(few, few)


def _of_all(recipe: Recipe, clients: int) -> Recipe:
    """A cohort of all clients as `Everyone`, whose adjacency is zero-out: nobody is replaced."""
    cohort = recipe.cohort
    if not cohort.fixed or cohort.expected(clients) < clients or cohort.cap is not None:
        return recipe
    return replace(recipe, cohort=Everyone(cohort.honest))


def _tolerant(recipe: Recipe, clients: int, trust: Trust) -> Recipe:
    """The recipe with noise from the clients that remain, unless it says itself how many."""
    lost = trust.dropouts + trust.corrupt
    if recipe.view != "sum" or recipe.cohort.honest is not None or not lost:
        return recipe
    remaining = int(recipe.cohort.expected(clients)) - lost
    if remaining < 1:
        raise UserError(
            f"No client of a cohort remains if {trust.dropouts} drop out and {trust.corrupt} "
            "collude. Invite more clients per round."
        )
    return replace(recipe, cohort=recipe.cohort.with_honest(remaining))


def _threshold(recipe: Recipe, clients: int, trust: Trust) -> int:
    if recipe.view != "sum":
        return 0
    cohort = clients if recipe.in_silos else int(recipe.cohort.expected(clients))
    return least_threshold(cohort, trust.corrupt)
