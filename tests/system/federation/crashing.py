"""A server that kills its own process between `reserve` and `commit`, as a plan file says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedveil.federation import serve as serving
from fedveil.federation.transport import Transport

PLAN = "crash.json"  # {"exchange": n}: die in the n-th exchange of this process


class Dying:
    """A transport that ends the process when all replies of one exchange are in."""

    def __init__(self, inner: Transport, plan: Path) -> None:
        self._inner, self._plan = inner, plan
        self._left = int(json.loads(plan.read_text())["exchange"])

    def connected(self) -> frozenset[int]:
        return self._inner.connected()

    def exchange(
        self, requests: Mapping[int, bytes], seconds: float
    ) -> Iterator[tuple[int, bytes]]:
        self._left -= 1
        replies = self._inner.exchange(requests, seconds)
        if not self._left:
            list(replies)  # so that every client has charged what it sent
            self._die()
        yield from replies

    def _die(self) -> None:
        """Once: the next process has no plan."""
        self._plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def serve(directory: Path, transport: Transport) -> int:
    """`fedveil.federation.serve`, which dies once if there is a plan."""
    plan = directory / PLAN
    if plan.exists():
        transport = Dying(transport, plan)
    return serving.serve(directory, transport)
