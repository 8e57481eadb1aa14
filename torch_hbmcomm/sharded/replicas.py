"""Averages the shards of fully_shard models over replicas, with compression and error feedback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from torch_hbmcomm.error_feedback.averaging import check_equal
from torch_hbmcomm.error_feedback.buckets import BucketSource
from torch_hbmcomm.error_feedback.config import AUTO, EncoderConfig
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.error_feedback.state import ErrorFeedbackState
from torch_hbmcomm.groups import chosen_group
from torch_hbmcomm.layer_drop import LayerDrop, LayerDropState
from torch_hbmcomm.low_rank import LowRank, LowRankState
from torch_hbmcomm.optimizers import Optimizer
from torch_hbmcomm.sharded.shards import ShardBucket, Shards
from torch_hbmcomm.tensors import local_part

Config = TypeVar("Config", bound=EncoderConfig)


class _ShardState(ErrorFeedbackState[Config]):
    """The part in which the state of a sharded model differs from the state of a DDP model.

    FSDP calls the hook in a thread of autograd, once for each group of parameters whose gradients
    it has reduced over the shards. The hook averages this output over the replicas, and returns
    when the averages are there. All ranks call it in the same order, the order of FSDP's
    reduce-scatters. The first call in a backward() asks autograd to call _end_backward() at the
    end.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        replicas: dist.ProcessGroup,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        scaler: torch.amp.GradScaler | None,
        log_every: int | None,
    ) -> None:
        self._replicas = replicas
        ErrorFeedbackState.__init__(
            self, model, config, optimizer=optimizer, scaler=scaler, log_every=log_every
        )
        self._copy_first_replica(model)
        for index, group in enumerate(self._shards.groups):
            group.module.set_all_reduce_hook(partial(self._average_output, index))

    @classmethod
    def class_name(cls) -> str:
        return replicate_shards.__name__

    def _group_of_everyone(self, _: nn.Module) -> dist.ProcessGroup:
        return chosen_group(None)

    def _group_of_averages(self, _: nn.Module) -> dist.ProcessGroup:
        if self._replicas is None:
            raise TypeError("replicas is a process group, not None: the ranks with the same shard")
        return chosen_group(self._replicas)

    def _find_buckets(
        self,
        model: nn.Module,
        wire: torch.dtype | None,
        layers_of: Callable[[Sequence[Shape]], list[Layer]],
    ) -> BucketSource:
        self._shards = Shards(model, self.class_name(), wire, layers_of)
        return self._shards

    def _prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        scaler: torch.amp.GradScaler | None,
    ) -> tuple[dict[str, Any], str]:
        settings, name = super()._prepare(model, optimizer, scaler)
        if self._config.ratio == AUTO:
            raise ValueError(
                'ratio="auto" is for DistributedDataParallel: under FSDP2 the hook waits for its '
                "averages, so it cannot measure what computation hides; give a number"
            )
        if isinstance(self._config, LayerDrop) and self._config.target == "blocks":
            raise ValueError(
                'target="blocks" is for layer_drop_hook: it does not step blocks of shards; use '
                'target="bytes", or LowRank'
            )
        shards = dist.get_process_group_ranks(self._shards.shard_group)
        replicas = dist.get_process_group_ranks(self._group)
        if others := sorted(set(shards) & set(replicas) - {dist.get_rank()}):
            raise ValueError(
                f"the model is sharded over ranks {shards}, and replicas also has {others}: give "
                "replicas= a group with one rank of each node, the ranks that have the same shard"
            )
        self._shard = shards.index(dist.get_rank()), len(shards)
        settings["rank"] = dist.get_rank()
        settings["replicas"] = replicas
        settings["shard"] = self._shard
        settings["shapes"] = {
            name: (list(part.shape), part.dtype) for name, part in self._shards.parts.items()
        }
        return settings, name

    def _check_alike(self, settings: Sequence[Mapping[str, Any]]) -> None:
        own = {"rank", "replicas", "shard", "shapes"}
        check_equal([{n: v for n, v in one.items() if n not in own} for one in settings])
        of_ranks = {one["rank"]: one for one in settings}
        for rank, one in sorted(of_ranks.items()):
            for other in one["replicas"]:
                _check_replica(rank, one, other, of_ranks[other])

    def _copy_first_replica(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of the first replica to the others."""
        source = dist.get_global_rank(self._group, 0)
        for tensor in (*model.parameters(), *model.buffers()):
            part = local_part(tensor.detach())
            if part.numel():
                whole = part.contiguous()
                dist.broadcast(whole, source, group=self._group)
                part.copy_(whole)

    # -- a step ----------------------------------------------------------------------------------

    def _average_output(self, index: int, output: torch.Tensor) -> None:
        """Average the output of a reduce-scatter over the replicas, in place: FSDP's hook."""
        if self._shards.enter(index):
            Variable._execution_engine.queue_callback(self._end_backward)
        if self._shards.has_elements(index):
            done = self.exchange(ShardBucket(index, output))
            if self._averager.last is not None:
                # Raises the error of the all-reduce. A callback's future would change its class.
                self._averager.last.wait()
            done.wait()

    def _end_backward(self) -> None:
        self._shards.end()
        if self._scaler is None:
            return
        # The scaler skips the step on all shards if one of them is not finite.
        device = self._shards.groups[0].group.device
        finite = torch.tensor([self._finite], dtype=torch.int32, device=device)
        dist.all_reduce(finite, dist.ReduceOp.MIN, group=self._shards.shard_group)
        self._finite = bool(finite.item())

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's checkpoint, as LowRankState.state_dict() does. It has the residuals of
        this rank's shards, and the shard's number."""
        return super().state_dict() | {"shard": list(self._shard)}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a checkpoint, as LowRankState.load_state_dict() does.

        Args:
            state: this rank's state; or a sequence of the states of all ranks that saved. Each rank
                chooses the states of its own shard. The number of replicas may have changed, the
                number of shards not.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            if "shard" not in one or one["shard"][1] != self._shard[1]:
                found = f"{one['shard'][1]} shards" if "shard" in one else "an unsharded model"
                raise ValueError(
                    f"the checkpoint is of {found}, and the model has {self._shard[1]}: shard it "
                    "as when it was saved, and drain() before the number of shards changes"
                )
        own = [one for one in states if tuple(one["shard"]) == self._shard]
        if not own:
            raise ValueError(
                f"the state is of shard {states[0]['shard'][0]}, and this rank has shard "
                f"{self._shard[0]}"
                if states
                else "load_state_dict() was given no state at all"
            )
        super().load_state_dict(own[0] if isinstance(state, Mapping) else own)


class LowRankShardState(_ShardState[LowRank], LowRankState):
    """The state of a sharded model with LowRank, which replicate_shards() returns."""


class LayerDropShardState(_ShardState[LayerDrop], LayerDropState):
    """The state of a sharded model with LayerDrop, which replicate_shards() returns."""


def replicate_shards(
    model: nn.Module,
    config: LowRank | LayerDrop | None = None,
    *,
    replicas: dist.ProcessGroup,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    log_every: int | None = 100,
) -> LowRankShardState | LayerDropShardState:
    """Train replicas of a fully_shard model, and send compressed gradients between them.

        mesh = init_device_mesh("cpu", (nodes, ranks_of_a_node), mesh_dim_names=("nodes", "shards"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"])
        state = hbmcomm.replicate_shards(
            model, hbmcomm.LowRank(ratio=0.9), replicas=mesh.get_group("nodes")
        )
        ...  # the training loop as it was

    FSDP2 shards the model within a node, and reduces gradients there without compression. Then each
    rank averages its shards with the ranks of other nodes that have the same shards. Only this
    second average is compressed, as LowRankState and LayerDropState say, with a shard in the place
    of a parameter. FSDP divides by the number of shards, and the hook by the number of replicas. So
    .grad is the mean over all ranks.

    All ranks of the default group call it, after fully_shard() and before the first forward(). It
    copies the parameters and buffers of the first replica to the others, and registers a hook by
    set_all_reduce_hook() on each module that fully_shard() took.

    The replicas of a shard decide together, and without the other shards.

    Args:
        model: the model that fully_shard() was applied to, on a mesh of one dimension
        config: LowRank or LayerDrop, equal on all ranks; None: LowRank()
        replicas: the ranks that have the same shards as this rank, one of each node
        optimizer: the model's optimizer, or several that together have its parameters; None: every
            optimizer that steps in this process. skip_update=True needs this argument
        scaler: the GradScaler that scales the losses. All shards of all replicas undo a step that
            it skips; None: losses are not scaled
        log_every: steps between two lines of the logger torch_hbmcomm.low_rank or
            torch_hbmcomm.layer_drop, on the first replica of each shard; None: no lines

    Returns a state with drain(), summary(), state_dict() and load_state_dict(). All ranks call
    drain() together.

    Memory: the residuals are a copy of this rank's shards, in config.cache_dtype.

    Raises:
        TypeError, ValueError: a bad argument, or a model whose shards cannot be averaged; the
            messages name the reason. In the first backward(), a ValueError for a way of reducing
            that the hook does not support.
        RuntimeError: another rank had a bad argument, or the last backward() did not end.

    Threads: autograd's thread calls the hook, which waits for the averages. Call the other methods
    between iterations.
    """
    kind: Any = LayerDropShardState if isinstance(config, LayerDrop) else LowRankShardState
    made: LowRankShardState | LayerDropShardState = kind(
        model,
        LowRank() if config is None else config,
        replicas,
        optimizer=optimizer,
        scaler=scaler,
        log_every=log_every,
    )
    return made


def _check_replica(
    rank: int, settings: Mapping[str, Any], other_rank: int, other: Mapping[str, Any]
) -> None:
    """Raise ValueError if two ranks do not have the same shards and the same replicas."""
    for name, words in (("replicas", "replicas="), ("shard", "shard (number, of) ")):
        if settings[name] != other[name]:
            raise ValueError(
                f"rank {rank} has {words}{settings[name]}, and its replica rank {other_rank} has "
                f"{words}{other[name]}: replicas is a group of ranks that have the same shard"
            )
    one, another = settings["shapes"], other["shapes"]
    for name in (*one, *another):
        if one.get(name) != another.get(name):
            raise ValueError(
                f"the shard of {name} is {one.get(name)} on rank {rank}, and {another.get(name)} "
                f"on its replica rank {other_rank}: the replicas have equal models"
            )
