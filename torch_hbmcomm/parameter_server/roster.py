"""Who trains together, how far each worker is, and which of them are alive: cells of a box.

A segment of lines of 64 bytes: line 0 is the job's, the others are a worker's each, and are never
used twice. A worker is alive while its temporary segment ``<name>/life/<index>`` exists, which the
box deletes when the worker leaves or its lease ends.

Bounded staleness follows Ho et al. 2013 (*More effective distributed ML via a stale synchronous
parallel parameter server*). A clock is an exchange with the box.

Threads: any, but one alone calls notice_deaths().
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


class Job(IntEnum):
    """Cells of the job's line."""

    READY = 0  # 0, or the mark of the weights that were written
    END = 1  # lines below it have been used
    LOADS = 2  # workers that came with a checkpoint
    LOADED = 3  # 1: the first of them has written it


class Cell(IntEnum):
    """Cells of a worker's line."""

    STATE = 0
    PUSHED = 1  # exchanges whose difference is in the weights
    PULLED = 2  # exchanges whose weights it has taken


class State(IntEnum):
    UNUSED = 0
    JOINING = 1
    ACTIVE = 2
    GONE = 3  # it has finished, left or died
    CLOSED = 4  # it died before it was active


@dataclass(frozen=True)
class Line:
    index: int
    state: int
    pushed: int
    pulled: int


class Roster:
    """This worker's line, and what it sees of the others.

    Raises smb.BoxError as every operation of the box, TimeoutError when others are waited for in
    vain for `timeout` seconds.
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
        """Whether this worker has to write the first weights, once; False when somebody has.

        Waits while a worker that came before this one may still do it.
        """
        for _ in self._waiting(lambda: "the first worker to write the weights"):
            if self.ready():
                return False
            if not any(self._may_lead(index) for index in range(self.index)):
                return not self.ready()  # now that nobody else can
        raise AssertionError("unreachable")

    def ready(self) -> int:
        """0, or the mark that the weights bear, once they have been written."""
        return self._read(0, Job.READY)

    def publish(self, mark: int) -> None:
        """The weights are written, and bear the mark."""
        self._fence()
        self._write(0, Job.READY, mark)

    def activate(self, lag: float = 0) -> int:
        """From now on this worker counts. Returns its clock: that of the foremost; or up to `lag`
        less, by which those that see it at once may have gone on."""
        clock = -1
        while True:
            foremost = max((line.pushed for line in self.active()), default=0)
            if clock >= 0 and foremost <= clock + lag:
                return clock
            clock = foremost
            self.set_pushed(clock)
            self.set_pulled(clock)
            self._write(self.index, Cell.STATE, State.ACTIVE, worker=True)
            self._fence()  # pairs with _wait(): either this one sees a clock, or that one this line

    def wait_for_workers(self, count: int) -> None:
        """Until so many have joined, those included that have left again."""
        for _ in self._waiting(lambda: f"{count} workers ({self._joined()} have joined)"):
            if self._joined() >= count:
                return

    def retire(self) -> None:
        """From now on this worker does not count."""
        self._write(self.index, Cell.STATE, State.GONE, worker=True)

    def leave(self) -> None:
        self.retire()
        self._life.delete()
        self._segment.free()

    # -- clocks ----------------------------------------------------------------------------------

    def set_pushed(self, clock: int) -> None:
        self._write(self.index, Cell.PUSHED, clock, worker=True)

    def set_pulled(self, clock: int) -> None:
        self._write(self.index, Cell.PULLED, clock, worker=True)

    def wait_pushed(self, least: int) -> None:
        """Until every active worker has pushed `least` times; those that die stop counting."""
        self._wait(Cell.PUSHED, least)

    def wait_pulled(self, least: int) -> None:
        """As wait_pushed(), for pulls."""
        self._wait(Cell.PULLED, least)

    def active(self) -> list[Line]:
        """Workers that count; one that died counts until someone has noticed."""
        return [line for line in self._used() if line.state == State.ACTIVE]

    def notice_deaths(self) -> None:
        """Asks now and then after one of the others; costs nothing in between."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _NEIGHBOUR_SECONDS
        others = [line.index for line in self.active() if line.index != self.index]
        if others:
            self._checked += 1
            self._bury_the_dead([others[self._checked % len(others)]])

    def begun(self) -> bool:
        """Whether anybody has pushed."""
        return any(line.pushed for line in self._used())

    # -- the checkpoint that is loaded -----------------------------------------------------------

    def begin_anew(self) -> None:
        """Forgets what workers loaded that have all gone, where the weights are kept."""
        others = (line.index for line in self.active() if line.index != self.index)
        if not any(self._alive(index) for index in others):
            self._write(0, Job.LOADS, 0)
            self._write(0, Job.LOADED, 0)

    def claims_load(self) -> bool:
        """Whether this worker is the first that comes with a checkpoint; the others wait in
        wait_loaded()."""
        return self._segment.fetch_add(Job.LOADS * _CELL, 1) == 0

    def set_loaded(self) -> None:
        self._write(0, Job.LOADED, 1)

    def wait_loaded(self) -> None:
        for _ in self._waiting(lambda: "the worker that loads the checkpoint"):
            if self._read(0, Job.LOADED):
                return

    # -- inside ----------------------------------------------------------------------------------

    def _claim(self) -> tuple[int, smb.Segment]:
        """A line that was never used: creating its life segment is the claim."""
        for index in range(self._read(0, Job.END), _MOST_WORKERS):
            try:
                life = self._box.alloc(
                    _LIFE_BYTES, key=self._life_key(index), mode="create", temporary=True
                )
            except smb.KeyInUse:
                continue
            if self._state(index) == State.UNUSED:
                break
            life.delete()
        else:
            raise RuntimeError(f"{_MOST_WORKERS} workers have joined {self._name!r}: no line left")
        who = f"pid {os.getpid()} on {socket.gethostname()}".encode()[:_LIFE_BYTES]
        life.write(0, len(who), source=who)
        self._write(index, Cell.STATE, State.JOINING, worker=True)
        end = self._read(0, Job.END)
        if end <= index:
            self._segment.fetch_add(Job.END * _CELL, index + 1 - end)  # or more: unused lines
        return index, life

    def _may_lead(self, index: int) -> bool:
        """Whether the worker of that line may still write the first weights.

        A line that nobody holds is closed first and looked at again: who claims it sees the one or
        is seen by the other.
        """
        if self._alive(index):
            return True
        self._write(index, Cell.STATE, State.CLOSED, worker=True)
        return self._alive(index)

    def _joined(self) -> int:
        return sum(line.state in (State.ACTIVE, State.GONE) for line in self._used())

    def _used(self) -> list[Line]:
        end = self._read(0, Job.END)
        if end == 0:
            return []
        lines = memoryview(bytearray(_LINE * end))
        self._segment.read(_LINE, len(lines), into=lines)
        cells = lines.cast("q").tolist()
        width = _LINE // _CELL
        return [Line(at // width, *cells[at : at + 3]) for at in range(0, len(cells), width)]

    def _wait(self, cell: Cell, least: int) -> None:
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
                if (line.pushed if cell == Cell.PUSHED else line.pulled) < least
            ]
            if not lagging:
                self._fence()
                return
            if time.monotonic() >= check_at:
                self._bury_the_dead(lagging)
                check_at = time.monotonic() + _CHECK_SECONDS

    def _bury_the_dead(self, indices: list[int]) -> None:
        for index in indices:
            if index != self.index and not self._alive(index):
                self._write(index, Cell.STATE, State.GONE, worker=True)

    def _alive(self, index: int) -> bool:
        """Asks for a size that the segment does not have: to attach to it, and to let go of it,
        would end a life whose owner has yet to come back to a box that was restarted."""
        try:
            self._box.alloc(2 * _LIFE_BYTES, key=self._life_key(index), mode="attach")
        except smb.NoSuchKey:
            return False
        except ValueError:
            return True
        raise AssertionError(f"{self._life_key(index)} has another size than it was made with")

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
        """Turns of a loop that waits; says so after a while, and raises TimeoutError in the end,
        naming what() both times."""
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
        """By shared memory, reads, writes and views are plain loads and stores. A question to the
        box and its answer order those before it and those after it."""
        self._segment.fetch_add(Job.END * _CELL, 0)

    def _state(self, index: int) -> int:
        return self._read(index, Cell.STATE, worker=True)

    def _read(self, line: int, cell: int, worker: bool = False) -> int:
        found = memoryview(bytearray(_CELL)).cast("q")
        self._segment.read(_LINE * (line + worker) + cell * _CELL, _CELL, into=found.cast("B"))
        return int(found[0])

    def _write(self, line: int, cell: int, value: int, worker: bool = False) -> None:
        source = memoryview(bytearray(_CELL)).cast("q")
        source[0] = value
        self._segment.write(_LINE * (line + worker) + cell * _CELL, _CELL, source=source.cast("B"))
