"""OuterSteps over boxes: workers meet the outer weights one by one, and nothing is lost.

Workers take turns in one thread, so the order of arrivals is known.
"""

from __future__ import annotations

import math
import threading
import warnings
from typing import Any

import pytest
import torch
from harness import seeds
from harness.data import assert_same
from harness.outer_boxes import Arrivals, BoxWorker, workers
from harness.outer_steps import Counting, Serial, adam, inner_step, net, outer_vector, vector
from harness.ps_workers import WAIT_SECONDS, Boxes, serving, together
from torch import nn

import torch_hbmcomm as hbmcomm

pytestmark = pytest.mark.usefixtures("nothing_left", "many_shards")

COUNT = 1500  # elements: six shards


def whole(generator: torch.Generator, times: int) -> torch.Tensor:
    """Return whole numbers that `times` divides."""
    return times * torch.randint(-300, 300, (COUNT,), generator=generator).float()


# -- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay": 3},
        {"fragments": 2, "delay": 1},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "fragments": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_steps_are_neither_lost_nor_doubled(
    boxes: Boxes, count: int, options: dict[str, Any]
) -> None:
    """Each step is in the outer weights, in a rounding error, or waits in the inner weights."""
    draws, generator = seeds.draws("order"), seeds.generator("steps")
    models = [Counting(COUNT) for _ in range(count)]
    with workers(boxes, count, *models, every=4, **options) as found:
        taken = torch.zeros(COUNT)
        for _ in range(12 * count):
            by = whole(generator, count)
            draws.choice(found).move(by)
            taken += by
        waiting = torch.zeros(COUNT)
        for one in found:
            own = one.outer.state_dict()["own"]
            waiting += one.inner - own["base"][0]
            if options.get("dtype"):
                waiting += own["rest"][0]
        assert_same(count * found[0].weights + waiting, taken, "the sum of all steps")
        assert sum(one.outer.stats()["meetings"] for one in found) > 0


def test_close_gives_the_last_steps_and_rounding_errors(boxes: Boxes) -> None:
    generator = seeds.generator("steps")
    with workers(boxes, 2, Counting(COUNT), Counting(COUNT), dtype=torch.bfloat16) as found:
        taken = torch.zeros(COUNT)
        for index in range(5):
            by = whole(generator, 2)
            found[0].move(by)
            taken += by
            if index == 2:
                found[0].outer.meet()
        found[0].outer.close()
        assert_same(found[1].weights, taken / 2, "the outer weights")
        assert_same(found[0].inner, taken / 2, "the weights of the worker that has closed")
        assert_same(found[0].weights, taken / 2, "its outer weights")


def test_the_outer_weights_follow_the_order_of_arrivals(boxes: Boxes) -> None:
    draws, generator = seeds.draws("order"), seeds.generator("steps")
    settings: dict[str, Any] = {"outer_lr": 0.5, "momentum": 0.5}
    models = [Counting(COUNT, torch.float64) for _ in range(2)]
    reference = Arrivals(torch.zeros(COUNT, dtype=torch.float64), 2, **settings)
    with workers(boxes, 2, *models, **settings) as found:
        for _ in range(16):
            index = draws.randrange(2)
            for _ in range(draws.randrange(3)):
                found[index].move(whole(generator, 8))
            reference.arrive(index, found[index].inner)
            found[index].outer.meet()
            assert_same(found[index].inner, reference.outer, "the inner weights")
            assert_same(found[1 - index].weights, reference.outer, "the outer weights")


def test_arrivals_in_turn_add_up_to_a_meeting(boxes: Boxes) -> None:
    """The outer weights are those of SGD with Nesterov momentum, stepped by mean deltas."""
    generator = seeds.generator("steps")
    expected = torch.zeros(COUNT, dtype=torch.float64)
    stepper = torch.optim.SGD([expected], lr=0.5, momentum=0.5, nesterov=True)
    models = [Counting(COUNT, torch.float64) for _ in range(4)]
    with workers(boxes, 4, *models, outer_lr=0.5, momentum=0.5) as found:
        for _ in range(6):
            deltas = [whole(generator, 8).double() for _ in found]
            for one, delta in zip(found, deltas, strict=True):
                one.move(delta)
                one.outer.meet()
            expected.grad = -torch.stack(deltas).mean(0)
            stepper.step()
            assert_same(found[0].weights, expected, "the outer weights")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": 2},
        {"delay": 2},
        {"fragments": 2, "delay": 1},
        {"delay": 3, "alpha": 0.5},
        {"outer_lr": 1.0, "momentum": 0.0},
    ],
    ids=str,
)
def test_one_worker_trains_as_the_serial_algorithm(boxes: Boxes, options: dict[str, Any]) -> None:
    serial = Serial(1, 7, every=4, **options)
    model = net()
    optimizer = adam(model)
    with boxes.connected() as box:
        outer = hbmcomm.OuterSteps(model, optimizer, every=4, box=box, **options)
        for step in range(17):
            inner_step(model, optimizer, 7, 0, step)
            outer.step()
            serial.step()
            near(vector(model), vector(serial.models[0]))
        if not options.get("delay"):
            near(outer_vector(outer, model), serial.outer())
        outer.close()


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_several_boxes_share_the_outer_weights(transport: str) -> None:
    with serving(transport, 2) as boxes, workers(boxes, 2, Counting(COUNT), Counting(COUNT)) as two:
        by = whole(seeds.generator("steps"), 2)
        two[0].move(by)
        two[0].outer.meet()
        assert_same(two[1].weights, by / 2, "the outer weights")


def test_a_step_that_a_scaler_skips_moves_nothing(boxes: Boxes) -> None:
    with workers(boxes, 1, every=3) as (one,):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            one.optimizer.zero_grad()
            scaler.scale(-one.model.weight.sum()).backward()  # a step of plain SGD adds 1
            if step == 1:
                one.model.weight.grad.fill_(math.inf)
            scaler.step(one.optimizer)
            scaler.update()
            one.outer.step()
        assert one.weights.tolist() == one.inner.tolist() == [2, 2, 2]
        assert one.outer.stats()["meetings"] == 1 and one.outer.stats()["refused"] == 0


# -- workers that come late, are slow, or leave --------------------------------------------------


def test_a_late_worker_takes_the_outer_weights(boxes: Boxes) -> None:
    with workers(boxes, 1, every=1) as (first,):
        first.move(3)
        first.move(4)
        late = BoxWorker(boxes, every=1)
        assert late.inner.tolist() == [7, 7, 7]
        late.move(2)  # one of two live workers
        assert first.weights.tolist() == [8, 8, 8]
        late.close()
        first.move(1)  # alone again
        assert first.weights.tolist() == [9, 9, 9]


def test_a_worker_that_does_not_come_holds_no_other(boxes: Boxes) -> None:
    with workers(boxes, 2, every=1) as (slow, fast):
        slow.model.move(slow.optimizer, 2)  # takes a step, and never meets meanwhile
        for _ in range(20):
            fast.move(2)
        assert fast.inner.tolist() == [20, 20, 20]
        slow.outer.step()
        assert slow.inner.tolist() == [21, 21, 21]


def test_each_worker_may_have_a_period_of_its_own(boxes: Boxes) -> None:
    found = [BoxWorker(boxes, every=every) for every in (2, 3)]
    for one in found:
        for _ in range(6):
            one.move(2)
    assert [one.outer.stats()["meetings"] for one in found] == [3, 2]
    assert found[0].weights.tolist() == [12, 12, 12]
    for one in found:
        one.close()


def test_close_waits_for_the_other_workers_on_request(boxes: Boxes) -> None:
    """Workers take different numbers of steps. All get the sum of all steps."""
    meetings = [2, 15]

    def train(index: int, barrier: threading.Barrier) -> list[float]:
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with boxes.connected() as box:
            options: dict[str, Any] = {"every": 1, "outer_lr": 1.0, "momentum": 0.0}
            outer = hbmcomm.OuterSteps(
                model, optimizer, box=box, workers=2, timeout=WAIT_SECONDS, **options
            )
            for _ in range(meetings[index]):
                model.move(optimizer, torch.arange(3.0) == index)
                outer.step()
            outer.close(wait=True)
            found: list[float] = model.weight.detach().tolist()
            return found

    first, second = together(2, train)
    assert first == second
    for moved, most in zip(first, meetings, strict=False):
        assert most / 2 <= moved <= most  # by one or two live workers


def test_a_wait_for_a_worker_that_trains_times_out(boxes: Boxes) -> None:
    with workers(boxes, 1) as (trains,):
        leaves = BoxWorker(boxes, timeout=0.3)
        trains.move(2)
        trains.outer.meet()
        with pytest.raises(TimeoutError, match="the end of workers 0"):
            leaves.outer.close(wait=True)
        assert leaves.inner.tolist() == [1, 1, 1]
        leaves.close()
        assert trains.weights.tolist() == [1, 1, 1]


def test_kept_weights_outlive_the_workers(boxes: Boxes) -> None:
    for before in (0.0, 5.0):
        with workers(boxes, 1, keep=True) as (one,):
            assert one.inner.tolist() == [before] * 3
            one.move(5)


# -- the model -----------------------------------------------------------------------------------


def test_buffers_are_averaged_and_counters_are_not(boxes: Boxes) -> None:
    models: list[Any] = [nn.Sequential(nn.Linear(9, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    with workers(boxes, 2, *models, fragments=2) as found:
        for model, mean in zip(models, (2.0, 6.0), strict=True):
            model[1].running_mean.fill_(mean)
            model[1].num_batches_tracked.fill_(int(mean))
        for one in (*found, found[0]):
            one.outer.meet()
        assert [model[1].running_mean.tolist() for model in models] == [[4, 4], [4, 4]]
        assert [int(model[1].num_batches_tracked) for model in models] == [2, 6]


def test_frozen_parameters_and_masks_are_taken_once(boxes: Boxes) -> None:
    def model(fill: float) -> nn.Module:
        found = nn.Linear(2, 2)
        found.bias.requires_grad_(False).fill_(fill)
        found.register_buffer("mask", torch.full((2,), -math.inf))
        return found

    with workers(boxes, 2, model(1), model(2)) as found:
        assert found[1].model.bias.tolist() == [1, 1]
        found[1].outer.meet()
        assert found[1].outer.stats()["refused"] == 0
        assert found[1].model.mask.tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("delay", [0, 2])
def test_a_block_has_the_outer_weights(boxes: Boxes, delay: int) -> None:
    with workers(boxes, 2, every=2, delay=delay) as (one, other):
        for _ in range(3):
            one.move(2)
        other.model.move(other.optimizer, 1)
        for each, inner in ((one, 4 if delay == 0 else 6), (other, 1)):
            with each.outer.weights():
                assert each.inner.tolist() == [2, 2, 2]
                with pytest.raises(RuntimeError, match=r"step\(\) within weights\(\)"):
                    each.outer.step()
            assert each.inner.tolist() == [inner] * 3
        one.outer.step()  # lands, and meets again
        assert one.inner.tolist() == [3 if delay == 0 else 4] * 3


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_delta_that_is_not_finite_is_refused(boxes: Boxes, bad: float, delay: int) -> None:
    """It is counted, and changes neither the outer weights nor the momentum."""
    with workers(boxes, 2, every=2, delay=delay, momentum=0.5) as (one, other):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                for by in (2.0, bad):
                    one.move(by)
        (warning,) = (one for one in caught if one.category is RuntimeWarning)
        assert "worker 0: the delta of weight is not finite: it was not sent" in str(
            warning.message
        )
        assert warning.filename == BoxWorker.move.__code__.co_filename
        assert one.outer.stats()["refused"] == 2 and other.outer.stats()["refused"] == 0
        assert one.inner.tolist() == [0, 0, 0] == other.weights.tolist()
        for _ in range(2):
            one.move(2)
        assert one.weights.tolist() == [3, 3, 3]  # 4 / 2, and half of it for the momentum


def test_a_model_that_has_changed_is_named(boxes: Boxes) -> None:
    with workers(boxes, 1, every=1) as (one,):
        weight = one.model.weight.detach()
        one.model.weight = nn.Parameter(torch.zeros(4))
        with pytest.raises(RuntimeError, match=r"the model has .*\[4\].* now, and had .*\[3\]"):
            one.outer.step()
        one.model.weight = nn.Parameter(weight + 1)
        one.outer.step()
        assert one.weights.tolist() == [1, 1, 1]
