"""Workers without PyTorch that push whole numbers over RDMA: the sums have to be exact.

The guest's half of test_verbs_training.py.
"""

from __future__ import annotations

import random
import sys
import time
from array import array
from typing import Literal

import verbs_workers

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.exchange import BoundedExchange, Exchange
from torch_hbmcomm.parameter_server.layout import PIECE_BYTES, Layout, lay_out
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.roster import Roster
from torch_hbmcomm.parameter_server.sharding import JobSegments, Shards

WORKERS, PUSHES = 3, 4
COUNTS = [1, 997, PIECE_BYTES // 4 + 1]  # elements


def layout() -> Layout:
    return lay_out(
        [TensorSpec(f"t{count}", "float32", (count,), (1,), "parameter") for count in COUNTS],
        boxes=1,
    )


def floats(value: int, count: int) -> memoryview:
    return memoryview(array("f", [value]) * count).cast("B")


def work(number: int, url: str) -> None:
    """Pushes `number + 1` into every element, PUSHES times; everyone must find the sum of all."""
    delays = random.Random(number)
    plan = layout()
    with smb.connect(url, verbs_workers.TOKEN, transport="verbs", connect_timeout=300) as box:
        roster = Roster(box, "exchange", timeout=600, temporary=True)
        leads = roster.leads()
        mode: Literal["auto", "attach"] = "auto" if leads else "attach"
        segments = JobSegments([box], "exchange", plan.weights_bytes, plan.slot_bytes)
        weights = Shards(segments, plan, "weights", mode)
        transfers = Exchange(segments, weights)
        if leads:
            weights.mark(1)
            roster.publish(1)
        weights.check_mark(roster.ready())
        exchange = BoundedExchange(transfers, roster, plan.changing, versions=None, staleness=1)
        exchange.count_from(roster.activate())
        roster.wait_for_workers(WORKERS)
        for piece in plan.changing:
            transfers.slot(piece)[:] = floats(number + 1, piece.count)
        for _ in range(PUSHES):
            time.sleep(delays.random() / 20)
            exchange.end(plan.changing, exchange.start(plan.changing, {"parameter": 1.0}))
        roster.wait_pushed(PUSHES)
        exchange.prefetch(plan.changing)
        wanted = PUSHES * sum(range(1, WORKERS + 1))
        for piece in plan.changing:
            found, dtype = transfers.fresh(piece)
            assert dtype == "float32"
            assert found == floats(wanted, piece.count), piece
        assert box.transport == "verbs"
        roster.wait_pulled(PUSHES)
        roster.leave()
        segments.free()


def main() -> None:
    verbs_workers.run(WORKERS, work)
    assert "torch" not in sys.modules
    print("exact", flush=True)


if __name__ == "__main__":
    main()
