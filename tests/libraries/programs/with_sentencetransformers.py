"""Trains a sentence embedding with sentence-transformers; its loss gathers from all ranks."""

from __future__ import annotations

import evidence
import letters
import torch
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel


def encoder(folder: str) -> SentenceTransformer:
    """Return a BERT with random weights, which rank 0 writes to `folder`."""
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=len(letters.VOCABULARY), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    if dist.get_rank() == 0:
        BertModel(shape).save_pretrained(folder)
        letters.tokenizer().save_pretrained(folder)
    dist.barrier()
    trunk = Transformer(folder)
    return SentenceTransformer(
        modules=[trunk, Pooling(trunk.get_embedding_dimension())], device="cpu"
    )


def pairs() -> Dataset:
    """Return pairs of texts that show the same digit."""
    texts, labels = letters.texts()
    of: dict[str, list[str]] = {}
    for text, label in zip(texts, labels, strict=True):
        of.setdefault(label, []).append(text)
    found = [pair for same in of.values() for pair in zip(same[::2], same[1::2], strict=False)]
    return Dataset.from_dict({"anchor": [a for a, _ in found], "positive": [b for _, b in found]})


def main() -> None:
    options = evidence.options()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(options.folder), use_cpu=True, ddp_backend=options.backend, max_steps=12,
        per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=1, report_to=[],
        disable_tqdm=True, save_strategy="no", seed=0,
    )  # fmt: skip
    model = encoder(str(options.folder / "encoder"))
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=pairs(),
        loss=MultipleNegativesRankingLoss(model, gather_across_devices=True),
    )  # fmt: skip
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    texts, _ = letters.texts()
    embeddings = model.encode(texts[:16], convert_to_tensor=True, show_progress_bar=False)
    evidence.write(options.folder, losses, trainer.model_wrapped, embeddings=embeddings)


if __name__ == "__main__":
    main()
