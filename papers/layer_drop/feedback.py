"""Simulates the share of the gradients that layer dropping sends:

    python -m papers.layer_drop.feedback

The program applies DropRule, which also decides in trainings, to ResNet-50's layers. The magnitudes
of gradients are lognormal, with one distribution per layer. Accumulated gradients grow with the
square root of their age, or partly in proportion to it. In the rows "shrinking", gradients shrink
by 2.3 % a step. Figures are means of several models.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics

from rich.progress import track
from rich.table import Table

from papers.layer_drop.resnet50 import resnet50
from torch_hbmcomm.bench import report
from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.layer_drop.config import LayerDrop, Target
from torch_hbmcomm.layer_drop.decision import DropRule, layers_of

TARGETS: tuple[Target, ...] = ("bytes", "paper")
SHRINK = 10**-0.01


class Gradients:
    """Simulated gradients of one model.

    steady: share of a gradient's square that is the same in every step.
    """

    def __init__(self, layers: list[Layer], steady: float, shrinking: bool, seed: int) -> None:
        self._draw = random.Random(seed)
        self._size = [math.exp(self._draw.gauss(0, 1.5)) for _ in layers]
        self._noise, self._sum = [0.0] * len(layers), [0.0] * len(layers)
        self._steady, self._shrink = steady, SHRINK if shrinking else 1.0

    def step(self) -> list[float]:
        """Return the mean magnitude of each layer's accumulated gradient."""
        for index, size in enumerate(self._size):
            now = size * math.exp(self._draw.gauss(0, 0.2))
            self._noise[index] += (1 - self._steady) * now**2
            self._sum[index] += math.sqrt(self._steady) * now
            self._size[index] = size * self._shrink
        return [math.hypot(math.sqrt(n), s) for n, s in zip(self._noise, self._sum, strict=True)]

    def clear(self, sent: list[bool]) -> None:
        for index, goes in enumerate(sent):
            if goes:
                self._noise[index] = self._sum[index] = 0.0


def shares(terms: LayerDrop, layers: list[Layer], gradients: Gradients, steps: int) -> list[float]:
    """Return the share of all gradients that each step sends."""
    rule = DropRule(terms)
    total = sum(layer.numel for layer in layers)
    found = []
    for _ in range(steps):
        values = gradients.step()
        layer_sums = [value * layer.numel for value, layer in zip(values, layers, strict=True)]
        sent = rule.decide(layers, layer_sums)
        rule.end_step()
        gradients.clear(sent)
        gone = sum(layer.numel for layer, goes in zip(layers, sent, strict=True) if goes)
        found.append(gone / total)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--models", type=int, default=4)
    args = parser.parse_args()

    parameters = resnet50().named_parameters()
    shapes = [Shape(name, p.dim(), p.numel(), p.itemsize) for name, p in parameters]
    table = Table("1 - R", "target", "gradients", title="Sent, of all gradients")
    for heading in ("first 200 steps", "later", "largest later"):
        table.add_column(heading, justify="right")
    for ratio in track((0.5, 0.8, 0.9, 0.95, 0.99), "simulating"):
        for shrinking in (False, True):
            for target in TARGETS:
                terms = LayerDrop(ratio=ratio, target=target)
                layers = layers_of(shapes, terms)
                runs = [
                    shares(terms, layers, Gradients(layers, steady, shrinking, seed), args.steps)
                    for seed in range(args.models)
                    for steady in (0.0, 0.3)
                ]
                table.add_row(
                    f"{1 - ratio:.0%}",
                    target,
                    "shrinking" if shrinking else "",
                    f"{statistics.fmean(share for run in runs for share in run[:200]):.1%}",
                    f"{statistics.fmean(share for run in runs for share in run[200:]):.1%}",
                    f"{statistics.fmean(max(run[200:]) for run in runs):.0%}",
                )
    report.show(table)


if __name__ == "__main__":
    main()
