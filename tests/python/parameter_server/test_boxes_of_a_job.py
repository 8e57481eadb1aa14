"""The memory and the traffic of each box, by the formulas of docs/parameter-server.md."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from harness.ps_models import LEAST_SHARD_BYTES
from harness.ps_workers import Boxes, parameter_server, serving, together
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.exchange import SENDS
from torch_hbmcomm.parameter_server.layout import SHARD_BYTES, lay_out
from torch_hbmcomm.parameter_server.packing import TensorSpec

PAGE = 4096  # bytes: a box counts whole pages
FIRST_BOX = 1 << 20  # bytes: the most that the first box needs besides
STEPS = 3


class Halves(nn.Module):
    """A trained and a frozen parameter of equal size, which 1, 2 or 4 boxes share equally."""

    def __init__(self) -> None:
        super().__init__()
        count = 4 * 4 * LEAST_SHARD_BYTES * 2 // 4
        self.trained = nn.Parameter(torch.zeros(count))
        self.frozen = nn.Parameter(torch.zeros(count), requires_grad=False)


def traffic(boxes: Boxes) -> list[list[int]]:
    """Return the bytes that each box has received and sent, without the membership table."""
    membership = smb.key_of("planned/roster")
    return [
        [
            sum(row[what] for row in server.stats()["segment_table"] if row["key"] != membership)
            for what in ("written_bytes", "read_bytes")
        ]
        for server in boxes.servers
    ]


@pytest.mark.usefixtures("nothing_left", "many_shards")
@pytest.mark.parametrize("transfer", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_box_has_its_share(count: int, workers: int, transfer: torch.dtype | None) -> None:
    model = Halves()
    trained, frozen = model.trained.nbytes, model.frozen.nbytes
    sent = trained // 2 if transfer else trained
    moved: list[list[list[int]]] = []
    used: list[int] = []

    def look(boxes: Boxes, worker: int, barrier: threading.Barrier) -> None:
        """Let one worker note the boxes' counts while no worker exchanges."""
        barrier.wait()
        if worker == 0:
            moved.append(traffic(boxes))
            used[:] = [server.stats()["used_bytes"] for server in boxes.servers]
        barrier.wait()

    def work(worker: int, barrier: threading.Barrier) -> Any:
        own = Halves()
        own.trained.grad = torch.ones_like(own.trained)
        options: dict[str, Any] = {"transfer": transfer, "overlap": False, "workers": workers}
        with parameter_server(boxes, own, name="planned", **options) as ps:
            look(boxes, worker, barrier)
            before = ps.stats()
            for _ in range(STEPS):
                ps.step()
            after = ps.stats()
            look(boxes, worker, barrier)
        return [after[way] - before[way] for way in ("pushed_bytes", "pulled_bytes")]

    with serving("tcp", count) as boxes:
        found = together(workers, work)
    assert found == [[STEPS * sent] * 2] * workers
    for before, after in zip(*moved, strict=True):
        differences = [now - then for now, then in zip(after, before, strict=True)]
        assert differences == [STEPS * workers * sent // count] * 2
    for box, size in enumerate(used):
        besides = size - (trained + frozen + workers * sent) // count
        assert 0 <= besides <= (FIRST_BOX if box == 0 else PAGE)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_bytes_in_flight_do_not_grow_with_the_boxes(count: int) -> None:
    tensor = TensorSpec("weight", "float32", (8 * SHARD_BYTES,), (1,), "parameter")
    largest = max(shard.size for shard in lay_out([tensor], count).changing)
    assert SENDS * count * largest == SENDS * SHARD_BYTES
