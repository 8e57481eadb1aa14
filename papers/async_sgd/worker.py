"""The methods that all workers have."""

import time
from abc import ABC, abstractmethod

import numpy as np

from papers.async_sgd.gradients import Array, check_between, multiple
from papers.async_sgd.workload import SCENARIOS


class Worker(ABC):
    """A worker. Subclasses add prepare(), with their own arguments, and exchange().

    gradients: sent in each exchange; `weight` times the gradients of worker 0.
    weights: fetched in the last exchange.
    """

    gradients: Array
    weights: Array

    @abstractmethod
    def exchange(self) -> None:
        """Send the gradients, and fetch the weights."""

    def run(self, scenario: str, compute: float, begin: float, iterations: int) -> list[float]:
        """Return the seconds of each iteration.

        begin: time of the start, by `time.monotonic`, which all processes share.
        """
        time.sleep(max(0.0, begin - time.monotonic()))
        return SCENARIOS[scenario](self.exchange, compute, iterations)

    def rest(self) -> None:  # noqa: B027  (most have nothing to do)
        """Clean up after all workers have ended their exchanges."""

    def check(self, least: int, most: int) -> None:
        """Check that the weights are between these multiples of worker 0's gradients."""
        check_between(self.weights, least, most)

    def release(self) -> None:
        """Free all memory."""
        del self.gradients, self.weights

    def _allocate(self, count: int, weight: int) -> None:
        self.gradients = multiple(count, weight)
        self.weights = np.zeros(count, np.float32)
