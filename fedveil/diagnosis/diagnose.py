"""Diagnose a run: its problems, what to try, and which rules could not be judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.diagnosis import answers, bounding, course, noise, people
from fedveil.diagnosis.rule import Finding, Rule, figure
from fedveil.diagnosis.run import DiagnosedRun, read

# A useless model comes first, and problems that a flag can fix come before noise, which costs
# clients or ε to reduce.
RULES: tuple[Rule, ...] = (
    *answers.RULES, *bounding.RULES, *course.RULES, *noise.RULES, *people.RULES,
)  # fmt: skip


LEAK = (
    "these findings were read from private data without noise. A setting chosen from them, such "
    "as C, leaks information that no ε covers. Choose settings from runs on public or synthetic "
    "data, or use dp_fedavg_adaptive, whose ε covers finding C"
)


@dataclass(frozen=True)
class Diagnosis:
    """The findings of all rules, in their order."""

    run: DiagnosedRun
    findings: tuple[Finding, ...]
    unjudged: tuple[str, ...]  # names of rules whose numbers were not recorded

    def __repr__(self) -> str:
        """The most important finding. `wrong` has all problems, with advice."""
        return f"Diagnosis({self.run.recipe.name}, {self.facts()}. {self.verdict()})"

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings that are problems."""
        return tuple(finding for finding in self.findings if finding.wrong)

    @property
    def useless(self) -> tuple[Finding, ...]:
        """The problems that make the model useless whatever its accuracy; always the first ones."""
        names = {rule.name for rule in answers.RULES}
        return tuple(finding for finding in self.wrong if finding.rule in names)

    @property
    def causes(self) -> tuple[Finding, ...]:
        """The problems of the training, which may be why the model is useless."""
        return self.wrong[len(self.useless) :]

    def verdict(self) -> str:
        """The most important finding in one sentence, for the top of a report."""
        if not self.wrong:
            return "No problems found."
        first = self.wrong[0].evidence
        more = len(self.wrong) - 1
        also = f" {more} more problem{'s' * (more > 1)} found." if more else ""
        return f"{first[:1].upper()}{first[1:]}.{also}"

    def facts(self) -> str:
        """A summary of the run in one line."""
        run = self.run
        shown = [f"{run.rounds} rounds"]
        clipped, ratio, cosine = (
            run.mean("clipped_fraction"),
            run.signal_to_noise,
            run.mean("cosine"),
        )
        if run.clip is not None and clipped is not None:
            shown.append(f"{clipped:.0%} of updates clipped")
        if ratio is not None:
            shown.append(f"median signal-to-noise ratio {figure(ratio)} per round")
        if cosine is not None:
            shown.append(f"mean cosine to the previous global update {cosine:z.2f}")
        losses = run.column("loss")
        losses = losses[losses == losses]
        if len(losses):
            noisy = "" if run.recipe.evaluation is None else "noisy "
            shown.append(f"{noisy}loss from {figure(losses[0])} to {figure(losses[-1])}")
        return ", ".join(shown)

    @property
    def leak(self) -> str | None:
        """The privacy cost of following the advice, for a private run."""
        return LEAK if self.run.recipe.private else None

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "run": str(self.run.path),
            "rounds": self.run.rounds,
            "diagnostics": self.run.recorded,
            "facts": self.facts(),
            "findings": [
                {
                    "rule": finding.rule,
                    "wrong": finding.wrong,
                    "evidence": finding.evidence,
                    "advice": finding.advice,
                    "command": finding.command,
                    "numbers": _finite(finding.numbers),
                }
                for finding in self.findings
            ],
            "unjudged": list(self.unjudged),
            "leak": self.leak,
            "verdict": self.verdict(),
        }


def diagnose(run: DiagnosedRun | Path) -> Diagnosis:
    """Apply every rule to a run or a run's directory."""
    known = run if isinstance(run, DiagnosedRun) else read(run)
    found = [rule(known) for rule in RULES]
    missing = () if known.recorded else tuple(rule.name for rule in RULES if rule.needs)
    return Diagnosis(known, tuple(finding for finding in found if finding), missing)


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    return {name: value if abs(value) < float("inf") else None for name, value in numbers.items()}
