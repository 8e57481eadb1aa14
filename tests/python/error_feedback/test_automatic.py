"""ratio="auto": ranks choose together, and nothing is lost when the way changes."""

from __future__ import annotations

import copy
import logging
import math
import random
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.automatic import EXACT, KINDS, choosing, scripted, turning
from harness.data import assert_same
from harness.hooks import hooked, low_rank
from harness.layer_drop_ddp import SHAPES, Weighted, residuals_of, wrapped
from harness.low_rank import backward, normal
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.error_feedback import automatic
from torch_hbmcomm.error_feedback.automatic import Step, Way

pytestmark = pytest.mark.ranks(1, 2, 4)

OFF, NARROW, ENCODED = Step(Way.OFF), Step(Way.NARROW), Step(Way.ENCODED)
GIVEN_UP = Step(Way.ENCODED, allowance=-1.0)  # the hook takes no negative time
NARROW_GIVEN_UP = Step(Way.NARROW, allowance=-1.0)

SCRIPTS = {
    "on and off": [OFF, ENCODED, ENCODED, OFF],
    "on at once": [ENCODED, ENCODED, ENCODED],
    "bfloat16 between": [OFF, NARROW, ENCODED, NARROW, OFF, ENCODED],
    "bfloat16 after waiting": [OFF, ENCODED, ENCODED, NARROW, ENCODED, ENCODED, OFF],
    "given up": [OFF, GIVEN_UP, GIVEN_UP, ENCODED, NARROW_GIVEN_UP],
}
WAITING = ("on and off", "on at once", "bfloat16 after waiting")
"""Scripts in which gradients wait, also with layers, whose first step sends everything."""


def small(context: Context, rank: int, step: int) -> list[torch.Tensor]:
    """Return small whole numbers, whose sums over the steps and ranks bfloat16 holds exactly.

    No gradient is all zeros, because such a gradient counts as unused.
    """
    draw = torch.Generator().manual_seed(context.seed + 1000 * step + rank)
    found = [torch.randint(-2, 3, shape, generator=draw) for shape in SHAPES]
    for gradient in found:
        gradient.view(-1)[0] = 1
    return [gradient * float(context.size) for gradient in found]


class Ledger:
    """Adds up the gradients that a rank computes, and those that all ranks apply."""

    def __init__(self, context: Context) -> None:
        self._size = context.size
        self._computed = [torch.zeros(shape) for shape in SHAPES]
        self._applied = [torch.zeros(shape) for shape in SHAPES]

    def step(self, ddp: DistributedDataParallel, own: list[Any]) -> None:
        ddp.zero_grad()
        ddp(*own).backward()
        for index, parameter in enumerate(ddp.parameters()):
            if own[index] is not None:
                self._computed[index] += own[index]
            if parameter.grad is not None:
                self._applied[index] += parameter.grad * self._size

    def check(self, state: Any) -> None:
        """Check that applied gradients and residuals add up to the computed ones, exactly."""
        for index, residual in enumerate(residuals_of(state)):
            both = torch.stack([residual, self._computed[index]])
            dist.all_reduce(both)
            assert_same(self._applied[index] + both[0], both[1], f"parameter {index}")


def switch(context: Context, kind: str, script: str, options: Any) -> None:
    with scripted(SCRIPTS[script]):
        ddp, state = choosing(Weighted(), kind, ddp_options=options)
    ledger = Ledger(context)
    waited = 0.0
    for step in range(len(SCRIPTS[script])):
        ledger.step(ddp, small(context, context.rank, step))
        ledger.check(state)
        waited = max(waited, state.summary()["cache_norm"])
    assert waited > 0 or script not in WAITING
    assert state.summary()["chosen_ratio"] == -1
    ledger.step(ddp, small(context, context.rank, 100))
    ledger.check(state)
    counts = state.summary()
    assert counts["chosen_ratio"] == 0 and counts["plain_step_seconds"] == 1
    assert counts["cache_norm"] == 0, "the first step that is off sends what waits"
    assert counts["waiting"] == 0
    before = counts["sent_bytes"]
    ledger.step(ddp, small(context, context.rank, 101))
    assert state.summary()["sent_bytes"] - before == 4 * sum(map(math.prod, SHAPES))
    assert not state._residuals._rooms, "a hook that is off holds no memory"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 25}])
@pytest.mark.parametrize("kind", EXACT)
def test_nothing_is_lost_when_the_way_changes(
    pool: Pool, kind: str, script: str, options: Any
) -> None:
    pool.run(switch, kind, script, options)


def leave_unused(context: Context) -> None:
    """The residual of an unused parameter stays until the parameter is used again."""
    with scripted([ENCODED, ENCODED, OFF, NARROW, OFF, OFF]):
        ddp, state = turning(Weighted(), ddp_options={"find_unused_parameters": True})
    ledger = Ledger(context)
    for step in range(7):
        own: list[Any] = small(context, context.rank, step)
        if step in (2, 3, 4) or (step == 5 and context.rank > 0):
            own[3] = own[4] = None
        ledger.step(ddp, own)
        ledger.check(state)
        waiting = {name for name, one in state.state_dict()["caches"].items() if one.any()}
        if 2 <= step < 5:
            assert waiting and waiting <= {"all.3", "all.4"}
    assert state.summary()["cache_norm"] == 0


def test_an_unused_parameter_waits_while_the_hook_is_off(pool: Pool) -> None:
    pool.run(leave_unused)


def approximate(context: Context) -> None:
    """Switch low_rank_hook on and off: only its products' rounding errors are lost."""
    with scripted([OFF, ENCODED, ENCODED, GIVEN_UP, ENCODED, OFF, ENCODED]):
        ddp = wrapped(Weighted())
        state = low_rank(ddp, ratio="auto")
    applied = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    computed = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    sizes = torch.zeros(len(SHAPES), dtype=torch.float64)
    waited = 0.0
    for step in range(8):
        own = normal(context, context.rank, step)
        for index, came in enumerate(backward(ddp, own)):
            computed[index] += own[index]
            applied[index] += came.double() * context.size
            sizes[index] += own[index].norm()
        waited = max(waited, state.summary()["cache_norm"])
    assert waited > 0 and state.summary()["cache_norm"] == 0
    dist.all_reduce(sizes)
    for index, (gone, whole) in enumerate(zip(applied, computed, strict=True)):
        dist.all_reduce(whole)
        assert (gone - whole).norm() <= 1e-5 * sizes[index], f"parameter {index}"


def test_low_rank_switches_without_loss(pool: Pool) -> None:
    pool.run(approximate)


def train_plainly(context: Context, kind: str, options: Any) -> None:
    """Check that a hook that is off computes the same bits as plain DDP."""
    with scripted([OFF, OFF]):
        off, state = choosing(Weighted(), kind, ddp_options=options)
    plain = wrapped(Weighted(), **options)
    for step in range(5):
        own = normal(context, context.rank, step)
        for index, (ours, theirs) in enumerate(
            zip(backward(off, own), backward(plain, own), strict=True)
        ):
            assert_same(ours, theirs, f"step {step}, parameter {index}")
    counts = state.summary()
    assert counts["sent_bytes"] == counts["gradient_bytes"] and counts["steps"] == 5


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_is_off_does_what_ddp_does(pool: Pool, kind: str, options: Any) -> None:
    pool.run(train_plainly, kind, options)


def choose_together(context: Context, kind: str) -> None:
    """Give each rank a clock of its own, whose steps are random."""
    draw = random.Random(context.seed + context.rank)
    now = 1e6 * context.rank

    def clock() -> float:
        nonlocal now
        now += draw.choice([1e-6, 1e-3, 0.1, 2.0])
        return now

    ways: list[str] = []
    with (
        mock.patch.object(automatic, "_clock", clock),
        mock.patch.object(automatic, "STEPS_HELD", 3),
    ):
        ddp, state = choosing(Weighted(), kind)
        for step in range(60):
            for gradient in backward(ddp, normal(context, context.rank, step)):
                of_all = [torch.empty_like(gradient) for _ in range(context.size)]
                dist.all_gather(of_all, gradient)
                for other in of_all:
                    assert_same(other, gradient, f"step {step}")
            assert state._automatic is not None
            ways.append(f"{state._automatic.way} {state._automatic.gave_up}")
    found: list[Any] = [None] * context.size
    dist.all_gather_object(found, (ways, state.summary()["plain_step_seconds"]))
    assert all(one == found[0] for one in found)


@pytest.mark.filterwarnings("ignore:the loss is at risk:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_choose_together_by_different_clocks(pool: Pool, kind: str) -> None:
    pool.run(choose_together, kind)


def measure(context: Context, kind: str) -> None:
    """Let real times decide. All ranks choose the same, within 40 steps."""
    ddp, state = choosing(Weighted(), kind, warmup=3)
    for step in range(40):
        backward(ddp, normal(context, context.rank, step))
        if step < 3:
            assert state.summary()["sent_share"] == 1
    counts = state.summary()
    assert counts["chosen_ratio"] in (0, 0.5, 0.9)
    assert counts["plain_wait_seconds"] >= 0
    assert counts["plain_step_seconds"] > 0
    assert 0 < counts["chosen_step_seconds"] <= counts["plain_step_seconds"]
    found: list[Any] = [None] * context.size
    dist.all_gather_object(found, counts["chosen_ratio"])
    assert len(set(found)) == 1


@pytest.mark.filterwarnings("ignore:the loss is at risk:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_by_real_times(pool: Pool, kind: str) -> None:
    pool.run(measure, kind)


def log_choice(context: Context, kind: str) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = (hbmcomm.LowRankState if kind == "low_rank" else hbmcomm.LayerDropState).logger
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with mock.patch.object(automatic, "STEPS_HELD", 2), scripted([OFF], Way.NARROW):
            ddp, _ = choosing(Weighted(), kind)
            for step in range(9):
                backward(ddp, normal(context, context.rank, step))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len(lines) == (context.rank == 0), "the same choice is not reported again"
    for line in lines:
        assert "sends everything as bfloat16" in line and "plain 1000.0 ms" in line


@pytest.mark.parametrize("kind", ["low_rank", "bytes"])
def test_rank_0_reports_the_choice_once(pool: Pool, kind: str) -> None:
    pool.run(log_choice, kind)


def resume(context: Context, kind: str) -> None:
    """A checkpoint has the residuals. The state that loads it measures again."""
    with scripted([ENCODED, ENCODED], Way.ENCODED):
        ddp, state = choosing(Weighted(), kind)
    ledger = Ledger(context)
    for step in range(4):
        ledger.step(ddp, small(context, context.rank, step))
    saved = copy.deepcopy(state.state_dict())
    assert state.summary()["chosen_ratio"] == 0.9 and saved["caches"]
    with scripted([OFF, ENCODED]):
        other, resumed = choosing(Weighted(), kind)
        resumed.load_state_dict(saved)
    assert resumed.summary()["chosen_ratio"] == -1
    again = resumed.state_dict()
    assert again["statistics"] == saved["statistics"]
    assert again["caches"].keys() == saved["caches"].keys()
    ledger.check(resumed)
    for step in range(4, 8):
        ledger.step(other, small(context, context.rank, step))
        ledger.check(resumed)
        if step == 4:
            assert resumed.summary()["waiting"] == 0, "a step that is off sends what waited"
    assert resumed.summary()["chosen_ratio"] == 0


@pytest.mark.parametrize("kind", EXACT)
def test_a_resumed_state_measures_again(pool: Pool, kind: str) -> None:
    pool.run(resume, kind)


def resume_on_more_ranks(context: Context) -> None:
    """Load the residuals of one rank on rank 0 alone. All ranks still send the same parameters."""
    alone = wrapped(Weighted(), process_group=dist.new_group([0])) if context.rank == 0 else None
    if context.rank > 0:
        dist.new_group([0])
    saved: list[Any] = [None]
    if alone is not None:
        state = low_rank(alone, ratio=0.8)
        backward(alone, small(context, 0, 0))
        saved = [state.state_dict()]
        assert saved[0]["caches"]
    dist.broadcast_object_list(saved)
    with scripted([OFF]):
        ddp = wrapped(Weighted())
        resumed = low_rank(ddp, ratio="auto")
        resumed.load_state_dict(saved)
    own = small(context, context.rank, 1)
    for name, came, gradient in zip(
        [f"all.{index}" for index in range(len(SHAPES))], backward(ddp, own), own, strict=True
    ):
        expected = gradient.double()
        dist.all_reduce(expected)
        if name in saved[0]["caches"]:
            expected += saved[0]["caches"][name]
        torch.testing.assert_close(came.double() * context.size, expected, rtol=0, atol=1e-3)
    assert resumed.summary()["cache_norm"] == 0


def test_a_checkpoint_of_fewer_ranks_that_turns_off(pool: Pool) -> None:
    pool.run(resume_on_more_ranks)


def scale_losses(context: Context, kind: str) -> None:
    """Steps that the scaler skips change nothing, in whichever way they go."""
    script = [OFF, ENCODED, ENCODED, GIVEN_UP, OFF, NARROW, OFF, ENCODED, OFF, OFF]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=100)
    with scripted(script):
        ddp, state = choosing(Weighted(), kind, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
    computed = [torch.zeros(shape) for shape in SHAPES]
    broken = {2: 3, 3: 7, 4: 5, 5: 0, 8: 1}  # by step: the parameter whose gradient is infinite
    for step in range(len(script) + 2):
        own = small(context, context.rank, step)
        if step in broken:
            if context.rank == step % context.size:
                own[broken[step]].view(-1)[0] = float("inf")
        else:
            for index in range(len(SHAPES)):
                computed[index] += own[index]
        optimizer.zero_grad()
        scaler.scale(ddp(*own)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert state.summary()["cache_norm"] == 0
    for index, (parameter, own_sum) in enumerate(zip(ddp.parameters(), computed, strict=True)):
        dist.all_reduce(own_sum)
        assert_same(parameter.detach() * context.size, 0 - own_sum, f"parameter {index}")


@pytest.mark.parametrize("kind", ["turns", "bytes", "paper"])
def test_a_scaler_that_skips_steps(pool: Pool, kind: str) -> None:
    pool.run(scale_losses, kind)


def break_one(context: Context, script: list[Step]) -> None:
    """Check that a NaN is in .grad on all ranks, and not in the residuals."""
    with scripted(script):
        ddp, state = turning(Weighted())
    for step in range(len(script)):
        own = small(context, context.rank, step)
        last = step == len(script) - 1
        if last and context.rank == 0:
            own[3][5, 6] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if last else "error")
            found = backward(ddp, own)
    assert found[3].isfinite().sum() == 80 * 80 - 1
    assert all(one.isfinite().all() for index, one in enumerate(found) if index != 3)
    assert all(one.isfinite().all() for one in state.state_dict()["caches"].values())


@pytest.mark.parametrize(
    "script",
    [[OFF], [ENCODED, OFF], [NARROW], [ENCODED, NARROW]],
    ids=lambda one: "-".join(step.way.name for step in one),
)
def test_a_gradient_that_is_not_finite(pool: Pool, script: list[Step]) -> None:
    pool.run(break_one, script)


def differ(context: Context, kind: str) -> None:
    ddp = wrapped(Weighted())
    ratio: Any = 0.9 if context.rank else "auto"
    with pytest.raises(ValueError, match=r"ratio='auto' on rank 0 and ratio=0.9 on rank 1"):
        hooked(ddp, kind, ratio=ratio)
    last = context.size - 1
    wrong: Any = "fast" if context.rank == last else "auto"
    error = ValueError if context.rank == last else RuntimeError
    with pytest.raises(error, match=r'ratio is a number in \[0, 1\) or "auto", not \'fast\''):
        hooked(ddp, kind, ratio=wrong)
    if kind == "bytes":
        both = {"fixed_threshold": 1.0} if context.rank == last else {}
        with pytest.raises(error, match='ratio="auto" chooses how much is sent, and so does fixed'):
            hooked(ddp, kind, ratio="auto", **both)
    hooked(ddp, kind, ratio="auto")  # the group is still usable
    backward(ddp, normal(context, context.rank, 0))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["low_rank", "bytes", "blocks"])
def test_a_ratio_that_differs_between_ranks(pool: Pool, kind: str) -> None:
    pool.run(differ, kind)


def drain(context: Context) -> None:
    with scripted([ENCODED], Way.ENCODED):
        ddp, state = turning(Weighted())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
    computed = [torch.zeros(shape) for shape in SHAPES]
    for step in range(3):
        own = small(context, context.rank, step)
        for index in range(len(SHAPES)):
            computed[index] += own[index]
        backward(ddp, own)
        optimizer.step()
    assert state.summary()["cache_norm"] > 0
    state.drain(optimizer)
    assert state.summary()["cache_norm"] == 0
    for index, (parameter, own_sum) in enumerate(zip(ddp.parameters(), computed, strict=True)):
        dist.all_reduce(own_sum)
        assert_same(parameter.detach() * context.size, 0 - own_sum, f"parameter {index}")


def test_draining_what_waits(pool: Pool) -> None:
    pool.run(drain)
