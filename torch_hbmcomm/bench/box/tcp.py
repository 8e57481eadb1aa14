"""Reads and writes on tcp over loopback, against plain sockets and iperf3."""

from contextlib import ExitStack

from torch_hbmcomm.bench.box import iperf
from torch_hbmcomm.bench.box.bare import POLLED, SOCKETS, bare
from torch_hbmcomm.bench.box.boxes import box, timed
from torch_hbmcomm.bench.box.interleave import Timed, interleave
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import measurements
from torch_hbmcomm.bench.box.section import Findings, Goal, Section
from torch_hbmcomm.bench.peer import peer
from torch_hbmcomm.bench.sizes import KIB


def _measure(plan: Plan, findings: Findings) -> None:
    with ExitStack() as stack:
        ours = stack.enter_context(box(plan))
        client = stack.enter_context(peer("box.client_peer"))
        threads = stack.enter_context(bare())
        polled = stack.enter_context(bare())
        probe = None
        if iperf.available():
            probe = stack.enter_context(iperf.server())
        else:
            findings.unavailable["iperf3"] = "it is not installed: apt-get install iperf3"
        sizes = plan.sizes(64 * KIB)
        for size in sizes:
            client.ask("disconnect")
            ours.connect(client, "tcp", size)
            client.ask("check", transport="tcp")
            threads.connect(plan.lanes, size)
            polled.connect(plan.lanes, size, threads=False)
            for operation in ("read", "write"):
                contenders: dict[str, Timed] = {
                    "hbm tcp": timed(client, "tcp", operation),
                    SOCKETS: threads.timed(operation),
                    POLLED: polled.timed(operation),
                }
                if probe is not None and size == sizes[-1]:
                    contenders["iperf3"] = probe.timed(operation, size, plan.lanes)
                samples = interleave(contenders, plan.rounds)
                findings.add(measurements("tcp", operation, size, samples))


TCP = Section(
    "tcp",
    "reads and writes on tcp over loopback; as many plain sockets between two processes, with a "
    "thread for each or one that polls them; iperf3 -P",
    _measure,
    [Goal("hbm tcp", [SOCKETS, POLLED], share=0.95)],
)
