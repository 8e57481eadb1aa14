"""The local rank and local size that hbmcomm.memory.bind() takes from a launcher's variables."""

from __future__ import annotations

import re

import pytest

from torch_hbmcomm import memory
from torch_hbmcomm.local_rank import local_rank_and_size

TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6"}
MPICH = {"MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3", "PMI_SIZE": "6", "PMI_RANK": "5"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_SIZE": "6",
}
SLURM = {
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "5,1",
    "SLURM_STEP_NUM_TASKS": "6",
}
SRUN_OF_AGENTS = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2"}
SBATCH = {
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "5,1",
    "SLURM_NTASKS": "6",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, (0, 1), id="alone"),
        pytest.param({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1), id="job of one process"),
        pytest.param(SBATCH, (0, 1), id="script of sbatch"),
        pytest.param(TORCHRUN, (1, 2), id="torchrun"),
        pytest.param(MPICH, (2, 3), id="mpiexec of MPICH"),
        pytest.param(OPEN_MPI, (3, 4), id="mpiexec of Open MPI"),
        pytest.param(SLURM, (0, 1), id="srun"),
        pytest.param(SLURM | {"PMI_SIZE": "6", "PMI_RANK": "5"}, (0, 1), id="srun --mpi=pmi2"),
        pytest.param(SRUN_OF_AGENTS | TORCHRUN, (1, 2), id="torchrun under srun"),
        pytest.param(SRUN_OF_AGENTS | MPICH, (2, 3), id="mpiexec over srun"),
        pytest.param(SRUN_OF_AGENTS | OPEN_MPI, (3, 4), id="Open MPI over srun"),
        pytest.param(MPICH | TORCHRUN, (1, 2), id="torchrun under mpiexec"),
        pytest.param(
            SLURM | {"WORLD_SIZE": "6", "LOCAL_RANK": "0"}, (0, 1), id="LOCAL_RANK of SLURM_LOCALID"
        ),
        pytest.param(
            OPEN_MPI | {"WORLD_SIZE": "6", "LOCAL_RANK": "3"}, (3, 4), id="LOCAL_RANK of Open MPI"
        ),
        pytest.param(OPEN_MPI | {"PMI_SIZE": "1"}, (3, 4), id="Open MPI in a shell of srun"),
        pytest.param(MPICH | {"WORLD_SIZE": "1"}, (2, 3), id="mpiexec in a job of one pod"),
        pytest.param({"WORLD_SIZE": "1"}, (0, 1), id="a job of one pod"),
    ],
)
def test_launchers(environ: dict[str, str], expected: tuple[int, int]) -> None:
    assert local_rank_and_size(None, None, environ) == expected


@pytest.mark.parametrize(
    ("local_rank", "local_size", "environ", "expected"),
    [
        (3, 4, {"LOCAL_RANK": "no number", "WORLD_SIZE": "6"}, (3, 4)),
        (0, None, TORCHRUN, (0, 2)),
        (None, 5, TORCHRUN, (1, 5)),
        (0, None, MPICH, (0, 3)),
        (None, 5, OPEN_MPI, (3, 5)),
        (0, None, SLURM, (0, 1)),
        (0, None, {"WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_arguments_come_first(
    local_rank: int | None,
    local_size: int | None,
    environ: dict[str, str],
    expected: tuple[int, int],
) -> None:
    assert local_rank_and_size(local_rank, local_size, environ) == expected


@pytest.mark.parametrize(
    ("tasks", "sizes"),
    [
        ("3", [3]),
        ("2,1", [2, 1]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("1,2(x2),16(x2)", [1, 2, 2, 16, 16]),
        ("4(x1000000000)", [4]),
    ],
)
def test_slurm_tasks_per_node(tasks: str, sizes: list[int]) -> None:
    for node, size in enumerate(sizes):
        environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
        assert local_rank_and_size(None, None, environ) == (0, size)


@pytest.mark.parametrize(
    ("tasks", "node", "complaint"),
    [
        ("2(x3),1", "4", "SLURM_STEP_TASKS_PER_NODE=2(x3),1 has no node SLURM_NODEID=4"),
        ("2", "-1", "SLURM_STEP_TASKS_PER_NODE=2 has no node SLURM_NODEID=-1"),
        ("2", "one", "SLURM_NODEID=one is no integer"),
        ("2x3", "0", "SLURM_STEP_TASKS_PER_NODE=2x3 is no list of tasks"),
        ("1,2(x)", "1", "SLURM_STEP_TASKS_PER_NODE=1,2(x) is no list of tasks"),
        ("", "0", "SLURM_STEP_TASKS_PER_NODE= is no list of tasks"),
    ],
)
def test_wrong_slurm_tasks_per_node(tasks: str, node: str, complaint: str) -> None:
    environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    with pytest.raises(ValueError, match=re.escape(complaint)):
        local_rank_and_size(None, None, environ)


@pytest.mark.parametrize(
    ("environ", "found", "missing"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4", "local rank or the local size"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4", "local rank or the local size"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4", "local rank or the local size"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4", "local rank or the local size"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0", "local size"),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "4"}, "LOCAL_RANK=0 and WORLD_SIZE=4", "local size"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2", "local rank"),
        ({"MPI_LOCALRANKID": "1"}, "MPI_LOCALRANKID=1", "local size"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_SIZE=2", "local rank"),
        (
            {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"},  # of which node?
            "SLURM_LOCALID=0",
            "local size",
        ),
        (
            {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"},
            "SLURM_STEP_TASKS_PER_NODE=2 at SLURM_NODEID=0",
            "local rank",
        ),
    ],
)
def test_missing_number(environ: dict[str, str], found: str, missing: str) -> None:
    with pytest.raises(ValueError, match="Pass local_rank and local_size") as raised:
        local_rank_and_size(None, None, environ)
    expected = f"cannot bind: found {found}, but no variable that has the {missing}. "
    assert str(raised.value).startswith(expected)


@pytest.mark.parametrize(
    ("local_rank", "local_size", "found", "missing"),
    [(1, None, "local_rank=1", "local size"), (None, 2, "local_size=2", "local rank")],
)
def test_one_argument_alone(
    local_rank: int | None, local_size: int | None, found: str, missing: str
) -> None:
    with pytest.raises(ValueError, match=f"found {found}, but no variable that has the {missing}"):
        local_rank_and_size(local_rank, local_size, {})


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        (TORCHRUN | {"LOCAL_RANK": "2"}, "2 of 2 (LOCAL_RANK=2, LOCAL_WORLD_SIZE=2)"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "-1 of 2 (LOCAL_RANK=-1, LOCAL_WORLD_SIZE=2)"),
        (MPICH | {"MPI_LOCALNRANKS": "0"}, "2 of 0 (MPI_LOCALRANKID=2, MPI_LOCALNRANKS=0)"),
        (SLURM | {"SLURM_LOCALID": "1"}, "1 of 1 (SLURM_LOCALID=1, SLURM_STEP_TASKS_PER_NODE=5,1"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "1"}, "1 of 1 (LOCAL_RANK=1, WORLD_SIZE=1)"),
    ],
)
def test_rank_outside_of_the_size(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot bind local rank {complaint}")):
        local_rank_and_size(None, None, environ)


@pytest.mark.parametrize(
    "variable", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MPI_LOCALRANKID", "PMI_SIZE", "SLURM_LOCALID"]
)
@pytest.mark.parametrize("value", ["one", "1.5", ""])
def test_no_integer(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}={value} is no integer"):
        local_rank_and_size(None, None, SLURM | {variable: value})


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        # Processes that a task of srun started by other means inherit its variables.
        (
            SRUN_OF_AGENTS | {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4 contradicts SLURM_STEP_NUM_TASKS=2",
        ),
        (MPICH | {"WORLD_SIZE": "12"}, "WORLD_SIZE=12 contradicts PMI_SIZE=6"),
        (MPICH | {"LOCAL_RANK": "0"}, "LOCAL_RANK=0 contradicts MPI_LOCALRANKID=2"),
        (
            SLURM | {"LOCAL_WORLD_SIZE": "6"},
            "LOCAL_WORLD_SIZE=6 contradicts SLURM_STEP_TASKS_PER_NODE=5,1 at SLURM_NODEID=1",
        ),
    ],
)
def test_contradiction(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"{complaint}. Pass local_rank and local_size"):
        local_rank_and_size(None, None, environ)


class Recorder:
    """A native module that records the bindings."""

    def __init__(self) -> None:
        self.bound: list[tuple[str, int, int]] = []

    def memory_bind(self, mode: str, local_rank: int, local_size: int) -> str:
        self.bound.append((mode, local_rank, local_size))
        return "bound"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    native = Recorder()
    monkeypatch.setattr(memory, "_native", lambda: native)
    return native


def set_variables(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("by_variable", [False, True], ids=["mode", "HBMCOMM_BIND"])
@pytest.mark.parametrize(
    ("environ", "place"),
    [({}, (0, 1)), (TORCHRUN, (1, 2)), (MPICH, (2, 3)), (OPEN_MPI, (3, 4)), (SLURM, (0, 1))],
)
def test_bind_takes_the_place_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
    recorder: Recorder,
    environ: dict[str, str],
    place: tuple[int, int],
    by_variable: bool,
) -> None:
    set_variables(monkeypatch, environ | ({"HBMCOMM_BIND": "core"} if by_variable else {}))
    memory.bind(None if by_variable else "core")
    assert recorder.bound == [("core", *place)]


@pytest.mark.parametrize("mode", ["core", "numa"])
def test_bind_raises_without_a_place(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder, mode: memory.BindMode
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2"):
        memory.bind(mode)
    assert recorder.bound == []
    memory.bind(mode, local_rank=1, local_size=2)
    assert recorder.bound == [(mode, 1, 2)]


def test_bind_to_none_needs_no_place(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    memory.bind()
    memory.bind("none")
    memory.bind(local_rank=1)
    memory.bind("none", local_size=2)
    assert [mode for mode, _, _ in recorder.bound] == ["none"] * 4


def test_bind_names_the_sources_of_a_wrong_place(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    set_variables(monkeypatch, MPICH)
    with pytest.raises(ValueError, match=r"5 of 3 \(local_rank=5, MPI_LOCALNRANKS=3\)"):
        memory.bind("numa", local_rank=5)
    assert recorder.bound == []
