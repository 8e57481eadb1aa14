"""What is still cached at the end of a training, as gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_hbmcomm.layer_drop.cache import Cache
from torch_hbmcomm.layer_drop.mean import Mean


def move_to_gradients(cache: Cache, parameters: Mapping[str, torch.Tensor], mean: Mean) -> None:
    """Collective. Empties the cache: .grad becomes the mean over the ranks; None for a parameter
    of which nobody had anything."""
    held = cache.state_dict(parameters)
    cache.load_state_dict([], parameters)
    for name, parameter in parameters.items():
        gradient = torch.zeros_like(parameter, requires_grad=False)
        if name in held:
            gradient.copy_(held[name])
        mean.start(mean.scaled(gradient)).wait()
        parameter.grad = gradient if gradient.any() else None
