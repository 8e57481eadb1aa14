"""layer_drop_hook and low_rank_hook: wrong arguments and states are refused by name."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool
from harness.asynchronous import two_boxes
from harness.box_process import TOKEN
from harness.data import assert_same
from harness.hooks import layer_drop, low_rank
from harness.layer_drop_ddp import Weighted, gradients, wrapped
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel

import torch_hbmcomm as hbmcomm
from torch_hbmcomm import smb
from torch_hbmcomm.error_feedback.optimizer import UpdateSkipper

pytestmark = pytest.mark.ranks(1, 2, 3)


STATES: dict[str, tuple[Any, Any, Any]] = {
    "layer_drop": (hbmcomm.LayerDropState, hbmcomm.LayerDrop, hbmcomm.layer_drop_hook),
    "low_rank": (hbmcomm.LowRankState, hbmcomm.LowRank, hbmcomm.low_rank_hook),
}

OF_BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ratio": 1.0}, ValueError, r"ratio is in \[0, 1\), not 1.0"),
    ({"ratio": -0.1}, ValueError, "ratio is in"),
    ({"ratio": float("nan")}, ValueError, "ratio is in"),
    ({"ratio": "fast"}, ValueError, r"ratio is a number in \[0, 1\) or \"auto\", not 'fast'"),
    ({"ratio": "0.9"}, ValueError, "or \"auto\", not '0.9'"),
    ({"ratio": None}, TypeError, "ratio is a number, not None"),
    ({"warmup": -1}, ValueError, "warmup is at least 0"),
    ({"min_numel": -1}, ValueError, "min_numel is at least 0"),
    ({"min_numel": "64"}, TypeError, "min_numel is a whole number, not '64'"),
    ({"cache_dtype": torch.float16}, ValueError, "cache_dtype is None or torch.float32 or"),
    ({"wire_dtype": torch.float16}, ValueError, "wire_dtype is None or torch.bfloat16, not"),
    ({"skip_update": "no"}, TypeError, "skip_update is True, False or None, not 'no'"),
]


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        *OF_BOTH,
        (
            {"ratio": "auto", "fixed_threshold": 1.0},
            ValueError,
            'ratio="auto" chooses how much is sent, and so does fixed_threshold: give one',
        ),
        ({"levels": 1}, ValueError, 'levels is for target="blocks", and target is "bytes"'),
        ({"target": "blocks", "levels": 1.5}, TypeError, "levels is a whole number, not 1.5"),
        ({"every": 0}, ValueError, "every is at least 1, not 0"),
        ({"every": -3}, ValueError, "every is at least 1"),
        ({"every": 2.5}, TypeError, "every is a whole number, not 2.5"),
        ({"max_age": 0}, ValueError, "max_age is at least 1"),
        ({"representative": "max"}, ValueError, 'one of "mean", "l1", "l2", not \'max\''),
        ({"granularity": "block"}, ValueError, 'one of "parameter", "module"'),
        ({"target": "low_rank"}, ValueError, 'one of "bytes", "paper", "blocks", not \'low_rank\''),
        ({"fixed_threshold": "1"}, TypeError, "fixed_threshold is a number"),
        ({"fixed_threshold": -1.0}, ValueError, "fixed_threshold is a finite number"),
        ({"fixed_threshold": float("inf")}, ValueError, "fixed_threshold is a finite number"),
    ],
)
def test_settings_of_layer_drop(options: Any, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        hbmcomm.LayerDrop(**options).check()


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        *OF_BOTH,
        ({"relaxation": 2}, ValueError, r"relaxation is in \(0, 2\), not 2"),
        ({"relaxation": 0}, ValueError, r"relaxation is in \(0, 2\), not 0"),
        ({"relaxation": "1"}, TypeError, "relaxation is a number, not '1'"),
        ({"damping": 1.1}, ValueError, r"damping is in \[0, 1\], not 1.1"),
    ],
)
def test_settings_of_low_rank(options: Any, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        hbmcomm.LowRank(**options).check()


def refuse(context: Context, kind: str) -> None:
    make, config_class, hook = STATES[kind]
    model = Weighted()
    ddp = wrapped(model)
    some = torch.optim.SGD([*model.parameters()][1:], lr=1)
    theirs = hbmcomm.LowRank() if kind == "layer_drop" else hbmcomm.LayerDrop()
    name, config = make.__name__, config_class.__name__
    for arguments, options, error, complaint in (
        ([model], {}, TypeError, "DistributedDataParallel, and this is a Weighted: wrap"),
        ([ddp, theirs], {}, TypeError, rf"config of {name} is a {config}, not L\w+\(ratio=0.9"),
        ([ddp, 0.9], {}, TypeError, f"config of {name} is a {config}, not 0.9"),
        ([ddp], {"log_every": 0}, ValueError, "log_every is at least 1"),
        ([ddp], {"scaler": 3}, TypeError, "scaler is a torch.amp.GradScaler, not int"),
        ([ddp], {"optimizer": [3]}, TypeError, "optimizer is one or several, not int"),
        ([ddp], {"optimizer": some}, ValueError, rf"{name}: no optimizer .* has all\.0"),
        ([ddp, config_class(skip_update=True)], {}, ValueError, "skip_update=True needs the opti"),
    ):
        with pytest.raises(error, match=complaint):
            make(*arguments, **options)
    state = make(ddp)
    ddp.register_comm_hook(state, hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(state, hook)
    with pytest.raises(ValueError, match=rf"has a communication hook \({kind}_hook\)"):
        make(ddp)


@pytest.mark.parametrize("kind", STATES)
def test_incompatible_arguments_are_refused(pool: Pool, kind: str) -> None:
    pool.run(refuse, kind)


def share(context: Context) -> None:
    first, second = wrapped(Weighted()), wrapped(Weighted())
    state = low_rank(first)
    second.register_comm_hook(state, hbmcomm.low_rank_hook)
    weights = gradients(context.seed, context.rank, 0, context.size)
    first(*weights).backward()
    with pytest.raises(ValueError, match="LowRankState works for: each model has a state of its"):
        second(*weights).backward()


def test_a_state_for_two_models(pool: Pool) -> None:
    pool.run(share)


def differ(context: Context) -> None:
    ddp = wrapped(Weighted())
    config = hbmcomm.LayerDrop(ratio=0.5 + 0.1 * context.rank)
    with pytest.raises(ValueError, match=r"ratio=0.5 on rank 0 and ratio=0.6 on rank 1"):
        hbmcomm.LayerDropState(ddp, config)
    state: Any = hbmcomm.LayerDropState if context.rank else hbmcomm.LowRankState
    complaint = "hook='low_rank_hook' on rank 0 and hook='layer_drop_hook' on rank 1"
    with pytest.raises(ValueError, match=complaint):
        state(ddp)


@pytest.mark.ranks(2, 3)
def test_settings_that_differ(pool: Pool) -> None:
    pool.run(differ)


def refuse_one(context: Context) -> None:
    """Pass bad arguments, one after another, on the last rank alone. Every rank raises."""
    last = context.size - 1
    make: Any = hbmcomm.LowRankState
    for bad in (
        {"config": hbmcomm.LayerDrop()},
        {"config": hbmcomm.LowRank(skip_update=True)},
        {"config": hbmcomm.LowRank(ratio=1.8)},
        {"log_every": 0},
        {"scaler": 3},
        {"optimizer": 3},
        {"ddp": nn.Linear(3, 3)},
    ):
        ddp = wrapped(Weighted())
        options = {"ddp": ddp} | (bad if context.rank == last else {})
        error = (ValueError, TypeError) if context.rank == last else RuntimeError
        complaint = "" if context.rank == last else f"rank {last} of the group .*{next(iter(bad))}"
        if "ddp" in bad:
            complaint = "wrap the model first"
        if "config" in bad:
            complaint = "config of LowRankState is a LowRank|skip_update=True needs the|not 1.8"
        with pytest.raises(error, match=complaint):
            make(**options)
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [context.size] * 2
        make(ddp)


@pytest.mark.ranks(2, 3)
def test_one_ranks_bad_argument_is_every_ranks_error(pool: Pool) -> None:
    pool.run(refuse_one)


def copy_models(context: Context, urls: list[str]) -> None:
    """Neither a state nor its DDP model can be copied; the model inside DDP can."""
    for kind in ("LayerDropState", "LowRankState", "AsyncState"):
        with smb.connect(urls[0], TOKEN) as box:
            ddp = wrapped(Weighted(), broadcast_buffers=False)
            state: Any
            if kind == "AsyncState":
                state = hbmcomm.AsyncState(None, ddp, box)
                ddp.register_comm_hook(state, hbmcomm.async_hook)
            else:
                state = low_rank(ddp) if kind == "LowRankState" else layer_drop(ddp)
            ddp(*gradients(context.seed, context.rank, 0, context.size)).backward()
            for attempt in (
                lambda: copy.deepcopy(ddp),  # noqa: B023
                lambda: torch.save(ddp, io.BytesIO()),  # noqa: B023
                lambda: copy.deepcopy(state),  # noqa: B023
                lambda: copy.copy(state),  # noqa: B023
                lambda: pickle.dumps(state),  # noqa: B023
            ):
                with pytest.raises(TypeError, match=rf"{kind} cannot be copied.*deepcopy\(ddp\.m"):
                    attempt()
            copied = copy.deepcopy(ddp.module)
            saved = io.BytesIO()
            torch.save(ddp.module, saved)
            saved.seek(0)
            loaded = torch.load(saved, weights_only=False)
            for own, one, other in zip(
                ddp.parameters(), copied.parameters(), loaded.parameters(), strict=True
            ):
                assert_same(one.detach(), own.detach(), "the copy")
                assert_same(other.detach(), own.detach(), "the saved model")
            if isinstance(state, hbmcomm.AsyncState):
                state.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")
def test_copies_of_models(pool: Pool) -> None:
    with two_boxes() as urls:
        pool.run(copy_models, urls)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(indices).sum()
        return found


def train_sparse(context: Context) -> None:
    ddp = wrapped(Embedding())
    with pytest.raises(ValueError, match="words is an embedding with sparse gradients"):
        hbmcomm.LowRankState(ddp)


def test_sparse_gradients(pool: Pool) -> None:
    pool.run(train_sparse)


def wrap(context: Context) -> None:
    ddp = wrapped(Weighted())
    state = hbmcomm.LowRankState(ddp)
    ddp.register_comm_hook(state, fp16_compress_wrapper(hbmcomm.low_rank_hook))
    with pytest.raises(ValueError, match=r"is torch.float32 and its bucket torch.float16"):
        ddp(*gradients(context.seed, context.rank, 0, context.size)).backward()


def test_a_wrapper_that_rounds(pool: Pool) -> None:
    pool.run(wrap)


def shard(context: Context) -> None:
    model = FullyShardedDataParallel(Weighted(), device_id=torch.device("cpu"))
    state = hbmcomm.LowRankState(wrapped(nn.Linear(3, 3)))
    model.register_comm_hook(state, hbmcomm.low_rank_hook)
    loss = model(*gradients(context.seed, context.rank, 0, context.size))
    with pytest.raises(TypeError, match="FullyShardedDataParallel has called it"):
        loss.backward()


def test_sharded_gradients(fresh_pool: Pool) -> None:
    fresh_pool.run(shard)


def join(context: Context) -> None:
    ddp = wrapped(Weighted())
    low_rank(ddp)
    with pytest.raises(ValueError, match=r"ddp.join\(\)"), ddp.join():
        ddp(*gradients(context.seed, context.rank, 0, context.size)).backward()


def test_join(bare_pool: Pool) -> None:
    bare_pool.run(join_apart)


def join_apart(context: Context) -> None:
    store = FileStore(str(context.folder / "store"), context.size)
    dist.init_process_group("hbm", store=store, rank=context.rank, world_size=context.size)
    join(context)


def load_others(context: Context) -> None:
    ddp = wrapped(Weighted())
    state = low_rank(ddp)
    own = state.state_dict()
    other = hbmcomm.LowRankState(wrapped(nn.Linear(3, 3))).state_dict()
    ddp(*gradients(context.seed, context.rank, 0, context.size)).backward()
    ddp.zero_grad()
    state.load_state_dict(own | {"caches": {"all.0": torch.ones(7)}})
    before = state.summary()
    with pytest.raises(ValueError, match="the state lacks caches, hook, names, rank, ranks, rule"):
        state.load_state_dict({})
    whole = own | {"caches": {"all.0": torch.zeros(7)}}
    for key in own:
        with pytest.raises(
            ValueError, match=f"the state lacks {key}: load the result of state_dict"
        ):
            state.load_state_dict({name: value for name, value in whole.items() if name != key})
    for key in ("rule", "statistics"):
        for part in own[key]:
            rest = {name: value for name, value in own[key].items() if name != part}
            if key == "statistics" and part not in ("steps", "refused_steps"):
                continue
            with pytest.raises(ValueError, match=f"the state is damaged .KeyError: '{part}'"):
                state.load_state_dict(whole | {key: rest})
        with pytest.raises(ValueError, match="the state is damaged"):
            state.load_state_dict(whole | {key: None})
    with pytest.raises(ValueError, match=r"the residual of all\.0 is no tensor: 3"):
        state.load_state_dict(whole | {"caches": {"all.0": 3}})
    assert state.summary() == before
    with pytest.raises(ValueError, match=r"another model: 10 names .* all\.0"):
        state.load_state_dict(other)
    with pytest.raises(ValueError, match=f"is of rank {context.size} of {context.size}"):
        state.load_state_dict(own | {"rank": context.size})
    with pytest.raises(ValueError, match="give the states of all 7 ranks"):
        state.load_state_dict(own | {"ranks": 7})
    with pytest.raises(ValueError, match=r"states of ranks \[0, 0\] were given, and 2"):
        state.load_state_dict([own | {"rank": 0, "ranks": 2}] * 2)
    with pytest.raises(ValueError, match="no state at all"):
        state.load_state_dict([])
    with pytest.raises(ValueError, match=r"of all\.0 is \[8\] in the checkpoint, .* \[7\]"):
        state.load_state_dict(own | {"caches": {"all.0": torch.zeros(8)}})
    assert state.summary()["cache_norm"] == pytest.approx(7**0.5)  # the old residual stays


def test_checkpoints_of_something_else(pool: Pool) -> None:
    pool.run(load_others)


def load_the_other_hooks(context: Context) -> None:
    """Each state refuses the other hook's checkpoints, of one rank or all, and does not change."""
    of_kinds: dict[str, tuple[Any, dict[str, Any]]] = {}
    for kind in STATES:
        ddp = wrapped(Weighted())
        state = low_rank(ddp) if kind == "low_rank" else layer_drop(ddp, target="paper")
        for step in range(3):
            ddp.zero_grad()
            ddp(*gradients(context.seed, context.rank, step, context.size)).backward()
        of_kinds[kind] = state, state.state_dict()
    for kind, other in (("low_rank", "layer_drop"), ("layer_drop", "low_rank")):
        state, own = of_kinds[kind]
        theirs = of_kinds[other][1]
        before = state.summary()
        complaint = rf"the checkpoint is of {other}_hook, and this \w+ is of {kind}_hook: use the"
        for given in (theirs, [theirs | {"rank": rank} for rank in range(context.size)]):
            with pytest.raises(ValueError, match=complaint):
                state.load_state_dict(given)
        assert state.summary() == before
        state.load_state_dict(own)


def test_the_other_hooks_checkpoints(pool: Pool) -> None:
    pool.run(load_the_other_hooks)


def raise_half_way(context: Context) -> None:
    """Refuse to save or drain after a backward() that raised, because the sent layers are lost."""
    ddp = wrapped(Weighted(), bucket_cap_mb=0.001)
    state = low_rank(ddp)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("half-way")

    weights = gradients(context.seed, context.rank, 0, context.size)
    ddp(*weights).backward()  # in one bucket; later steps have several
    next(ddp.parameters()).register_hook(fail)
    with pytest.raises(ArithmeticError):
        ddp(*weights).backward()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
    for method in (state.state_dict, state.summary, lambda: state.drain(optimizer)):
        with pytest.raises(RuntimeError, match=r"the last backward\(\) did not end"):
            method()


def test_a_backward_that_raises(fresh_pool: Pool) -> None:
    fresh_pool.run(raise_half_way)


def step_with_a_closure(context: Context) -> None:
    ddp = wrapped(Weighted())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
    low_rank(ddp, skip_update=True, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"step\(\) without a closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match=r"step\(\) without a closure"):
        optimizer.step(closure=lambda: 0.0)


def test_a_closure(pool: Pool) -> None:
    pool.run(step_with_a_closure)


class FailingOnce(torch.optim.SGD):
    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("deliberate")
        return super().step(closure)


def test_gradients_come_back_after_a_step_that_raised() -> None:
    parameters = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    optimizer = FailingOnce(parameters, lr=1)
    skipper = UpdateSkipper([optimizer])
    skipper.dropped = parameters[:1]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    parameters[1].grad = torch.full((2,), 2.0)
    skipper.dropped = parameters[1:]
    optimizer.fails = False
    optimizer.step()
    assert [parameter.tolist() for parameter in parameters] == [[-1, -1], [0, 0]]
    for parameter, wanted in zip(parameters, (1.0, 2.0), strict=True):
        assert parameter.grad is not None and parameter.grad.tolist() == [wanted] * 2


def meet_unevenly(context: Context) -> None:
    """Make states on ranks that are in different numbers of groups."""
    store = FileStore(str(context.folder / "store"), context.size)
    dist.init_process_group("hbm", store=store, rank=context.rank, world_size=context.size)
    for count in range(3):
        dist.new_group([count % context.size])
    group = dist.new_group([*range(1, context.size)])
    for own in [None, group][: 1 + (context.rank > 0)]:
        hbmcomm.LowRankState(wrapped(Weighted(), process_group=own))


@pytest.mark.ranks(2, 3)
def test_ranks_in_different_numbers_of_groups(bare_pool: Pool) -> None:
    bare_pool.run(meet_unevenly)


def register_badly(context: Context) -> None:
    ddp = wrapped(Weighted())
    ddp.register_comm_hook(hbmcomm.LowRankState(ddp), hbmcomm.layer_drop_hook)
    with pytest.raises(TypeError, match="registered with a LayerDropState, not with LowRankState:"):
        ddp(*gradients(context.seed, context.rank, 0, context.size)).backward()


def test_a_hook_with_the_other_hooks_state(fresh_pool: Pool) -> None:
    fresh_pool.run(register_badly)
