"""The cost of a threshold: Lee et al. 2020, sections 2, 5 and 7.

A cell is a number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.layer_drop.contenders import RATIO
from papers.layer_drop.threshold import COMPARISON, NAME, SEARCH
from papers.layer_drop.threshold_rank import (
    ALL_BY_NUMPY,
    ALL_BY_PYTORCH,
    EVERY,
    L1,
    L2,
    LAYERS,
    LAYERS_BY_PYTORCH,
    SELECTED,
)
from papers.report.experiment import Experiment, Label, Run, number
from papers.report.verdicts import EQUAL, LEE, Claim, Outcome, Spread, compared, graded, samples
from torch_hbmcomm.bench.result import Result

_RUN = "layer-drop-threshold"


def _times(results: Mapping[str, Result], what: str) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each contender in the cells of a search or comparison."""
    cells: dict[str, dict[str, float]] = {}
    for one in results[_RUN].measurements:
        if one.of["case"].startswith(what):
            cells.setdefault(one.of["case"], {})[one.contender] = one.values["time_ms"]
    return cells


def _ratio(results: Mapping[str, Result], what: str, who: str, base: str) -> Spread:
    """Return the time of one contender over the time of `base`."""
    ratios = [
        cell[who] / cell[base]
        for cell in _times(results, what).values()
        if {who, base} <= set(cell)
    ]
    return Spread.of(ratios, f"{who}, and {base}")


def _samples(results: Mapping[str, Result], what: str) -> str:
    found = results[_RUN].measurements
    return samples(one for one in found if one.of["case"].startswith(what))


def _table(results: Mapping[str, Result]) -> Table:
    rows = [
        [case, who, number(time), f"{time / next(iter(cell.values())):.2f}"]
        for what in (SEARCH, COMPARISON)
        for case, cell in _times(results, what).items()
        for who, time in cell.items()
    ]
    return Table(["case", "of", "ms", "over the first row of the case"], rows)


def _panels(results: Mapping[str, Result]) -> list[Panel]:
    panels = []
    for what in (SEARCH, COMPARISON):
        for case, cell in _times(results, what).items():
            panel = Panel(case, "ms", stacked=True, labels=list(cell))
            panel.bars["time"] = list(cell.values())
            panels.append(panel)
    return panels


def _search(results: Mapping[str, Result]) -> Outcome:
    by_numpy, by_pytorch = (
        _ratio(results, SEARCH, who, L1) for who in (ALL_BY_NUMPY, ALL_BY_PYTORCH)
    )
    theirs = "the time of the L1 norms of layers"
    return Outcome(
        f"The search in all gradients takes {by_numpy.times(theirs)} with NumPy's partition, and"
        f" {by_pytorch.times(theirs)} with PyTorch's kthvalue.",
        graded(
            min(by_numpy.least, by_pytorch.least) > EQUAL,
            max(by_numpy.most, by_pytorch.most) > EQUAL,
        ),
        "The paper has no times of a search. The times with norms include the pass over all"
        f" gradients that computes the norms; {_samples(results, SEARCH)}.",
    )


def _norms(results: Mapping[str, Result]) -> Outcome:
    ratio = _ratio(results, SEARCH, L2, L1)
    return Outcome(
        f"The search with L2 norms is {compared(ratio.median)} the search with L1 norms:"
        f" {ratio.times('the time with L1 norms')}.",
        graded(ratio.least > EQUAL, ratio.most > EQUAL),
        "Both norms take one pass over all gradients, and its reads take most of the time;"
        f" {_samples(results, SEARCH)}.",
    )


def _comparison(results: Mapping[str, Result]) -> Outcome:
    by_layers, by_pytorch = (
        _ratio(results, COMPARISON, EVERY, who) for who in (LAYERS, LAYERS_BY_PYTORCH)
    )
    selected = _ratio(results, COMPARISON, SELECTED, LAYERS)
    theirs = "the time of one value of each layer"
    return Outcome(
        f"The comparison of every gradient takes {by_layers.times(theirs)} by LayerDrop, and"
        f" {by_pytorch.times(theirs)} by PyTorch's norm. With a selection it takes"
        f" {selected.times(theirs)} by LayerDrop.",
        graded(
            min(by_layers.least, by_pytorch.least) > EQUAL,
            max(by_layers.most, by_pytorch.most, selected.most) > EQUAL,
        ),
        "The times include the computation of the layers' values. A message of single gradients"
        f" needs the selection of values and places; {_samples(results, COMPARISON)}.",
    )


_CLAIMS = (
    Claim(
        LEE,
        "Section 5; abstract: the search for a threshold",
        "It takes much time to find the threshold from all gradients. With the L1 norm of each"
        " layer instead, few values are left to search.",
        _search,
        "It holds if both searches in all gradients take more than 1.1 times the time of the L1"
        " norms in all cells, and in part if one does in some cell.",
    ),
    Claim(
        LEE,
        "Section 5: L1 norms",
        "The L1 norm is easier to compute than the L2 norm.",
        _norms,
        "It holds if the L2 norms take more than 1.1 times the time of the L1 norms in all cells,"
        " and in part if in some cell.",
    ),
    Claim(
        LEE,
        "Sections 2 and 7: cost of the comparison",
        "To compare one value of each layer with a threshold costs less than to compare every"
        " gradient.",
        _comparison,
        "It holds if every gradient takes more than 1.1 times the time of the layers' values, by"
        " LayerDrop and by PyTorch's norm, in all cells. It holds in part if so in some cell, by"
        " one of them, or only with the selection.",
    ),
)


THRESHOLDS = Experiment(
    name=NAME,
    figures="sections 2, 5 and 7, cost of a threshold",
    label=Label.MEASURED,
    differs=(
        "The gradients have ResNet-50's sizes and magnitudes, and one process handles them on one"
        f" thread and on all cores, with R = {RATIO:g}. The paper computes on GPUs, and has no"
        " times of a search or a comparison. It compares the mean of the absolute values of a"
        " layer; here the value of a layer is the L1 norm."
    ),
    claims=_CLAIMS,
    runs=(
        Run(
            _RUN,
            "papers.layer_drop",
            [f"--sections={NAME}"],
            [f"--sections={NAME}", "--quick"],
        ),
    ),
    table=_table,
    panels=_panels,
)
