"""Runs over the cores: worker processes of one thread each, which are told to stop, not killed.

A worker that dies takes one run with it, which can be gone on with; the others go on.
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

from fedveil.interrupt import stop_after_interrupt

PAUSE = 0.05  # seconds between two looks at the workers
GRACE = 40.0  # seconds for the round under way, before a worker is asked again and stops at once
PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Task:
    """One run to be played, or to be gone on with."""

    name: str
    path: Path
    settings: Mapping[str, Any]
    rounds: int

    def line(self, ledger: Path | None) -> str:
        """As a worker reads it."""
        plain = {"path": str(self.path.resolve()), "settings": self.settings}
        return json.dumps({**plain, "ledger": None if ledger is None else str(ledger)}) + "\n"


class Display(Protocol):
    """Sees what becomes of every run."""

    def started(self, task: Task) -> None:
        """A worker took it up."""

    def moved(self, task: Task, answer: Mapping[str, Any]) -> None:
        """A round was played."""

    def ended(self, task: Task, problem: str | None) -> None:
        """It is finished, or there is a sentence about why not."""


class Pool:
    """Tasks in order, on as many workers as there are jobs."""

    def __init__(self, jobs: int, ledger: Path | None, display: Display) -> None:
        self.jobs, self.ledger, self.display = jobs, ledger, display
        self.problems: dict[str, str] = {}  # of runs that did not end, by their names
        self._again = 0.0  # when to ask workers to stop, once that is wished
        self.stopped = False
        self._workers: set[subprocess.Popen[str]] = set()

    def play(self, tasks: Sequence[Task]) -> None:
        """All of them. Ctrl-C ends every worker after its round; a second one ends them at once."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
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
        """Ask all workers to stop; again after a while, for one that started may have missed it."""
        self.stopped, self._again = True, time.monotonic() + GRACE
        for worker in list(self._workers):
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(signal.SIGINT)

    def _work(self, waiting: queue.SimpleQueue[Task]) -> None:
        """One worker after another, each for as many tasks as it lives."""
        while not self.stopped and not waiting.empty():
            with tempfile.TemporaryFile("w+") as errors, self._worker(errors) as worker:
                while not self.stopped and worker.poll() is None:
                    try:
                        task = waiting.get_nowait()
                    except queue.Empty:
                        return
                    problem = self._played(worker, task)
                    if problem == _GONE and not self.stopped:
                        problem = _last_words(worker, errors)
                    if problem is not None:
                        self.problems[task.name] = "stopped" if self.stopped else problem
                    self.display.ended(task, problem)

    def _played(self, worker: subprocess.Popen[str], task: Task) -> str | None:
        """Hand a task over and listen until it ends; what went wrong, if something did."""
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
        """A process in a group of its own, so that Ctrl-C reaches it through `_stop` alone."""
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
    """One thread each, and the same modules as here."""
    where = [str(PACKAGE), *(place or os.getcwd() for place in sys.path)]
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **one, "PYTHONPATH": os.pathsep.join(where), "PYTHONIOENCODING": "utf-8"}


def _last_words(worker: subprocess.Popen[str], errors: Any) -> str:
    """What a worker that died had to say."""
    code = worker.wait()
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    return f"its process ended with {code}{said}"
