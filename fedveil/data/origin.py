"""Whether a data set's clients are real, and what was read from their data before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MARK = "†"  # of an ε that does not hold without its footnote


@dataclass(frozen=True)
class Origin:
    """What a privacy statement has to say about the data, beyond the recipe.

    `exclusions` are noun phrases for everything that was computed from private data without noise:
    "the means and deviations of age and bmi", "the classes of 'died'". No ε covers them, and they
    let one unit change every other unit's inputs.
    """

    simulated: bool = False  # the clients were made up, by splitting examples or by a formula
    exclusions: tuple[str, ...] = ()

    @staticmethod
    def from_plain(plain: Mapping[str, Any] | None) -> Origin:
        """As a run's summary has it; runs of versions before 0.2 do not say."""
        if plain is None:
            return UNKNOWN
        return Origin(bool(plain["simulated"]), tuple(plain["exclusions"]))

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"simulated": self.simulated, "exclusions": list(self.exclusions)}

    def split(self) -> Origin:
        """Of the same examples, dealt out to clients that were made up."""
        return replace(self, simulated=True)

    def by_example(self) -> Origin:
        """Of the same examples, each a unit of its own: those were not made up by a split."""
        return replace(self, simulated=False)

    @property
    def excluded(self) -> str:
        """The exclusions as one phrase.

        >>> Origin(exclusions=("the classes", "the means of age")).excluded
        'the classes and the means of age'
        """
        *first, last = self.exclusions or ("",)
        return f"{', '.join(first)} and {last}" if first else last

    @property
    def mark(self) -> str:
        """Of an ε that is told without its statement; `footnote` says what it means."""
        return MARK if self.simulated or self.exclusions else ""

    @property
    def caveat(self) -> str:
        """What a statement says before its ε, as one phrase.

        >>> Origin(simulated=True).caveat
        'the clients are made up, so nobody real is protected'
        """
        made_up = "the clients are made up, so nobody real is protected"
        apart = f"it does not cover {self.excluded}, read from private data without noise"
        said = ((made_up, self.simulated), (apart, bool(self.exclusions)))
        return "; ".join(phrase for phrase, true in said if true)


def footnote(origins: Iterable[Origin]) -> str:
    """What the mark of several ε means, in one line; nothing where none is marked.

    >>> footnote([Origin(), Origin(exclusions=("the classes",))])
    '† ε: it does not cover the classes, read from private data without noise.'
    """
    marked = list(dict.fromkeys(origin for origin in origins if origin.mark))
    if not marked:
        return ""
    phrases = dict.fromkeys(phrase for origin in marked for phrase in origin.exclusions)
    every = Origin(any(origin.simulated for origin in marked), tuple(phrases))
    some = "" if len(marked) == 1 else " (not all of it of every run; each statement says what)"
    return f"{MARK} ε: {every.caveat}{some}."


REAL = Origin()
SIMULATED = Origin(simulated=True)
UNSAID = Origin(
    exclusions=("any encoder, classes or split into clients from before the data were saved",)
)
UNKNOWN = Origin(exclusions=("any encoder or classes that an earlier version of fedveil fitted",))
