"""diagnose: what is wrong with a run, what to try, and what could not be judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.diagnosis import bounding, course, noise, people
from fedveil.diagnosis.rule import Finding, Rule, figure
from fedveil.diagnosis.run import Run, read

# What a flag can change comes before noise, which mostly costs clients or ε.
RULES: tuple[Rule, ...] = (*bounding.RULES, *course.RULES, *noise.RULES, *people.RULES)


LEAK = (
    "what is said here was seen of the clients without noise, so a setting chosen by it, such as "
    "C, tells of their data, and no ε covers that; choose settings by runs on public or made-up "
    "data, or let dp_fedavg_adaptive find C at a cost that is counted"
)


@dataclass(frozen=True)
class Diagnosis:
    """Findings in the order of the rules; none of them wrong is a clean bill."""

    run: Run
    findings: tuple[Finding, ...]
    unjudged: tuple[str, ...]  # names of rules whose numbers were not recorded

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """What is wrong."""
        return tuple(finding for finding in self.findings if finding.wrong)

    def facts(self) -> str:
        """What any run shows, in one line."""
        run = self.run
        shown = [f"{run.rounds} rounds"]
        clipped, ratio, cosine = run.mean("shrunk"), run.signal_to_noise, run.mean("cosine")
        if run.clip is not None and clipped is not None:
            shown.append(f"{clipped:.0%} of updates clipped")
        if ratio is not None:
            shown.append(f"signal to noise {figure(ratio)}")
        if cosine is not None:
            shown.append(f"mean cosine to the last global update {cosine:.2f}")
        losses = run.column("loss")
        losses = losses[losses == losses]
        if len(losses):
            shown.append(f"loss {figure(losses[0])} at first and {figure(losses[-1])} at last")
        return ", ".join(shown)

    @property
    def leak(self) -> str | None:
        """What following the advice costs, where privacy is at stake."""
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
        }


def diagnose(run: Run | Path) -> Diagnosis:
    """Every rule, asked about a run or a run's directory."""
    known = run if isinstance(run, Run) else read(run)
    found = [rule(known) for rule in RULES]
    missing = () if known.recorded else tuple(rule.name for rule in RULES if rule.needs)
    return Diagnosis(known, tuple(finding for finding in found if finding), missing)


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    return {name: value if abs(value) < float("inf") else None for name, value in numbers.items()}
