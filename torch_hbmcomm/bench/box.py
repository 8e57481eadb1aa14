"""Measures the memory box on this machine through the public client.

Each section measures one thing: reads and writes over one transport, accumulates, latencies,
several clients at a time, or a box with a store.

Boxes and clients are processes of their own, which execute commands (peer.py). Nothing here needs
PyTorch. Contenders other than memcpy are in benchmarks/box of the repository: a native client,
plain sockets, a triad, MPI and PyTorch's RPC.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torch_hbmcomm import machine
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.peer import Peer, peer
from torch_hbmcomm.bench.result import (
    Findings,
    Measurement,
    Result,
    Section,
    Unavailable,
    check_counts,
    measurements,
    sampled,
)
from torch_hbmcomm.bench.rounds import MOST_SAMPLES, Timed, interleave
from torch_hbmcomm.sizes import KIB, MIB

ROLE = "torch_hbmcomm.bench.box_peer"
_SIZES = [64 * KIB * 4**power for power in range(7)]  # to 256 MiB
# A box has memory for this number of segments of the largest size. Each of two clients has a
# segment, and a source for accumulates. Two more may belong to clients that have disconnected.
_SEGMENTS = 6
_DEVICES = Path("/sys/class/infiniband")

DTYPES = ("float32", "float64", "bfloat16", "float16", "int32")
LATENCY_BYTES = 4 * KIB
LATENCY_SAMPLES = 500  # the most samples in a turn of the section latency

_CLIENT_SEGMENT = 16 * MIB  # large, so that the segments of many clients exceed the caches
_CLIENT_CHUNK = MIB
_CLIENT_ROUNDS = 3
_CLIENT_OPERATIONS = {"read": ["read"], "write": ["write"], "read and write": ["read", "write"]}
_CLIENTS_PER_WINDOW = 8  # more clients get a longer window: they share few processors
_LEAD = 0.1  # seconds from the command to all clients until their common start


@dataclass(frozen=True)
class BoxPlan:
    """The measurements to make. Raises ValueError for invalid ones.

    largest: bytes of the largest read, write or accumulate.
    rounds: turns of each contender in rounds with the others, and as many turns alone. With several
    clients: at most 3 turns with the others, and none alone.
    lanes: connections of a client over tcp.
    threads: the number of threads that accumulate on the box.
    clients: numbers of clients that work at the same time. Each number is measured by itself, in
    rounds of `window` seconds, or longer rounds for more than 8 clients.
    megabits: rate of a slow link, each way, in Mbit/s, for a section that has one.
    store: a directory on the disk that stores are measured on; None: stores are not measured.
    """

    sections: Sequence[str]
    largest: int = 256 * MIB
    rounds: int = 11
    lanes: int = 4
    threads: int = machine.cores()
    clients: Sequence[int] = (2, 4, 8, 16, 32)
    window: float = 0.5
    megabits: int = 1000
    store: Path | None = None

    def __post_init__(self) -> None:
        check_counts(self, {"rounds": 1, "lanes": 1, "threads": 1, "megabits": 1})
        if self.largest < _SIZES[0]:
            raise ValueError(f"the largest size is {self.largest} bytes; at least {_SIZES[0]}")
        if not self.clients or min(self.clients) < 1:
            raise ValueError("at least one client works at a time")

    def sizes(self, least: int, most: int = _SIZES[-1]) -> list[int]:
        """Return the sizes of _SIZES from `least` up to `most`, without those above `largest`. If
        that leaves none, return `largest` alone."""
        return [size for size in _SIZES if least <= size <= min(most, self.largest)] or [
            self.largest
        ]


QUICK: dict[str, Any] = {"largest": MIB, "rounds": 2, "clients": (2, 4), "window": 0.1}
"""Fields of a plan that only shows that everything can be measured."""


@dataclass(frozen=True)
class BoxProcess:
    """A box in a process of its own."""

    url: str
    token: str
    lanes: int

    def connect(self, client: Peer, transport: str, size: int) -> None:
        """Connect a client, whose segment and local buffer get `size` bytes."""
        client.ask(
            "connect",
            url=self.url,
            token=self.token,
            transport=transport,
            lanes=self.lanes,
            size=size,
        )


@contextmanager
def box(
    plan: BoxPlan,
    host: str = "127.0.0.1",
    launcher: Sequence[str] = (),
    store: Path | None = None,
    memory: int = 0,
) -> Iterator[BoxProcess]:
    """Start a box. memory: the least memory of the box, in bytes; the plan's largest size may need
    more."""
    token = secrets.token_hex(16)
    with peer(ROLE, launcher, ["box"]) as process:
        url = process.ask(
            "open",
            listen=f"{host}:0",
            memory=max(memory, _SEGMENTS * plan.largest + 64 * MIB),
            token=token,
            threads=plan.threads,
            store=None if store is None else str(store),
        )
        yield BoxProcess(url, token, plan.lanes)


def timed_by(client: Peer, transport: str, action: str) -> Timed:
    """Return the loop of timed calls that a client runs. action: as in ClientPeer.run()."""

    def run(samples: int, calls: int) -> list[float]:
        found: list[float] = client.ask(
            "run", transport=transport, action=action, samples=samples, calls=calls
        )
        return found

    return run


def measure(
    findings: Findings,
    section: str,
    operation: str,
    size: int,
    contenders: Mapping[str, Timed],
    rounds: int,
    most_samples: int = MOST_SAMPLES,
) -> None:
    """Measure one row."""
    found = interleave(contenders, rounds, most_samples=most_samples)
    findings.add(measurements(row_of(section, operation, size), found))


def row_of(section: str, operation: str, size: int, clients: int = 1) -> dict[str, Any]:
    return {"section": section, "operation": operation, "bytes": size, "clients": clients}


def _shm(plan: BoxPlan, findings: Findings) -> None:
    with box(plan) as ours, peer(ROLE) as client:
        for size in plan.sizes(MIB):
            client.ask("disconnect")
            ours.connect(client, "shm", size)
            client.ask("check", transport="shm")
            for operation in ("read", "write"):
                contenders = {
                    "hbm shm": timed_by(client, "shm", operation),
                    "memcpy": timed_by(client, "shm", f"memcpy {operation}"),
                }
                measure(findings, "shm", operation, size, contenders, plan.rounds)


def _tcp(plan: BoxPlan, findings: Findings) -> None:
    _one_transport(plan, findings, "tcp", "127.0.0.1", 64 * KIB)


def _verbs(plan: BoxPlan, findings: Findings) -> None:
    _one_transport(plan, findings, "verbs", _address_of_device(), 256 * KIB)


def _one_transport(
    plan: BoxPlan, findings: Findings, transport: str, host: str, least: int
) -> None:
    with box(plan, host) as ours, peer(ROLE) as client:
        for size in plan.sizes(least):
            client.ask("disconnect")
            ours.connect(client, transport, size)
            client.ask("check", transport=transport)
            for operation in ("read", "write"):
                contenders = {f"hbm {transport}": timed_by(client, transport, operation)}
                measure(findings, transport, operation, size, contenders, plan.rounds)


def _address_of_device() -> str:
    """Return an IPv4 address of an RDMA device's network interface. Connections over verbs to this
    address use the device."""
    names = {file.read_text().strip() for file in _DEVICES.glob("*/ports/*/gid_attrs/ndevs/0")}
    for name in sorted(names):
        shown = subprocess.run(
            ["ip", "-j", "-4", "address", "show", "dev", name], capture_output=True, text=True
        )
        if shown.returncode == 0:
            for interface in json.loads(shown.stdout):
                for address in interface["addr_info"]:
                    return str(address["local"])
    raise Unavailable(
        "there is no RDMA device with an address here"
        if not names
        else f"{', '.join(sorted(names))} has no IPv4 address"
    )


def _accumulate(plan: BoxPlan, findings: Findings) -> None:
    with box(plan) as ours, peer(ROLE) as client:
        for dtype in DTYPES:
            for size in sums(plan, dtype):
                client.ask("disconnect")
                ours.connect(client, "shm", size)
                client.ask("check_sum", transport="shm", dtype=dtype)
                contenders = {"hbm": timed_by(client, "shm", f"accumulate {dtype}")}
                measure(findings, "accumulate", dtype, size, contenders, plan.rounds)


def sums(plan: BoxPlan, dtype: str) -> list[int]:
    """Return the sizes to measure: 1 to 64 MiB for float32, and 64 MiB alone for other types. Sizes
    above the plan's `largest` are left out; if none is left, the size is `largest`."""
    return plan.sizes(MIB if dtype == "float32" else 64 * MIB, 64 * MIB)


def _latency(plan: BoxPlan, findings: Findings) -> None:
    with box(plan) as ours, peer(ROLE) as client:
        for transport in ("shm", "tcp"):
            ours.connect(client, transport, LATENCY_BYTES)
        for operation, size in (
            ("read", LATENCY_BYTES),
            ("write", LATENCY_BYTES),
            ("fetch_add", 8),
        ):
            contenders = {
                f"hbm {transport}": timed_by(client, transport, operation)
                for transport in ("shm", "tcp")
            }
            measure(findings, "latency", operation, size, contenders, plan.rounds, LATENCY_SAMPLES)


def _clients(plan: BoxPlan, findings: Findings) -> None:
    contenders = {"hbm shm": ("shm", ""), "memcpy": ("shm", "memcpy "), "hbm tcp": ("tcp", "")}
    measure_clients(plan, findings, "clients", contenders)


def measure_clients(
    plan: BoxPlan,
    findings: Findings,
    section: str,
    contenders: Mapping[str, tuple[str, str]],
    host: str = "127.0.0.1",
    box_launcher: Sequence[str] = (),
    launcher: Sequence[str] = (),
) -> None:
    """Measure all clients of a box together: reads, writes, and alternate reads and writes.

    contenders: for each name, a transport and a prefix. The prefix and an operation together name
    ClientPeer's action, as in "memcpy read".
    box_launcher, launcher: the commands that start the box and each client.
    """
    segment = max(_CLIENT_CHUNK, min(_CLIENT_SEGMENT, plan.largest))
    transports = {transport for transport, _ in contenders.values()}
    memory = 2 * len(transports) * max(plan.clients) * segment
    with ExitStack() as stack:
        ours = stack.enter_context(box(plan, host, box_launcher, memory=memory))
        clients: list[Peer] = []
        for count in sorted(plan.clients):
            while len(clients) < count:
                clients.append(stack.enter_context(peer(ROLE, launcher)))
                for transport in transports:
                    ours.connect(clients[-1], transport, segment)
            window = plan.window * max(1, count / _CLIENTS_PER_WINDOW)
            for operation, verbs in _CLIENT_OPERATIONS.items():
                moved: dict[str, list[list[int]]] = {name: [] for name in contenders}
                for _ in range(min(_CLIENT_ROUNDS, plan.rounds)):
                    for name, (transport, before) in contenders.items():
                        actions = [before + verb for verb in verbs]
                        moved[name].append(_together(clients, transport, actions, window))
                row = row_of(section, operation, _CLIENT_CHUNK, count)
                findings.add(_of_all(row, *found, window) for found in moved.items())


def _together(
    clients: Sequence[Peer], transport: str, actions: Sequence[str], window: float
) -> list[int]:
    """Let all clients work at the same time. Returns the bytes that each client moved. If a client
    gets the command after the common start, all clients try again with a lead twice as long."""
    lead = _LEAD
    while True:
        begin = time.monotonic() + lead
        for client in clients:
            client.tell(
                "together",
                transport=transport,
                actions=list(actions),
                begin=begin,
                seconds=window,
                chunk=_CLIENT_CHUNK,
            )
        moved: list[int | None] = [client.answer() for client in clients]
        in_time = [count for count in moved if count is not None]
        if len(in_time) == len(moved):
            return in_time
        lead *= 2


def _of_all(
    row: Mapping[str, Any], name: str, rounds: Sequence[Sequence[int]], window: float
) -> Measurement:
    """Make the measurement of all clients together. The sample of a round is the mean time of a
    chunk: the window divided by the chunks that all clients moved. If they moved nothing, the
    sample is the window."""
    each = [sum(moved) for moved in zip(*rounds, strict=True)]
    samples = [window * 1e6 / max(1, sum(moved) / _CLIENT_CHUNK) for moved in rounds]
    return sampled(
        row,
        name,
        samples,
        values={"smallest_share": min(each) / max(1, sum(each) / len(each))},
    )


def _store(plan: BoxPlan, findings: Findings) -> None:
    if plan.store is None:
        raise Unavailable("name a directory for it: --store DIR")
    with (
        tempfile.TemporaryDirectory(prefix="hbmcomm-bench-", dir=plan.store) as directory,
        box(plan) as plain,
        box(plan, store=Path(directory)) as stored,
        peer(ROLE) as plain_client,
        peer(ROLE) as stored_client,
    ):
        pairs = {"hbm": (plain, plain_client), "hbm, stored": (stored, stored_client)}
        for size in plan.sizes(MIB, 64 * MIB):
            contenders = {}
            for name, (ours, client) in pairs.items():
                client.ask("disconnect")
                ours.connect(client, "shm", size)
                client.ask("check_sum", transport="shm", dtype="float32")
                contenders[name] = timed_by(client, "shm", "accumulate float32")
            measure(findings, "store", "accumulate float32", size, contenders, plan.rounds)


SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        Section("shm", "reads and writes on shm; memcpy between the same memory", _shm, 1),
        Section("tcp", "reads and writes on tcp over loopback", _tcp, 1),
        Section(
            "verbs",
            "one-sided reads and writes on verbs, over this machine's RDMA device",
            _verbs,
            1,
        ),
        Section(
            "accumulate",
            "target += scale * source on the box (GB/s of traffic: two streams read, one written)",
            _accumulate,
            3,
        ),
        Section("latency", "one small operation after the other", _latency),
        Section(
            "clients",
            "processes that read, write, or both in turn, each a segment of its own; memcpy of the "
            "same memory; GB/s of all together, and the smallest client's part of an equal share",
            _clients,
            1,
        ),
        Section(
            "store",
            "accumulates on a box without a store, and on one that undoes what a kill left half "
            "done",
            _store,
            3,
        ),
    )
}


def render(result: Result) -> RenderableType:
    """Return a table for each section."""
    grouped = groupby(result.measurements, key=lambda one: one.of["section"])
    return report.group([_table(SECTIONS[name], list(found)) for name, found in grouped], result)


def _table(section: Section, found: Sequence[Measurement]) -> Table:
    speed = report.speed(section)

    def entry(row: report.Row, one: Measurement) -> Text | str:
        share = one.values.get("smallest_share")
        if share is None:
            return speed(row, one)
        return f"{report.rate(section, one):.3g} GB/s\n{share:.0%} of a share"

    def operation(one: Measurement) -> str:
        clients: int = one.of["clients"]
        name: str = one.of["operation"]
        return f"{name}, {clients} clients" if clients > 1 else name

    title = f"{section.name}: {section.about}"
    headings = {"operation": operation, "size": report.size}
    return report.compared(title, found, headings, entry, more=section.columns)
