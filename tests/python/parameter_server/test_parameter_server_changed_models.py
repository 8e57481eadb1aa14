"""If a model or optimizer changes under its parameter server, calls raise and no weight changes."""

from __future__ import annotations

import pytest
import torch
from harness import Context, Pool
from harness.changed_models import MODEL, OPTIMIZER, Change, Images
from harness.ps_workers import parameter_server, serving, settle

from torch_hbmcomm.parameter_server import Downpour, SyncParameterServer

CHANGES = pytest.mark.parametrize(
    ("change", "said"), (MODEL | OPTIMIZER).values(), ids=MODEL | OPTIMIZER
)


def sgd(model: Images) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def values(model: Images) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@CHANGES
@pytest.mark.usefixtures("nothing_left")
def test_a_worker_refuses_a_change_then_continues(change: Change, said: str) -> None:
    model, other = Images(), Images()
    optimizer = sgd(model)
    with (
        serving("shm") as boxes,
        parameter_server(boxes, other, rule=Downpour("sum")) as watcher,
        parameter_server(boxes, model, optimizer, rule=Downpour("sum")) as ps,
    ):
        start = values(model)
        undo = change(model, optimizer)
        changed = values(model)
        model.give()
        for method in (ps.step, ps.pull, ps.state_dict, ps.finish):
            with pytest.raises(RuntimeError, match=said):
                method()
        for name, value in values(model).items():
            assert torch.equal(value, changed[name]), name
        undo()
        watcher.pull()
        for name, value in values(other).items():
            assert torch.equal(value, start[name]), name

        model.give()
        ps.step()
        ps.finish()
        watcher.pull()
        for name, value in values(other).items():
            expected = start[name] - (0 if name == "frozen" else 1)
            assert torch.equal(value, expected), name
            assert torch.equal(model.get_parameter(name), expected), name


def test_a_buffer_that_is_another_tensor_now_is_shared() -> None:
    """`self.mean = 0.9 * self.mean + ...` makes another tensor, which is shared as before.

    The frozen parameter and a new buffer are not shared, so they may have any shape.
    """
    model, other = Images(), Images()
    with (
        serving("shm") as boxes,
        parameter_server(boxes, other, overlap=False) as watcher,
        parameter_server(boxes, model, overlap=False) as ps,
    ):
        model.mean = model.mean + 4
        model.frozen.data = torch.zeros(9)
        model.register_buffer("cache", torch.zeros(5))
        for _ in range(2):
            for one in (ps, watcher):
                one.step()
                settle(one)
        assert model.mean.tolist() == other.mean.tolist() == [2.0, 2.0]  # a mean over two workers
        assert ps.state_dict()["model"]["mean"].tolist() == [2.0, 2.0]


def check_sync(context: Context, name: str, at_server: bool, push_every: int) -> None:
    """One rank's model changes."""
    change, said = (MODEL | OPTIMIZER)[name]
    model = Images()
    optimizer = sgd(model)
    ps = SyncParameterServer(model, optimizer, push_every=push_every)
    changes = context.rank == (0 if at_server else context.size - 1)
    undo = change(model, optimizer) if changes else None
    start = values(model)
    for method in (ps.step, ps.pull):
        with pytest.raises(
            RuntimeError, match=f"rank {0 if at_server else context.size - 1}: .*{said}"
        ):
            for _ in range(push_every if method == ps.step else 1):
                model.give()
                method()
        for key, value in values(model).items():
            assert torch.equal(value, start[key]), key
    if undo is not None:
        undo()
    start = values(Images())
    for _ in range(push_every):
        model.give()
        ps.step()
    ps.close()
    for key, value in values(model).items():
        expected = start[key] - (0 if key == "frozen" else 1)
        assert torch.equal(value, expected), key


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at_server", [True, False])
def test_every_rank_raises_for_a_changed_model(pool: Pool, at_server: bool) -> None:
    for index, name in enumerate(MODEL | (OPTIMIZER if at_server else {})):
        pool.run(check_sync, name, at_server, 1 + index % 2)
