"""Variants of layer dropping, with several seeds: Lee et al. 2020, sections 4.3 and 5.

A case is an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

from papers.layer_drop.plan import NORMS, WITHOUT_RESIDUALS
from papers.layer_drop.plan import VARIANTS as NAMES
from papers.layer_drop.server_training import NAME, ours, papers, variant_of
from papers.layer_drop.training_curve import POINTS
from papers.report.experiment import Experiment, Label
from papers.report.seeds import SEEDS, Seeds, cases_of, panels, runs_of, table
from papers.report.verdicts import LEE, Claim, Outcome, Spread, Unmeasured, graded
from torch_hbmcomm.bench.result import Measurement, Result

_RUN = "layer-drop-variants"
_RATIO = 0.9
_OF = (
    f"R is {_RATIO:g}; a small net learns MNIST, and a mean of seeds has its standard error"
    " after ±."
)

Pair = tuple[str, str, Measurement, Measurement]
"""A case, the name of the first training, and two trainings."""


def _pairs(results: Mapping[str, Result], named: Mapping[str, str]) -> list[Pair]:
    """Return the pairs of trainings in all cases. named: the second one's name, by the first one's.

    Raises Unmeasured without any.
    """
    found = [
        (case, first, trainings[first], trainings[second])
        for case, trainings in cases_of(results).items()
        for first, second in named.items()
        if {first, second} <= set(trainings)
    ]
    if not found:
        raise Unmeasured(f"The records have no training with {' or '.join(named.values())}.")
    return found


def _norms(results: Mapping[str, Result]) -> Outcome:
    first, second = (variant_of(papers(_RATIO), norm) for norm in NORMS)
    found = _pairs(results, {first: second})
    points = {
        case: Seeds.of(l2, "points").less(Seeds.of(l1, "points")) for case, _, l1, l2 in found
    }
    sent = Spread.of(
        [l2.values["bytes_share"] / l1.values["bytes_share"] for _, _, l1, l2 in found],
        "the bytes with L1 and L2 norms",
    )
    shown = "; ".join(f"{one.text()} points ({case})" for case, one in points.items())
    accurate = [abs(one.mean) <= POINTS for one in points.values()]
    return Outcome(
        f"With L2 instead of L1 norms, accuracy changes by {shown}. L2 norms send"
        f" {sent.times('the bytes with L1 norms')}.",
        graded(all(accurate) and sent.equal, all(accurate) or sent.equal),
        f"Both have the paper's rule. {_OF}",
    )


def _residuals(results: Mapping[str, Result]) -> Outcome:
    named = {name: variant_of(name, WITHOUT_RESIDUALS) for name in (ours(_RATIO), papers(_RATIO))}
    found = _pairs(results, named)
    kept = [Seeds.of(one, "points") for _, _, one, _ in found]
    lost = [
        one.less(Seeds.of(without, "points"))
        for one, (_, _, _, without) in zip(kept, found, strict=True)
    ]
    avoided = [one.mean > POINTS for one in lost]
    shown = "; ".join(_shown(*one) for one in zip(found, kept, lost, strict=True))
    return Outcome(
        f"Compared with all sent, accuracy ends at {shown}.",
        graded(all(avoided) and all(one.mean >= -POINTS for one in kept), any(avoided)),
        f"Without residuals, workers throw the gradients of dropped layers away. {_OF}",
    )


def _shown(pair: Pair, kept: Seeds, lost: Seeds) -> str:
    case, who, _, _ = pair
    return (
        f"{kept.text()} points with residuals, which is {lost.text()} points higher than without"
        f" ({who}, {case})"
    )


_CLAIMS = (
    Claim(
        LEE,
        "Section 5: norms",
        "L1 and L2 norms have the same effect.",
        _norms,
        f"It holds if the mean accuracies differ by at most {POINTS} points, and the bytes by at"
        " most 10 %, in all cases. It holds in part if one of these is so in all cases.",
    ),
    Claim(
        LEE,
        "Section 4.3",
        "Gradients that are accumulated in a cache avoid a loss of accuracy.",
        _residuals,
        f"It holds if all trainings with residuals end at most {POINTS} points below all sent, and"
        f" more than {POINTS} points above those without, in the mean. It holds in part if some end"
        f" more than {POINTS} points above those without.",
    ),
)


VARIANTS = Experiment(
    name=_RUN,
    figures="sections 4.3 and 5, norms and residuals",
    label=Label.EMULATED,
    differs=(
        "The net, the data, the hosts and the link of 1 Gbit/s are those of the section"
        f" layer-drop-training, with {SEEDS} seeds and R = {_RATIO:g}. Rows with L1 and L2 have the"
        " paper's rule, with this norm as the value of a layer. Other rows have the mean of the"
        " absolute values."
    ),
    claims=_CLAIMS,
    runs=tuple(runs_of(_RUN, NAME, f"--ratios={_RATIO:g}", f"--variants={','.join(NAMES)}")),
    table=table,
    panels=panels,
)
