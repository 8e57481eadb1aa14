"""Sends low-rank approximations of a bucket's matrices, and its other parameters whole."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch

from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.encoder import Accumulated, Encoded
from torch_hbmcomm.low_rank.bucket_factors import BucketFactors
from torch_hbmcomm.low_rank.config import LowRank
from torch_hbmcomm.low_rank.optimizer import MomentumDamper, SecondMomentCorrector
from torch_hbmcomm.low_rank.rule import LowRankRule


class LowRankEncoder(LowRankRule):
    """The rule of low-rank approximations, fed with averages over the ranks.

    Args:
        parameters: the model's parameters, by name
        corrector, damper: adapt the optimizers' next step to the directions that were sent
    """

    squares = False

    def __init__(
        self,
        config: LowRank,
        parameters: Mapping[str, torch.Tensor],
        corrector: SecondMomentCorrector,
        damper: MomentumDamper,
    ) -> None:
        super().__init__(config)
        self._parameters = parameters
        self._corrector = corrector
        self._damper = damper
        self._warned: set[str] = set()  # overdue matrices that a warning has named

    def encode(self, bucket: Accumulated, averager: Averager) -> Encoded:
        """Approximate each matrix of a rank above 0. A matrix for which waits() is true is not
        sent, nor is a parameter whose gradient or residual is zero on all ranks. Everything else is
        sent whole, also a matrix whose residual or left factor is not finite."""
        layers = bucket.layers
        self.open_bucket(layers)
        factors = BucketFactors(self, layers, bucket.residuals, bucket.wire_factor)
        lefts = averager.start(factors.lefts, on_decisions=True)
        own = self.measure(
            layers, bucket.residual_sums, bucket.gradients, bucket.sizes, bucket.factor
        )
        numbers = own.pack()
        found = own.unpack(averager.agree(numbers))
        lefts.wait()
        sums = found.residual_sums
        awake = {i for i, new in enumerate(found.gradients) if new != 0 and sums[i] != 0}
        factors.choose({i for i in awake if math.isfinite(sums[i])})
        for matrix, basis in factors.bases:
            parameter = self._parameters[matrix.name]
            self._corrector.add(parameter, self.size_part(matrix))
            self._damper.add(parameter, matrix, basis)
        waits = {
            i
            for i, matrix in enumerate(self.matrices_in(layers))
            if matrix is not None and self.waits(matrix) and math.isfinite(sums[i])
        }
        whole = sorted(awake.difference(factors.parameters, waits))
        elements = sum(layers.counts[index] for index in whole) + factors.numel
        sent = (elements + factors.lefts.numel()) * layers.wire.itemsize
        self.end_bucket(layers, found, decision_bytes=numbers.nbytes, sent=sent)
        return Encoded(whole, factors, sums, numbers.nbytes + factors.lefts.nbytes)

    def pass_whole(self, layers: BucketLayers) -> None:
        """Count the bytes of a bucket that was averaged whole."""
        self.end_bucket(layers, decision_bytes=0, sent=layers.nbytes)

    def end_step(self) -> None:
        """End the step, and warn once of each matrix that becomes overdue."""
        super().end_step()
        new = {name: count for name, count in self.overdue.items() if name not in self._warned}
        self._warned.update(new)
        if new:
            named = ", ".join(f"{name} ({count:.0f} steps)" for name, count in new.items())
            warnings.warn(
                f"the loss is at risk: too many gradients waited in {named}, which the next step "
                f"sends whole; use a smaller ratio than {self._config.unsent}, or a smaller "
                "learning rate",
                RuntimeWarning,
                stacklevel=2,
            )

    def summary(self) -> dict[str, float]:
        return {}
