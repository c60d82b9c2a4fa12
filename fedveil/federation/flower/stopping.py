"""Stop a resident process cleanly: the first signal asks, the second one ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

STOPS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def on_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` on SIGTERM or SIGINT inside the block. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPS}

    def first(number: int, frame: object) -> None:
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)
        stop()

    for number in STOPS:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
