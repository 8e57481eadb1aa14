"""The harness itself: it finds leaked files and failed ranks, and its parts stay independent."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import Context, Pool, RankFailure, network, shm, stuck
from harness.jobs import run
from harness.pool import DIED, processes

LEAVE = """
import socket, sys
if sys.argv[1].endswith(".socket"):
    socket.socket(socket.AF_UNIX).bind(sys.argv[1])
else:
    open(sys.argv[1], "w").write("data")
"""


@pytest.mark.parametrize("kind", ["hbmcomm-{}.socket", "mpich_shm_{}"])
def test_files_left_by_a_dead_process_are_found(kind: str, tmp_path: Path) -> None:
    path = shm.SHM / kind.format(tmp_path.parent.name + tmp_path.name)
    before = shm.entries()
    subprocess.run([sys.executable, "-c", LEAVE, path], check=True)
    assert shm.left_since(before) == {path.name}
    path.unlink()
    assert not shm.left_since(before)


def many_ports(_: int) -> list[int]:
    return [network.free_port() for _ in range(20)]


def test_processes_get_different_ports() -> None:
    with processes.Pool(2) as givers:
        first, second = givers.map(many_ports, range(2), chunksize=1)
    assert len({*first, *second}) == 40


def test_no_test_takes_a_port_of_outgoing_connections() -> None:
    """find_free_port() of PyTorch returns such a port, which a connection may take before use."""
    imports = re.compile(r"^\s*from .* import .*\bfind_free_port", re.MULTILINE)
    files = Path(__file__).parents[2].rglob("*.py")
    takers = [file.name for file in files if imports.search(file.read_text())]
    assert not takers, f"{takers}: call free_port() of harness.network"


def test_output_of_a_job_omits_network_warnings() -> None:
    """Omit PyTorch's warnings about a missing name server or IPv6, but no other messages."""
    where = "[W1126 17:20:46.688381882 socket.cpp:764] [c10d]"
    family = "(errno: 97 - Address family not supported by protocol)"
    refused = f"{where} The server socket has failed to listen on 127.0.0.1:2 (errno: 98)."
    lines = [
        f"{where} The hostname of the client socket cannot be retrieved. err=-3",
        f"[rank1]:{where} The client socket cannot be initialized to connect to [::1]:3 {family}.",
        f"{where} The server socket cannot be initialized on [::]:29500 {family}.",
        refused,
        "done",
    ]
    assert run(["printf", "%s\\n", *lines]).output == f"{refused}\ndone\n"


def test_a_job_that_takes_too_long_is_killed_with_all_its_sessions() -> None:
    """torchrun's workers are in sessions of their own, and keep the pipe of the output open."""
    with pytest.raises(AssertionError, match="did not end within 1 s"):
        run(
            ["sh", "-c", "setsid sleep 1000"], limit=1
        )  # the pipe's end shows that no process has it


def test_the_notes_of_a_stuck_process_have_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stuck, "_STACK_SECONDS", 120)
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n\n\ndef wait_for_ever():\n    print(flush=True)\n    time.sleep(1000)\n\n\n"
        "wait_for_ever()\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            note = stuck.note(process.pid)
        finally:
            process.kill()
    assert f"{process.pid} {os.getpid()} S " in note
    assert "wait_for_ever (script.py:6)" in note


def raise_in_one(context: Context) -> None:
    print(f"rank {context.rank} was here")
    if context.rank == 1:
        raise ValueError("this rank fails on purpose")


def die_in_one(context: Context) -> None:
    if context.rank == 0:
        raise SystemExit(7)


def do_nothing(context: Context) -> None:
    pass


def sleep_in_one(context: Context) -> None:
    if context.rank == 1:
        time.sleep(60)


@pytest.mark.ranks(2)
def test_a_failure_names_rank_cause_and_output(bare_pool: Pool) -> None:
    with pytest.raises(RankFailure) as failure:
        bare_pool.run(raise_in_one)
    assert failure.value.kinds == {1: "ValueError"}
    for words in (
        "1 of 2 ranks failed",
        "ranks [1]",
        "this rank fails on purpose",
        "rank 1 was here",
    ):
        assert words in str(failure.value)
    with pytest.raises(RankFailure, match="died with exit code 7") as failure:
        bare_pool.run(die_in_one)
    assert failure.value.kinds == {0: DIED}
    bare_pool.run(do_nothing)  # the new ranks import this module
    with pytest.raises(RankFailure, match=r"(?s)did not answer.*sleep_in_one"):
        bare_pool.run(sleep_in_one, limit=5)
