"""Trains with transformers' Trainer: a BERT of two layers, whose tokens are pixels."""

from __future__ import annotations

from typing import Any

import digits
import evidence
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Pixels(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        pixels, self._labels = digits.dataset().tensors
        self._tokens = (pixels * 16).long()

    def __len__(self) -> int:
        return len(self._labels) - 1  # no multiple of the batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    options = evidence.options()
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=17, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, num_labels=10,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(options.folder), use_cpu=True, ddp_backend=options.backend, max_steps=12,
        per_device_train_batch_size=8, per_device_eval_batch_size=32, learning_rate=1e-3,
        logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", seed=0,
    )  # fmt: skip
    pixels = Pixels()
    trainer = Trainer(
        BertForSequenceClassification(shape), arguments,
        train_dataset=pixels, eval_dataset=pixels, compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    result = trainer.evaluate()
    evidence.write(
        options.folder, losses, trainer.model_wrapped,
        evaluation=[result["eval_loss"], result["eval_accuracy"]],
    )  # fmt: skip


if __name__ == "__main__":
    main()
