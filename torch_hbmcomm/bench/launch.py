"""Runs a function in N fresh processes that look as if torchrun had started them."""

import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


class RankFailed(RuntimeError):
    """A rank ended with an error; the message is that of the first rank to fail."""


def launch(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each rank's `function(*arguments)` returned, in the order of the ranks.

    `function` and its arguments are pickled: it is a module's function, not a closure.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        returned = elastic_launch(config, function)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        cause = failure.message["message"] if isinstance(failure.message, dict) else failure.message
        raise RankFailed(f"rank {rank} failed: {cause}") from error
    return [returned[rank] for rank in range(ranks)]
