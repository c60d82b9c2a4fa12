"""The statistics that were released about the data before the first round: ranges, categories."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedveil.accounting import events
from fedveil.accounting.norms import Adjacency
from fedveil.parts.checks import fraction, positive
from fedveil.parts.part import Part


@dataclass(frozen=True)
class Statistics(Part):
    """N(s, σ²I) with σ = ratio · ‖s_i‖, up to `escape`: the composition of several releases.

    A unit changes the sums s by its own contribution s_i, of which the noise hides all but values
    that no other unit has. One of these is released with probability at most `escape`
    (docs/privacy.md, "Statistics"). `joint` says that `ratio` already holds for replacing a unit.
    """

    ratio: float
    escape: float
    joint: bool = False

    def __post_init__(self) -> None:
        positive(self, "ratio", self.ratio)
        fraction(self, "escape", self.escape)

    def event(self, adjacency: Adjacency) -> events.Dominated:
        """The release for an adjacency: replacing a unit moves the sums by at most √2‖s_i‖."""
        known = self.joint or adjacency != "replace-one"
        ratio = self.ratio if known else self.ratio / math.sqrt(2)
        return events.Dominated(events.GaussianRelease(ratio), self.escape)

    def of_examples(self) -> Statistics:
        """The same statistics of clients, for one example: its change replaces a client."""
        return self if self.joint else Statistics(self.ratio / math.sqrt(2), self.escape, True)

    def and_(self, other: Statistics | None) -> Statistics:
        """Two releases one after the other: precisions and escapes add up."""
        if other is None:
            return self
        ours, theirs = (
            one if one.joint or not (self.joint or other.joint) else one.of_examples()
            for one in (self, other)
        )
        ratio = (ours.ratio**-2 + theirs.ratio**-2) ** -0.5
        return Statistics(ratio, ours.escape + theirs.escape, ours.joint)
