"""Groups whose memory box cannot be used: every rank learns which rank failed, and why."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.box_process import TOKEN
from harness.group_boxes import assert_left, count_together, form

from torch_hbmcomm import smb

pytestmark = beyond_gloo

Failure = Callable[[Context], str]


def fail_to_form(context: Context, prepare: Failure) -> str:
    environment = dict(os.environ)
    wanted = prepare(context)
    try:
        form(context, wanted)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f'"{wanted}" was accepted')
    assert not dist.is_initialized()
    os.environ.clear()
    os.environ.update(environment)
    form(context, "auto", turn=1)
    count_together(context, smb.of())
    dist.destroy_process_group()
    return answer


def no_such_memory(context: Context) -> str:
    os.environ["HBMCOMM_BOX_MEMORY"] = "lots"
    return "auto"


def no_directory_for_a_socket(context: Context) -> str:
    if context.rank == 0:
        os.environ["HBMCOMM_SOCKET_DIR"] = "/no/such/directory"
    return "auto"


def bad_address(context: Context) -> str:
    return "http://nowhere" if context.rank == context.size - 1 else os.environ["A_BOX"]


def bad_port(context: Context) -> str:
    return "smb://127.0.0.1:many" if context.rank == context.size - 1 else os.environ["A_BOX"]


def nobody_there(context: Context) -> str:
    return "smb+unix:///no/such/box" if context.rank == context.size - 1 else os.environ["A_BOX"]


def wrong_token(context: Context) -> str:
    if context.rank == context.size - 1:
        os.environ["HBMCOMM_TOKEN"] = "another one"
    return os.environ["A_BOX"]


def auto_or_address(context: Context) -> str:
    return "auto" if context.rank == 0 else os.environ["A_BOX"]


def auto_or_none(context: Context) -> str:
    return "auto" if context.rank == 0 else ""


def one_or_two(context: Context) -> str:
    one = os.environ["A_BOX"]
    return one if context.rank == 0 else f"{one},{one}"


LAST = -1


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("prepare", "culprit", "kind", "words"),
    [
        (no_such_memory, 0, "ValueError", "HBMCOMM_BOX_MEMORY=lots"),
        (no_directory_for_a_socket, 0, "RuntimeError", "/no/such/directory"),
        (bad_address, LAST, "ValueError", "HBMCOMM_PARAMETER_SERVER.*http://nowhere"),
        (bad_port, LAST, "ValueError", 'its port is "many"'),
        (nobody_there, LAST, "BoxUnreachable", "/no/such/box"),
        (wrong_token, LAST, "AccessDenied", "token"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_rank_hears_why(
    ranks: int,
    socket_folder: Path,
    prepare: Failure,
    culprit: int,
    kind: str,
    words: str,
) -> None:
    (socket_folder / "sockets").mkdir()
    with smb.Server(token=TOKEN, unix=socket_folder / "box") as server:
        environment = {
            "A_BOX": server.url,
            "HBMCOMM_TOKEN": TOKEN,
            "HBMCOMM_SOCKET_DIR": str(socket_folder / "sockets"),
        }
        pool = Pool(ranks, bare=True, environment=environment)
        try:
            answers = pool.run(fail_to_form, prepare)
        finally:
            pool.kill()
        assert_left(server)
    assert os.listdir(socket_folder / "sockets") == []
    culprit %= ranks
    for rank, answer in enumerate(answers):
        assert re.search(words, answer), answer
        if rank == culprit:
            assert answer.startswith(f"{kind}: "), answer
        else:
            assert answer.startswith("DistBackendError: "), answer
            assert f"rank {culprit} of group" in answer and f"take part: {kind}: " in answer, answer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("prepare", [auto_or_address, auto_or_none, one_or_two])
def test_ranks_that_want_different_boxes(ranks: int, prepare: Failure) -> None:
    with smb.Server(token=TOKEN) as server:
        pool = Pool(ranks, bare=True, environment={"A_BOX": server.url, "HBMCOMM_TOKEN": TOKEN})
        try:
            answers = pool.run(fail_to_form, prepare)
        finally:
            pool.kill()
    for answer in answers:
        assert "Error: parameter_server " in answer and "rank 1" in answer, answer
