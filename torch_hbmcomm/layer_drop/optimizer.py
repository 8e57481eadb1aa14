"""Optimizers under target="blocks": a block that waits keeps its elements and their moments, and a
block that waited k steps makes up for k steps.

The gradient of a block that is sent is the sum of k gradients.

One step of Adam would move the block as far as one gradient does, so it would learn k times slower.
So the block takes k steps together, each with the mean gradient:

- The moments decay k times, and get the mean gradient k times. The second moment gets the sum's
  square divided by k: the squares of k gradients that are independent add up to k times that.
- The step with these moments, and with the weight decay, counts k ** _POWER times.

Under SGD momentum would continue the move for ten of the block's own steps, which take 10 k steps.
So the block moves as if the whole sum had come in the first of the k steps (late_moves()). The
momentum from before decays in each of the k steps. Weight decay counts k times.

This takes Adam, AdamW, NAdam, RAdam and SGD, with all of their options.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from inspect import unwrap
from typing import Any, NamedTuple

import torch

from torch_hbmcomm.layer_drop.rows import Rows
from torch_hbmcomm.optimizers import (
    Optimizer,
    has_closure,
    late_moves,
    move_on,
    refuses,
    steps_like,
    watch_steps,
)
from torch_hbmcomm.tensors import flat, gradient_strides, same_order

_KINDS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)
_POWER = 1.0


class _Sent(NamedTuple):
    """The blocks of a parameter that were sent, and the steps that each of them makes up for."""

    rows: Rows
    ages: torch.Tensor


class CatchUp:
    """Steps the blocks that were sent, around the optimizers' steps, and hides the parameters from
    the optimizers.

    A parameter all of whose blocks were sent at age 1 is left to the optimizer. So is a parameter
    of an optimizer of another kind: blocks that wait then have a gradient of zero, and blocks that
    are sent have a sum of gradients. A RuntimeWarning says so.

    optimizers: the watched optimizers; a step(closure) of them raises ValueError. None: all
        optimizers of this process; a step(closure) of them is left as it is
    """

    def __init__(self, optimizers: Collection[Optimizer] | None = None) -> None:
        self._found = optimizers is None
        self._sent: dict[int, _Sent] = {}  # by the parameter's id
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unknown: dict[int, type] = {}  # optimizers that have a parameter, by its id
        self._warned: set[type] = set()
        watch_steps(self, before=CatchUp._hide, after=CatchUp._step, optimizers=optimizers)

    def add(self, parameter: torch.Tensor, rows: Rows, ages: torch.Tensor) -> None:
        """Step only `rows` of a parameter, in its next step. ages: for each block, the number of
        steps that it makes up for"""
        if rows.numel < parameter.numel() or bool((ages != 1).any()):
            self._sent[id(parameter)] = _Sent(rows, ages)

    def clear(self) -> None:
        """Forget the last backward(). Warns of optimizers that stepped blocks like parameters."""
        for kind in {kind for one, kind in self._unknown.items() if one in self._sent}:
            self._warn(kind)
        self._unknown.clear()
        self._sent.clear()

    def _hide(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._show()  # gradients that a step hid that raised
        if not self._sent or refuses(optimizer):
            return
        if has_closure(arguments, named):
            if self._found:
                return
            raise ValueError(
                'target="blocks" has to know which blocks were sent before the optimizer steps: '
                "call backward() first, and step() without a closure"
            )
        kind = _kind(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if id(parameter) not in self._sent or gradient is None:
                    continue
                if kind is not None and _flat_state(optimizer, parameter) is not None:
                    self._hidden.append((parameter, gradient))
                    parameter.grad = None
                else:
                    self._unknown[id(parameter)] = type(optimizer)

    def _show(self) -> None:
        for parameter, gradient in self._hidden:
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden.clear()

    def _warn(self, kind: type) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f'target="blocks" knows no way to step single blocks with {kind.__name__}: blocks '
                "that wait move by its momentum, and blocks that are sent by the sum of several "
                "gradients; use torch's Adam, AdamW, NAdam, RAdam or SGD, or low_rank_hook",
                RuntimeWarning,
                stacklevel=2,
            )

    def _step(self, optimizer: Optimizer, *_: Any) -> None:
        """Step the blocks of the parameters that were hidden, and show their gradients again."""
        hidden = {id(parameter) for parameter, _ in self._hidden}
        self._show()
        kind = _kind(optimizer)
        if kind is None or not hidden:
            return
        with torch.no_grad():
            for group in optimizer.param_groups:
                parts = []
                for parameter in group["params"]:
                    if id(parameter) in hidden:
                        sent = self._sent.pop(id(parameter))
                        if sent.rows.numel:
                            parts.append(_Part(optimizer, group, parameter, sent))
                        else:
                            _count_step(optimizer.state[parameter])
                if parts:
                    _step_parts(kind, optimizer, group, parts)


class _Part:
    """The blocks of one parameter that were sent, gathered for the optimizer's step.

    values, state: the parameter, with its gradient, and its state, as the optimizer takes them.
    """

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, sent: _Sent
    ) -> None:
        self._rows = sent.rows
        self._parameter, self._whole_state = parameter, optimizer.state[parameter]
        held = _flat_state(optimizer, parameter) or {}
        self.state = {k: value for k, value in self._whole_state.items() if k not in held}
        self.state |= {name: sent.rows.take(one) for name, one in held.items()}
        self._before = sent.rows.take(flat(parameter))
        self.values = self._before.clone()
        self._ages = sent.ages
        assert parameter.grad is not None
        total = sent.rows.take(flat(parameter.grad))
        if "betas" in group:
            self._times = self._ages**_POWER
            self._late: tuple[dict[str, Any], torch.Tensor, float] | None = None
            mean = total / self._spread(self._ages)
            self.values.grad = mean.to(parameter.dtype)
            self._prepare_adam(optimizer, group, mean)
        else:
            self._times = torch.ones_like(self._ages)
            self._prepare_sgd(optimizer, group, total)

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each element's block, float32 or wider."""
        wide = torch.promote_types(self._before.dtype, torch.float32)
        return self._rows.spread(values.to(self._before.device, wide))

    def _prepare_adam(
        self, optimizer: Optimizer, group: dict[str, Any], mean: torch.Tensor
    ) -> None:
        """Set the moments so that the optimizer's step makes them those after k steps."""
        if "step" in self.state:
            scale = _scale_of(optimizer, mean)
            added = mean if scale is None else mean / scale
            added = -added if group.get("maximize") else added
            if group["weight_decay"] and not group.get("decoupled_weight_decay"):
                added = added + group["weight_decay"] * self._before
            first, second = map(float, group["betas"])
            self._advance("exp_avg", first, (1 - first) * added)
            self._advance("exp_avg_sq", second, (1 - second) * added * added, self._ages)

    def _advance(
        self, name: str, kept: float, added: torch.Tensor, factors: torch.Tensor | float = 1.0
    ) -> None:
        """Set a moment so that the optimizer's step makes it the moment after a block's k steps.

        The optimizer's step multiplies the moment by `kept` and adds `added`. The k steps do the
        same k times, and add factor * added each. factors: for each block
        """
        if kept:
            decays = kept**self._ages
            sums = self._spread(factors * (1 - decays) / (1 - kept))
            moment = self.state[name]
            after = moment * self._spread(decays) + sums * added
            moment.copy_((after - added) / kept)

    def _prepare_sgd(
        self, optimizer: Optimizer, group: dict[str, Any], total: torch.Tensor
    ) -> None:
        """Let the momentum decay, and set the gradient for SGD's step. keep() completes the
        step."""
        scale = _scale_of(optimizer, total)
        decay = self._before * group["weight_decay"]
        decay = -decay if group["maximize"] else decay
        decays = decay * self._spread(self._ages)  # of all k steps; SGD adds one step's
        added = (total if scale is None else total / scale) + decays
        given = added - decay
        self.values.grad = (given if scale is None else given * scale).to(self.values.dtype)
        buffer = self.state.get("momentum_buffer")
        if buffer is not None:
            buffer.mul_(self._spread(float(group["momentum"]) ** (self._ages - 1)))
        # SGD does not damp the gradient that begins the momentum.
        gain = 1.0 if buffer is None else 1 - group["dampening"]
        self._late = (group, added, gain) if group["momentum"] else None

    def keep(self) -> None:
        """Write the blocks and their state back, after the optimizer's step."""
        if self._late is not None:
            group, added, gain = self._late
            left, moves = late_moves(float(group["momentum"]), self._ages)
            move_on(
                self.values,
                self.state["momentum_buffer"],
                added,
                group,
                gain=gain,
                left=self._spread(left),
                moves=self._spread(moves),
            )
        moved = (self.values - self._before) * self._spread(self._times)
        self._rows.put(flat(self._parameter), (self._before + moved).to(self.values.dtype))
        for name, value in self.state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if name not in self._whole_state:
                    self._whole_state[name] = torch.zeros_like(self._parameter)
                self._rows.put(flat(self._whole_state[name]), value)
            else:
                self._whole_state[name] = value


def _scale_of(optimizer: Optimizer, like: torch.Tensor) -> torch.Tensor | None:
    """Return the scale of the gradients that a fused optimizer divides by in its step."""
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)  # set by a GradScaler
    return None if scale is None else scale.to(like)


def _count_step(state: dict[str, Any]) -> None:
    """Count a step of a parameter none of whose blocks was sent. They make up for it later."""
    if isinstance(step := state.get("step"), torch.Tensor):
        step += 1


def _step_parts(
    kind: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], parts: list[_Part]
) -> None:
    """Step the parts by a copy of the optimizer, which has them as parameters."""
    copy = kind.__new__(kind)
    copy.__dict__.update(optimizer.__dict__)
    copy.param_groups = [group | {"params": [part.values for part in parts]}]
    copy.state = defaultdict(dict, {part.values: part.state for part in parts})
    copy._optimizer_step_pre_hooks = OrderedDict()
    copy._optimizer_step_post_hooks = OrderedDict()
    unwrap(kind.step)(copy)
    for part in parts:
        part.state = copy.state[part.values]
        part.keep()


def _kind(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class of torch's whose step() the optimizer has; None if it has another."""
    kinds = (*_KINDS, torch.optim.SGD)
    return next((kind for kind in kinds if steps_like(optimizer, kind)), None)


def _flat_state(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Return the parts of the state that have an element for each of the parameter's, flat in the
    order of memory. Returns None if one of them has another order than the parameter's gradient."""
    order = gradient_strides(parameter)
    found = {}
    state = optimizer.state.get(parameter, {})
    named = [("", parameter), ("grad", parameter.grad), *state.items()]
    for name, value in named:
        if isinstance(value, torch.Tensor) and (value is parameter or value.dim()):
            if value.shape != parameter.shape:
                return None
            if not same_order(value.shape, value.stride(), order):
                return None
            found[name] = flat(value)
    return {name: found[name] for name in state if name in found}
