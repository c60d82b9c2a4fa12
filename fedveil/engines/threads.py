"""Groups on threads: each core works on a group of its own, and results come in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")
Answer = TypeVar("Answer")
AHEAD = 2  # groups for each thread that may wait for an earlier one, so that memory is bounded


def in_order(work: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
    """work(item) of one item after the other, computed on as many threads as torch may use.

    Small kernels gain little from two cores, and lose much by waiting for each other; here every
    core has its own. Sums of the answers do not depend on the number of threads.
    """
    threads = min(torch.get_num_threads(), len(items))
    if threads < 2:
        yield from map(work, items)
        return
    with _one_thread_each():
        waiting: deque[Future[Answer]] = deque()
        try:
            for item in items:
                waiting.append(_pool(threads).submit(work, item))
                if len(waiting) > AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for rest in waiting:
                rest.cancel()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept, since every thread has a copy of the module (`Task.here`)."""
    return ThreadPoolExecutor(threads, "fedveil", torch.set_num_threads, (1,))
