"""`python -m benchmarks`: run all contestants on all workloads and write the table."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import material
from benchmarks.machine import keep_to_two_cores, load_average, matmul_rate, processor
from benchmarks.runner import Contestant, Outcome, Runner, contestants
from benchmarks.table import Conditions, document, median, table
from benchmarks.workloads import Workload, chosen

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache" / "bench"
QUICK, FULL = 560.0, 6 * 3600.0  # seconds for all contestants


def main() -> None:
    """Run the race and write README.md; a partial race is printed instead."""
    options = _options()
    load, cores = load_average(), keep_to_two_cores()
    started = time.monotonic()
    workloads = [one.tiny() if options.tiny else one for one in chosen(options.only)]
    data, examples = material.examples()
    files = material.write(workloads, CACHE / "material", data, examples)
    runner = Runner(
        files,
        CACHE,
        rounds=3 if options.quick else None,
        seconds=0.0 if options.tiny else 1.0 if options.quick else 4.0,
        limit=90.0 if options.quick else 900.0,
        deadline=started + (QUICK if options.quick else FULL),
        threads=1 if options.tiny else 2,
    )
    entered = [one for one in contestants() if _named(one, options.contestants)]
    outcomes, rates = race(runner, entered, workloads)
    if options.only or options.contestants or options.tiny:
        print(table(workloads, outcomes, max(rates)))
        return
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    conditions = Conditions(options.quick, date, processor(), cores, tuple(rates), load, data)
    (HERE / "README.md").write_text(document(workloads, outcomes, conditions))
    print(f"benchmarks/README.md written after {time.monotonic() - started:.0f} s")


def race(
    runner: Runner, entered: list[Contestant], workloads: list[Workload]
) -> tuple[list[Outcome], list[float]]:
    """All outcomes, and the rate of matrix products before each of them."""
    outcomes: list[Outcome] = []
    rates: list[float] = [matmul_rate()]
    for contestant in entered:
        for one in workloads:
            if contestant.serves(one):
                rates.append(matmul_rate())
                outcomes.append(runner.run(contestant, one))
                _tell(outcomes[-1])
    return outcomes, rates


def _tell(outcome: Outcome) -> None:
    said = outcome.problem or f"{median(outcome):.3g} s, accuracy {outcome.accuracy:.3f}"
    print(f"{outcome.workload:8}{outcome.contestant.name:24}{said}", file=sys.stderr, flush=True)


def _named(contestant: Contestant, names: list[str]) -> bool:
    return not names or any(name.lower() in contestant.name.lower() for name in names)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="at least 3 rounds, ten minutes in all"
    )
    parser.add_argument("--tiny", action="store_true", help="few clients and steps: a smoke test")
    parser.add_argument("--only", type=_list, default=[], help="workloads, such as W1,W4")
    parser.add_argument("--contestants", type=_list, default=[], help="substrings of their names")
    return parser.parse_args()


def _list(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
