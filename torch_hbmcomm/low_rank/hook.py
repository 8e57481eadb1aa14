"""low_rank_hook and its state, as a training script sees them.

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
from torch_hbmcomm.low_rank.config import LowRank
from torch_hbmcomm.low_rank.encoder import LowRankEncoder
from torch_hbmcomm.low_rank.optimizer import MomentumDamper, SecondMomentCorrector
from torch_hbmcomm.low_rank.rule import layers_of
from torch_hbmcomm.optimizers import Optimizer


class LowRankState(ErrorFeedbackState[LowRank]):
    """The state of low_rank_hook: low-rank approximations of the gradients under DDP.

        ddp = DistributedDataParallel(model)
        state = hbmcomm.LowRankState(ddp, hbmcomm.LowRank(ratio=0.9))  # on every rank of the group
        ddp.register_comm_hook(state, hbmcomm.low_rank_hook)
        ...  # the training loop as it was

    Each rank adds its gradients to its residuals. The ranks average a low-rank approximation of
    each matrix of residuals. Each rank subtracts its own part from its residuals, and the rest
    waits (Vogels et al. 2019; rule.py). Nothing is lost: sent gradients and residuals add up to all
    gradients.

    A bucket takes three allreduces. The first two average the left factors, and the numbers that
    choose the matrices' ranks. They use a communicator that only this state uses, and the hook
    waits for them. The third uses the model's group: it averages the right factors and the
    parameters that are sent whole, packed at the bucket's beginning.

    With LowRank(ratio="auto") the state measures its first steps. Then all ranks together choose to
    send everything whole as DDP does, everything as bfloat16, or a tenth. They do so again every
    1,000 steps, and after load_state_dict(). The logger names the choice on rank 0.

    SGD's momentum is damped along the directions that were sent; by default only above R = 0.5
    (LowRank.damping). Adam's second moment is corrected for gradients of several steps that arrive
    together. A matrix is sent whole once too many of its gradients wait.

    Args:
        ddp: the model, without another hook. Its group may be of any CPU backend. For parameters on
            an accelerator the group needs a backend that serves both devices, as "hbm" does
        config: equal on all ranks; None: LowRank()
        optimizer: the model's optimizer, or several that together have its parameters. None: every
            optimizer that steps in this process. LowRank.skip_update needs this argument
        scaler: the GradScaler that scales the losses; the model must then have a single optimizer.
            Residuals are unscaled. A step that the scaler skips is also undone in the residuals,
            which takes a second copy of them. None: losses are not scaled
        log_every: steps between two lines of the logger torch_hbmcomm.low_rank on rank 0; None: no
            lines

    Memory: the residuals are a copy of the gradients in config.cache_dtype, on their device.

    A parameter whose gradient is zero on all ranks is not sent in that step. The reason is that DDP
    with find_unused_parameters discards the average of a parameter that no rank used.

    A gradient that is not finite is sent immediately, and is in .grad on all ranks as without the
    hook. Without a scaler, a RuntimeWarning names it.

    Raises:
        ValueError, TypeError: a bad argument, or a model or bucket whose gradients cannot be sent.
        RuntimeError: the last backward() did not end, or another rank had a bad argument.

    Threads: DDP's thread calls the hook; call the other methods between iterations.
    """

    hook_name = "low_rank_hook"
    config_class = LowRank
    logger = logging.getLogger("torch_hbmcomm.low_rank")

    def __init__(
        self,
        ddp: DistributedDataParallel,
        config: LowRank | None = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        log_every: int | None = 100,
    ) -> None:
        super().__init__(
            ddp,
            LowRank() if config is None else config,
            optimizer=optimizer,
            scaler=scaler,
            log_every=log_every,
        )

    def _watch_steps(self, optimizers: Collection[Optimizer] | None) -> list[StepHook]:
        self._corrector = SecondMomentCorrector(optimizers)
        self._damper = MomentumDamper(self._config.damped, optimizers)
        return [*super()._watch_steps(optimizers), self._corrector, self._damper]

    def _new_encoder(self) -> LowRankEncoder:
        return LowRankEncoder(self._config, self._buckets.parameters, self._corrector, self._damper)

    @staticmethod
    def _layers_of(config: LowRank, shapes: Sequence[Shape]) -> list[Layer]:
        return layers_of(config, shapes)


def low_rank_hook(
    state: LowRankState, bucket: GradBucket, *shards: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Average an approximation of a bucket, as LowRankState says.

    Register it with ``ddp.register_comm_hook(state, low_rank_hook)``.

    Raises TypeError for another state, and under FullyShardedDataParallel.
    """
    return run_hook(LowRankState, state, bucket, shards)
