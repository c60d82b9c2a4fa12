"""Fuzz the parsers with atheris (libFuzzer): `python -m scripts.fuzz csv --inputs 50000`.

Each parser runs in its own process, with limits on its memory (RLIMIT_AS) and on the time for one
input. Without a name all parsers run. The corpus is tests/system/fuzz/corpus. Inputs with new
coverage are kept in --work, from where `--merge` copies a small selection back. Needs atheris
(`pip install atheris`), which is not among the pinned dependencies.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

CORPUS = Path(__file__).parents[1] / "tests" / "system" / "fuzz" / "corpus"
INSTRUMENTED = [
    "fedveil.data", "fedveil.training.settings", "fedveil.wire", "fedveil.federation.reception",
    "fedveil.federation.frames", "fedveil.federation.requests", "fedveil.federation.participant",
    "fedveil.federation.secagg", "fedveil.runs", "fedveil.serialization",
    "tomllib", "pickletools",
]  # fmt: skip
MEMORY = 2**30  # bytes, in addition to the imports
SECONDS = 10  # per input
LENGTH = 8192  # bytes per input
KEPT = 40_000  # bytes of a parser's corpus
DEFECT = "defect-"  # prefix of inputs that once found a defect; these are always kept
Step = tuple[str, int, int]


def child(name: str, arguments: list[str]) -> None:
    """Fuzz one parser in this process; libFuzzer ends the process."""
    import logging
    import resource

    import atheris

    logging.disable(logging.CRITICAL)  # refusals are told to a client's owner, one by one

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.system.fuzz.targets import survives

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    atheris.Setup([sys.argv[0], *arguments], lambda content: survives(name, content))
    atheris.Fuzz()


def fuzz(name: str, inputs: int, seconds: int, work: Path) -> int:
    """Number of inputs tried; findings are left in the working directory."""
    place = _prepared(name, work)
    flags = [
        f"-runs={inputs}", f"-max_total_time={seconds}", f"-timeout={SECONDS}",
        f"-max_len={LENGTH}", f"-artifact_prefix={place.parent}/{name}-found-",
        "-rss_limit_mb=0", "-print_final_stats=1", "-verbosity=1", "-close_fd_mask=1",
    ]  # fmt: skip
    done = _run(name, [*flags, str(place)])
    tried = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    if done.returncode or tried is None:
        print(done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(f"{name}: found a defect. Its input is in {place.parent}.")
    return int(tried[1])


def merge(name: str, work: Path) -> None:
    """Keep small inputs that reach a transition between lines that smaller ones do not."""
    place, target = _prepared(name, work), CORPUS / name
    files = sorted(place.iterdir(), key=lambda file: (file.stat().st_size, file.name))
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*"):
        if not old.name.startswith(DEFECT):
            old.unlink()
    known: set[Step] = set()
    room = KEPT
    for content in (file.read_bytes() for file in files if not file.name.startswith(DEFECT)):
        steps = _steps(name, content)
        if steps <= known or len(content) > room:
            continue
        known |= steps
        room -= len(content)
        (target / hashlib.sha256(content).hexdigest()[:12]).write_bytes(content)


def _steps(name: str, content: bytes) -> set[Step]:
    """The transitions between lines of the parsers."""
    from tests.system.fuzz.targets import survives

    seen: set[Step] = set()

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_globals.get("__name__", "").startswith(tuple(INSTRUMENTED)):
            return None
        before = [0]

        def line(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            seen.add((frame.f_code.co_filename, before[0], frame.f_lineno))
            before[0] = frame.f_lineno
            return line

        return line

    sys.settrace(trace)
    try:
        survives(name, content)
    finally:
        sys.settrace(None)
    return seen


def _prepared(name: str, work: Path) -> Path:
    from tests.system.fuzz.targets import TARGETS

    place = work / name
    place.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds()):
        (place / f"seed-{number}").write_bytes(seed)
    for file in (CORPUS / name).glob("*"):
        shutil.copy(file, place / file.name)
    return place


def _run(name: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.fuzz", "--child", name, *flags]
    return subprocess.run(command, env=settings, capture_output=True, text=True, errors="replace")


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parsers", nargs="*")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=200)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fedveil-fuzz")
    parser.add_argument("--merge", action="store_true")
    asked = parser.parse_args()
    from tests.system.fuzz.targets import TARGETS

    for name in asked.parsers or TARGETS:
        if asked.merge:
            merge(name, asked.work)
        else:
            print(f"{name}: {fuzz(name, asked.inputs, asked.seconds, asked.work):,} inputs")


if __name__ == "__main__":
    main()
