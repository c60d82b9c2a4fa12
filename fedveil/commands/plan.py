"""`fedveil plan`: what a private training will be like, before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError


def plan(
    config: flags.Config = None,
    algorithm: flags.Algorithm = None,
    set_: flags.Parameters = None,
    clients: Annotated[int | None, typer.Option(help="How many there are; 100 if none.")] = None,
    simulate_clients: flags.SimulateClients = None,
    cohort: Annotated[int | None, typer.Option(help="Fixed size: so many a round.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson: chance to take part.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds; 100 if not said.")] = None,
    epsilon: flags.Epsilon = None,
    delta: flags.Delta = None,
    noise_multiplier: flags.NoiseMultiplier = None,
    view: flags.View = None,
    model: Annotated[str | None, typer.Option(help="A model's name; softmax if none.")] = None,
    dim: Annotated[int | None, typer.Option(help="Its parameters, instead of a model.")] = None,
    shape: Annotated[str | None, typer.Option(help="Of an input: 1x28x28 if not said.")] = None,
    classes: Annotated[int | None, typer.Option(help="How many; 10 if not said.")] = None,
    examples: Annotated[int | None, typer.Option(help="Of each client; 20 if not said.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Take sizes from a data set.")] = None,
    path: flags.OwnData = None,
    client: flags.ClientColumn = None,
    label: flags.LabelColumn = None,
    partition: flags.Partition = None,
    data_: flags.DataSettings = None,
    pilot: Annotated[
        str | None,
        typer.Option(
            help="Measure updates: synthetic, a public data set's name, a TOML file that names "
            "public data, or own (the settings' data; that leaks)."
        ),
    ] = None,
    pilot_clients: Annotated[int, typer.Option(help="Of a pilot, at most.")] = 200,
    pilot_rounds: Annotated[int, typer.Option(help="Of a pilot, at most.")] = 50,
    cosine: Annotated[
        float | None, typer.Option(help="Of two clients' updates, where no pilot measures it.")
    ] = None,
    norm: Annotated[
        float | None, typer.Option(help="Of an update before the bound; above it if not said.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="clients, cohort, rounds, epsilon, dim or clip, or cohort=1,2,4; or two."
        ),
    ] = None,
    theory: Annotated[bool, typer.Option("--theory", help="What the papers recommend.")] = False,
    constant: Annotated[
        list[str] | None,
        typer.Option(help="A constant of the theory: --constant L=2 (repeatable)."),
    ] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Say whether it will work, before any training.

    Noise against signal, bytes, time, and a verdict; of a data set only the sizes are
    used, unless --pilot own is asked for. For example:

    fedveil plan --clients 3000 --rate 0.2 --rounds 200 --epsilon 5
    """
    from fedveil.planning import plan as planning
    from fedveil.planning.facts import Asked
    from fedveil.progress import show_json, waiting
    from fedveil.settings import read_settings

    asked = flags.gathered(
        set_, data_, noise_multiplier,
        dataset=dataset, path=path, client=client, label=label, partition=partition,
        clients=clients, simulate_clients=simulate_clients, algorithm=algorithm, model=model,
        rounds=rounds, epsilon=epsilon, delta=delta, view=view,
    )  # fmt: skip
    flags.refuse_no_settings(config)
    drawn = _drawn(read_settings(config, asked).algorithm, cohort, rate)
    if drawn:
        asked["parameters"] = asked.get("parameters", {}) | drawn
    settings = read_settings(config, asked)
    constants = dict(flags.assignment(text, "--constant") for text in constant or [])
    question = planning.Question(
        Asked(dim, shape, classes, examples, pilot),
        cosine,
        norm,
        pilot_clients,
        pilot_rounds,
        theory or bool(constants),
        constants,
    )
    with waiting("Settling the noise …") as sign:
        made = planning.make(settings, question)
        sweeps = _sweeps(made, sweep or [])
        found = planning.swept(made.case, sweeps, _counting(sign)) if sweeps else []
    if as_json:
        show_json(_plain(made, sweeps, found))
        return
    _show(made, sweeps, found)


def _counting(sign: Any) -> Callable[[int, int], None]:
    """Say on a moving sign, where there is one, how far a sweep has come."""

    def begin(number: int, of: int) -> None:
        if sign is not None:
            sign.update(f"Settling the noise … {number} of {of}")

    return begin


def _show(made: Any, sweeps: list[Any], found: list[list[Any]]) -> None:
    from fedveil.planning.show import show, show_sweep

    if sweeps:
        show_sweep(made, sweeps, found)
    else:
        show(made)


def _sweeps(made: Any, asked: list[str]) -> list[Any]:
    from fedveil.planning.plan import sweep_of

    if len(asked) > 2:
        raise UserError("One or two things can be swept at once; ask again for the others.")
    if asked and not made.recipe.private:
        raise UserError(f"{made.recipe.name} adds no noise, so there is nothing to sweep.")
    sweeps = [sweep_of(made.case, text) for text in asked]
    if len({sweep.name for sweep in sweeps}) < len(sweeps):
        raise UserError(f"{sweeps[0].name} is swept twice; sweep two different things.")
    return sweeps


def _plain(made: Any, sweeps: list[Any], found: list[list[Any]]) -> dict[str, Any]:
    plain: dict[str, Any] = made.plain()
    if sweeps:
        plain["sweep"] = {
            "over": {sweep.name: list(sweep.values) for sweep in sweeps},
            "signal_to_noise": [[one and one.ratio for one in row] for row in found],
            "signal_to_noise_of_run": [[one and one.run_ratio for one in row] for row in found],
        }
    return plain


def _drawn(algorithm: str, cohort: int | None, rate: float | None) -> dict[str, Any]:
    """--cohort and --rate as parameters of the algorithm."""
    from fedveil.algorithms.calling import method_named, parameters_of, takes_others

    method = method_named(algorithm)
    if cohort is None and rate is None:
        return {}
    if cohort is not None and rate is not None:
        raise UserError("Both a rate and a cohort are given; give one of them.")
    taken = parameters_of(method)
    name, other = ("clients", "rate") if cohort is not None else ("rate", "clients")
    if name not in taken and not takes_others(method):
        flag, instead = ("--cohort", "--rate") if cohort is not None else ("--rate", "--cohort")
        advice = f"give {instead}" if other in taken else "everyone takes part in every round"
        raise UserError(f"{algorithm} does not draw its cohort by {flag}; {advice}.")
    drawn: dict[str, Any] = {name: rate if cohort is None else cohort}
    if name == "rate" and other in taken:
        drawn["clients"] = None
    return drawn
