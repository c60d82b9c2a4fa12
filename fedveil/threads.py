"""Groups on threads: each core works on a group of its own, and results come in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
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
    with one_thread_each():
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


def equal_shares(count: int, most: int) -> list[slice]:
    """0 … count − 1 in shares of at most so many, as many for each thread as for the others.

    >>> with one_thread_each():
    ...     equal_shares(5, 3)
    [slice(0, 2, None), slice(2, 5, None)]
    """
    threads = torch.get_num_threads()
    shares = min(count, threads * -(-count // (threads * most)))
    ends = [count * share // shares for share in range(shares + 1)] if shares else []
    return [slice(start, stop) for start, stop in pairwise(ends)]


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Kernels of this thread run on one core."""
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
