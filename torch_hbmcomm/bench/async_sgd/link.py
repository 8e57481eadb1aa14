"""The server at one end of a slow link, the workers at the other."""

from torch_hbmcomm.bench.async_sgd import contenders, goals
from torch_hbmcomm.bench.async_sgd.contender import Place
from torch_hbmcomm.bench.async_sgd.emulation import Emulation, chosen
from torch_hbmcomm.bench.async_sgd.models import Model
from torch_hbmcomm.bench.async_sgd.plan import Plan
from torch_hbmcomm.bench.async_sgd.section import Findings, Section
from torch_hbmcomm.bench.namespaces import PAYLOAD, NoNamespaces, two_nodes
from torch_hbmcomm.bench.unavailable import Unavailable

_MODELS = ["Inception_v1"]  # the larger ones take seconds an iteration
_CONTENDERS = [contenders.TCP, contenders.MPI_TCP, contenders.RPC]


def _measure(plan: Plan, findings: Findings) -> None:
    taking_part = chosen(plan, [contenders.CONTENDERS[name] for name in _CONTENDERS])
    try:
        with (
            two_nodes(f"{plan.megabits}mbit") as (there, here),
            Emulation("link", plan, findings) as emulation,
        ):
            emulation.start(taking_part, Place(there, here))
            models = plan.chosen(_MODELS)
            emulation.check_way(models[0], there)
            for model in models:
                for workers in sorted(plan.workers):
                    emulation.measure(model, workers)
                    findings.add(
                        emulation.measurement(scenario, model, workers, goals.LINK, [bound])
                        for scenario, bound in _bounds(plan, model, workers).items()
                    )
    except NoNamespaces as error:
        raise Unavailable(str(error)) from error


def _bounds(plan: Plan, model: Model, workers: int) -> dict[str, float]:
    """By scenario, milliseconds: in every iteration the link carries all gradients one way and all
    weights the other."""
    one = model.bytes / (plan.megabits / 8 * 1e3 * PAYLOAD)
    compute = model.compute * 1e3
    bounds = {
        "sequential": max(one, workers * one - compute),
        "parallel": max(compute, workers * one),
    }
    return {scenario: bounds[scenario] for scenario in plan.scenarios}


LINK = Section(
    "link",
    "the server at one end of a cable with a rate, the workers at the other; what the rate allows",
    _measure,
    {
        "sequential": [
            goals.faster_where_the_link_is_not_the_bound(contenders.MPI_TCP, contenders.TCP, 2.1),
            goals.faster_where_the_link_is_the_bound(contenders.MPI_TCP, contenders.TCP, 1),
            goals.faster(contenders.RPC, contenders.TCP),
        ],
        "parallel": [goals.better_hidden(contenders.MPI_TCP, contenders.TCP, 7)],
    },
)
