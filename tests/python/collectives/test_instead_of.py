"""HBMCOMM_INSTEAD_OF=gloo: a program that asks for Gloo gets hbm, under Gloo's name.

Each function runs in a pool with Gloo and in a pool with hbm. The tests compare the results.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import Context, Pool, beyond_gloo
from harness.hooks import low_rank
from harness.jobs import run_code
from harness.training import net, train
from harness.warm import run_warm
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import instead_of

pytestmark = beyond_gloo

CPU = torch.device("cpu")
ONE_RANK = """
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
dist.init_process_group({backend!r}, rank=0, world_size=1, store=HashStore())
print(type(dist.group.WORLD._get_backend(__import__("torch").device("cpu"))).__name__)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def gloo() -> Iterator[Pool]:
    pool = Pool(2, bare=True)
    yield pool
    pool.kill()


@pytest.fixture(scope="module")
def instead() -> Iterator[Pool]:
    pool = Pool(2, bare=True, environment={"HBMCOMM_INSTEAD_OF": "gloo"})
    yield pool
    pool.kill()


@contextmanager
def world(context: Context, backend: str | None, **options: Any) -> Iterator[None]:
    """Apply the pool's HBMCOMM_INSTEAD_OF, as `import torch` does, and form the default group."""
    chosen = os.environ.get("HBMCOMM_INSTEAD_OF")
    if chosen and not instead_of._replaced:
        instead_of.take_the_place_of(chosen)
    store = FileStore(str(context.folder / f"store-{context.seed}"), context.size)
    dist.init_process_group(
        backend, store=store, rank=context.rank, world_size=context.size, **options
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def default_group() -> Any:
    return distributed_c10d._get_default_group()


def cpu_backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(CPU)


def sum_over(group: dist.ProcessGroup) -> float:
    data = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(data, group=group)
    return float(data[0])


def same(gloo: Pool, instead: Pool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Check that both pools get equal results. Return the results of `instead`, by rank."""
    theirs = gloo.run(function, *arguments)
    ours = instead.run(function, *arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert not {key: (mine[key], other[key]) for key in mine if mine[key] != other[key]}
    return ours


def one_rank(backend: str | None, **environment: str) -> str:
    finished = run_code(ONE_RANK.format(backend=backend), 120, **environment)
    assert finished.code == 0, finished.output
    return finished.output


def test_it_is_off_by_default() -> None:
    assert one_rank("gloo") == "ProcessGroupGloo\n"


@pytest.mark.parametrize("backend", ["gloo", None])
def test_the_variable_is_read_by_import_torch(backend: str | None) -> None:
    assert one_rank(backend, HBMCOMM_INSTEAD_OF="gloo") == "ProcessGroupHbm\n"


def test_without_autoload_the_package_is_imported_by_hand() -> None:
    code = "import torch_hbmcomm\n" + ONE_RANK.format(backend="gloo")
    finished = run_code(code, HBMCOMM_INSTEAD_OF="gloo", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert finished.output == "ProcessGroupHbm\n"


def test_it_is_said_once_at_level_info() -> None:
    twice = ONE_RANK.format(backend="gloo") * 2
    finished = run_warm(twice, HBMCOMM_INSTEAD_OF="gloo", HBMCOMM_LOG="info")
    assert finished.output.count("info: HBMCOMM_INSTEAD_OF=gloo: ") == 1, finished.output


def what_programs_look_at(context: Context, asked: str | None) -> dict[str, Any]:
    with world(context, asked):
        group = default_group()
        backend = cpu_backend(group)
        dist.barrier()
        group.monitored_barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            distributed_c10d._set_pg_timeout(timedelta(seconds=71))
        seen = {
            "get_backend": dist.get_backend(),
            "is": dist.get_backend() is dist.Backend.GLOO,
            "get_backend_config": dist.get_backend_config(),
            "name": group.name() if asked and ":" not in asked else "",
            "_get_backend_name": group._get_backend_name() if asked and ":" not in asked else "",
            "backend.name": backend.name(),
            "options.backend": backend.options.backend,
            "timeout": backend.options._timeout,
            "devices": sorted(map(str, group._device_types)),
            "is_gloo_available": dist.is_gloo_available(),
            "is_backend_available": dist.is_backend_available("gloo"),
            "default": dist.get_default_backend_for_device("cpu"),
            "sum": sum_over(group),
        }
        if asked and ":" not in asked:
            dist.monitored_barrier()
        return seen


@pytest.mark.parametrize(
    "asked", ["gloo", "GLOO", "Gloo", None, "cpu:gloo", "cpu:gloo,cuda:gloo", "cuda:gloo,cpu:gloo"]
)
def test_programs_see_gloo(gloo: Pool, instead: Pool, asked: str | None) -> None:
    seen = same(gloo, instead, what_programs_look_at, asked)
    assert seen[0]["backend.name"] == "gloo"


def kind(group: dist.ProcessGroup) -> str:
    assert sum_over(group) == 3
    return f"{type(cpu_backend(group)).__name__} {cpu_backend(group).name()}"


def ways_to_a_group(context: Context) -> dict[str, str]:
    gloo_class: Any = dist.ProcessGroupGloo
    options = gloo_class._Options()
    with world(context, "gloo"):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        flat = DeviceMesh("cpu", torch.arange(2))
        functional = funcol.all_reduce(torch.ones(1), "sum", flat)
        assert functional.item() == 2
        seconds, _ = dist.new_subgroups(2)
        split = default_group().split_group([0, 1])
        made = {
            "default": default_group(),
            "new_group": dist.new_group(),
            "by name": dist.new_group(backend="gloo"),
            "by constant": dist.new_group(backend=dist.Backend.GLOO),
            "by device": dist.new_group(backend="cpu:gloo"),
            "with options": dist.new_group(backend="gloo", pg_options=options),
            "new_subgroups": seconds,
            "init_device_mesh": mesh["b"].get_group(),
            "DeviceMesh": flat.get_group(),
            "split_group": split,
            "by hand": by_hand(context),
        }
        assert dist.new_group([1 - context.rank]) in (None, dist.GroupMember.NON_GROUP_MEMBER)
        return {way: kind(group) for way, group in made.items()}


def by_hand(context: Context) -> Any:
    """Make a group without torch.distributed, as some libraries do."""
    store = PrefixStore("by hand", distributed_c10d._get_default_store())
    group: Any = dist.ProcessGroup(store, context.rank, context.size)
    backend = dist.ProcessGroupGloo(store, context.rank, context.size, timedelta(seconds=60))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend._set_sequence_number_for_group()
    with mock.patch.object(instead_of, "_create", wraps=instead_of._create) as create:
        for _ in range(2):  # some libraries register for a device and for "cpu"
            group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    assert create.call_count == 1
    assert group.name() == "gloo"
    assert group._get_sequence_number_for_group() == 0
    return group


def test_every_way_to_a_group_leads_to_hbm(instead: Pool) -> None:
    assert set(instead.run(ways_to_a_group)[0].values()) == {"ProcessGroupHbm gloo"}


def groups_by_name(context: Context) -> None:
    with world(context, "hbm"):
        named = default_group()
        assert (dist.get_backend(), dist.get_backend_config()) == ("hbm", "cpu:hbm")
        asked = dist.new_group(backend="gloo")
        mixed = dist.new_group(backend="cpu:hbm")
        assert kind(named) == kind(mixed) == "ProcessGroupHbm hbm"
        assert kind(asked) == "ProcessGroupHbm gloo"
        assert named.name() == "custom" and asked.name() == "gloo"
        inherited = dist.new_group()
        assert kind(inherited) == "ProcessGroupHbm hbm"


def test_a_request_for_hbm_gets_hbm(instead: Pool) -> None:
    instead.run(groups_by_name)


def beside_gpus(context: Context) -> None:
    with mock.patch("torch.cuda.device_count", return_value=1), world(context, "gloo"):
        group = default_group()
        assert kind(group) == "ProcessGroupHbm gloo"
        assert type(group._get_backend(torch.device("cuda"))) is dist.ProcessGroupGloo
        assert dist.get_backend_config() == "cpu:gloo,cuda:gloo"


def test_tensors_on_gpus_stay_with_gloo(instead: Pool) -> None:
    instead.run(beside_gpus)


def debugged(context: Context) -> None:
    debugging: Any = dist
    debugging.set_debug_level(debugging.DebugLevel.DETAIL)
    try:
        with world(context, "gloo"):
            group = default_group()
            assert type(cpu_backend(group).wrapped_pg).__name__ == "ProcessGroupHbm"
            assert group.name() == cpu_backend(group).name() == "gloo"
            assert sum_over(group) == 3
            hbmcomm.monitored_barrier()
    finally:
        debugging.set_debug_level(debugging.DebugLevel.OFF)


def test_pytorchs_debugging_wraps_hbm(instead: Pool) -> None:
    instead.run(debugged)


def use_own_names(context: Context) -> None:
    options = hbmcomm.Options(staging_bytes=1 << 20)
    with world(context, "gloo", pg_options=options):
        backend: Any = cpu_backend(default_group())
        assert backend.options.staging_bytes == 1 << 20
        hbmcomm.monitored_barrier()
        part = hbmcomm.split_group(split_ranks=[[0, 1]])
        assert part is not None
        assert kind(part) == "ProcessGroupHbm gloo"
        model = DistributedDataParallel(net())
        low_rank(model, ratio=0.5)
        train(model, context)


def test_hbms_options_and_functions_work_for_these_groups(instead: Pool) -> None:
    instead.run(use_own_names)


def train_ddp(context: Context, seed: int) -> dict[str, Any]:
    with world(context, "gloo"):
        return trained_and_logged(Context(context.rank, context.size, None, context.folder, seed))


def trained_and_logged(context: Context) -> dict[str, Any]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    weights = [tensor.tolist() for tensor in train(model, context)]
    logged = model._get_ddp_logging_data()
    return {"weights": weights} | {key: logged[key] for key in logged if "time" not in key}


def test_ddp_gives_and_logs_the_same(gloo: Pool, instead: Pool) -> None:
    same(gloo, instead, train_ddp, 3)  # the sum of two has the same bits in either order


def profiled(context: Context) -> dict[str, Any]:
    """Return the names and shapes in the profiler's record of each operation."""
    rank, size = context.rank, context.size
    pairs = [torch.ones(4), torch.ones(4)]

    def everyone() -> list[torch.Tensor]:
        return [torch.empty(4) for _ in range(size)]

    def point_to_point(receive: Callable[[], Any]) -> Any:
        return dist.send(torch.ones(4), 1) if rank == 0 else receive()

    with world(context, "gloo"):
        group = default_group()
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
            "async": lambda: dist.all_reduce(torch.ones(4), async_op=True),
            "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(pairs),
            "sparse": lambda: dist.all_reduce(torch.ones(4).to_sparse()),
            "broadcast": lambda: dist.broadcast(torch.ones(4), 0),
            "reduce": lambda: dist.reduce(torch.ones(4), 0),
            "all_gather": lambda: dist.all_gather(everyone(), torch.ones(4)),
            "into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(8), torch.ones(4)),
            "coalesced": lambda: dist.all_gather_coalesced([everyone(), everyone()], pairs),
            "gather": lambda: dist.gather(torch.ones(4), None if rank else everyone()),
            "scatter": lambda: dist.scatter(torch.ones(4), None if rank else everyone()),
            "to_all": lambda: dist.all_to_all(everyone(), [torch.ones(4)] * size),
            "to_all_single": lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4)),
            "barrier": dist.barrier,
            "recv": lambda: point_to_point(lambda: dist.recv(torch.empty(4), 0)),
            "any": lambda: point_to_point(lambda: dist.recv(torch.empty(4))),
            "gather_coalesced": lambda: group.allgather_into_tensor_coalesced(
                [torch.empty(8), torch.empty(8)], pairs
            ),
        }
        return {name: ranges(call) for name, call in calls.items()}


def ranges(call: Callable[[], Any]) -> list[Any]:
    with torch.profiler.profile(record_shapes=True) as profile:
        work = call()
        if work is not None and hasattr(work, "wait"):
            work.wait()
    return [
        (event.name, event.input_shapes)
        for event in profile.events() or []
        if event.name.startswith(("gloo:", "hbm:"))
    ]


def profiled_reduce_scatter(context: Context) -> dict[str, Any]:
    inputs = [torch.ones(4) for _ in range(context.size)]
    with world(context, "gloo"):
        shown = ranges(lambda: dist.reduce_scatter(torch.empty(4), inputs))
    return {"names": {name for name, _ in shown}}  # Gloo has a record for each rank


def test_the_profiler_shows_the_ranges_of_gloo(gloo: Pool, instead: Pool) -> None:
    same(gloo, instead, profiled)
    same(gloo, instead, profiled_reduce_scatter)
