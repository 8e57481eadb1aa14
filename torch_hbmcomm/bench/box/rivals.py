"""The same work by others: MPI to a server rank, MPI one-sided, and PyTorch's RPC.

"add" brings the worker's data to the server and adds it there: for a box, a write and an
accumulate.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch_hbmcomm.bench.box.boxes import box, timed
from torch_hbmcomm.bench.box.interleave import Timed, interleave
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import measurements
from torch_hbmcomm.bench.box.section import Findings, Section
from torch_hbmcomm.bench.peer import Peer, peer
from torch_hbmcomm.bench.rival_processes import OVER_TCP, mpi_ranks, rpc_ranks
from torch_hbmcomm.bench.sizes import MIB
from torch_hbmcomm.bench.unavailable import left_out_if_it_fails

_OPERATIONS = {"write": "write", "read": "read", "add": "add float32"}
_OURS = "hbm"
_MOST_ROUNDS = 7

Prepare = Callable[[int, str], dict[str, Timed]]
"""Who takes part with so many bytes in that operation."""


def _measure(plan: Plan, findings: Findings) -> None:
    everyone: dict[str, Callable[[], AbstractContextManager[Prepare]]] = {
        _OURS: lambda: _hbm(plan),
        "mpi": lambda: _mpi("mpi", {}),
        "mpi tcp": lambda: _mpi("mpi tcp", OVER_TCP),
        "rpc": _rpc,
    }
    with ExitStack() as stack:
        ready: dict[str, Prepare] = {}
        for who, start in everyone.items():
            with _may_fail(who, findings):
                ready[who] = stack.enter_context(start())
        for size in plan.sizes(MIB, 64 * MIB):
            for operation in _OPERATIONS:
                contenders: dict[str, Timed] = {}
                for who, prepare in ready.items():
                    if who in findings.unavailable:
                        continue
                    with _may_fail(who, findings):
                        prepared = prepare(size, operation)
                        for timed in prepared.values():
                            timed(1)
                        contenders |= prepared
                samples = interleave(contenders, min(plan.rounds, _MOST_ROUNDS))
                findings.add(measurements("rivals", operation, size, samples))


def _may_fail(who: str, findings: Findings) -> AbstractContextManager[None]:
    """Whoever fails is left out from now on; but not a box."""
    if who == _OURS:
        return nullcontext()
    return left_out_if_it_fails(who, findings.unavailable)


@contextmanager
def _hbm(plan: Plan) -> Iterator[Prepare]:
    with box(plan) as ours, peer("box.client_peer") as client:
        prepared = 0

        def prepare(size: int, operation: str) -> dict[str, Timed]:
            nonlocal prepared
            if size != prepared:
                client.ask("disconnect")
                for transport in ("shm", "tcp"):
                    ours.connect(client, transport, size)
                    client.ask("check_sum", transport=transport, dtype="float32")
                prepared = size
            action = _OPERATIONS[operation]
            return {f"hbm {way}": timed(client, way, action) for way in ("shm", "tcp")}

        yield prepare


@contextmanager
def _mpi(name: str, environment: Mapping[str, str]) -> Iterator[Prepare]:
    with mpi_ranks("box.mpi_peer", 2, environment) as ranks:
        yield _asked(ranks, {f"{name} send": {"way": "send"}, f"{name} one-sided": {"way": "put"}})


def _asked(ranks: list[Peer], contenders: Mapping[str, Mapping[str, str]]) -> Prepare:
    """contenders: what run() of all ranks is told besides the operation; the first one's time
    counts."""
    prepared = 0

    def all_do(action: str, **arguments: object) -> float:
        for rank in ranks:
            rank.tell(action, **arguments)
        first: float = [rank.answer() for rank in ranks][0]  # noqa: RUF015  (all must answer)
        return first

    def prepare(size: int, operation: str) -> dict[str, Timed]:
        nonlocal prepared
        if size != prepared:
            all_do("prepare", size=size)
            prepared = size

        def timed(options: Mapping[str, str]) -> Timed:
            return lambda calls: float(all_do("run", operation=operation, calls=calls, **options))

        return {name: timed(options) for name, options in contenders.items()}

    return prepare


@contextmanager
def _rpc() -> Iterator[Prepare]:
    with rpc_ranks("box.rpc_peer", 2) as ranks:
        yield _asked(ranks[:1], {"rpc": {}})


RIVALS = Section(
    "rivals",
    "a worker's data kept by a server: written, read, and added to what is there; MPI's ranks "
    "share memory unless it says tcp",
    _measure,
)
