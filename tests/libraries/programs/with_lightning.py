"""Trains with Lightning's Trainer, which starts the other ranks itself."""

from __future__ import annotations

import digits
import evidence
import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, options: evidence.Options) -> None:
        super().__init__()
        self.network = digits.network()
        self._options = options
        self._losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self._losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        right = (self.network(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    def on_train_end(self) -> None:
        logged = self.trainer.callback_metrics
        evidence.write(
            self._options.folder, self._losses, self.trainer.strategy.model,
            loss=logged["loss_epoch"], accuracy=logged["accuracy"],
            gathered=self.all_gather(torch.tensor(self._losses)),
        )  # fmt: skip


def main() -> None:
    options = evidence.options()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=options.ranks, max_epochs=2, default_root_dir=options.folder,
        strategy=DDPStrategy(process_group_backend=options.backend) if options.backend else "ddp",
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    train = DataLoader(digits.dataset(), batch_size=16, shuffle=True)
    trainer.fit(Digits(options), train, DataLoader(digits.dataset(), batch_size=64))


if __name__ == "__main__":
    main()
