"""Accumulates, against a triad on as many threads."""

from torch_hbmcomm.bench.box.boxes import box, timed
from torch_hbmcomm.bench.box.interleave import interleave
from torch_hbmcomm.bench.box.plan import Plan
from torch_hbmcomm.bench.box.result import measurements
from torch_hbmcomm.bench.box.section import Findings, Goal, Section
from torch_hbmcomm.bench.peer import peer
from torch_hbmcomm.bench.sizes import MIB

_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32")


def _measure(plan: Plan, findings: Findings) -> None:
    with box(plan) as ours, peer("box.client_peer") as client:
        for dtype in _DTYPES:
            # All sizes for the type that has a goal; elsewhere one beyond every cache will do.
            for size in plan.sizes(MIB if dtype == "float32" else 64 * MIB, 64 * MIB):
                client.ask("disconnect")
                ours.connect(client, "shm", size)
                client.ask("check_sum", transport="shm", dtype=dtype)
                client.ask("triad", size=size, threads=plan.threads)
                contenders = {
                    "hbm": timed(client, "shm", f"accumulate {dtype}"),
                    "triad": lambda calls: float(client.ask("run_triad", calls=calls)),
                }
                samples = interleave(contenders, plan.rounds)
                findings.add(measurements("accumulate", dtype, size, samples))


ACCUMULATE = Section(
    "accumulate",
    "target += scale * source on the box; a triad of float32 on as many threads, in plain memory "
    "(GB/s of traffic: two streams read, one written)",
    _measure,
    [Goal("hbm", ["triad"], "float32", share=0.90)],
    streams=3,
)
