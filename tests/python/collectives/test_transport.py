"""`Options(transport=...)`: the transports of a group's messages, and values that hbm refuses."""

from __future__ import annotations

import tempfile

import pytest
from harness import beyond_gloo
from harness.warm import run_warm

from torch_hbmcomm import Options

pytestmark = beyond_gloo

RANKS = """
import os, sys
import torch
import torch.distributed as dist
from torch_hbmcomm import Options

child = os.fork()
rank = int(child == 0)
os.environ["HBMCOMM_NODE_ID"] = {layout!r}[rank]

def form(transport, store):
    try:
        options = Options(transport=transport) if transport else None
        method = f"file://{{store}}"  # no rank serves it, so none leaves before another reads
        dist.init_process_group(
            "hbm", init_method=method, rank=rank, world_size=2, pg_options=options
        )
        data = torch.ones(100_000)
        dist.all_reduce(data)
        assert (data == 2).all()
        with open("/proc/self/maps") as maps:
            loaded = "libmpi" in maps.read()
        dist.destroy_process_group()
        return "over MPI" if loaded else "no MPI"
    except dist.DistBackendError as error:
        return str(error).splitlines()[0]

reports_of = [form(transports[rank], store) for transports, store in zip({transports}, {stores})]
for line in reports_of:
    print(f"{{rank}}: {{line}}\\n", end="", flush=True)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def reports_of(
    layout: str, *transports: tuple[str | None, str | None], **environment: str
) -> list[list[str]]:
    """Let two ranks form a group for each of `transports`. Return each rank's reports on them.

    transports: for each group, the transports that rank 0 and rank 1 ask for; None: no option
    """
    with tempfile.TemporaryDirectory() as folder:
        stores = [f"{folder}/{group}" for group in range(len(transports))]
        code = RANKS.format(layout=layout, transports=list(transports), stores=stores)
        finished = run_warm(code, 120, **environment)
    assert finished.code == 0, finished.output
    lines = [line.split(": ", 1) for line in finished.output.splitlines()]
    return [[text for number, text in lines if number == rank] for rank in "01"]


def test_one_node_over_shared_memory_or_mpi() -> None:
    groups = reports_of("aa", ("auto", "auto"), ("shm", "shm"), ("mpi", "mpi"))
    assert groups == [["no MPI", "no MPI", "over MPI"]] * 2


def test_the_variable_is_the_default() -> None:
    groups = reports_of("aa", ("shm", "shm"), (None, None), HBMCOMM_NODE="mpi")
    assert groups == [["no MPI", "over MPI"]] * 2


def test_shm_refuses_a_group_over_two_nodes() -> None:
    refusal = 'transport is "shm", and not all ranks of group "0" share memory'
    for of_rank in reports_of("ab", ("shm", "shm"), ("auto", "auto")):
        assert len(of_rank) == 2, of_rank
        assert refusal in of_rank[0]
        assert "ranks that do: [0] on " in of_rank[0]
        assert ", [1] on " in of_rank[0]
        assert 'Choose "auto"' in of_rank[0]
        assert of_rank[1] == "over MPI"


def test_ranks_that_differ_are_refused() -> None:
    for of_rank in reports_of("aa", ("auto", "mpi")):
        assert "transport (the option, or HBMCOMM_NODE) differs" in of_rank[0], of_rank
        assert "rank 0 has auto, rank 1 has mpi" in of_rank[0], of_rank


def test_a_wrong_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match='transport is "tcp"; it must be "auto"'):
        Options(transport="tcp")
    assert Options().transport == "auto"
    monkeypatch.setenv("HBMCOMM_NODE", "mpi")
    assert Options().transport == "mpi"
    assert Options(transport="shm").transport == "shm"
