"""Runs a cell of the fault matrix with real processes, and reports each rank's outcome.

Three ranks are forked from the pools' warm process. All are on one node, or the last is on another.
Each rank reports that it has reached the cell's moment, and waits. The moment decides if the fault
comes before or after the ranks continue. For faults of the link, the nodes are network namespaces.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from benchmarks.namespaces import NoNamespaces, two_nodes
from harness.box_process import BoxProcess
from harness.faults import ranks
from harness.faults.matrix import (
    BOX,
    LINK,
    RANK_ENDS,
    RANK_GONE,
    Cell,
    Fault,
    Mode,
    Moment,
    Place,
    Verdict,
    verdict,
)
from harness.pool import processes

SIZE = 3
LAYOUTS = {Place.ONE_NODE: "aaa", Place.TWO_NODES: "aab"}
SHORT = 4.0  # seconds: the timeout of operations in cells in which a rank waits until it times out
BOX_SHORT = 2.0  # seconds: the same for operations on the box
BEGIN = 6.0  # seconds: the timeout of a start that must time out
HURRY = 25.0  # seconds: the timeout of a start that must fail much sooner
LIMIT = 90.0  # seconds, for a whole cell
SLOW_RATE = "40mbit"
_DISK = 64 << 20  # bytes of the file system with the box's store
_ORDERS = {Fault.RAISES: "raise", Fault.EXITS: "exit", Fault.MEMORY_FULL: "fill"}


def victim(cell: Cell) -> int | None:
    """Return the rank that the fault ends, stops or deprives of memory; None if there is none."""
    if cell.fault is Fault.HOST_KILLED:
        return 0
    return SIZE - 1 if cell.fault in RANK_GONE or cell.fault is Fault.MEMORY_FULL else None


@dataclass
class Outcome:
    """The end of a rank. `error` is kind, text, and seconds since the fault."""

    rank: int
    error: tuple[str, str, float] | None = None
    memory: tuple[str, str] | None = None  # the error of an allocation: kind and text
    turns: int = 0
    found: float = 0  # the weight in the box
    finished: bool = False
    code: int | None = None
    output: str = ""


@dataclass
class _RankProcess:
    rank: int
    process: BaseProcess
    pipe: Connection
    outcome: Outcome
    said: set[str] = field(default_factory=set)
    ended: bool = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


class FaultJob:
    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell = cell
        self._folder = folder
        self._victim = victim(cell)
        self._verdict = verdict(cell)
        self._stack = ExitStack()
        self._ranks: list[_RankProcess] = []
        self._nodes: Sequence[Any] = ()
        self._box: BoxProcess | None = None
        self._disk: Path | None = None
        self._client: BaseProcess | None = None
        self._port = 0
        self._deadline = time.monotonic() + LIMIT
        self._faulted = 0.0

    def run(self) -> list[Outcome]:
        """Run the cell. Returns the outcomes by rank. Raises AssertionError if a rank hangs."""
        with self._stack:
            if self.cell.fault in LINK:
                self._nodes = self._stack.enter_context(_namespaces())
            if self.cell.mode is Mode.ASYNCHRONOUS or self.cell.fault in BOX:
                self._start_box()
            for rank in range(SIZE):
                self._start_rank(rank)
            self._hand_out_port()
            self._hear_all("ready")
            self._inject_at_moment()
            return self._watch()

    # Before the fault.

    def _start_box(self) -> None:
        store = self._folder / "store"
        store.mkdir()
        if self.cell.fault is Fault.DISK_FULL:
            self._disk = self._stack.enter_context(_file_system(store, _DISK))
        host, launcher = "127.0.0.1", ()
        # If all ranks share a node, the box is on the other node. Otherwise the box is on the node
        # of ranks 0 and 1, so that the link separates it from rank 2.
        if self._nodes:
            node = self._nodes[1 if self.cell.place is Place.ONE_NODE else 0]
            host, launcher = node.address, node.launcher
        options = ("--store", str(store / "files"), "--memory", "32MiB")
        self._box = self._stack.enter_context(BoxProcess(*options, host=host, launcher=launcher))
        if self.cell.fault is Fault.CLIENT_KILLED:
            ours, theirs = processes.Pipe()
            self._client = processes.Process(target=ranks.run_client, args=(theirs, self._box.url))
            self._client.start()
            self._stack.callback(_end, self._client)
            assert ours.poll(LIMIT), "the client did not start"
            assert ours.recv() == "connected"

    def _start_rank(self, rank: int) -> None:
        ours, theirs = processes.Pipe()
        process = processes.Process(target=ranks.run_rank, args=(theirs, self._setup(rank)))
        process.start()
        theirs.close()
        self._stack.callback(_end, process)
        self._ranks.append(_RankProcess(rank, process, ours, Outcome(rank)))

    def _setup(self, rank: int) -> ranks.RankSetup:
        letter = LAYOUTS[self.cell.place][rank]
        environment = {"HBMCOMM_NODE_ID": letter}
        network, host = "", "127.0.0.1"
        if self._nodes:
            node = self._nodes[0 if letter == "a" else 1]
            network, host = node.name, self._nodes[0].address
            environment |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": node.link}
        starts = self.cell.moment in (Moment.INIT, Moment.NEW_GROUP)
        begin = (
            {Verdict.TIMEOUT: BEGIN, Verdict.NOTIFIED: HURRY}.get(self._verdict) if starts else None
        )
        waits = self._verdict in (Verdict.TIMEOUT, Verdict.ALONE, Verdict.REFUSED)
        far = self._nodes or self.cell.place is Place.TWO_NODES
        return ranks.RankSetup(
            cell=self.cell,
            rank=rank,
            size=SIZE,
            folder=self._folder,
            host=host,
            timeout=SHORT if waits else ranks.LONG_TIMEOUT,
            begin=begin or ranks.LONG_TIMEOUT,
            box_timeout=BOX_SHORT if waits or self.cell.fault is Fault.BOX_STOPPED else None,
            environment=environment,
            network=network,
            box=self._box.url if self._box else "",
            transport="tcp" if far else "shm",
        )

    def _hand_out_port(self) -> None:
        first = self._ranks[0].pipe
        assert first.poll(LIMIT), "rank 0 serves no store"
        _, self._port = first.recv()
        for member in self._ranks[1:]:
            member.pipe.send(self._port)

    # The fault.

    def _inject_at_moment(self) -> None:
        """Release the ranks and inject the fault, in the order that the moment requires."""
        moment = self.cell.moment
        others = [member for member in self._ranks if member.rank != self._victim]
        if moment is Moment.DURING:
            self._release(self._ranks)
            self._hear_all("turning")
            self._inject()
            if self._verdict in (Verdict.CONTINUES, Verdict.ALONE):
                for member in self._ranks:
                    self._tell(member, "stop")
        elif self._victim is None:
            self._inject()
            self._release(self._ranks)
        elif moment is Moment.INIT and self.cell.fault not in _ORDERS:
            # The victim stays in init_process_group until the last rank calls it too.
            late = others.pop()
            self._release([*others, self._ranks[self._victim]])
            self._await_record(self._victim)
            self._inject()
            self._release([late])
        elif moment is Moment.AFTER:
            self._inject()
            self._release(others)
        else:
            self._release(others)
            time.sleep(0.1)  # most ranks have begun by now; the verdict is the same if one has not
            self._inject()

    def _inject(self) -> None:
        fault = self.cell.fault
        self._faulted = time.monotonic()
        if self._victim is not None:
            self._inject_into(self._ranks[self._victim])
        elif fault is Fault.CUT:
            for node in self._nodes:
                node.cut()
        elif fault is Fault.SLOW:
            for node in self._nodes:
                node.slow(SLOW_RATE)
        elif fault is Fault.CLIENT_KILLED:
            assert self._client is not None
            _end(self._client)
        elif fault is Fault.DISK_FULL:
            assert self._disk is not None
            _fill(self._disk)
        elif fault is Fault.BOX_KILLED:
            assert self._box is not None
            self._box.kill()
            if self.cell.mode is Mode.ASYNCHRONOUS and self.cell.moment is not Moment.INIT:
                self._box.start()
        else:
            assert fault is Fault.BOX_STOPPED
            assert self._box is not None
            self._box.stop()
            self._stack.callback(self._box.process.send_signal, signal.SIGCONT)

    def _inject_into(self, member: _RankProcess) -> None:
        if self.cell.fault in _ORDERS:
            self._tell(member, _ORDERS[self.cell.fault])
        elif self.cell.fault is Fault.STOPPED:
            os.kill(member.pid, signal.SIGSTOP)
        else:
            os.kill(member.pid, signal.SIGKILL)
        if self.cell.fault in RANK_ENDS:
            member.process.join(LIMIT)
            assert member.process.exitcode is not None, "the victim lives"
            self._faulted = time.monotonic()

    def _await_record(self, rank: int) -> None:
        """Wait until the rank has published its record in the store."""
        store = TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False)
        while not any(key.endswith(f"/rendezvous/{rank}") for key in store.list_keys()):
            assert time.monotonic() < self._deadline, f"rank {rank} does not come"
            time.sleep(0.001)

    # After the fault.

    def _hear_all(self, word: str) -> None:
        """Receive messages until each rank has sent one that begins with `word`."""
        while not all(word in member.said for member in self._ranks):
            self._hear_one(self._ranks)
            for member in self._ranks:
                assert not member.ended, f"rank {member.rank} has ended:\n{self._output(member)}"

    def _watch(self) -> list[Outcome]:
        """Receive messages until all ranks have ended, except a victim that is stopped."""
        while living := [member for member in self._ranks if self._lives(member)]:
            self._hear_one(living)
        for member in self._ranks:
            member.outcome.code = member.process.exitcode
            member.outcome.output = self._output(member)
        return [member.outcome for member in self._ranks]

    def _hear_one(self, chosen: Sequence[_RankProcess]) -> None:
        """Wait until one of these ranks sends a message or ends. Note all that has arrived."""
        ready = wait([one.pipe for one in chosen], max(0.0, self._deadline - time.monotonic()))
        said = [(rank.rank, rank.said, rank.outcome) for rank in self._ranks]
        assert ready, f"after {LIMIT} s still waits for {[one.rank for one in chosen]}: {said}"
        for member in chosen:
            if member.pipe not in ready:
                continue
            try:
                self._note(member, member.pipe.recv())
            except (EOFError, ConnectionResetError):
                member.process.join(LIMIT)
                member.ended = True
        self._answer()

    def _answer(self) -> None:
        """Answer ranks that wait for the other ranks.

        Ranks that said "steps" get "all done" when each live rank has said "steps" or "failed".
        Failed ranks get "leave" when each live rank has said "checked" or "failed".
        """
        for word, answer, over in (
            ("steps", "all done", {"steps", "failed"}),
            ("failed", "leave", {"checked", "failed"}),
        ):
            if any(self._lives(member) and not member.said & over for member in self._ranks):
                continue
            for member in self._ranks:
                if word in member.said and answer not in member.said:
                    member.said.add(answer)
                    self._tell(member, answer)

    def _lives(self, member: _RankProcess) -> bool:
        """Return True if the rank can still send messages. A stopped rank cannot."""
        stopped = self.cell.fault is Fault.STOPPED and self._faulted and member.rank == self._victim
        return not member.ended and not stopped

    def _note(self, member: _RankProcess, message: tuple[Any, ...]) -> None:
        word, *rest = message
        member.said.add(word)
        outcome = member.outcome
        if word == "failed":
            kind, text, at = rest
            outcome.error = (kind, text, at - self._faulted)
        elif word == "full":
            outcome.memory = (rest[0], rest[1])
        elif word == "checked":
            outcome.found = rest[0]
        elif word in ("steps", "turning", "ready"):
            outcome.turns = rest[0]
        elif word == "finished":
            outcome.finished = True

    def _output(self, member: _RankProcess) -> str:
        log = self._folder / f"rank{member.rank}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def _release(self, chosen: Sequence[_RankProcess]) -> None:
        for member in chosen:
            self._tell(member, "go")

    def _tell(self, member: _RankProcess, order: str) -> None:
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the rank has ended; _hear_one() finds the end of its pipe
            member.pipe.send(order)


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


@contextmanager
def _namespaces() -> Iterator[Sequence[Any]]:
    try:
        with two_nodes(None) as nodes:
            yield nodes
    except NoNamespaces as error:
        pytest.skip(str(error))


@contextmanager
def _file_system(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes, in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    at = os.fsencode(folder)
    if libc.mount(b"tmpfs", at, b"tmpfs", 0, f"size={size}".encode()) != 0:
        pytest.skip(f"a file system of its own: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        libc.umount2(at, 2)  # MNT_DETACH: the box may still use it


def _fill(folder: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file, suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(1 << 16))
