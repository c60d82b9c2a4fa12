"""`fedveil plan`: predict a private run before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError

CALIBRATING = "Calibrating the noise …"

Dim = Annotated[int | None, typer.Option(help="Number of parameters, instead of a model.")]
Shape = Annotated[str | None, typer.Option(help="Shape of an input. [default: 1x28x28]")]
Classes = Annotated[int | None, typer.Option(help="Number of classes. [default: 10]")]
Examples = Annotated[int | None, typer.Option(help="Examples per client. [default: 20]")]
Pilot = Annotated[
    str | None,
    typer.Option(
        help="Measure updates on: synthetic data (synthetic), a public data set by name, public "
        "data named in a TOML file, or the data of the settings (own), which no ε covers."
    ),
]
PilotClients = Annotated[int, typer.Option(help="Maximum number of clients in a pilot.")]
PilotRounds = Annotated[int, typer.Option(help="Maximum number of rounds in a pilot.")]
Cosine = Annotated[
    float | None, typer.Option(help="Cosine between two clients' updates, if no pilot measures it.")
]
Norm = Annotated[
    float | None,
    typer.Option(help="Norm of an update before clipping. [default: above the bound]"),
]
SweepOver = Annotated[
    list[str] | None,
    typer.Option(
        help="Vary clients, cohort, rounds, epsilon, dim or clip, optionally with values: "
        "cohort=1,2,4. Up to two."
    ),
]
Theory = Annotated[bool, typer.Option("--theory", help="Show what the papers recommend.")]
Constant = Annotated[
    list[str] | None,
    typer.Option(help="Constant of the theory, such as --constant L=2 (repeatable)."),
]
Recommend = Annotated[
    bool,
    typer.Option(
        "--recommend",
        help="Plan the algorithm and settings that the committed reproductions support, and name "
        "the evidence.",
    ),
]


@flags.from_settings(
    *flags.ALGORITHM, "clients", "simulate_clients", "dataset", "path", "client", "label",
    "partition", "data", "model", "loss", "rounds", *flags.GUARANTEE, "metric",
    clients="Number of clients. [default: 100]",
    model="Model: a name, or package.module:Class. [default: softmax]",
    dataset="Data set to take the sizes from: a name from `fedveil datasets`.",
)  # fmt: skip
def plan(
    config: flags.Config = None,
    cohort: flags.Cohort = None,
    rate: flags.Rate = None,
    asked: flags.Asked = flags.NOTHING,
    dim: Dim = None,
    shape: Shape = None,
    classes: Classes = None,
    examples: Examples = None,
    pilot: Pilot = None,
    pilot_clients: PilotClients = 200,
    pilot_rounds: PilotRounds = 50,
    cosine: Cosine = None,
    norm: Norm = None,
    sweep: SweepOver = None,
    theory: Theory = False,
    constant: Constant = None,
    recommend: Recommend = False,
    as_json: flags.AsJson = False,
) -> None:
    """Predict whether a run will work, before training anything.

    Shows the signal-to-noise ratio, bytes, time, and a verdict. Only the sizes of a data set are
    used, unless you pass --pilot own. For example:

    fedveil plan --clients 3000 --rate 0.2 --rounds 200 --epsilon 5
    """
    from fedveil.commands.progress import show_json, waiting
    from fedveil.planning import plan as planning
    from fedveil.planning.facts import SizeOptions
    from fedveil.training.settings import read_settings

    flags.refuse_no_settings(config)
    drawn = sampling(read_settings(config, asked).algorithm, cohort, rate)
    sampled = {"parameters": {**asked.get("parameters", {}), **drawn}} if drawn else {}
    settings = read_settings(config, {**asked, **sampled})
    advised = None
    if recommend:
        from fedveil.planning.recommend import recommended

        advised = recommended(settings)
        settings = advised.applied(settings)
    constants = dict(flags.assignment(text, "--constant") for text in constant or [])
    known = SizeOptions(dim, shape, classes, examples, pilot)
    with_theory = theory or bool(constants)
    question = planning.PlanOptions(
        known, cosine, norm, pilot_clients, pilot_rounds, with_theory, constants
    )
    with waiting(CALIBRATING) as status:
        made = planning.make(settings, question)
        sweeps = _sweeps(made, sweep or [])
        found = planning.swept(made.case, sweeps, _counting(status)) if sweeps else []
    if as_json:
        told = {} if advised is None else {"recommendation": advised.plain()}
        show_json({**_plain(made, sweeps, found), **told})
    else:
        if advised is not None:
            _recommend(advised, settings.parameters)
        _show(made, sweeps, found)


def _recommend(advised: Any, parameters: dict[str, Any]) -> None:
    """The recommended settings, where they were measured, and the evidence."""
    from fedveil.commands.plan_output import WIDTH
    from fedveil.commands.progress import entry

    entry("Recommend", f"{advised.algorithm}, {_settings(parameters)}", width=WIDTH)
    text = f"on {advised.measured_on}. For other settings, it is a starting point."
    entry("Measured", text, width=WIDTH)
    for one in advised.evidence:
        entry("Evidence", one.described(), width=WIDTH)


def _settings(parameters: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in parameters.items() if value is not None)


def _counting(status: Any) -> Callable[[int, int], None]:
    """Show on a live status line, if there is one, how far a sweep has progressed."""

    def begin(number: int, of: int) -> None:
        if status is not None:
            status.update(f"{CALIBRATING} {number} of {of}")

    return begin


def _show(made: Any, sweeps: list[Any], found: list[list[Any]]) -> None:
    from fedveil.commands.plan_output import show, show_sweep

    if sweeps:
        show_sweep(made, sweeps, found)
    else:
        show(made)


def _sweeps(made: Any, asked: list[str]) -> list[Any]:
    from fedveil.planning.plan import sweep_of

    if len(asked) > 2:
        raise UserError(
            f"{len(asked)} sweeps are given. Pass at most two, and the others in another plan."
        )
    if asked and made.forecast.noise is None:
        raise UserError(
            f"Noise {type(made.recipe.noise).__name__} does not define `deviation_of_sum`, so "
            "there is no signal-to-noise ratio to sweep. Define it, or leave --sweep out."
        )
    if asked and not made.recipe.private:
        raise UserError(
            f"{made.recipe.name} adds no noise, so there is nothing to sweep. Leave --sweep out."
        )
    sweeps = [sweep_of(made.case, text) for text in asked]
    if len({sweep.name for sweep in sweeps}) < len(sweeps):
        raise UserError(f"--sweep {sweeps[0].name} is given twice. Sweep two different quantities.")
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


def sampling(algorithm: str, cohort: int | None, rate: float | None) -> dict[str, Any]:
    """--cohort and --rate as parameters of the algorithm."""
    from fedveil.algorithms.calling import method_named, parameters_of, takes_others

    method = method_named(algorithm)
    if cohort is None and rate is None:
        return {}
    if cohort is not None and rate is not None:
        raise UserError("Both --rate and --cohort are given. Pass one of them.")
    taken = parameters_of(method)
    name, other = ("clients", "rate") if cohort is not None else ("rate", "clients")
    if name not in taken and not takes_others(method):
        flag, instead = ("--cohort", "--rate") if cohort is not None else ("--rate", "--cohort")
        advice = f"pass {instead}" if other in taken else "every client takes part in every round"
        raise UserError(f"{algorithm} does not sample by {flag}; {advice}.")
    drawn: dict[str, Any] = {name: rate if cohort is None else cohort}
    if name == "rate" and other in taken:
        drawn["clients"] = None
    return drawn
