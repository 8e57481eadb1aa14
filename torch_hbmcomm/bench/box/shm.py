"""Reads and writes on shm, against plain copies between the same memory."""

from torch_hbmcomm.bench.box.boxes import box, timed
from torch_hbmcomm.bench.box.interleave import interleave
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import measurements
from torch_hbmcomm.bench.box.section import Findings, Goal, Section
from torch_hbmcomm.bench.peer import peer
from torch_hbmcomm.bench.sizes import MIB


def _measure(plan: Plan, findings: Findings) -> None:
    with box(plan) as ours, peer("box.client_peer") as client:
        for size in plan.sizes(MIB):
            client.ask("disconnect")
            ours.connect(client, "shm", size)
            client.ask("check", transport="shm")
            for operation in ("read", "write"):
                actions = {
                    "hbm shm": operation,
                    "memcpy": f"memcpy {operation}",
                    "copy_bytes": f"copy_bytes {operation}",
                }
                contenders = {who: timed(client, "shm", what) for who, what in actions.items()}
                samples = interleave(contenders, plan.rounds)
                findings.add(measurements("shm", operation, size, samples))


SHM = Section(
    "shm",
    "reads and writes on shm; memcpy and hbm's copy_bytes between the same memory",
    _measure,
    [Goal("hbm shm", ["memcpy"], share=0.95)],
)
