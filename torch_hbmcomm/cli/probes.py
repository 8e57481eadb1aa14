"""Probes: each checks one thing, and returns its value, the source of the fact, and the remedy if
the thing is absent.

No probe needs a process group. A probe may raise ImportError if it needs an extension that is
absent, and RuntimeError or ValueError if the library names a cause. run_probes() turns these errors
into findings.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from torch_hbmcomm import machine, memory, variables
from torch_hbmcomm.cli import environment
from torch_hbmcomm.sizes import format_bytes
from torch_hbmcomm.version import __version__

_RDMA_DEVICES = Path("/sys/class/infiniband")
_TRANSPORT_VARIABLES = ("UCX_TLS", "FI_PROVIDER", "MPIR_CVAR_CH4_NETMOD")


class ProbeState(Enum):
    OK = "ok"
    WARNING = "warning"  # works, though not as one may expect
    BROKEN = "broken"  # the backend cannot work here


@dataclass(frozen=True)
class Finding:
    """The result of a probe.

    value: the fact, as text for people.
    data: the same facts for programs.
    """

    name: str
    value: str
    found_by: str = ""
    state: ProbeState = ProbeState.OK
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def package() -> Finding:
    found = machine.distributions()
    state, remedy = ProbeState.OK, ""
    if not found:
        state = ProbeState.WARNING
        remedy = "install it with pip, or torch will not find the backend hbm by itself"
    elif len(found) > 1:
        state = ProbeState.WARNING
        remedy = (
            "the two have the same files: pip uninstall both, then install torch_hbmcomm, which "
            "has the memory box too, or hbmcomm-box, which is the box alone"
        )
    value = ", ".join(f"{name} {version}" for name, version in found.items()) or "not installed"
    data = {"version": __version__, "distributions": found}
    return Finding("torch_hbmcomm", value, "package metadata", state, remedy, data)


def torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        remedy = "install torch and torch_hbmcomm; a memory box alone needs neither"
        return _broken("torch", str(error), "import torch", remedy)
    found = str(torch.__version__)
    try:
        built_for = _extension().build_info()["torch_version"]
    except ImportError as error:
        return _broken(
            "torch",
            f"{found}; the extension cannot be loaded: {error}",
            "torch_hbmcomm._C",
            "install what the cause names",
            {"found": found},
        )
    data = {"found": found, "built_for": built_for}
    return Finding("torch", f"{found}; built for {built_for}", "torch_hbmcomm._C", data=data)


def cpu() -> Finding:
    data: dict[str, Any] = {"model": machine.cpu_model(), "cores": machine.cores()}
    try:
        data["reduce_isa"] = _extension().reduce_isa()
        kernels = f"reduction kernels: {data['reduce_isa']}"
    except ImportError:
        kernels = "reduction kernels: unknown without the extension"
    value = f"{data['model']}, {data['cores']} cores; {kernels}"
    return Finding("cpu", value, "/proc/cpuinfo, CPU affinity", data=data)


def numa() -> Finding:
    found = memory.info()
    nodes = found.nodes
    value = "\n".join(
        f"node {node.id}{' (HBM)' if node.is_hbm else ''}: {format_bytes(node.total_bytes)}, "
        f"{format_bytes(node.free_bytes)} free, "
        + (f"cpus {node.cpus}" if node.cpus else "no cpus")
        for node in nodes
    )
    unbound = found.cpu_nodes > 1 and not os.environ.get("HBMCOMM_BIND")
    advice = "HBMCOMM_BIND=auto keeps each rank near its memory" if unbound else ""
    data = {"nodes": [asdict(node) for node in nodes]}
    return Finding("numa", value, "hwloc, memkind", remedy=advice, data=data)


def hbm() -> Finding:
    found = memory.info()
    closest = ", ".join(map(str, found.closest_hbm_nodes)) or "none"
    absent = not found.hbm_available and found.mode != "cache"
    return Finding(
        "hbm",
        f"{'none to allocate from' if absent else 'mode ' + found.mode}; closest nodes: {closest}\n"
        f"CPU nodes a socket: {found.cluster}; memkind {found.memkind_version}",
        f"{found.hbm_source}\n{found.mode_source}",
        ProbeState.WARNING if absent else ProbeState.OK,
        "if this machine has HBM nodes, name them in MEMKIND_HBW_NODES" if absent else "",
        {
            "available": found.hbm_available,
            "mode": found.mode,
            "cluster": found.cluster,
            "closest_nodes": found.closest_hbm_nodes,
            "memkind_version": found.memkind_version,
        },
    )


def policy() -> Finding:
    chosen = os.environ.get("HBMCOMM_MEMORY")
    value = chosen or "preferred"
    found_by = "HBMCOMM_MEMORY" if chosen else "default"
    choices = get_args(memory.Policy)
    if value not in choices:
        remedy = f"set HBMCOMM_MEMORY to one of {', '.join(choices)}"
        return _broken("policy", f"no such policy: {value}", found_by, remedy)
    if value in ("bind", "interleave") and not memory.available():
        remedy = "set HBMCOMM_MEMORY to preferred or ddr"
        return _broken("policy", f"{value}, which needs HBM; there is none", found_by, remedy)
    return Finding("policy", value, found_by, data={"name": value})


def places() -> Finding:
    """Where new data are placed, and how much fits there."""
    chosen = os.environ.get("HBMCOMM_MEMORY") or "preferred"
    found = memory.info()
    needs_hbm = chosen in ("bind", "interleave") and not found.hbm_available
    if needs_hbm or chosen not in get_args(memory.Policy):
        return Finding("places", "unknown", state=ProbeState.WARNING, remedy="fix the row policy")
    own = f"{_place(found, chosen)} ({chosen})"
    ordinary = _place(found, "ddr")
    buckets = "" if os.environ.get("DDP_DISABLE_COMM_MEM") == "1" else "DDP's buckets, "
    if os.environ.get("HBMCOMM_ALLOCATOR") == "segment":
        tensors = f"other tensors of 64 KiB and more: {own}"
    else:
        tensors = f"other tensors: {ordinary}; HBMCOMM_ALLOCATOR=segment changes this"
    lines = [
        f"{buckets}staging, hbmcomm.memory.empty(): {own}",
        f"a box of hbmcomm serve: {_place(found, 'preferred')}, or as --policy says",
        tensors,
    ]
    found_by = "the policies, the free memory of each node, the limits of control groups"
    return Finding("places", "\n".join(lines), found_by)


def _place(found: memory.Info, policy: str) -> str:
    """Return where memory of the policy is, and how much fits."""

    def room(nodes: list[memory.Node]) -> str:
        return f"{format_bytes(min(found.room_bytes, sum(n.room_bytes for n in nodes)))} fit"

    hbm = [node for node in found.nodes if node.is_hbm]
    if policy != "interleave":
        hbm = [node for node in hbm if node.id in found.closest_hbm_nodes]
    only = found.mode == "hbm-only"
    ordinary = [node for node in found.nodes if only or not node.is_hbm]
    cached = " with HBM as its cache" if found.mode == "cache" else ""
    ddr = f"ordinary memory{cached}, {room(ordinary)}"
    if policy == "ddr" or not hbm:
        return ddr
    names = " and ".join(str(node.id) for node in hbm)
    text = f"HBM node{'s' if len(hbm) > 1 else ''} {names}, {room(hbm)}"
    return f"{text}, then {ddr}" if policy == "preferred" and not only else text


def mpi() -> Finding:
    try:
        found = _extension().mpi_info()
    except RuntimeError as error:
        state, effect = ProbeState.WARNING, "groups on one node work, groups over several do not"
        if os.environ.get("HBMCOMM_NODE") == "mpi":
            state, effect = ProbeState.BROKEN, "HBMCOMM_NODE=mpi: all groups need MPI"
        return Finding(
            "mpi",
            f"{error}\n{effect}",
            "HBMCOMM_MPI_LIB, next to this Python, the system",
            state,
            "pip install mpich, or name a library in HBMCOMM_MPI_LIB (docs/running.md)",
        )
    value = f"{found['version']}\n{found['library']} (ABI: {found['abi']})"
    return Finding("mpi", value, found["found_by"], data=dict(found))


def transports() -> Finding:
    devices = sorted(path.name for path in _RDMA_DEVICES.glob("*"))
    chosen = {name: os.environ[name] for name in _TRANSPORT_VARIABLES if name in os.environ}
    value = [
        "MPI chooses" if not chosen else " ".join(f"{key}={text}" for key, text in chosen.items()),
        f"RDMA devices: {', '.join(devices) or 'none'}",
    ]
    return Finding(
        "transports",
        "\n".join(value),
        f"{_RDMA_DEVICES}, {', '.join(_TRANSPORT_VARIABLES)}",
        data={"rdma_devices": devices, "chosen": chosen},
    )


def box() -> Finding:
    module = "torch_hbmcomm._smb"
    try:
        found = importlib.import_module(module).__file__
    except ImportError as error:
        remedy = "install torch_hbmcomm or hbmcomm-box again; until then there is no memory box"
        return Finding(
            "box", f"cannot be loaded: {error}", f"import {module}", ProbeState.WARNING, remedy
        )
    return Finding("box", str(found), f"import {module}", data={"module": str(found)})


def box_verbs() -> Finding:
    try:
        why_not = importlib.import_module("torch_hbmcomm._smb").why_no_verbs()
    except ImportError:
        return _needs_box("box_verbs")
    return Finding(
        "box_verbs",
        f"not usable: {why_not}" if why_not else "usable",
        "libhbm_verbs.so",
        remedy="nothing, unless a box is to be reached by RDMA" if why_not else "",
        data={"usable": not why_not, "why_not": why_not},
    )


def box_token() -> Finding:
    try:
        token = importlib.import_module("torch_hbmcomm.smb.token")
    except ImportError:
        return _needs_box("box_token")
    found_by = "HBMCOMM_TOKEN, HBMCOMM_TOKEN_FILE, ~/.config/hbmcomm/token"
    try:
        found = token.find(None)
    except (OSError, ValueError) as error:
        remedy = "fix the file, or start a box with `hbmcomm serve`, which makes a missing one"
        return Finding("box_token", str(error), found_by, ProbeState.WARNING, remedy)
    there = bool(found.text)
    return Finding(
        "box_token",
        f"found: {found.source}" if there else "none was found",
        found_by,
        remedy="" if there else "`hbmcomm serve` makes one; clients elsewhere need a copy of it",
        data={"found": there, "source": found.source},
    )


def launcher() -> Finding:
    name, sign = environment.launcher(os.environ)
    return Finding("launcher", name, sign, data={"name": name})


def instead_of() -> Finding:
    asked = variables.value("HBMCOMM_INSTEAD_OF")
    try:
        names = variables.replaced_backends(asked) if asked else []
    except ValueError as error:
        remedy = "correct the list, or unset the variable"
        return _broken("instead_of", str(error), "HBMCOMM_INSTEAD_OF", remedy)
    value = f"programs that say {', '.join(names)} get hbm" if names else "no other backend"
    return Finding("instead_of", value, "HBMCOMM_INSTEAD_OF", data={"backends": names})


def settings() -> Finding:
    found = variables.settings(os.environ)
    advice = variables.unknown(found)
    return Finding(
        "settings",
        "\n".join(f"{name}={value}" for name, value in found.items()) or "none",
        "HBMCOMM_* in the environment",
        ProbeState.WARNING if advice else ProbeState.OK,
        "\n".join(f"{name} is unknown: {what}" for name, what in advice.items()),
        {"set": found, "unknown": list(advice)},
    )


PROBES: tuple[Callable[[], Finding], ...] = (
    package,
    torch,
    cpu,
    numa,
    hbm,
    policy,
    places,
    mpi,
    transports,
    box,
    box_verbs,
    box_token,
    launcher,
    instead_of,
    settings,
)


def _extension() -> ModuleType:
    """Return the native module. Raises ImportError, also if torch is missing."""
    native: ModuleType = importlib.import_module("torch_hbmcomm.native").load()
    return native


def run_probes() -> list[Finding]:
    """Run all probes. Returns their findings in the order in which they are shown."""
    return [_run(probe) for probe in PROBES]


def _run(probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except ImportError:
        cause, remedy = "unknown: the extension finds it", "fix the row torch first"
    except (RuntimeError, ValueError) as error:
        cause, remedy = str(error), "fix the cause that is named"
    return _broken(probe.__name__, cause, "torch_hbmcomm._C", remedy)


def _needs_box(name: str) -> Finding:
    value = "unknown: the module of the memory box finds it"
    return Finding(name, value, "torch_hbmcomm._smb", ProbeState.WARNING, "fix the row box first")


def _broken(
    name: str, cause: str, found_by: str, remedy: str, data: dict[str, Any] | None = None
) -> Finding:
    return Finding(name, cause, found_by, ProbeState.BROKEN, remedy, data or {})
