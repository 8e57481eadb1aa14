"""Finds the local rank of this process before a group is formed. A group does not use this module:
its ranks find out in the store which of them are on one machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class _Launcher(NamedTuple):
    """The names of a launcher's variables for a process' local rank, for its local size, and for
    the number of all processes of the job."""

    rank: str
    size: str
    processes: str


class _Number(NamedTuple):
    value: int
    source: str  # the variable or argument and its value, as in "LOCAL_RANK=3"


_Numbers = dict[str, _Number]  # by the names of _Launcher's fields

_SLURM = _Launcher("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")

# A launcher may start another one: srun starts torchrun, or the proxies of mpiexec. The inner
# launchers come first.
_LAUNCHERS = (
    _Launcher("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),  # torchrun
    _Launcher("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"),  # mpiexec of MPICH and Intel MPI
    _Launcher(  # mpiexec of Open MPI
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"
    ),
    _SLURM,  # srun
)

_NODES = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")  # nodes in a row with equal numbers of tasks

_REMEDY = (
    "Pass local_rank and local_size, or set LOCAL_RANK and LOCAL_WORLD_SIZE to the right values on "
    'each rank (see docs/memory.md, "Binding ranks")'
)


def local_rank_and_size(
    local_rank: int | None, local_size: int | None, environ: Mapping[str, str]
) -> tuple[int, int]:
    """Return the index of this process among the job's processes on this machine, and the number of
    these processes.

    A number that is None comes from the variables of torchrun, mpiexec (MPICH, Intel MPI, Open MPI)
    or srun. Without arguments and variables the process is alone: (0, 1).

    Raises ValueError, which names the variables and the remedy:
    - A number is missing, and the other one is known or a variable shows several processes.
    - Variables contradict each other, or a variable's value is no integer.
    - The local rank is not from 0 to the local size less 1.
    """
    given: _Numbers = {}
    if local_rank is not None:
        given["rank"] = _Number(local_rank, f"local_rank={local_rank}")
    if local_size is not None:
        given["size"] = _Number(local_size, f"local_size={local_size}")
    found = given if len(given) == 2 else _complete(given, environ)
    rank, size = found["rank"], found["size"]
    if not 0 <= rank.value < size.value < 1 << 31:
        raise ValueError(
            f"cannot bind local rank {rank.value} of {size.value} ({rank.source}, {size.source}): "
            "a local rank is from 0 to the local size less 1"
        )
    return rank.value, size.value


def _complete(given: _Numbers, environ: Mapping[str, str]) -> _Numbers:
    """Return the local rank and the local size. Takes those that are not given from `environ`."""
    known = _known({"rank", "size"} - given.keys(), environ)
    processes = known.pop("processes", None)
    found = known | given
    alone = not found if processes is None else processes.value == 1
    if alone and "size" not in found:
        source = "no launcher" if processes is None else processes.source
        found = {"rank": _Number(0, source), "size": _Number(1, source)} | found
    missing = [f"local {name}" for name in ("rank", "size") if name not in found]
    if missing:
        numbers = [*found.values(), *([] if processes is None else [processes])]
        raise ValueError(
            f"cannot bind: found {' and '.join(number.source for number in numbers)}, but no "
            f"variable that has the {' or the '.join(missing)}. {_REMEDY}"
        )
    return found


def _known(wanted: set[str], environ: Mapping[str, str]) -> _Numbers:
    """Return the numbers of the first launcher that has set all that are wanted. The launchers
    before it must agree with it. If no launcher has set all, return the numbers of all launchers.

    A job of one process whose launcher has set nothing else does not contradict other launchers: an
    interactive step of Slurm has PMI_SIZE=1, and mpiexec may start more processes in it.
    """
    known: _Numbers = {}
    single: _Numbers = {}
    for launcher in _LAUNCHERS:
        numbers = _numbers(launcher, wanted | {"processes"}, environ)
        if numbers.keys() == {"processes"} and numbers["processes"].value == 1:
            single = single or numbers
            continue
        for name, number in numbers.items():
            other = known.setdefault(name, number)
            if other.value != number.value:
                raise ValueError(
                    f"cannot bind: {other.source} contradicts {number.source}. {_REMEDY}"
                )
        if wanted <= numbers.keys():
            return known
    return single | known


def _numbers(launcher: _Launcher, names: set[str], environ: Mapping[str, str]) -> _Numbers:
    """Return the numbers among `names` that the launcher has set."""
    if launcher is _SLURM and {_SLURM.size, _SLURM.processes}.isdisjoint(environ):
        return {}  # in the script of sbatch, which is one process, SLURM_LOCALID is set too
    numbers = {}
    for name, variable in launcher._asdict().items():
        if name not in names or variable not in environ:
            continue
        if variable != _SLURM.size:
            numbers[name] = _integer(variable, environ)
        elif "SLURM_NODEID" in environ:
            numbers[name] = _tasks_on_node(_integer("SLURM_NODEID", environ), environ[variable])
    return numbers


def _integer(variable: str, environ: Mapping[str, str]) -> _Number:
    source = f"{variable}={environ[variable]}"
    try:
        return _Number(int(environ[variable]), source)
    except ValueError:
        raise ValueError(f"cannot bind: {source} is no integer. {_REMEDY}") from None


def _tasks_on_node(node: _Number, tasks: str) -> _Number:
    """Return the number of a Slurm step's tasks on a node.

    node: its index in the step
    tasks: the tasks of each node, as in "2(x3),1": two on each of three nodes, then one on a fourth
    """
    source = f"{_SLURM.size}={tasks}"
    parts = [_NODES.fullmatch(part) for part in tasks.split(",")]
    before = 0
    for part in parts:
        if part is None:
            raise ValueError(
                f'cannot bind: {source} is no list of tasks such as "2(x3),1". {_REMEDY}'
            )
        before += int(part[2] or 1)
        if 0 <= node.value < before:
            return _Number(int(part[1]), f"{source} at {node.source}")
    raise ValueError(f"cannot bind: {source} has no node {node.source}. {_REMEDY}")
