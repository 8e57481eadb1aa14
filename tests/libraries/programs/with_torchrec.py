"""Trains a DLRM of torchrec. Tables are whole on a rank, divided by rows, or by columns."""

from __future__ import annotations

import evidence
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

FEATURES = [f"feature{number}" for number in range(4)]
ROWS = 100


def network() -> DLRMTrain:
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(
        device=torch.device("cpu"),
        tables=[
            EmbeddingBagConfig(
                name=f"table of {feature}", embedding_dim=16, num_embeddings=ROWS,
                feature_names=[feature],
            )
            for feature in FEATURES
        ],
    )  # fmt: skip
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    return DLRMTrain(
        DLRM(tables, dense_in_features=8, dense_arch_layer_sizes=[32, 16],
             over_arch_layer_sizes=[32, 1])
    )  # fmt: skip


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    module = network()
    sharder = EmbeddingBagCollectionSharder()
    ways = [
        table_wise(rank=0),
        table_wise(rank=size - 1),
        row_wise(),
        column_wise(list(range(size))),
    ]
    tables = module.model.sparse_arch.embedding_bag_collection
    plan = construct_module_sharding_plan(
        tables,
        {f"table of {feature}": way for feature, way in zip(FEATURES, ways, strict=True)},
        sharder, local_size=size, world_size=size, device_type="cpu",
    )  # fmt: skip
    model = DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"),
        plan=ShardingPlan({"model.sparse_arch.embedding_bag_collection": plan}),
        sharders=[sharder],
    )  # fmt: skip
    dense = [value for name, value in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.Adam(dense, lr=0.01)
    batches = RandomRecDataset(
        keys=FEATURES, batch_size=32, hash_size=ROWS, ids_per_feature=3, num_dense=8,
        manual_seed=rank, num_generated_batches=4, num_batches=16,
    )  # fmt: skip
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    own = [value for name, value in model.named_parameters() if "embedding_bags" in name]
    evidence.write(
        options.folder, losses, torch.nn.ParameterList(dense), dist.group.WORLD,
        tables=torch.nn.utils.parameters_to_vector(own).detach(),
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
