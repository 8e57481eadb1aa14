"""The plan of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from papers.async_sgd.gradients import MOST, multiple_of_all
from papers.async_sgd.workload import MODELS, SCENARIOS, Model
from torch_hbmcomm import machine
from torch_hbmcomm.bench.result import check_counts, check_names

TRANSPORTS = ("shm", "tcp")


@dataclass(frozen=True)
class Plan:
    """A choice of measurements. Raises ValueError if a measurement is impossible.

    models, contenders: names; None: each section's own choice.
    workers: numbers of workers.
    rounds: turns of each contender.
    iterations: number of counted iterations in a turn. One uncounted iteration comes first, to fill
    queues.
    seconds: longest time of the iterations in a scenario. A slower contender has one turn, with one
    counted iteration.
    lanes: number of connections of tcp.
    threads: number of the box's threads that accumulate.
    megabits: rate of the slow link, each way, in Mbit/s.
    shrink: number by which the models' sizes and times of computation are divided.
    """

    sections: Sequence[str]
    scenarios: Sequence[str] = tuple(SCENARIOS)
    models: Sequence[str] | None = None
    transports: Sequence[str] = TRANSPORTS
    contenders: Sequence[str] | None = None
    workers: Sequence[int] = (2, 4, 8)
    rounds: int = 1
    iterations: int = 4
    seconds: float = 6.0
    lanes: int = 4
    threads: int = machine.cores()
    megabits: int = 1000
    shrink: int = 1

    def __post_init__(self) -> None:
        check_names("scenario", self.scenarios, SCENARIOS)
        check_names("transport", self.transports, TRANSPORTS)
        if self.models is not None:
            check_names("model", self.models, MODELS)
        counts = ("rounds", "iterations", "lanes", "threads", "megabits", "shrink")
        check_counts(self, dict.fromkeys(counts, 1))
        if not self.workers or min(self.workers) < 1:
            raise ValueError("at least one worker trains at a time")
        pushes = 1 + len(SCENARIOS) * (1 + self.iterations)
        if pushes * multiple_of_all(max(self.workers)) > MOST:
            raise ValueError(
                f"{self.iterations} iterations of {max(self.workers)} workers: the checked sums "
                f"exceed the integers that float32 represents exactly; request fewer"
            )

    def chosen(self, names: Sequence[str]) -> list[Model]:
        """Return the models that the plan names; if it names none, the models `names`."""
        return [MODELS[name].shrunk(self.shrink) for name in self.models or names]


QUICK: dict[str, Any] = {
    "models": ["Inception_v1"],
    "workers": (2,),
    "rounds": 1,
    "iterations": 1,
    "shrink": 32,
}
"""Fields of a plan that checks that everything runs."""
