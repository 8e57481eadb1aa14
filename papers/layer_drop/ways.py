"""Section ways: DistributedDataParallel on two hosts learns images, with several ways of sending.

The ways are the targets of LayerDrop, low rank, and PowerSGD. Section server-training has the same
net.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.verdict import JudgedSection
from papers.layer_drop.cluster import Cluster, two_hosts
from papers.layer_drop.learning import CONTENDERS, PLAIN, TERNARY, Learned
from papers.layer_drop.plan import Plan
from papers.layer_drop.table import tables
from papers.layer_drop.tasks import TASKS
from papers.layer_drop.training_curve import Curve, case_of, trained
from torch_hbmcomm.bench.result import Findings

NAME = "ways"
WAYS = {one: one for one in CONTENDERS} | {
    "hook": "low rank",
    "bfloat16": "low rank, bfloat16",
    TERNARY: "blocks, ternary",
}
"""The names of the ways, by their names in learning.py."""
_ABOUT = (
    "4 ranks on two hosts learn images of MNIST under DDP; a convolutional net of 542,000 "
    "parameters; accuracy on test images"
)
_ROLE = "papers.layer_drop.learning_rank"
_NODES = (0, 0, 1, 1)
_TASK = "wide-convolutions"


def named(way: str, ratio: float) -> str:
    """Return the name of a contender. way: a name in WAYS."""
    return f"R = {ratio:g}, {WAYS[way]}"


def _measure(plan: Plan, findings: Findings) -> None:
    rates = TASKS[_TASK]().rates  # raises Unavailable if the images are missing
    ways: dict[str, dict[str, Any]] = {PLAIN: {"contender": PLAIN, "ratio": 0.0}}
    ways |= {
        named(way, ratio): {"contender": way, "ratio": ratio}
        for ratio in plan.ratios
        for way in WAYS
    }
    steps = plan.training_steps
    for megabits in plan.megabits:
        with two_hosts(_ROLE, _NODES, megabits, task=_TASK) as hosts:
            for optimizer in plan.optimizers:
                case = case_of(megabits, optimizer, steps, plan.seeds)
                common = {"optimizer": optimizer, "rate": rates[optimizer], "steps": steps}
                contenders = {
                    name: partial(_learn, hosts, common | way) for name, way in ways.items()
                }
                findings.add(trained(NAME, case, plan.seeds, contenders, findings.progress))


def _learn(hosts: Cluster, arguments: Mapping[str, Any], seed: int) -> tuple[Curve, float]:
    """Train once. Return the curve, and the megabytes over the link in both directions."""
    hosts.all("begin", seed=seed, **arguments)
    before = sum(hosts.received())
    found = Learned()
    while found.steps[-1:] != [arguments["steps"]]:
        found = Learned(**hosts.all("look")[0])
    crossed = (sum(hosts.received()) - before) / 1e6
    steps = list(map(float, found.steps))
    return Curve(steps, found.seconds, found.loss, found.quality), crossed


WAYS_OF_DDP = JudgedSection(NAME, _ABOUT, _measure, render=partial(tables, _ABOUT), plotted=True)
