"""Layer dropping on the synchronous parameter server, against a simulation in plain PyTorch.

Gradients are whole numbers, so that sums and moments are exact in any order, and every decision of
the simulation is the server's. Buckets are small: parameters share them and span several.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same, gathered
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

from torch_hbmcomm.layer_drop.terms import LayerDrop, Representative, Target
from torch_hbmcomm.parameter_server.synchronous import Synchronous

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = [(40, 50), (3, 7), (64,), (17, 31), (0, 5), (1,), (), (29, 8)]
STEPS = 12
DROP = LayerDrop(ratio=0.7, every=4, min_numel=8, max_age=5, target="paper")

Gradients = list[torch.Tensor | None]


def model_of(dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(3)
    return nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES)


def gradients_of(context: Context, worker: int, step: int, missing: bool = True) -> Gradients:
    """Whole numbers, larger in some layers than in others, and so small in the last that it waits;
    now and then one is missing."""
    generator = torch.Generator().manual_seed(context.seed + 1000 * worker + step)
    found: Gradients = []
    for index, shape in enumerate(SHAPES):
        values = torch.randint(-4, 5, shape, generator=generator).float()
        absent = missing and (index + worker + step) % 7 == 0
        scale = 1 if index == len(SHAPES) - 1 else 8 * 2 ** ((3 * index + worker) % 5)
        found.append(None if absent else values * scale)
    return found


def give(model: nn.Module, gradients: Gradients) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


class Worker:
    """What a worker sends, and what it keeps: the scheme in a few lines."""

    def __init__(self, drop: LayerDrop) -> None:
        self.drop = drop
        self.caches = [torch.zeros(shape) for shape in SHAPES]
        self.waited = [0] * len(SHAPES)
        self.threshold = -math.inf
        self.steps = 0

    def value(self, index: int) -> float:
        cache = self.caches[index].double()
        return float(cache.norm() if self.drop.representative == "l2" else cache.abs().mean())

    def goes(self, index: int) -> bool:
        cache = self.caches[index]
        always = cache.dim() < 2 or cache.numel() < self.drop.min_numel
        late = self.waited[index] >= self.drop.oldest
        return bool(cache.any()) and (always or late or self.value(index) >= self.threshold)

    def search(self, fresh: Sequence[int]) -> float:
        """The value of the layer with which more than `ratio` of all elements are below."""
        found = sorted((self.value(index), self.caches[index].numel()) for index in fresh)
        reached = itertools.accumulate(size for _, size in found)
        budget = self.drop.ratio * sum(size for _, size in found)
        return next(value for (value, _), size in zip(found, reached, strict=True) if size > budget)

    def step(self, gradients: Gradients) -> Gradients:
        fresh = [i for i, g in enumerate(gradients) if g is not None and g.numel()]
        for index in fresh:
            gradient = gradients[index]
            assert gradient is not None
            self.caches[index] += gradient
        sent = [index for index in fresh if self.goes(index)]
        if self.steps % self.drop.every == 0:
            self.threshold = self.search(fresh)
        self.steps += 1
        for index, cache in enumerate(self.caches):
            waits = index not in sent and bool(cache.any())
            self.waited[index] = self.waited[index] + 1 if waits else 0
        return self.take(sent)

    def take(self, sent: Sequence[int]) -> Gradients:
        taken: Gradients = [None] * len(SHAPES)
        for index in sent:
            taken[index] = self.caches[index]
            self.caches[index] = torch.zeros(SHAPES[index])
        return taken

    def flush(self) -> Gradients:
        return self.take([index for index, cache in enumerate(self.caches) if cache.any()])


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, brought: list[Gradients], batches: int
) -> None:
    """By the server. What nobody brought has no gradient."""
    for parameter, sent in zip(model.parameters(), zip(*brought, strict=True), strict=True):
        some = [gradient for gradient in sent if gradient is not None]
        parameter.grad = torch.stack(some).sum(0) / batches if some else None
    optimizer.step()


def simulated(
    context: Context, drop: LayerDrop, workers: int, optimize: Optimize
) -> list[torch.Tensor]:
    model = model_of()
    optimizer = optimize(model.parameters())
    all_workers = [Worker(drop) for _ in range(workers)]
    for step in range(STEPS):
        brought = [w.step(gradients_of(context, n, step)) for n, w in enumerate(all_workers)]
        update(model, optimizer, brought, workers)
    update(model, optimizer, [worker.flush() for worker in all_workers], workers)
    return weights(model)


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
@pytest.mark.parametrize("representative", ["mean", "l2"])
def test_equals_simulation(pool: Pool, group: str, representative: Representative) -> None:
    drop = replace(DROP, representative=representative)
    pool.run(check_equals_simulation, group, drop, {"server": pool.size - 1})


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("server", [0, 1])
def test_dedicated_server(pool: Pool, group: str, server: int) -> None:
    options = {"server": server, "dedicated": True}
    pool.run(check_equals_simulation, group, DROP, options)


def check_nothing_dropped(context: Context, drop: LayerDrop) -> None:
    """Bit for bit what comes without it."""
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
    """Weights become the exact sum of all that the workers sent."""

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


def all_cached(context: Context, caches: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The sum of those of all ranks."""
    found = []
    for index, shape in enumerate(SHAPES):
        own = caches.get(str(index), torch.zeros(shape))
        found.append(torch.stack(gathered(context, own)).sum(0))
    return found


def check_conservation(context: Context, drop: LayerDrop) -> None:
    model = zeros_of()
    ps = make(context, model, adding(context.size), drop=drop)
    total = [torch.zeros(shape) for shape in SHAPES]
    ever_cached = False
    for step in range(STEPS):
        for worker in range(context.size):
            for sums, gradient in zip(total, gradients_of(context, worker, step), strict=True):
                sums.add_(0 if gradient is None else gradient)
        give(model, gradients_of(context, context.rank, step))
        ps.step()
        cached = all_cached(context, ps.state_dict()["drop"]["caches"])
        ever_cached = ever_cached or any(bool(cache.any()) for cache in cached)
        for index, parameter in enumerate(weights(model)):
            assert_same(parameter + cached[index], total[index], f"{index} after step {step}")
    assert ever_cached
    ps.close()
    assert not any(cache.any() for cache in ps.state_dict()["drop"]["caches"].values())
    for index, parameter in enumerate(weights(model)):
        assert_same(parameter, total[index], f"{index} after close()")


@pytest.mark.parametrize("target", ["paper", "bytes"])
def test_conservation(pool: Pool, target: Target) -> None:
    pool.run(check_conservation, LayerDrop(ratio=0.7, every=4, min_numel=8, target=target))


def check_rounding_is_kept(context: Context) -> None:
    """257 is not a bfloat16. One worker, so that the average is what it sent."""
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
        caches = ps.state_dict()["drop"]["caches"]
        assert_same(caches["0"], torch.ones(16, 16), "cache")
        if not dedicated:
            assert model[0].grad is None
    ps.close()
    assert sent in ([], [0, 256, 0, 1])


@pytest.mark.ranks(1, 2)
def test_rounding_is_kept(pool: Pool) -> None:
    pool.run(check_rounding_is_kept)


def check_flush(context: Context, dedicated: bool) -> None:
    """Five steps and as many more as the rank says, two to an update, and nothing is ever sent
    before the end."""
    model = nn.ParameterList([torch.zeros(20, 30), torch.zeros(4, 5)])
    drop = LayerDrop(min_numel=0, fixed_threshold=1e9, max_age=100)
    options = {"dedicated": dedicated}
    ps = make(context, model, sgd, drop=drop, push_every=2, **options)

    def work(worker: int, workers: int) -> None:
        for _ in range(5 + worker):
            model[0].grad = torch.ones_like(model[0])
            model[1].grad = torch.full_like(model[1], 2.0) if worker == 0 else None
            ps.step()
        if worker == workers - 1:  # while the others are closing
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
    """A refused step leaves no trace in any cache or decision."""
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
            for name, cache in after["caches"].items():
                assert_same(cache, before["caches"][name], name)
        give(model, gradients_of(context, context.rank, step))
        ps.step()
    ps.close()
    assert ps.stats()["refused"] == 2
    assert_close(weights(model), simulated(context, DROP, context.size, momentum), 1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_not_finite(pool: Pool, value: float) -> None:
    pool.run(check_not_finite, value)


def check_overflow(context: Context) -> None:
    """Each gradient is a float16, and their sum is none."""
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


# What is saved.


def check_bytes(context: Context) -> None:
    """What leaves a rank is what its stats say; unsent layers do not come back either."""
    model = nn.ParameterList([torch.zeros(64, 64), torch.zeros(8, 8), torch.zeros(5)])
    ps = make(context, model, drop=LayerDrop(min_numel=16, fixed_threshold=10, max_age=100))
    left = 0
    isend = dist.isend

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        nonlocal left
        left += tensor.nbytes
        return isend(tensor, **options)

    start = ps.stats()["weight_bytes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        for _ in range(STEPS):
            give(model, [torch.ones(64, 64), torch.full((8, 8), 12.0), torch.ones(5)])
            ps.step()
    stats = ps.stats()
    often, once = 4 * (8 * 8 + 5), 4 * 64 * 64
    assert stats["gradient_bytes"] == STEPS * often + once  # 10 steps make 10
    assert stats["gradient_bytes_undropped"] == STEPS * (often + once)
    assert stats["weight_bytes"] - start == STEPS * often + once
    assert (stats["sent_layers"], stats["dropped_layers"]) == (2 * STEPS + 1, STEPS - 1)
    assert (stats["threshold"], stats["oldest_age"]) == (10, STEPS - 10)
    assert left == (stats["gradient_bytes"] if context.rank else 0)
    ps.close()


def test_bytes(pool: Pool) -> None:
    pool.run(check_bytes)


def check_unsent_is_untouched(context: Context) -> None:
    """Momentum and weight decay leave a layer alone that nobody sends; one that only the last rank
    sends counts as zeros on the others."""
    model = nn.ParameterList([torch.ones(8, 8), torch.ones(8, 8)])
    optimizer = momentum(model.parameters()) if context.rank == 0 else None
    drop = LayerDrop(min_numel=0, fixed_threshold=1, max_age=100)
    ps = Synchronous(model, optimizer, drop=drop)
    last = context.rank == context.size - 1
    give(model, [torch.full((8, 8), 0.25), torch.full((8, 8), 2.0 if last else 0.5)])
    ps.step()
    assert_same(model[0].detach(), torch.ones(8, 8), "a layer that nobody sent")
    if optimizer is not None:
        assert list(optimizer.state) == [model[1]]
        assert_same(
            optimizer.state[model[1]]["momentum_buffer"],
            torch.full((8, 8), 2 / context.size) + torch.tensor(0.1),
            "momentum",
        )
    caches = ps.state_dict()["drop"]["caches"]
    assert caches.keys() == ({"0"} if last else {"0", "1"})
    ps.close()


def test_unsent_is_untouched(pool: Pool) -> None:
    pool.run(check_unsent_is_untouched)


def check_missing_gradients(context: Context) -> None:
    """What is cached of a layer waits while the layer has no gradient."""
    model = nn.ParameterList([torch.zeros(8, 8)])
    ps = make(context, model, drop=LayerDrop(min_numel=0, fixed_threshold=3, max_age=2))
    for gradient, waits in ((1.0, 1), (None, 2), (None, 3), (1.0, 0), (5.0, 0)):
        model[0].grad = None if gradient is None else torch.full((8, 8), gradient)
        ps.step()
        state = ps.state_dict()["drop"]
        assert state["rule"]["waited"] == ({"0": waits} if waits else {})
        assert len(state["caches"]) == bool(waits)
    ps.close()
    assert_close(weights(model), [torch.full((8, 8), -0.7)], 1e-6)


def test_missing_gradients(pool: Pool) -> None:
    pool.run(check_missing_gradients)


def check_modules(context: Context) -> None:
    """A weight drags along its bias, even one that has no gradient in that step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in model.parameters():
        parameter.data.zero_()
    drop = LayerDrop(min_numel=0, fixed_threshold=3, max_age=100, granularity="module")
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0), drop=drop)
    ones = [torch.ones_like(parameter) for parameter in model.parameters()]
    give(model, [*ones])
    ps.step()
    give(model, [4 * ones[0], None, ones[2], ones[3]])
    ps.step()
    expected = [-5 * ones[0], -ones[1], 0 * ones[2], 0 * ones[3]]
    assert_close(weights(model), expected, 0)
    assert ps.state_dict()["drop"]["caches"].keys() == {"1.weight", "1.bias"}
    ps.close()
    assert_close(weights(model), [*expected[:2], -2 * ones[2], -2 * ones[3]], 0)


def test_modules(pool: Pool) -> None:
    pool.run(check_modules)


# Checkpoints.


def check_resume(context: Context, drop: LayerDrop) -> None:
    """Bit for bit what comes without an interruption."""

    def train(model: nn.Module, state: dict[str, Any] | None, steps: range) -> dict[str, Any]:
        ps = make(context, model, momentum, drop=drop)
        if state is not None:
            ps.load_state_dict(state)
        for step in steps:
            give(model, gradients_of(context, context.rank, step))
            ps.step()
        state = copy.deepcopy(ps.state_dict())
        ps.close()
        return state

    whole, first, second = model_of(), model_of(), model_of()
    train(whole, None, range(STEPS))
    half = train(first, None, range(STEPS // 2))
    assert half["drop"]["caches"]
    train(second, half, range(STEPS // 2, STEPS))
    for index, (one, two) in enumerate(zip(weights(second), weights(whole), strict=True)):
        assert_same(one, two, f"parameter {index}")


@pytest.mark.parametrize("target", ["paper", "bytes"])
def test_resume(pool: Pool, target: Target) -> None:
    pool.run(check_resume, LayerDrop(ratio=0.8, every=4, min_numel=8, target=target))


def check_wrong_state(context: Context) -> None:
    """On the last rank alone; all complain."""
    model = model_of()
    last = context.rank == context.size - 1
    ps = make(context, model, drop=DROP)
    give(model, gradients_of(context, context.rank, 0))
    ps.step()
    state = copy.deepcopy(ps.state_dict())
    other = copy.deepcopy(state)
    if last:
        other["drop"]["names"][0] = "stranger"
    message = raised(ValueError if last else RuntimeError, ps.load_state_dict, other)
    assert ("stranger" if last else f"failed on ranks [{context.size - 1}]") in message
    del state["drop"]
    ps.load_state_dict(state)
    assert not ps.state_dict()["drop"]["caches"]
    ps.close()
    plain = make(context, model)
    if not last:
        del other["drop"]
    message = raised(ValueError if last else RuntimeError, plain.load_state_dict, other)
    assert ("give drop=" if last else "failed on ranks") in message
    plain.close()


def test_wrong_state(pool: Pool) -> None:
    pool.run(check_wrong_state)


# Errors.


def check_bad_terms(context: Context) -> None:
    last = context.size - 1
    complex_model = nn.ParameterDict({"phase": torch.zeros(3, dtype=torch.complex64)})
    message = raised(ValueError, make, context, complex_model, drop=DROP)
    assert "gradient of phase is torch.complex64" in message
    assert "is no hbmcomm.LayerDrop" in raised(ValueError, make, context, model_of(), drop=0.9)
    if context.size > 1:
        own = DROP if context.rank == last else None
        message = raised(ValueError, make, context, model_of(), drop=own)
        assert f"rank {last} has drop=LayerDrop(ratio=0.7" in message
        assert "rank 0 has drop=None" in message


def test_bad_terms(pool: Pool) -> None:
    pool.run(check_bad_terms)


def check_other_workers(context: Context) -> None:
    """One worker more has saved a state than there are now."""
    model = model_of()
    ps = make(context, model, drop=DROP)
    for step in range(3):
        give(model, gradients_of(context, context.rank, step))
        ps.step()
    state = copy.deepcopy(ps.state_dict())
    drops: list[Any] = [None] * context.size
    dist.all_gather_object(drops, state["drop"])
    drops.append(copy.deepcopy(drops[0]))
    for rank, drop in enumerate(drops):
        drop |= {"rank": rank, "ranks": len(drops)}
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for drop in drops:
        for name, cache in drop["caches"].items():
            expected[name] += cache
    message = raised(ValueError, ps.load_state_dict, state | {"drop": drops[0]})
    assert f"give the states of all {len(drops)} ranks" in message
    ps.load_state_dict(state | {"drop": drops})
    caches = ps.state_dict()["drop"]["caches"]
    for name, total in expected.items():
        found = caches.get(name, torch.zeros_like(total))
        dist.all_reduce(found)
        assert_same(found, total.detach(), name)
    ps.close()


def test_another_number_of_workers_keeps_the_sum(pool: Pool) -> None:
    pool.run(check_other_workers)
