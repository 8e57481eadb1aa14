"""The asynchronous parameter server when workers or boxes die, and when what it is given is bad."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from box_process import TOKEN, BoxProcess
from ps_process import Task, WorkerProcess
from ps_task import accuracy, alone, assert_near, backward, network, sgd, weights
from ps_workers import Boxes, parameter_server, serving, together
from torch import nn

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server import Downpour, ParameterServer
from torch_hbmcomm.parameter_server.roster import Roster

pytestmark = pytest.mark.usefixtures("nothing_left")

TRANSPORTS = ["shm", "tcp"]
LEASE = 1.0  # seconds


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def boxes(transport: Any) -> Iterator[Boxes]:
    with serving(transport) as served:
        yield served


# -- workers that die ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp"])
def test_three_of_four_workers_finish(transport: Any, tmp_path: Path) -> None:
    """Each under an agent of its own, torchrun; the staleness is bounded."""
    steps, killed = 60, 2
    with BoxProcess("--lease", str(LEASE)) as box, ExitStack() as stack:
        workers = [
            stack.enter_context(
                WorkerProcess(
                    Task(
                        box.url,
                        transport,
                        worker,
                        workers=4,
                        steps=steps,
                        pause=0.01,
                        result=str(tmp_path / str(worker)),
                        options={"staleness": 3},
                    ),
                    agent=True,
                )
            )
            for worker in range(4)
        ]
        workers[killed].until_step(10)
        workers[killed].signal(signal.SIGKILL)
        assert workers[killed].finish() != 0
        for worker in range(4):
            if worker != killed:
                assert workers[worker].finish() == 0, workers[worker].errors
    for worker in range(4):
        if worker != killed:
            found = torch.load(tmp_path / str(worker))
            assert found["stats"]["steps"] == steps
            model = network()
            before = accuracy(model)
            model.load_state_dict(found["model"])
            assert accuracy(model) > max(0.8, before)


def test_what_a_killed_worker_had_pushed_counts(transport: Any, tmp_path: Path) -> None:
    """It joins late, by a plain process start, and dies between two exchanges."""
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
        with WorkerProcess(task, agent=False) as late:
            late.until_step(1)
            assert ps.stats()["workers"] == 2
            late.signal(signal.SIGKILL)
            assert late.finish() == -signal.SIGKILL
        assert ps.stats()["workers"] == 2  # nobody has noticed
        before = {name: value.clone() for name, value in kept.state_dict().items()}
        ps.pull()
        assert not torch.equal(kept.first.weight, before["first.weight"])
        until(lambda: len(box.stats()["segment_table"]) == 5)  # its slot and its life have gone
        deadline = time.monotonic() + 10
        while ps.stats()["workers"] == 2:
            assert time.monotonic() < deadline
            ps.step()
            time.sleep(0.1)


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


# -- boxes that die ------------------------------------------------------------------------------


def test_a_box_that_is_killed_holds_training_up_and_no_more(transport: Any, tmp_path: Path) -> None:
    """Without staleness it ends as training in one process does."""
    steps, count = 30, 2
    store = ("--store", str(tmp_path / "store"), "--memory", "64MiB")
    with BoxProcess(*store) as box, ExitStack() as stack:
        workers = [
            stack.enter_context(
                WorkerProcess(
                    Task(
                        box.url,
                        transport,
                        worker,
                        workers=count,
                        steps=steps,
                        pause=0.02,
                        result=str(tmp_path / str(worker)),
                        options={"staleness": 0},
                    ),
                    agent=transport == "tcp",  # once is enough: a start takes seconds
                )
            )
            for worker in range(count)
        ]
        workers[0].until_step(10)
        box.kill()
        time.sleep(1)
        assert [worker.running for worker in workers] == [True] * count
        box.start()
        for worker in workers:
            assert worker.finish() == 0, worker.errors
    expected = alone(sgd, steps)
    for each in range(count):
        assert_near(torch.load(tmp_path / str(each))["model"], expected)


def test_every_push_counts_once_though_the_box_is_killed(transport: Any, tmp_path: Path) -> None:
    steps, count, cells = 60, 3, 20_000
    with BoxProcess("--store", str(tmp_path), "--memory", "64MiB") as process:
        begun = threading.Event()

        def train(worker: int, barrier: threading.Barrier) -> Any:
            model = nn.Linear(cells, 1, bias=False)
            with torch.no_grad():
                model.weight.zero_()
            total = torch.zeros_like(model.weight)
            generator = torch.Generator().manual_seed(worker)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with (
                smb.connect(process.url, TOKEN, transport=transport) as box,
                ParameterServer(
                    model, optimizer, box=box, rule=Downpour("sum"), workers=count
                ) as ps,
            ):
                for _ in range(steps):
                    begun.set()
                    gradient = torch.randint(-3, 4, model.weight.shape, generator=generator)
                    model.weight.grad = gradient.float()
                    total += gradient
                    ps.step()
                    time.sleep(0.02)
                ps.pull()
                barrier.wait()
                ps.pull()
                return model.weight.detach().clone(), total

        def kill_twice() -> None:
            begun.wait(20)
            for _ in range(2):
                time.sleep(0.3)
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


# -- bad input -----------------------------------------------------------------------------------


def first_and_second(boxes: Boxes, models: list[nn.Module], options: list[dict[str, Any]]) -> None:
    """The second comes while the first is there."""
    with (
        parameter_server(boxes, models[0], **options[0]),
        boxes.connected() as connections,
    ):
        before = len(boxes.rows())
        with parameter_server_of(models[1], connections, **options[1]):
            pass
        assert len(boxes.rows()) == before


def parameter_server_of(model: nn.Module, box: Any, **options: Any) -> ParameterServer:
    return ParameterServer(model, sgd(model.parameters()), box=box, timeout=5, **options)


def test_models_that_differ(boxes: Boxes) -> None:
    first, second = network(), network()
    second.second = nn.Linear(40, 4)
    with pytest.raises(ValueError) as raised:
        first_and_second(boxes, [first, second], [{}, {}])
    assert "does not fit the others of 'parameter-server'" in str(raised.value)
    assert "parameter second.weight (float32 [4, 40]" in str(raised.value)
    assert "[3, 40]" in str(raised.value)
    second.second = nn.Linear(40, 3, bias=False)
    with pytest.raises(ValueError, match="3 tensors here, 4 there"):
        first_and_second(boxes, [first, second], [{}, {}])


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"staleness": 2}, {"staleness": 1}, "staleness is 1 here, and 2 there"),
        ({"rule": "downpour"}, {"rule": "easgd"}, "Elastic"),
        ({"rule": Downpour("sum")}, {"rule": "downpour"}, "'mean'"),
    ],
)
def test_terms_that_differ(
    boxes: Boxes, ours: dict[str, Any], theirs: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="does not fit the others") as raised:
        first_and_second(boxes, [network(), network()], [ours, theirs])
    assert said in str(raised.value)


def test_a_box_that_is_too_small(transport: Any) -> None:
    model = nn.Linear(1 << 20, 4)
    with serving(transport, memory="16MiB") as boxes, boxes.connected() as connections:
        with pytest.raises(MemoryError) as raised:
            parameter_server_of(model, connections)
        assert "is too small: it has to hold" in str(raised.value)
        assert f"{model.weight.nbytes + 64} bytes for each worker" in str(raised.value)
        assert boxes.rows() == []


def test_a_token_that_is_wrong(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HBMCOMM_TOKEN", "another")
    with pytest.raises(smb.AccessDenied):
        parameter_server_of(network(), boxes.servers[0].url)
    monkeypatch.setenv("HBMCOMM_TOKEN", TOKEN)
    with parameter_server_of(network(), boxes.servers[0].url) as ps:
        ps.step()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"staleness": -1}, "staleness is not negative: -1"),
        ({"staleness": 0, "overlap": True}, "staleness=0 an exchange cannot overlap"),
        ({"push_every": 0}, "push_every is at least 1"),
        ({"workers": 0}, "workers is at least 1"),
        ({"transfer": torch.float16}, "transfer is None or torch.bfloat16"),
        ({"rule": "upward"}, "rule 'upward' is none of downpour, easgd"),
        ({"mode": "neither"}, 'mode is "async" or "sync", not \'neither\''),
        ({"buffers": "none"}, "buffers is"),
        ({"dedicated": True}, "every worker has an optimizer"),
        ({"mode": "sync"}, 'belong to mode="async"'),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    with serving("shm") as boxes, boxes.connected() as connections:
        with pytest.raises(ValueError) as raised:
            parameter_server_of(network(), connections, **options)
        assert said in str(raised.value)
        assert boxes.rows() == []


def test_no_box_and_no_group() -> None:
    with pytest.raises(ValueError, match="there is no process group: give box"):
        parameter_server_of(network(), None)
    with pytest.raises(ValueError, match="box names no box"):
        parameter_server_of(network(), [])


class One(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.odd = nn.Parameter(tensor)


@pytest.mark.parametrize(
    ("tensor", "error", "said"),
    [
        (torch.zeros(3, device="meta"), TypeError, "odd is torch.strided on meta"),
        (torch.zeros(6)[::2], ValueError, "odd of shape [3] has strides [2]"),
        (torch.zeros(1).expand(4), ValueError, "odd of shape [4] has strides [0]"),
        (torch.zeros(3, dtype=torch.complex64), ValueError, "odd (complex64 [3]"),
    ],
)
def test_tensors_that_no_box_can_hold(
    tensor: torch.Tensor, error: type[Exception], said: str
) -> None:
    with serving("shm") as boxes, boxes.connected() as connections:
        with pytest.raises(error) as raised:
            parameter_server_of(One(tensor), connections)
        assert said in str(raised.value)


def test_nothing_to_train() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with (
        serving("shm") as boxes,
        boxes.connected() as connections,
        pytest.raises(ValueError, match="no parameter that requires a gradient"),
    ):
        parameter_server_of(model, connections)


def test_an_optimizer_of_another_model() -> None:
    optimizer = sgd([*network().parameters()])
    with pytest.raises(ValueError, match="a parameter that is not the model's"):
        ParameterServer(network(), optimizer, box="smb://127.0.0.1:1")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", ["downpour", "easgd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite(boxes: Boxes, rule: str, overlap: bool, bad: float) -> None:
    model = network()
    with parameter_server(
        boxes, model, sgd(model.parameters()), rule=rule, overlap=overlap, staleness=2
    ) as ps:
        for step in range(10):
            backward(model, step)
            if step == 4:
                assert model.second.bias.grad is not None
                model.second.bias.grad[1] = bad
                with pytest.warns(RuntimeWarning, match="the update of second.bias in step 5") as w:
                    ps.step()
                assert w[0].filename == __file__
            else:
                ps.step()
        ps.pull()
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        assert ps.stats()["refused"] == 1
        assert ps.stats()["steps"] == 10
    assert accuracy(model) > 0.6


def test_large_updates_are_finite(boxes: Boxes) -> None:
    model = One(torch.zeros(100))
    with parameter_server(boxes, model) as ps, warnings.catch_warnings():
        warnings.simplefilter("error")
        model.odd.grad = torch.full((100,), 3e38)  # their sum is not
        ps.step()
        ps.pull()
    assert model.odd.tolist() == torch.full((100,), -3e38).tolist()


def test_nobody_else_comes() -> None:
    with (
        serving("shm") as boxes,
        boxes.connected() as connections,
        pytest.raises(TimeoutError, match=r"for 2 workers \(1 have joined\)"),
    ):
        ParameterServer(
            (model := network()), sgd(model.parameters()), box=connections, workers=2, timeout=0.2
        )


def test_a_worker_that_lags_is_named(boxes: Boxes) -> None:
    slow, fast = network(), network()
    options: dict[str, Any] = {"staleness": 1, "overlap": False}
    with (
        parameter_server(boxes, slow, **options),
        parameter_server(boxes, fast, **options, timeout=0.5) as ps,
    ):
        ps.step()
        with pytest.raises(TimeoutError, match=r"exchange 1 of workers 0 \(pid \d+ on "):
            ps.step()


def test_the_first_worker_fails_and_the_second_begins(boxes: Boxes) -> None:
    """It dies before it has written the weights."""
    with boxes.connected() as connections:
        roster = Roster(connections[0], "parameter-server", 5.0, temporary=True)
        assert roster.leads()
    model = network()
    with parameter_server(boxes, model) as ps:
        ps.step()
        assert ps.stats()["workers"] == 1


# -- what comes too late -------------------------------------------------------------------------


def test_close_after_an_error_sends_nothing_twice(boxes: Boxes) -> None:
    """The push was done when the wait for a worker that does nothing timed out."""
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


def test_a_second_checkpoint(boxes: Boxes) -> None:
    with parameter_server(boxes, network()) as ps:
        state = ps.state_dict()
        ps.load_state_dict(state)
        with pytest.raises(RuntimeError, match="loaded once"):
            ps.load_state_dict(state)


def test_a_parameter_that_is_unfrozen(boxes: Boxes) -> None:
    model = network()
    model.first.weight.requires_grad_(False)
    with parameter_server(boxes, model) as ps:
        model.first.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"first\.weight was frozen"):
            ps.step()
