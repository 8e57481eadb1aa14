"""Trains a small Llama of transformers whose layers are split over the ranks (tp_plan)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import evidence
import letters
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def saved(folder: Path) -> Path:
    """Return the folder of a model that rank 0 saves. Waits until this folder is complete."""
    model = folder / "model"
    if os.environ["RANK"] == "0":
        torch.manual_seed(0)
        shape = LlamaConfig(
            vocab_size=len(letters.VOCABULARY), hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(shape).save_pretrained(folder / "unfinished")
        (folder / "unfinished").rename(model)
    while not model.exists():
        time.sleep(0.01)
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    options = evidence.options()
    folder = saved(options.folder)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    split = model.lm_head.weight
    assert isinstance(split, DTensor)
    group = split.device_mesh.get_group()
    assert split.to_local().numel() * group.size() == split.numel()

    tokenizer = letters.tokenizer()
    prompts, answers = letters.texts()
    texts = [" ".join(pair) for pair in zip(prompts, answers, strict=True)]
    tokens = torch.tensor(tokenizer(texts).input_ids)
    with torch.no_grad():
        unsplit = LlamaForCausalLM.from_pretrained(folder)
        expected = unsplit(tokens[:16]).logits
        torch.testing.assert_close(whole(model(tokens[:16]).logits), expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for step in range(12):
        batch = tokens[step::16]
        optimizer.zero_grad()
        loss = whole(model(batch, labels=batch).loss)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    generated = model.generate(tokens[:8, :32], max_new_tokens=4, do_sample=False)
    for name, value in model.named_parameters():
        unsplit.get_parameter(name).data.copy_(whole(value.detach()))
    evidence.write(options.folder, losses, unsplit, group, generated=generated)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
