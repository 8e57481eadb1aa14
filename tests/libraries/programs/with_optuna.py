"""Searches a learning rate with Optuna; all ranks train together in each trial."""

from __future__ import annotations

from contextlib import suppress

import digits
import evidence
import optuna
import torch
import torch.distributed as dist
from optuna_integration import TorchDistributedTrial
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

TRIALS = 6


class Search:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.parameters: list[float] = []
        self.pruned = 0

    def __call__(self, single: optuna.trial.Trial | None) -> float:
        """Trains once. Rank 0 passes its trial, and the other ranks pass None."""
        trial = TorchDistributedTrial(single)
        rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
        momentum = trial.suggest_categorical("momentum", [0.0, 0.9])
        steps = trial.suggest_int("steps", 4, 8)
        self.parameters += [rate, momentum, steps]
        rank, size = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(digits.network())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=momentum)
        images, labels = digits.dataset().tensors
        for step in range(steps):
            own = torch.arange(digits.IMAGES)[rank + step :: 3 * size]
            optimizer.zero_grad()
            loss = cross_entropy(self.model(images[own]), labels[own])
            loss.backward()
            optimizer.step()
            mean = loss.detach()
            dist.all_reduce(mean)
            self.losses.append(mean.item() / size)
            trial.report(self.losses[-1], step)
            if trial.should_prune():
                self.pruned += 1
                raise optuna.TrialPruned
        trial.set_user_attr("size", size)
        assert trial.user_attrs == {"size": size}
        return self.losses[-1]


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    search = Search()
    if dist.get_rank() == 0:
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=2),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=1),
        )
        study.optimize(search, n_trials=TRIALS)
    else:
        for _ in range(TRIALS):
            with suppress(optuna.TrialPruned):
                search(None)
    assert search.pruned
    evidence.write(
        options.folder, search.losses, search.model,
        parameters=search.parameters, pruned=search.pruned,
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
