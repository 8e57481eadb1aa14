"""Reads and writes on verbs, where there is an RDMA device."""

import json
import subprocess
from pathlib import Path

from torch_hbmcomm.bench.box.boxes import box, timed
from torch_hbmcomm.bench.box.interleave import interleave
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import measurements
from torch_hbmcomm.bench.box.section import Findings, Section
from torch_hbmcomm.bench.peer import peer
from torch_hbmcomm.bench.sizes import KIB
from torch_hbmcomm.bench.unavailable import Unavailable

_DEVICES = Path("/sys/class/infiniband")


def _measure(plan: Plan, findings: Findings) -> None:
    with box(plan, _address()) as ours, peer("box.client_peer") as client:
        for size in plan.sizes(256 * KIB):
            client.ask("disconnect")
            ours.connect(client, "verbs", size)
            client.ask("check", transport="verbs")
            for operation in ("read", "write"):
                samples = interleave({"hbm verbs": timed(client, "verbs", operation)}, plan.rounds)
                findings.add(measurements("verbs", operation, size, samples))


def _address() -> str:
    """Of an interface that belongs to an RDMA device: routes to it resolve on the device."""
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


VERBS = Section(
    "verbs", "one-sided reads and writes on verbs, over this machine's RDMA device", _measure
)
