"""Splits a small Llama over the ranks with deepspeed.init_inference, and generates with it.

The program's own argument is "operator" or "group". With "operator" DeepSpeed's own operator adds
the activations of the ranks. With "group" the process group adds them.
"""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import evidence
import letters
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM


class Counter:
    """Counts calls of dist.all_reduce while it replaces this function."""

    def __init__(self) -> None:
        self.calls = 0
        self._inner = dist.all_reduce
        dist.all_reduce = self

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.calls += 1
        return self._inner(*arguments, **more)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(letters.VOCABULARY), hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(shape).eval()


def main() -> None:
    options = evidence.options()
    [adder] = options.rest
    if adder == "group":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    deepspeed.init_distributed(dist_backend=options.backend)
    whole = model()
    engine = deepspeed.init_inference(
        model(), tensor_parallel={"tp_size": options.ranks}, dtype=torch.float32
    )
    sizes = [sum(value.numel() for value in net.parameters()) for net in (engine.module, whole)]
    assert sizes[0] < 0.75 * sizes[1]
    prompts, answers = letters.texts()
    texts = [" ".join(pair) for pair in zip(prompts, answers, strict=True)]
    tokens = torch.tensor(letters.tokenizer()(texts[:32]).input_ids)
    counter = Counter()
    with torch.no_grad():
        found = engine(tokens, labels=tokens)
        torch.testing.assert_close(found.logits, whole(tokens).logits)
        generated = engine.generate(tokens[:8, :32], max_new_tokens=4, do_sample=False)
    assert (counter.calls == 0) == (adder == "operator"), counter.calls
    evidence.write(
        options.folder, [found.loss.item()], whole, dist.group.WORLD,
        logits=found.logits, generated=generated, calls=counter.calls,
    )  # fmt: skip
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
