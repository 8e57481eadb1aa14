"""layer_drop_hook and its state, as a training script sees them.

DDP compares the hook's annotations with classes, so they must not be strings: this module has no
`from __future__ import annotations`.
"""

import logging
from collections.abc import Collection, Sequence

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.error_feedback.state import ErrorFeedbackState, StepHook, run_hook
from torch_hbmcomm.layer_drop import blocks
from torch_hbmcomm.layer_drop.block_encoder import BlockEncoder
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.decision import layers_of
from torch_hbmcomm.layer_drop.encoder import LayerDropEncoder
from torch_hbmcomm.layer_drop.optimizer import CatchUp
from torch_hbmcomm.optimizers import Optimizer


class LayerDropState(ErrorFeedbackState[LayerDrop]):
    """The state of layer_drop_hook: layer-wise dropping with error feedback under DDP.

        ddp = DistributedDataParallel(model)
        state = hbmcomm.LayerDropState(ddp, hbmcomm.LayerDrop(ratio=0.9))  # on every rank
        ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
        ...  # the training loop as it was

    Layers are sent whole or not at all (Lee et al. 2020, sections 4 and 5; decision.py). Each rank
    adds its gradients to its residuals. Layers whose residual reaches a threshold are averaged over
    the ranks, and their residuals become zero, except for rounding errors under
    LayerDrop.wire_dtype. The other layers wait, and are zero in .grad. Nothing is lost: sent
    gradients and residuals add up to all gradients.

    A bucket takes two allreduces. The first is synchronous, with 16 bytes for each parameter: the
    sum of its residual, and whether its gradient is zero. The second is asynchronous, with the sent
    layers.

    **With target="blocks"** the blocks of a parameter are sent, or wait, by themselves (blocks.py).
    The first allreduce has 4 bytes for each block, and 8 for each parameter. Blocks that wait skip
    the optimizer's step, and blocks that are sent make up for the steps that they missed
    (optimizer.py). There is no threshold.

    **The threshold** is for the whole model, but the layers of a bucket are decided before later
    buckets exist. So, every `every` steps, it is found from the scores of one step, and used from
    the next step on. Until the first threshold is found, everything is sent.

    With LayerDrop(ratio="auto") the state measures and chooses as LowRankState does. A step's time
    is then a mean of 10 steps, because layers are sent unevenly; except with target="blocks".

    Clipping after backward() clips sums of gradients: a layer that waited is as large as the
    gradients of several steps together.

    Arguments, memory, errors and threads are as in LowRankState, with LayerDrop instead of LowRank
    and the logger torch_hbmcomm.layer_drop. If LayerDrop.skip_update says so, layers that wait skip
    the optimizer's step. An optimizer that was given as `optimizer` then refuses step(closure).
    Without `optimizer`, a step with a closure also changes layers that wait.
    """

    hook_name = "layer_drop_hook"
    config_class = LayerDrop
    logger = logging.getLogger("torch_hbmcomm.layer_drop")

    def __init__(
        self,
        ddp: DistributedDataParallel,
        config: LayerDrop | None = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        log_every: int | None = 100,
    ) -> None:
        super().__init__(
            ddp,
            LayerDrop() if config is None else config,
            optimizer=optimizer,
            scaler=scaler,
            log_every=log_every,
        )

    def _watch_steps(self, optimizers: Collection[Optimizer] | None) -> list[StepHook]:
        self._catch_up = CatchUp(optimizers) if self._config.target == "blocks" else None
        own = [] if self._catch_up is None else [self._catch_up]
        return [*super()._watch_steps(optimizers), *own]

    def _new_encoder(self) -> LayerDropEncoder | BlockEncoder:
        if self._catch_up is None:
            return LayerDropEncoder(self._config)
        layers, parameters = self._buckets.layers_of_model(), self._buckets.parameters
        ranks = self._averager.ranks
        return BlockEncoder(self._config, layers, ranks, parameters, self._catch_up)

    @staticmethod
    def _layers_of(config: LayerDrop, shapes: Sequence[Shape]) -> list[Layer]:
        cut = config.target == "blocks"
        return blocks.layers_of(shapes, config) if cut else layers_of(shapes, config)


def layer_drop_hook(
    state: LayerDropState, bucket: GradBucket, *shards: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Average the layers of a bucket that are sent, as LayerDropState says.

    Register it with ``ddp.register_comm_hook(state, layer_drop_hook)``.

    Raises TypeError for another state, and under FullyShardedDataParallel.
    """
    return run_hook(LayerDropState, state, bucket, shards)
