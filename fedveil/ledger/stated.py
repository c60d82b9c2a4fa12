"""What a run's own statement would say, by the ledger, if the run were resumed now."""

from __future__ import annotations

from fedveil.accounting import accountant as accounting
from fedveil.ledger.ledger import Books, Stream, repeated
from fedveil.recipe import View


def resumed_epsilon(
    books: Books, run: str, view: View, completed: int, own: float | None, planned: float
) -> float:
    """ε of a run that is resumed from a state, `planned` if it has lost nothing.

    It covers all planned rounds and the lost ones, or is the run's `own` ε if that ends it earlier.
    """
    lost = redrawn(books, run, completed)
    if not lost:
        return planned
    stream, drawn = books.newest_stream(run), books.releases_of(run)
    whole = _epsilon(stream, view, int(stream.body["rounds"]) + lost, lost)
    if own is None or own >= whole:
        return whole
    within = stream.plans[view].over_the_run or _epsilon(stream, view, drawn, lost) <= own
    return own if within else whole


def redrawn(books: Books, run: str, completed: int) -> int:
    """Rounds that a run has released beyond those of a state.

    With a secret key these are the rounds after the state; with a seed, other versions of rounds.
    """
    drawn = books.drawn.get(run, set())
    if any(books.streams[key].noise.startswith("secret") for key, _ in drawn):
        return max(len(drawn) - completed, 0)
    return repeated(books.published.get(run, {}))


def _epsilon(stream: Stream, view: View, rounds: int, lost: int) -> float:
    spent = stream.plans[view].redrawn(lost).spent(rounds)
    return accounting.epsilon(spent, float(stream.body["delta"]))
