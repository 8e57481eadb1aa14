"""The ranks of approximations: within the budget, and highest where a byte sends most energy."""

from __future__ import annotations

import math
import random

import pytest
import torch
from harness import seeds

from torch_hbmcomm.low_rank.ranks import (
    Matrix,
    first_ranks,
    matrix_of,
    next_ranks,
    read_matrices,
    write_matrices,
)


def test_a_gradient_is_split_where_a_rank_costs_least() -> None:
    kernels = matrix_of("conv", (64, 64, 3, 3), 4)
    assert kernels == Matrix("conv", 192, 192, 4, (64, 64, 3, 3), (0, 2, 3, 1))
    assert matrix_of("channels last", (64, 3, 3, 64), 4) == Matrix("channels last", 192, 192, 4)
    assert matrix_of("first", (64, 3, 7, 7), 4) == Matrix("first", 64, 147, 4)
    assert matrix_of("depthwise", (512, 1, 3, 3), 4) == Matrix("depthwise", 512, 9, 4)
    assert matrix_of("stack", (8, 128, 256), 2) == Matrix("stack", 1024, 256, 2)
    assert matrix_of("vector", (5000,), 4) is None
    assert matrix_of("one row", (1, 5000), 4) is None
    assert matrix_of("empty", (0, 5), 4) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_read_as_matrices_and_written_back(dtype: torch.dtype) -> None:
    shapes = [(6, 4, 3, 5), (6, 4, 1, 5), (4, 3, 3, 6), (12, 10), (70, 33, 3, 3), (64, 129, 5)]
    gradients = [torch.randn(shape).to(dtype) for shape in shapes]
    made = [matrix_of("weight", shape, 4) for shape in shapes]
    matrices = [matrix for matrix in made if matrix is not None]
    assert [matrix.block for matrix in matrices][-2:] == [(33, 9), (129, 5)]
    assert any(matrix.order and not matrix.block for matrix in matrices)
    found = read_matrices(matrices, [gradient.view(-1) for gradient in gradients])
    for gradient, matrix, values in zip(gradients, matrices, found, strict=True):
        assert values.shape == (matrix.rows, matrix.columns)
        order = matrix.order or range(gradient.dim())
        assert torch.equal(values.flatten(), gradient.permute(*order).flatten())
    again = [torch.zeros(gradient.numel(), dtype=dtype) for gradient in gradients]
    write_matrices(matrices, found, again)
    for flat, gradient in zip(again, gradients, strict=True):
        assert torch.equal(flat.view_as(gradient), gradient)


def matrices(draw: random.Random) -> list[Matrix]:
    sizes = [(draw.randrange(8, 600), draw.randrange(8, 600)) for _ in range(draw.randrange(1, 12))]
    return [Matrix(f"m{i}", rows, columns, 4) for i, (rows, columns) in enumerate(sizes)]


@pytest.mark.parametrize("turn", range(20))
def test_ranks_cost_at_most_the_budget(turn: int) -> None:
    draw = seeds.draws(turn)
    found = matrices(draw)
    budget = draw.random() * sum(matrix.nbytes for matrix in found)
    ranks = first_ranks(found, budget)
    for _ in range(40):
        assert sum(ranks[matrix.name] * matrix.cost for matrix in found) <= budget
        assert all(0 <= ranks[matrix.name] <= matrix.most for matrix in found)
        energies = {matrix.name: draw.expovariate(1) for matrix in found}
        ranks, before = next_ranks(found, ranks, energies, budget), ranks
        assert all(abs(ranks[name] - rank) <= 1 for name, rank in before.items())


def test_ranks_go_where_the_energy_is() -> None:
    """Matrices have spectra of one shape, but one spectrum is a hundred times as large.

    In the end, the last columns of all matrices have about the same energy.
    """
    found = [Matrix(name, 256, 256, 4) for name in "abcd"]
    sizes = {"a": 100.0, "b": 1.0, "c": 1.0, "d": 1.0}
    budget = 40 * found[0].cost
    ranks = first_ranks(found, budget)
    assert ranks == dict.fromkeys("abcd", 10)
    for _ in range(40):
        energies = {name: size * 0.8 ** ranks[name] for name, size in sizes.items()}
        ranks = next_ranks(found, ranks, energies, budget)
    assert sum(ranks.values()) == 40
    assert 17 <= ranks["a"] - ranks["b"] <= 25  # 0.8 ** 21 is a hundredth
    assert max(ranks[name] for name in "bcd") - min(ranks[name] for name in "bcd") <= 1


def test_an_overdue_matrix_exceeds_the_budget() -> None:
    found = [Matrix("late", 64, 64, 4), Matrix("early", 64, 64, 4), Matrix("large", 64, 64, 4)]
    energies = {"late": math.inf, "early": 1.0, "large": 5.0}
    ranks = {"late": 0, "early": 0, "large": 2}
    assert next_ranks(found, ranks, energies, -10.0) == {"late": 1, "early": 0, "large": 1}


def test_rank_0_ends_when_the_residual_has_grown() -> None:
    found = [Matrix("loud", 64, 64, 4), Matrix("quiet", 64, 64, 4)]
    ranks = {"loud": 1, "quiet": 0}
    assert next_ranks(found, ranks, {"loud": 1.0, "quiet": 0.5}, found[0].cost) == ranks
    assert next_ranks(found, ranks, {"loud": 1.0, "quiet": 2.0}, found[0].cost) == {
        "loud": 0,
        "quiet": 1,
    }
