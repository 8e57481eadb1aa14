"""Layer dropping on one worker of the synchronous server: sent layers, and residuals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.error_feedback.residuals import Residuals, SavedState, own_share
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.decision import DropRule, layers_of
from torch_hbmcomm.parameter_server.sync_channel import Bucket

_Flats = Sequence[torch.Tensor | None]


class SyncLayerDrop:
    """Chooses the layers that a worker sends, and keeps the other layers' gradients as residuals.

    In each round that all ranks have accepted, call choose() or flush(), then packer(), then
    end_round(); call nothing in a refused round. Then sent gradients and residuals add up to all
    gradients of the accepted rounds.

    Memory: one copy of the gradients, in the residuals' dtype. Threads: one at a time.
    """

    def __init__(
        self, drop: LayerDrop, parameters: Mapping[str, torch.Tensor], worker: int, workers: int
    ) -> None:
        """Make empty residuals.

        parameters: the model's parameters, in order. worker: this worker's number among all workers
        that train
        """
        self._drop = drop
        self._worker, self._workers = worker, workers
        self._parameters = parameters
        self._names = list(parameters)
        self._layers = layers_of(
            [
                Shape(name, parameter.dim(), parameter.numel(), parameter.dtype.itemsize)
                for name, parameter in parameters.items()
            ],
            drop,
        )
        self._rule = DropRule(drop)
        self._residuals = Residuals(drop.cache_dtype)
        self._sums = [0.0] * len(self._names)  # L1 or L2 sums of the residuals
        self._direct: _Flats | None = None  # gradients sent without residuals
        self._all_bytes = self._sent_layers = self._dropped_layers = 0

    def choose(self, gradients: _Flats) -> list[int]:
        """Add the gradients to the residuals. Returns for each parameter the number of steps whose
        gradients are sent now; 0 for a parameter that waits.

        gradients: None for a parameter without a gradient. A layer without gradients waits, even if
        it has a residual.
        """
        given = [gradient for gradient in gradients if gradient is not None]
        self._all_bytes += sum(gradient.nbytes for gradient in given)
        if self._rule.sends_all and self._residuals.empty:
            self._direct = gradients
            chosen = [gradient is not None for gradient in gradients]
            self._sent_layers += sum(
                any(chosen[member] for member in layer.members) for layer in self._layers
            )
        else:
            chosen = self._decide(gradients)
        ages = self._ages(chosen)
        self._rule.end_step()
        return ages

    def flush(self) -> list[int]:
        """Choose each parameter that has a residual. Returns the same as choose()."""
        self._measure()
        return self._ages([total != 0 for total in self._sums])

    def _ages(self, chosen: Sequence[bool]) -> list[int]:
        waited = self._rule.waited
        return [
            waited.get(name, 0) + 1 if goes else 0
            for name, goes in zip(self._names, chosen, strict=True)
        ]

    def packer(self, indices: Sequence[int]) -> Callable[[Bucket, torch.Tensor], None]:
        """Return a function that packs a bucket into the message `wire`. It moves residuals there,
        or copies gradients that are sent without residuals.

        indices: the parameters in the buckets: tensor i of a bucket is the parameter indices[i]
        """
        direct = self._direct
        if direct is not None:
            flats = [direct[index] for index in indices]
            return lambda bucket, wire: bucket.pack(wire, flats)
        names = [self._names[index] for index in indices]

        def pack(bucket: Bucket, wire: torch.Tensor) -> None:
            parts = [slice(span.start, span.stop) for span in bucket.spans]
            self._residuals.pack([names[span.tensor] for span in bucket.spans], wire, parts=parts)

        return pack

    def end_round(self) -> None:
        """Forget the sent gradients, and commit the residuals."""
        self._direct = None
        self._residuals.commit()

    def stats(self) -> dict[str, int | float]:
        waited = self._rule.waited.values()
        return {
            "gradient_bytes_undropped": self._all_bytes,
            "sent_layers": self._sent_layers,
            "dropped_layers": self._dropped_layers,
            "threshold": self._rule.threshold,
            "oldest_age": max(waited, default=0),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this worker's state."""
        return {
            "rank": self._worker,
            "ranks": self._workers,
            "names": list(self._names),
            "rule": self._rule.state_dict(),
            "caches": self._residuals.state_dict(self._parameters),
        }

    def prepare(self, state: SavedState | Sequence[SavedState] | None) -> Callable[[], None]:
        """Check a state, and return a function that loads it.

        state: the state of this worker, or a sequence of the states of all workers that saved (the
        number of workers may have changed); None: the function clears the residuals

        Raises ValueError for states of another model, worker or number of workers.
        """
        states: Sequence[SavedState] = ()
        rule = DropRule(self._drop)
        if state is not None:
            states, common, _ = own_share(state, self._worker, self._workers, self._names)
            rule.load_state_dict(common["rule"])
        residuals = Residuals(self._drop.cache_dtype)
        residuals.load_state_dict([one["caches"] for one in states], self._parameters)

        def load() -> None:
            self._rule, self._residuals = rule, residuals
            self._sums = [0.0] * len(self._names)
            if states:
                self._measure()
                self._residuals.commit()

        return load

    def _decide(self, gradients: _Flats) -> list[bool]:
        added = {
            index: gradient
            for index, gradient in enumerate(gradients)
            if gradient is not None and gradient.numel()
        }
        used, idle = self._split(added)
        for layer in used:  # the residuals of a module are sent together
            for member in layer.members:
                if member not in added and self._sums[member] != 0:
                    added[member] = self._zeros(member)
        self._add(added)
        layers = used + idle
        layer_sums = [self._layer_sum(layer) for layer in layers]
        asleep = {name for layer in idle for name in layer.parameters}
        decisions = self._rule.decide(layers, layer_sums, asleep)
        self._sent_layers += sum(decisions)
        self._dropped_layers += len(used) - sum(decisions)
        chosen = [False] * len(self._names)
        for layer, goes in zip(layers, decisions, strict=True):
            for member in added.keys() & set(layer.members) if goes else ():
                chosen[member] = True
                self._sums[member] = 0.0
        return chosen

    def _split(self, added: Collection[int]) -> tuple[list[Layer], list[Layer]]:
        """Return the layers with new gradients, and the other layers with residuals."""
        used: list[Layer] = []
        idle: list[Layer] = []
        for layer in self._layers:
            if any(member in added for member in layer.members):
                used.append(layer)
            elif self._layer_sum(layer) != 0:
                idle.append(layer)
        return used, idle

    def _layer_sum(self, layer: Layer) -> float:
        return sum(self._sums[member] for member in layer.members)

    def _measure(self) -> None:
        """Compute the sums of the residuals, by adding zeros to each residual."""
        for name in self._residuals.names:
            index = self._names.index(name)
            self._add({index: self._zeros(index)})

    def _add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        names = [self._names[index] for index in gradients]
        values = list(gradients.values())
        sums, _ = self._residuals.accumulate(names, values, squares=self._drop.squares)
        for index, total in zip(gradients, sums, strict=True):
            self._sums[index] = total

    def _zeros(self, index: int) -> torch.Tensor:
        parameter = self._parameters[self._names[index]]
        return torch.zeros(parameter.numel(), dtype=parameter.dtype)


def prepare_drop_state(
    dropping: SyncLayerDrop | None, state: SavedState | Sequence[SavedState] | None
) -> Callable[[], None]:
    """Check a worker's state, and return the function that loads it.

    Raises ValueError for states of another model, worker or number of workers, or for residuals if
    this rank drops no layers.
    """
    if dropping is not None:
        return dropping.prepare(state)
    if state is not None:
        raise ValueError(
            "the state has gradients that layer dropping has not sent, and this rank would lose "
            'them: give drop=... to a worker that trains, or take "drop" out of the state'
        )
    return lambda: None
