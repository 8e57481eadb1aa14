"""The membership table of a job, in a box: the workers, their clocks, and which are alive.

The table is a segment of 64-byte entries. Entry 0 belongs to the job. Every other entry is used by
one worker, and never again. A worker is alive while its temporary segment ``<name>/life/<index>``
exists, which the box deletes when the worker leaves or its lease ends.

Bounded staleness follows Ho et al. 2013 (*More effective distributed ML via a stale synchronous
parallel parameter server*). A clock counts exchanges with the box.

A request takes a round trip, so a worker reads the whole table in one request. The read has every
write that ended before the read began. (Over shm, reads and writes are loads and stores, and
MembershipTable._fence() puts them in order.) The read may have some cells of a later write, and
lack other cells of the same write. So its user allows for clocks that are older than the state.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch_hbmcomm import smb

_log = logging.getLogger(__name__)

SPARE_ENTRIES = 8  # entries that a read of the table has for workers that have just joined

_ENTRY_BYTES = 64  # bytes: a cache line
_CELL = 8  # bytes: a signed 64-bit number
_MOST_WORKERS = 1 << 13  # in the life of a job
_BYTES = _ENTRY_BYTES * (1 + _MOST_WORKERS)
_LIFE_BYTES = 4096
_CHECK_SECONDS = 0.1  # between two liveness checks of the workers waited for
_IDLE_CHECK_SECONDS = 1.0  # between two liveness checks by a worker that does not wait
_SILENCE_SECONDS = 10.0
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 2e-3  # seconds


class JobCell(IntEnum):
    """Cells of the job's entry."""

    READY = 0  # 0, or the mark of the weights that were written
    END = 1  # all entries that have been used are below it
    LOADS = 2  # number of workers that came with a checkpoint
    LOADED = 3  # 1: the first of these workers has written the checkpoint
    RESUMED = 4  # number of workers that wait_resumed() has counted


class WorkerCell(IntEnum):
    """Cells of a worker's entry."""

    STATE = 0
    PUSHED = 1  # exchanges whose delta is in the weights
    PULLED = 2  # exchanges whose weights the worker has taken
    PROCESSES = 3  # processes that train for the worker
    JOINED = 4  # 1: the worker has received its first weights


class WorkerState(IntEnum):
    """Values of a worker's STATE cell."""

    UNUSED = 0
    JOINING = 1
    ACTIVE = 2
    GONE = 3  # finished, left or died
    CLOSED = 4  # not to be used: the worker ended before it was active, or the entry was free


@dataclass(frozen=True)
class WorkerEntry:
    """A snapshot of a worker's entry."""

    index: int
    state: int
    pushed: int
    pulled: int
    processes: int
    joined: int


@dataclass(frozen=True)
class _Table:
    """A snapshot of the table: the job's cells, and the entries that have been used."""

    job: Sequence[int]
    entries: Sequence[WorkerEntry]


class MembershipTable:
    """This worker's entry, and its view of the other entries.

    The order of a join:

    1. leads(). If it returns True, the worker writes the weights, and calls publish().
    2. The worker receives the constants, which no worker changes.
    3. activate(). From now on other workers wait for this one.
    4. wait_pushed(), with a bound on staleness: no other worker is too far behind.
    5. The worker receives the changing weights. Because of 3 and 4 they are within the bound, so it
       receives them only once.
    6. wait_for_workers(), which counts only workers that have received the weights. So if the first
       workers wait for one another here, all have received the first weights before any pushes.

    processes: the number of processes that train for this worker

    Every method may raise smb.BoxError; those that wait for other workers raise TimeoutError after
    `timeout` seconds.

    Threads: any, but only one at a time calls live().
    """

    def __init__(
        self, box: smb.Box, name: str, timeout: float, temporary: bool, processes: int = 1
    ) -> None:
        self._box = box
        self._name = name
        self._timeout = timeout
        self._segment = box.alloc(_BYTES, key=f"{name}/roster", temporary=temporary)
        self._next_check = 0.0
        self._checked = 0
        self._known = 0  # entries known to have been used
        self.index, self._life, table = self._claim(processes)
        self._mark = table.job[JobCell.READY]
        loading = (JobCell.LOADS, JobCell.LOADED, JobCell.RESUMED)
        self._loads_before = any(table.job[cell] for cell in loading)  # when this worker came

    # -- joining and leaving ---------------------------------------------------------------------

    def leads(self) -> bool:
        """Return True if this worker must write the first weights, False once they are written.

        Waits while a worker that came earlier may still write them. Raises MemoryError if the box
        has no memory for a life segment. A worker that joins needs more memory than that, for its
        deltas.
        """
        for _ in self._waiting(lambda: "the first worker to write the weights"):
            if self.ready():
                return False
            if not any(self._may_lead(index) for index in range(self.index)):
                return not self.ready()  # no other worker can write them any more
        raise AssertionError("unreachable")

    def ready(self) -> int:
        """Return the mark of the weights, or 0 while they have not been written. The mark never
        changes, so this worker reads it once."""
        if not self._mark:
            self._mark = self._read(JobCell.READY)
        return self._mark

    def publish(self, mark: int) -> None:
        """Publish that the weights are written, and their mark."""
        self._fence()
        self._write(0, JobCell.READY, mark)
        self._mark = mark

    def activate(self, staleness: float = 0) -> int:
        """Count this worker from now on, and return its clock, which is at most `staleness` behind
        the clock of the foremost worker. If the foremost worker advanced further before it saw this
        worker, sets the clock again.

        staleness: the number of exchanges that a worker may be ahead of the slowest. The foremost
            worker may be that far ahead of this worker, because it may have ended its wait before
            it saw this worker
        """
        clock = -1
        while True:
            foremost = max((entry.pushed for entry in self.active()), default=0)
            if clock >= 0 and foremost <= clock + staleness:
                return clock
            clock = foremost
            # A worker that sees the state before the clocks takes this one for a worker that is far
            # behind, and waits until it sees the clocks too.
            self._write_own(WorkerCell.STATE, WorkerState.ACTIVE, clock, clock)
            # Thanks to the fence, the next round of this loop sees the foremost worker's newest
            # clock, or that worker sees this worker before it advances further.
            self._fence()

    def wait_for_workers(self, count: int) -> list[WorkerEntry]:
        """Count this worker as joined, and wait until `count` workers have joined. Workers that
        have left again count too. Returns the active workers.

        REQUIRES: this worker is active, and has received the weights.
        """
        joined = 0

        def what() -> str:
            return f"{count} workers ({joined} have joined)"

        self._end_loads()
        self._write_own(WorkerCell.JOINED, 1)
        for _ in self._waiting(what):
            entries = self._look().entries
            states = [entry.state for entry in entries if entry.joined]
            joined = states.count(WorkerState.ACTIVE) + states.count(WorkerState.GONE)
            if joined >= count:
                return _active(entries)
        raise AssertionError("unreachable")

    def retire(self) -> None:
        """Stop counting this worker: other workers no longer wait for it."""
        self._write_own(WorkerCell.STATE, WorkerState.GONE)

    def leave(self) -> None:
        self.retire()
        self._life.delete()
        self._segment.free()

    # -- clocks ----------------------------------------------------------------------------------

    def set_pushed(self, clock: int) -> None:
        self._write_own(WorkerCell.PUSHED, clock)

    def set_pulled(self, clock: int) -> None:
        """Publish the number of pulls. In lockstep the other workers then change the weights. So
        this worker must have used them before, as over shm they are in the box's memory."""
        self._end_loads()
        self._write_own(WorkerCell.PULLED, clock)

    def set_clocks(self, pushed: int, pulled: int) -> None:
        """Set both clocks in one request. Only for a job without a bound on staleness, where no
        worker waits for a clock."""
        self._write_own(WorkerCell.PUSHED, pushed, pulled)

    def wait_pushed(self, least: int) -> None:
        """Wait until every active worker has pushed `least` times; dead workers do not count."""
        if least > 0:
            self._wait_while(lambda entry: entry.pushed < least, f"exchange {least}")

    def wait_pulled(self, least: int) -> None:
        """Wait until every active worker has pulled `least` times."""
        if least > 0:
            self._wait_while(lambda entry: entry.pulled < least, f"exchange {least}")

    def wait_retired(self) -> None:
        """Wait until no other worker is active: each has retired, left or died."""
        self._wait_while(lambda entry: entry.index != self.index, "the end")

    def active(self) -> list[WorkerEntry]:
        """Read the table, and return the active workers. A dead worker is among them until a worker
        has noticed its death."""
        return _active(self._look().entries)

    def live(self) -> list[WorkerEntry]:
        """Return the active workers, as active() does, without a worker that this call finds dead.

        At most once a second it checks whether one of the other workers is alive, and another one
        each time, in turn. A worker found dead no longer counts for any worker.
        """
        active = self.active()
        now = time.monotonic()
        if now < self._next_check:
            return active
        self._next_check = now + _IDLE_CHECK_SECONDS
        others = [entry.index for entry in active if entry.index != self.index]
        if not others:
            return active
        self._checked += 1
        dead = self._retire_dead([others[self._checked % len(others)]])
        return [entry for entry in active if entry.index not in dead]

    def begun(self) -> bool:
        """Return True if any worker has pushed."""
        return any(entry.pushed for entry in self._look().entries)

    # -- the checkpoint that is loaded -----------------------------------------------------------

    def begin_again(self) -> None:
        """Clear the checkpoint cells if all other workers have gone, because the cells may be left
        from an earlier run whose weights were kept. Makes no request if the cells were clear when
        this worker came."""
        if not self._loads_before:
            return
        others = (entry.index for entry in self.active() if entry.index != self.index)
        if not any(self._alive(index) for index in others):
            self._write(0, JobCell.LOADS, 0)
            self._write(0, JobCell.LOADED, 0)
            self._write(0, JobCell.RESUMED, 0)

    def claims_load(self) -> bool:
        """Return True if this worker is the first with a checkpoint. Later workers call
        wait_loaded()."""
        return self._segment.fetch_add(JobCell.LOADS * _CELL, 1) == 0

    def set_loaded(self) -> None:
        self._write(0, JobCell.LOADED, 1)

    def wait_loaded(self) -> None:
        """Wait until the first worker with a checkpoint has written it."""
        for _ in self._waiting(lambda: "the worker that loads the checkpoint"):
            if self._read(JobCell.LOADED):
                return

    def wait_resumed(self, workers: int) -> None:
        """Count this worker, and wait until `workers` have been counted. Call it once."""
        self._segment.fetch_add(JobCell.RESUMED * _CELL, 1)
        for _ in self._waiting(
            lambda: f"{workers} workers to load ({self._read(JobCell.RESUMED)} have called)"
        ):
            if self._read(JobCell.RESUMED) >= workers:
                self._fence()
                return

    def loads(self) -> int:
        """Return the number of workers that came with a checkpoint."""
        return self._read(JobCell.LOADS)

    # -- inside ----------------------------------------------------------------------------------

    def _claim(self, processes: int) -> tuple[int, smb.Segment, _Table]:
        """Claim an entry that was never used, by creating its life segment. Returns the entry's
        index, the segment, and the table as it was after the segment was created."""
        for index in range(self._read(JobCell.END), _MOST_WORKERS):
            try:
                life = self._create_life(index)
            except smb.KeyInUse:
                continue
            table = self._look(index + 1)
            if table.entries[index].state == WorkerState.UNUSED:
                break
            life.delete()
        else:
            raise RuntimeError(f"{_MOST_WORKERS} workers have joined {self._name!r}: no entry left")
        who = f"pid {os.getpid()} on {socket.gethostname()}".encode()[:_LIFE_BYTES]
        own = _cells(WorkerState.JOINING, 0, 0, processes)
        end = table.job[JobCell.END]
        with self._box.batch() as batch:  # in any order: readers skip entries that are not active
            batch.write(life, 0, len(who), source=who)
            batch.write(self._segment, _at(index, WorkerCell.STATE, worker=True), source=own)
            if end <= index:
                # If several workers add at the same time, END includes unused entries too.
                batch.fetch_add(self._segment, _at(0, JobCell.END), index + 1 - end)
        return index, life, table

    def _may_lead(self, index: int) -> bool:
        """Return True if the worker of that entry may still write the first weights.

        Closes the entry if it has no worker. While this worker closes it, this worker has the life
        segment, so no other worker can claim the entry.
        """
        try:
            life = self._create_life(index)
        except smb.KeyInUse:
            return True
        self._write(index, WorkerCell.STATE, WorkerState.CLOSED, worker=True)
        life.delete()
        return False

    def _look(self, least: int = 0) -> _Table:
        """Read the job's entry and all entries that have been used.

        One request reads the entries known to have been used, and SPARE_ENTRIES more. If more than
        these have been used, a second request reads the rest.

        least: the least number of entries to return, used or not
        """
        count = min(max(self._known, least) + SPARE_ENTRIES, _MOST_WORKERS)
        cells = self._read_entries(0, 1 + count)
        end = min(cells[JobCell.END], _MOST_WORKERS)
        if end > count:
            cells += self._read_entries(1 + count, end - count)
        self._known = max(self._known, end)
        width = _ENTRY_BYTES // _CELL
        rows = [cells[at : at + width] for at in range(0, len(cells), width)]
        used = rows[1 : 1 + max(end, least)]
        entries = [WorkerEntry(at, *row[: len(WorkerCell)]) for at, row in enumerate(used)]
        return _Table(rows[0], entries)

    def _read_entries(self, first: int, count: int) -> list[int]:
        memory = memoryview(bytearray(_ENTRY_BYTES * count))
        self._segment.read(_ENTRY_BYTES * first, len(memory), into=memory)
        return memory.cast("q").tolist()

    def _wait_while(self, lags: Callable[[WorkerEntry], bool], event: str) -> None:
        """Wait until no active worker lags; dead workers do not count.

        event: the name of the awaited event of a lagging worker, for the warning and the error
        """
        lagging: list[int] = []

        def what() -> str:
            names = ", ".join(f"{index} ({self._who(index)})" for index in lagging)
            return f"{event} of workers {names}; a dead one counts until its lease at the box ends"

        self._fence()
        check_at = time.monotonic() + _CHECK_SECONDS
        for _ in self._waiting(what):
            lagging = [entry.index for entry in self.active() if lags(entry)]
            if not lagging:
                self._fence()
                return
            if time.monotonic() >= check_at:
                self._retire_dead(lagging)
                check_at = time.monotonic() + _CHECK_SECONDS

    def _retire_dead(self, indices: list[int]) -> list[int]:
        """Let the dead ones of these workers no longer count. Returns their indices."""
        dead = [index for index in indices if index != self.index and not self._alive(index)]
        for index in dead:
            self._write(index, WorkerCell.STATE, WorkerState.GONE, worker=True)
        return dead

    def _alive(self, index: int) -> bool:
        """Return True if the worker of that entry is alive.

        Probes the life segment without attaching: attach and free could delete it before its worker
        reconnects.
        """
        return self._box.exists(self._life_key(index))

    def _create_life(self, index: int) -> smb.Segment:
        """Create the life segment of an entry, so that this worker alone uses the entry. Raises
        smb.KeyInUse if another worker has the segment, and MemoryError if the box is full."""
        return self._box.alloc(
            _LIFE_BYTES, key=self._life_key(index), mode="create", temporary=True
        )

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
        """Yield for each poll of a wait, with growing pauses in between.

        Logs one warning after _SILENCE_SECONDS. Raises TimeoutError after `timeout` seconds.

        what: returns the name of the awaited thing, for the warning and the error
        """
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
        """Order earlier accesses to the table before later ones.

        Over shm the accesses are plain loads and stores. A request to the box, and its reply, put
        them in order.
        """
        self._segment.fetch_add(_at(0, JobCell.END), 0)

    def _end_loads(self) -> None:
        """Order the loads of received weights before a later write to the table.

        Over shm the weights are received by plain loads, and the write is a plain store. Without a
        fence, a processor could make the store visible before it executes the loads. Over other
        transports, a read ends when all its bytes are there.
        """
        if self._box.transport == "shm":
            self._fence()

    def _read(self, cell: JobCell) -> int:
        found = _cells(0)
        self._segment.read(_at(0, cell), into=found)
        return int(found.cast("q")[0])

    def _write(self, entry: int, cell: int, *values: int, worker: bool = False) -> None:
        """Write values to a cell and the cells after it, in one request."""
        self._segment.write(_at(entry, cell, worker), source=_cells(*values))

    def _write_own(self, cell: int, *values: int) -> None:
        self._write(self.index, cell, *values, worker=True)


def _active(entries: Sequence[WorkerEntry]) -> list[WorkerEntry]:
    return [entry for entry in entries if entry.state == WorkerState.ACTIVE]


def _at(entry: int, cell: int, worker: bool = False) -> int:
    """Return the first byte of a cell of the job's entry (0), or of a worker's entry."""
    return _ENTRY_BYTES * (entry + worker) + cell * _CELL


def _cells(*values: int) -> memoryview:
    """Return the bytes of successive cells."""
    return memoryview(array("q", values)).cast("B")
