"""Low-rank approximations of residuals, by warm-started power iteration with error feedback
(Vogels et al. 2019, *PowerSGD: Practical low-rank gradient compression for distributed
optimization*, Algorithm 1).

A residual is a matrix M, which differs between the ranks of the group. The gradient becomes L Rᵀ.
L is an orthonormal basis of the mean over the ranks of M R'. Half of the columns of R' are from R
of the step before, and half are random. R is the mean of Mᵀ L over the ranks. Each rank subtracts
its own part, L Lᵀ M, from its residual. So sent gradients and residuals add up to all gradients.

The gradient and the subtracted part are multiplied by a relaxation w, as in successive
over-relaxation. The gradient becomes w L Rᵀ, and the residual M - w L Lᵀ M. With w > 1 the next
gradients make up for the excess.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_hbmcomm.error_feedback import passes
from torch_hbmcomm.error_feedback.buckets import BucketLayers
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.low_rank import products
from torch_hbmcomm.low_rank.config import LowRank
from torch_hbmcomm.low_rank.measures import SKETCHED, Measures
from torch_hbmcomm.low_rank.ranks import Matrix, first_ranks, matrix_of, next_ranks

_REPAY_STEPS = 50
"""The bytes that were sent beyond the budgets so far are owed. Each step's budget is smaller by
1 / _REPAY_STEPS of the owed bytes, but by a whole budget at most."""

_GRADIENT_DECAY = 0.9
"""The weight of all earlier steps in the running mean of a gradient's magnitude."""

_SIZE_DECAY = 0.95
"""The weight of all earlier steps in size_part()'s running sums: one step's sizes are noisy."""

_LEAST_PART = 0.01
"""The least that size_part() returns: Adam's steps grow tenfold at most."""

_CHOICE_STEPS = 5
"""Steps between two choices of ranks, over which energies are added up: one step's are noisy."""


@dataclass
class _Step:
    """The numbers and factors gathered in one step so far.

    ranks: the ranks of the first step, chosen bucket by bucket.
    whole: bytes of all gradients. fixed: bytes that no choice of ranks changes. sent: bytes sent.
    """

    ranks: dict[str, int] = field(default_factory=dict)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    energies: dict[str, float] = field(default_factory=dict)
    rights: dict[str, torch.Tensor] = field(default_factory=dict)
    waited: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    applied: dict[str, float] = field(default_factory=dict)
    overdue: dict[str, float] = field(default_factory=dict)
    whole: int = 0
    fixed: int = 0
    sent: int = 0


class LowRankRule:
    """Chooses the rank of each matrix for the next step, by its energy and a budget of bytes, and
    keeps the factors R.

    A step is keep() for sent matrices and end_bucket() for each bucket, then end_step() or
    cancel_step(). All ranks of the group pass equal arguments, and choose equal ranks.

    waited: steps since a parameter was sent, for matrices of rank 0.
    overdue: the matrices that this step sends whole, because more than usual_max_age of their
        gradients wait in the residual. By name, with the number of gradients that wait.
    """

    def __init__(self, config: LowRank) -> None:
        self._config = config
        self._matrices: dict[Shape, Matrix | None] = {}
        self.relaxation = config.relaxed
        self._steps = 0
        self._owed = 0.0  # bytes sent beyond the budgets so far; negative if fewer were sent
        self._ranks: dict[str, int] = {}
        self._energies: defaultdict[str, float] = defaultdict(
            float
        )  # sums since the last choice of ranks
        self._rights: dict[str, torch.Tensor] = {}
        self.waited: dict[str, int] = {}
        self._gradients: dict[str, float] = {}  # running means of gradients' L1 sums
        # Running sums of squared norms: of averaged gradients, and of applied updates.
        self._sizes: dict[str, tuple[float, float]] = {}
        self.overdue: dict[str, float] = {}
        self._step = _Step()

    @property
    def sends_all(self) -> bool:
        """True if everything is sent whole in this step."""
        return self._config.unsent == 0 or self._steps < self._config.warmup

    @property
    def _share(self) -> float:
        """The part of all bytes that this step is to send.

        Without `warmup`, the first 1 / (1 - R) steps send additional bytes. Together these are the
        part R of one step's bytes: as many as if the first step were sent whole. They are spread
        over several steps, because a learning rate that warms up makes little use of the first
        step. Spread over more steps, they would help less.
        """
        ratio = self._config.unsent
        early = round(1 / (1 - ratio))
        doubles = self._config.warmup == 0 and self._steps < early
        return 1 - ratio + (ratio / early if doubles else 0)

    def matrices_in(self, layers: BucketLayers) -> list[Matrix | None]:
        """Return a bucket's parameters as matrices; None for a parameter that is always sent
        whole."""
        for shape in layers.shapes:
            if shape not in self._matrices:
                self._matrices[shape] = _approximated(shape, self._config)
        return [self._matrices[shape] for shape in layers.shapes]

    def open_bucket(self, layers: BucketLayers) -> None:
        """Choose the ranks of a bucket's matrices in the first step.

        Uses the bucket's part of the budget, because later buckets are not known yet.
        """
        if self._ranks or self.sends_all:
            return
        matrices = [matrix for matrix in self.matrices_in(layers) if matrix is not None]
        fixed = layers.nbytes - sum(matrix.nbytes for matrix in matrices)
        self._step.ranks |= first_ranks(matrices, self._share * layers.nbytes - fixed)

    def rank(self, matrix: Matrix) -> int:
        """Return the rank in this step; 0: sent whole or waiting."""
        whole = self.sends_all or matrix.name in self.overdue
        return 0 if whole else (self._ranks or self._step.ranks).get(matrix.name, 0)

    def waits(self, matrix: Matrix) -> bool:
        """Return True if nothing of a matrix is sent in this step."""
        return not self.sends_all and matrix.name not in self.overdue and self.rank(matrix) == 0

    def _energy(self, matrix: Matrix) -> float:
        """Return the squared norm of the last column of R; 0 before there is an R."""
        right = self._right(matrix)
        if right.shape[1] == 0:
            return 0.0
        return passes.sums_of([right[:, -1].contiguous()], squares=True)[0]

    def _right(self, matrix: Matrix) -> torch.Tensor:
        """Return R, [columns, rank]. The tensor is empty if there is no R of this matrix yet.

        It is also empty if R has another number of rows. That may be so in a checkpoint of a model
        in another memory format, which divides the dimensions into other rows and columns.
        """
        none = torch.empty(matrix.columns, 0)
        right = self._rights.get(matrix.name, none)
        return right if right.shape[0] == matrix.columns else none

    def size_part(self, matrix: Matrix) -> float:
        """Return the squared norm of averaged gradients divided by the squared norm of applied
        updates; at least _LEAST_PART, at most 1.

        Both are running sums over the same earlier steps. The quotient is less than 1 because
        gradients of several steps are applied together.
        """
        gradients, applied = self._sizes.get(matrix.name, (0.0, 0.0))
        return max(_LEAST_PART, gradients / applied) if 0 < gradients < applied else 1.0

    def measure(
        self,
        layers: BucketLayers,
        residual_sums: Sequence[float],
        gradients: Sequence[torch.Tensor],
        sizes: Sequence[float],
        factor: float,
    ) -> Measures:
        """Measure a bucket.

        Args:
            residual_sums: L1 sums of the residuals, by parameter
            gradients: this step's gradients, by parameter
            sizes: L1 sums of these gradients
            factor: the number by which the gradients are multiplied
        """
        gradient_sums = [factor * size for size in sizes]
        in_bucket = self.matrices_in(layers)
        matrices = {i: one for i, one in enumerate(in_bucket) if one is not None}
        drawn = self._sketch(matrices.values(), [gradients[i] for i in matrices], factor)
        of_matrices = dict(zip(matrices, drawn, strict=True))
        sketches = [of_matrices.get(i, []) for i in range(len(gradients))]
        energies = [0.0 if one is None else self._energy(one) for one in in_bucket]
        return Measures(residual_sums, gradient_sums, energies, sketches)

    def _sketch(
        self, matrices: Collection[Matrix], gradients: Sequence[torch.Tensor], factor: float
    ) -> list[list[float]]:
        """Return SKETCHED random products of each gradient, with equal draws on every rank.

        The ranks average each product. The mean square of the averages then estimates the squared
        norm of the averaged gradient.
        """
        values, lefts, rights, signs = [], [], [], []
        for matrix, gradient in zip(matrices, gradients, strict=True):
            wide = torch.promote_types(gradient.dtype, torch.float32)
            one = gradient.view(matrix.rows, matrix.columns).to(wide)
            seed = zlib.crc32(f"{self._steps} {matrix.name}".encode())
            draw = torch.Generator().manual_seed(seed)
            values.append(one)
            rights.append(torch.randn(1, matrix.columns, generator=draw).to(one))
            signs.append(torch.randn(SKETCHED, matrix.rows, generator=draw).sign().to(one))
            lefts.append(one.new_empty(matrix.rows, 1))
        products.find_lefts(values, lefts, rights, factor)
        return [(sign @ left)[:, 0].tolist() for sign, left in zip(signs, lefts, strict=True)]

    def directions(
        self, matrices: Collection[Matrix], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the transpose of R' for each matrix, in the dtype and on the device of its values.

        The columns of R' have norm 1.

        Half of the columns are from R of the step before, because gradients keep to their
        directions. The other half is random, because the rest of the residuals is in other
        directions. Every rank of the group draws the same.
        """
        found = []
        for matrix, like in zip(matrices, values, strict=True):
            seed = zlib.crc32(f"{matrix.name} {self._steps}".encode())
            known = self._right(matrix)[:, : (self.rank(matrix) + 1) // 2].T
            shape = self.rank(matrix) - known.shape[0], matrix.columns
            draw = torch.Generator().manual_seed(seed)
            drawn = torch.randn(shape, generator=draw, dtype=like.dtype)
            found.append(torch.cat([known.to(like), drawn.to(like)]))
        products.normalize_rows(found)
        return found

    def keep(self, matrices: Sequence[Matrix], rights: Sequence[torch.Tensor]) -> None:
        """Keep each R for the next step. rights: the transpose of each R"""
        squares = passes.sums_of([right.view(-1) for right in rights], squares=True)
        for matrix, right, square in zip(matrices, rights, squares, strict=True):
            self._step.rights[matrix.name] = right.T
            self._step.applied[matrix.name] = square * self.relaxation**2

    def end_bucket(
        self,
        layers: BucketLayers,
        measures: Measures | None = None,
        *,
        decision_bytes: int,
        sent: int,
    ) -> None:
        """Add a bucket's measures and bytes to the step.

        Args:
            measures: averaged over the ranks of the group; None if everything was sent
            decision_bytes: bytes that this rank sent to decide
            sent: bytes of gradients that this rank sent
        """
        step = self._step
        step.whole += layers.nbytes
        step.fixed += layers.nbytes + decision_bytes
        step.sent += sent + decision_bytes
        for index, matrix in enumerate(self.matrices_in(layers)):
            if matrix is None:
                continue
            step.matrices[matrix.name] = matrix
            step.fixed -= matrix.nbytes
            step.energies[matrix.name] = 0.0
            if measures is not None:
                self._take_measures(matrix, measures, index)

    def _take_measures(self, matrix: Matrix, measures: Measures, index: int) -> None:
        """Add the measures of a matrix to the step."""
        step = self._step
        residual, gradient = measures.residual_sums[index], measures.gradients[index]
        energy = measures.energies[index]
        if 0 < gradient < math.inf:
            self._measure(matrix.name, residual, gradient)
            step.sizes[matrix.name] = _mean_square(measures.sketches[index])
        if self.waits(matrix) and 0 < residual < math.inf:
            step.waited[matrix.name] = self.waited.get(matrix.name, 0) + 1
            too_long = step.waited[matrix.name] > self._config.usual_max_age - _CHOICE_STEPS
            energy = math.inf if too_long else _expected_energy(matrix, residual)
        elif not math.isfinite(energy):
            energy = 0.0
        step.energies[matrix.name] = energy

    def _measure(self, name: str, residual: float, gradient: float) -> None:
        """Update the running mean of a matrix's gradients. The matrix becomes overdue if its
        residual is larger than usual_max_age times this mean."""
        usual = (
            _GRADIENT_DECAY * self._gradients.get(name, gradient) + (1 - _GRADIENT_DECAY) * gradient
        )
        self._step.gradients[name] = usual
        if self._config.usual_max_age * usual < residual < math.inf and name not in self.overdue:
            self._step.overdue[name] = residual / usual

    def end_step(self) -> None:
        """End the step, and choose the ranks of the next step."""
        step, self._step, sent_all = self._step, _Step(), self.sends_all
        allowed = self._share * step.whole
        if not sent_all:
            self._owed = min(self._owed + step.sent - allowed, _REPAY_STEPS * allowed)
        self._steps += 1
        self._rights |= step.rights
        self.waited, self.overdue = step.waited, step.overdue
        self._gradients |= step.gradients
        self._add_sizes(step)
        budget = self._share * step.whole - step.fixed - self._owed / _REPAY_STEPS
        matrices = list(step.matrices.values())
        phase = self._steps % _CHOICE_STEPS
        if phase != 1:  # the step after a choice still has energies of the ranks before the choice
            for name, energy in step.energies.items():
                self._energies[name] += energy
        if not self._ranks:
            self._ranks = first_ranks(matrices, budget)
        elif phase == 0 and not sent_all and any(self._energies.values()):
            self._ranks = next_ranks(matrices, self._ranks, self._energies, budget)
            self._energies.clear()

    def _add_sizes(self, step: _Step) -> None:
        """Add a step's sizes to the running sums, except for matrices that were sent whole."""
        for name, size in step.sizes.items():
            applied = step.applied.get(name, 0.0 if name in step.waited else math.nan)
            if math.isfinite(size + applied):
                sizes = self._sizes.get(name, (0.0, 0.0))
                self._sizes[name] = _SIZE_DECAY * sizes[0] + size, _SIZE_DECAY * sizes[1] + applied

    def cancel_step(self) -> None:
        """Forget everything since the last end_step()."""
        self._step = _Step()

    def forget_waiting(self) -> None:
        """Forget the parameters that wait."""
        self.waited, self.overdue = {}, {}
        self.cancel_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for load_state_dict(). Call it between two steps."""
        return {
            "steps": self._steps,
            "owed": self._owed,
            "ranks": dict(self._ranks),
            "energies": dict(self._energies),
            "rights": {name: right.clone() for name, right in self._rights.items()},
            "waited": dict(self.waited),
            "gradients": dict(self._gradients),
            "sizes": dict(self._sizes),
            "late": dict(self.overdue),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the saved rule."""
        self._steps = int(state["steps"])
        self._owed = float(state["owed"])
        self._ranks = dict(state["ranks"])
        self._energies = defaultdict(float, state["energies"])
        self._rights = {name: right.clone() for name, right in state["rights"].items()}
        self.waited = dict(state["waited"])
        self._gradients = dict(state["gradients"])
        self._sizes = dict(state["sizes"])
        self.overdue = dict(state["late"])
        self.cancel_step()


def layers_of(config: LowRank, shapes: Sequence[Shape]) -> list[Layer]:
    """Return each parameter as a layer."""
    return [
        Layer.of(shapes, (index,), always=_approximated(shape, config) is None)
        for index, shape in enumerate(shapes)
    ]


def _approximated(shape: Shape, config: LowRank) -> Matrix | None:
    """Return the parameter's matrix, or None for a parameter that is always sent whole."""
    if shape.dimensions < 2 or shape.numel < config.least_numel:
        return None
    return matrix_of(shape.name, shape.sizes, shape.width)


def _expected_energy(matrix: Matrix, residual_sum: float) -> float:
    """Return the energy that a column would have if all elements had the same magnitude, and all
    directions the same energy. residual_sum: the L1 sum of the matrix"""
    return residual_sum**2 / (matrix.rows * matrix.columns) / min(matrix.rows, matrix.columns)


def _mean_square(values: Sequence[float]) -> float:
    return sum(value * value for value in values) / len(values)
