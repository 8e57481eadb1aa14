"""Server and workers on this machine."""

from torch_hbmcomm.bench.async_sgd import contenders, goals
from torch_hbmcomm.bench.async_sgd.contender import Place
from torch_hbmcomm.bench.async_sgd.emulation import Emulation, chosen
from torch_hbmcomm.bench.async_sgd.models import MODELS
from torch_hbmcomm.bench.async_sgd.plan import Plan
from torch_hbmcomm.bench.async_sgd.section import Findings, Section


def _measure(plan: Plan, findings: Findings) -> None:
    taking_part = chosen(plan, list(contenders.CONTENDERS.values()))
    with Emulation("node", plan, findings) as emulation:
        emulation.start(taking_part, Place())
        for model in plan.chosen(list(MODELS)):
            for workers in sorted(plan.workers):
                emulation.measure(model, workers)


NODE = Section(
    "node",
    "server and workers on this machine",
    _measure,
    {
        "sequential": [
            goals.faster(contenders.MPI, contenders.IN_PLACE, 4),
            goals.faster(contenders.MPI, contenders.PLAIN, 2.3),
            goals.faster(contenders.RPC, contenders.IN_PLACE),
            goals.faster(contenders.MPI_TCP, contenders.TCP, 2.1),
        ],
        "parallel": [
            goals.better_hidden(contenders.MPI, contenders.IN_PLACE, 7),
            goals.better_hidden(contenders.MPI_TCP, contenders.TCP, 7),
        ],
    },
)
