"""Replaces Gloo by hbm, for HBMCOMM_INSTEAD_OF=gloo.

A program that asks for a group of Gloo for CPU tensors gets a group of hbm. The group's name stays
"gloo", for programs that check it; its class is ProcessGroupHbm. c10d knows the backend by the type
CUSTOM, because c10d casts a backend of the type GLOO to ProcessGroupGloo. docs/process-group.md
lists the replaced functions of PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.early_failure import backend_creator
from torch_hbmcomm.native import load
from torch_hbmcomm.variables import require_choices, say

_GLOO = "gloo"
_CPU = torch.device("cpu")
_STAND_IN = "hbm_for_gloo"  # name in PyTorch's list of backends; its groups have the name "gloo"
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_GLOO_CLASS: Any = getattr(dist, "ProcessGroupGloo", ())  # absent where PyTorch has no Gloo
_GLOO_THREADS = 2  # of a ProcessGroupGloo with default options
_native_name = dist.ProcessGroup.name


def take_the_place_of(backend: str) -> None:
    """Have PyTorch make groups of hbm where a program asks for that backend.

    Only "gloo" can be replaced. With another name every use of hbm raises ValueError, and the first
    group of Gloo prints a warning.
    """
    if backend != _GLOO:
        _replace(distributed_c10d, "_new_process_group_helper", _new_group_of_gloo)
        return
    dist.Backend.register_backend(_STAND_IN, _create, extended_api=True, devices=["cpu"])
    _replace(distributed_c10d, "_new_process_group_helper", _new_group)
    _replace(distributed_c10d, "_set_pg_timeout", _set_timeout)
    _replace(dist.ProcessGroup, "_register_backend", _register_backend)
    _replace(dist.ProcessGroup, "name", _name)
    _replace(dist.ProcessGroup, "_get_backend_name", _name)
    _replace(dist.ProcessGroup, "_get_sequence_number_for_group", _sequence_number)
    _replace(dist.ProcessGroup, "_set_sequence_number_for_group", _set_sequence_number)
    _replace(DistributedDataParallel, "_get_ddp_logging_data", _ddp_logging_data)


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


def _create(distributed_options: Any, group_options: Any) -> Any:
    """Make the backend of one group. Ignores options of other backends: they may be for the group's
    other devices, and PyTorch ignores even options for Gloo."""
    create = backend_creator(distributed_options)
    _say_once()
    options = group_options if isinstance(group_options, load().Options) else None
    return create(distributed_options, options, _GLOO)


@functools.cache
def _say_once() -> None:
    load().info("HBMCOMM_INSTEAD_OF=gloo: Gloo's groups for CPU tensors are groups of hbm")


def _new_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Form a group, as _new_process_group_helper does, with hbm in the place of Gloo."""
    call = inspect.signature(original).bind(*args, **kwargs)
    asked = call.arguments["backend"]
    config = distributed_c10d.BackendConfig(dist.Backend(asked))
    backends = config.get_device_backend_map()
    if backends.get("cpu") != _GLOO:
        return original(*args, **kwargs)
    call.arguments["backend"] = ",".join(
        f"{device}:{_STAND_IN if name == _GLOO and not _stays(device) else name}"
        for device, name in backends.items()
    )
    group, store = original(*call.args, **call.kwargs)
    if isinstance(group, dist.ProcessGroup):
        _make_default(group)
        world = distributed_c10d._world
        world.pg_map[group] = (asked, store)
        world.pg_backend_config[group] = str(config)
    return group, store


def _new_group_of_gloo(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Form a group as PyTorch does. Warn once, if the group's CPU backend is Gloo, that
    HBMCOMM_INSTEAD_OF names a wrong backend."""
    asked = inspect.signature(original).bind(*args, **kwargs).arguments["backend"]
    config = distributed_c10d.BackendConfig(dist.Backend(asked))
    if config.get_device_backend_map().get("cpu") == _GLOO:
        _warn_of_gloo()
    return original(*args, **kwargs)


@functools.cache
def _warn_of_gloo() -> None:
    try:
        require_choices()
    except ValueError as error:
        say(f"this group is one of Gloo: {error}")


def _stays(device: str) -> bool:
    """Return True if Gloo stays the backend of this device type. Gloo never stays for "cpu". For
    another type it stays if this machine has such a device, for example a GPU, or if PyTorch has no
    module of that name."""
    module = getattr(torch, device, None)
    return device != "cpu" and (module is None or module.device_count() > 0)


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
        if _stands_in(group):  # hbm has replaced a Gloo in this group before: take the same hbm
            backend, backend_type = group._get_backend(_CPU), _CUSTOM
        elif store is None:
            load().warn(
                "HBMCOMM_INSTEAD_OF=gloo: a ProcessGroupGloo stays what it is, since hbm's ranks "
                "cannot meet: it was registered in a ProcessGroup that was made without a store"
            )
        else:
            backend, backend_type = _in_place_of(backend, store), _CUSTOM
            _make_default(group)
    original(group, device, backend_type, backend)


def _in_place_of(gloo: Any, store: Store) -> Any:
    options = _DistributedBackendOptions()
    options.store = PrefixStore(f"{_STAND_IN}/", store)
    options.group_rank = gloo.rank()
    options.group_size = gloo.size()
    options.timeout = gloo.options._timeout
    options.group_id = gloo.options.group_name
    options.global_ranks_in_group = gloo.options.global_ranks_in_group
    return _create(options, None)


def _stands_in(group: dist.ProcessGroup) -> bool:
    return _native_name(group) == "custom" and (
        _CPU in group._device_types and group._get_backend(_CPU).name() == _GLOO
    )


def _name(original: Callable[..., str], group: dist.ProcessGroup) -> str:
    return _GLOO if _stands_in(group) else original(group)


def _sequence_number(original: Callable[..., int], group: dist.ProcessGroup) -> int:
    """Return the number of collectives so far. c10d's own method would refuse the type CUSTOM."""
    if _stands_in(group):
        backend: Any = group._get_backend(_CPU)
        return int(backend._get_sequence_number_for_group())
    return original(group)


def _set_sequence_number(original: Callable[..., None], group: dist.ProcessGroup) -> None:
    if _stands_in(group):
        group._get_backend(_CPU)._set_sequence_number_for_group()
    else:
        original(group)


def _set_timeout(
    original: Callable[..., None], timeout: timedelta, group: dist.ProcessGroup | None = None
) -> None:
    """Set the timeout of a group's backends. PyTorch 2.13's function would leave out hbm: for CPU
    tensors it sets the timeout only of a backend of Gloo's class."""
    chosen = distributed_c10d._get_default_group() if group is None else group
    if isinstance(chosen, dist.ProcessGroup) and _stands_in(chosen):
        chosen.set_timeout(timeout)
    else:
        original(timeout, group)


def _ddp_logging_data(original: Callable[..., Any], model: DistributedDataParallel) -> Any:
    """Return DDP's logging data, with the fields of a Gloo with default options."""
    data = original(model)
    if _stands_in(model.process_group):
        data["backend_name"] = _GLOO
        data["gloo_socket_ifname"] = os.environ.get("GLOO_SOCKET_IFNAME", "N/A")
        data["gloo_device_transport"] = os.environ.get("GLOO_DEVICE_TRANSPORT", "N/A")
        data["gloo_num_threads"] = _GLOO_THREADS
    return data
