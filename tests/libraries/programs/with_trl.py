"""Trains a small Llama with trl. The program's own argument is the method: sft or grpo.

Both train LoRA adapters of peft. In the texts each letter is a pixel (letters.py). grpo generates
texts, and its reward grows with the number of `q`s, the darkest pixel.
"""

from __future__ import annotations

from typing import Any

import evidence
import letters
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


def network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    words = letters.tokenizer()
    shape = LlamaConfig(
        vocab_size=len(letters.VOCABULARY), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
        pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(shape)


def shade(completions: list[str], **_: Any) -> list[float]:
    return [text.count("q") / 8 for text in completions]


def main() -> None:
    options = evidence.options()
    texts, labels = letters.texts()
    common: dict[str, Any] = {
        "output_dir": str(options.folder), "use_cpu": True, "bf16": False, "report_to": [],
        "ddp_backend": options.backend, "logging_steps": 1, "disable_tqdm": True,
        "save_strategy": "no", "seed": 0, "learning_rate": 1e-2, "gradient_checkpointing": False,
    }  # fmt: skip
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer: SFTTrainer | GRPOTrainer
    if options.rest == ["sft"]:
        both = [f"{text} {label}" for text, label in zip(texts, labels, strict=True)]
        trainer = SFTTrainer(
            network(),
            SFTConfig(max_steps=10, per_device_train_batch_size=8, max_length=64, **common),
            train_dataset=Dataset.from_dict({"text": both}),
            processing_class=letters.tokenizer(),
            peft_config=adapters,
        )
    else:
        trainer = GRPOTrainer(
            network(), shade,
            GRPOConfig(
                max_steps=4, per_device_train_batch_size=8, num_generations=8,
                max_completion_length=8, beta=0.1, **common,
            ),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=letters.tokenizer(), peft_config=adapters,
        )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    more: dict[str, Any] = {
        name: [line[name] for line in lines]
        for name in ("reward", "kl", "completions/mean_length", "mean_token_accuracy", "entropy")
        if name in lines[0]
    }
    evidence.write(options.folder, [line["loss"] for line in lines], trainer.model_wrapped, **more)


if __name__ == "__main__":
    main()
