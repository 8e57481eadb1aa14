"""Rivals that do the work of a box: MPI with a server rank, one-sided MPI, and PyTorch's RPC.

The operation "add" sends the worker's data to the server, and adds them to the stored data. With a
box, this is a write and an accumulate.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from benchmarks.box.native import native_client
from benchmarks.processes import OVER_TCP, mpi_ranks, rpc_ranks
from torch_hbmcomm.bench.box import BoxPlan, box, measure
from torch_hbmcomm.bench.peer import Peer
from torch_hbmcomm.bench.result import Findings, Section, left_out_if_it_fails
from torch_hbmcomm.bench.rounds import Timed
from torch_hbmcomm.sizes import MIB

_OPERATIONS = {"write": "write", "read": "read", "add": "add float32"}
_OURS = "hbm"
_MOST_ROUNDS = 7

Prepare = Callable[[int, str], dict[str, Timed]]
"""Takes the number of bytes and the operation. Returns the contenders' loops, by name."""


def _measure(plan: BoxPlan, findings: Findings) -> None:
    everyone: dict[str, Callable[[], AbstractContextManager[Prepare]]] = {
        _OURS: lambda: _hbm(plan),
        "mpi": lambda: _mpi("mpi", {}),
        "mpi tcp": lambda: _mpi("mpi tcp", OVER_TCP),
        "rpc": _rpc,
    }
    with ExitStack() as stack:
        ready: dict[str, Prepare] = {}
        for who, start in everyone.items():
            with left_out_if_it_fails(who, findings, ours=who == _OURS):
                ready[who] = stack.enter_context(start())
        for size in plan.sizes(MIB, 64 * MIB):
            for operation in _OPERATIONS:
                contenders: dict[str, Timed] = {}
                for who, prepare in ready.items():
                    if who in findings.unavailable:
                        continue
                    with left_out_if_it_fails(who, findings, ours=who == _OURS):
                        prepared = prepare(size, operation)
                        for timed in prepared.values():
                            timed(1, 1)
                        contenders |= prepared
                rounds = min(plan.rounds, _MOST_ROUNDS)
                measure(findings, "rivals", operation, size, contenders, rounds)


@contextmanager
def _hbm(plan: BoxPlan) -> Iterator[Prepare]:
    with box(plan) as ours, native_client() as client:
        prepared = 0

        def prepare(size: int, operation: str) -> dict[str, Timed]:
            nonlocal prepared
            if size != prepared:
                client.disconnect()
                for transport in ("shm", "tcp"):
                    client.connect(ours, transport, size)
                    client.check_sum(transport, "float32")
                prepared = size
            action = _OPERATIONS[operation]
            return {f"hbm {way}": client.timed(way, action) for way in ("shm", "tcp")}

        yield prepare


@contextmanager
def _mpi(name: str, environment: Mapping[str, str]) -> Iterator[Prepare]:
    with mpi_ranks("benchmarks.box.mpi_peer", 2, environment) as ranks:
        yield _asked(ranks, {f"{name} send": {"way": "send"}, f"{name} one-sided": {"way": "put"}})


def _asked(ranks: list[Peer], contenders: Mapping[str, Mapping[str, str]]) -> Prepare:
    """Make a Prepare whose loops run on all `ranks`. The first rank's times count.

    contenders: for each contender, further arguments of the ranks' run().
    """
    prepared = 0

    def all_do(action: str, **arguments: object) -> Any:
        for rank in ranks:
            rank.tell(action, **arguments)
        first, *_ = [rank.answer() for rank in ranks]
        return first

    def prepare(size: int, operation: str) -> dict[str, Timed]:
        nonlocal prepared
        if size != prepared:
            all_do("prepare", size=size)
            prepared = size

        def timed(options: Mapping[str, str]) -> Timed:
            def run(samples: int, calls: int) -> list[float]:
                found: list[float] = all_do(
                    "run", operation=operation, samples=samples, calls=calls, **options
                )
                return found

            return run

        return {name: timed(options) for name, options in contenders.items()}

    return prepare


@contextmanager
def _rpc() -> Iterator[Prepare]:
    with rpc_ranks("benchmarks.box.rpc_peer", 2) as ranks:
        yield _asked(ranks[:1], {"rpc": {}})


RIVALS = Section(
    "rivals",
    "a worker's data stored by a server: written, read, and added to the stored data; MPI's ranks "
    "share memory, except in rows with tcp",
    _measure,
    streams=1,
)
