"""replicate_shards(): wrong models and arguments are refused by name, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.layer_drop_ddp import gradients, wrapped
from harness.sharded import Blocks, backward, mesh_of, replicated, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import torch_hbmcomm as hbmcomm

pytestmark = [
    pytest.mark.ranks(4),
    pytest.mark.filterwarnings("ignore:layers that are always sent:RuntimeWarning"),
]


def refuse(context: Context) -> None:
    mesh = mesh_of(context)
    replicas: Any = mesh.get_group("nodes")
    make: Any = hbmcomm.replicate_shards

    def partly() -> Any:
        model = Blocks()
        fully_shard(model.blocks[0], mesh=mesh["shards"])
        return model

    def on_two_meshes() -> Any:
        model = Blocks()
        fully_shard(model.blocks[0], mesh=mesh["nodes"])
        fully_shard(model, mesh=mesh["shards"])
        return model

    def frozen() -> Any:
        model = Blocks()
        for one in model.parameters():
            one.requires_grad_(False)
        return sharded(mesh, model)

    def sparse() -> Any:
        model = nn.Sequential(nn.Embedding(8, 4, sparse=True))
        fully_shard(model, mesh=mesh["shards"])
        return model

    def hooked() -> Any:
        model = sharded(mesh)
        model.blocks[1].set_all_reduce_hook(print)
        return model

    def on_meta() -> Any:
        with torch.device("meta"):
            model = Blocks()
        return sharded(mesh, model)

    some = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    offload: Any = CPUOffloadPolicy(pin_memory=False)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (Blocks, {}, TypeError, "this Blocks has no sharded module: call fully_shard"),
        (lambda: wrapped(Blocks()), {}, TypeError, "this DistributedDataParallel has no sharded"),
        (lambda: 3, {}, TypeError, r"the model is a module that fully_shard\(\) took, not 3"),
        (lambda: fully_shard(Blocks(), mesh=mesh), {}, ValueError, r"replicates \(HSDP\): FSDP av"),
        (partly, {}, ValueError, r"blocks\.1\.all\.0 is not sharded, so FSDP does not reduce"),
        (on_two_meshes, {}, ValueError, r"the model is sharded over ranks .* and blocks\.0 over"),
        (frozen, {}, ValueError, "no parameter that requires a gradient"),
        (sparse, {}, ValueError, "0 is an embedding with sparse gradients"),
        (hooked, {}, ValueError, r"blocks\.1 has an all-reduce hook \(<built-in function print>"),
        (on_meta, {}, ValueError, r"blocks\.0\.all\.0 has no memory yet"),
        (
            lambda: sharded(mesh, mp_policy=half),
            {},
            ValueError,
            r"gradients of blocks\.0 as torch\.float16, and divides .*reduce_dtype=torch\.float32",
        ),
        (lambda: sharded(mesh, Blocks(torch.float64)), {}, ValueError, r"as torch\.float64, and"),
        (lambda: sharded(mesh, offload_policy=offload), {}, ValueError, "has CPUOffloadPolicy"),
        (lambda: sharded(mesh), {"replicas": None}, TypeError, "a process group, not None: the"),
        (lambda: sharded(mesh), {"replicas": 3}, TypeError, "group is a process group .* not int"),
        (
            lambda: sharded(mesh),
            {"replicas": mesh.get_group("shards")},
            ValueError,
            r"sharded over ranks \[\d, \d\], and replicas also has \[\d\]",
        ),
        (lambda: sharded(mesh), {"config": 0.9}, TypeError, "config of replicate_shards is a"),
        (
            lambda: sharded(mesh),
            {"config": hbmcomm.LowRank(ratio=1)},
            ValueError,
            r"ratio is in \[0, 1\), not 1",
        ),
        (
            lambda: sharded(mesh),
            {"config": hbmcomm.LowRank(ratio="auto")},
            ValueError,
            'ratio="auto" is for DistributedDataParallel',
        ),
        (
            lambda: sharded(mesh),
            {"config": hbmcomm.LayerDrop(ratio="auto")},
            ValueError,
            'ratio="auto" is for DistributedDataParallel',
        ),
        (
            lambda: sharded(mesh),
            {"config": hbmcomm.LayerDrop(target="blocks")},
            ValueError,
            'target="blocks" is for layer_drop_hook',
        ),
        (lambda: sharded(mesh), {"scaler": 3}, TypeError, "scaler is a torch.amp.GradScaler"),
        (lambda: sharded(mesh), {"optimizer": some}, ValueError, "replicate_shards: no optimizer"),
        (lambda: sharded(mesh), {"log_every": 0}, ValueError, "log_every is at least 1"),
    ]
    for model_of, options, error, complaint in cases:
        given = {"config": hbmcomm.LowRank(), "replicas": replicas} | options
        with pytest.raises(error, match=complaint):
            make(model_of(), **given)
        # One rank's mistake raises on every rank.
        bad = context.rank == 2
        good = {"config": hbmcomm.LowRank(), "replicas": replicas}
        wrong = model_of()
        model = sharded(mesh)
        with pytest.raises(error if bad else RuntimeError, match=complaint):
            make(wrong if bad else model, **(given if bad else good))
    state = make(model, hbmcomm.LowRank(ratio=0), replicas=replicas)
    backward(model, gradients(context.seed, context.rank, 0, context.size))
    assert state.summary()["steps"] == 1
    with pytest.raises(ValueError, match="has an all-reduce hook"):
        make(model, replicas=replicas)


def test_bad_models_and_arguments(pool: Pool) -> None:
    pool.run(refuse)


def differ(context: Context) -> None:
    mesh = mesh_of(context)
    model = sharded(mesh)
    replicas = mesh.get_group("nodes")
    make: Any = hbmcomm.replicate_shards
    node = mesh["nodes"].get_local_rank()
    low, drop = hbmcomm.LowRank(), hbmcomm.LayerDrop()
    for one, other, complaint in (
        (low, hbmcomm.LowRank(ratio=0.5), "ratio=0.9 on rank 0 and ratio=0.5 on rank"),
        (low, drop, "hook='low_rank_hook' on rank 0 and hook='layer_drop_hook' on rank"),
    ):
        for differing in (context.rank == 1, node == 1, context.rank % 2 == 1):
            with pytest.raises(ValueError, match=complaint):
                make(model, other if differing else one, replicas=replicas)
    scaler = torch.amp.GradScaler("cpu") if context.rank == 3 else None
    with pytest.raises(ValueError, match="scaler=False on rank 0 and scaler=True on rank 3"):
        make(model, replicas=replicas, scaler=scaler)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    with pytest.raises(ValueError, match=r"rank 0 has shard .*0, 2.*, and its replica rank 3 has"):
        make(model, replicas=crossed)
    alone, _ = dist.new_subgroups_by_enumeration([[0], [1], [2], [3]])
    given = alone if context.rank == 2 else replicas
    with pytest.raises(ValueError, match=r"rank 0 has replicas=\[0, 2\], and its replica rank 2"):
        make(model, replicas=given)
    narrow = nn.ParameterList([torch.zeros(6 + 2 * node, 3)])
    block: Any = nn.Sequential(narrow)
    fully_shard(block, mesh=mesh["shards"])
    with pytest.raises(ValueError, match=r"the shard of 0\.0 is .*3, 3.* on rank 0, and .*4, 3"):
        make(block, replicas=replicas)
    state = make(model, replicas=replicas)
    assert state.summary()["steps"] == 0


def test_arguments_that_differ(pool: Pool) -> None:
    pool.run(differ)


def force_sums(context: Context) -> None:
    mesh = mesh_of(context)
    model, _ = replicated(mesh)
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)
    with pytest.raises(ValueError, match=r"set_force_sum_reduction_for_comms\(\) is on in blocks"):
        backward(model, gradients(context.seed, context.rank, 0, context.size))


def test_sums_that_fsdp_divides_later(fresh_pool: Pool) -> None:
    fresh_pool.run(force_sums)


def tensor_parallel(context: Context) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    alone, _ = dist.new_subgroups_by_enumeration([[0], [1], [2], [3]])
    with pytest.raises(ValueError, match="is distributed over a mesh of 2 dimensions"):
        hbmcomm.replicate_shards(model, replicas=alone)


def test_tensor_parallel_models(pool: Pool) -> None:
    pool.run(tensor_parallel)


def drain_wrongly(context: Context) -> None:
    """A bad optimizer of one rank changes nothing on any rank."""
    mesh = mesh_of(context)
    model, state = replicated(mesh, "bytes", fixed_threshold=1e30, max_age=99)
    backward(model, gradients(context.seed, context.rank, 0, context.size))
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    some = torch.optim.SGD(list(model.parameters())[:1], lr=1)
    norm = state.summary()["cache_norm"]
    bad = context.rank == 1
    with pytest.raises(ValueError if bad else RuntimeError, match=r"drain\(\): no optimizer"):
        state.drain(some if bad else optimizer)
    assert state.summary()["cache_norm"] == norm
    state.drain(optimizer)
    assert state.summary()["cache_norm"] == 0


def test_a_bad_drain_of_one_rank(pool: Pool) -> None:
    pool.run(drain_wrongly)
