"""Layer dropping on the synchronous parameter server equals a simulation in plain PyTorch.

The server also loses no gradient. Buckets are small, so that parameters share buckets and span
several buckets.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Context, Pool
from harness.data import assert_same, gathered
from harness.layer_drop_sync import (
    DROP,
    SHAPES,
    STEPS,
    give,
    gradients_of,
    model_of,
    simulated,
)
from harness.pairwise import in_turn
from harness.synchronous import (
    GROUPS,
    Optimize,
    assert_close,
    assert_replicated,
    group_of,
    make,
    momentum,
    raised,
    serve_or_work,
    sgd,
    weights,
)
from torch import nn

from torch_hbmcomm import SyncParameterServer
from torch_hbmcomm.layer_drop.config import LayerDrop, Representative, Target

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

MEASURES: list[Representative] = ["mean", "l2"]

# The same numbers as the simulation.


def check_equals_simulation(
    context: Context, group: str, drop: LayerDrop, options: dict[str, Any]
) -> None:
    model = model_of()
    ps = make(context, model, momentum, group=group_of(context, group), drop=drop, **options)

    def work(worker: int, workers: int) -> None:
        for step in range(STEPS):
            give(model, gradients_of(context, worker, step))
            ps.step()

    serve_or_work(ps, context, work, **options)
    workers = context.size - options.get("dedicated", False)
    assert_close(weights(model), simulated(context, drop, workers, momentum), 1e-5)
    assert_replicated(context, weights(model))


@pytest.mark.parametrize("group", GROUPS)
def test_equals_simulation(pool: Pool, group: str) -> None:
    drop = replace(DROP, representative=in_turn(MEASURES, GROUPS.index(group), pool.size))
    pool.run(check_equals_simulation, group, drop, {"server": pool.size - 1})


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("group", GROUPS)
def test_dedicated_server(pool: Pool, group: str) -> None:
    server = in_turn([0, 1], GROUPS.index(group), pool.size)
    options = {"server": server, "dedicated": True}
    pool.run(check_equals_simulation, group, DROP, options)


def check_nothing_dropped(context: Context, drop: LayerDrop) -> None:
    """Check that the results are bit for bit those without dropping."""
    found = []
    for option in (None, drop):
        model = model_of()
        ps = make(context, model, momentum, drop=option)
        for step in range(STEPS):
            give(model, gradients_of(context, context.rank, step))
            ps.step()
        ps.close()
        found.append((weights(model), ps.stats()["updates"]))
    (plain, updates), (mine, own_updates) = found
    assert updates == own_updates == STEPS
    for index, (one, two) in enumerate(zip(mine, plain, strict=True)):
        assert_same(one, two, f"parameter {index}")


@pytest.mark.parametrize("drop", [LayerDrop(ratio=0), LayerDrop(warmup=STEPS + 1)], ids=str)
def test_nothing_dropped(pool: Pool, drop: LayerDrop) -> None:
    pool.run(check_nothing_dropped, drop)


# Nothing lost.


class Adding(torch.optim.SGD):
    """An optimizer that adds the exact sums of the workers' gradients to the weights."""

    workers = 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_((parameter.grad * self.workers).round())


def adding(workers: int) -> Optimize:
    def optimize(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Adding(parameters, lr=1.0)
        optimizer.workers = workers
        return optimizer

    return optimize


def zeros_of(dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    return nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)


def sums_of_residuals(context: Context, residuals: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of all ranks' residuals, by parameter."""
    found = []
    for index, shape in enumerate(SHAPES):
        own = residuals.get(str(index), torch.zeros(shape))
        found.append(torch.stack(gathered(context, own)).sum(0))
    return found


def check_conservation(context: Context, drop: LayerDrop) -> None:
    model = zeros_of()
    ps = make(context, model, adding(context.size), drop=drop)
    total = [torch.zeros(shape) for shape in SHAPES]
    ever_waited = False
    for step in range(STEPS):
        for worker in range(context.size):
            for sums, gradient in zip(total, gradients_of(context, worker, step), strict=True):
                sums.add_(0 if gradient is None else gradient)
        give(model, gradients_of(context, context.rank, step))
        ps.step()
        waiting = sums_of_residuals(context, ps.state_dict()["drop"]["caches"])
        ever_waited = ever_waited or any(bool(residual.any()) for residual in waiting)
        for index, parameter in enumerate(weights(model)):
            assert_same(parameter + waiting[index], total[index], f"{index} after step {step}")
    assert ever_waited
    ps.close()
    assert not any(residual.any() for residual in ps.state_dict()["drop"]["caches"].values())
    for index, parameter in enumerate(weights(model)):
        assert_same(parameter, total[index], f"{index} after close()")


@pytest.mark.parametrize("target", ["paper", "bytes"])
def test_conservation(pool: Pool, target: Target) -> None:
    pool.run(check_conservation, LayerDrop(ratio=0.7, every=4, min_numel=8, target=target))


def check_rounding_is_kept(context: Context) -> None:
    """257 is not a bfloat16: 256 is sent and 1 is kept. With one worker, the mean is 256, too."""
    model = nn.ParameterList([torch.zeros(16, 16, dtype=torch.bfloat16)])
    drop = LayerDrop(min_numel=0, fixed_threshold=200, max_age=100)
    sent: list[float] = []
    dedicated = context.size == 2
    ps = make(context, model, sgd, drop=drop, dedicated=dedicated)
    if dedicated and context.rank == 0:
        ps.serve(
            lambda: sent.append(model[0].grad[0, 0].item() if model[0].grad is not None else 0)
        )
    else:
        for gradient in (129.0, 128.0, 0.0):
            model[0].grad = torch.full_like(model[0], gradient)
            ps.step()
        residuals = ps.state_dict()["drop"]["caches"]
        assert_same(residuals["0"], torch.ones(16, 16), "residual")
        if not dedicated:
            assert model[0].grad is None
    ps.close()
    assert sent in ([], [0, 256, 0, 1])


@pytest.mark.ranks(1, 2)
def test_rounding_is_kept(pool: Pool) -> None:
    pool.run(check_rounding_is_kept)


def check_flush(context: Context, dedicated: bool) -> None:
    """Worker n takes 5 + n steps, two for each update. No layer is sent before close()."""
    model = nn.ParameterList([torch.zeros(20, 30), torch.zeros(4, 5)])
    drop = LayerDrop(min_numel=0, fixed_threshold=1e9, max_age=100)
    options = {"dedicated": dedicated}
    ps = make(context, model, sgd, drop=drop, push_every=2, **options)

    def work(worker: int, workers: int) -> None:
        for _ in range(5 + worker):
            model[0].grad = torch.ones_like(model[0])
            model[1].grad = torch.full_like(model[1], 2.0) if worker == 0 else None
            ps.step()
        if worker == workers - 1:  # while other workers close
            ps.pull()
        assert_close(weights(model), [torch.zeros(20, 30), torch.zeros(4, 5)], 0)

    serve_or_work(ps, context, work, **options)
    workers = context.size - dedicated
    taken = sum(5 + worker for worker in range(workers)) / (2 * workers)
    expected = [torch.full((20, 30), -0.1 * taken), torch.full((4, 5), -1 / (2 * workers))]
    assert_close(weights(model), expected, 1e-5)
    updates = [-(-(5 + worker) // 2) for worker in range(workers)]
    assert ps.stats()["updates"] == 1 + max(updates)


def test_flush(pool: Pool) -> None:
    pool.run(check_flush, False)


@pytest.mark.ranks(2, 3, 4)
def test_flush_to_a_dedicated_server(pool: Pool) -> None:
    pool.run(check_flush, True)


def check_not_finite(context: Context, value: float) -> None:
    """Check that a refused step changes no residual and no decision."""
    model = model_of()
    ps = make(context, model, momentum, drop=DROP)
    for step in range(STEPS):
        if step in (1, 5):
            before = ps.state_dict()["drop"]
            give(model, gradients_of(context, context.rank, 100 + step, missing=False))
            if context.rank == context.size - 1:
                model[3].grad[1, 2] = value
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                ps.step()
            after = ps.state_dict()["drop"]
            assert after["rule"] == before["rule"]
            assert after["caches"].keys() == before["caches"].keys()
            for name, residual in after["caches"].items():
                assert_same(residual, before["caches"][name], name)
        give(model, gradients_of(context, context.rank, step))
        ps.step()
    ps.close()
    assert ps.stats()["refused"] == 2
    assert_close(weights(model), simulated(context, DROP, context.size, momentum), 1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_not_finite(pool: Pool, value: float) -> None:
    pool.run(check_not_finite, value)


def check_overflow(context: Context) -> None:
    """Each gradient is finite in float16, but the sum of the gradients is not."""
    model = nn.ParameterList([torch.zeros(8, 8, dtype=torch.float16)])
    ps = make(context, model, drop=LayerDrop(min_numel=0, fixed_threshold=5e4, max_age=100))
    for step in range(3):
        model[0].grad = torch.full_like(model[0], 4e4)
        if step == 1:
            kind = OverflowError if context.rank == 0 else RuntimeError
            message = raised(kind, ps.step)
            assert "parameter 0 is beyond float16" in message or context.rank > 0
            assert_same(model[0].detach(), torch.zeros(8, 8, dtype=torch.float16), "weights")
        else:
            ps.step()
    ps.close()


def test_overflow(pool: Pool) -> None:
    pool.run(check_overflow)


# Momentum.


def check_late_momentum(context: Context, options: dict[str, Any]) -> None:
    """Send a layer of ones in the fourth step, when it reaches the threshold.

    Then it is where SGD takes it with all four gradients in the first step, and zeros in the other
    three. It also has the same momentum.
    """

    def optimize(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, **options)

    waits = 4
    model = nn.ParameterList([torch.zeros(8, 8)])
    plain = nn.ParameterList([torch.zeros(8, 8)])
    drop = LayerDrop(min_numel=0, fixed_threshold=waits, max_age=100)
    ps = make(context, model, optimize, drop=drop)
    reference = optimize(plain.parameters())
    for step in range(waits):
        assert_close(weights(model), [torch.zeros(8, 8)], 0)
        model[0].grad = torch.ones(8, 8)
        ps.step()
        plain[0].grad = torch.full((8, 8), 0.0 if step else float(waits))
        reference.step()
    assert_close(weights(model), weights(plain), 1e-6)
    if context.rank == 0:
        found = ps.state_dict()["optimizer"]["state"][0]["momentum_buffer"]
        assert_close([found], [reference.state[plain[0]]["momentum_buffer"]], 1e-6)
    ps.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True}, {"dampening": 0.25}, {"maximize": True}, {"foreach": True}],
    ids=str,
)
def test_late_layer_moves_as_if_its_gradients_had_come_when_its_wait_began(
    pool: Pool, options: dict[str, Any]
) -> None:
    pool.run(check_late_momentum, options)


def check_warning(context: Context) -> None:
    def warned(optimize: Optimize, drop: LayerDrop) -> list[str]:
        """Return the warnings about accuracy on this rank."""
        model = model_of()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            SyncParameterServer(model, optimize(model.parameters()), drop=drop).close()
        texts = [str(one.message) for one in caught]
        return [text for text in texts if text.startswith("training may lose accuracy: SyncParam")]

    assert len(warned(momentum, LayerDrop(ratio=0.9))) == (1 if context.rank == 0 else 0)
    assert warned(momentum, LayerDrop(ratio=0.8)) == []
    assert warned(momentum, LayerDrop(fixed_threshold=1.0)) == []
    assert warned(sgd, LayerDrop(ratio=0.9)) == []


def test_the_server_warns_of_late_momentum(pool: Pool) -> None:
    pool.run(check_warning)
