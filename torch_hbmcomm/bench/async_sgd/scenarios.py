"""What a worker does in each iteration: it computes, which is emulated by sleeping, and exchanges
its gradients for fresh weights."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Exchange = Callable[[], None]
"""Sends the gradients and fetches the weights."""


def sequential(exchange: Exchange, compute: float, iterations: int) -> list[float]:
    """One after the other. Returns the seconds of communication in each iteration."""
    times = []
    for _ in range(iterations):
        time.sleep(compute)
        start = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - start)
    return times


def parallel(exchange: Exchange, compute: float, iterations: int) -> list[float]:
    """A thread communicates for one iteration while the next one computes; they hand over by a
    mutex and a condition, those of a Future. Returns the seconds of each iteration: of the longer
    one, computation or communication (Eq. 1). The first has nothing to wait for."""
    times = []
    with ThreadPoolExecutor(max_workers=1) as communication:
        under_way: Future[None] | None = None
        start = time.perf_counter()
        for _ in range(iterations):
            time.sleep(compute)
            if under_way is not None:
                under_way.result()
            under_way = communication.submit(exchange)
            end = time.perf_counter()
            times.append(end - start)
            start = end
        if under_way is not None:
            under_way.result()
    return times


SCENARIOS = {"sequential": sequential, "parallel": parallel}
