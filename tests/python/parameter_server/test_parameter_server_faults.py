"""The asynchronous parameter server: deaths of workers and boxes, late calls, wrong checkpoints."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import seeds
from harness.box_process import TOKEN, BoxProcess
from harness.ps_models import Cells, assert_equal
from harness.ps_process import AgentsWorker, ForkedWorker, Task, WorkerProcess
from harness.ps_task import alone, assert_near, backward, network, sgd, weights
from harness.ps_workers import Boxes, parameter_server, together
from torch import nn

from torch_hbmcomm import LayerDrop, smb
from torch_hbmcomm.parameter_server import Downpour, ParameterServer, sharding
from torch_hbmcomm.parameter_server.membership import MembershipTable
from torch_hbmcomm.parameter_server.own_steps import OwnSteps

pytestmark = pytest.mark.usefixtures("nothing_left")

LEASE = 10.0  # seconds; a live worker tells the box three times in a lease that it lives


# -- workers that die ----------------------------------------------------------------------------


KILLED = 2


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize(
    "agents",
    [
        pytest.param({KILLED}, id="one-agent"),
        pytest.param(set(range(4)), id="four-agents", marks=pytest.mark.full),
    ],
)
def test_three_of_four_workers_finish(transport: Any, agents: set[int], tmp_path: Path) -> None:
    """Some workers run under their own torchrun, and the staleness is bounded.

    No step is lost, and none counts twice.
    """
    steps, staleness = 60, 3
    with BoxProcess("--lease", str(LEASE)) as box, ExitStack() as stack:
        workers = []
        for worker in range(4):
            task = Task(
                box.url,
                transport,
                worker,
                workers=4,
                steps=steps,
                pause=0.01,
                result=str(tmp_path / str(worker)),
                options={"staleness": staleness},
                cells=True,
            )
            workers.append(stack.enter_context(start(task, worker in agents)))
        workers[KILLED].until_step(10)
        workers[KILLED].signal(signal.SIGKILL)
        assert workers[KILLED].finish() != 0
        last = workers[KILLED].steps
        for worker in range(4):
            if worker != KILLED:
                assert workers[worker].finish() == 0, workers[worker].errors
    for worker in range(4):
        if worker != KILLED:
            found = torch.load(tmp_path / str(worker))
            assert found["stats"]["steps"] == steps
            cells = found["model"]["cells"].tolist()
            assert cells.pop(worker) == steps
            killed = cells.pop(KILLED - (worker < KILLED))
            assert last - 1 <= killed <= last + 1  # the last exchange may be half done
            assert all(steps - staleness <= cell <= steps for cell in cells)


def start(task: Task, under_agent: bool) -> WorkerProcess:
    return AgentsWorker(task) if under_agent else ForkedWorker(task)


def test_a_killed_workers_pushed_deltas_count(transport: Any, tmp_path: Path) -> None:
    """The killed worker joins late, and dies between two exchanges."""
    steps, kept = 5, network()
    with (
        BoxProcess("--lease", str(LEASE)) as process,
        smb.connect(process.url, TOKEN, transport=transport) as box,
        ParameterServer(kept, sgd(kept.parameters()), box=box, overlap=False) as ps,
    ):
        for step in range(steps):
            backward(kept, step)
            ps.step()
        options = {"overlap": False}
        result = str(tmp_path / "none")
        task = Task(process.url, transport, 0, 1, steps, 60.0, result, options)
        with ForkedWorker(task) as late:
            late.until_step(1)
            assert ps.stats()["workers"] == 2
            late.signal(signal.SIGKILL)
            assert late.finish() == -signal.SIGKILL
        assert ps.stats()["workers"] == 2  # no worker has noticed
        before = {name: value.clone() for name, value in kept.state_dict().items()}
        ps.pull()
        assert not torch.equal(kept.first.weight, before["first.weight"])
        until(
            lambda: len(box.stats()["segment_table"]) == 5
        )  # the killed worker's delta buffer and life segment have gone

        def noticed() -> bool:
            ps.step()
            return ps.stats()["workers"] == 1

        until(noticed)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


# -- boxes that die ------------------------------------------------------------------------------


def test_a_killed_box_only_delays_training(transport: Any, tmp_path: Path) -> None:
    """Training with a staleness of 0 ends as in one process."""
    steps, count = 30, 2
    store = ("--store", str(tmp_path / "store"), "--memory", "64MiB")
    with BoxProcess(*store) as box, ExitStack() as stack:
        workers = []
        for worker in range(count):
            task = Task(
                box.url,
                transport,
                worker,
                workers=count,
                steps=steps,
                pause=0.1,
                result=str(tmp_path / str(worker)),
                options={"staleness": 0},
            )
            under_agent = (transport, worker) == ("tcp", 1)  # once is enough: a start takes seconds
            workers.append(stack.enter_context(start(task, under_agent)))
        workers[0].until_step(10)
        box.kill()
        time.sleep(1)
        assert [worker.running for worker in workers] == [True] * count
        box.start()
        for each in workers:
            assert each.finish() == 0, each.errors
    expected = alone(sgd, steps)
    for worker in range(count):
        assert_near(torch.load(tmp_path / str(worker))["model"], expected)


def test_every_push_counts_once_though_the_box_is_killed(transport: Any, tmp_path: Path) -> None:
    steps, count, cells = 60, 3, 20_000
    with BoxProcess("--store", str(tmp_path), "--memory", "64MiB") as process:
        taken = [0] * count

        def train(worker: int, barrier: threading.Barrier) -> Any:
            model = nn.Linear(cells, 1, bias=False)
            with torch.no_grad():
                model.weight.zero_()
            total = torch.zeros_like(model.weight)
            generator = seeds.generator(worker)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with (
                smb.connect(process.url, TOKEN, transport=transport) as box,
                ParameterServer(
                    model, optimizer, box=box, rule=Downpour("sum"), workers=count
                ) as ps,
            ):
                for step in range(steps):
                    gradient = torch.randint(-3, 4, model.weight.shape, generator=generator)
                    model.weight.grad = gradient.float()
                    total += gradient
                    ps.step()
                    taken[worker] = step + 1
                    time.sleep(0.01)
                ps.pull()
                barrier.wait()
                ps.pull()
                return model.weight.detach().clone(), total

        def kill_twice() -> None:
            for step in (15, 35):
                until(lambda step=step: max(taken) >= step)  # type: ignore[misc]
                process.kill()
                process.start()

        killer = threading.Thread(target=kill_twice)
        killer.start()
        try:
            results = together(count, train)
        finally:
            killer.join()
    expected = -torch.stack([total for _, total in results]).sum(0)
    for found, _ in results:
        assert torch.equal(found, expected)


def test_kept_weights_outlive_the_box(transport: Any, tmp_path: Path) -> None:
    with BoxProcess("--store", str(tmp_path), "--memory", "64MiB") as process:
        for steps in ([0, 1, 2], [3, 4]):
            model = network()
            with (
                smb.connect(process.url, TOKEN, transport=transport) as box,
                ParameterServer(model, sgd(model.parameters()), box=box, keep=True) as ps,
            ):
                for step in steps:
                    backward(model, step)
                    ps.step()
                ps.pull()
            process.kill()
            process.start()
    assert_near(weights(model), alone(sgd, 5))


def test_a_box_without_a_store_ends_training(transport: Any) -> None:
    model = network()
    with (
        BoxProcess() as process,
        smb.connect(process.url, TOKEN, transport=transport) as box,
    ):
        ps = ParameterServer(model, sgd(model.parameters()), box=box)
        ps.step()
        process.kill()
        process.start()
        with pytest.raises(smb.SegmentLost, match="restarted without its data"):
            for _ in range(3):
                ps.step()
        with pytest.raises(smb.SegmentLost):
            ps.close()


def test_the_first_worker_fails_and_the_second_begins(boxes: Boxes) -> None:
    """The first worker dies before it has written the weights."""
    with boxes.connected() as connections:
        membership = MembershipTable(connections[0], "parameter-server", 5.0, temporary=True)
        assert membership.leads()
    model = network()
    with parameter_server(boxes, model) as ps:
        ps.step()
        assert ps.stats()["workers"] == 1


# -- late calls, and wrong checkpoints -----------------------------------------------------------


def test_close_after_an_error_sends_nothing_twice(boxes: Boxes) -> None:
    """Time out after the push, in the wait for another worker, which takes no step."""
    idle, model = network(), network()
    options: dict[str, Any] = {"staleness": 0, "rule": Downpour("sum")}
    with (
        parameter_server(boxes, idle, **options) as waiting,
        boxes.connected() as connections,
    ):
        before = {name: value.clone() for name, value in waiting.state_dict()["model"].items()}
        optimizer = sgd(model.parameters())
        ps = ParameterServer(model, optimizer, box=connections, timeout=0.5, **options)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(TimeoutError):
            ps.step()
        with pytest.raises(RuntimeError, match=r"step\(\) after an error"):
            ps.step()
        ps.close()
        alone = network()
        for parameter in alone.parameters():
            parameter.grad = torch.ones_like(parameter)
        sgd(alone.parameters()).step()
        after = waiting.state_dict()["model"]
        for name, parameter in alone.named_parameters():
            assert not torch.equal(after[name], before[name])
            torch.testing.assert_close(after[name], parameter.detach())


def test_steps_after_the_last_one(boxes: Boxes) -> None:
    with parameter_server(boxes, network()) as ps:
        ps.finish()
        ps.pull()
        with pytest.raises(RuntimeError, match=r"step\(\) after finish\(\)"):
            ps.step()
        ps.close()
        with pytest.raises(RuntimeError, match=r"pull\(\) after close\(\)"):
            ps.pull()


def test_finish_waits_for_the_other_workers(boxes: Boxes) -> None:
    """The workers take different numbers of steps. All get the sum of all steps."""
    steps = [3, 40]

    def train(worker: int, barrier: threading.Barrier) -> list[int]:
        model = Cells(len(steps))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with (
            boxes.connected() as connections,
            ParameterServer(
                model, optimizer, box=connections, rule=Downpour("sum"), workers=len(steps)
            ) as ps,
        ):
            for _ in range(steps[worker]):
                model.add_one(worker)
                ps.step()
            ps.finish(wait=True)
            ps.pull()
            ps.finish(wait=True)
            return model.seen()

    assert together(len(steps), train) == [steps] * len(steps)


def test_a_second_checkpoint(boxes: Boxes) -> None:
    with parameter_server(boxes, network()) as ps:
        state = ps.state_dict()
        ps.load_state_dict(state)
        with pytest.raises(RuntimeError, match="loaded once"):
            ps.load_state_dict(state)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"steps": None}, ValueError, "no 'steps'; load what ParameterServer.state_dict"),
        ({"model": None}, ValueError, "no 'model'; load what ParameterServer.state_dict"),
        ({"steps": 2.5}, ValueError, "the state's 'steps' is 2.5, and no number of steps"),
        ({"model": 3}, TypeError, "the state's 'model' is a mapping, not int"),
        ({"model": {"x": torch.ones(1)}}, RuntimeError, "Unexpected key"),
        ({"drop": {"steps": 3}}, ValueError, "lacks debt, representative, threshold, waited"),
    ],
    ids=str,
)
def test_a_checkpoint_that_lacks_something(
    boxes: Boxes, wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    """Check that a refused checkpoint changes neither model nor box. Then load the right one."""
    options: dict[str, Any] = {"drop": LayerDrop(ratio=0.5, every=2)}
    model, other = network(), network()
    with parameter_server(boxes, model, **options) as ps:
        state = ps.state_dict()
        before = weights(model)
        state["model"] = {name: value + 1 for name, value in state["model"].items()}
        given = {**state, **wrong}
        if isinstance(wrong.get("model"), dict):
            given["model"] = state["model"] | wrong["model"]
        with pytest.raises(error, match=said):
            ps.load_state_dict({key: one for key, one in given.items() if one is not None})
        assert_equal(weights(model), before)
        with parameter_server(boxes, other, **options):
            assert_equal(weights(other), before)
        ps.load_state_dict(state)
        assert_equal(weights(model), state["model"])


def test_a_checkpoint_that_is_no_mapping(boxes: Boxes) -> None:
    with (
        parameter_server(boxes, network()) as ps,
        pytest.raises(TypeError, match="a state is a mapping, not list"),
    ):
        ps.load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_checkpoint_that_is_not_finite(boxes: Boxes, bad: float) -> None:
    with parameter_server(boxes, network()) as ps:
        before = ps.state_dict()
        broken = {name: tensor.clone() for name, tensor in before["model"].items()}
        name = next(iter(broken))
        broken[name].view(-1)[0] = bad
        with pytest.raises(ValueError, match=f"the checkpoint's {name} is not finite"):
            ps.load_state_dict(before | {"model": broken})
        for name, tensor in ps.state_dict()["model"].items():
            assert torch.equal(tensor, before["model"][name])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_box_that_is_stopped(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "_LONGEST_WAIT", 5.0)
    with BoxProcess() as box:
        monkeypatch.setenv("HBMCOMM_TOKEN", TOKEN)
        model = network()
        ps = ParameterServer(model, sgd(model.parameters()), box=box.url, overlap=overlap)
        ps.step()
        box.stop()
        try:
            with pytest.raises(smb.OperationTimeout):
                for _ in range(3):
                    backward(model, 0)
                    ps.step()
        finally:
            box.process.send_signal(signal.SIGCONT)
        with suppress(smb.BoxError, RuntimeError):
            ps.close()


def test_a_parameter_that_is_unfrozen(boxes: Boxes) -> None:
    model = network()
    model.first.weight.requires_grad_(False)
    with parameter_server(boxes, model) as ps:
        model.first.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"first\.weight was frozen"):
            ps.step()


# -- masks, and steps of the optimizer alone -----------------------------------------------------


def test_a_mask_of_infinities(boxes: Boxes) -> None:
    """A causal mask has infinities. Their difference is not a number, and must not be a delta."""
    model = network()
    mask = torch.full((3, 3), -math.inf).triu(1)
    model.register_buffer("mask", mask.clone())
    with parameter_server(boxes, model) as ps:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        ps.step()
        ps.pull()
        assert ps.stats()["refused"] == 0
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert not torch.equal(parameter.detach(), old)
        assert torch.equal(model.get_buffer("mask"), mask)


def test_steps_of_the_optimizer_alone(boxes: Boxes) -> None:
    model = network()
    optimizer = sgd(model.parameters())
    with boxes.connected() as connections:
        ps = ParameterServer(model, optimizer, box=connections)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) under a parameter server"):
            optimizer.step()
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.detach(), old)
        ps.step()
        ps.close()
        optimizer.step()  # allowed after close()


def test_a_dropped_server_leaves_the_optimizer_free() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)
    steps = OwnSteps(optimizer)
    with pytest.raises(RuntimeError, match="under a parameter server"):
        optimizer.step()
    del steps
    optimizer.step()
