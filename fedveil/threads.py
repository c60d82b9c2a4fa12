"""Runs groups on threads: each core works on its own group, and results keep their order."""

from __future__ import annotations

import os
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
AHEAD = 2  # finished groups per thread that may wait for an earlier one, which bounds memory


def in_order(work: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
    """work(item) for each item in order, computed on as many threads as torch may use.

    Small kernels gain little from two cores and lose time waiting for each other, so each core runs
    its own. The results do not depend on the number of threads, to the last bit.
    """
    threads = min(torch.get_num_threads(), len(items))
    with one_thread_each():
        if threads < 2:
            yield from map(work, items)
            return
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


def equal_shares(count: int, most: int, least: int = 1) -> list[slice]:
    """0 … count − 1 in shares of at most `most`, the same number for each core.

    Shares of fewer than `least` are not worth a core: then there are fewer of them.

    Uses the number of cores, not of active threads: a run alone and the same run on one thread
    beside others have the same sums to the last bit. They also have the same noise, so a difference
    would be one that no noise covers.
    """
    even = cores() * -(-count // (cores() * most))
    shares = min(count, even, max(-(-count // most), count // least))
    ends = [count * share // shares for share in range(shares + 1)] if shares else []
    return [slice(start, stop) for start, stop in pairwise(ends)]


def cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread_each() -> Iterator[None]:
    """A context in which this thread's kernels run on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Cached, since every thread has its own copy of the module (`Task.here`)."""
    return ThreadPoolExecutor(threads, "fedveil", torch.set_num_threads, (1,))
