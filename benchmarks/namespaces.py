"""Network namespaces that emulate machines, joined by a link or a switch.

REQUIRES: root, and iproute2.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks import programs
from torch_hbmcomm.bench.peer import PeerFailed
from torch_hbmcomm.bench.result import Unavailable

PAYLOAD = 1448 / 1514
"""The share of a full Ethernet frame that is TCP payload (TCP with timestamps)."""

_UP_SECONDS = 5
_BURST = "128kb"  # of tbf(8)
# Short frames would take more processor time. The queue of the device never drops a frame.
_DISTANT = ("mtu", "9000", "txqueuelen", "10000")
QUEUE = "20ms"
"""Default of the longest wait of a packet for a link."""


class NoNamespaces(RuntimeError):
    """This machine cannot make namespaces; the text has the cause."""


def address(node: int) -> str:
    """Return the IPv4 address of a node's end of the link."""
    return f"10.77.0.{node + 1}"


class Node:
    """A network namespace at one end of a link.

    link: the name of its network interface.
    launcher: words to put before a command, so that it runs in the namespace.
    """

    def __init__(self, number: int):
        self.name = f"hbm{os.getpid()}-{number}"
        self.address = address(number)
        self.link = f"link{number}"
        self.launcher = ("ip", "netns", "exec", self.name)

    def received(self) -> int:
        """Return the bytes received over the link."""
        shown = _ip("-n", self.name, "-s", "-j", "link", "show", "dev", self.link)
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])

    def cut(self) -> None:
        """Take this end of the link down, so that no packet crosses it."""
        _ip("-n", self.name, "link", "set", self.link, "down")

    def mend(self) -> None:
        """Take this end of the link up again."""
        _ip("-n", self.name, "link", "set", self.link, "up")

    def slow(self, rate: str, queue: str = QUEUE) -> None:
        """Limit the rate at which this node sends.

        rate, queue: in tc(8)'s notation. `queue` is the longest time that a packet waits.
        """
        _slow(self.name, self.link, rate, queue)


@contextmanager
def two_nodes(rate: str | None) -> Iterator[tuple[Node, Node]]:
    """Make two nodes joined by a link, and remove them at the end.

    rate: the link's rate in each direction, in tc(8)'s notation; None: unlimited.

    Raises NoNamespaces.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NoNamespaces("network namespaces need root, and iproute2")
    nodes = (Node(0), Node(1))
    with ExitStack() as stack:
        for node in nodes:
            _ip("netns", "add", node.name)
            stack.callback(_ip, "netns", "delete", node.name)  # also deletes its end of the link
            _ip("-n", node.name, "link", "set", "lo", "up")
        ends = [[node.link, "netns", node.name] for node in nodes]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for node in nodes:
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.link)
            _ip("-n", node.name, "link", "set", node.link, "up")
            if rate is not None:
                node.slow(rate)
        for node in nodes:
            _await_up(node)
        yield nodes


class DistantLink:
    """A link with a delay between two nodes.

    relay: the program that delays the frames.
    """

    def __init__(self, nodes: tuple[Node, Node], relay: programs.Program):
        self.nodes = nodes
        self._relay = relay

    def most_in_flight(self) -> tuple[float, float]:
        """Return the most bytes that were on their way from node 0, and from node 1, since the last
        call."""
        of_0, of_1 = self._relay.ask("most")
        return of_0, of_1


@contextmanager
def distant_link(megabits: float, delay: float) -> Iterator[DistantLink]:
    """Make two nodes joined by a link with a delay, and remove them at the end.

    megabits: the link's rate in each direction, in Mbit/s.
    delay: the time that each frame takes, in milliseconds. A frame has up to 9,000 bytes.

    Raises NoNamespaces.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoNamespaces("network namespaces need root, and iproute2")
    nodes = (Node(0), Node(1))
    with ExitStack() as stack:
        for node in nodes:
            _ip("netns", "add", node.name)
            stack.callback(_ip, "netns", "delete", node.name)
        devices = [f"hbm{os.getpid()}t{number}" for number in range(2)]
        try:
            relay = stack.enter_context(programs.program("delay_link", *devices, megabits, delay))
            relay.answer()
        except (Unavailable, PeerFailed) as error:
            raise NoNamespaces(str(error)) from error
        for node, device in zip(nodes, devices, strict=True):
            _ip("link", "set", device, "netns", node.name, "name", node.link)
            _ip("-n", node.name, "link", "set", "lo", "up")
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.link)
            _ip("-n", node.name, "link", "set", node.link, *_DISTANT, "up")
        for node in nodes:
            _await_up(node)
        yield DistantLink(nodes, relay)


@contextmanager
def switched_nodes(
    count: int, rate: str | Sequence[str], queue: str = QUEUE
) -> Iterator[list[Node]]:
    """Make nodes joined by a switch, and remove them at the end.

    The switch is a bridge in its own namespace.

    rate: the rate of every link in each direction, or a rate for each link, in tc(8)'s notation.
    queue: longest time that a packet waits for a link before it is dropped, in tc(8)'s notation.

    Raises NoNamespaces.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NoNamespaces("network namespaces need root, and iproute2")
    nodes = [Node(number) for number in range(count)]
    rates = [rate] * count if isinstance(rate, str) else rate
    switch = f"hbm{os.getpid()}-switch"
    with ExitStack() as stack:
        for name in [switch, *(node.name for node in nodes)]:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, (node, own_rate) in enumerate(zip(nodes, rates, strict=True)):
            port = f"port{number}"
            _ip("-n", node.name, "link", "set", "lo", "up")
            ends = [[node.link, "netns", node.name], [port, "netns", switch]]
            _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.link)
            _ip("-n", node.name, "link", "set", node.link, "up")
            _ip("-n", switch, "link", "set", port, "master", "bridge")
            _ip("-n", switch, "link", "set", port, "up")
            node.slow(own_rate, queue)
            _slow(switch, port, own_rate, queue)
        for node in nodes:
            _await_up(node)
        yield nodes


def _slow(namespace: str, link: str, rate: str, queue: str) -> None:
    shape = ["rate", rate, "burst", _BURST, "latency", queue]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", *shape)


def _await_up(node: Node) -> None:
    """Wait until the node's link is up. Raises NoNamespaces after _UP_SECONDS."""
    deadline = time.monotonic() + _UP_SECONDS
    while (
        "LOWER_UP"
        not in json.loads(_ip("-n", node.name, "-j", "link", "show", "dev", node.link))[0]["flags"]
    ):
        if time.monotonic() > deadline:
            raise NoNamespaces(
                f"link {node.link} of {node.name} is still down after {_UP_SECONDS} s"
            )
        time.sleep(0.02)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
