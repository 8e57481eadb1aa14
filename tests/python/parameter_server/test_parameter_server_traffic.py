"""The bytes that the asynchronous parameter server moves; deltas sent as bfloat16."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from harness import seeds
from harness.ps_models import Awkward, Cells
from harness.ps_task import alone, network, sgd
from harness.ps_workers import Boxes, parameter_server, serving, settle, together, trained
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server import Downpour
from torch_hbmcomm.parameter_server.layout import lay_out
from torch_hbmcomm.parameter_server.membership import SPARE_ENTRIES
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.replica import model_tensors

pytestmark = pytest.mark.usefixtures("nothing_left", "many_shards")


# -- traffic -------------------------------------------------------------------------------------


def test_the_model_has_many_shards() -> None:
    specs = [TensorSpec.of(*tensor) for tensor in model_tensors(Awkward(), True)]
    uncut = lay_out(specs, boxes=1, shard_bytes=1 << 30)
    assert len(lay_out(specs, boxes=1).changing) > 3 * len(uncut.changing)


def trained_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.parameters() if tensor.requires_grad)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_moves_only_trained_tensors(overlap: bool) -> None:
    """Count moved bytes: the worker moves trained tensors, clocks and membership entries only."""
    steps, model = 7, Awkward()
    membership = smb.key_of("traffic/roster")

    def moved(boxes: Boxes, what: str, clocks: bool = False) -> int:
        return sum(row[what] for row in boxes.rows() if (row["key"] == membership) == clocks)

    def now(boxes: Boxes) -> list[int]:
        return [
            *(moved(boxes, what) for what in ("written_bytes", "read_bytes", "accumulated_bytes")),
            *(moved(boxes, what, clocks=True) for what in ("written_bytes", "read_bytes")),
        ]

    options: dict[str, Any] = {"name": "traffic", "buffers": "local", "overlap": overlap}
    with serving("tcp") as boxes, parameter_server(boxes, model, **options) as ps:
        ps.step()
        ps.pull()  # waits for the overlapping exchange
        counted, before = ps.stats(), now(boxes)
        for _ in range(steps):
            ps.step()
        settle(ps)
        differences = [after - since for after, since in zip(now(boxes), before, strict=True)]
        since = ps.stats()
    expected = steps * trained_bytes(model)
    assert differences[:3] == [expected] * 3
    assert since["pushed_bytes"] - counted["pushed_bytes"] == expected
    assert since["pulled_bytes"] - counted["pulled_bytes"] == expected
    # In a step the worker writes two clocks of 8 bytes. It reads the job's entry, its own, and the
    # spare ones, of 64 bytes each.
    assert differences[3] == 16 * steps
    assert differences[4] == 64 * (1 + 1 + SPARE_ENTRIES) * steps


# -- deltas sent as bfloat16 ---------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_rounding_loses_nothing(boxes: Boxes, workers: int, overlap: bool) -> None:
    """Numbers of 16 bits do not fit into bfloat16's 8 bits, but the box ends with exact sums."""
    steps = 6

    def work(worker: int, barrier: threading.Barrier) -> Any:
        model = Cells(1000)
        generator = seeds.generator(worker)
        total = torch.zeros(1000)
        options: dict[str, Any] = {
            "transfer": torch.bfloat16,
            "overlap": overlap,
            "workers": workers,
        }
        with parameter_server(boxes, model, rule=Downpour("sum"), **options) as ps:
            for _ in range(steps):
                gradient = torch.randint(0, 1 << 16, (1000,), generator=generator).float()
                total += gradient
                model.cells.grad = gradient
                ps.step()
            ps.pull()
            barrier.wait()
            ps.pull()
            return model.cells.detach().clone(), total

    results = together(workers, work)
    expected = -torch.stack([total for _, total in results]).sum(0)
    for found, _ in results:
        assert torch.equal(found, expected)


def test_half_the_traffic() -> None:
    moved = []
    for transfer in (None, torch.bfloat16):
        model = network()
        options: dict[str, Any] = {"transfer": transfer, "overlap": False}
        with serving("tcp") as boxes, parameter_server(boxes, model, **options) as ps:
            for _ in range(3):
                ps.step()
            stats = ps.stats()
            moved.append((stats["pushed_bytes"], stats["pulled_bytes"]))
    assert [(2 * pushed, 2 * pulled) for pushed, pulled in moved[1:]] == moved[:1]


def test_the_weights_are_as_without_rounding(boxes: Boxes) -> None:
    (found,) = trained(boxes, 1, sgd, 20, transfer=torch.bfloat16)
    for name, value in alone(sgd, 20).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-3, msg=name)


def test_deltas_below_bfloat16s_smallest_number_are_dropped(boxes: Boxes) -> None:
    model = Cells(3)
    with parameter_server(boxes, model, transfer=torch.bfloat16) as ps:
        model.cells.grad = torch.tensor([1e-42, -1.0, 1.0])
        ps.step()
        ps.pull()
    assert model.cells.tolist() == [0.0, 1.0, -1.0]
