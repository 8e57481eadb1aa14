"""A run in which all goes well prints nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.jobs import BIN, run, run_code
from harness.network import free_port

from torch_hbmcomm import memory

pytestmark = beyond_gloo

GROUP = """
import torch, torch_hbmcomm
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
dist.init_process_group("hbm", rank=0, world_size=1, store=HashStore(), pg_options={options})
tensor = torch_hbmcomm.memory.empty(10{policy}).fill_(1)
dist.all_reduce(tensor)
dist.destroy_process_group()
"""
BOX = """
import time
from torch_hbmcomm import smb
server = smb.Server(memory="1MiB", token="token")
client = smb.connect(server.url, "token", transport="{transport}")
segment = client.alloc(4096)
segment.write(source=bytes(4096))
server.close()
time.sleep(0.5)
"""
# Reads, and closes the client after the warning.
USE = """
import os, pathlib, sys, tempfile
with tempfile.NamedTemporaryFile("a") as log:
    os.dup2(log.fileno(), sys.stderr.fileno())
    written = pathlib.Path(log.name).read_text
    reading = segment.read_async()
    while "warn:" not in written():
        time.sleep(0.01)
    client.close()
    try: reading.result()
    except smb.BoxError: print("no box")
    print(written())
"""
TRAINING = """
import torch, torch_hbmcomm as hbmcomm
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("hbm", pg_options=hbmcomm.Options({options}))
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{around}
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    {step}
{end}
dist.destroy_process_group()
"""
DDP = {"options": "", "around": "model = DistributedDataParallel(model)", "end": ""}
DDP["step"] = "optimizer.step()"
HOOK = """model = DistributedDataParallel(model)
model.register_comm_hook(hbmcomm.LowRankState(model, hbmcomm.LowRank(ratio=0.5)),
                         hbmcomm.low_rank_hook)"""
WAYS = {
    "ddp": DDP,
    "low-rank": DDP | {"around": HOOK},
    "parameter-server": {
        "options": "parameter_server='auto'",
        "around": "server = hbmcomm.ParameterServer(model, optimizer)",
        "step": "server.step()",
        "end": "server.close()",
    },
}
LEAVES = """
import os, sys, torch
import torch.distributed as dist
child = os.fork()
rank = int(child != 0)
os.environ["HBMCOMM_NODE_ID"] = str(rank)
dist.init_process_group("hbm", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(3))
if rank == 0:  # serves the store
    work = dist.isend(torch.ones(16 << 20), 1)
elif {stays}:
    print(os.waitpid(child, 0)[1])
    try: dist.recv(torch.zeros(16 << 20), 0)
    except dist.DistBackendError as error: print(error)
dist.destroy_process_group()
if rank == 0: sys.exit(0)
if not {stays}: print(os.waitpid(child, 0)[1])
"""
ABSENT = "memkind finds no high-bandwidth memory"
LOST = "lost the connection to the box"
no_hbm = pytest.mark.skipif(memory.available(), reason="this machine has HBM")


def group(options: str = "None", policy: str = "", **environment: str) -> str:
    finished = run_code(GROUP.format(options=options, policy=policy), 120, **environment)
    assert finished.code == 0, finished.output
    return finished.output


def test_a_group_says_nothing() -> None:
    assert group() == ""


def test_a_group_with_a_box_says_nothing() -> None:
    assert group('torch_hbmcomm.Options(parameter_server="auto")', HBMCOMM_BOX_MEMORY="16MiB") == ""


@pytest.mark.parametrize(
    ("way", "processes"),
    [
        ("ddp", 2),
        pytest.param("low-rank", 4, marks=pytest.mark.full),
        pytest.param("parameter-server", 4, marks=pytest.mark.full),
    ],
)
def test_training_says_nothing(way: str, processes: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(**WAYS[way]))
    command = [BIN / "torchrun", "--standalone", f"--nproc-per-node={processes}", script]
    finished = run(list(map(str, command)), HBMCOMM_BOX_MEMORY="64MiB")
    assert (finished.code, finished.output) == (0, "")


@pytest.mark.parametrize("stays", [False, True])
def test_the_rank_that_serves_the_store_may_leave_first(stays: bool) -> None:
    """Rank 0 serves the store and leaves first. Rank 1, on another node, then needs no store."""
    finished = run_code(LEAVES.format(port=free_port(), stays=stays))
    assert finished.code == 0, finished.output
    code, *error = finished.output.splitlines()
    assert code == "0", finished.output
    assert len(error) == stays, finished.output
    assert all("was destroyed on a rank that this one waits for, rank 0" in line for line in error)


@no_hbm
def test_the_absence_of_hbm_is_level_info() -> None:
    assert group(HBMCOMM_LOG="info").count(f"info: {ABSENT}") == 1


@no_hbm
@pytest.mark.parametrize(
    "asked",
    [
        {"HBMCOMM_MEMORY": "preferred"},
        {"options": "torch_hbmcomm.Options(memory='preferred')"},
        {"policy": ", policy='preferred'"},
    ],
    ids=["environment", "options", "empty"],
)
def test_a_request_for_hbm_warns(asked: dict[str, str]) -> None:
    assert group(**asked).count(f"warn: {ABSENT}") == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_server_may_close_before_its_client(transport: str) -> None:
    finished = run_code(BOX.format(transport=transport) + "client.close()\n")
    assert (finished.code, finished.output) == (0, "")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_use_of_the_box_warns(transport: str) -> None:
    finished = run_code(BOX.format(transport=transport) + USE)
    assert finished.code == 0, finished.output
    assert finished.output.count(f"warn: {LOST}") == 1
    assert "no box" in finished.output
