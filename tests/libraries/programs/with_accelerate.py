"""Trains with accelerate, as its documentation shows."""

from __future__ import annotations

import digits
import evidence
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list, gather_object
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    options = evidence.options()
    named = [InitProcessGroupKwargs(backend=options.backend)] if options.backend else []
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=named)
    network = digits.network()
    model, optimizer, loader = accelerator.prepare(
        network,
        torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9),
        DataLoader(digits.dataset(), batch_size=16, shuffle=True),
    )
    losses = []
    for _ in range(2):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())

    # 511 images do not fill the last batch: gather_for_metrics() drops the padding.
    uneven = torch.utils.data.Subset(digits.dataset(), range(digits.IMAGES - 1))
    guesses = []
    model.eval()
    for images, labels in accelerator.prepare(DataLoader(uneven, batch_size=16)):
        guess = model(images).argmax(1)
        guesses.append(torch.stack(accelerator.gather_for_metrics((guess, labels)), 1))
    objects = gather_object([accelerator.process_index])
    assert objects == list(range(options.ranks)), objects
    assert broadcast_object_list([accelerator.process_index]) == [0]
    length = accelerator.process_index + 1
    padded = accelerator.pad_across_processes(torch.full((length,), float(length)))
    accelerator.wait_for_everyone()
    evidence.write(
        options.folder, losses, model,
        guesses=torch.cat(guesses), padded=accelerator.reduce(padded, "mean"),
    )  # fmt: skip
    accelerator.end_training()


if __name__ == "__main__":
    main()
