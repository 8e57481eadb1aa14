"""Trains with ignite; idist.auto_model wraps the network."""

from __future__ import annotations

import digits
import evidence
import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def training(_: int, options: evidence.Options) -> None:
    model = idist.auto_model(digits.network())
    if options.group:  # ignite leaves out DDP for a backend that it does not know
        assert not isinstance(model, DistributedDataParallel)
        model = DistributedDataParallel(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    loader = idist.auto_dataloader(digits.dataset(), batch_size=32, shuffle=True)
    losses: list[float] = []
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
    )
    trainer.run(loader, max_epochs=2)

    metrics = {"accuracy": Accuracy(), "loss": Loss(cross_entropy)}
    result = create_supervised_evaluator(model, metrics).run(loader).metrics
    gathered = idist.all_gather(torch.tensor(losses))
    mean = idist.all_reduce(torch.tensor(losses), "SUM") / idist.get_world_size()
    assert idist.broadcast(f"rank {idist.get_rank()}", src=0, safe_mode=True) == "rank 0"
    idist.barrier()
    evidence.write(
        options.folder, losses, model,
        evaluation=[result["accuracy"], result["loss"]], gathered=gathered, mean=mean,
    )  # fmt: skip


def main() -> None:
    options = evidence.options()
    with idist.Parallel(backend=None if options.group else options.backend or "gloo") as parallel:
        parallel.run(training, options)


if __name__ == "__main__":
    main()
