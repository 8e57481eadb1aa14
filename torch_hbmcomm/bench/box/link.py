"""Reads and writes on tcp over a slow link, against what the link carries."""

from contextlib import ExitStack

from torch_hbmcomm.bench.box.bare import SOCKETS, bare
from torch_hbmcomm.bench.box.boxes import box, timed
from torch_hbmcomm.bench.box.interleave import Samples, Timed, interleave
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import measurements
from torch_hbmcomm.bench.box.section import Findings, Goal, Section
from torch_hbmcomm.bench.namespaces import PAYLOAD, Node, NoNamespaces, two_nodes
from torch_hbmcomm.bench.peer import PeerFailed, peer
from torch_hbmcomm.bench.sizes import MIB, format_bytes
from torch_hbmcomm.bench.unavailable import Unavailable

_MOST_ROUNDS = 5  # the link hardly varies, and is slow
_LARGEST = 32 * MIB  # against which the cable's burst of 128 KiB is little


def _measure(plan: Plan, findings: Findings) -> None:
    with ExitStack() as stack:
        try:
            there, here = stack.enter_context(two_nodes(f"{plan.megabits}mbit"))
        except NoNamespaces as error:
            raise Unavailable(str(error)) from error
        ours = stack.enter_context(box(plan, there.address, there.launcher))
        client = stack.enter_context(peer("box.client_peer", here.launcher))
        sockets = stack.enter_context(bare(there.address, there.launcher, here.launcher))
        size = min(_LARGEST, plan.largest)
        rounds = min(_MOST_ROUNDS, plan.rounds)
        ours.connect(client, "tcp", size)
        client.ask("check", transport="tcp")
        sockets.connect(plan.lanes, size)
        for operation, receiver in (("read", here), ("write", there)):
            contenders: dict[str, Timed] = {
                "hbm tcp": timed(client, "tcp", operation),
                SOCKETS: sockets.timed(operation),
            }
            crossed = _bytes_of_one(contenders["hbm tcp"], receiver)
            if crossed < size:
                raise PeerFailed(
                    f"only {crossed} bytes of {size} came over the link: the others took another "
                    f"way"
                )
            findings.notes.append(
                f"link: a {operation} of {format_bytes(size)} brought {format_bytes(crossed)} over "
                f"the link, by its counter"
            )
            samples: Samples = interleave(contenders, rounds)
            samples["link"] = [size / (plan.megabits / 8 * PAYLOAD)]  # bytes/µs is MB/s
            findings.add(measurements("link", operation, size, samples))


def _bytes_of_one(timed: Timed, receiver: Node) -> int:
    before = receiver.received()
    timed(1)
    return receiver.received() - before


LINK = Section(
    "link",
    "reads and writes on tcp between two network namespaces, over a cable with a rate; plain "
    "sockets; what is left of the rate beside headers",
    _measure,
    [Goal("hbm tcp", ["link"], share=0.97)],
)
