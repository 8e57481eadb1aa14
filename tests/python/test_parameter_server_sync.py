"""The synchronous parameter server, against training in one process on the union of the batches.

Every function runs on each rank of a pool. Buckets are small here, unless a test says otherwise,
so that parameters share buckets, end in the middle of one, and span several.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Context, Pool, beyond_gloo
from harness.data import assert_same, gathered
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import memory
from torch_hbmcomm.parameter_server import sync_channel
from torch_hbmcomm.parameter_server.sync_buckets import cut
from torch_hbmcomm.parameter_server.synchronous import Synchronous

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SAMPLES = 12  # of a step, for all workers together: divides by every number of workers
INPUTS = 7
STEPS = 4
BUCKET_BYTES = 256

Optimize = Callable[[Any], torch.optim.Optimizer]
GROUPS = [BACKEND] if BACKEND == "gloo" else [BACKEND, "gloo"]


class Uneven(nn.Module):
    """Parameters of 0, 1 and a prime number of elements, of one dimension and none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 31)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.second = nn.Linear(31, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs)) * self.scale
        out: torch.Tensor = self.second(hidden) + self.empty.sum()
        return out


def model_of(
    make: Callable[[], nn.Module] = Uneven, dtype: torch.dtype = torch.float32
) -> nn.Module:
    torch.manual_seed(11)
    return make().to(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def samples(context: Context, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(context.seed + step)
    inputs = torch.randn(SAMPLES, INPUTS, generator=generator)
    return inputs, torch.randn(SAMPLES, 3, generator=generator)


def backward(
    model: nn.Module, context: Context, step: int, worker: int = 0, workers: int = 1
) -> None:
    """The gradients of a worker's share of the samples, nothing else."""
    dtype = next(model.parameters()).dtype
    inputs, targets = (part.chunk(workers)[worker].to(dtype) for part in samples(context, step))
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()


def alone(
    context: Context, model: nn.Module, optimize: Optimize, steps: int = STEPS
) -> list[torch.Tensor]:
    """The reference: one process, all samples."""
    optimizer = optimize(model.parameters())
    for step in range(steps):
        backward(model, context, step)
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def group_of(context: Context, name: str) -> dist.ProcessGroup | None:
    return context.gloo if name == "gloo" else None


@contextmanager
def buckets_of(size: int) -> Iterator[None]:
    usual = sync_channel.BUCKET_BYTES
    sync_channel.BUCKET_BYTES = size
    try:
        yield
    finally:
        sync_channel.BUCKET_BYTES = usual


def serve_or_work(
    ps: Synchronous, context: Context, work: Callable[[int, int], None], **options: Any
) -> None:
    """work(worker, workers) on those ranks that are workers; then closes."""
    dedicated, rank = options.get("dedicated", False), options.get("server", 0)
    if dedicated and context.rank == rank:
        ps.serve()
    else:
        worker = context.rank - (dedicated and context.rank > rank)
        work(worker, context.size - dedicated)
    ps.close()


def make(
    context: Context,
    model: nn.Module,
    optimize: Optimize = sgd,
    bucket_bytes: int = BUCKET_BYTES,
    **options: Any,
) -> Synchronous:
    """Only the server has an optimizer."""
    optimizer = optimize(model.parameters()) if context.rank == options.get("server", 0) else None
    with buckets_of(bucket_bytes):
        return Synchronous(model, optimizer, **options)


def assert_close(mine: list[torch.Tensor], other: list[torch.Tensor], tolerance: float) -> None:
    for index, (one, two) in enumerate(zip(mine, other, strict=True)):
        torch.testing.assert_close(
            one, two, rtol=tolerance, atol=tolerance, msg=partial("tensor {}: {}".format, index)
        )


def assert_replicated(context: Context, tensors: list[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        for rank, other in enumerate(gathered(context, tensor)):
            assert_same(other, tensor, f"tensor {index} of rank {rank} against {context.rank}")


def raised(
    kind: type[Exception], function: Callable[..., object], *arguments: Any, **options: Any
) -> str:
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    return str(caught.value)


# The same numbers as one process.


def check_equals_one_process(
    context: Context,
    group: str,
    optimize: Optimize,
    dtype: torch.dtype,
    tolerance: float,
    options: dict[str, Any],
) -> None:
    model = model_of(dtype=dtype)
    expected = alone(context, copy.deepcopy(model), optimize)
    if context.rank != options.get("server", 0):
        for parameter in model.parameters():  # the server's weights win
            parameter.data.fill_(3)
    ps = make(context, model, optimize, group=group_of(context, group), **options)

    def work(worker: int, workers: int) -> None:
        for step in range(STEPS):
            backward(model, context, step, worker, workers)
            ps.step()

    serve_or_work(ps, context, work, **options)
    assert_close(weights(model), expected, tolerance)
    assert_replicated(context, weights(model))
    assert ps.stats()["updates"] == STEPS
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert ps.stats()["gradient_bytes"] == STEPS * size
    assert ps.stats()["weight_bytes"] == (1 + STEPS) * size


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("optimize", [sgd, momentum, adam])
def test_equals_one_process(pool: Pool, group: str, optimize: Optimize) -> None:
    options = {"server": pool.size - 1}
    pool.run(check_equals_one_process, group, optimize, torch.float32, 1e-5, options)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("group", GROUPS)
def test_dtypes(pool: Pool, group: str, dtype: torch.dtype, tolerance: float) -> None:
    pool.run(check_equals_one_process, group, momentum, dtype, tolerance, {})


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("server", [0, 1])
def test_dedicated_server(pool: Pool, group: str, server: int) -> None:
    options = {"server": server, "dedicated": True}
    pool.run(check_equals_one_process, group, adam, torch.float32, 1e-5, options)


def check_equals_ddp(context: Context) -> None:
    replica = DistributedDataParallel(model_of(), process_group=group_of(context, BACKEND))
    optimizer = adam(replica.parameters())
    model = model_of()
    ps = make(context, model, adam)
    for step in range(STEPS):
        backward(replica, context, step, context.rank, context.size)
        optimizer.step()
        backward(model, context, step, context.rank, context.size)
        ps.step()
    ps.close()
    assert_close(weights(model), weights(replica.module), 1e-5)


def test_equals_ddp(pool: Pool) -> None:
    pool.run(check_equals_ddp)


def check_exact_mean(context: Context) -> None:
    """Whole numbers in buckets of the usual size, one parameter larger than a bucket."""
    larger = sync_channel.BUCKET_BYTES // 4 + 12_345
    model = nn.ParameterList([torch.zeros(17), torch.zeros(larger), torch.zeros(1, 3)])
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0), sync_channel.BUCKET_BYTES)
    pattern = [torch.arange(parameter.numel()) % 1000 for parameter in model]
    for parameter, numbers in zip(model, pattern, strict=True):
        parameter.grad = ((context.rank + 1) * context.size * numbers).view_as(parameter).float()
    ps.step()
    ps.close()
    total = context.size * (context.size + 1) // 2
    for parameter, numbers in zip(model, pattern, strict=True):
        assert_same(parameter.detach().view(-1), 0 - (total * numbers).float(), "weights")


def test_parameter_larger_than_a_bucket(pool: Pool) -> None:
    pool.run(check_exact_mean)


def check_halves_are_added_in_float(context: Context) -> None:
    """256 + 1 is not a bfloat16, so sums in bfloat16 would lose the ones."""
    model = nn.ParameterList([torch.zeros(5, dtype=torch.bfloat16)])
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0))
    model[0].grad = torch.full_like(model[0], 256.0 if context.rank == 0 else 1.0)
    ps.step()
    ps.close()
    mean = torch.tensor((256.0 + context.size - 1) / context.size)
    assert_same(model[0].detach(), -mean.to(torch.bfloat16).expand(5), "weights")


def test_halves_are_added_in_float(pool: Pool) -> None:
    pool.run(check_halves_are_added_in_float)


def check_memory_formats(context: Context) -> None:
    """Weights in channels_last, gradients as they come or contiguous."""
    torch.manual_seed(5)
    model = nn.Conv2d(3, 5, 2)
    model.weight.data = model.weight.data.to(memory_format=torch.channels_last)
    start = weights(model)
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0))
    pattern = torch.arange(60.0).view(5, 3, 2, 2)
    model.weight.grad = (
        pattern.clone() if context.rank else pattern.to(memory_format=torch.channels_last)
    )
    ps.step()
    ps.close()
    assert_same(model.weight.detach(), start[0] - pattern, "weight")
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_memory_formats(pool: Pool) -> None:
    pool.run(check_memory_formats)


# Which gradients count.


def check_missing_gradients(context: Context) -> None:
    """[0] has a gradient everywhere, [1] on the last rank alone, [2] nowhere."""
    model = nn.ParameterList([torch.ones(3), torch.ones(4), torch.ones(5)])
    expected = nn.ParameterList(copy.deepcopy(list(model)))
    ps = make(context, model, momentum)
    optimizer = momentum(expected.parameters())
    for _ in range(STEPS):
        model.zero_grad()
        model[0].grad = torch.ones(3)
        if context.rank == context.size - 1:
            model[1].grad = torch.ones(4)
        ps.step()
        expected[0].grad, expected[1].grad = torch.ones(3), torch.full((4,), 1 / context.size)
        optimizer.step()
    ps.close()
    assert_close(weights(model), weights(expected), 1e-6)
    assert_same(model[2].detach(), torch.ones(5), "a parameter that nobody used")
    assert ps.stats()["gradient_bytes"] == STEPS * 4 * (3 + 4)


def test_missing_gradients(pool: Pool) -> None:
    pool.run(check_missing_gradients)


def check_not_finite(context: Context, value: float) -> None:
    model = model_of()
    ps = make(context, model, adam)
    before = weights(model)
    for attempt in range(2):
        backward(model, context, 0, context.rank, context.size)
        if context.rank == context.size - 1:
            assert isinstance(model, Uneven) and model.second.weight.grad is not None
            model.second.weight.grad[1, 2] = value
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ps.step()
        messages = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert len(messages) == (attempt == 0), messages
        if messages:
            assert f"second.weight on rank {context.size - 1} is not finite" in messages[0]
    assert_close(weights(model), before, 0)
    assert (ps.stats()["refused"], ps.stats()["updates"]) == (2, 0)

    backward(model, context, 0, context.rank, context.size)
    ps.step()
    ps.close()
    reference = model_of()
    assert_close(weights(model), alone(context, reference, adam, steps=1), 1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(pool: Pool, value: float) -> None:
    pool.run(check_not_finite, value)


def check_large_but_finite(context: Context) -> None:
    """Gradients whose sum overflows are finite all the same."""
    model = nn.ParameterList([torch.zeros(4)])
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0))
    model[0].grad = torch.full((4,), 2.0**127 / context.size)
    ps.step()
    ps.close()
    assert ps.stats()["refused"] == 0
    assert torch.isfinite(model[0]).all() and (model[0] != 0).all()


def test_large_but_finite(pool: Pool) -> None:
    pool.run(check_large_but_finite)


def check_sparse(context: Context) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    ps = make(context, model)
    if context.rank == context.size - 1:
        model(torch.tensor([1, 2])).sum().backward()
    message = raised(TypeError, ps.step)
    assert f"parameter weight on rank {context.size - 1} is sparse" in message
    model.zero_grad()
    model.weight.grad = torch.ones_like(model.weight)
    ps.step()
    ps.close()
    assert ps.stats()["updates"] == 1


def test_sparse(pool: Pool) -> None:
    pool.run(check_sparse)


# How many steps.


def check_uneven_steps(context: Context, dedicated: bool) -> None:
    """The n-th worker takes n + 1 steps with the gradient n; then it brings nothing."""
    model = nn.ParameterList([torch.zeros(3)])
    options = {"dedicated": dedicated}
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0), **options)

    def work(worker: int, workers: int) -> None:
        for _ in range(worker + 1):
            model[0].grad = torch.full((3,), float(worker))
            ps.step()

    serve_or_work(ps, context, work, **options)
    workers = context.size - dedicated
    means = [sum(range(first, workers)) / (workers - first) for first in range(workers)]
    assert_close(weights(model), [torch.full((3,), -sum(means))], 1e-6)
    assert ps.stats()["updates"] == workers
    assert "after close" in raised(RuntimeError, ps.step)
    ps.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dedicated", [False, True])
def test_uneven_steps(pool: Pool, dedicated: bool) -> None:
    pool.run(check_uneven_steps, dedicated)


def check_push_every(context: Context) -> None:
    """Five steps, two to an update: the last update has the gradients of one."""
    model = nn.ParameterList([torch.zeros(3), torch.zeros(2)])
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0), push_every=2)
    for step in range(5):
        model.zero_grad()
        model[0].grad = torch.full((3,), float(step))
        if step == 1:
            model[1].grad = torch.ones(2)
        ps.step()
    assert ps.stats()["updates"] == 2
    ps.close()
    assert ps.stats()["updates"] == 3
    assert_close(weights(model), [torch.full((3,), -(0.5 + 2.5 + 4)), torch.full((2,), -0.5)], 0)


def test_push_every(pool: Pool) -> None:
    pool.run(check_push_every)


def check_after_update(context: Context) -> None:
    """Where a dedicated server's learning-rate schedule and checkpoints go."""
    model = nn.ParameterList([torch.zeros(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen: list[float] = []
    ps = Synchronous(model, optimizer, dedicated=True)

    def after_update() -> None:
        schedule.step()
        seen.append(ps.state_dict()["model"]["0"][0].item())

    if context.rank == 0:
        ps.serve(after_update)
        assert seen == [-1, -1.5, -1.75]
    else:
        for _ in range(3):
            model[0].grad = torch.ones(2)
            ps.step()
    ps.close()
    assert_close(weights(model), [torch.full((2,), -1.75)], 0)


@pytest.mark.ranks(2, 3)
def test_after_update(pool: Pool) -> None:
    pool.run(check_after_update)


def check_pull(context: Context, buffers: str) -> None:
    """Weights that were changed by hand."""
    model = nn.BatchNorm1d(3)
    ps = make(context, model, buffers=buffers)
    with torch.no_grad():
        model.weight.fill_(context.rank + 5)
        assert model.running_mean is not None
        model.running_mean.fill_(context.rank + 7)
    ps.pull()
    assert_same(model.weight.detach(), torch.full((3,), 5.0), "weight")
    source = 0 if buffers == "shared" else context.rank
    assert_same(model.running_mean, torch.full((3,), source + 7.0), "running_mean")
    ps.close()


@pytest.mark.parametrize("buffers", ["shared", "local"])
def test_pull(pool: Pool, buffers: str) -> None:
    pool.run(check_pull, buffers)


# Buffers.


class Counting(nn.Module):
    """Buffers of other dtypes than the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: torch.Tensor
        self.mask: torch.Tensor
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool), persistent=False)


def check_buffers(context: Context, group: str, options: dict[str, Any]) -> None:
    model = Counting()
    model.steps.fill_(context.rank + 100)
    ps = make(context, model, group=group_of(context, group), **options)
    assert int(model.steps) == 100  # the server's, at first

    def work(worker: int, workers: int) -> None:
        model.steps.fill_(context.rank)
        model.mask[context.rank] = True
        model.weight.grad = torch.ones(3)
        ps.step()

    serve_or_work(ps, context, work, **options)
    worker = options.get("dedicated", False)  # the lowest that is one
    if options.get("buffers") == "local":
        assert int(model.steps) == context.rank
    else:
        assert int(model.steps) == int(worker)
        assert model.mask.nonzero().flatten().tolist() == [int(worker)]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("options", [{}, {"dedicated": True}, {"buffers": "local"}], ids=str)
def test_buffers(pool: Pool, group: str, options: dict[str, Any]) -> None:
    pool.run(check_buffers, group, options)


# Checkpoints.


def check_resume(context: Context) -> None:
    """Half of the steps by all ranks, the rest by one rank fewer: as if never interrupted."""
    expected = alone(context, model_of(), adam, steps=2 * STEPS)
    model = model_of()
    ps = make(context, model, adam)
    for step in range(STEPS):
        backward(model, context, step, context.rank, context.size)
        ps.step()
    state = copy.deepcopy(ps.state_dict())
    ps.close()
    assert ("optimizer" in state) == (context.rank == 0)

    fewer = list(range(max(1, context.size - 1)))
    group = dist.new_group(fewer)
    if context.rank in fewer:
        model = Uneven()
        ps = make(context, model, adam, group=group)
        ps.load_state_dict(state if context.rank == 0 else {})
        assert ps.stats()["updates"] == STEPS
        for step in range(STEPS, 2 * STEPS):
            backward(model, context, step, context.rank, len(fewer))
            ps.step()
        ps.close()
        assert_close(weights(model), expected, 1e-5)
        assert ps.state_dict()["updates"] == 2 * STEPS
        dist.destroy_process_group(group)


def test_resume_with_other_workers(pool: Pool) -> None:
    pool.run(check_resume)


def check_wrong_state(context: Context) -> None:
    model = model_of()
    ps = make(context, model)
    state = {key: value for key, value in ps.state_dict().items() if key != "optimizer"}
    if context.rank == 0:
        assert "no 'optimizer'; load one saved on the server" in raised(
            ValueError, ps.load_state_dict, state
        )
    else:
        assert "the server (rank 0) failed" in raised(RuntimeError, ps.load_state_dict, state)
    ps.close()


def test_wrong_state(pool: Pool) -> None:
    pool.run(check_wrong_state)


# Errors: every rank has them, and the group goes on.


def check_models_differ(context: Context) -> None:
    last = context.size - 1
    changes: list[tuple[Callable[[Uneven], object], str]] = [
        (lambda m: setattr(m, "second", nn.Linear(31, 4)), "second.weight (float32 [4, 31]"),
        (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(2))), "more (float32 [2]"),
        (lambda m: m.second.double(), "second.weight (float64 [3, 31]"),
        (lambda m: m.register_buffer("more", torch.ones(2)), "7 parameters and buffers"),
    ]
    for change, complaint in changes:
        model = Uneven()
        if context.rank == last:
            change(model)
        message = raised(ValueError, make, context, model)
        assert f"rank {last} has" in message and complaint in message, message


@pytest.mark.ranks(2, 3, 4)
def test_models_differ(pool: Pool) -> None:
    pool.run(check_models_differ)


def check_bad_terms(context: Context) -> None:
    terms: list[tuple[dict[str, Any], str]] = [
        ({"server": context.size}, f"has ranks 0 to {context.size - 1}"),
        ({"buffers": "global"}, "'global' is none of shared, local"),
        ({"push_every": 0}, "push_every=0; it is a number of steps"),
    ]
    for options, complaint in terms:
        message = raised(ValueError, make, context, Uneven(), **options)
        assert complaint in message
    assert "needs an optimizer" in raised(ValueError, Synchronous, Uneven(), None)
    stranger = sgd([torch.zeros(1, requires_grad=True)])
    assert "are not the model's" in raised(ValueError, Synchronous, Uneven(), stranger)
    if context.size == 1:
        complaint = raised(ValueError, make, context, Uneven(), dedicated=True)
        assert "leaves a group of 1 rank no worker" in complaint
    else:
        own = 1 + (context.rank == context.size - 1)
        complaint = raised(ValueError, make, context, Uneven(), push_every=own)
        assert f"rank {context.size - 1} has push_every=2, rank 0 has push_every=1" in complaint


def test_bad_terms(pool: Pool) -> None:
    pool.run(check_bad_terms)


def check_bad_tensors(context: Context) -> None:
    """On the last rank alone; all complain."""
    last = context.rank == context.size - 1
    for bad, complaint in [
        (nn.ParameterList([torch.zeros(4, 3)[:, :2]]), "does not fill a range of memory"),
        (nn.LazyLinear(3), "no shape yet"),
        (nn.ParameterList([torch.zeros(3, device="meta")]), "on meta: only dense CPU tensors"),
    ]:
        model = bad if last else Uneven()
        message = raised(ValueError, make, context, model)
        assert f"rank {context.size - 1}: " in message and complaint in message, message


def test_bad_tensors(pool: Pool) -> None:
    pool.run(check_bad_tensors)


def check_calls_differ(context: Context) -> None:
    model = model_of()
    ps = make(context, model)
    mine = ps.step if context.rank == 0 else ps.pull
    message = raised(RuntimeError, mine)
    assert "step() by ranks [0]" in message and "pull() by ranks [1" in message
    ps.pull()
    ps.close()


@pytest.mark.ranks(2, 3)
def test_calls_differ(pool: Pool) -> None:
    pool.run(check_calls_differ)


def check_roles(context: Context) -> None:
    model = model_of()
    ps = make(context, model, dedicated=True)
    if context.rank == 0:
        assert "it runs serve()" in raised(RuntimeError, ps.step)
        ps.serve()
    else:
        assert "is for a dedicated server" in raised(RuntimeError, ps.serve)
    ps.close()


@pytest.mark.ranks(2, 3)
def test_roles(pool: Pool) -> None:
    pool.run(check_roles)


def check_closure(context: Context) -> None:
    model = model_of()
    ps = make(context, model)

    def closure() -> int:
        backward(model, context, 0, context.rank, context.size)
        return context.rank

    assert ps.step(closure) == context.rank
    assert ps.step() is None
    ps.close()
    assert ps.stats()["updates"] == 2


def test_closure(pool: Pool) -> None:
    pool.run(check_closure)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("deliberate")


def check_update_fails(context: Context) -> None:
    model = model_of()
    ps = make(context, model, Failing)
    backward(model, context, 0)
    if context.rank == 0:
        assert raised(ArithmeticError, ps.step) == "deliberate"
    else:
        assert "the server (rank 0) failed after update 0" in raised(RuntimeError, ps.step)
    ps.close()


def test_update_fails(pool: Pool) -> None:
    pool.run(check_update_fails)


# Memory.


def check_in_segment(context: Context) -> None:
    def in_use() -> int:
        return sum(segment.in_use_bytes for segment in memory.info().segments)

    gc.collect()
    before = in_use()
    model = nn.ParameterList([torch.zeros(1 << 18)])
    ps = make(context, model, bucket_bytes=1 << 18)
    ranks = context.size if context.rank == 0 else 0
    assert in_use() - before >= 2 * (1 + ranks) * (1 << 18)
    ps.close()
    del ps
    gc.collect()
    assert in_use() == before


@beyond_gloo
def test_buffers_lie_in_the_segment(pool: Pool) -> None:
    pool.run(check_in_segment)


@pytest.mark.parametrize("most", [8, 64, 1 << 20])
def test_buckets_hold_every_element_once(ranks: int, most: int) -> None:
    tensors = [
        torch.empty(size, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for size in (0, 1, 13, 100)
    ]
    seen = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]
    for bucket in cut(tensors, most):
        assert 0 < bucket.nbytes <= most
        for index, start, stop in bucket.spans:
            assert tensors[index].dtype == bucket.dtype
            seen[index][start:stop] += 1
    assert all((count == 1).all() for count in seen)
