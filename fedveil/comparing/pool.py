"""Train runs in parallel, in worker processes with one thread each.

Workers are asked to stop, not killed. If a worker dies, its run can be resumed and the others
continue.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedveil.training.interrupt import stop_after_interrupt

PAUSE = 0.05  # seconds between two checks of the workers
GRACE = 40.0  # seconds to finish the current round; asked again, a worker stops at once
PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RunTask:
    """One run to start or to resume."""

    name: str
    path: Path
    settings: Mapping[str, Any]
    rounds: int

    def line(self, ledger: Path | None) -> str:
        """The task as a line of JSON for a worker."""
        plain = {"path": str(self.path.resolve()), "settings": self.settings}
        return json.dumps({**plain, "ledger": None if ledger is None else str(ledger)}) + "\n"


class Display(Protocol):
    """Shows the progress of runs."""

    def started(self, task: RunTask) -> None:
        """A worker has started the run."""

    def moved(self, task: RunTask, answer: Mapping[str, Any]) -> None:
        """A round has finished."""

    def ended(self, task: RunTask, problem: str | None) -> None:
        """The run has finished, or failed with a problem."""


class NoDisplay:
    """Shows nothing: the number of runs in a private selection is secret."""

    def started(self, task: RunTask) -> None:
        """Show nothing."""

    def moved(self, task: RunTask, answer: Mapping[str, Any]) -> None:
        """Show nothing."""

    def ended(self, task: RunTask, problem: str | None) -> None:
        """Show nothing."""


class Pool:
    """Trains tasks in order, on `jobs` workers."""

    def __init__(self, jobs: int, ledger: Path | None, display: Display) -> None:
        self.jobs, self.ledger, self.display = jobs, ledger, display
        self.problems: dict[str, str] = {}  # of runs that failed, by name
        self._again = 0.0  # time of the next request to stop
        self.stopped = False
        self._workers: set[subprocess.Popen[str]] = set()

    def run(self, tasks: Sequence[RunTask]) -> None:
        """Train all tasks. Ctrl-C stops workers after their round, a second Ctrl-C at once."""
        waiting: queue.SimpleQueue[RunTask] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        threads = [
            threading.Thread(target=self._work, args=(waiting,), daemon=True)
            for _ in range(min(self.jobs, len(tasks)))
        ]
        try:
            with stop_after_interrupt() as pressed:
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads):
                    time.sleep(PAUSE)
                    if pressed() and time.monotonic() > self._again:
                        self._stop()
        finally:
            for worker in list(self._workers):
                worker.kill()

    def _stop(self) -> None:
        """Ask all workers to stop. It is repeated: a worker that is starting may miss a request."""
        self.stopped, self._again = True, time.monotonic() + GRACE
        for worker in list(self._workers):
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(signal.SIGINT)

    def _work(self, waiting: queue.SimpleQueue[RunTask]) -> None:
        """Serve tasks with one worker, and replace it if it dies."""
        while not self.stopped and not waiting.empty():
            with tempfile.TemporaryFile("w+") as errors, self._worker(errors) as worker:
                while not self.stopped and worker.poll() is None:
                    try:
                        task = waiting.get_nowait()
                    except queue.Empty:
                        return
                    problem = self._train(worker, task)
                    if problem == _GONE and not self.stopped:
                        problem = _cause_of_death(worker, errors)
                    if problem is not None:
                        self.problems[task.name] = "stopped" if self.stopped else problem
                    self.display.ended(task, problem)

    def _train(self, worker: subprocess.Popen[str], task: RunTask) -> str | None:
        """Send a task to a worker and wait for its end; returns the problem, if any."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        self.display.started(task)
        try:
            worker.stdin.write(task.line(self.ledger))
            worker.stdin.flush()
        except BrokenPipeError:
            return _GONE
        for line in worker.stdout:
            answer = json.loads(line)
            if "problem" in answer:
                return str(answer["problem"])
            if "ended" in answer:
                return None if answer["ended"] else "stopped"
            self.display.moved(task, answer)
        return _GONE

    @contextlib.contextmanager
    def _worker(self, errors: Any) -> Iterator[subprocess.Popen[str]]:
        """A process in its own session, so that Ctrl-C reaches it only through `_stop`."""
        command = [sys.executable, "-P", "-m", "fedveil.comparing.worker"]
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=_environment(), start_new_session=True,
        )  # fmt: skip
        self._workers.add(worker)
        try:
            yield worker
        finally:
            with contextlib.suppress(BrokenPipeError):
                if worker.stdin is not None:
                    worker.stdin.close()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
            self._workers.discard(worker)


_GONE = "gone"


def _environment() -> dict[str, str]:
    """One thread per worker, and the same import path as here."""
    where = [str(PACKAGE), *(place or os.getcwd() for place in sys.path)]
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **one, "PYTHONPATH": os.pathsep.join(where), "PYTHONIOENCODING": "utf-8"}


def _cause_of_death(worker: subprocess.Popen[str], errors: Any) -> str:
    """Exit code and last error line of a worker that died."""
    code = worker.wait()
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    return f"its process ended with exit code {code}{said}"
