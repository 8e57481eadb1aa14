"""The grouping of parameters into layers, and which layers are sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness import seeds

from torch_hbmcomm.error_feedback.layers import Layer, Shape
from torch_hbmcomm.layer_drop.config import LayerDrop
from torch_hbmcomm.layer_drop.decision import NO_THRESHOLD, DropRule, layers_of


def layer(name: str, numel: int, always: bool = False) -> Layer:
    return Layer((name,), (0,), numel, 4 * numel, always)


def layers(*sizes: int) -> list[Layer]:
    return [layer(f"layer{index}", size) for index, size in enumerate(sizes)]


def decide(rule: DropRule, of: Sequence[Layer], values: Sequence[float]) -> list[bool]:
    """Decide for a step in which the layers' means of absolute values are `values`."""
    layer_sums = [value * one.numel for one, value in zip(of, values, strict=True)]
    decisions = rule.decide(of, layer_sums)
    rule.end_step()
    return decisions


SHAPES = [
    Shape("conv.weight", 4, 9000, 4),
    Shape("norm.weight", 1, 9000, 4),
    Shape("norm.bias", 1, 9000, 4),
    Shape("conv.bias", 1, 60, 4),
    Shape("head.small", 2, 100, 2),
    Shape("scale", 0, 1, 4),
]


def test_a_layer_is_a_parameter() -> None:
    found = layers_of(SHAPES, LayerDrop())
    assert [one.name for one in found] == [shape.name for shape in SHAPES]
    assert [one.always for one in found] == [False, True, True, True, True, True]
    assert [one.nbytes for one in found] == [36000, 36000, 36000, 240, 200, 4]


def test_a_layer_is_a_module() -> None:
    conv, norm, head, scale = layers_of(SHAPES, LayerDrop(granularity="module"))
    assert conv.parameters == ("conv.weight", "conv.bias")
    assert conv.members == (0, 3)
    assert (conv.numel, conv.nbytes, conv.always) == (9060, 36240, False)
    assert (norm.members, norm.always) == ((1, 2), True)  # both have one dimension
    assert (head.always, scale.always) == (True, True)


def test_the_threshold_lets_one_minus_the_ratio_through() -> None:
    """Sorted by score, the layers have 10, 20, 20 and 50 of 100 elements.

    The first three layers have 50 %. With the fourth, of score 7, the sum exceeds the ratio, 60 %.
    """
    rule = DropRule(LayerDrop(ratio=0.6, target="paper"))
    of = layers(50, 10, 20, 20)
    assert rule.threshold == NO_THRESHOLD
    assert decide(rule, of, [7, 1, 2, 3]) == [True] * 4
    assert rule.threshold == 7
    assert decide(rule, of, [7, 1, 2, 3]) == [True, False, False, False]
    assert decide(rule, of, [6.9, 8, 2, 3]) == [False, True, False, False]


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 0.9, 0.99])
def test_at_most_the_ratio_is_dropped_when_values_stay(ratio: float) -> None:
    draw = seeds.draws(0)
    for count in (1, 2, 7, 161):
        of = layers(*(draw.randrange(1, 10**6) for _ in range(count)))
        values = [draw.lognormvariate(0, 2) for _ in of]
        rule = DropRule(LayerDrop(ratio=ratio, target="paper"))
        decide(rule, of, values)
        decisions = decide(rule, of, values)
        total = sum(one.numel for one in of)
        dropped = sum(one.numel for one, goes in zip(of, decisions, strict=True) if not goes)
        least = min(
            value for value, goes in zip(values, decisions, strict=True) if goes
        )  # dropping this one too would be too much
        one_more = sum(one.numel for one, v in zip(of, values, strict=True) if v <= least)
        assert dropped <= ratio * total < one_more


def test_warmup_and_every() -> None:
    rule = DropRule(LayerDrop(ratio=0.5, warmup=3, every=4, target="paper"))
    of = layers(50, 50)
    thresholds = []
    for step in range(9):
        decide(rule, of, [1 + step, 10 + step])
        thresholds.append(rule.threshold)
    assert thresholds == [-1, -1, 12, 12, 12, 12, 16, 16, 16]


def test_layers_wait_at_most_max_age() -> None:
    rule = DropRule(LayerDrop(max_age=3, fixed_threshold=1e9))
    of = layers(10)
    assert [decide(rule, of, [1.0])[0] for _ in range(9)] == 2 * [*[False] * 3, True] + [False]


def test_idle_layers_wait() -> None:
    rule = DropRule(LayerDrop(max_age=2, fixed_threshold=1e9))
    of = layers(10)
    for idle, sent in ((False, False), (False, False), (True, False), (True, False), (False, True)):
        assert rule.decide(of, [5.0], {"layer0"} if idle else ()) == [sent]
        rule.end_step()
    assert not rule.waited


def test_idle_members_keep_their_age() -> None:
    """An unused member of a module keeps its residual when the other members are sent."""
    rule = DropRule(LayerDrop(max_age=2, fixed_threshold=1e9, granularity="module"))
    module = [Layer(("m.w", "m.v"), (0, 1), 20, 80, False)]
    for idle, sent, waited in (
        ((), False, {"m.w": 1, "m.v": 1}),
        (("m.v",), False, {"m.w": 2, "m.v": 2}),
        (("m.v",), True, {"m.v": 3}),
        ((), True, {}),
    ):
        assert rule.decide(module, [5.0], idle) == [sent]
        rule.end_step()
        assert rule.waited == waited


def test_a_threshold_of_another_kind_is_refused() -> None:
    state = DropRule(LayerDrop(representative="l1")).state_dict()
    with pytest.raises(ValueError, match='representative="l1", whose threshold means nothing'):
        DropRule(LayerDrop()).load_state_dict(state)


def test_a_step_that_is_cancelled_leaves_no_trace() -> None:
    rule, other = DropRule(LayerDrop(ratio=0.5, every=3)), DropRule(LayerDrop(ratio=0.5, every=3))
    of = layers(30, 50, 20)
    for step in range(12):
        values = [1.0 + step, 2.0, 5.0]
        rule.decide(of, [float("inf")] * 3)
        rule.cancel_step()
        assert decide(rule, of, values) == decide(other, of, values)
    assert rule.state_dict() == other.state_dict()


def test_a_saved_rule_continues_alike() -> None:
    draw = seeds.draws(0)
    of = layers(*(draw.randrange(1, 9999) for _ in range(20)))
    rule = DropRule(LayerDrop(ratio=0.8, every=5))
    for _ in range(13):
        decide(rule, of, [draw.lognormvariate(0, 1) for _ in of])
    other = DropRule(LayerDrop(ratio=0.8, every=5))
    other.load_state_dict(rule.state_dict())
    for _ in range(20):
        values = [draw.lognormvariate(0, 1) for _ in of]
        assert decide(rule, of, values) == decide(other, of, values)
    assert rule.state_dict() == other.state_dict()


def test_a_pause_of_the_encoder_ends_with_a_new_threshold() -> None:
    """After the pause, gradients are a thousandth. The old threshold would send none of them."""
    of = layers(*[5000] * 10)
    large = [float(value) for value in range(1, 11)]
    small = [value / 1000 for value in large]
    rule = DropRule(LayerDrop(ratio="auto"))
    for _ in range(5):
        decide(rule, of, large)
    assert rule.threshold > max(small) and rule.waited
    rule.forget_waiting()
    assert rule.threshold == NO_THRESHOLD and not rule.waited
    assert all(decide(rule, of, small)), "the step that searches sends everything"
    assert min(small) < rule.threshold <= max(small)
    fresh = DropRule(LayerDrop(ratio="auto"))
    decide(fresh, of, small)
    assert rule.state_dict() == fresh.state_dict()


def test_draining_keeps_the_threshold_of_a_given_ratio() -> None:
    of = layers(*[5000] * 10)
    rule = DropRule(LayerDrop(ratio=0.9))
    for _ in range(5):
        decide(rule, of, [float(value) for value in range(1, 11)])
    before = rule.threshold
    rule.forget_waiting()
    assert rule.threshold == before > NO_THRESHOLD and not rule.waited


def test_a_budget_that_cannot_be_kept() -> None:
    """Nine tenths of all elements are always sent. The threshold still stays near the scores."""
    rule = DropRule(LayerDrop(ratio=0.9))
    of = [layer("small", 900, always=True), layer("large", 100)]
    for _ in range(3000):
        decide(rule, of, [1.0, 2.0])
    assert 0 < rule.threshold <= 4
    assert decide(rule, of, [1.0, 100.0]) == [True, True]
