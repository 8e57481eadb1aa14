"""async_hook: deaths of ranks and boxes, resumed jobs, and refused arguments."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, RankFailure, seeds
from harness.asynchronous import (
    MARKS,
    STEPS,
    Weighted,
    applied_to_zero,
    check_weights,
    connections,
    gradients,
    hooked,
    net,
    steps_of,
    two_boxes,
    wrapped,
)
from harness.box_process import TOKEN, BoxProcess
from harness.events import await_rank, tell
from harness.pool import DIED
from torch import nn
from torch._C._distributed_c10d import FileStore

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb
from torch_hbmcomm.async_ddp import layout

pytestmark = MARKS

LEASE = 3.0  # seconds; a live rank renews its lease three times, also on a busy machine


@pytest.fixture(scope="module")
def boxes() -> Iterator[list[str]]:
    with two_boxes(LEASE) as urls:
        yield urls


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
    with hooked(urls, resync_every=3, source=victim, timeout=30) as (model, ddp, optimizer, state):
        for step in range(2 * STEPS):
            if step == STEPS and context.rank == victim:
                tell(context, "trained")
                for other in set(range(context.size)) - {victim}:
                    await_rank(context, "trained", other)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS:  # the source has published versions
                await_rank(context, "trained", victim)
            ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        tell(context, "trained")
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


@pytest.mark.ranks(2, 4)
def test_a_rank_that_dies(bare_pool: Pool, boxes: list[str], tmp_path: Path) -> None:
    victim = 1
    with pytest.raises(RankFailure) as failure:
        bare_pool.run(lose_a_rank, boxes, str(tmp_path), victim)
    assert failure.value.kinds[victim] == DIED
    survivors = {str(rank) for rank in range(bare_pool.size)} - {str(victim)}
    assert set(os.listdir(tmp_path)) == survivors, failure.value


def checkpoint(context: Context, urls: list[str], path: str) -> int:
    """Train, and save on the last rank, which takes the fewest steps. Returns the seed."""
    form(context)
    source = context.size - 1
    with hooked(urls) as (model, ddp, optimizer, state):
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
    with hooked(urls) as (model, ddp, optimizer, state):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        with pytest.raises(ValueError, match="differ in other"):
            other = {"outstanding": saved["hook"]["outstanding"] | {"other": 0}}
            state.load_state_dict(saved["hook"] | other)
        for key in saved["hook"]:
            rest = {name: value for name, value in saved["hook"].items() if name != key}
            with pytest.raises(
                ValueError, match=f"the state lacks {key}: load the result of state_dict"
            ):
                state.load_state_dict(rest)
        with pytest.raises(TypeError):
            state.load_state_dict(saved["hook"] | {"refused": None})
        # No earlier load has succeeded, so outstanding additions count once.
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
    state.close()  # works although its boxes have gone
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
def test_an_unclosed_state_ends_with_the_process(bare_pool: Pool) -> None:
    bare_pool.run(forget)
    assert bare_pool.close() == [0] * bare_pool.size


# Refusals.


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
            for kind, bad in (
                ("ValueError: resync_every", {"resync_every": 0}),
                ("ValueError: the group is not the model's", {"group": context.gloo}),
                ("ValueError: .* names no box", {"box": []}),
                ("TypeError: .*wrap the model first", {"model": nn.Linear(2, 2)}),
            ):
                options: dict[str, Any] = {"model": plain} | (bad if first else {})
                name, _, words = kind.partition(": ")
                own = {"ValueError": ValueError, "TypeError": TypeError}[name]
                elsewhere = f"rank 0 of the group cannot take part: {kind}"
                refused(
                    words if first else elsewhere, kind=own if first else RuntimeError, **options
                )
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total.item() == context.size

        taken = wrapped(net())
        state = resources.enter_context(hbmcomm.AsyncState(None, taken, found))
        taken.register_comm_hook(state, hbmcomm.async_hook)
        refused("has a communication hook .async_hook", taken)
        with pytest.raises(RuntimeError, match="only be called once"):
            taken.register_comm_hook(state, hbmcomm.async_hook)
        plain.register_comm_hook(state, hbmcomm.async_hook)
        with pytest.raises(ValueError, match="not of the model which AsyncState was made for"):
            plain(torch.ones(2, 16)).sum().backward()
        with pytest.raises(ValueError, match="different numbers of iterations"), taken.join():
            taken(torch.ones(2, 16)).sum().backward()


def test_refusals(pool: Pool, boxes: list[str]) -> None:
    pool.run(refuse, boxes)


# The locations of elements in the boxes.


@pytest.mark.ranks(1)
def test_every_element_has_one_location(ranks: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(layout, "_SHARD_BYTES", 64 * 8)
    monkeypatch.setattr(layout, "LONGEST_RUN", 20)
    draw = seeds.draws(0)
    for _ in range(200):
        counts = {str(i): draw.choice([0, 1, 7, 64, 150]) for i in range(draw.randrange(1, 9))}
        placed = layout.FlatLayout(counts, torch.float32, boxes=draw.randrange(1, 4))
        names = draw.sample(sorted(counts), draw.randrange(1, len(counts) + 1))
        bucket = [
            element
            for name in names
            for element in range(placed.ranges[name].start, placed.ranges[name].stop)
        ]
        homes = {  # by index in the flat tensors: box and byte
            run.begin + step: (shard.box, shard.offset + (run.inside + step) * 8)
            for shard, runs in placed.bucket(list(placed.ranges))
            for run in runs
            for step in range(run.count)
        }
        assert sorted(homes) == list(range(placed.count))
        assert len(set(homes.values())) == placed.count
        carried = {}
        for shard, runs in placed.bucket(names):
            assert shard.offset + shard.size <= placed.totals.weights_bytes[shard.box]
            assert shard.delta_offset + shard.delta_size <= placed.totals.delta_bytes[shard.box]
            inside = 0
            for run in runs:
                assert run.inside == inside and run.count <= 20
                inside += run.count
                for step in range(run.count):
                    carried[run.at + step] = run.begin + step
                    home = (shard.box, shard.offset + (run.inside + step) * 8)
                    assert homes[run.begin + step] == home
            assert inside == shard.count
        assert [carried[at] for at in range(len(bucket))] == bucket
