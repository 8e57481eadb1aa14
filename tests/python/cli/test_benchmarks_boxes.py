"""The benchmark of a parameter server with several boxes: its bound, and a small run."""

from __future__ import annotations

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.box.boxes import BoxesPlan, app, render, run
from benchmarks.namespaces import PAYLOAD, NoNamespaces, switched_nodes
from torch_hbmcomm.bench.result import Result, sampled
from torch_hbmcomm.sizes import MIB

SECOND = int(100e6 / 8 * PAYLOAD)  # bytes that a link of 100 Mbit/s carries in a second


def test_the_bound_is_the_slowest_link() -> None:
    plan = BoxesPlan(boxes=(1, 2, 4, 8), workers=(4,), size=SECOND)
    bounds = {boxes: plan.bound(boxes, 4) for boxes in plan.boxes}
    assert {boxes: links for boxes, (_, links) in bounds.items()} == {
        1: "boxes'", 2: "boxes'", 4: "all", 8: "workers'"
    }  # fmt: skip
    assert [seconds for seconds, _ in bounds.values()] == pytest.approx([4, 2, 1, 1], rel=1e-6)
    slower = BoxesPlan(boxes=(2,), workers=(4,), size=SECOND, worker_megabits=25)
    seconds, links = slower.bound(2, 4)
    assert links == "workers'"
    assert seconds == pytest.approx(4, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"boxes": ()}, "boxes: at least one"),
        ({"workers": (4, 0)}, "workers: .* at least 1"),
        ({"rounds": 0}, "rounds is 0"),
        ({"size": 100 * SECOND}, "8 workers and boxes=1 an exchange takes at least 800 s"),
    ],
    ids=str,
)
def test_wrong_plans_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BoxesPlan(**options)  # type: ignore[arg-type]


def test_the_table_compares_exchanges_with_the_bound() -> None:
    of = {"workers": 4, "boxes": 2, "slowest_links": "boxes'"}
    values = {"pushed_bytes": 3e6, "pulled_bytes": 2e6, "exchanges_per_s": 1.6, "processors": 0.25}
    found = [sampled(of, "link", [2e6]), sampled(of, "hbm", [2e6, 3e6], values=values)]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(Result("boxes", {"cpu": "", "cores": 2}, {}, measurements=found)))
    row = next(line for line in captured.get().splitlines() if "boxes'" in line)
    assert row.replace("│", " ").split() == [
        "4", "2", "2.50", "2.00", "1.25", "boxes'", "1.60", "3.0", "2.0", "25%"
    ]  # fmt: skip


def test_wrong_options_are_named() -> None:
    shown = CliRunner().invoke(app, ["--rounds", "0"])
    assert shown.exit_code == 2
    assert "rounds is 0" in shown.output


@pytest.mark.full
def test_a_small_run_moves_the_model_in_every_exchange() -> None:
    try:
        with switched_nodes(1, "1gbit"):
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))
    result = run(BoxesPlan(boxes=(1, 2), workers=(2,), size=MIB, rounds=1))
    text = result.to_json()
    assert Result.from_json(text).to_json() == text
    rows = [(one.of["boxes"], one.contender) for one in result.measurements]
    assert rows == [(1, "link"), (1, "hbm"), (2, "link"), (2, "hbm")]
    for one in result.measurements[1::2]:
        assert one.values["pushed_bytes"] == one.values["pulled_bytes"] == MIB
        assert 0 < one.values["processors"] <= 1
