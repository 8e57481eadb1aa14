"""What it takes to be measured."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch_hbmcomm.bench.buffers import Buffers
from torch_hbmcomm.bench.collectives import DTYPES, NATIVE, STARTUP, Cell

Loop = Callable[[int], object]
"""Does a collective so many times, one after the other."""


def repeated(call: Callable[[], object]) -> Loop:
    def loop(calls: int) -> None:
        for _ in range(calls):
            call()

    return loop


class Contender(ABC):
    """One way of doing collectives. One instance lives in each rank; its calls come in this order.

    name: as in the command line and in every report.
    about: what it is, in a line.
    placed: whether its buffers come from `torch_hbmcomm.memory`, or are plain tensors.
    reference: True for one that does not do the whole job, and shows what that would cost.
    dtypes: those that it takes.
    """

    name: str
    about: str
    placed: bool = False
    reference: bool = False
    dtypes: tuple[str, ...] = DTYPES

    def why_unavailable(self) -> str | None:
        """None if it can run here, else the cause and what to do. Called before ranks start."""
        return None

    def offers(self, cell: Cell) -> bool:
        """Whether it takes part in that row. Ordinary rows only, unless it says more."""
        return cell.collective not in (NATIVE, STARTUP) and cell.dtype in self.dtypes

    def start(self) -> None:
        """Everything from nothing to the end of a first collective, in a process that has imported
        torch and has torchrun's environment. REQUIRES: it offers the row startup."""
        raise NotImplementedError(f"{self.name} has no start of its own")

    @abstractmethod
    def open(self) -> None:
        """Gets ready beside other contenders, in a process whose default group is up. All ranks
        call it."""

    @abstractmethod
    def prepare(self, cell: Cell, buffers: Buffers) -> Loop:
        """REQUIRES: open(); it offers the cell."""
