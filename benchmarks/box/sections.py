"""Sections that compare the box with bounds: copies, sockets, a triad (triad.h), a link's rate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from benchmarks.box import iperf
from benchmarks.box.goals import Goal, column
from benchmarks.box.native import POLLED, SOCKETS, native_client, sockets
from benchmarks.namespaces import PAYLOAD, Node, NoNamespaces, two_nodes
from benchmarks.programs import program
from torch_hbmcomm.bench import box as installed
from torch_hbmcomm.bench.box import (
    DTYPES,
    LATENCY_BYTES,
    LATENCY_SAMPLES,
    ROLE,
    BoxPlan,
    box,
    measure,
    measure_clients,
    row_of,
    sums,
    timed_by,
)
from torch_hbmcomm.bench.peer import PeerFailed, peer
from torch_hbmcomm.bench.result import (
    Findings,
    Section,
    Unavailable,
    measurements,
    sampled,
)
from torch_hbmcomm.bench.rounds import Samples, Timed, interleave
from torch_hbmcomm.sizes import KIB, MIB, format_bytes

_CLIENTS_LINK = "clients-link"
_LINK_WINDOWS = 6  # times plan.window, because operations in flight at the end do not count
_LINK_ROUNDS = 5  # the link is slow, and its rate hardly varies
_LINK_LARGEST = 32 * MIB  # large compared with the link's burst of 128 KiB


def _shm(plan: BoxPlan, findings: Findings) -> None:
    with box(plan) as ours, native_client() as client, peer(ROLE) as python:
        for size in plan.sizes(MIB):
            client.disconnect()
            python.ask("disconnect")
            client.connect(ours, "shm", size)
            ours.connect(python, "shm", size)
            client.check("shm")
            python.ask("check", transport="shm")
            for operation in ("read", "write"):
                contenders = {
                    "hbm shm": client.timed("shm", operation),
                    "memcpy": client.timed("shm", f"memcpy {operation}"),
                    "copy_bytes": client.timed("shm", f"copy_bytes {operation}"),
                    "hbm shm, Python": timed_by(python, "shm", operation),
                }
                measure(findings, "shm", operation, size, contenders, plan.rounds)


def _tcp(plan: BoxPlan, findings: Findings) -> None:
    with ExitStack() as stack:
        ours = stack.enter_context(box(plan))
        client = stack.enter_context(native_client())
        threads = stack.enter_context(sockets())
        polled = stack.enter_context(sockets())
        probe = None
        if iperf.available():
            probe = stack.enter_context(iperf.server())
        else:
            findings.unavailable["iperf3"] = "it is not installed: apt-get install iperf3"
        sizes = plan.sizes(64 * KIB)
        for size in sizes:
            client.disconnect()
            client.connect(ours, "tcp", size)
            client.check("tcp")
            threads.connect(plan.lanes, size)
            polled.connect(plan.lanes, size, threads=False)
            for operation in ("read", "write"):
                contenders: dict[str, Timed] = {
                    "hbm tcp": client.timed("tcp", operation),
                    SOCKETS: threads.timed(operation),
                    POLLED: polled.timed(operation),
                }
                if probe is not None and size == sizes[-1]:
                    contenders["iperf3"] = probe.timed(operation, size, plan.lanes)
                measure(findings, "tcp", operation, size, contenders, plan.rounds)


def _link(plan: BoxPlan, findings: Findings) -> None:
    with ExitStack() as stack:
        there, here = _nodes(plan, stack)
        ours = stack.enter_context(box(plan, there.address, there.launcher))
        client = stack.enter_context(native_client(here.launcher))
        bare = stack.enter_context(sockets(there.address, there.launcher, here.launcher))
        size = min(_LINK_LARGEST, plan.largest)
        client.connect(ours, "tcp", size)
        client.check("tcp")
        bare.connect(plan.lanes, size)
        for operation, receiver in (("read", here), ("write", there)):
            contenders = {"hbm tcp": client.timed("tcp", operation), SOCKETS: bare.timed(operation)}
            crossed = _bytes_of_one(contenders["hbm tcp"], receiver)
            if crossed < size:
                raise PeerFailed(
                    f"only {crossed} of {size} bytes crossed the link: the rest took another path"
                )
            findings.notes.append(
                f"link: a {operation} of {format_bytes(size)} brought {format_bytes(crossed)} over "
                f"the link, by its counter"
            )
            found = interleave(contenders, min(_LINK_ROUNDS, plan.rounds))
            found["link"] = Samples(interleaved=[_link_time(plan, size)])
            findings.add(measurements(row_of("link", operation, size), found))


def _nodes(plan: BoxPlan, stack: ExitStack) -> tuple[Node, Node]:
    """Make the nodes at the ends of a link. `stack` removes them. Raises Unavailable."""
    try:
        return stack.enter_context(two_nodes(f"{plan.megabits}mbit"))
    except NoNamespaces as error:
        raise Unavailable(str(error)) from error


def _link_time(plan: BoxPlan, size: int) -> float:
    """Return the microseconds that `size` bytes take over the link in one direction."""
    return size / (plan.megabits / 8 * PAYLOAD)  # bytes/µs is MB/s


def _bytes_of_one(timed: Timed, receiver: Node) -> int:
    """Return the bytes that reach `receiver` in one call.

    timed(1, 1) makes two calls, because the first call does not count. So the result is half of the
    bytes received.
    """
    before = receiver.received()
    timed(1, 1)
    return (receiver.received() - before) // 2


def _accumulate(plan: BoxPlan, findings: Findings) -> None:
    with box(plan) as ours, native_client() as client, program("bounds") as bounds:
        for dtype in DTYPES:
            for size in sums(plan, dtype):
                client.disconnect()
                client.connect(ours, "shm", size)
                client.check_sum("shm", dtype)
                bounds.ask("triad", size, plan.threads)
                contenders = {
                    "hbm": client.timed("shm", f"accumulate {dtype}"),
                    "triad": bounds.timed("run"),
                }
                measure(findings, "accumulate", dtype, size, contenders, plan.rounds)


def _latency(plan: BoxPlan, findings: Findings) -> None:
    with ExitStack() as stack:
        ours = stack.enter_context(box(plan))
        client = stack.enter_context(native_client())
        python = stack.enter_context(peer(ROLE))
        bare = stack.enter_context(sockets())
        for transport in ("shm", "tcp"):
            client.connect(ours, transport, LATENCY_BYTES)
            ours.connect(python, transport, LATENCY_BYTES)
        bare.connect(1, LATENCY_BYTES)
        for operation, size in (
            ("read", LATENCY_BYTES),
            ("write", LATENCY_BYTES),
            ("fetch_add", 8),
        ):
            contenders: dict[str, Timed] = {
                f"hbm {transport}": client.timed(transport, operation)
                for transport in ("shm", "tcp")
            }
            if operation == "read":
                contenders[SOCKETS] = bare.timed("read")
            contenders |= {
                f"hbm {transport}, Python": timed_by(python, transport, operation)
                for transport in ("shm", "tcp")
            }
            measure(findings, "latency", operation, size, contenders, plan.rounds, LATENCY_SAMPLES)


def _clients_link(plan: BoxPlan, findings: Findings) -> None:
    with ExitStack() as stack:
        there, here = _nodes(plan, stack)
        longer = replace(plan, window=_LINK_WINDOWS * plan.window)
        ways = (there.address, there.launcher, here.launcher)
        measure_clients(longer, findings, _CLIENTS_LINK, {"hbm tcp": ("tcp", "")}, *ways)
    for one in findings.of(_CLIENTS_LINK):
        directions = 1 if one.of["operation"] in ("read", "write") else 2
        bound = _link_time(plan, one.of["bytes"]) / directions
        findings.add([sampled(one.of, "link", [bound])])


def _with(section: Section, goals: Sequence[Goal]) -> Section:
    return replace(section, columns={"goal": partial(column, goals)})


_FAIR = [Goal("hbm shm", fair=0.5), Goal("hbm tcp", fair=0.5)]

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        _with(
            Section(
                "shm",
                "reads and writes on shm; memcpy and hbm's copy_bytes between the same memory",
                _shm,
                1,
            ),
            [Goal("hbm shm", ["memcpy"], share=0.95)],
        ),
        _with(
            Section(
                "tcp",
                "reads and writes on tcp over loopback; as many plain sockets between two "
                "processes, with a thread for each or one thread that polls all; iperf3 -P",
                _tcp,
                1,
            ),
            [Goal("hbm tcp", [SOCKETS, POLLED], share=0.95)],
        ),
        _with(
            Section(
                "link",
                "reads and writes on tcp between two network namespaces, over a link with a "
                "limited rate; plain sockets; the rate without headers",
                _link,
                1,
            ),
            [Goal("hbm tcp", ["link"], share=0.97)],
        ),
        installed.SECTIONS["verbs"],
        _with(
            Section(
                "accumulate",
                "target += scale * source on the box; a triad of float32 on as many threads, in "
                "plain memory (GB/s of traffic: two streams read, one written)",
                _accumulate,
                3,
            ),
            [Goal("hbm", ["triad"], "float32", share=0.90)],
        ),
        _with(
            Section(
                "latency",
                "one small operation after the other; over one plain socket, a request of 40 "
                "bytes and a reply as large as the read",
                _latency,
            ),
            [
                Goal("hbm shm", operation="read", microseconds=5),
                Goal("hbm tcp", [SOCKETS], operation="read", times=1.5),
            ],
        ),
        _with(installed.SECTIONS["clients"], [*_FAIR, Goal("hbm shm", ["memcpy"], share=0.95)]),
        _with(
            Section(
                _CLIENTS_LINK,
                "the same over the link of `link`; its rate without headers, in both directions "
                "together if reads and writes alternate",
                _clients_link,
                1,
            ),
            [*_FAIR, Goal("hbm tcp", ["link"], share=0.95)],
        ),
        installed.SECTIONS["store"],
    )
}
