"""Finds this rank's shards of a fully_shard model, and the layers of each reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from torch_hbmcomm.error_feedback.buckets import BucketLayers, BucketSource
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.tensors import check_dense, local_part

# FSDP divides other dtypes after the hook has seen them, so residuals would have another unit.
_REDUCED = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class ShardBucket:
    """The output of one reduce-scatter. index: the group's index in Shards.groups."""

    index: int
    output: torch.Tensor

    def buffer(self) -> torch.Tensor:
        return self.output


@dataclass(frozen=True)
class ShardGroup:
    """The parameters that FSDP reduces together, from one call of fully_shard().

    module: the module that was given to fully_shard(), or the first one of a list.
    name: its name in the model, for errors.
    group: FSDP's own object of these parameters.
    trained: FSDP's objects of the parameters that require gradients, in FSDP's order.
    """

    module: FSDPModule
    name: str
    group: Any
    trained: Sequence[Any]

    @property
    def spaces(self) -> list[int]:
        """The elements that each parameter has in the output, padding included."""
        return [one.padded_sharded_param_size.numel() for one in self.trained]


class Shards(BucketSource):
    """Follows the outputs of a model's reduce-scatters through each backward().

    Args:
        model: the model that fully_shard() was applied to
        state, wire, layers_of: as of BucketSource

    shard_group: the ranks that together have a whole model.

    `parameters` has no parameter of which this rank's shard is empty.

    Raises TypeError and ValueError for a model whose shards cannot be averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        state: str,
        wire: torch.dtype | None,
        layers_of: Callable[[Sequence[Shape]], list[Layer]],
    ) -> None:
        super().__init__(state, wire, layers_of)
        self.groups = _find_groups(model)
        check_dense(model)
        self.shard_group = _shard_group(self.groups)
        self._came: set[int] = set()  # groups that came in this backward()
        self._closed = 0  # buckets that were closed in this backward()
        self._known: dict[tuple[int, torch.dtype], BucketLayers] = {}
        self._names: dict[int, str] = {}  # by the parameters' ids
        sharded = {id(one.sharded_param) for group in self.groups for one in group.trained}
        for full_name, parameter in model.named_parameters():
            name = full_name.replace("_orig_mod.", "")  # a prefix of torch.compile's
            if not parameter.requires_grad:
                continue
            if id(parameter) not in sharded:
                raise ValueError(
                    f"{name} is not sharded, so FSDP does not reduce its gradient: call "
                    "fully_shard() also on the model itself, without ignored_params"
                )
            part = local_part(parameter)
            if part.is_meta:
                raise ValueError(f"{name} has no memory yet: give it values before {state}()")
            self._names[id(parameter)] = name
            if part.numel():
                self.parameters[name] = parameter
        self._shapes_at_start = {name: part.shape for name, part in self.parts.items()}

    def has_elements(self, index: int) -> bool:
        """Return True if this rank has elements of the group's parameters."""
        return any(self._name(one) in self.parameters for one in self.groups[index].trained)

    def enter(self, index: int) -> bool:
        """Note that FSDP reduces a group. Returns True if it is the first one of a backward().

        Raises RuntimeError if the group came before in this backward().
        """
        first = not self._came
        if index in self._came:
            raise RuntimeError(
                f"the gradients of {self.groups[index].name} were reduced twice in a backward(): "
                "either an earlier backward() did not end, or modules of one fully_shard() ran "
                f"apart (a chunked loss), which {self._state} does not support"
            )
        self._came.add(index)
        return first

    def end(self) -> None:
        """End the backward(). The next call of enter() begins another."""
        self._came.clear()
        self._closed = 0

    @property
    def begins(self) -> bool:
        return self._closed == 0

    def open(self, bucket: ShardBucket) -> BucketLayers:
        """Return the layers of the output. Raises ValueError if FSDP reduces in a way that the hook
        does not support; nothing was sent."""
        group = self.groups[bucket.index]
        self._check_output(group, bucket.output)
        key = bucket.index, bucket.output.dtype
        if key not in self._known:
            self._known[key] = self._layers_in(group, bucket.output)
        return self._known[key]

    def close(self, bucket: ShardBucket) -> None:
        self._closed += 1

    def check_ended(self) -> None:
        if self._closed:
            raise self._unended()

    def check_orders(self) -> None:
        for name, part in self.parts.items():
            if part.shape != self._shapes_at_start[name]:
                raise ValueError(
                    f"the shard of {name} has shape {list(part.shape)} now, and had "
                    f"{list(self._shapes_at_start[name])} when {self._state} was called: call it "
                    "after the change"
                )

    def _check_output(self, group: ShardGroup, output: torch.Tensor) -> None:
        if getattr(group.group, "force_sum_reduction_for_comms", False):
            raise ValueError(
                f"set_force_sum_reduction_for_comms() is on in {group.name}: FSDP then divides "
                f"after the hook, and {self._state} would keep sums as residuals; turn it off"
            )
        _check_reduced(group.name, output.dtype)
        if output.numel() != sum(group.spaces):
            raise ValueError(
                f"FSDP reduced {output.numel()} elements of {group.name}, which has "
                f"{sum(group.spaces)}: backward() gave some parameters no gradient; freeze them "
                f"before {self._state}(), or call set_reduce_scatter_unused_params(True) on the "
                "model, which PyTorch has from 2.13 on"
            )

    def _layers_in(self, group: ShardGroup, output: torch.Tensor) -> BucketLayers:
        begins = accumulate(group.spaces, initial=0)
        found = [
            (name, begin)
            for one, begin in zip(group.trained, begins, strict=False)
            if (name := self._name(one)) in self.parameters
        ]
        return self._bucket_layers(
            [name for name, _ in found], [begin for _, begin in found], output
        )

    def _name(self, parameter: Any) -> str:
        return self._names[id(parameter.sharded_param)]


def _find_groups(model: nn.Module) -> list[ShardGroup]:
    """Return the groups that have trained parameters, in the order of the modules."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a module that fully_shard() took, not {model!r}")
    modules = [(name, one) for name, one in model.named_modules() if isinstance(one, FSDPModule)]
    if not modules:
        raise TypeError(
            f"replicate_shards is for models of fully_shard(), and this {type(model).__name__} has "
            "no sharded module: call fully_shard(model, mesh=...) first, or use LowRankState or "
            "LayerDropState with DistributedDataParallel"
        )
    found: list[ShardGroup] = []
    for full_name, module in modules:
        name = full_name or "the model"
        groups = _groups_of(module)
        if len(groups) > 1:
            raise ValueError(
                f"{name} has parameters on several meshes (shard_placement_fn), and FSDP takes no "
                "hook there: shard each module on one mesh"
            )
        for group in groups:
            if any(group is other.group for other in found):
                continue  # fully_shard() took a list of modules
            trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad]
            if trained:
                _check_group(name, group, trained)
                found.append(ShardGroup(module, name, group, trained))
    return found


def _groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return FSDP's groups of parameters of a module. PyTorch 2.13 and later have a list."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    if not hasattr(state, "_fsdp_param_group"):
        raise RuntimeError(
            f"replicate_shards cannot find the shards of a model in PyTorch {torch.__version__}: "
            "use a release that hbm serves"
        )
    return [one for one in [state._fsdp_param_group] if one is not None]


def _check_group(name: str, group: Any, trained: Sequence[Any]) -> None:
    """Raise ValueError for a group whose shards the hook cannot average."""
    if hasattr(group.mesh_info, "replicate_mesh_size"):
        raise ValueError(
            f"{name} is on a mesh that replicates (HSDP): FSDP averages whole shards over the "
            "replicas before it calls a hook, so nothing would be saved; give fully_shard() the "
            "1-D mesh of a node, and replicate_shards() the group of the replicas"
        )
    if group._all_reduce_hook is not None:
        raise ValueError(
            f"{name} has an all-reduce hook ({group._all_reduce_hook!r}), and FSDP takes only one"
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise ValueError(
            f"{name} has CPUOffloadPolicy, which moves gradients after the hook: leave it out"
        )
    for one in trained:
        if one.sharded_param.device_mesh.ndim != 1:
            raise ValueError(
                f"a parameter of {name} is distributed over a mesh of "
                f"{one.sharded_param.device_mesh.ndim} dimensions: replicate_shards takes "
                "parameters that only fully_shard() has distributed"
            )
        policy = group.mp_policy
        _check_reduced(name, policy.reduce_dtype or policy.param_dtype or one.sharded_param.dtype)


def _check_reduced(name: str, dtype: torch.dtype) -> None:
    if dtype not in _REDUCED:
        raise ValueError(
            f"FSDP reduces the gradients of {name} as {dtype}, and divides them after the hook: "
            "give fully_shard() MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )


def _shard_group(groups: Sequence[ShardGroup]) -> dist.ProcessGroup:
    """Return the group of the shards. Raises ValueError if modules have different ones."""
    if not groups:
        raise ValueError("the model has no parameter that requires a gradient")
    found: dist.ProcessGroup = groups[0].group.mesh_info.shard_process_group
    ranks = dist.get_process_group_ranks(found)
    for group in groups:
        other = dist.get_process_group_ranks(group.group.mesh_info.shard_process_group)
        if other != ranks:
            raise ValueError(
                f"{groups[0].name} is sharded over ranks {ranks}, and {group.name} over ranks "
                f"{other}: shard all modules on one mesh"
            )
    return found
