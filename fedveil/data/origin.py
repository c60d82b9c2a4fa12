"""Whether a data set's clients are real, and what was computed from their data before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedveil.errors import UserError
from fedveil.parts.statistics import Statistics

MARK = "†"  # on an ε that holds only with its footnote


@dataclass(frozen=True)
class Origin:
    """What a privacy statement says about the data in addition to the recipe.

    `exclusions` are noun phrases for everything that was computed from private data without noise:
    "the means and deviations of age and bmi", "the classes of 'died'". No ε covers them, and
    through them one unit can change every other unit's inputs. `statistics` is what was computed
    from private data with noise, `released` are noun phrases for it. Every ε of a training on these
    data covers them. `simulated` says that the clients are simulated, and `repeats` that several of
    them own copies of one example.

    >>> Origin(exclusions=("the classes of 'died'",)).simulated
    False
    """

    simulated: bool = False  # clients simulated, by splitting examples or by a formula
    exclusions: tuple[str, ...] = ()
    repeats: bool = False  # whether several clients own copies of one example
    statistics: Statistics | None = None
    released: tuple[str, ...] = ()

    @staticmethod
    def from_plain(plain: Mapping[str, Any] | None) -> Origin:
        """Read from a run's summary; versions before 0.2 did not record it."""
        if plain is None:
            return UNKNOWN
        known = plain.get("statistics")
        return Origin(
            bool(plain["simulated"]),
            tuple(plain["exclusions"]),
            bool(plain.get("repeats", False)),
            None if known is None else Statistics(**known),
            tuple(plain.get("released", ())),
        )

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        found: dict[str, Any] = {"simulated": self.simulated, "exclusions": list(self.exclusions)}
        if self.repeats:
            found["repeats"] = True
        if self.statistics is not None:
            found |= {"statistics": asdict(self.statistics), "released": list(self.released)}
        return found

    def split(self, repeats: bool = False) -> Origin:
        """The origin of the same examples split over simulated clients.

        Statistics protect the clients that the data name, not simulated ones.
        """
        apart = (*self.exclusions, *self.released)
        return Origin(simulated=True, exclusions=apart, repeats=repeats)

    def by_example(self) -> Origin:
        """The origin of the same examples, each a unit of its own: no simulated clients.

        Copies of one example at several clients would be several units, and no ε of one covers
        them all, so they are refused.
        """
        if self.repeats:
            raise UserError(
                "Several clients own copies of one example, so examples cannot be protected one by "
                "one. Use a partition without copies, such as iid."
            )
        known = None if self.statistics is None else self.statistics.of_examples()
        return replace(self, simulated=False, statistics=known)

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
        """The mark of an ε shown without its statement; `footnote` explains it."""
        return MARK if self.simulated or self.exclusions else ""

    @property
    def caveat(self) -> str:
        """The caveats that precede the ε in a statement, as one phrase.

        >>> Origin(simulated=True).caveat
        'clients are simulated, so no real person is protected'
        """
        made_up = "clients are simulated, so no real person is protected"
        copies = "several clients own copies of one example, and a guarantee covers one of them"
        apart = f"it does not cover {self.excluded}, read from private data without noise"
        said = (
            (made_up, self.simulated), (copies, self.repeats), (apart, bool(self.exclusions)),
        )  # fmt: skip
        return "; ".join(phrase for phrase, true in said if true)


def footnote(origins: Iterable[Origin]) -> str:
    """One line that explains the mark of several ε; empty if none is marked.

    >>> footnote([Origin(), Origin(exclusions=("the classes",))])
    '† ε: it does not cover the classes, read from private data without noise.'
    """
    marked = list(dict.fromkeys(origin for origin in origins if origin.mark))
    if not marked:
        return ""
    phrases = dict.fromkeys(phrase for origin in marked for phrase in origin.exclusions)
    simulated, repeats = (any(getattr(o, n) for o in marked) for n in ("simulated", "repeats"))
    every = Origin(simulated, tuple(phrases), repeats)
    some = "" if len(marked) == 1 else " (not every part applies to every run: see each statement)"
    return f"{MARK} ε: {every.caveat}{some}."


REAL = Origin()
SIMULATED = Origin(simulated=True)
UNSAID = Origin(
    exclusions=("any encoder, classes or split into clients from before the data were saved",)
)
UNKNOWN = Origin(exclusions=("any encoder or classes that an earlier version of fedveil fitted",))
