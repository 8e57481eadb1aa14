"""A worker that trains one of the tasks. Several workers may share a host."""

from __future__ import annotations

import copy
import os
import signal
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.optim import Optimizer

import torch_hbmcomm as hbmcomm
from papers.layer_drop.learning import OPTIMIZERS, Learned, schedule
from papers.layer_drop.tasks import TASKS
from papers.outer_steps.ways import bytes_of, way_of
from torch_hbmcomm.bench.peer import obey

LOOKS = 20  # evaluations of the model during the training
_TIMED = 11  # steps whose median is a step's time


@dataclass
class Trained(Learned):
    """A training so far.

    sent_mb: that this worker gave to all_reduce
    crossed_mb: over the link in each direction, by its counters; None without a link
    lost_seconds: from the beginning of the step that failed to the end of healing
    """

    sent_mb: float = 0.0
    crossed_mb: float | None = None
    lost_seconds: float = 0.0


class Worker:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._trainings = 0
        warnings.simplefilter("ignore", FutureWarning)  # DDP warns of its own arguments

    def join(self, store_file: str, world: int, task: str) -> None:
        """Join the process group. store_file: path of a new file, equal on all ranks."""
        torch.set_num_threads(1)
        self._file, self._world = store_file, world
        dist.init_process_group(
            "hbm", init_method=f"file://{store_file}", rank=self._rank, world_size=world
        )
        self._task = TASKS[task]()

    def begin(self, **terms: Any) -> None:
        """Begin a training. terms: arguments of _train()."""
        self._trainings += 1
        # Here survivors of a death meet, and torchft's workers.
        self._meeting = FileStore(f"{self._file}-{self._trainings}", -1)
        self._training = self._train(**terms)

    def look(self) -> dict[str, Any]:
        """Train until the next evaluation, which rank 0 makes. Return the training so far."""
        return asdict(next(self._training))

    def _train(
        self,
        way: str,
        terms: Mapping[str, Any],
        optimizer: str,
        rate: float,
        seed: int,
        steps: int,
        slow: float,
        kill_at: int | None,
    ) -> Iterator[Trained]:
        """Train, and yield after each evaluation. The arguments are equal on all ranks.

        slow: a step of the last rank takes as many times as long, because it sleeps
        kill_at: the step in which the last rank kills itself
        """
        torch.manual_seed(seed)
        model = self._task.model()
        inner = OPTIMIZERS[optimizer](model.parameters(), rate)
        pause = 0.0
        if slow != 1:
            # All ranks measure, because they share processors in the training too.
            pause = (slow - 1) * self._seconds_of_a_step(model, optimizer)
        last = self._rank == self._world - 1
        stride = round(slow) if last and terms.get("pace") else 1
        trainer = way_of(way, model, inner, terms, stride, self._meeting)
        draw = torch.Generator().manual_seed(seed)
        found = Trained()
        now, begin = 0.0, time.perf_counter()
        for step in range(steps // stride):
            if last:
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(pause)
            for group in inner.param_groups:
                group["lr"] = rate * schedule(step * stride, steps)
            began = time.perf_counter()
            try:
                self._backward(trainer.forward, inner, draw)
                trainer.step()
            except RuntimeError as error:
                # PyTorch makes a RuntimeError of a DistBackendError that a hook's callback raises.
                if not isinstance(error, dist.DistError) and "DistBackendError" not in str(error):
                    raise
                trainer.heal(self._form_next_group)
                found.lost_seconds += time.perf_counter() - began
            if (step + 1) * LOOKS % (steps // stride) < LOOKS:
                if step + 1 == steps // stride:
                    trainer.close()
                now += time.perf_counter() - begin
                found.steps.append(step + 1)
                found.seconds.append(now)
                found.share = trainer.sent_bytes / (bytes_of(model) * (step + 1))
                found.sent_mb = trainer.sent_bytes / 1e6
                if self._rank == 0:
                    with trainer.weights():
                        found.quality.append(self._task.quality(model))
                yield found
                begin = time.perf_counter()

    def _backward(self, forward: nn.Module, optimizer: Optimizer, draw: torch.Generator) -> None:
        inputs, targets = self._task.examples(self._world * self._task.batch, draw)
        own: list[Tensor] = [one.chunk(self._world)[self._rank] for one in (inputs, targets)]
        optimizer.zero_grad()
        self._task.loss(forward(own[0]), own[1]).backward()

    def _seconds_of_a_step(self, model: nn.Module, optimizer: str) -> float:
        alone, draw = copy.deepcopy(model), torch.Generator().manual_seed(0)
        steps_it = OPTIMIZERS[optimizer](alone.parameters(), 1e-3)
        seconds = []
        for _ in range(_TIMED):
            began = time.perf_counter()
            self._backward(alone, steps_it, draw)
            steps_it.step()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def _form_next_group(self) -> None:
        """Form a group of all ranks but the last."""
        self._meeting.set(f"handle {self._rank}", hbmcomm.reconfigure_handle())
        handles = [self._meeting.get(f"handle {rank}") for rank in range(self._world - 1)]
        hbmcomm.reconfigure(self._trainings, [handle.decode() for handle in handles])


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    obey(Worker(rank), rank)
