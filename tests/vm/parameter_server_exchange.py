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
from torch_hbmcomm.parameter_server.layout import SHARD_BYTES, Layout, lay_out
from torch_hbmcomm.parameter_server.membership import MembershipTable
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.sharding import JobSegments, ShardedValues

WORKERS, PUSHES = 3, 4
COUNTS = [1, 997, SHARD_BYTES // 4 + 1]  # elements


def layout() -> Layout:
    return lay_out(
        [TensorSpec(f"t{count}", "float32", (count,), (1,), "parameter") for count in COUNTS],
        boxes=1,
    )


def floats(value: int, count: int) -> memoryview:
    return memoryview(array("f", [value]) * count).cast("B")


def work(number: int, url: str) -> None:
    """Adds `number + 1` to every element, PUSHES times. Expects the sum of all workers' pushes."""
    delays = random.Random(number)
    plan = layout()
    with smb.connect(url, verbs_workers.TOKEN, transport="verbs", connect_timeout=300) as box:
        membership = MembershipTable(box, "exchange", timeout=600, temporary=True)
        leads = membership.leads()
        mode: Literal["auto", "attach"] = "auto" if leads else "attach"
        segments = JobSegments([box], "exchange", plan.weights_bytes, plan.delta_bytes)
        weights = ShardedValues(segments, plan, "weights", mode)
        transfers = Exchange(segments, weights)
        if leads:
            weights.mark(1)
            membership.publish(1)
        weights.check_mark(membership.ready())
        exchange = BoundedExchange(transfers, membership, plan.changing, versions=None, staleness=1)
        exchange.count_from(membership.activate())
        membership.wait_for_workers(WORKERS)
        for shard in plan.changing:
            transfers.delta_buffer(shard)[:] = floats(number + 1, shard.count)
        for _ in range(PUSHES):
            time.sleep(delays.random() / 20)
            exchange.end(plan.changing, exchange.start(plan.changing, {"parameter": 1.0}))
        membership.wait_pushed(PUSHES)
        exchange.prefetch(plan.changing)
        wanted = PUSHES * sum(range(1, WORKERS + 1))
        for shard in plan.changing:
            found, dtype = transfers.fresh(shard)
            assert dtype == "float32"
            assert found == floats(wanted, shard.count), shard
        assert box.transport == "verbs"
        membership.wait_pulled(PUSHES)
        membership.leave()
        segments.free()


def main() -> None:
    verbs_workers.run(WORKERS, work)
    assert "torch" not in sys.modules
    print("exact", flush=True)


if __name__ == "__main__":
    main()
