"""The workers of a job, how far each of them is, and which are alive, as cells of a box.

A segment of lines of 64 bytes: line 0 is the job's, the others are a worker's each, and are never
used twice. A worker is alive while its temporary segment ``<name>/life/<index>`` exists, which the
box deletes when the worker leaves or its lease ends.

Bounded staleness follows Ho et al. 2013 (*More effective distributed ML via a stale synchronous
parallel parameter server*). A clock is an exchange with the box.

"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from torch_hbmcomm import smb

_log = logging.getLogger(__name__)

_LINE = 64  # bytes: a cache line
_CELL = 8  # bytes: a signed 64-bit number
_MOST_WORKERS = 1 << 13  # that ever join a job
_BYTES = _LINE * (1 + _MOST_WORKERS)
_LIFE_BYTES = 4096
_CHECK_SECONDS = 0.1  # between two questions whether those that are waited for are alive
_NEIGHBOUR_SECONDS = 1.0  # between two such questions of a worker that waits for nobody
_SILENCE_SECONDS = 10.0
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 2e-3  # seconds


class JobCell(IntEnum):
    """Cells of the job's line."""

    READY = 0  # 0, or the mark of the weights that were written
    END = 1  # lines below it have been used
    LOADS = 2  # workers that came with a checkpoint
    LOADED = 3  # 1: the first of them has written it


class WorkerCell(IntEnum):
    """Cells of a worker's line."""

    STATE = 0
    PUSHED = 1  # exchanges whose difference is in the weights
    PULLED = 2  # exchanges whose weights it has taken


class WorkerState(IntEnum):
    """Values of a worker's STATE cell."""

    UNUSED = 0
    JOINING = 1
    ACTIVE = 2
    GONE = 3  # it has finished, left or died
    CLOSED = 4  # it died before it was active


@dataclass(frozen=True)
class WorkerLine:
    """A worker's line as it was read."""

    index: int
    state: int
    pushed: int
    pulled: int


class Roster:
    """This worker's line, and what it sees of the others.

    Raises smb.BoxError as every operation of the box, TimeoutError when what is waited for has not
    come within `timeout` seconds.

    Threads: any, but one alone calls notice_deaths().
    """

    def __init__(self, box: smb.Box, name: str, timeout: float, temporary: bool) -> None:
        self._box = box
        self._name = name
        self._timeout = timeout
        self._segment = box.alloc(_BYTES, key=f"{name}/roster", temporary=temporary)
        self._next_check = 0.0
        self._checked = 0
        self.index, self._life = self._claim()

    # -- joining and leaving ---------------------------------------------------------------------

    def leads(self) -> bool:
        """Return whether this worker has to write the first weights; False when somebody has.

        Waits while a worker that came before this one may still do it.
        """
        for _ in self._waiting(lambda: "the first worker to write the weights"):
            if self.ready():
                return False
            if not any(self._may_lead(index) for index in range(self.index)):
                return not self.ready()  # now that nobody else can
        raise AssertionError("unreachable")

    def ready(self) -> int:
        """Return the mark that the weights bear, or 0 while they have not been written."""
        return self._read(0, JobCell.READY)

    def publish(self, mark: int) -> None:
        """Tell that the weights are written, and bear the mark."""
        self._fence()
        self._write(0, JobCell.READY, mark)

    def activate(self, lag: float = 0) -> int:
        """Count this worker from now on. Returns its clock: the foremost worker's, or up to `lag`
        less, by which workers that see it at once may have gone on."""
        clock = -1
        while True:
            foremost = max((line.pushed for line in self.active()), default=0)
            if clock >= 0 and foremost <= clock + lag:
                return clock
            clock = foremost
            self.set_pushed(clock)
            self.set_pulled(clock)
            self._write(self.index, WorkerCell.STATE, WorkerState.ACTIVE, worker=True)
            self._fence()  # pairs with _wait(): either this one sees a clock, or that one this line

    def wait_for_workers(self, count: int) -> None:
        """Wait until so many have joined, including those that have left again."""
        for _ in self._waiting(lambda: f"{count} workers ({self._joined()} have joined)"):
            if self._joined() >= count:
                return

    def retire(self) -> None:
        """Count this worker no more."""
        self._write(self.index, WorkerCell.STATE, WorkerState.GONE, worker=True)

    def leave(self) -> None:
        self.retire()
        self._life.delete()
        self._segment.free()

    # -- clocks ----------------------------------------------------------------------------------

    def set_pushed(self, clock: int) -> None:
        self._write(self.index, WorkerCell.PUSHED, clock, worker=True)

    def set_pulled(self, clock: int) -> None:
        self._write(self.index, WorkerCell.PULLED, clock, worker=True)

    def wait_pushed(self, least: int) -> None:
        """Wait until every active worker has pushed `least` times; those that die do not count."""
        self._wait(WorkerCell.PUSHED, least)

    def wait_pulled(self, least: int) -> None:
        """Wait until every active worker has pulled `least` times."""
        self._wait(WorkerCell.PULLED, least)

    def active(self) -> list[WorkerLine]:
        """Return the workers that count; one that died counts until somebody has noticed."""
        return [line for line in self._used() if line.state == WorkerState.ACTIVE]

    def notice_deaths(self) -> None:
        """Ask now and then whether one of the others is alive; costs nothing in between."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _NEIGHBOUR_SECONDS
        others = [line.index for line in self.active() if line.index != self.index]
        if others:
            self._checked += 1
            self._retire_dead([others[self._checked % len(others)]])

    def begun(self) -> bool:
        """Return whether anybody has pushed."""
        return any(line.pushed for line in self._used())

    # -- the checkpoint that is loaded -----------------------------------------------------------

    def begin_anew(self) -> None:
        """Forget that workers which have all gone loaded a checkpoint (weights may be kept)."""
        others = (line.index for line in self.active() if line.index != self.index)
        if not any(self._alive(index) for index in others):
            self._write(0, JobCell.LOADS, 0)
            self._write(0, JobCell.LOADED, 0)

    def claims_load(self) -> bool:
        """Return whether this worker is the first that comes with a checkpoint; the others call
        wait_loaded()."""
        return self._segment.fetch_add(JobCell.LOADS * _CELL, 1) == 0

    def set_loaded(self) -> None:
        self._write(0, JobCell.LOADED, 1)

    def wait_loaded(self) -> None:
        """Wait until the first worker with a checkpoint has written it."""
        for _ in self._waiting(lambda: "the worker that loads the checkpoint"):
            if self._read(0, JobCell.LOADED):
                return

    # -- inside ----------------------------------------------------------------------------------

    def _claim(self) -> tuple[int, smb.Segment]:
        """Claim a line that was never used, by creating its life segment."""
        for index in range(self._read(0, JobCell.END), _MOST_WORKERS):
            try:
                life = self._box.alloc(
                    _LIFE_BYTES, key=self._life_key(index), mode="create", temporary=True
                )
            except smb.KeyInUse:
                continue
            if self._state(index) == WorkerState.UNUSED:
                break
            life.delete()
        else:
            raise RuntimeError(f"{_MOST_WORKERS} workers have joined {self._name!r}: no line left")
        who = f"pid {os.getpid()} on {socket.gethostname()}".encode()[:_LIFE_BYTES]
        life.write(0, len(who), source=who)
        self._write(index, WorkerCell.STATE, WorkerState.JOINING, worker=True)
        end = self._read(0, JobCell.END)
        if end <= index:
            self._segment.fetch_add(JobCell.END * _CELL, index + 1 - end)  # or more: unused lines
        return index, life

    def _may_lead(self, index: int) -> bool:
        """Return whether the worker of that line may still write the first weights.

        A line that nobody holds is closed first and looked at again, so that either the worker that
        claims it meanwhile sees it closed, or this one sees that worker.
        """
        if self._alive(index):
            return True
        self._write(index, WorkerCell.STATE, WorkerState.CLOSED, worker=True)
        return self._alive(index)

    def _joined(self) -> int:
        return sum(line.state in (WorkerState.ACTIVE, WorkerState.GONE) for line in self._used())

    def _used(self) -> list[WorkerLine]:
        end = self._read(0, JobCell.END)
        if end == 0:
            return []
        lines = memoryview(bytearray(_LINE * end))
        self._segment.read(_LINE, len(lines), into=lines)
        cells = lines.cast("q").tolist()
        width = _LINE // _CELL
        return [WorkerLine(at // width, *cells[at : at + 3]) for at in range(0, len(cells), width)]

    def _wait(self, cell: WorkerCell, least: int) -> None:
        if least <= 0:
            return
        lagging: list[int] = []

        def what() -> str:
            names = ", ".join(f"{index} ({self._who(index)})" for index in lagging)
            return f"exchange {least} of workers {names}"

        self._fence()
        check_at = time.monotonic() + _CHECK_SECONDS
        for _ in self._waiting(what):
            lagging = [
                line.index
                for line in self.active()
                if (line.pushed if cell == WorkerCell.PUSHED else line.pulled) < least
            ]
            if not lagging:
                self._fence()
                return
            if time.monotonic() >= check_at:
                self._retire_dead(lagging)
                check_at = time.monotonic() + _CHECK_SECONDS

    def _retire_dead(self, indices: list[int]) -> None:
        for index in indices:
            if index != self.index and not self._alive(index):
                self._write(index, WorkerCell.STATE, WorkerState.GONE, worker=True)

    def _alive(self, index: int) -> bool:
        """Return whether the worker of that line is alive."""
        return self._box.exists(self._life_key(index))

    def _who(self, index: int) -> str:
        try:
            life = self._box.alloc(None, key=self._life_key(index), mode="attach", read_only=True)
        except smb.NoSuchKey:
            return "dead"
        life.read()
        text = bytes(life.buffer).rstrip(b"\0").decode()
        life.free()
        return text

    def _life_key(self, index: int) -> str:
        return f"{self._name}/life/{index}"

    def _waiting(self, what: Callable[[], str]) -> Iterator[None]:
        """Yield turns of a loop that waits for what(): log a warning after a while, and raise
        TimeoutError in the end."""
        start = time.monotonic()
        silent = True
        nap = _SHORTEST_NAP
        while True:
            yield
            waited = time.monotonic() - start
            if waited > self._timeout:
                raise TimeoutError(
                    f"worker {self.index} of {self._name!r} waited {self._timeout:g} s for {what()}"
                )
            if silent and waited > _SILENCE_SECONDS:
                silent = False
                _log.warning("worker %d of %r waits for %s", self.index, self._name, what())
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _fence(self) -> None:
        """Order reads and writes before it and after it: over shm they are plain loads and stores,
        which a question to the box and its answer order."""
        self._segment.fetch_add(JobCell.END * _CELL, 0)

    def _state(self, index: int) -> int:
        return self._read(index, WorkerCell.STATE, worker=True)

    def _read(self, line: int, cell: int, worker: bool = False) -> int:
        found = memoryview(bytearray(_CELL)).cast("q")
        self._segment.read(_LINE * (line + worker) + cell * _CELL, _CELL, into=found.cast("B"))
        return int(found[0])

    def _write(self, line: int, cell: int, value: int, worker: bool = False) -> None:
        source = memoryview(bytearray(_CELL)).cast("q")
        source[0] = value
        self._segment.write(_LINE * (line + worker) + cell * _CELL, _CELL, source=source.cast("B"))
