"""The plan of a run: what is measured."""

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
    """A choice of what to measure. Raises ValueError for what cannot be measured.

    models, contenders: names; None: each section's own choice.
    workers: how many train at a time.
    rounds: in each, every contender has a turn.
    iterations: that count in a turn; one more comes before them, while queues are still filling.
    seconds: the most that the iterations may take in a scenario; a contender that needs more has
    one turn, of one iteration that counts.
    lanes: connections of tcp.
    threads: accumulate on the box.
    megabits: rate of the slow link, each way, in Mbit/s.
    shrink: divides sizes and times of computation.
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
                f"{self.iterations} iterations of {max(self.workers)} workers add up to more than "
                f"float32 holds exactly, and the sums are checked: ask for fewer"
            )

    def chosen(self, names: Sequence[str]) -> list[Model]:
        """Return the models that the plan names, or else those of these names."""
        return [MODELS[name].shrunk(self.shrink) for name in self.models or names]


QUICK: dict[str, Any] = {
    "models": ["Inception_v1"],
    "workers": (2,),
    "rounds": 1,
    "iterations": 1,
    "shrink": 32,
}
"""Fields of a plan that only shows that everything can be measured."""
