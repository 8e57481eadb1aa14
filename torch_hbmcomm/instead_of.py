"""Replaces Gloo, MPI, UCC or oneCCL by hbm, for HBMCOMM_INSTEAD_OF.

A program that asks for a group of one of these backends for CPU tensors gets a group of hbm. The
group keeps the name that the program used. Programs check this name. The group's class is
ProcessGroupHbm. c10d knows the backend by the type CUSTOM, because c10d casts a backend of the type
GLOO to ProcessGroupGloo. docs/process-group.md lists the replaced functions of PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm import stand_in_modules
from torch_hbmcomm.early_failure import backend_creator
from torch_hbmcomm.native import load
from torch_hbmcomm.rendezvous import as_launched
from torch_hbmcomm.variables import REPLACEABLE, replaced_backends, require_choices, say, value

_GLOO = "gloo"
_CPU = torch.device("cpu")
# With the name of the replaced backend behind it, a name in PyTorch's list of backends. Groups of
# these backends have the name of the replaced backend.
_STAND_IN = "hbm_for_"
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_GLOO_CLASS: Any = getattr(dist, "ProcessGroupGloo", ())  # absent where PyTorch has no Gloo
_GLOO_THREADS = 2  # of a ProcessGroupGloo with default options
_native_name = dist.ProcessGroup.name

# The replaced backends, each with True if this PyTorch has the backend itself.
_replaced: dict[str, bool] = {}


def take_the_place_of(backends: str) -> None:
    """Have PyTorch make groups of hbm where a program asks for one of these backends.

    backends: a value of HBMCOMM_INSTEAD_OF. With a wrong value every use of hbm raises ValueError.
    The first group of a backend that hbm could replace, and the first search for a module of
    torch-ccl or torch_ucc that is not installed, then print a warning.
    """
    try:
        names = replaced_backends(backends)
    except ValueError as error:
        stand_in_modules.explain_absence(str(error))
        _replace(distributed_c10d, "_new_process_group_helper", _new_group_of_other)
        return
    for name in names:
        _replaced[name] = dist.is_backend_available(name)
        dist.Backend.register_backend(
            _STAND_IN + name,
            functools.partial(_create, name=name),
            extended_api=True,
            devices=["cpu"],
        )
    _make_available(names)
    _replace(distributed_c10d, "_new_process_group_helper", _new_group)
    _replace(distributed_c10d, "_set_pg_timeout", _set_timeout)
    if _GLOO in names:
        _replace(dist.ProcessGroup, "_register_backend", _register_backend)
    _replace(dist.ProcessGroup, "name", _name)
    _replace(dist.ProcessGroup, "_get_backend_name", _name)
    _replace(dist.ProcessGroup, "_get_sequence_number_for_group", _sequence_number)
    _replace(dist.ProcessGroup, "_set_sequence_number_for_group", _set_sequence_number)
    _replace(DistributedDataParallel, "_get_ddp_logging_data", _ddp_logging_data)


def _make_available(names: Sequence[str]) -> None:
    """Have is_mpi_available() and is_ucc_available() return True if their backends are named.
    Provide the name "ccl" and the class ProcessGroupUCC if their backends are named and PyTorch
    lacks them, and the modules that programs of these backends import."""
    distributed_c10d._MPI_AVAILABLE |= "mpi" in names
    distributed_c10d._UCC_AVAILABLE |= "ucc" in names
    if "ccl" in names and not _replaced["ccl"]:
        create = functools.partial(_create, name="ccl")
        dist.Backend.register_backend("ccl", create, extended_api=True, devices=["cpu", "xpu"])
    if "ucc" in names and not hasattr(dist, "ProcessGroupUCC"):
        dist.ProcessGroupUCC = process_group_ucc  # type: ignore[assignment, misc]
    stand_in_modules.install(names)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function of PyTorch's by `function`, whose first argument is the original. Does
    nothing if this release of PyTorch has no function of that name."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)


def _create(distributed_options: Any, group_options: Any, name: str) -> Any:
    """Make the backend of one group, with the replaced backend's name. Ignores options of other
    backends: they may be for the group's other devices, and PyTorch ignores even options for
    Gloo."""
    create = backend_creator(distributed_options)
    _say_once(name)
    options = group_options if isinstance(group_options, load().Options) else None
    return create(distributed_options, options, name)


@functools.cache
def _say_once(name: str) -> None:
    load().info(f"{_setting(name)}: groups of {name} for CPU tensors are groups of hbm")


def _setting(name: str) -> str:
    return f"HBMCOMM_INSTEAD_OF={value('HBMCOMM_INSTEAD_OF', name)}"


def _new_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Form a group, as _new_process_group_helper does, with hbm in the place of other backends."""
    call = inspect.signature(original).bind(*args, **kwargs)
    asked = call.arguments["backend"]
    config = distributed_c10d.BackendConfig(dist.Backend(asked))
    backends = config.get_device_backend_map()
    names = {device: _name_for(device, backends) for device in backends}
    if names == backends:
        return original(*args, **kwargs)
    if call.arguments["group_size"] == -1:  # the default group of a program that says "mpi"
        _meet_as_launched(call.arguments)
    call.arguments["backend"] = ",".join(f"{device}:{name}" for device, name in names.items())
    group, store = original(*call.args, **call.kwargs)
    if isinstance(group, dist.ProcessGroup):
        _make_default(group)
        world = distributed_c10d._world
        world.pg_map[group] = (asked, store)
        world.pg_backend_config[group] = str(config)
    return group, store


def _name_for(device: str, backends: Mapping[str, str]) -> str:
    """Return the name of the backend that serves this device type: a stand-in's, or the one in
    `backends`, the group's backends by device type."""
    name = backends[device]
    if name not in _replaced or _stays(device, backends):
        return name
    return _STAND_IN + name


def _stays(device: str, backends: Mapping[str, str]) -> bool:
    """Return True if a replaced backend stays the backend of this device type.

    It never stays for "cpu", or if PyTorch lacks the backend. For another type it stays if another
    backend serves "cpu". It also stays if this machine has such a device, for example a GPU, or if
    PyTorch has no module of that name.
    """
    name = backends[device]
    if device == "cpu" or not _replaced[name]:
        return False
    module = getattr(torch, device, None)
    return backends.get("cpu") != name or module is None or module.device_count() > 0


def _meet_as_launched(arguments: dict[str, Any]) -> None:
    """Enter rank, size and store in the arguments of _new_process_group_helper. PyTorch leaves them
    out for MPI, whose ranks come from the launcher."""
    store, rank, size = as_launched(arguments["timeout"])
    # As init_process_group does, so that other users of the store have other keys.
    arguments["store"] = PrefixStore("default_pg", store)
    arguments["group_rank"], arguments["group_size"] = rank, size


def _new_group_of_other(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Form a group as PyTorch does. Warn once, if hbm could replace the group's CPU backend, that
    HBMCOMM_INSTEAD_OF names a wrong backend."""
    asked = inspect.signature(original).bind(*args, **kwargs).arguments["backend"]
    config = distributed_c10d.BackendConfig(dist.Backend(asked))
    name = config.get_device_backend_map().get("cpu")
    if name in REPLACEABLE:
        _warn_of(name)
    return original(*args, **kwargs)


@functools.cache
def _warn_of(name: str) -> None:
    try:
        require_choices()
    except ValueError as error:
        say(f"this group is one of {name}: {error}")


def _make_default(group: dist.ProcessGroup) -> None:
    """Make hbm the group's default backend if the default is Gloo or undefined."""
    if _native_name(group) in (_GLOO, "undefined"):
        group._set_default_backend(_CUSTOM)


def _register_backend(
    original: Callable[..., None],
    group: dist.ProcessGroup,
    device: torch.device,
    backend_type: Any,
    backend: Any = None,
) -> None:
    """Register a backend. If it is a ProcessGroupGloo that the program has made itself, register a
    backend of hbm instead. It has the same ranks, which find each other through the group's
    store."""
    if device.type == "cpu" and isinstance(backend, _GLOO_CLASS):
        store = group.get_group_store()
        if _stands_for(group):  # hbm has replaced a Gloo in this group before: take the same hbm
            backend, backend_type = group._get_backend(_CPU), _CUSTOM
        elif store is None:
            load().warn(
                f"{_setting(_GLOO)}: a ProcessGroupGloo stays what it is, since hbm's ranks "
                "cannot meet: it was registered in a ProcessGroup that was made without a store"
            )
        else:
            backend, backend_type = _in_place_of(backend, store), _CUSTOM
            _make_default(group)
    original(group, device, backend_type, backend)


def _in_place_of(gloo: Any, store: Store) -> Any:
    options = _DistributedBackendOptions()
    options.store = PrefixStore(f"{_STAND_IN}{_GLOO}/", store)
    options.group_rank = gloo.rank()
    options.group_size = gloo.size()
    options.timeout = gloo.options._timeout
    options.group_id = gloo.options.group_name
    options.global_ranks_in_group = gloo.options.global_ranks_in_group
    return _create(options, None, _GLOO)


def _by_hand(
    name: str, store: Store, rank: int, size: int, timeout: timedelta = dist.default_pg_timeout
) -> Any:
    """Make a backend of hbm with this name for a program that calls the backend's class.
    Raises the errors of torch_hbmcomm.backend.create."""
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout = timeout
    return _create(options, None, name)


# With the arguments of torch-ccl's and of PyTorch's class.
process_group_ccl = functools.partial(_by_hand, "ccl")
process_group_ucc = functools.partial(_by_hand, "ucc")


def _stands_for(group: dist.ProcessGroup) -> str:
    """Return the name of the backend that hbm has replaced in this group, "" if there is none."""
    if _native_name(group) != "custom" or _CPU not in group._device_types:
        return ""
    name: str = group._get_backend(_CPU).name()
    return name if name in _replaced else ""


def _name(original: Callable[..., str], group: dist.ProcessGroup) -> str:
    return _stands_for(group) or original(group)


def _sequence_number(original: Callable[..., int], group: dist.ProcessGroup) -> int:
    """Return the number of collectives so far. c10d's own method would refuse the type CUSTOM."""
    if _stands_for(group):
        backend: Any = group._get_backend(_CPU)
        return int(backend._get_sequence_number_for_group())
    return original(group)


def _set_sequence_number(original: Callable[..., None], group: dist.ProcessGroup) -> None:
    if _stands_for(group):
        group._get_backend(_CPU)._set_sequence_number_for_group()
    else:
        original(group)


def _set_timeout(
    original: Callable[..., None], timeout: timedelta, group: dist.ProcessGroup | None = None
) -> None:
    """Set the timeout of a group's backends. PyTorch 2.13's function would leave out hbm: for CPU
    tensors it sets the timeout only of a backend of Gloo's class."""
    chosen = distributed_c10d._get_default_group() if group is None else group
    if isinstance(chosen, dist.ProcessGroup) and _stands_for(chosen):
        chosen.set_timeout(timeout)
    else:
        original(timeout, group)


def _ddp_logging_data(original: Callable[..., Any], model: DistributedDataParallel) -> Any:
    """Return DDP's logging data, with the replaced backend's name, and with the fields of a Gloo
    with default options in the place of Gloo."""
    data = original(model)
    name = _stands_for(model.process_group)
    if name:
        data["backend_name"] = name
    if name == _GLOO:
        data["gloo_socket_ifname"] = os.environ.get("GLOO_SOCKET_IFNAME", "N/A")
        data["gloo_device_transport"] = os.environ.get("GLOO_DEVICE_TRANSPORT", "N/A")
        data["gloo_num_threads"] = _GLOO_THREADS
    return data
