"""Checkpoints of OuterSteps over boxes, wrong arguments, and boxes that end."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import seeds
from harness.box_process import TOKEN, BoxProcess
from harness.data import assert_same
from harness.outer_boxes import BoxWorker, workers
from harness.outer_steps import Counting, adam, inner_step, net
from harness.ps_workers import Boxes, serving, together
from torch import nn

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb

pytestmark = pytest.mark.usefixtures("nothing_left", "many_shards")


# -- checkpoints ---------------------------------------------------------------------------------


def trained(found: list[BoxWorker], inner: list[Any], steps: range) -> None:
    """Let the workers take these steps, in an order that depends on the step alone."""
    for step in steps:
        order = [0, 1] if step % 3 else [1, 0]
        for index in order:
            inner_step(found[index].model, inner[index], 5, index, step)
            found[index].outer.step()
            with found[index].outer.weights():
                pass  # waits for an exchange in the thread, so that the order is known


def file_of(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def loaded(found: list[BoxWorker], states: list[Any]) -> None:
    """Let all workers load, each in a thread of its own, because they wait for one another."""

    def load(index: int, barrier: threading.Barrier) -> None:
        found[index].outer.load_state_dict(states[index])

    together(len(found), load)


@contextmanager
def pair(boxes: Boxes, *models: nn.Module, **options: Any) -> Iterator[list[BoxWorker]]:
    """Yield two workers that wait for each other when they join, and when they load."""

    def join(index: int, barrier: threading.Barrier) -> BoxWorker:
        return BoxWorker(boxes, models[index] if models else None, workers=2, **options)

    found = together(2, join)
    try:
        yield found
    finally:
        for one in found:
            one.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay": 1},
        {"fragments": 2},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [8, 9])
def test_resumed_training_continues_alike(transport: str, options: dict[str, Any], at: int) -> None:
    """It has the same bits, also with another number of boxes."""
    settings = {"every": 4, "outer_lr": 0.7, "momentum": 0.9} | options
    kind = torch.float32 if "dtype" in options else torch.float64
    models = [net(kind) for _ in range(2)]
    inner = [adam(model) for model in models]
    with serving(transport) as boxes, workers(boxes, 2, *models, **settings) as found:
        trained(found, inner, range(at))
        files = [
            file_of((one.outer.state_dict(), stepper.state_dict()))
            for one, stepper in zip(found, inner, strict=True)
        ]
        trained(found, inner, range(at, at + 9))
        expected = [(one.inner, one.weights, one.outer.stats()) for one in found]

    again = [net(kind) for _ in range(2)]
    with torch.no_grad():
        next(again[0].parameters()).add_(1)
    others = [adam(model) for model in again]
    with serving(transport, 2) as boxes, pair(boxes, *again, **settings) as found:
        states = []
        for file, stepper in zip(files, others, strict=True):
            state, optimizer = torch.load(file)
            stepper.load_state_dict(optimizer)
            states.append(state)
        loaded(found, states)
        trained(found, others, range(at, at + 9))
        for one, (model, outer, stats) in zip(found, expected, strict=True):
            assert_same(one.inner, model, "the inner weights")
            assert_same(one.weights, outer, "the outer weights")
            assert one.outer.stats() | {"received_bytes": 0} == stats | {"received_bytes": 0}


def test_a_worker_without_a_state_takes_the_outer_weights(boxes: Boxes) -> None:
    with workers(boxes, 1) as (one,):
        one.move(4)
        one.outer.meet()
        one.move(1)
        state = one.outer.state_dict()
    with serving(boxes.transport) as fresh, pair(fresh) as found:
        loaded(found, [None, state])
        assert found[0].inner.tolist() == [4, 4, 4]
        assert found[1].inner.tolist() == [5, 5, 5]
        found[1].outer.meet()
        assert found[0].weights.tolist() == [4.5, 4.5, 4.5]


def test_one_worker_resumes_a_training_of_two(boxes: Boxes) -> None:
    """The steps of the other worker since its last arrival are lost."""
    with pair(boxes) as found:
        for one in found:
            one.move(4)
            one.outer.meet()  # moves the outer weights by the half of 4
            one.move(1)
        states = [one.outer.state_dict() for one in found]
    with serving(boxes.transport) as fresh, workers(fresh, 1) as (alone,):
        alone.outer.load_state_dict(states[1])
        assert alone.weights.tolist() == [4, 4, 4]
        assert alone.inner.tolist() == [5, 5, 5]
        alone.outer.meet()
        assert alone.weights.tolist() == [5, 5, 5]


def test_workers_without_a_state_raise(boxes: Boxes) -> None:
    with pair(boxes) as found, pytest.raises(ValueError, match="None on every worker"):
        loaded(found, [None, None])


def test_a_state_that_comes_late_gives_its_momentum_alone(boxes: Boxes) -> None:
    """Its unsent steps might be in the outer weights already."""
    options: dict[str, Any] = {"momentum": 0.5}
    with workers(boxes, 1, **options) as (one,):
        one.move(4)
        one.outer.meet()  # 4, and 2 for the momentum
        one.move(8)
        state = one.outer.state_dict()
        late = BoxWorker(boxes, **options)
        late.outer.load_state_dict(state)
        assert late.inner.tolist() == [6, 6, 6]
        assert late.outer.stats()["meetings"] == 1
        late.outer.meet()  # a delta of 0, and a momentum of 2, of two workers
        assert late.inner.tolist() == [6.5, 6.5, 6.5]
        with pytest.raises(RuntimeError, match="loaded once, and before the first step"):
            late.outer.load_state_dict(state)
        late.close()


def test_a_state_that_does_not_fit_is_refused(boxes: Boxes) -> None:
    with workers(boxes, 1) as (one,):
        good = one.outer.state_dict()
        infinite = [torch.full_like(values, math.inf) for values in good["outer"]]
        bad: list[tuple[Any, type[Exception], str]] = [
            ([], TypeError, "a state is a mapping or None, not list"),
            ({"steps": 1}, ValueError, "lacks boxes, fragment, .* of OuterSteps over boxes"),
            (good | {"tensors": []}, ValueError, "another model: they differ in parameter weight"),
            (good | {"outer": infinite}, ValueError, "not finite .* in parameter weight"),
        ]
        for state, kind, text in bad:
            with pytest.raises(kind, match=text):
                one.outer.load_state_dict(state)
            assert one.inner.tolist() == one.weights.tolist() == [0, 0, 0]
        one.outer.load_state_dict(good)


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"every": 0}, ValueError, "every is at least 1, not 0"),
        ({"momentum": 1}, ValueError, r"momentum is in \[0, 1\), not 1"),
        ({"dtype": torch.int8}, ValueError, "over boxes dtype is None or torch.bfloat16"),
        ({"workers": 0}, ValueError, "workers is at least 1, not 0"),
        ({"workers": 1.5}, TypeError, "workers is a whole number, not 1.5"),
        ({"timeout": 0}, ValueError, "timeout is more than 0 seconds, not 0"),
        ({"fragments": 1000, "every": None}, ValueError, "too many for a model that is cut into"),
        ({"box": []}, ValueError, "box names no box"),
        ({"box": 7}, TypeError, "box is an address, a Box, or several of them, not 7"),
        ({"process_group": "a group"}, ValueError, "give box, or process_group, not both"),
    ],
    ids=str,
)
def test_a_wrong_argument_raises_before_anything_moves(
    boxes: Boxes, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    model = net()
    with boxes.connected() as box:
        settings: dict[str, Any] = {"every": 6, "box": box} | options
        with pytest.raises(kind, match=text):
            hbmcomm.OuterSteps(model, adam(model), **settings)
        assert boxes.rows() == []


def lacking() -> tuple[nn.Module, Any]:
    model = net()
    return model, torch.optim.SGD(list(model.parameters())[1:], lr=0.1)


def complex_model() -> tuple[nn.Module, Any]:
    model: Any = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model, adam(model)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lacking, r"OuterSteps: no optimizer that was given has 0\.weight"),
        (complex_model, "parameter extra is torch.complex64"),
    ],
    ids=["optimizer", "complex"],
)
def test_a_model_that_cannot_be_shared_is_refused(
    boxes: Boxes, make: Callable[[], tuple[nn.Module, Any]], text: str
) -> None:
    model, optimizer = make()
    with boxes.connected() as box, pytest.raises(ValueError, match=text):
        hbmcomm.OuterSteps(model, optimizer, every=1, box=box)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"outer_lr": 0.5}, r"rule is DelayedNesterov\(outer_lr=0.5, .* here, and .*=1.0"),
        ({"fragments": 2}, "fragments is 2 here, and 1 there"),
        ({"model": Counting(4)}, r"parameter weight \(float32 \[4\].* here"),
    ],
    ids=["outer_lr", "fragments", "model"],
)
def test_a_worker_that_does_not_fit_is_refused(
    boxes: Boxes, options: dict[str, Any], text: str
) -> None:
    with workers(boxes, 1, Counting(64)), pytest.raises(ValueError, match=text):
        BoxWorker(boxes, **({"model": Counting(64)} | options))


def test_a_parameter_server_of_the_same_name_is_refused(boxes: Boxes) -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with (
        workers(boxes, 1, name="job"),
        boxes.connected() as box,
        pytest.raises(ValueError, match=r"rule is Downpour.* here, and DelayedNesterov"),
    ):
        hbmcomm.ParameterServer(model, optimizer, box=box, name="job")


# -- boxes that end ------------------------------------------------------------------------------


def test_a_box_with_a_store_only_delays(transport: Any, tmp_path: Path) -> None:
    """Every delta counts once, though the box is killed twice."""
    with (
        BoxProcess("--store", str(tmp_path), "--memory", "64MiB") as process,
        smb.connect(process.url, TOKEN, transport=transport) as box,
    ):
        model = Counting(3000)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options: dict[str, Any] = {"every": 1, "outer_lr": 1.0, "momentum": 0.0, "delay": 1}
        outer = hbmcomm.OuterSteps(model, optimizer, box=box, **options)
        generator, taken = seeds.generator("steps"), torch.zeros(3000)
        for step in range(9):
            by = torch.randint(-9, 10, (3000,), generator=generator)
            model.move(optimizer, by)
            taken += by
            outer.step()  # an exchange runs in the thread
            if step in (2, 5):
                process.kill()
                process.start()
        with outer.weights():
            assert_same(model.weight.detach(), taken, "the outer weights")
        outer.close()


def test_a_box_without_a_store_ends_training(transport: Any) -> None:
    with (
        BoxProcess() as process,
        smb.connect(process.url, TOKEN, transport=transport) as box,
    ):
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = hbmcomm.OuterSteps(model, optimizer, every=1, box=box)
        process.kill()
        process.start()
        with pytest.raises(smb.SegmentLost, match="restarted without its data"):
            for _ in range(3):
                outer.step()
        with pytest.raises(RuntimeError, match=r"step\(\) after an error in an exchange"):
            outer.step()
        with pytest.raises(smb.SegmentLost):
            outer.close()
