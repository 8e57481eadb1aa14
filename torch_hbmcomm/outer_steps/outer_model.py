"""The model's tensors, and the cuts of its parameters into fragments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torch_hbmcomm.parameter_server.packing import Span, TensorSpec, pack_spans
from torch_hbmcomm.parameter_server.replica import model_tensors
from torch_hbmcomm.tensors import check_fills_memory, flat, local_part

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class OuterModel:
    """Finds the tensors of a model, of sharded parameters (FSDP2) this rank's shards.

    Each parameter and buffer has a kind. "parameter": trained. "buffer": floating-point numbers,
    averaged at meetings. "counter": integers, taken from rank 0 at meetings. "constant": a frozen
    parameter, or a buffer with elements that are not finite; copied from rank 0 at the start.

    Raises ValueError or TypeError for a tensor that OuterSteps does not support.

    ranks: the global ranks that meet
    """

    def __init__(self, model: nn.Module, ranks: Sequence[int]) -> None:
        buffers = dict(model.named_buffers())
        self._found: list[tuple[str, torch.Tensor, str]] = []
        for name, tensor, kind in model_tensors(model, shared_buffers=True):
            if name in buffers and not (tensor.is_floating_point() or tensor.is_complex()):
                kind = "counter"
            if nn.parameter.is_lazy(tensor):
                raise ValueError(f"{kind} {name} has no shape yet; run the model on an input first")
            if isinstance(tensor, DTensor):
                _check_mesh(name, tensor, ranks)
            if kind in ("parameter", "buffer") and tensor.dtype not in _FLOATS:
                raise ValueError(
                    f"{kind} {name} is {tensor.dtype}: OuterSteps averages "
                    f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _FLOATS)}"
                )
            check_fills_memory(kind, name, local_part(tensor))
            self._found.append((name, tensor, kind))
        self.specs = [TensorSpec.of(name, local_part(one), kind) for name, one, kind in self._found]
        dtypes = {tensor.dtype for _, tensor, kind in self._found if kind == "parameter"}
        self.wide = torch.float64 if torch.float64 in dtypes else torch.float32
        self.names = [name for name, _, kind in self._found if kind == "parameter"]

    def flats(self, *kinds: str) -> list[torch.Tensor]:
        """Return flat views of the tensors of these kinds; all kinds if none is given.

        Raises RuntimeError if a tensor has another shape, dtype or memory order than at the start.
        """
        found = []
        for (name, tensor, kind), spec in zip(self._found, self.specs, strict=True):
            if not kinds or kind in kinds:
                local = local_part(tensor)
                if (now := TensorSpec.of(name, local, kind)) != spec:
                    raise RuntimeError(
                        f"the model has {now} now, and had {spec} when OuterSteps was made: make "
                        "it after the change, on every rank"
                    )
                found.append(flat(local))
        return found

    def copies(self) -> list[torch.Tensor]:
        """Return copies of all tensors, flat."""
        return [one.clone() for one in self.flats()]

    def restore(self, copies: Sequence[torch.Tensor]) -> None:
        """Put copies of all tensors back."""
        for tensor, values in zip(self.flats(), copies, strict=True):
            tensor.copy_(values)

    def spans(self, fragments: int) -> list[tuple[Span, ...]]:
        """Cut the trained parameters into fragments. Raises ValueError if there are too few
        elements."""
        sizes = [spec.count for spec in self.specs if spec.kind == "parameter"]
        runs = list(pack_spans(enumerate(sizes), max(1, -(-sum(sizes) // fragments))))
        if len(runs) < fragments:
            raise ValueError(
                f"fragments={fragments} is too many for {sum(sizes)} elements of parameters"
            )
        return runs


def _check_mesh(name: str, tensor: DTensor, ranks: Sequence[int]) -> None:
    mesh = set(tensor.device_mesh.mesh.flatten().tolist())
    if others := sorted(mesh & set(ranks) - {dist.get_rank()}):
        raise ValueError(
            f"{name} is distributed over ranks {sorted(mesh)}, and the group of OuterSteps also "
            f"has {others}: give process_group= a group with one rank of each such mesh, the ranks "
            "that have the same shard"
        )
