"""Verdicts of papers.report on layer dropping, and functions that name single figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.collectives.nodes import LINK
from papers.layer_drop.threshold_rank import (
    ALL_BY_NUMPY,
    ALL_BY_PYTORCH,
    COMPARISONS,
    EVERY,
    L1,
    L2,
    LAYERS,
    LAYERS_BY_PYTORCH,
    SEARCHES,
    SELECTED,
)
from papers.layer_drop.ways import WAYS, named
from papers.report.dropping import TABLE_1, _falls, _rises
from papers.report.experiment import Experiment
from papers.report.messages import _gaining
from papers.report.nodes import NODES, _below
from papers.report.seeds import SEVERAL_SEEDS, Seeds, largest_equal
from papers.report.thresholds import THRESHOLDS
from papers.report.variants import VARIANTS
from papers.report.verdicts import Outcome, Spread, Unmeasured, Verdict
from papers.report.ways import LATER_WAYS
from torch_hbmcomm.bench.result import Measurement, Result, sampled

MACHINE = {"cpu": "a processor", "cores": 2, "torch": "2", "time": "now"}
HOLDS, IN_PART, FAILS = Verdict.HOLDS, Verdict.IN_PART, Verdict.FAILS
UNMEASURED = Verdict.NOT_MEASURED


def result(measured: Sequence[Measurement], **plan: Any) -> Result:
    return Result("layer_drop", MACHINE, plan, measurements=measured)


def judged(experiment: Experiment, item: str, results: Mapping[str, Result]) -> Outcome:
    """Return the outcome of the claim whose item begins with `item`."""
    [claim] = [one for one in experiment.claims if one.item.startswith(item)]
    return experiment.outcome(claim, results, quick=False)


@pytest.mark.parametrize(
    ("shares", "falls"),
    [
        ((0.5, 0.2), True),
        ((0.5, 0.0), True),
        ((0.5, 0.5), False),
        ((1.0, 0.5), False),
        ((0.2, 0.5), False),
        ((0.5, -0.1), False),
        ((0.5, math.nan), False),
    ],
)
def test_shares_fall_if_each_is_below_the_one_before(shares: Sequence[float], falls: bool) -> None:
    assert _falls(shares) is falls


@pytest.mark.parametrize(
    ("times", "rises"),
    [
        ((1.0, 2.0, 3.0), True),
        ((1.0, 1.1), False),
        ((1.0, 2.0, 2.1), False),
        ((-1.0, 2.0), False),
        ((2.0, 1.0), False),
        ((1.0, math.nan), False),
    ],
)
def test_times_rise_if_each_is_over_10_percent_longer(times: Sequence[float], rises: bool) -> None:
    assert _rises(times) is rises


def nodes(mib: int, collective: str, **microseconds: float) -> list[Measurement]:
    of = {"layout": "2x2", "rate": "1gbit", "mib": mib, "collective": collective}
    names = {"link": LINK, "hbm": "hbm"}
    return [sampled(of, names[who], [time]) for who, time in microseconds.items()]


def test_the_shortest_time_below_a_bound_is_named_by_size() -> None:
    found = nodes(64, "broadcast", link=10.0, hbm=10.0)  # at the bound
    found += nodes(4, "broadcast", link=10.0, hbm=9.0) + nodes(4, "gather", link=10.0, hbm=8.0)
    found += nodes(1, "broadcast", hbm=8.0) + nodes(1, "gather", link=10.0)
    first, second, *_ = (run.name for run in NODES.runs)
    results = {first: result(found), second: result(nodes(4, "gather", link=10.0, hbm=20.0))}
    assert _below(results) == ["Times of hbm at 4 MiB are below the bound by up to 20 %."]
    assert _below({}) == []


def rate(size: int, gb_s: float, operation: str = "read") -> Measurement:
    return Measurement({"operation": operation, "bytes": size}, "hbm tcp", values={"gb_s": gb_s})


def test_sizes_that_gain_more_than_10_percent_are_named() -> None:
    alone = {
        ("hbm tcp", operation, size): rate(size, 1.0)
        for operation in ("read", "write")
        for size in (64, 1024, 4096)
    }
    of_most = [rate(4096, 1.2), rate(4096, 1.3, "write"), rate(1024, 1.1), rate(64, 2.0, "write")]
    assert _gaining(of_most, alone) == "Sizes that gain more than 10 %: 64 B, 4 KiB."
    none = "Sizes that gain more than 10 %: none."
    assert _gaining([rate(64, 1.1), rate(1024, 0.5), rate(4096, math.nan)], alone) == none
    assert _gaining([], alone) == none


def server(case: str, who: str, **values: float) -> Measurement:
    return Measurement({"section": "server", "case": case}, who, values=values)


def of_workers(limited: Sequence[float], unlimited: Sequence[float]) -> dict[str, Result]:
    """Return a record of the communication of 2, 4 and 8 workers over both links, in ms."""
    return {
        TABLE_1.name: result(
            [
                server(f"{link}, all is sent", f"{count} workers", communication_ms=time)
                for link, times in (("1 Gbit/s", limited), ("unlimited", unlimited))
                for count, time in zip((2, 4, 8), times, strict=False)
            ]
        )
    }


@pytest.mark.parametrize(
    ("limited", "unlimited", "verdict"),
    [
        ((1.0, 2.0, 4.0), (1.0, 1.2, 1.4), HOLDS),
        ((1.0, 2.0, 4.0), (1.0, 1.2, 1.25), IN_PART),
        ((1.0, 2.0, 4.0), (-1.0, 1.0, 2.0), IN_PART),
        ((1.0, 1.1, 2.0), (1.0, 1.0, 1.0), FAILS),
        ((1.0, 2.0, 4.0), (1.0,), UNMEASURED),
        ((1.0, 2.0, 4.0), (), UNMEASURED),
    ],
)
def test_more_workers_are_judged_over_both_links(
    limited: Sequence[float], unlimited: Sequence[float], verdict: Verdict
) -> None:
    found = judged(TABLE_1, "Fig. 1", of_workers(limited, unlimited))
    assert found.verdict is verdict
    if verdict is not UNMEASURED:
        assert f"{limited[0]:.0f} ms with 2 workers" in found.here


@pytest.mark.parametrize(
    ("worker", "server_share", "verdict"),
    [(0.5, 0.5, IN_PART), (2.0, 1.25, IN_PART), (1.05, 2.0, IN_PART), (1.06, 1.26, FAILS)],
)
def test_computation_holds_at_most_in_part(
    worker: float, server_share: float, verdict: Verdict
) -> None:
    shares = {"all is sent": (1.0, 1.0), "R = 0.95": (worker, server_share)}
    measured = [
        server("1 Gbit/s", who, worker_ms=100 * own, server_ms=100 * other)
        for who, (own, other) in shares.items()
    ]
    found = judged(TABLE_1, "Table 1, Figs. 9 and 14", {TABLE_1.name: result(measured)})
    assert found.verdict is verdict
    assert "computes no gradients" in found.reason


def test_ratios_that_are_not_finite_are_not_measured() -> None:
    for ratios in ([], [1.0, math.nan], [math.inf]):
        with pytest.raises(Unmeasured, match="objects"):
            Spread.of(ratios, "objects")


def thresholds(*cells: Mapping[str, float]) -> dict[str, Result]:
    """Return a record of searches and comparisons. cells: the times that are not 1 ms, by thread
    count."""
    measured = []
    for threads, times in enumerate(cells, start=1):
        for what, contenders in (("search", SEARCHES), ("comparison", COMPARISONS)):
            of = {"section": "threshold", "case": f"{what}, {threads} threads"}
            for who in contenders:
                time = times.get(who, 1.0)
                measured.append(sampled(of, who, [time], "ms", values={"time_ms": time}))
    return {THRESHOLDS.runs[0].name: result(measured)}


@pytest.mark.parametrize(
    ("item", "cells", "verdict"),
    [
        ("Section 5; abstract", [{ALL_BY_NUMPY: 2.0, ALL_BY_PYTORCH: 3.0}] * 2, HOLDS),
        ("Section 5; abstract", [{ALL_BY_NUMPY: 2.0}, {}], IN_PART),
        ("Section 5; abstract", [{ALL_BY_NUMPY: 1.1, ALL_BY_PYTORCH: 0.5}], FAILS),
        ("Section 5; abstract", [{ALL_BY_NUMPY: math.nan}], UNMEASURED),
        ("Section 5; abstract", [], UNMEASURED),
        ("Section 5: L1", [{L2: 1.2}, {L2: 1.3}], HOLDS),
        ("Section 5: L1", [{L2: 1.2}, {L2: 1.1}], IN_PART),
        ("Section 5: L1", [{L1: 2.0}, {L2: 1.1}], FAILS),
        ("Sections 2 and 7", [{EVERY: 2.0, SELECTED: 3.0}] * 2, HOLDS),
        ("Sections 2 and 7", [{EVERY: 2.0}, {}], IN_PART),
        ("Sections 2 and 7", [{EVERY: 2.0, LAYERS_BY_PYTORCH: 1.9}] * 2, IN_PART),
        ("Sections 2 and 7", [{SELECTED: 3.0}] * 2, IN_PART),
        ("Sections 2 and 7", [{LAYERS: 2.0, SELECTED: 2.2}, {EVERY: 1.1, SELECTED: 1.1}], FAILS),
    ],
)
def test_costs_of_thresholds_are_judged_by_cells(
    item: str, cells: Sequence[Mapping[str, float]], verdict: Verdict
) -> None:
    assert judged(THRESHOLDS, item, thresholds(*cells)).verdict is verdict


def test_costs_of_thresholds_are_listed() -> None:
    results = thresholds({L2: 2.0, ALL_BY_NUMPY: 8.0}, {ALL_BY_NUMPY: 4.0})
    found = judged(THRESHOLDS, "Section 5; abstract", results)
    assert "6.00 times the time of the L1 norms of layers (4.00 to 8.00 over 2 cells)" in found.here
    rows = THRESHOLDS.table(results).rows
    assert len(rows) == 2 * (len(SEARCHES) + len(COMPARISONS))
    assert list(rows[1]) == ["search, 1 threads", L2, "2", "2.00"]
    assert [panel.title for panel in THRESHOLDS.panels(results)] == [
        f"{what}, {threads} threads" for what in ("search", "comparison") for threads in (1, 2)
    ]


def training(
    case: str,
    who: str,
    points: Sequence[float],
    sent: float = 0.1,
    sooner: Sequence[float] = (),
) -> Measurement:
    """Return a training whose accuracy with all sent is 90 %. points, sooner: by seed."""
    values = {"iteration_ms": 10.0, "iteration_share": 0.5, "bytes_share": sent}
    figures = {
        "points": points,
        "sooner": sooner or [1.0] * len(points),
        "accuracy": [90.0 + one for one in points],
        "loss": [0.5] * len(points),
        "seconds": [4.0] * len(points),
    }
    curves = {f"{name}_by_seed": these for name, these in figures.items()}
    curves |= {name: [1.0] for name in ("steps", "seconds", "loss", "accuracy")}
    of = {"section": "server-training", "case": case}
    return Measurement(of, who, values=values, curves=curves)


def test_seeds_have_a_mean_and_a_standard_error() -> None:
    assert Seeds([1.0, 3.0]).text() == "+2.00 ± 1.00"
    assert Seeds([0.25]).text(".1f") == "0.2"
    assert Seeds([1.0, 3.0]).less(Seeds([1.0, 1.0])).figures == [0.0, 2.0]
    with pytest.raises(Unmeasured, match="different numbers"):
        Seeds([1.0, 3.0]).less(Seeds([1.0]))


@pytest.mark.parametrize("figures", [(), (1.0,), (1.0, math.nan), (1.0, math.inf)])
def test_missing_seeds_leave_no_figure(figures: Sequence[float]) -> None:
    with pytest.raises(Unmeasured, match=r"R = 0\.9"):
        Seeds.of(training("a", "R = 0.9", figures), "points")


@pytest.mark.parametrize(
    ("points", "largest"),
    [
        ({0.5: 0.0, 0.9: -0.5, 0.95: -0.6}, 0.9),
        ({0.5: 0.0, 0.9: -0.6, 0.95: 0.0}, 0.5),
        ({0.5: 3.0, 0.9: 0.0}, 0.9),
        ({0.5: -0.6, 0.9: 0.0}, None),
    ],
)
def test_all_ratios_up_to_the_largest_equal_one_are_equal(
    points: Mapping[float, float], largest: float | None
) -> None:
    found = {ratio: training("a", f"R = {ratio}", [mean, mean]) for ratio, mean in points.items()}
    assert largest_equal(dict(reversed(found.items()))) == largest


RULES = ("R = 0.9", "R = 0.9, the paper's rule")


def of_seeds(sgd: Sequence[Measurement], momentum: Sequence[Measurement]) -> dict[str, Result]:
    return {
        run.name: result(measured, optimizers=[optimizer], ratios=[0.9], seeds=2)
        for run, measured, optimizer in zip(
            SEVERAL_SEEDS.runs, (sgd, momentum), ("SGD", "momentum"), strict=True
        )
    }


def both(
    case: str, points: Sequence[float], sent: float = 0.1, sooner: Sequence[float] = ()
) -> list[Measurement]:
    return [training(case, who, points, sent, sooner) for who in RULES]


@pytest.mark.parametrize(
    ("sgd", "momentum", "verdict"),
    [
        (both("SGD", [0, 0], 0.05), both("momentum", [-1, 0], 0.057), HOLDS),
        (both("SGD", [0, 0], 0.058), both("momentum", [0, 0], 0.05), IN_PART),
        (both("SGD", [0, 0], 0.05), both("momentum", [-2, 0], 0.05), IN_PART),
        (both("SGD", [0, 0], 0.95), both("momentum", [-2, 0], 0.05), FAILS),
        (both("SGD", [0, 0]), both("momentum", [0]), UNMEASURED),
        (both("SGD", [0, 0]), both("momentum", [0, math.nan]), UNMEASURED),
        (both("SGD", [0, 0]), [], UNMEASURED),
    ],
)
def test_equal_accuracy_is_judged_with_its_bytes(
    sgd: list[Measurement], momentum: list[Measurement], verdict: Verdict
) -> None:
    found = judged(SEVERAL_SEEDS, "Figs. 5 and 6", of_seeds(sgd, momentum))
    assert found.verdict is verdict


def test_the_largest_equal_ratio_is_named() -> None:
    results = of_seeds(both("SGD", [0, 1]), both("momentum", [-2, -4]))
    here = judged(SEVERAL_SEEDS, "Figs. 5 and 6", results).here
    assert "at least 0.9 with SGD and LayerDrop's defaults (+0.50 ± 0.50 points, 10 %" in here
    assert "below 0.9 with momentum and the paper's rule (-3.00 ± 1.00 points, 10 %" in here


@pytest.mark.parametrize(
    ("sooner", "verdict", "here"),
    [
        ([3.6, 3.6], HOLDS, "4 of 4"),
        ([1.0, 1.4], IN_PART, "1.20 ± 0.20 times as fast"),
        ([1.0, 1.2], FAILS, "4 of 4"),
        ([0.0, 9.0], FAILS, "0 of 4"),
    ],
)
def test_a_faster_training_reaches_the_accuracy_with_every_seed(
    sooner: Sequence[float], verdict: Verdict, here: str
) -> None:
    trainings = (both(case, [0, 0], sooner=sooner) for case in ("SGD", "momentum"))
    found = judged(SEVERAL_SEEDS, "Figs. 7 and 8", of_seeds(*trainings))
    assert found.verdict is verdict
    assert here in found.here


def test_trainings_are_listed_with_standard_errors() -> None:
    results = of_seeds(both("SGD", [-1, 1]), both("momentum", [1]))
    rows = SEVERAL_SEEDS.table(results).rows
    assert list(rows[0]) == [
        *("SGD", "R = 0.9", "10", "-50.0%", "-90.0%", "0.500 ± 0.000", "90.00 ± 1.00"),
        *("+0.00 ± 1.00", "4.0 ± 0.0", "1.00 ± 0.00"),
    ]
    assert rows[2][-3:] == ["+1.00", "4.0", "1.00"], "a single seed has no standard error"
    assert len(SEVERAL_SEEDS.panels(results)) == 2 * 4


def of_variants(points: Mapping[str, Sequence[float]], **sent: float) -> dict[str, Result]:
    """Return records in which both optimizers have the same trainings. sent: shares of the bytes
    with the norms L1 and L2."""
    return {
        run.name: result(
            [
                training(run.name, who, these, sent.get(who[-2:], 0.1))
                for who, these in points.items()
            ]
        )
        for run in VARIANTS.runs
    }


@pytest.mark.parametrize(
    ("l1", "l2", "bytes_of_l2", "verdict"),
    [
        ([0, 0], [0.5, 0.5], 0.11, HOLDS),
        ([0, 0], [0.5, 0.5], 0.12, IN_PART),
        ([0, 0], [-1, -1], 0.1, IN_PART),
        ([0, 0], [1, 1], 0.05, FAILS),
        ([0, 0], [1], 0.1, UNMEASURED),
        ([0, 0], [0, 0, 0], 0.1, UNMEASURED),
        ([0, math.nan], [0, 0], 0.1, UNMEASURED),
    ],
)
def test_norms_have_the_same_effect_if_accuracy_and_bytes_agree(
    l1: Sequence[float], l2: Sequence[float], bytes_of_l2: float, verdict: Verdict
) -> None:
    points = {f"{RULES[1]}, L1": l1, f"{RULES[1]}, L2": l2}
    found = judged(VARIANTS, "Section 5", of_variants(points, L1=0.1, L2=bytes_of_l2))
    assert found.verdict is verdict


@pytest.mark.parametrize(
    ("ours", "papers", "verdict"),
    [
        (([0, 0], [-2, -2]), ([-0.5, -0.5], [-2, -1]), HOLDS),
        (([0, 0], [-2, -2]), ([0, 0], [-0.5, -0.5]), IN_PART),
        (([-3, -3], [-9, -9]), ([0, 0], [-2, -2]), IN_PART),
        (([0, 0], [0, 0]), ([0, 0], [3, 3]), FAILS),
        (([0, 0], [-2]), ([0, 0], [-2, -2]), UNMEASURED),
        (([0, 0], [-2, math.nan]), ([0, 0], [-2, -2]), UNMEASURED),
    ],
)
def test_residuals_avoid_the_loss_that_is_without_them(
    ours: tuple[Sequence[float], Sequence[float]],
    papers: tuple[Sequence[float], Sequence[float]],
    verdict: Verdict,
) -> None:
    """Each rule has the points with residuals, and without."""
    points = {
        f"{who}{variant}": these
        for who, both in zip(RULES, (ours, papers), strict=True)
        for variant, these in zip(("", ", without residuals"), both, strict=True)
    }
    assert judged(VARIANTS, "Section 4.3", of_variants(points)).verdict is verdict


def test_variants_that_were_not_trained_have_no_verdict() -> None:
    results = of_variants({RULES[0]: [0, 0], RULES[1]: [0, 0]})
    for item, missing in (("Section 5", "L2"), ("Section 4.3", "without residuals")):
        found = judged(VARIANTS, item, results)
        assert found.verdict is UNMEASURED
        assert missing in found.reason


def test_the_loss_without_residuals_is_named() -> None:
    points = {RULES[0]: [0.0, 0.2], f"{RULES[0]}, without residuals": [-2.0, -2.0]}
    found = judged(VARIANTS, "Section 4.3", of_variants(points))
    assert "+0.10 ± 0.10 points with residuals, which is +2.10 ± 0.10 points higher" in found.here


def of_ways(*whole_and_later: tuple[float, float]) -> dict[str, Result]:
    """Return records with R = 0.9. whole_and_later: the points of both kinds, by optimizer."""
    table, *runs = (run.name for run in LATER_WAYS.runs)
    results = {table: result([])}
    for run, (whole, later) in zip(runs, whole_and_later, strict=True):
        points = {way: whole if way in ("bytes", "paper") else later for way in WAYS}
        sent = {"paper": 0.2, "blocks": 0.02}
        results[run] = result(
            [
                training(run, named(way, 0.9), [mean - 1, mean + 1], sent.get(way, 0.05))
                for way, mean in points.items()
            ],
            optimizers=[run],
            ratios=[0.9],
        )
    return results


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        ([(0.0, 0.0), (-0.5, -9.0)], HOLDS),
        ([(0.0, 0.0), (-0.6, -0.5)], IN_PART),
        ([(0.0, 0.0), (-0.6, -0.6)], FAILS),
        ([(0.0, 0.0), (math.nan, 0.0)], UNMEASURED),
    ],
)
def test_whole_layers_are_judged_before_later_ways(
    points: Sequence[tuple[float, float]], verdict: Verdict
) -> None:
    found = judged(LATER_WAYS, "Section 6.1", of_ways(*points))
    assert found.verdict is verdict


def test_the_fewest_bytes_with_equal_accuracy_are_named() -> None:
    here = judged(LATER_WAYS, "Section 6.1", of_ways((0.0, 0.0), (-3.0, 0.0))).here
    assert "5 % by whole layers (R = 0.9, bytes: +0.00 ± 1.00 points)" in here
    assert "2 % by later ways (R = 0.9, blocks: +0.00 ± 1.00 points)" in here
    assert "no whole layers, 2 % by later ways" in here


def test_a_way_that_was_not_trained_leaves_no_verdict() -> None:
    results = of_ways((0.0, 0.0), (0.0, 0.0))
    last = LATER_WAYS.runs[-1].name
    kept = [one for one in results[last].measurements if one.contender != named("blocks", 0.9)]
    results[last] = replace(results[last], measurements=kept)
    found = judged(LATER_WAYS, "Section 6.1", results)
    assert found.verdict is UNMEASURED
    assert named("blocks", 0.9) in found.reason


def test_later_ways_are_listed_below_the_form_of_table_1() -> None:
    results = of_ways((0.0, 0.0), (0.0, 0.0))
    times = {"compute_ms": 40.0, "communication_ms": 60.0, "iteration_ms": 100.0}
    first = Measurement(
        {"section": "ddp", "case": "1 Gbit/s"}, "DDP", values=times | {"bytes_share": 1.0}
    )
    noise = replace(first, values=times | {"communication_ms": -10.0, "bytes_share": 0.1})
    results[LATER_WAYS.runs[0].name] = result([first, noise])
    top, noisy, below, *_ = LATER_WAYS.table(results).rows
    assert list(noisy[2:6]) == ["40", "-", "100", "10.0%"]
    assert list(top) == ["1 Gbit/s, ResNet-50", "DDP", "40", "60", "100", "100.0%", *"----"]
    assert list(below[2:6]) == ["-", "-", "10", "5.0%"]
    assert below[8] == "+0.00 ± 1.00"
    assert {len(row) for row in LATER_WAYS.table(results).rows} == {10}
