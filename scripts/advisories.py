"""Check the pins of constraints.txt against known vulnerabilities, without a network.

    python -m scripts.advisories                     check against the list kept here
    python -m scripts.advisories --osv DIRECTORY     and against OSV advisories, one JSON each

Exits with 1 if a pin is affected. The list is short and maintained by hand, so an empty result does
not mean that no vulnerability exists. The OSV database is published as one archive of all Python
packages; unpack a recent one for a complete check.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Advisory:
    """Versions first ≤ v < fixed of a package, or only the listed ones, are affected."""

    package: str
    id: str
    what: str
    first: str = "0"
    fixed: str | None = None
    listed: frozenset[str] = frozenset()

    def affects(self, package: str, version: str) -> bool:
        """Whether a pin is affected; without a fixed version all later versions are."""
        if canonicalize_name(package) != canonicalize_name(self.package):
            return False
        if self.listed:
            return version in self.listed
        end = self.fixed is None or Version(version) < Version(self.fixed)
        return end and Version(self.first) <= Version(version)


def read_pins(text: str) -> dict[str, str]:
    """{name: version} of a constraints file.

    >>> read_pins("# all\\nJinja2==3.1.6\\n")
    {'Jinja2': '3.1.6'}
    """
    return dict(re.findall(r"^([\w.-]+)==([\w.+!-]+)", text, re.MULTILINE))


def kept() -> Iterator[Advisory]:
    """The list next to this file."""
    for entry in tomllib.loads(KEPT.read_text())["advisory"]:
        yield Advisory(
            entry["package"], entry["id"], entry["what"], entry.get("from", "0"), entry["below"]
        )


def from_osv(advisory: dict[str, Any]) -> Iterator[Advisory]:
    """The affected versions of one OSV advisory; withdrawn advisories have none."""
    what = str(advisory.get("summary") or advisory.get("details", ""))[:100]
    for affected in [] if "withdrawn" in advisory else advisory.get("affected", []):
        package = affected.get("package", {})
        if package.get("ecosystem") != "PyPI":
            continue
        about = (package["name"], advisory["id"], what)
        if listed := affected.get("versions"):
            yield Advisory(*about, listed=frozenset(listed))
        for span in affected.get("ranges", []):
            if span.get("type") == "ECOSYSTEM":
                yield from (Advisory(*about, *ends) for ends in _spans(span["events"]))


def _spans(events: list[dict[str, str]]) -> Iterator[tuple[str, str | None]]:
    first = None
    for event in events:
        if "introduced" in event:
            first = event["introduced"]
        elif "fixed" in event and first is not None:
            yield first, event["fixed"]
            first = None
    if first is not None and not any("last_affected" in event for event in events):
        yield first, None


def found(pins: dict[str, str], advisories: Iterator[Advisory]) -> list[str]:
    """One line per affected pin and advisory."""
    lines = []
    for advisory in advisories:
        for package, version in pins.items():
            try:
                affected = advisory.affects(package, version)
            except InvalidVersion:
                affected = False  # an old advisory for versions that cannot be pinned
            if affected:
                lines.append(f"{package}=={version}: {advisory.id}, {advisory.what}")
    return sorted(set(lines))


def _all(directory: Path | None) -> Iterator[Advisory]:
    yield from kept()
    for file in sorted(directory.glob("*.json")) if directory else []:
        yield from from_osv(json.loads(file.read_text(encoding="utf-8")))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--osv", type=Path)
    asked = parser.parse_args()
    pins = read_pins(asked.constraints.read_text())
    lines = found(pins, _all(asked.osv))
    source = f"{sum(1 for _ in _all(asked.osv))} entries"
    print("\n".join(lines) or f"None of {len(pins)} pins is affected ({source} checked).")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
