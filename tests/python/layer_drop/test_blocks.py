"""The rule of blocks keeps the budget, and does not depend on chance or on the past of others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torch_hbmcomm.error_feedback.layers import Shape
from torch_hbmcomm.layer_drop.blocks import BlockRule, layers_of
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.packing import Packing
from torch_hbmcomm.parameter_server.config import SyncConfig

RANKS = 4
SHAPES = [(3, 5), (700, 100), (5000,), (64, 64), (200, 101)]


def rule_of(**settings: Any) -> tuple[BlockRule, list[Any]]:
    terms: Any = {"ratio": 0.9, "target": "blocks"} | settings
    config = LayerDrop(**terms)
    config.check()
    shapes = [
        Shape(str(index), len(shape), math.prod(shape), 4) for index, shape in enumerate(SHAPES)
    ]
    layers = layers_of(shapes, config)
    return BlockRule(config, layers, RANKS), layers


def step(rule: BlockRule, layers: list[Any], draw: torch.Generator) -> dict[str, list[int]]:
    """Choose for each parameter, from random norms. Returns the chosen blocks."""
    chosen = {}
    for layer in layers:
        if not layer.always:
            norms = torch.rand(rule.blocks(layer.numel), generator=draw)
            chosen[layer.name] = rule.choose(layer, norms).indices.tolist()
    rule.end_step()
    return chosen


@pytest.mark.parametrize(("ratio", "levels"), [(0.5, None), (0.8, None), (0.9, None), (0.9, 31)])
@pytest.mark.parametrize("warmup", [0, 3])
def test_steps_keep_the_budget(ratio: float, levels: int | None, warmup: int) -> None:
    rule, layers = rule_of(ratio=ratio, levels=levels, warmup=warmup)
    whole = sum(layer.nbytes for layer in layers)
    width = 4.0 if levels is None else Packing(levels, RANKS).element_bytes
    sizes = {layer.name: width * layer.numel / rule.blocks(layer.numel) for layer in layers}
    numbers = 2 * len(layers) + sum(rule.blocks(one.numel) for one in layers if not one.always)
    fixed = sum(layer.nbytes for layer in layers if layer.always) + 4 * numbers
    draw, sent, steps = torch.Generator(), [], 60
    for _ in range(warmup):
        assert rule.sends_all
        rule.end_step()
    for _ in range(steps):
        assert not rule.sends_all
        chosen = step(rule, layers, draw)
        sent.append(fixed + sum(len(found) * sizes[name] for name, found in chosen.items()))
    begin = 0 if warmup else ratio * whole  # the first steps send additional bytes
    block = max(sizes.values())
    assert sum(sent) == pytest.approx((1 - ratio) * whole * steps + begin, abs=3 * block)
    later = sent[round(1 / (1 - ratio)) :]
    assert max(later) - min(later) <= 3 * block


def test_the_largest_residual_for_its_usual_gradient_goes_first() -> None:
    rule, layers = rule_of(ratio=0.5)
    layer = layers[1]
    blocks = rule.blocks(layer.numel)
    usual = torch.logspace(-0.3, 0.3, blocks)
    rule.choose(layer, usual)
    rule.end_step()
    excess = torch.ones(blocks)
    excess[blocks // 3] = 1.5
    count = rule.count(layer)
    assert 0 < count < blocks
    found = rule.choose(layer, usual * excess)
    assert blocks // 3 in found.indices.tolist()
    assert len(found.indices) == count


def test_no_block_waits_longer_than_twice_max_age() -> None:
    """Blocks 0 to 9 of each parameter have the lowest scores in every step."""
    rule, layers = rule_of(max_age=30)
    last: dict[tuple[str, int], int] = {}
    for number in range(120):
        for layer in layers:
            if layer.always:
                continue
            norms = torch.ones(rule.blocks(layer.numel))
            norms[: len(norms) // 4] = 1e-9
            if number == 0:
                norms[:] = 1
            found = rule.choose(layer, norms)
            for index, age in zip(found.indices.tolist(), found.ages.tolist(), strict=True):
                key = layer.name, index
                assert age == number - last.get(key, -1)
                last[key] = number
        rule.end_step()
        assert max(rule.waited.values()) <= 60
    assert len(last) == sum(rule.blocks(one.numel) for one in layers if not one.always)


def test_blocks_go_even_if_other_parameters_take_the_whole_budget() -> None:
    rule, layers = rule_of(ratio=0.97)  # the parameter of one dimension is 5 % of the model
    draw = torch.Generator().manual_seed(3)
    for _ in range(40):
        step(rule, layers, draw)
    chosen = [step(rule, layers, draw) for _ in range(200)]
    for layer in layers:
        if not layer.always:
            sent = sum(len(found[layer.name]) for found in chosen)
            assert sent == pytest.approx(200 * rule.blocks(layer.numel) * 0.03 / 4, abs=2)


def test_a_step_that_is_cancelled_leaves_no_trace() -> None:
    found = []
    for cancelled in (False, True):
        rule, layers = rule_of()
        draw = torch.Generator().manual_seed(1)
        step(rule, layers, draw)
        if cancelled:
            before = draw.get_state()
            for layer in layers:
                if not layer.always:
                    rule.choose(layer, torch.rand(rule.blocks(layer.numel), generator=draw))
            rule.cancel_step()
            draw.set_state(before)
        found.append([step(rule, layers, draw) for _ in range(20)])
    assert found[0] == found[1]


def test_a_saved_rule_continues_alike() -> None:
    rule, layers = rule_of()
    draw = torch.Generator().manual_seed(2)
    for _ in range(9):
        step(rule, layers, draw)
    other, _ = rule_of()
    other.load_state_dict(rule.state_dict())
    again = torch.Generator()
    again.set_state(draw.get_state())
    for _ in range(20):
        assert step(rule, layers, draw) == step(other, layers, again)
    assert rule.waited == other.waited
    with pytest.raises(ValueError, match="use block=256"):
        rule_of(block=64)[0].load_state_dict(rule.state_dict())
    with pytest.raises(ValueError, match="another target"):
        rule.load_state_dict({"steps": 1})


def test_a_norm_that_is_not_finite_sends_the_parameter() -> None:
    rule, layers = rule_of()
    norms = torch.ones(rule.blocks(layers[1].numel))
    norms[3] = math.nan
    assert len(rule.choose(layers[1], norms).indices) == len(norms)
    rule.end_step()
    found = rule.choose(layers[1], torch.ones(len(norms)))
    assert 0 < len(found.indices) < len(norms)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"fixed_threshold": 1.0}, "fixed_threshold has no meaning"),
        ({"granularity": "module"}, "granularity has no meaning"),
        ({"skip_update": True}, "skip_update has no meaning"),
        ({"block": 0}, "block is at least 1"),
        ({"target": "bytes", "block": 8}, 'block is for target="blocks"'),
        ({"target": "bytes", "levels": 1}, 'levels is for target="blocks"'),
        ({"levels": 0}, "levels is at least 1"),
        ({"levels": 128}, "levels is at most 127"),
        ({"levels": 1, "wire_dtype": torch.bfloat16}, "two types of the same elements"),
    ],
)
def test_settings_of_another_rule_are_refused(settings: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        rule_of(**settings)


def test_a_parameter_server_refuses_blocks() -> None:
    config = SyncConfig(0, False, "shared", 1, LayerDrop(target="blocks"))
    with pytest.raises(ValueError, match="a parameter server sends whole layers"):
        config.check(2)


@pytest.mark.parametrize("levels", [1, 2, 31, 127])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64, 1000])
def test_packed_numbers_of_all_ranks_add_up(levels: int, size: int) -> None:
    packing = Packing(levels, size)
    draw = torch.Generator().manual_seed(levels + size)
    for count in (1, 2, 100):
        own = [
            torch.randint(-levels, levels + 1, (count,), generator=draw, dtype=torch.int32)
            for _ in range(size)
        ]
        for numbers in (own, [torch.full_like(own[0], levels)] * size):
            wires = torch.zeros(size, packing.numel(count), dtype=torch.int32)
            for one, wire in zip(numbers, wires, strict=True):
                packing.pack(one, wire)
            total = wires.sum(0, dtype=torch.int32)
            assert torch.equal(packing.sums(total, count), torch.stack(numbers).sum(0).int())
    assert packing.element_bytes <= 4


def test_packed_numbers_take_few_bytes() -> None:
    assert [Packing(1, ranks).element_bytes for ranks in (2, 4, 16)] == [4 / 13, 4 / 9, 4 / 6]


def test_the_smallest_matrices_are_sent_whole_for_half_of_the_bytes() -> None:
    """At R = 0.9, 5 % of 40,000 elements may be sent whole: 2,000 elements."""
    sizes = [(500,), (1, 1), (40, 30), (30, 30), (20, 30), (100, 368)]
    shapes = [Shape("", len(shape), math.prod(shape), 4) for shape in sizes]
    assert sum(shape.numel for shape in shapes) == 40001
    whole = [True, True, False, False, True, False]  # 500 + 1 + 600; 900 more would be too many
    layers = layers_of(shapes, LayerDrop(target="blocks"))
    assert [layer.always for layer in layers] == whole
    layers = layers_of(shapes, LayerDrop(target="blocks", min_numel=901))
    assert [layer.always for layer in layers] == [True, True, False, True, True, False]
    layers = layers_of([*shapes, Shape("", 2, 10**6, 4)], LayerDrop(target="blocks", ratio=0.5))
    assert [layer.always for layer in layers] == [True] * 5 + [False] * 2
