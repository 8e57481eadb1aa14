"""aggregate="node": the ranks of a node are one worker of the asynchronous parameter server."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.layer_drop_async import Layered, drop, total, waiting
from harness.ps_models import Awkward, assert_equal, summed, whole_gradients
from harness.ps_nodes import in_nodes, node_server, settle_all
from harness.ps_task import alone, assert_near, backward, network, sgd, weights
from harness.ps_workers import Boxes, exchanging, parameter_server
from torch import nn

from torch_hbmcomm.parameter_server import Downpour

pytestmark = beyond_gloo

LAYOUT = "aabb"


@pytest.fixture(scope="module")
def pool_of_nodes() -> Iterator[Pool]:
    """Yield a pool of two nodes of two ranks."""
    pool = Pool(len(LAYOUT), bare=True)
    yield pool
    assert not any(pool.close())


def run(pool: Pool, *work: Any) -> list[Any]:
    return pool.run(in_nodes, LAYOUT, *work)


# -- against training in one process -------------------------------------------------------------


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def train_in_lockstep(context: Context, options: dict[str, Any]) -> None:
    steps, model = 12, network()
    with node_server(
        model, momentum(model.parameters()), rule="downpour", staleness=0, **options
    ) as ps:
        for step in range(steps):
            backward(model, step, context.rank, context.size)
            ps.step()
        settle_all(ps)
    assert_near(weights(model), alone(momentum, steps))


@pytest.mark.parametrize("layout", [LAYOUT, "aaab"])
def test_without_staleness_sgd_is_synchronous_training(pool_of_nodes: Pool, layout: str) -> None:
    """Each rank's batch counts alike, also if the nodes have different numbers of ranks."""
    if layout == LAYOUT:
        run(pool_of_nodes, train_in_lockstep, {})
        return
    pool = Pool(len(layout), bare=True)
    pool.run(in_nodes, layout, train_in_lockstep, {})
    assert not any(pool.close())


def push_whole_numbers(context: Context, options: dict[str, Any]) -> Any:
    """Take one step more on every second rank, which then follows the node's exchanges."""
    model, given = Awkward(), []
    with node_server(model, **options) as ps:
        for _ in range(5 - context.rank % 2):
            given.append(whole_gradients(model, context.generator))
            ps.step()
        settle_all(ps)
        assert ps.stats()["steps"] == len(given)
    return given, weights(model), dict(model.named_buffers())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"push_every": 3, "transfer": torch.bfloat16},
        pytest.param({"overlap": False}, marks=pytest.mark.full),
        pytest.param({"staleness": 1}, marks=pytest.mark.full),
        pytest.param({"push_every": 2, "overlap": False}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_change_counts_once(pool_of_nodes: Pool, options: dict[str, Any]) -> None:
    results = run(pool_of_nodes, push_whole_numbers, options)
    expected = summed([one for given, *_ in results for one in given], weights(Awkward()))
    for _, found, buffers in results:
        assert_equal(found, expected)
        assert_equal(buffers, dict(Awkward().named_buffers()))


# -- traffic -------------------------------------------------------------------------------------


def count_bytes(context: Context, aggregate: str | None) -> tuple[int, ...]:
    steps, model = 3, network()
    with node_server(model, aggregate=aggregate, overlap=False) as ps:
        before = ps.stats()
        for _ in range(steps):
            whole_gradients(model, context.generator)
            ps.step()
        after = ps.stats()
    return tuple(int(after[key] - before[key]) // steps for key in ("pushed_bytes", "pulled_bytes"))


@pytest.mark.parametrize("layout", [LAYOUT, "aaaaaaaabbbbbbbb"])
def test_nodes_send_instead_of_ranks(layout: str) -> None:
    pool = Pool(len(layout), bare=True)
    model = sum(parameter.nbytes for parameter in network().parameters())
    for aggregate, senders in ((None, len(layout)), ("node", len(set(layout)))):
        found = pool.run(in_nodes, layout, count_bytes, aggregate)
        pushed, pulled = (sum(each) for each in zip(*found, strict=True))
        assert (pushed, pulled) == (senders * model, senders * model)
    assert not any(pool.close())


# -- updates that are not finite -----------------------------------------------------------------

BROKEN_RANK, BROKEN_STEP = 1, 2
SAID = rf"worker \d+, the node of ranks \[0, 1\], because of ranks \[{BROKEN_RANK}\]: "


def push_a_nan(context: Context, options: dict[str, Any]) -> Any:
    model, given = Awkward(), []
    with node_server(model, **options) as ps:
        for step in range(5):
            numbers = whole_gradients(model, context.generator)
            if step != BROKEN_STEP or context.rank > 1:
                given.append(numbers)
                ps.step()
                continue
            if context.rank == BROKEN_RANK:
                numbers["matrix"][3, 3] = float("nan")
            with pytest.warns(RuntimeWarning, match=f"{SAID}the update of matrix") as warned:
                ps.step()
            assert warned[0].filename == __file__
        settle_all(ps)
        assert ps.stats()["refused"] == (context.rank < 2)
    return given, weights(model)


@pytest.mark.parametrize("options", [{}, {"drop": drop()}], ids=str)
def test_a_nan_costs_its_node_one_update(pool_of_nodes: Pool, options: dict[str, Any]) -> None:
    """The update of both ranks of the node is refused. With `drop` the node's waiting changes are
    refused too, so then only the ranks' agreement is checked."""
    results = run(pool_of_nodes, push_a_nan, options)
    expected = summed([one for given, _ in results for one in given], weights(Awkward()))
    for _, found in results:
        assert_equal(found, results[0][1] if "drop" in options else expected)


def train_with_a_scaler(context: Context) -> Any:
    """Let one rank's gradients overflow in one step. Its scaler alone takes a smaller scale."""
    model, given, start = network(), [], 2.0**10
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=1000)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with node_server(model, optimizer) as ps:
        for step in range(5):
            numbers = whole_gradients(network(), context.generator)
            products = (
                (parameter * numbers[name]).sum() for name, parameter in model.named_parameters()
            )
            optimizer.zero_grad()
            overflows = step == BROKEN_STEP and context.rank == BROKEN_RANK
            loss = torch.stack(list(products)).sum() * (float("inf") if overflows else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if step == BROKEN_STEP and context.rank < 2:
                with pytest.warns(RuntimeWarning, match=SAID):
                    ps.step()
            else:
                given.append(numbers)
                ps.step()
            scaler.update()
        settle_all(ps)
    assert scaler.get_scale() == (start / 2 if context.rank == BROKEN_RANK else start)
    return given, weights(model)


def test_a_grad_scaler_overflows_on_one_rank(pool_of_nodes: Pool) -> None:
    results = run(pool_of_nodes, train_with_a_scaler)
    zeros = {name: torch.zeros_like(value) for name, value in weights(network()).items()}
    expected = summed([one for given, _ in results for one in given], zeros)
    for _, found in results:
        assert_equal(found, expected)


# -- dropping layers -----------------------------------------------------------------------------


def drop_layers(context: Context, options: dict[str, Any]) -> Any:
    model, given = Layered(), []
    # The seed is fixed, so each run drops the same layers: a node's updates decide which.
    generator = torch.Generator().manual_seed(context.rank)
    with node_server(model, drop=drop(), **options) as ps:
        for _ in range(15):
            given.append(model.give_random(generator))
            ps.step()
        dist.barrier()
        unsent, held = None, None
        if context.rank % 2 == 0:
            unsent = waiting(ps, model)  # waits for an exchange in flight
        dist.barrier()
        if context.rank % 2 == 0:
            held = in_the_boxes(ps, model)
        dist.barrier()
        before, stats = weights(model), ps.stats()
        settle_all(ps)
    decisions = {key: stats[key] for key in ("sent_layers", "dropped_layers", "threshold")}
    return given, unsent, held, before, decisions, weights(model)


def in_the_boxes(ps: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    names = [name for name, _ in model.named_parameters()]
    found = [tensor.detach().clone() for tensor in ps._plan.model.find()]
    exchanging(ps).read(found)
    return {
        spec.name: tensor
        for spec, tensor in zip(ps._plan.layout.tensors, found, strict=True)
        if spec.name in names and spec.kind == "parameter"
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True, "transfer": torch.bfloat16},
        pytest.param({"staleness": 0}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_dropping_loses_no_change(pool_of_nodes: Pool, options: dict[str, Any]) -> None:
    """The weights in the box and the nodes' waiting changes are all changes, to the last bit."""
    results = run(pool_of_nodes, drop_layers, options)
    every = total([one for given, *_ in results for one in given])
    leaders = [results[0], results[2]]
    held = leaders[0][2]
    for name, value in held.items():
        waits = sum(unsent[name] for _, unsent, *_ in leaders)
        torch.testing.assert_close(value + waits, every[name], rtol=0, atol=0, msg=name)
    for one, other in (results[:2], results[2:]):
        assert_equal(one[3], other[3])
        assert one[4] == other[4]
        assert one[4]["dropped_layers"] > 0
    for *_, found in results:
        assert_equal(found, every)


# -- checkpoints ---------------------------------------------------------------------------------


def save(context: Context, aggregate: str | None) -> Any:
    model = Layered()
    with node_server(model, aggregate=aggregate, drop=drop()) as ps:
        for _ in range(8):
            model.give_random(context.generator)
            ps.step()
        ps.finish(wait=True)
        return ps.state_dict()


def load(context: Context, state: Any, aggregate: str | None) -> Any:
    """Load the state. A rank of a node first loads another state, which all its node refuses."""
    model = Layered()
    with node_server(model, aggregate=aggregate, drop=drop()) as ps:
        before = copy.deepcopy(model.state_dict())
        if aggregate is not None and context.rank < 2:
            wrong = context.rank == 1
            with pytest.raises(
                ValueError if wrong else RuntimeError, match=r"the state has no 'steps'"
            ) as raised:
                ps.load_state_dict({"model": state["model"]} if wrong else state)
            assert wrong or "rank 1 of the node cannot take part" in str(raised.value)
            assert_equal(model.state_dict(), before)
        ps.load_state_dict(state)
        loaded = copy.deepcopy(model.state_dict())
        dist.barrier()
        given = model.give_random(context.generator)
        ps.step()
        settle_all(ps)
        assert ps.stats()["steps"] == state["steps"] + 1
    return loaded, given, weights(model)


@pytest.mark.parametrize(("saved", "loaded"), [("node", None), (None, "node"), ("node", "node")])
def test_a_checkpoint_fits_any_number_of_workers(
    pool_of_nodes: Pool, saved: str | None, loaded: str | None
) -> None:
    states = run(pool_of_nodes, save, saved)
    for state in states:
        assert_equal(state["model"], states[0]["model"])
    if saved is not None:
        assert states[0]["drop"] == states[1]["drop"]
    results = run(pool_of_nodes, load, states[0], loaded)
    start = {name: states[0]["model"][name] for name in weights(Layered())}
    changes = total([given for _, given, _ in results])
    for model, _, found in results:
        assert_equal({name: model[name] for name in start}, {name: start[name] for name in start})
        assert_equal(found, {name: start[name] + changes[name] for name in start})


# -- nodes of one rank ---------------------------------------------------------------------------


def test_without_a_process_group_a_process_is_a_worker(boxes: Boxes) -> None:
    steps, model = 5, network()
    with parameter_server(
        boxes, model, sgd(model.parameters()), aggregate="node", rule=Downpour()
    ) as ps:
        for step in range(steps):
            backward(model, step)
            ps.step()
        ps.pull()
    assert_near(weights(model), alone(sgd, steps))


def test_ranks_on_a_node_each_are_workers() -> None:
    layout = "ab"
    pool = Pool(len(layout), bare=True)
    pool.run(in_nodes, layout, train_in_lockstep, {})
    found = pool.run(in_nodes, layout, count_bytes, "node")
    model = sum(parameter.nbytes for parameter in network().parameters())
    assert found == [(model, model)] * 2
    assert not any(pool.close())
