"""Train on disks that fill up or become read-only, free space, resume, compare.  Needs root.

    python -m scripts.disk_test

Each disk is a tmpfs of a given size that holds the ledger and the run. After every trial the run
must have succeeded or ended with one error message. With free space it must resume and produce the
files of an undisturbed run, and the ledger must contain every release.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from fedveil.training import sources
from scripts.kill_test import CASES, Tally, blobs, child, files, judge, trial, warm

PAGE = 4096


def mount(place: Path, *options: str) -> None:
    """Mount a tmpfs, or remount it with other options."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", place], check=True)


def ended(case: str, run: Path, log: Path) -> str:
    """Train or resume; returns the error message, empty on success."""
    errors = log.with_suffix(".err")
    before = errors.stat().st_size if errors.exists() else 0
    _, status = os.waitpid(child(case, run, log, None), 0)
    said = errors.read_bytes()[before:].decode()
    code = os.waitstatus_to_exitcode(status)
    if (code, bool(said)) not in ((0, False), (2, True)) or said.count("\n") > 1:
        raise RuntimeError(f"{case} ended with {code}: {said}")
    return said.strip()


def filled(case: str, place: Path, kilobytes: int, whole: dict[str, str], tally: Tally) -> str:
    """One training on a disk of this size, resumed with free space."""
    disk = place / "disk"
    disk.mkdir(exist_ok=True)
    mount(disk, f"size={kilobytes}k")
    try:
        os.environ["FEDVEIL_LEDGER"] = str(disk / "ledger.sqlite")
        run, log = disk / "run", place / "log"
        log.unlink(missing_ok=True)
        said = ended(case, run, log)
        if said:
            mount(disk, "remount", "ro", f"size={kilobytes}k")
            if not ended(case, run, log):
                tally.problems.append(f"{case}: no error for a read-only disk")
            mount(disk, "remount", "rw", "size=100m")
            if ended(case, run, log):
                tally.problems.append(f"{case}: the run did not resume")
        tally.trials[case] += 1
        judge(case, run, log, whole, tally)
    finally:
        subprocess.run(["umount", disk], check=True)
    return said


def main() -> None:
    """Run all cases on disks of all relevant sizes."""
    torch.set_num_threads(1)
    data, tally, sentences = blobs(), Tally(), Counter[str]()
    sources.load_data = lambda _: data  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        warm(place)
        for case in CASES:
            run, _ = trial(case, place / "trial", [], Tally())
            whole = files(run)
            for kilobytes in range(PAGE // 1024, 260, 12):
                said = filled(case, place, kilobytes, whole, tally)
                short = re.sub(r"/\S+?(?=[:; ])|\(.*?\)", "…", said.partition(";")[0])
                sentences[short or "succeeded"] += 1
    figures = {name: getattr(tally, name) for name in Tally.__dataclass_fields__}
    print(json.dumps(figures | {"ends": sentences}, indent=2, ensure_ascii=False))
    broken = ("lost_rounds", "uncharged_releases", "noise_used_twice", "different_models")
    sys.exit(any(figures[name] for name in (*broken, "problems")))


if __name__ == "__main__":
    main()
