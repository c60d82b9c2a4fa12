"""`fedveil privacy`: the guarantee of a run, of settings, or of a hypothetical mechanism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.privacy.guarantee import Rounds
    from fedveil.privacy.statement import Statement
    from fedveil.runs.saved import SavedRun


UNFINISHED = (
    "Not ended",
    "This is the guarantee of all planned rounds. Rounds that are lost in a crash and drawn again "
    "count in addition.",
)
Target = Annotated[
    Path | None,
    typer.Argument(
        help="Run's directory, or settings file (TOML). Omit it to ask about a mechanism."
    ),
]
NoiseMultiplier = Annotated[
    float | None,
    typer.Option(
        help="Noise multiplier: standard deviation of the noise on the sum divided by the bound on "
        "one message."
    ),
]


def privacy(
    target: Target = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget ε.")] = None,
    delta: Annotated[float | None, typer.Option(help=flags.DELTA)] = None,
    noise_multiplier: NoiseMultiplier = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    rate: flags.Rate = None,
    cohort: flags.Cohort = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    cap: Annotated[int | None, typer.Option(help="Maximum participations of a client.")] = None,
    view: Annotated[
        str, typer.Option(help="What the adversary sees: models, sum or messages.")
    ] = "models",
    as_json: flags.AsJson = False,
) -> None:
    """State the guarantee of a run, for each adversary view.

    TARGET may also be a settings file. Without TARGET, ask about a Gaussian mechanism: pass all
    but one of --epsilon, --noise-multiplier, --rounds and --rate to compute that one. For example:

    fedveil privacy --epsilon 5 --delta 1e-5 --rate 0.2 --rounds 200
    """
    asked = flags.given(
        epsilon=epsilon, delta=delta, noise_multiplier=noise_multiplier, rounds=rounds,
        rate=rate, cohort=cohort, clients=clients, cap=cap,
    )  # fmt: skip
    if target is not None and asked:
        raise UserError(
            "A run or a settings file needs no options. Leave out the options, or the target."
        )
    _show(*(stated(target) if target is not None else _answered(asked, view)), as_json)


def _show(found: str, statement: Statement, as_json: bool) -> None:
    """Print the number that was asked for, if any, and the statement."""
    from fedveil.commands.progress import entry, show_json

    if as_json:
        show_json(statement.plain() | ({"found": found} if found else {}))
        return
    if found:
        entry("Computed", found, width=13)
    for label, text in statement.entries():
        entry(label, text, width=13)


def _answered(asked: dict[str, Any], view: str) -> tuple[str, Statement]:
    """The answer to a question without a run."""
    from fedveil.errors import unknown
    from fedveil.privacy.ask import Question, answer
    from fedveil.privacy.guarantee import VIEWS

    if view not in VIEWS:
        raise unknown("view", view, VIEWS)
    found = answer(Question(**asked, view=view))
    return found.found, found.statement


def stated(target: Path) -> tuple[str, Statement]:
    """The statement of a run, or of all planned rounds if it has not ended."""
    from fedveil.commands.progress import getting_ready
    from fedveil.runs.saved import SavedRun
    from fedveil.training.settings import from_settings, read_settings, refuse_unnamed_data

    if target.is_dir():
        run = SavedRun.open(target)
        return "", _stated_of_run(run) if run.ended else _planned(run)
    settings = read_settings(target, {})
    refuse_unnamed_data(settings, "The settings file", "Name the run's directory instead")
    with getting_ready():
        return "", from_settings(settings).statement()


def _planned(run: SavedRun) -> Statement:
    """The statement of a run that has not ended, for all its planned rounds."""
    from fedveil.commands.progress import getting_ready
    from fedveil.runs.saved import RECIPE
    from fedveil.training.settings import from_settings, read_run

    with getting_ready():
        made = from_settings(read_run(run.file(RECIPE)), run=run.path).statement()
    return replace(made, setting=(*made.setting, UNFINISHED))


def _stated_of_run(run: SavedRun) -> Statement:
    """A run's statement, recomputed from its recipe."""
    from fedveil.data.origin import Origin
    from fedveil.ledger.charging import redrawn
    from fedveil.privacy.statement import statement
    from fedveil.runs.saved import RECIPE, SUMMARY, reading
    from fedveil.training.settings import read_settings, resolve_recipe

    known = run.summary
    _refuse_selected(run.path, known)
    with reading(run.file(SUMMARY)):
        facts = known["privacy"]
        course = _course(known, run.rounds)
        modes = (facts["randomness"] == "secure", facts.get("diagnostics"))
        origin = Origin.from_plain(facts.get("origin"))
        counted = course.planned + course.redrawn
        size = (facts["dimension"], facts["population"], counted, facts["delta"])
    settings = read_settings(run.file(RECIPE), {})
    recipe = redrawn(resolve_recipe(settings), course.redrawn)
    made = statement(recipe, *size, *modes, origin, course, facts.get("ledger"))
    return made.limited(settings.epsilon) if course.limited and settings.epsilon else made


def _course(summary: dict[str, Any], run: int) -> Rounds:
    """Rounds planned and run; summaries before version 0.2 do not record which were lost."""
    from fedveil.privacy.guarantee import Rounds

    facts = summary["privacy"]
    if facts.get("course") is not None:
        return Rounds(**facts["course"])
    lost = max(facts["rounds"] - summary["rounds"], 0)
    return Rounds(summary["rounds_planned"], max(summary["rounds"], run), lost)


def _refuse_selected(target: Path, summary: dict[str, Any]) -> None:
    """The guarantee of the best of several runs is not that of its recipe."""
    if "selection" in summary:
        raise UserError(
            f"{target} was selected among several runs, so its recipe does not give its guarantee. "
            f"Read {target / 'privacy.txt'}."
        )
