"""What keeping accumulates exact across a kill costs: a box with a store against one without."""

import tempfile
from pathlib import Path

from torch_hbmcomm.bench.box.boxes import box, timed
from torch_hbmcomm.bench.box.interleave import interleave
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import measurements
from torch_hbmcomm.bench.box.section import Findings, Section
from torch_hbmcomm.bench.peer import peer
from torch_hbmcomm.bench.sizes import MIB
from torch_hbmcomm.bench.unavailable import Unavailable


def _measure(plan: Plan, findings: Findings) -> None:
    if plan.store is None:
        raise Unavailable("name a directory for it: --store DIR")
    with (
        tempfile.TemporaryDirectory(prefix="hbmcomm-bench-", dir=plan.store) as place,
        box(plan) as plain,
        box(plan, store=Path(place)) as stored,
        peer("box.client_peer") as plain_client,
        peer("box.client_peer") as stored_client,
    ):
        pairs = {"hbm": (plain, plain_client), "hbm, stored": (stored, stored_client)}
        for size in plan.sizes(MIB, 64 * MIB):
            contenders = {}
            for name, (ours, client) in pairs.items():
                client.ask("disconnect")
                ours.connect(client, "shm", size)
                client.ask("check_sum", transport="shm", dtype="float32")
                contenders[name] = timed(client, "shm", "accumulate float32")
            samples = interleave(contenders, plan.rounds)
            findings.add(measurements("store", "accumulate float32", size, samples))


STORE = Section(
    "store",
    "accumulates on a box without a store, and on one that undoes what a kill left half done",
    _measure,
    streams=3,
)
