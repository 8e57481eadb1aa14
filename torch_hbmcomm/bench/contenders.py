"""Who is measured. To add a contender, implement `Contender` and enter it in `CONTENDERS`."""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from torch_hbmcomm.bench.collectives import COLLECTIVES, Operation


class Contender(ABC):
    """One way of doing collectives. One instance lives in each rank; its calls come in this order.

    name: as in the command line and in every report.
    """

    name: str

    def why_unavailable(self) -> str | None:
        """None if it can run here, else the cause and what to do. Called before ranks start."""
        return None

    @abstractmethod
    def start(self) -> None:
        """Everything from nothing to the end of a first collective, in a process that has imported
        torch and has torchrun's environment."""

    @abstractmethod
    def open(self) -> None:
        """Gets ready beside other contenders, in a process whose default group is up."""

    @abstractmethod
    def prepare(self, collective: str, size: int) -> Operation:
        """The collective on buffers of its own. REQUIRES: open()."""


class TorchBackend(Contender):
    """A backend of torch.distributed, through its public functions."""

    def __init__(self, name: str):
        self.name = name

    def why_unavailable(self) -> str | None:
        if dist.is_backend_available(self.name):
            return None
        return (
            f"torch.distributed has no backend {self.name!r} "
            f"(it has {', '.join(dist.Backend.backend_list)}); `hbmcomm info` shows the cause"
        )

    def start(self) -> None:
        dist.init_process_group(self.name)
        dist.all_reduce(torch.zeros(1))

    def open(self) -> None:
        self._group = dist.new_group(backend=self.name)

    def prepare(self, collective: str, size: int) -> Operation:
        return COLLECTIVES[collective].prepare(self._group, size)


CONTENDERS: dict[str, Contender] = {
    contender.name: contender for contender in (TorchBackend("hbm"), TorchBackend("gloo"))
}
