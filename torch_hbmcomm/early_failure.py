"""Makes every rank raise the error of a rank whose native module does not load."""

from __future__ import annotations

import contextlib
import os
from typing import Any


def backend_creator(distributed_options: Any) -> Any:
    """Return torch_hbmcomm.backend.create.

    If the native module does not load, end the formation of the group on every rank with this
    rank's error, and raise it.
    """
    try:
        from torch_hbmcomm.backend import create
    except Exception as error:
        limit = _reached_limit(error)
        text = f"{error}{limit}"
        _end_attempt(distributed_options, text)
        if limit:
            raise ImportError(text) from error
        raise
    return create


def _end_attempt(distributed_options: Any, why: str) -> None:
    """Publish the error to the other ranks, as csrc/bootstrap/gather.h does."""
    members = distributed_options.global_ranks_in_group
    # The 1 in the key is the formation's number: it is the first one, because a process without the
    # native module has formed no group before.
    key = f"hbm/rendezvous1/{members[0] if members else 0}/given_up"
    who = f'rank {distributed_options.group_rank} of group "{distributed_options.group_id}"'
    with contextlib.suppress(RuntimeError):  # the store is gone
        distributed_options.store.compare_set(key, "", f"u{who} cannot take part: {why}")


def _reached_limit(error: Exception) -> str:
    """Return a text that names the limit that stopped the load; empty if no limit stopped it."""
    try:
        os.close(os.dup(2))
    except OSError:
        return "; this process has too many open files (raise ulimit -n)"
    if "failed to map segment" in str(error):
        return "; this process has no address space left (raise ulimit -v), or no memory"
    return ""
