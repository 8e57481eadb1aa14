"""Layer dropping on the synchronous parameter server: bytes, single layers, checkpoints, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.data import assert_same
from harness.layer_drop_sync import DROP, STEPS, give, gradients_of, model_of
from harness.synchronous import assert_close, make, momentum, raised, weights
from torch import nn

from torch_hbmcomm.layer_drop.config import LayerDrop, Target
from torch_hbmcomm.parameter_server import SyncParameterServer

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

# Bytes that are saved.


def check_bytes(context: Context) -> None:
    """Check that stats() counts a rank's sent bytes, and that unsent layers are not received."""
    model = nn.ParameterList([torch.zeros(64, 64), torch.zeros(8, 8), torch.zeros(5)])
    ps = make(context, model, drop=LayerDrop(min_numel=16, fixed_threshold=10, max_age=100))
    left = 0
    isend = dist.isend

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        nonlocal left
        left += tensor.nbytes
        return isend(tensor, **options)

    start = ps.stats()["weight_bytes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        for _ in range(STEPS):
            give(model, [torch.ones(64, 64), torch.full((8, 8), 12.0), torch.ones(5)])
            ps.step()
    stats = ps.stats()
    often, once = 4 * (8 * 8 + 5), 4 * 64 * 64
    assert stats["gradient_bytes"] == STEPS * often + once  # in the tenth step its score is 10
    assert stats["gradient_bytes_undropped"] == STEPS * (often + once)
    assert stats["weight_bytes"] - start == STEPS * often + once
    assert (stats["sent_layers"], stats["dropped_layers"]) == (2 * STEPS + 1, STEPS - 1)
    assert (stats["threshold"], stats["oldest_age"]) == (10, STEPS - 10)
    assert left == (stats["gradient_bytes"] if context.rank else 0)
    ps.close()


def test_bytes(pool: Pool) -> None:
    pool.run(check_bytes)


def check_unsent_is_untouched(context: Context) -> None:
    """Check that momentum and weight decay do not change a layer that no rank sends.

    If only the last rank sends a layer, the layer counts as zeros on the other ranks.
    """
    model = nn.ParameterList([torch.ones(8, 8), torch.ones(8, 8)])
    optimizer = momentum(model.parameters()) if context.rank == 0 else None
    drop = LayerDrop(min_numel=0, fixed_threshold=1, max_age=100)
    ps = SyncParameterServer(model, optimizer, drop=drop)
    last = context.rank == context.size - 1
    give(model, [torch.full((8, 8), 0.25), torch.full((8, 8), 2.0 if last else 0.5)])
    ps.step()
    assert_same(model[0].detach(), torch.ones(8, 8), "a layer that nobody sent")
    if optimizer is not None:
        assert list(optimizer.state) == [model[1]]
        assert_same(
            optimizer.state[model[1]]["momentum_buffer"],
            torch.full((8, 8), 2 / context.size) + torch.tensor(0.1),
            "momentum",
        )
    residuals = ps.state_dict()["drop"]["caches"]
    assert residuals.keys() == ({"0"} if last else {"0", "1"})
    ps.close()


def test_unsent_is_untouched(pool: Pool) -> None:
    pool.run(check_unsent_is_untouched)


def check_missing_gradients(context: Context) -> None:
    """A layer's residual waits while the layer has no gradient."""
    model = nn.ParameterList([torch.zeros(8, 8)])
    ps = make(context, model, drop=LayerDrop(min_numel=0, fixed_threshold=3, max_age=2))
    for gradient, waits in ((1.0, 1), (None, 2), (None, 3), (1.0, 0), (5.0, 0)):
        model[0].grad = None if gradient is None else torch.full((8, 8), gradient)
        ps.step()
        state = ps.state_dict()["drop"]
        assert state["rule"]["waited"] == ({"0": waits} if waits else {})
        assert len(state["caches"]) == bool(waits)
    ps.close()
    assert_close(weights(model), [torch.full((8, 8), -0.7)], 1e-6)


def test_missing_gradients(pool: Pool) -> None:
    pool.run(check_missing_gradients)


def check_modules(context: Context) -> None:
    """Check that a bias is sent with its weight, even without a gradient in that step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in model.parameters():
        parameter.data.zero_()
    drop = LayerDrop(min_numel=0, fixed_threshold=3, max_age=100, granularity="module")
    ps = make(context, model, lambda p: torch.optim.SGD(p, lr=1.0), drop=drop)
    ones = [torch.ones_like(parameter) for parameter in model.parameters()]
    give(model, [*ones])
    ps.step()
    give(model, [4 * ones[0], None, ones[2], ones[3]])
    ps.step()
    expected = [-5 * ones[0], -ones[1], 0 * ones[2], 0 * ones[3]]
    assert_close(weights(model), expected, 0)
    assert ps.state_dict()["drop"]["caches"].keys() == {"1.weight", "1.bias"}
    ps.close()
    assert_close(weights(model), [*expected[:2], -2 * ones[2], -2 * ones[3]], 0)


def test_modules(pool: Pool) -> None:
    pool.run(check_modules)


# Checkpoints.


def check_resume(context: Context, drop: LayerDrop) -> None:
    """Check that a resumed training equals an uninterrupted one, bit for bit."""

    def train(model: nn.Module, state: dict[str, Any] | None, steps: range) -> dict[str, Any]:
        ps = make(context, model, momentum, drop=drop)
        if state is not None:
            ps.load_state_dict(state)
        for step in steps:
            give(model, gradients_of(context, context.rank, step))
            ps.step()
        state = copy.deepcopy(ps.state_dict())
        ps.close()
        return state

    whole, first, second = model_of(), model_of(), model_of()
    train(whole, None, range(STEPS))
    half = train(first, None, range(STEPS // 2))
    assert half["drop"]["caches"]
    train(second, half, range(STEPS // 2, STEPS))
    for index, (one, two) in enumerate(zip(weights(second), weights(whole), strict=True)):
        assert_same(one, two, f"parameter {index}")


@pytest.mark.parametrize("target", ["paper", "bytes"])
def test_resume(pool: Pool, target: Target) -> None:
    pool.run(check_resume, LayerDrop(ratio=0.8, every=4, min_numel=8, target=target))


def check_wrong_state(context: Context) -> None:
    """The state of the last rank alone is wrong: all ranks raise, and none has loaded anything."""
    model = model_of()
    last = context.rank == context.size - 1
    ps = make(context, model, drop=DROP)
    give(model, gradients_of(context, context.rank, 0))
    ps.step()
    state = copy.deepcopy(ps.state_dict())
    before, dropped = weights(model), state["drop"]
    ways: list[tuple[Callable[[Any], object], str]] = [
        (lambda drop: drop["names"].__setitem__(0, "stranger"), "stranger"),
        (lambda drop: drop.pop("rule"), "lacks rule"),
        (lambda drop: drop["rule"].pop("debt"), "lacks debt"),
        (
            lambda drop: drop["caches"].update({"first.bias": torch.zeros(1)}),
            "of first.bias is",
        ),
    ]
    for break_it, said in ways:
        other = copy.deepcopy(state)
        for value in other["model"].values():
            value += 1
        if last:
            break_it(other["drop"])
        message = raised(ValueError if last else RuntimeError, ps.load_state_dict, other)
        assert said in message
        assert last or f"rank {context.size - 1} of the group" in message
        found = ps.state_dict()["drop"]
        assert found["rule"] == dropped["rule"]
        torch.testing.assert_close(found["caches"], dropped["caches"], rtol=0, atol=0)
        assert_close(weights(model), before, 0)
    del state["drop"]
    ps.load_state_dict(state)
    assert not ps.state_dict()["drop"]["caches"]
    ps.close()
    plain = make(context, model)
    if not last:
        del other["drop"]
    message = raised(ValueError if last else RuntimeError, plain.load_state_dict, other)
    assert "give drop=" in message
    plain.close()


def test_wrong_state(pool: Pool) -> None:
    pool.run(check_wrong_state)


# Errors.


def check_bad_terms(context: Context) -> None:
    last = context.size - 1
    complex_model = nn.ParameterDict({"phase": torch.zeros(3, dtype=torch.complex64)})
    message = raised(TypeError, make, context, complex_model, drop=DROP)
    assert "gradient of phase is torch.complex64" in message
    message = raised(TypeError, make, context, model_of(), drop=0.9)
    assert "drop is a LayerDrop or None, not 0.9" in message
    hooks = LayerDrop(wire_dtype=torch.bfloat16)
    message = raised(ValueError, make, context, model_of(), drop=hooks)
    assert "are for layer_drop_hook" in message
    if context.size > 1:
        own = DROP if context.rank == last else None
        message = raised(ValueError, make, context, model_of(), drop=own)
        assert f"rank {last} has drop=LayerDrop(ratio=0.7" in message
        assert "rank 0 has drop=None" in message


def test_bad_terms(pool: Pool) -> None:
    pool.run(check_bad_terms)


def check_other_workers(context: Context) -> None:
    """Load the states of one worker more than there are now."""
    model = model_of()
    ps = make(context, model, drop=DROP)
    for step in range(3):
        give(model, gradients_of(context, context.rank, step))
        ps.step()
    state = copy.deepcopy(ps.state_dict())
    drops: list[Any] = [None] * context.size
    dist.all_gather_object(drops, state["drop"])
    drops.append(copy.deepcopy(drops[0]))
    for rank, drop in enumerate(drops):
        drop |= {"rank": rank, "ranks": len(drops)}
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for drop in drops:
        for name, residual in drop["caches"].items():
            expected[name] += residual
    message = raised(ValueError, ps.load_state_dict, state | {"drop": drops[0]})
    assert f"give the states of all {len(drops)} ranks" in message
    ps.load_state_dict(state | {"drop": drops})
    residuals = ps.state_dict()["drop"]["caches"]
    for name, total in expected.items():
        found = residuals.get(name, torch.zeros_like(total))
        dist.all_reduce(found)
        assert_same(found, total.detach(), name)
    ps.close()


def test_another_number_of_workers_keeps_the_sum(pool: Pool) -> None:
    pool.run(check_other_workers)
