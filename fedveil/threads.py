"""Groups on threads: each core works on a group of its own, and results come in order."""

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
AHEAD = 2  # groups for each thread that may wait for an earlier one, so that memory is bounded


def in_order(work: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
    """work(item) of one item after the other, computed on as many threads as torch may use.

    Small kernels gain little from two cores, and lose much by waiting for each other; here every
    core has its own. The answers do not depend on the number of threads, to the last bit.
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


def equal_shares(count: int, most: int) -> list[slice]:
    """0 … count − 1 in shares of at most so many, as many for each core as for the others.

    By the cores there are and not by the threads in use: a run alone and the same run beside
    others, on one thread, have the same sums to the last bit. Their noise is the same, so a
    difference would be one that no noise covers.
    """
    shares = min(count, cores() * -(-count // (cores() * most)))
    ends = [count * share // shares for share in range(shares + 1)] if shares else []
    return [slice(start, stop) for start, stop in pairwise(ends)]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
