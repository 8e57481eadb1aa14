"""Runs one section: for each model and number of workers, the contenders alternate."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from benchmarks.namespaces import Node
from papers.async_sgd.contenders import Contender, Place
from papers.async_sgd.participants import Participants
from papers.async_sgd.plan import Plan
from papers.async_sgd.workload import Model
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.result import (
    Findings,
    Measurement,
    Unavailable,
    left_out_if_it_fails,
    sampled,
)
from torch_hbmcomm.sizes import MIB, format_bytes

_SPARE = 512 * MIB  # memory of the machine to leave free

Samples = dict[str, list[float]]
"""Milliseconds, by scenario."""


class Emulation:
    """Alternates the contenders on one model after another.

    The participants of all contenders live from start() to the end of the `with` block. Only the
    running contender has memory for the model.
    """

    def __init__(self, section: str, plan: Plan, findings: Findings) -> None:
        self._section = section
        self._plan = plan
        self._findings = findings
        self._stack = ExitStack()
        self._participants: dict[Contender, Participants] = {}

    def __enter__(self) -> "Emulation":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, contenders: Iterable[Contender], place: Place) -> None:
        for contender in contenders:
            self._findings.progress(f"{self._section}: starting {contender.name}")
            with self._may_fail(contender):
                participants = contender.participants(self._plan, max(self._plan.workers), place)
                self._participants[contender] = self._stack.enter_context(participants)

    def measure(self, model: Model, workers: int) -> None:
        """Measure a model with `workers` workers, and add the findings by scenario."""
        self._findings.progress(f"{self._section}: {model.name}, {workers} workers")
        samples: dict[str, Samples] = {}
        slow: set[str] = set()
        for _ in range(self._plan.rounds):
            for contender, participants in self._participants.items():
                if contender.name in slow or self._is_out(contender, model, workers):
                    continue
                with self._may_fail(contender):
                    found, more = self._turn(participants, model, workers)
                    mine = samples.setdefault(contender.name, {})
                    for scenario, times in found.items():
                        mine.setdefault(scenario, []).extend(times)
                    if not more:
                        slow.add(contender.name)
        self._findings.add(
            self.measurement(scenario, model, workers, name, mine[scenario])
            for scenario in self._plan.scenarios
            for name, mine in samples.items()
        )

    def measurement(
        self, scenario: str, model: Model, workers: int, who: str, milliseconds: list[float]
    ) -> Measurement:
        of = {
            "section": self._section,
            "scenario": scenario,
            "model": model.name,
            "bytes": model.bytes,
            "compute_ms": model.compute * 1e3,
            "workers": workers,
        }
        return sampled(of, who, milliseconds, "ms")

    def check_way(self, model: Model, receiver: Node) -> None:
        """Fail contenders whose gradients do not cross the link to `receiver`."""
        for contender, participants in self._participants.items():
            with self._may_fail(contender):
                before = receiver.received()
                with participants.at_work(model, 1) as turn:
                    turn.first()
                    turn.check()
                crossed = receiver.received() - before
                if crossed < model.bytes:
                    raise PeerFailed(
                        f"only {format_bytes(crossed)} of {format_bytes(model.bytes)} crossed "
                        f"the link: the rest took another path"
                    )

    def _turn(self, participants: Participants, model: Model, workers: int) -> tuple[Samples, bool]:
        """Run a turn. Return its samples, and False if the contender is too slow for another."""
        with participants.at_work(model, workers) as turn:
            together = turn.first()
            turn.check()
            iteration = max(model.compute + together / workers, together)
            fitting = int(self._plan.seconds / iteration) - 1
            iterations = min(self._plan.iterations, max(1, fitting))
            found: Samples = {}
            for scenario in self._plan.scenarios:
                _, *times = turn.run(scenario, 1 + iterations)
                found[scenario] = [seconds * 1e3 for seconds in times]
            turn.check()
            return found, fitting > 0

    def _is_out(self, contender: Contender, model: Model, workers: int) -> bool:
        unavailable = self._findings.unavailable
        if self._name(contender) in unavailable:
            return True
        needed = contender.parts(workers) * model.bytes + _SPARE
        free = free_memory()
        if needed > free:
            cell = f"{self._name(contender)}, {model.name}, {workers} workers"
            unavailable[cell] = f"needs {format_bytes(needed)}, {format_bytes(free)} are free"
        return needed > free

    def _may_fail(self, contender: Contender) -> AbstractContextManager[None]:
        return left_out_if_it_fails(self._name(contender), self._findings, contender.ours)

    def _name(self, contender: Contender) -> str:
        return f"{self._section}, {contender.name}"


def free_memory() -> int:
    """Return the bytes that programs can allocate without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        field, _, value = line.partition(":")
        if field == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable: Linux 3.14 or later is needed")


def chosen(plan: Plan, known: Sequence[Contender]) -> list[Contender]:
    """Return the contenders that the plan names. Raises Unavailable if `known` has none of them."""
    found = [
        contender
        for contender in known
        if contender.transport in plan.transports
        and (plan.contenders is None or contender.name in plan.contenders)
    ]
    if not found:
        raise Unavailable("none of the requested contenders takes part in this section")
    return found
