"""What all workers can do when they are told."""

import time

import numpy as np

from benchmarks.async_sgd.gradients import Array, check_between, multiple
from benchmarks.async_sgd.workload import SCENARIOS


class Worker:
    """Of each kind there is a subclass, with prepare() and exchange().

    gradients: what it sends, `weight` times those of worker 0. weights: what it fetched.
    """

    gradients: Array
    weights: Array

    def exchange(self) -> None:
        raise NotImplementedError

    def run(self, scenario: str, compute: float, begin: float, iterations: int) -> list[float]:
        """The seconds of each iteration. begin: of `time.monotonic`, the same in all processes."""
        time.sleep(max(0.0, begin - time.monotonic()))
        return SCENARIOS[scenario](self.exchange, compute, iterations)

    def rest(self) -> None:
        """All are done."""

    def check(self, least: int, most: int) -> None:
        """That the weights lie between these multiples of the gradients of worker 0."""
        check_between(self.weights, least, most)

    def release(self) -> None:
        """Gives all memory back."""
        del self.gradients, self.weights

    def _allocate(self, count: int, weight: int) -> None:
        self.gradients = multiple(count, weight)
        self.weights = np.zeros(count, np.float32)
