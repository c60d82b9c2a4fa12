"""Ctrl-C as a wish to stop after the current round, so that the work so far is kept."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_after_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; a second one interrupts at once."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    earlier = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, earlier)
        print("Stopping after this round; Ctrl-C again stops at once.", file=sys.stderr)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, earlier)
