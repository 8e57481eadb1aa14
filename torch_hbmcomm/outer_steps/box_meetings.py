"""The meetings of OuterSteps over memory boxes: exchanges that wait for no other worker."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_hbmcomm.optimizers import Optimizer, optimizers_with
from torch_hbmcomm.outer_steps.box_worker import BoxConfig, OuterWorker, copy_all, plan_of
from torch_hbmcomm.outer_steps.config import OuterConfig
from torch_hbmcomm.outer_steps.meetings import Meetings
from torch_hbmcomm.outer_steps.outer_model import OuterModel
from torch_hbmcomm.outer_steps.saved import check_same_tensors
from torch_hbmcomm.parameter_server.checkpoint import restored_on_error
from torch_hbmcomm.parameter_server.sharding import Boxes, connect_boxes
from torch_hbmcomm.parameter_server.shared_model import SharedModel
from torch_hbmcomm.parameter_server.worker import Call
from torch_hbmcomm.tensors import is_finite

_KEYS = {"boxes", "tensors", "model", "outer", "own", "fragment"}
_KEYS |= {"steps", "meetings", "refused", "sent_bytes"}


class BoxMeetings(Meetings):
    """Exchanges with the outer weights in the boxes. Each call is this worker's alone, except
    load_state_dict().

    After an error in an exchange the object can only be closed, because a part of the delta may be
    in the outer weights already.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: OuterConfig,
        boxes: Boxes,
        name: str,
        workers: int,
        keep: bool,
        timeout: float,
    ) -> None:
        super().__init__(config)
        box_config = BoxConfig.of(config, workers, keep, timeout)
        trained = {one: p for one, p in model.named_parameters() if p.requires_grad}
        optimizers_with(optimizer, trained, "OuterSteps")
        _refuse_sharded(model)
        self._module = model
        OuterModel(model, ())  # raises for tensors that OuterSteps does not support
        self._begun: int | None = None  # steps of this worker when its running exchange began
        self._sent_before = 0  # bytes that a resumed training had sent
        self._failed = self._loaded = self._left = False
        with ExitStack() as resources:
            connections = connect_boxes(boxes, resources)
            plan = plan_of(model, box_config, len(connections))
            self._shared, self._selection = plan.model, plan.selection
            self._specs = [str(spec) for spec in plan.layout.tensors]
            self._worker = OuterWorker(connections, name, plan, box_config)
            resources.callback(self._worker.close)
            self._resources = resources.pop_all()

    def advance(self) -> None:
        self._check("step()")
        if self._begun is not None and self.steps - self._begun >= self._config.delay:
            self._land()

    def meet(self) -> None:
        self._check("meet()")
        self._shared.find()  # raises before anything moves
        self._land()
        self._act(Call.STEP)
        self.meetings += 1
        if self._config.delay:
            self._begun = self.steps

    def close(self, wait: bool) -> None:
        self._left = True
        with self._resources:
            if self._failed:
                return
            self._land()
            self._act(Call.FINISH)
            try:
                if wait:
                    self._worker.act(Call.WAIT)
            finally:
                self._act(Call.PULL, changed=False)

    @contextmanager
    def lend(self) -> Iterator[None]:
        tensors = self._shared.find(everything=True)
        inner = [tensor.detach().clone() for tensor in tensors]
        try:
            if not self._left:  # afterwards the model has the outer weights already
                self._check("weights()")
                self._read(self._shared.find())
            yield
        finally:
            copy_all(inner, tensors)

    def state_dict(self) -> dict[str, Any]:
        """Apply the exchange that runs, if there is one."""
        self._check("state_dict()")
        self._land()
        outer = [tensor.detach().clone() for tensor in self._shared.find(everything=True)]
        changing = [
            copy if found.numel() else found
            for copy, found in zip(outer, self._shared.find(), strict=True)
        ]
        self._read(changing)
        return {
            "boxes": True,
            "tensors": list(self._specs),
            "model": [one.detach().clone() for one in self._shared.find(everything=True)],
            "outer": outer,
            "own": self._worker.saved(),
            "fragment": self._selection.state_dict(),
            **self.counts(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._check("load_state_dict()")
        if self.steps or self.meetings or self._loaded:
            raise RuntimeError("over boxes a checkpoint is loaded once, and before the first step")
        _check_state(state, self._specs, self._shared)
        self._loaded = True
        with restored_on_error(self._module), self._failing():
            if state is None:
                self._worker.resume(None, (), {})
                return
            self._worker.resume(state["outer"], state["model"], state["own"])
        self.set_counts(state)
        self._sent_before = self.sent_bytes - self._worker.sent_bytes
        self._selection.load_state_dict(state["fragment"])

    def counts(self) -> dict[str, int]:
        self.sent_bytes = self._sent_before + self._worker.sent_bytes
        return super().counts()

    def stats(self) -> dict[str, int]:
        found = {"received_bytes": self._worker.received_bytes, "workers": self._worker.workers}
        return self.counts() | found

    # -- inside ----------------------------------------------------------------------------------

    def _act(self, call: Call, changed: bool = True) -> None:
        """Make a call of the worker, and count and report a refused delta.

        changed: False: the model has no unsent changes
        """
        with self._failing():
            self._worker.meet(call, changed)
            refused = self._worker.act(call)
        if refused is None:
            return
        if self.refused == 0:
            warnings.warn(
                f"{self._worker.who}: the delta of {refused} is not finite: it was not sent, and "
                "the worker takes the outer weights; later ones are counted without a warning",
                RuntimeWarning,
                stacklevel=5,  # the caller of OuterSteps.step()
            )
        self.refused += 1

    def _land(self) -> None:
        if self._begun is None:
            return
        self._shared.find()  # raises before anything moves
        self._begun = None
        with self._failing():
            self._worker.land()

    def _read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read the outer weights into tensors like the model's, once no exchange runs."""
        with self._failing():
            self._worker.wait_for_exchange()
            self._worker.read(tensors)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """After an error of the block, let the object only be closed. A ValueError changes
        nothing."""
        try:
            yield
        except ValueError:
            raise
        except BaseException:
            self._failed = True
            raise

    def _check(self, method: str) -> None:
        if self._left:
            raise RuntimeError(f"{method} after close()")
        if self._failed:
            raise RuntimeError(
                f"{method} after an error in an exchange: the object can only be closed"
            )


def _refuse_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is distributed over several ranks: a box holds whole parameters. Meet "
                "over process groups instead, each of the ranks that have the same shard"
            )


def _check_state(state: Any, specs: Sequence[str], model: SharedModel) -> None:
    """Raise TypeError for a state that is no mapping. Raise ValueError for a state that lacks a
    part, or is of another model, or whose outer weights are not finite."""
    if state is None:
        return
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a mapping or None, not {type(state).__name__}")
    if lacking := sorted(_KEYS - set(state)):
        raise ValueError(
            f"the state lacks {', '.join(lacking)}: load the result of state_dict() of OuterSteps "
            "over boxes"
        )
    check_same_tensors(state["tensors"], specs)
    for spec, values, changes in zip(specs, state["outer"], model.find(), strict=True):
        if changes.numel() and not is_finite(values):
            raise ValueError(
                f"the outer weights of the state are not finite (a NaN or an infinity) in {spec}: "
                "nothing was loaded, since every worker would take them; load an earlier state"
            )
