"""Our DDP hooks give the same numbers for parameters on the accelerator as on the CPU."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, accelerator, beyond_gloo
from harness.data import random_numbers
from harness.hooks import hooked
from harness.worker import log_path
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import torch_hbmcomm as hbmcomm
from torch_hbmcomm.async_ddp import exchange
from torch_hbmcomm.error_feedback import passes
from torch_hbmcomm.low_rank import products

pytestmark = [beyond_gloo, pytest.mark.ranks(2)]

STEPS = 8


def model_of(context: Context) -> nn.Module:
    torch.manual_seed(context.seed)
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 5))


def train(model: nn.Module, batches: list[torch.Tensor], momentum: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return optimizer


def on_the_host(value: Any) -> Any:
    """Copy a tensor to the host, as loading with map_location="cpu" does."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def assert_alike(
    on_device: nn.Module, on_cpu: nn.Module, start: nn.Module, wire: torch.dtype | None
) -> None:
    """Compare the final parameters of two trainings, which add in different orders.

    With a narrow wire type, parameters may differ by up to the type's eps times the change of the
    parameters since `start`.
    """
    for ours, theirs, first in zip(
        on_device.parameters(), on_cpu.parameters(), start.parameters(), strict=True
    ):
        found = ours.detach().cpu()
        if wire is None:
            torch.testing.assert_close(found, theirs.detach())
        else:
            assert (found - theirs).norm() <= torch.finfo(wire).eps * (theirs - first).norm()


def computed_alike(wanted: bool) -> AbstractContextManager[Any]:
    """If `wanted`, let PyTorch compute the products on the CPU as it does on the device.

    The native products may differ in the last bits. A narrow wire type would then round some
    products to different numbers, and in later steps the difference would grow without a bound.
    """
    return mock.patch.object(products, "_native", lambda _: False) if wanted else nullcontext()


def check_hook(context: Context, kind: str, options: dict[str, Any]) -> None:
    on_cpu = model_of(context)
    start = copy.deepcopy(on_cpu)
    on_device = copy.deepcopy(on_cpu).to(context.device)
    batches = [random_numbers(context, (8, 40), torch.float32) for _ in range(STEPS)]
    summaries = []
    for model, its in (
        (on_cpu, batches),
        (on_device, [batch.to(context.device) for batch in batches]),
    ):
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
        state = hooked(ddp, kind, min_numel=16, **options)
        with computed_alike("wire_dtype" in options):
            train(ddp, its[: STEPS // 2], momentum=0.9)
            state.load_state_dict(tree_map(on_the_host, state.state_dict()))
            optimizer = train(ddp, its[STEPS // 2 :], momentum=0.9)
            summaries.append(state.summary())
            state.drain(optimizer)
    assert_alike(on_device, on_cpu, start, options.get("wire_dtype"))
    assert summaries[0].keys() == summaries[1].keys()
    assert summaries[1]["sent_share"] == pytest.approx(summaries[0]["sent_share"])
    assert 0 < summaries[0]["sent_share"] < 1
    part = torch.finfo(options["wire_dtype"]).eps if "wire_dtype" in options else 1e-4
    for name, value in summaries[0].items():
        assert summaries[1][name] == pytest.approx(value, rel=part), name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("low_rank", {"ratio": 0.7}),
        ("low_rank", {"ratio": 0.9}),
        ("low_rank", {"ratio": 0.9, "wire_dtype": torch.bfloat16}),
        ("bytes", {"ratio": 0.7, "every": 2}),
    ],
    ids=["low rank", "damped", "damped, bfloat16", "bytes"],
)
def test_error_feedback(delayed_pool: Pool, kind: str, options: dict[str, Any]) -> None:
    delayed_pool.run(check_hook, kind, options)


def check_passes(context: Context) -> None:
    """Check each pass of error feedback on random tensors. Some numbers are not finite."""
    draw = context.own_random
    for _ in range(30):
        residual, gradient = draw.choice(
            [
                (torch.float32, torch.float32),
                (torch.float32, torch.bfloat16),
                (torch.bfloat16, torch.bfloat16),
                (torch.float32, torch.float16),
                (torch.float64, torch.float64),
            ]
        )
        counts = [draw.randrange(1, 300) for _ in range(3)]
        gradients = [random_numbers(context, count, gradient) for count in counts]
        gradients[1].zero_()
        if draw.random() < 0.5:
            gradients[2][0] = draw.choice([float("inf"), float("nan")])
        before = [random_numbers(context, counts[0], residual), None, None]
        after = [torch.empty(count, dtype=residual) for count in counts]
        there = [each.to(context.device) for each in after]
        squares, factor = draw.random() < 0.5, draw.choice([1.0, 0.25, 0.3])
        right = passes.accumulate(gradients, before, after, factor, squares)
        found = passes.accumulate(
            [each.to(context.device) for each in gradients],
            [None if each is None else each.to(context.device) for each in before],
            there,
            factor,
            squares,
        )
        torch.testing.assert_close(found.cpu(), right, equal_nan=True)
        for ours, theirs in zip(there, after, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
        wire = torch.empty(
            sum(counts), dtype=torch.bfloat16 if residual.itemsize == 4 else residual
        )
        wire_there = wire.to(context.device)
        passes.pack(after, wire, factor, 1 / factor)
        passes.pack(there, wire_there, factor, 1 / factor)
        torch.testing.assert_close(wire_there.cpu(), wire, rtol=0, atol=0, equal_nan=True)
        for ours, theirs in zip(there, after, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
        begins = [2, 5 + counts[0], 9 + counts[0] + counts[1]]
        buffer = torch.ones(sum(counts) + 12, dtype=gradient)
        if gradient.itemsize < wire.dtype.itemsize:
            continue
        buffer_there = buffer.to(context.device)
        finite = passes.unpack(wire, buffer, begins, counts)
        assert passes.unpack(wire_there, buffer_there, begins, counts) == finite
        torch.testing.assert_close(buffer_there.cpu(), buffer, rtol=0, atol=0, equal_nan=True)


def test_passes(delayed_pool: Pool) -> None:
    for _ in range(3):
        delayed_pool.run(check_passes)


def check_sums(context: Context) -> None:
    """Check sums, also sums beyond float32's largest number."""
    for size in (1.0, 1e38):
        given = [size * torch.randn(count, generator=context.generator) for count in (300, 0, 70)]
        found = passes.sums_of([each.clamp(-3e38, 3e38).to(context.device) for each in given])
        assert found == pytest.approx(passes.sums_of([each.clamp(-3e38, 3e38) for each in given]))


def test_layer_sums_equal_the_cpus(delayed_pool: Pool) -> None:
    delayed_pool.run(check_sums)


def check_async_hook(context: Context) -> None:
    """Each gradient is applied exactly once: replicas on CPU and device end with equal weights."""
    delayed = accelerator.load()
    group = dist.new_group(pg_options=hbmcomm.Options(parameter_server="auto"), backend="hbm")
    start = model_of(context)
    batch = random_numbers(context, (8, 40), torch.float32)
    ends = []
    for device in ("cpu", context.device):
        model = copy.deepcopy(start).to(device)
        ddp = DistributedDataParallel(model, process_group=group, broadcast_buffers=False)
        state = hbmcomm.AsyncState(group, ddp)
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        here = batch.to(device)
        for _ in range(STEPS):
            optimizer.zero_grad()
            # The gradient does not depend on the weights, so steps give the same sum in any order.
            loss = ddp(here).sum() * 0 + sum(
                (parameter * (1.0 + here[0, 0])).sum() for parameter in ddp.module.parameters()
            )
            loss.backward()
            optimizer.step()
        state.drain(optimizer)
        assert state.refused == 0
        state.close()
        ends.append([parameter.detach().cpu() for parameter in model.parameters()])
    for ours, theirs in zip(ends[1], ends[0], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.equal(ends[0][0], next(start.parameters()).detach())
    assert delayed.pinned_counts()["reused_in_copy"] == 0
    with pytest.raises(ValueError, match="resync_every with parameters on late:0"):
        fresh = DistributedDataParallel(
            model_of(context).to(context.device), process_group=group, broadcast_buffers=False
        )
        hbmcomm.AsyncState(group, fresh, resync_every=2)
    dist.destroy_process_group(group)


def test_async_hook(delayed_pool: Pool) -> None:
    delayed_pool.run(check_async_hook)


def check_rebuilt_buckets(context: Context) -> None:
    """Check that the first buckets' host copies are freed when DDP rebuilds its buckets."""
    group = dist.new_group(pg_options=hbmcomm.Options(parameter_server="auto"), backend="hbm")
    model = model_of(context).to(context.device)
    ddp = DistributedDataParallel(
        model, process_group=group, broadcast_buffers=False, bucket_cap_mb=0.01
    )
    state = hbmcomm.AsyncState(group, ddp)
    ddp.register_comm_hook(state, hbmcomm.async_hook)
    first: set[tuple[str, ...]] = set()
    for _ in range(3):
        batch = random_numbers(context, (8, 40), torch.float32).to(context.device)
        train(ddp, [batch], momentum=0.0)
        copies = state._exchange._host_copies
        first = first or set(copies)
    assert set(copies) != first, "the buckets are those of the first step"
    names = [name for bucket in copies for name in bucket]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    state.close()
    dist.destroy_process_group(group)


def test_host_copies_of_replaced_buckets_are_freed(delayed_pool: Pool) -> None:
    delayed_pool.run(check_rebuilt_buckets)


def check_async_hook_without_pinned_memory(context: Context) -> None:
    accelerator.load().pin_nothing()
    check_async_hook(context)
    said = "buckets on late:0 are copied by way of pageable memory"
    assert log_path(context.folder, context.rank).read_text().count(said) == 1


def test_async_hook_without_pinned_memory(own_delayed_pool: Pool) -> None:
    own_delayed_pool.run(check_async_hook_without_pinned_memory)


def test_a_copy_back_that_fails_reaches_who_waits() -> None:
    def lost() -> AbstractContextManager[None]:
        raise RuntimeError("the device is lost")

    promise: torch.futures.Future[Any] = torch.futures.Future()
    task: Future[None] = Future()
    task.set_result(None)
    exchange._keep(promise, torch.ones(1), lost, task)
    with pytest.raises(RuntimeError, match="the device is lost"):
        promise.wait()
