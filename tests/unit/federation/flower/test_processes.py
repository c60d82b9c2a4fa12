"""Processes that end together, with what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.federation.flower import processes as module
from fedveil.federation.flower.processes import (
    ChildProcesses,
    accepts,
    environment,
    free_port,
    wait_for,
)

SLEEP = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('ready', flush=True); time.sleep(60)",
]


@pytest.fixture
def processes(tmp_path: Path) -> ChildProcesses:
    return ChildProcesses(tmp_path, os.environ)


def wait_until_ready(processes: ChildProcesses, name: str) -> None:
    wait_for(name, lambda: "ready" in processes.log(name).read_text(), 20)


def test_a_process_is_started_once_and_ended(processes: ChildProcesses) -> None:
    pid = processes.start("one", SLEEP)
    wait_until_ready(processes, "one")
    assert processes.alive("one")
    with pytest.raises(UserError, match="already running"):
        processes.start("one", SLEEP)
    processes.end()
    assert not processes.alive("one")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_that_ignores_sigterm_is_killed(
    processes: ChildProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.1)
    processes.start("stubborn", STUBBORN)
    wait_until_ready(processes, "stubborn")
    began = time.monotonic()
    processes.end("stubborn")
    assert time.monotonic() - began < 10


def test_what_a_process_started_ends_with_it_and_nothing_else_does(
    processes: ChildProcesses,
) -> None:
    other = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL)
    child = (
        f"import subprocess, time; p = subprocess.Popen({SLEEP!r}); print(p.pid); time.sleep(60)"
    )
    processes.start("parent", [sys.executable, "-u", "-c", child])
    wait_until_ready(processes, "parent")
    pid = int(processes.log("parent").read_text().split()[0])
    processes.kill("parent")
    processes.end()
    wait_for("The child's end", lambda: not running(pid), 10)
    assert other.poll() is None
    other.send_signal(signal.SIGKILL)
    other.wait()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_end_of_a_log_says_why_a_process_ended(processes: ChildProcesses) -> None:
    processes.start("broken", [sys.executable, "-c", "raise SystemExit('no such option')"])
    wait_for("Its end", lambda: not processes.alive("broken"), 20)
    with pytest.raises(UserError, match="no such option"):
        processes.fail_unless_alive("broken")
    processes.end()


def test_waiting_is_bounded() -> None:
    with pytest.raises(UserError, match=r"Nothing took more than 0\.1 seconds"):
        wait_for("Nothing", lambda: False, 0.1)


def test_flower_is_quiet_and_keeps_to_its_home(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    assert variables["FLWR_TELEMETRY_ENABLED"] == "0"
    assert variables["FLWR_HOME"] == str(tmp_path)
    assert not accepts(free_port())
