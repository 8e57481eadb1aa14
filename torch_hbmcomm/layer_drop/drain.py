"""What is still cached at the end of a training, as gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_hbmcomm.layer_drop.cache import Cache
from torch_hbmcomm.layer_drop.mean import Mean


def move_to_gradients(cache: Cache, parameters: Mapping[str, torch.Tensor], mean: Mean) -> None:
    """Collective. Empties the cache: .grad becomes the mean over the ranks; None for a parameter
    of which nobody had anything.

    Raises OverflowError, on all ranks, for what a gradient cannot hold; then nothing has changed.
    """
    held = cache.state_dict(parameters)
    gradients = {}
    for name, parameter in parameters.items():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        total = torch.zeros_like(parameter, dtype=wide, requires_grad=False)
        if name in held:
            total.copy_(held[name])
        mean.start(mean.scaled(total)).wait()
        gradients[name] = total.to(parameter.dtype)
        if not gradients[name].isfinite().all():
            raise OverflowError(
                f"what is cached of {name} is not finite as {parameter.dtype}: a smaller max_age "
                "lets less add up"
            )
    cache.load_state_dict([], parameters)
    for name, parameter in parameters.items():
        parameter.grad = gradients[name] if gradients[name].any() else None
