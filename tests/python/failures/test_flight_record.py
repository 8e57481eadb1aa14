"""The trace that a timeout leaves: in the log, and in a file for the flight recorder of PyTorch."""

from __future__ import annotations

import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.jobs import run
from torch.distributed.distributed_c10d import _get_default_group

pytestmark = beyond_gloo


def last_stays_away(context: Context, prefix: str) -> str | None:
    """Issue two collectives on all ranks, and two more on all ranks except the last."""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = prefix
    dist.barrier(context.gloo)  # so no rank still loads modules
    dist.broadcast(torch.ones(5), 0)
    dist.all_gather_into_tensor(torch.empty(3 * context.size), torch.ones(3))
    dist.barrier(context.gloo)
    if context.rank == context.size - 1:
        return None
    group = _get_default_group()
    works = [dist.all_reduce(torch.ones(7), async_op=True), dist.barrier(async_op=True)]
    for work in works:
        assert work is not None
        with pytest.raises(dist.DistBackendError):
            work.wait()
    return group.group_name


def read(prefix: str, rank: int) -> dict[str, Any]:
    with open(f"{prefix}{rank}", "rb") as file:
        trace: dict[str, Any] = pickle.load(file)
    return trace


@pytest.mark.ranks(3)
def test_a_timeout_leaves_a_trace(impatient_pool: Pool, ranks: int, tmp_path: Path) -> None:
    prefix = str(tmp_path / "traces" / "rank_")
    name, _, _ = impatient_pool.run(last_stays_away, prefix)
    for rank in range(ranks - 1):
        trace = read(prefix, rank)
        assert trace["pg_config"][name]["ranks"] == str(list(range(ranks)))
        ours = [entry for entry in trace["entries"] if entry["process_group"][0] == name][-4:]
        assert [
            (entry["profiling_name"], entry["input_sizes"], entry["output_sizes"], entry["state"])
            for entry in ours
        ] == [
            ("gloo:broadcast", [[5]], [[5]], "completed"),
            ("gloo:_all_gather_base", [[3]], [[3 * ranks]], "completed"),
            ("gloo:all_reduce", [[7]], [[7]], "started"),
            ("gloo:barrier", [[0]], [[0]], "scheduled"),
        ]
        first = ours[0]["collective_seq_id"]
        assert [entry["collective_seq_id"] - first for entry in ours] == [0, 1, 2, 3]
    assert not Path(f"{prefix}{ranks - 1}").exists()


def last_is_elsewhere(context: Context, prefix: str) -> None:
    """Call last_stays_away(). The last rank then waits for a message until it times out."""
    last_stays_away(context, prefix)
    if context.rank == context.size - 1:
        with pytest.raises(dist.DistBackendError):
            dist.recv(torch.ones(9), 0)


@pytest.mark.full
@pytest.mark.ranks(3)
def test_pytorchs_reader_names_who_stayed_away(
    impatient_pool: Pool, ranks: int, tmp_path: Path
) -> None:
    impatient_pool.run(last_is_elsewhere, str(tmp_path / "rank_"))
    report = run([sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", tmp_path])
    assert report.code == 0, report.output
    assert re.search(rf"all_reduce.*missing ranks: \{{{ranks - 1}\}}", report.output, re.DOTALL), (
        report.output
    )


def unheard_message(context: Context, prefix: str) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = prefix
    if context.rank == 0:
        with pytest.raises(dist.DistBackendError):
            dist.recv(torch.ones(9), 1)


@pytest.mark.ranks(2)
def test_a_message_that_never_comes_leaves_one_too(impatient_pool: Pool, tmp_path: Path) -> None:
    prefix = str(tmp_path / "rank_")
    impatient_pool.run(unheard_message, prefix)
    last = read(prefix, 0)["entries"][-1]
    assert (last["profiling_name"], last["is_p2p"]) == ("gloo:recv 0<-1", True)
    assert (last["input_sizes"], last["state"]) == ([[9]], "started")


def log_of_a_timeout(context: Context, prefix: str) -> str:
    last_stays_away(context, prefix)
    return (context.folder / f"rank{context.rank}.log").read_text()


@pytest.mark.ranks(2)
def test_the_log_says_what_is_unfinished(impatient_pool: Pool, tmp_path: Path) -> None:
    """Check that the log has the unfinished collectives, and says why no file was written."""
    (tmp_path / "taken").touch()
    log = impatient_pool.run(log_of_a_timeout, str(tmp_path / "taken" / "rank_"))[0]
    assert re.search(r"allreduce #\d+ .*timed out after \d+ ms; missing ranks: 1 ", log), log
    assert re.search(r"no file, as \S+taken/rank_0 cannot be written: \w+", log), log
    assert re.search(r"ranks \[0, 1\], \d+ collectives done\): ALLREDUCE #\d+ of 7 Float", log), log
