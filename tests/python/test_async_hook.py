"""async_hook under DistributedDataParallel: every gradient is applied exactly once everywhere."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from box_process import TOKEN, BoxProcess
from harness import Context, Pool, RankFailure, beyond_gloo
from harness.data import assert_same, gathered
from harness.pool import DIED
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb
from torch_hbmcomm.async_ddp import places

pytestmark = [
    beyond_gloo,
    pytest.mark.ranks(1, 2, 3, 4),
    pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning"),
]

SHAPES = [(70,), (310, 70), (3, 5, 7), (1,), (90, 90), (40000,)]
STEPS = 12
LEASE = 1.0


@pytest.fixture(scope="module")
def boxes() -> Iterator[list[str]]:
    with ExitStack() as servers:
        yield [
            servers.enter_context(smb.Server(memory="64MiB", token=TOKEN, lease=LEASE)).url
            for _ in range(2)
        ]


class Weighted(nn.Module):
    """The sum of its parameters, weighted by what it is called with: its gradients."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, *weights: torch.Tensor) -> torch.Tensor:
        # In another order than the parameters', so that DDP's buckets change.
        order = sorted(range(len(SHAPES)), key=lambda index: index % 3)
        return torch.stack([(self.all[i] * weights[i]).sum() for i in order]).sum()


def gradients(seed: int, rank: int, step: int, size: int) -> list[torch.Tensor]:
    """Whole numbers, and so are their means over the ranks."""
    draw = torch.Generator().manual_seed(seed + 1000 * step + rank)
    return [torch.randint(-9, 10, shape, generator=draw) * float(size) for shape in SHAPES]


def applied_to_zero(seed: int, size: int, steps: Callable[[int], int]) -> list[torch.Tensor]:
    """What SGD with a rate of 1 makes of zeros once all gradients of all ranks are applied."""
    found = [torch.zeros(shape) for shape in SHAPES]
    for rank in range(size):
        for step in range(steps(rank)):
            for total, gradient in zip(found, gradients(seed, rank, step, size), strict=True):
                total -= gradient / size
    return found


def connections(resources: ExitStack, urls: list[str], transport: Any) -> list[smb.Box]:
    return [resources.enter_context(smb.connect(url, TOKEN, transport)) for url in urls]


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    options = {"broadcast_buffers": False, "bucket_cap_mb": 0.05} | options
    return DistributedDataParallel(model, **options)


def check_weights(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for index, (found, wanted) in enumerate(zip(model.parameters(), expected, strict=True)):
        assert_same(found.detach(), wanted, f"parameter {index}")


def steps_of(rank: int) -> int:
    return STEPS + 3 * rank


def train_exactly(
    context: Context, urls: list[str], transport: str, resync_every: int | None, options: Any
) -> dict[str, int]:
    with ExitStack() as resources:
        model = Weighted()
        ddp = wrapped(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = hbmcomm.AsyncState(
            None,
            ddp,
            connections(resources, urls, transport),
            resync_every=resync_every,
            source=context.size - 1,
        )
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        for step in range(steps_of(context.rank)):
            time.sleep(context.own_random.choice([0, 0, 0.003, 0.01]))
            optimizer.zero_grad()
            ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
            optimizer.step()
        state.drain(optimizer)
        check_weights(model, applied_to_zero(context.seed, context.size, steps_of))
        state.close()
        return state.stats()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
@pytest.mark.parametrize(("transport", "count"), [("shm", 1), ("tcp", 1), ("shm", 2), ("tcp", 2)])
def test_every_gradient_is_applied_once(
    pool: Pool, boxes: list[str], transport: str, count: int, options: Any
) -> None:
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    for rank, stats in enumerate(pool.run(train_exactly, boxes[:count], transport, None, options)):
        steps = steps_of(rank)
        assert stats == {
            "steps": steps,
            "refused": 0,
            "resyncs": 0,
            "pushed_bytes": 4 * elements * steps,
            "pulled_bytes": 8 * elements * (steps + 1),
        }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_versions_keep_it_exact(pool: Pool, boxes: list[str], transport: str) -> None:
    """A reader that took halves of two versions would miss gradients, or apply them twice."""
    for stats in pool.run(train_exactly, boxes, transport, 2, {})[:-1]:
        assert stats["resyncs"] >= 2


# How steps are made up.


def train_through_rebuild(context: Context, urls: list[str]) -> None:
    """DDP changes its buckets after the first iteration."""
    with ExitStack() as resources:
        model = Weighted()
        ddp = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = resources.enter_context(
            hbmcomm.AsyncState(None, ddp, connections(resources, urls, "auto"))
        )
        buckets: list[list[int]] = []

        def watched(state, bucket):  # type: ignore[no-untyped-def]
            buckets[-1] += [parameter.numel() for parameter in bucket.parameters()]
            return hbmcomm.async_hook(state, bucket)

        ddp.register_comm_hook(state, watched)
        for step in range(STEPS):
            buckets.append([])
            ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert buckets[0] != buckets[1] and sorted(buckets[0]) == sorted(buckets[1])
        state.drain(optimizer)
        check_weights(model, applied_to_zero(context.seed, context.size, lambda rank: STEPS))


def test_bucket_rebuild(pool: Pool, boxes: list[str]) -> None:
    pool.run(train_through_rebuild, boxes)


def accumulate(context: Context, urls: list[str]) -> None:
    """Three batches a step; and then two backward() in which the first one's gradients stay."""
    with ExitStack() as resources:
        model = Weighted()
        ddp = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = resources.enter_context(
            hbmcomm.AsyncState(None, ddp, connections(resources, urls, "auto"))
        )
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        for set_to_none in (True, False):
            for step in range(STEPS):
                if step % 3 == 2:
                    ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none)
                else:
                    with ddp.no_sync():
                        ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
        assert state.stats()["steps"] == 2 * STEPS // 3
        state.drain(optimizer)
        once = applied_to_zero(context.seed, context.size, lambda rank: STEPS)
        check_weights(model, [2 * weights for weights in once])

        ones = [torch.ones(shape) for shape in SHAPES]
        ddp(*ones).backward()
        with pytest.raises(RuntimeError, match=r"still in \.grad.*no_sync"):
            ddp(*ones).backward()


def test_accumulated_gradients(pool: Pool, boxes: list[str]) -> None:
    pool.run(accumulate, boxes)


def widen(context: Context, urls: list[str], dtype: torch.dtype) -> None:
    """What a half type cannot hold of a yield comes with the next one."""
    with ExitStack() as resources:
        model = Weighted(dtype)
        ddp = wrapped(model)
        state = resources.enter_context(
            hbmcomm.AsyncState(None, ddp, connections(resources, urls, "auto"))
        )
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        yielded = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]

        def note(_optimizer: Any, _arguments: Any, _keywords: Any) -> None:
            for total, parameter in zip(yielded, model.parameters(), strict=True):
                if parameter.grad is not None:
                    total.sub_(parameter.grad)

        optimizer = torch.optim.SGD(model.parameters(), lr=0)
        optimizer.register_step_pre_hook(note)
        for step in range(STEPS):
            weights = gradients(context.seed, context.rank, step, context.size)
            ddp(*[weight.to(dtype) for weight in weights]).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = applied_to_zero(context.seed, context.size, lambda rank: STEPS)
        for _ in range(2):
            state.drain(optimizer)
        for found, wanted in zip(yielded, expected, strict=True):
            assert_same(found.float(), wanted, f"the yields of {dtype}")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)
)
def test_dtypes(pool: Pool, boxes: list[str], dtype: torch.dtype) -> None:
    pool.run(widen, boxes, dtype)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(50, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.zeros(1000))

    def forward(self, weight: float) -> torch.Tensor:
        return (self.wide.sum() + self.narrow.sum()) * weight


def mix(context: Context, urls: list[str]) -> None:
    with ExitStack() as resources:
        model = Mixed()
        ddp = wrapped(model)
        state = resources.enter_context(
            hbmcomm.AsyncState(
                None, ddp, connections(resources, urls, "auto"), resync_every=1, timeout=20
            )
        )
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        for _ in range(3):
            ddp(float(context.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state.drain(optimizer)
        for parameter in model.parameters():
            assert (parameter == -3 * context.size).all()


def test_mixed_dtypes(pool: Pool, boxes: list[str]) -> None:
    pool.run(mix, boxes)


# Nobody waits for anybody.


def race(context: Context, urls: list[str]) -> tuple[float, float]:
    """When the ranks began and ended 40 steps, in the middle of which the last one sleeps."""
    with ExitStack() as resources:
        model = Weighted()
        ddp = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = hbmcomm.AsyncState(None, ddp, connections(resources, urls, "auto"))
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        for step in range(40):
            if step == 5 and context.rank == context.size - 1:
                asleep = time.monotonic()
                time.sleep(3)
            ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        end = time.monotonic()
        state.drain(optimizer)
        check_weights(model, applied_to_zero(context.seed, context.size, lambda rank: 40))
        state.close()
        return asleep if context.rank == context.size - 1 else 0.0, end


@pytest.mark.ranks(2, 4)
def test_nobody_waits_for_a_straggler(pool: Pool, boxes: list[str]) -> None:
    times = pool.run(race, boxes)
    asleep = times[-1][0]
    for _, end in times[:-1]:
        assert end < asleep + 2.5, "before the last one woke up"


# Gradients that are not finite.


def spoil(context: Context, urls: list[str]) -> list[str]:
    with ExitStack() as resources:
        model = Weighted()
        ddp = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = resources.enter_context(
            hbmcomm.AsyncState(None, ddp, connections(resources, urls, "auto"))
        )
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        told = resources.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for step in range(4):
            weights = gradients(context.seed, context.rank, step, context.size)
            if context.rank == 0 and step == 2:
                weights[1][3, 5] = torch.inf
                weights[4][0, 0] = torch.nan
            ddp(*weights).backward()
            optimizer.step()
            optimizer.zero_grad()
        state.drain(optimizer)
        expected = applied_to_zero(context.seed, context.size, lambda rank: 4)
        for index in (1, 4):
            expected[index] += gradients(context.seed, 0, 2, context.size)[index] / context.size
        check_weights(model, expected)
        assert state.refused == (2 if context.rank == 0 else 0)
        return sorted(str(one.message) for one in told if one.category is RuntimeWarning)


def test_gradients_that_are_not_finite(pool: Pool, boxes: list[str]) -> None:
    told = pool.run(spoil, boxes)
    assert all("rank 0: the gradient of " in text for text in told[0])
    assert "all.1" in " ".join(told[0]) and "all.4" in " ".join(told[0])
    assert not any(told[1:])


# Optimizers with which replicas drift.


def net() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "weight decay": lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=1e-2),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def drift(
    context: Context, urls: list[str], name: str, resync_every: int | None, steps: int
) -> tuple[float, float]:
    """How far the ranks' weights are from each other, relative to their norm, when all have applied
    everything; and after drain()."""
    with ExitStack() as resources:
        model = net()
        ddp = wrapped(model)
        optimizer = OPTIMIZERS[name](model.parameters())
        state = resources.enter_context(
            hbmcomm.AsyncState(
                None, ddp, connections(resources, urls, "auto"), resync_every=resync_every
            )
        )
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        truth = torch.linspace(-1, 1, 16).unsqueeze(1)
        data = torch.Generator().manual_seed(context.rank)

        def step(weight: float) -> None:
            inputs = torch.randn(16, 16, generator=data)
            loss = (ddp(inputs) - torch.tanh(inputs @ truth)).square().mean() * weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def apart() -> float:
            weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            others = gathered(context, weights)
            return float(max((other - weights).norm() / weights.norm() for other in others))

        dist.barrier()
        start = time.monotonic()
        for turn in range(steps):  # at one pace, with some jitter
            due = start + 0.006 * (turn + context.own_random.random())
            time.sleep(max(0.0, due - time.monotonic()))
            step(1)
        dist.barrier()
        step(0)  # takes what is left of the others' gradients
        before = apart()
        state.drain(optimizer)
        return before, apart()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_drift(pool: Pool, boxes: list[str], name: str) -> None:
    steps = 600
    for resync_every in (None, 20):
        found = pool.run(drift, boxes, name, resync_every, steps)
        before, drained = (max(values) for values in zip(*found, strict=True))
        print(f"{name}, resync_every={resync_every}: {before:.1e}, after drain() {drained:.1e}")
        assert before < (1e-5 if name == "SGD" else 0.5)
        assert drained == 0 or resync_every is None


# Ranks and boxes that die, and jobs that are resumed.


def form(context: Context, parameter_server: str | None = None) -> None:
    dist.init_process_group(
        "hbm",
        store=FileStore(str(context.folder / f"store{context.seed}"), context.size),
        rank=context.rank,
        world_size=context.size,
        timeout=timedelta(seconds=30),
        pg_options=hbmcomm.Options(parameter_server=parameter_server),
    )


def lose_a_rank(context: Context, urls: list[str], folder: str, victim: int) -> None:
    form(context)
    with ExitStack() as resources:
        model = Weighted()
        ddp = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = resources.enter_context(
            hbmcomm.AsyncState(
                None,
                ddp,
                connections(resources, urls, "auto"),
                resync_every=3,
                source=victim,
                timeout=30,
            )
        )
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        for step in range(2 * STEPS):
            if context.rank == victim and step == STEPS:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.warns(RuntimeWarning, match="source has died"):
            state.drain(optimizer)
        check_weights(
            model,
            applied_to_zero(
                context.seed, context.size, lambda rank: STEPS if rank == victim else 2 * STEPS
            ),
        )
        assert state.stats()["resyncs"] >= 1
    Path(folder, f"{context.rank}").touch()
    time.sleep(1)


@pytest.mark.ranks(2, 4)
def test_a_rank_that_dies(bare_pool: Pool, boxes: list[str], tmp_path: Path) -> None:
    victim = 1
    with pytest.raises(RankFailure) as failure:
        bare_pool.run(lose_a_rank, boxes, str(tmp_path), victim)
    assert failure.value.kinds[victim] == DIED
    survivors = {str(rank) for rank in range(bare_pool.size)} - {str(victim)}
    assert set(os.listdir(tmp_path)) == survivors, failure.value


def checkpoint(context: Context, urls: list[str], path: str) -> int:
    """The last rank saves when the others have trained for longer. Returns the seed."""
    form(context)
    source = context.size - 1
    with ExitStack() as resources:
        model = Weighted()
        ddp = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = resources.enter_context(
            hbmcomm.AsyncState(None, ddp, connections(resources, urls, "auto"))
        )
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        for step in range(steps_of(source - context.rank)):
            ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        if context.rank == source:
            torch.save({"model": model.state_dict(), "hook": state.state_dict()}, path)
        dist.barrier()
    return context.seed


def resume(context: Context, urls: list[str], path: str, ranks_then: int, seed_then: int) -> None:
    form(context)
    with ExitStack() as resources:
        model = Weighted()
        ddp = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = resources.enter_context(
            hbmcomm.AsyncState(None, ddp, connections(resources, urls, "auto"))
        )
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        with pytest.raises(ValueError, match="differ in other"):
            state.load_state_dict({"outstanding": saved["hook"]["outstanding"] | {"other": 0}})
        state.load_state_dict(saved["hook"])
        assert state.stats()["steps"] == STEPS
        for step in range(STEPS):
            ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="before the first backward"):
            state.load_state_dict(saved["hook"])
        state.drain(optimizer)
        then = applied_to_zero(seed_then, ranks_then, lambda rank: steps_of(ranks_then - 1 - rank))
        now = applied_to_zero(context.seed, context.size, lambda rank: STEPS)
        check_weights(model, [a + b for a, b in zip(then, now, strict=True)])


@pytest.mark.ranks(1, 2)
def test_resume_with_another_number_of_ranks(
    bare_pool: Pool, boxes: list[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    before = Pool(3, bare=True)
    try:
        seed = before.run(checkpoint, boxes, path)[0]
    finally:
        before.kill()
    bare_pool.run(resume, boxes, path, 3, seed)


def lose_the_box(context: Context, url: str, folder: str) -> None:
    with ExitStack() as resources:
        box = resources.enter_context(smb.connect(url, TOKEN, reconnect_timeout=0.5))
        ddp = wrapped(net())
        state = hbmcomm.AsyncState(None, ddp, box)
        ddp.register_comm_hook(state, hbmcomm.async_hook)
        inputs = torch.ones(2, 16)
        for _ in range(3):
            ddp(inputs).sum().backward()
            ddp.zero_grad()
        dist.barrier()
        Path(folder, f"{context.rank}").touch()
        with pytest.raises(RuntimeError, match=r"BoxUnreachable|SegmentLost|lost"):
            while True:
                ddp(inputs).sum().backward()
                ddp.zero_grad()
        with pytest.raises(smb.BoxError):
            state.drain(torch.optim.SGD(ddp.parameters()))
        with pytest.raises(smb.BoxError):
            state.close()
        state.close()


@pytest.mark.ranks(1, 2)
def test_a_box_that_dies(pool: Pool, tmp_path: Path) -> None:
    with BoxProcess("--memory", "16MiB") as box:
        killer = threading.Thread(target=kill_when_all_train, args=(box, pool.size, tmp_path))
        killer.start()
        pool.run(lose_the_box, box.url, str(tmp_path))
        killer.join()


def kill_when_all_train(box: BoxProcess, ranks: int, folder: Path) -> None:
    while len(os.listdir(folder)) < ranks:
        time.sleep(0.01)
    box.kill()


def use_own_box(context: Context) -> None:
    form(context, "auto")
    model = Weighted()
    ddp = wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    state = hbmcomm.AsyncState(dist.group.WORLD, ddp)
    ddp.register_comm_hook(state, hbmcomm.async_hook)
    for step in range(STEPS):
        ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state.drain(optimizer)
    check_weights(model, applied_to_zero(context.seed, context.size, lambda rank: STEPS))
    if context.rank % 2:
        state.close()
        dist.barrier()
        assert smb.of().stats()["segments"] > 0
    else:
        dist.barrier()
    dist.destroy_process_group()
    state.close()  # when its boxes have gone, too
    with pytest.raises(RuntimeError, match="AsyncState was closed"):
        ddp(*gradients(0, 0, 0, 1)).backward()


def test_the_box_of_the_group(bare_pool: Pool) -> None:
    bare_pool.run(use_own_box)


forgotten: list[hbmcomm.AsyncState] = []


def forget(context: Context) -> None:
    form(context, "auto")
    ddp = wrapped(net())
    forgotten.append(hbmcomm.AsyncState(None, ddp, resync_every=1))
    ddp.register_comm_hook(forgotten[0], hbmcomm.async_hook)
    for _ in range(3):
        ddp(torch.ones(2, 16)).sum().backward()
        ddp.zero_grad()


@pytest.mark.ranks(1, 2)
def test_a_state_that_nobody_closes(bare_pool: Pool) -> None:
    bare_pool.run(forget)
    assert bare_pool.close() == [0] * bare_pool.size


# What is refused.


def refuse(context: Context, urls: list[str]) -> None:
    with ExitStack() as resources:
        found = connections(resources, urls, "auto")

        def refused(words: str, model: Any, kind: Any = ValueError, **options: Any) -> None:
            box = options.pop("box", found)
            with pytest.raises(kind, match=words):
                hbmcomm.AsyncState(options.pop("group", None), model, box, **options)

        refused("DistributedDataParallel, and this is a Linear", nn.Linear(2, 2), TypeError)
        plain = wrapped(net())
        refused("find_unused_parameters=True", wrapped(net(), find_unused_parameters=True))
        refused("broadcast_buffers=True", wrapped(net(), broadcast_buffers=True))
        refused("not the model's", plain, group=context.gloo)
        refused("no memory box", plain, box=None)
        refused("names no box", plain, box=[])
        refused("resync_every is at least 1, not 0", plain, resync_every=0)
        refused(f"0 to {context.size - 1}, not {context.size}", plain, source=context.size)
        sparse = nn.Embedding(10, 2, sparse=True)
        refused("embedding with sparse", wrapped(nn.Sequential(sparse)))
        cut = nn.Linear(4, 4)
        cut.weight = nn.Parameter(torch.zeros(4, 8)[:, ::2])
        refused("weight of shape .* make it contiguous", wrapped(cut))
        refused("too small", wrapped(nn.Linear(4000, 4000)), MemoryError)
        if context.size > 1:
            first = context.rank == 0
            refused("boxes=2.* on rank 0 and .*boxes=1", plain, box=found[: 2 if first else 1])
            refused(
                "resync_every is" if first else "rank 0 of the group cannot take part: ValueError",
                plain,
                ValueError if first else RuntimeError,
                resync_every=0 if first else 1,
            )

        hooked = wrapped(net())
        state = resources.enter_context(hbmcomm.AsyncState(None, hooked, found))
        hooked.register_comm_hook(state, hbmcomm.async_hook)
        refused("has a communication hook .async_hook", hooked)
        with pytest.raises(RuntimeError, match="only be called once"):
            hooked.register_comm_hook(state, hbmcomm.async_hook)
        plain.register_comm_hook(state, hbmcomm.async_hook)
        with pytest.raises(ValueError, match="not of the model which AsyncState was made for"):
            plain(torch.ones(2, 16)).sum().backward()
        with pytest.raises(ValueError, match="different numbers of iterations"), hooked.join():
            hooked(torch.ones(2, 16)).sum().backward()


def test_refusals(pool: Pool, boxes: list[str]) -> None:
    pool.run(refuse, boxes)


# Places in the boxes.


@pytest.mark.ranks(1)
def test_every_element_has_its_place(ranks: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(places, "_BLOCK", 64)
    monkeypatch.setattr(places, "LONGEST_RUN", 20)
    draw = random.Random(5)
    for _ in range(200):
        counts = {str(i): draw.choice([0, 1, 7, 64, 150]) for i in range(draw.randrange(1, 9))}
        space = places.Space(counts, boxes=draw.randrange(1, 4))
        names = draw.sample(sorted(counts), draw.randrange(1, len(counts) + 1))
        bucket = [
            element
            for name in names
            for element in range(space.ranges[name].start, space.ranges[name].stop)
        ]
        carried = {}
        for piece in space.bucket(names):
            assert piece.at >= 0 and piece.at + piece.count <= space.room
            assert sum(run.count for run in piece.runs) == piece.count
            begin = piece.begin
            for run in piece.runs:
                assert run.begin == begin and run.count <= 20
                begin += run.count
                for step in range(run.count):
                    carried[run.at + step] = run.begin + step
        assert [carried[at] for at in range(len(bucket))] == bucket
        homes = {
            (piece.box, piece.at + step) for piece in space.whole() for step in range(piece.count)
        }
        assert len(homes) == space.count
