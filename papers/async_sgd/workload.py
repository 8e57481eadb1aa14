"""The work of a worker: the networks of the paper's Table 2, and the scenarios of an iteration.

Computation is emulated by sleeping. An iteration exchanges its gradients for new weights.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch_hbmcomm.sizes import KIB, MIB

_PAGE = 4 * KIB


@dataclass(frozen=True)
class Model:
    """A network of the paper's Table 2.

    bytes: size of its weights in float32.
    compute: seconds of a forward and backward pass.
    """

    name: str
    bytes: int
    compute: float

    def shrunk(self, factor: int) -> "Model":
        """Return a model with size and time of computation divided by `factor`."""
        return Model(self.name, _pages(self.bytes / factor), self.compute / factor)


def _pages(count: float) -> int:
    return max(1, round(count / _PAGE)) * _PAGE


MODELS = {
    name: Model(name, _pages(megabytes * MIB), milliseconds / 1e3)
    for name, megabytes, milliseconds in (
        ("Inception_v1", 51.09, 189),
        ("Inception_v3", 94.30, 445),
        ("Resnet_50", 121.13, 233),
        ("Inception_resnet_v2", 214.08, 294),
        ("Resnet_152", 253.63, 218),
        ("VGG16", 527.79, 190),
    )
}
"""The networks in the table's order. Its "MB" are MiB: Inception_v1 has 13.4 million parameters."""

Exchange = Callable[[], None]
"""A function that sends the gradients and fetches the weights."""


def sequential(exchange: Exchange, compute: float, iterations: int) -> list[float]:
    """Compute and exchange alternately. Return the seconds of communication in each iteration."""
    times = []
    for _ in range(iterations):
        time.sleep(compute)
        start = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - start)
    return times


def parallel(exchange: Exchange, compute: float, iterations: int) -> list[float]:
    """Exchange in a thread: the exchange of an iteration runs while the next iteration computes.

    The threads synchronise by a Future's mutex and condition. Returns the seconds of each
    iteration: the longer of computation and communication (Eq. 1). The first iteration waits for no
    exchange.
    """
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
