"""Whether a data set's clients are real, and what was read from their data before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


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


REAL = Origin()
SIMULATED = Origin(simulated=True)
UNSAID = Origin(
    exclusions=("any encoder, classes or split into clients from before the data were saved",)
)
UNKNOWN = Origin(exclusions=("any encoder or classes that an earlier version of fedveil fitted",))
