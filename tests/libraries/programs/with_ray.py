"""Trains with Ray Train, which starts the ranks in processes of its own."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import digits
import evidence
import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def training(config: dict[str, Any]) -> None:
    model = prepare_model(digits.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = prepare_data_loader(DataLoader(digits.dataset(), batch_size=16, shuffle=True))
    losses = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ray.train.report({"loss": losses[-1]})
    evidence.write(config["folder"], losses, model)


def main() -> None:
    options = evidence.options()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # for Unix sockets
        ray.init(
            num_cpus=options.ranks + 1, include_dashboard=False, object_store_memory=100 << 20,
            _temp_dir=short, _node_ip_address="127.0.0.1", logging_level="warning",
        )  # fmt: skip
        TorchTrainer(
            training,
            train_loop_config={"folder": options.folder},
            scaling_config=ScalingConfig(num_workers=options.ranks),
            torch_config=TorchConfig(backend=options.backend),
            run_config=RunConfig(storage_path=str(options.folder)),
        ).fit()
        ray.shutdown()


if __name__ == "__main__":
    main()
