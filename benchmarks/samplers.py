"""How fast noise is drawn: floats that are not released, and whole numbers that are.

`python benchmarks/samplers.py` prints draws per second, the median of five, on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from fedveil.random.samplers import gaussian_table, laplace_table, rounded_gaussian
from fedveil.random.streams import SecretKey, stream

SIZE = 1_000_000
SIGMA = 2.0**20
DIM, DRAWS = 7850, 600


def rate(draw: Callable[[], object], size: int = SIZE) -> float:
    """Draws per second, the median of five after one to warm up."""
    draw()
    return size / statistics.median(_seconds(draw) for _ in range(5))


def _seconds(draw: Callable[[], object]) -> float:
    start = time.perf_counter()
    draw()
    return time.perf_counter() - start


def contenders() -> dict[str, tuple[Callable[[], object], int]]:
    """What is measured, and how many draws one call makes."""
    fast, secret = stream(0, 0, "benchmark"), stream(SecretKey(), 0, "benchmark")
    torch_rng = torch.Generator().manual_seed(0)
    table, laplace = gaussian_table(100.0, 1000), laplace_table(0.01, 1000)
    return {
        "torch.randn float32": (lambda: torch.randn(SIZE, generator=torch_rng), SIZE),
        "numpy standard_normal, Philox": (lambda: fast.standard_normal(SIZE), SIZE),
        "rounded_gaussian, Philox": (lambda: rounded_gaussian(SIGMA, SIZE, fast), SIZE),
        "rounded_gaussian, secret ChaCha20": (lambda: rounded_gaussian(SIGMA, SIZE, secret), SIZE),
        "gaussian_table.draw, Philox": (lambda: table.draw(SIZE, fast), SIZE),
        "gaussian_table.draw, secret": (lambda: table.draw(SIZE, secret), SIZE),
        "laplace_table.draw_sum, Philox": (lambda: laplace.draw_sum(DIM, DRAWS, fast), DIM * DRAWS),
    }


def main() -> None:
    """One table: millions of draws per second, and the time of one beside torch's."""
    torch.set_num_threads(1)
    rates = {name: rate(draw, size) for name, (draw, size) in contenders().items()}
    base = rates["torch.randn float32"]
    print(f"{'sampler':36}{'M draws/s':>10}{'time / torch':>14}")
    for name, speed in rates.items():
        print(f"{name:36}{speed / 1e6:>10.1f}{base / speed:>14.2f}")


if __name__ == "__main__":
    main()
