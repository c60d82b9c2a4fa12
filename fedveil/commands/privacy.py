"""`fedveil privacy`: what is guaranteed, of a run, a recipe, or a mechanism that is asked about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.privacy.statement import Rounds, Statement


def privacy(
    target: Annotated[
        Path | None, typer.Argument(help="A run's directory, or a TOML file; none for a question.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="What may be spent.")] = None,
    delta: Annotated[float | None, typer.Option(help="1e-5 or less if not said.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise on the sum over the bound of one message.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Poisson: the chance to take part in a round.")
    ] = None,
    cohort: Annotated[
        int | None, typer.Option(help="Fixed size: how many take part in a round.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients there are.")] = None,
    cap: Annotated[int | None, typer.Option(help="How often one takes part at most.")] = None,
    view: Annotated[str, typer.Option(help="models, sum or messages.")] = "models",
    as_json: flags.AsJson = False,
) -> None:
    """Say what a run or a recipe guarantees, view by view.

    Without a target a Gaussian mechanism is asked about: give all but one of epsilon, noise
    multiplier, rounds and rate, and that one is found. For example:

    fedveil privacy --epsilon 5 --delta 1e-5 --rate 0.2 --rounds 200
    """
    from fedveil.progress import entry, show_json

    asked = flags.given(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        rounds=rounds,
        rate=rate,
        cohort=cohort,
        clients=clients,
        cap=cap,
    )
    if target is not None and asked:
        raise UserError(
            "A run or a recipe says all by itself; leave the options out, or the target."
        )
    found, statement = _stated(target) if target is not None else _answered(asked, view)
    if as_json:
        plain = statement.plain() | ({"found": found} if found else {})
        show_json(plain)
        return
    if found:
        entry("Found", found, width=13)
    for label, text in statement.entries():
        entry(label, text, width=13)


def _answered(asked: dict[str, Any], view: str) -> tuple[str, Statement]:
    """A question without any run."""
    from fedveil.errors import unknown
    from fedveil.privacy.ask import Question, answer
    from fedveil.privacy.statement import VIEWS

    if view not in VIEWS:
        raise unknown("view", view, VIEWS)
    found = answer(Question(**asked, view=view))
    return found.found, found.statement


def _stated(target: Path) -> tuple[str, Statement]:
    """A run's statement, computed anew from its recipe; or that of a recipe still to be run."""
    from fedveil.charging import redrawn
    from fedveil.data.origin import Origin
    from fedveil.privacy.statement import statement
    from fedveil.progress import getting_ready
    from fedveil.runs.directory import RunDirectory, reading
    from fedveil.settings import prepare, read_settings, refuse_unnamed_data, resolve_recipe

    if target.is_dir():
        run = RunDirectory.open(target)
        known = run.load_summary()
        _refuse_selected(target, known)
        with reading(target / "summary.json"):
            facts = known["privacy"]
            course = _course(known, run.rounds_played())
            told = (facts["randomness"] == "secure", facts.get("diagnostics"))
            origin = Origin.from_plain(facts.get("origin"))
            counted = course.planned + course.redrawn
            size = (facts["dimension"], facts["population"], counted, facts["delta"])
        settings = read_settings(target / "recipe.toml", {})
        recipe = redrawn(resolve_recipe(settings), course.redrawn)
        made = statement(recipe, *size, *told, origin, course, facts.get("ledger"))
        return "", made.limited(settings.epsilon) if course.limited and settings.epsilon else made
    settings = read_settings(target, {})
    refuse_unnamed_data(settings, "The settings file", "ask about the run's directory instead")
    with getting_ready():
        training = prepare(settings)
    return "", training.statement()


def _course(summary: dict[str, Any], run: int) -> Rounds:
    """Planned and run; summaries of versions before 0.2 do not tell which rounds were lost."""
    from fedveil.privacy.statement import Rounds

    facts = summary["privacy"]
    if facts.get("course") is not None:
        return Rounds(**facts["course"])
    lost = max(facts["rounds"] - summary["rounds"], 0)
    return Rounds(summary["rounds_planned"], max(summary["rounds"], run), lost)


def _refuse_selected(target: Path, summary: dict[str, Any]) -> None:
    """What the best of several runs costs is not what its recipe says."""
    if "selection" in summary:
        raise UserError(
            f"{target} was selected among several runs, so its recipe does not tell its guarantee; "
            f"read {target / 'privacy.txt'}."
        )
