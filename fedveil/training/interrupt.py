"""Ctrl-C stops a run after the current round, so that the rounds so far are kept."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_after_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed. A second Ctrl-C interrupts."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    earlier = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, earlier)
        print("Stopping after this round. Press Ctrl-C again to stop now.", file=sys.stderr)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, earlier)
