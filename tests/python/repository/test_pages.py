"""The programs and commands in the pages for users run as they are printed.

A program that is part of a user's script runs after a preamble that stands for the rest of that
script: it makes the model and the data.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import accelerator
from harness.box_process import TOKEN, BoxProcess
from harness.context import Context
from harness.jobs import BIN, run
from harness.network import free_port
from harness.pool import Pool

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
# Commands that other tests run: test_wheels.py installs the wheels in new environments, and
# test_cli.py runs the demo.
ELSEWHERE = re.compile(r"^(pip install|python3 -m venv|\. venv|hbmcomm demo).*\n", re.MULTILINE)
TIMEOUT = 800  # seconds, for the commands of a page


@dataclass(frozen=True)
class Script:
    """A user's script: `before`, the part that a page prints, `after`. `dots` replaces `...`."""

    before: str = ""
    dots: str = ""
    after: str = ""
    ranks: int = 2
    device: str = "cpu"


IMPORTS = """
import os
import torch, torch.distributed as dist, torch_hbmcomm as hbmcomm
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["RANK"])
"""
DATA = """
model = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(32, 64), torch.randint(8, (32,))) for _ in range(3)]
"""
GROUP = IMPORTS + DATA + 'dist.init_process_group("hbm")\n'
DDP = GROUP + "ddp = DistributedDataParallel(model)\n"
SERVED = (
    IMPORTS
    + DATA
    + """
dist.init_process_group("hbm", pg_options=hbmcomm.Options(parameter_server="auto"))
"""
)
TRAIN = """
for images, labels in loader:
    optimizer.zero_grad()
    cross_entropy(ddp(images), labels).backward()
    optimizer.step()
"""
PUSH = """
for images, labels in loader:
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    ps.step()
"""
# Asserts that all ranks' weights have the same bits.
EQUAL = """
for weights in model.parameters():
    least, most = weights.detach().clone(), weights.detach().clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert torch.equal(least, most)
"""
SUM = """
import torch
ones = torch.ones(8)
dist.all_reduce(ones)
assert (ones == 2).all()
"""
# Replicas that apply the same gradients in different orders differ by rounding.
CLOSE = EQUAL.replace("assert torch.equal", "torch.testing.assert_close")
# A job ends when all its workers have left, so no worker may train before all have joined.
CLOSED = "dist.barrier()\n" + PUSH + "ps.close()\n"
OUTER = """
os.makedirs(f"{folder}/{rank}"); os.chdir(f"{folder}/{rank}")
outer = hbmcomm.OuterSteps(model, optimizer, every=1)
outer.step()
"""
BOX = "import numpy\narray = gradient = parameter = numpy.ones(1024, 'float32')\n"

# The programs of each page for users, in order.
PROGRAMS: dict[str, list[Script | None]] = {
    "README.md": [
        Script(),
        Script(DDP, after=TRAIN + EQUAL),
        Script(
            IMPORTS + DATA, "dist.barrier(); model(loader[0][0]).sum().backward()", "server.close()"
        ),
        Script(IMPORTS + BOX),
    ],
    "docs/accelerators.md": [
        Script(
            "import torch, torch.distributed as dist\ntensor_on_cuda = torch.ones(8).to('late')\n",
            after="assert (tensor_on_cuda.cpu() == 2).all()",
            device=accelerator.NAME,
        )
    ],
    "docs/from-mpi.md": [None],  # under mpiexec, below
    "docs/from-parameter-server.md": [
        Script(
            GROUP
            + """
batches = loader
def once_all_have_joined():
    dist.barrier()
    yield from batches
loader = once_all_have_joined()
"""
        )
    ],
    "docs/from-torch-ccl.md": [Script(after=SUM)],
    "docs/gradient-compression.md": [
        Script(GROUP, after=TRAIN + EQUAL),
        Script(DDP, after=TRAIN + EQUAL),
        Script(DDP, after=TRAIN + EQUAL),
        Script(DDP, after=TRAIN + EQUAL),
        Script(DDP, after=TRAIN + EQUAL),
        Script(
            IMPORTS
            + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        self.head = torch.nn.Linear(64, 8)
    def forward(self, values):
        for block in self.blocks:
            values = block(values)
        return self.head(values)
model = Net()
nodes, ranks_of_a_node = 2, 2
dist.init_process_group("hbm")
""",
            after="""
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    for parameter in model.parameters():
        shard = parameter.detach().to_local()
        of_nodes = [torch.empty_like(shard) for _ in range(nodes)]
        dist.all_gather(of_nodes, shard, group=mesh.get_group("nodes"))
        assert torch.equal(*of_nodes)
state.drain(optimizer)
""",
            ranks=4,
        ),
    ],
    "docs/memory-box.md": [
        # One rank, because two ranks would overwrite each other's weights.
        Script(BOX, after="assert (array == numpy.float32(0.9)).all()", ranks=1)
    ],
    "docs/high-bandwidth-memory.md": [
        Script(after="assert sum(hbmcomm.memory.where(t).values()) == 4 << 20")
    ],
    "docs/memory.md": [
        Script(after="assert sum(hbmcomm.memory.where(weights).values()) == 4 * weights.numel()"),
        None,  # needs a node of high-bandwidth memory
        Script(GROUP),
    ],
    "docs/outer-steps.md": [
        Script(IMPORTS + DATA, after=EQUAL),
        Script(
            GROUP,
            after="dist.barrier()\n"
            + TRAIN.replace("ddp", "model")
            + "    outer.step()\nouter.close(wait=True)"
            + EQUAL,
        ),
        Script(GROUP + OUTER, after="assert os.path.getsize('weights.pt')"),
        Script(
            GROUP
            + OUTER
            + """
saved = {"outer": outer.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(saved, f"checkpoint-{rank}.pt")
outer = hbmcomm.OuterSteps(model, optimizer, every=4)
""",
            after="assert outer.stats()['meetings'] == 1; outer.close()" + EQUAL,
        ),
        # Both ranks abort their first group, and form the next one of the same members.
        Script(
            GROUP
            + OUTER
            + """
uuid, handles = 1, [None, None]
dist.all_gather_object(handles, hbmcomm.reconfigure_handle())
dist.barrier()
dist.group.WORLD.abort()
""",
            after="assert outer.stats()['meetings'] == 1; outer.close()" + EQUAL,
        ),
    ],
    "docs/parameter-server.md": [
        Script(IMPORTS + DATA, after=EQUAL),
        Script(GROUP, after=CLOSED),
        Script(SERVED, after=CLOSED),
        Script(SERVED, after=CLOSED),
        Script(SERVED, after=CLOSED + EQUAL),
        Script(
            SERVED
            + "ps = hbmcomm.ParameterServer(model, optimizer)\n"
            + "os.mkdir(f'{folder}/{rank}'); os.chdir(f'{folder}/{rank}')\n",
            "ps.close(); dist.barrier()",
            after=CLOSED,
        ),
        Script(GROUP, after=CLOSED + EQUAL),
        Script(SERVED, TRAIN, CLOSE),
    ],
    "docs/process-group.md": [
        Script(after=SUM),
        Script("import torch.distributed as dist", after=SUM),
        # PyTorch has windows from release 2.14 on.
        Script(GROUP, after="assert (mine == left).all()")
        if hasattr(dist, "_new_window")
        else None,
        Script(GROUP, after="assert (total == sum(range(size))).all()"),
    ],
    "docs/profile.md": [
        Script(
            GROUP
            + """
import os
os.chdir(folder)
def train_one_step():
    dist.all_reduce(torch.ones(10))
""",
            after="""
assert os.path.exists(f"costs/rank-{dist.get_rank()}.json")
""",
        )
    ],
    "docs/quickstart.md": [None],  # under torchrun, below
    "docs/when-processes-die.md": [
        # Both ranks abort their first group at step 2, and form the next one of the same members.
        Script(
            """
import os, pathlib, time
from datetime import timedelta
import torch
import torch.distributed as dist
import torch_hbmcomm as hbmcomm
STEPS, rank, total = 5, int(os.environ["RANK"]), torch.zeros(8)
def next_members(handle):
    draft = pathlib.Path(folder, f"draft.{rank}")
    draft.write_text(handle)
    draft.rename(pathlib.Path(folder, f"{uuid + 1}.{rank}"))
    files = [pathlib.Path(folder, f"{uuid + 1}.{each}") for each in range(2)]
    while not all(file.exists() for file in files):
        time.sleep(0.001)
    return uuid + 1, [file.read_text() for file in files]
def broadcast_state():
    dist.broadcast(total, 0)
def compute(step):
    if (uuid, step) == (1, 2):
        dist.group.WORLD.abort()
    return torch.ones(8)
def apply(gradients):
    total.add_(gradients)
""",
            after="assert uuid == 2 and (total == 2 * STEPS).all()",
        )
    ],
}


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.finditer(page.read_text())
    return [block["text"] for block in found if block["language"] == language]


def programs(page: Path) -> list[str]:
    return blocks(page, "python")


def commands(page: Path) -> list[str]:
    return blocks(page, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_programs_are_python(page: Path) -> None:
    for program in programs(page):
        ast.parse(program, page.name)


def test_each_program_of_a_page_for_users_has_a_script() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    printed = {page.relative_to(ROOT).as_posix(): len(programs(page)) for page in pages}
    assert {page: n for page, n in printed.items() if n} == {
        page: len(scripts) for page, scripts in PROGRAMS.items()
    }


def whole(script: Script, program: str) -> str:
    program = re.sub(r"^\.\.\.(?=\s)", lambda _: script.dots.strip(), program, flags=re.MULTILINE)
    return "\n".join([script.before, program, script.after])


def execute(context: Context, program: str, port: int) -> None:
    """Run the program as a rank started by torchrun would."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.size),
        "LOCAL_RANK": str(context.rank),
    }
    exec(compile(program, "page", "exec"), {"folder": context.folder})
    if dist.is_initialized():
        dist.destroy_process_group()


def box_of(page: str, folder: Path) -> BoxProcess:
    """Start a box with the options of the page's first `hbmcomm serve`, on loopback."""
    for block in commands(ROOT / page):
        if block.startswith("hbmcomm serve "):
            first = block.splitlines()[0].replace("/var/lib", str(folder))
            _, _, listen, _, *options = shlex.split(first, comments=True)
            assert listen == "--listen"
            return BoxProcess(*options)
    return BoxProcess("--memory", "64MiB")


@pytest.mark.parametrize("page", [page for page, scripts in PROGRAMS.items() if any(scripts)])
def test_the_programs_of_a_page_run(page: str, tmp_path: Path) -> None:
    with box_of(page, tmp_path) as box:
        for script, program in zip(PROGRAMS[page], programs(ROOT / page), strict=True):
            if script is None:
                continue
            program = re.sub(
                r"smb://[a-z-]+:7777", f"smb://127.0.0.1:{box.port}", whole(script, program)
            )
            environment = {"HBMCOMM_TOKEN": TOKEN}
            pool = Pool(script.ranks, bare=True, environment=environment, device=script.device)
            try:
                pool.run(execute, program, free_port())
            finally:
                pool.kill()


def shell(block: str, folder: Path) -> list[str]:
    """Return the command that runs a page's commands, all of them on this machine."""
    block = ELSEWHERE.sub("", block)
    for place, command in (("a", "host0"), ("b", "the other machine")):
        block = re.sub(
            rf"^(torchrun (?:[^\n]*\\\n)*[^\n]*)# on {command}$",
            rf"HBMCOMM_NODE_ID={place} \1 &",
            block,
            flags=re.MULTILINE,
        )
    block = block.replace("host0", "localhost").replace("29500", str(free_port()))
    # `wait` returns the exit status of a command that runs in the background.
    return ["bash", "-ec", f"cd {folder}; {block}\nfor job in $(jobs -p); do wait $job; done"]


def run_commands(page: str, folder: Path) -> list[str]:
    """Run each block of commands of a page; return their outputs."""
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    outputs = []
    end = time.monotonic() + TIMEOUT
    for block in commands(ROOT / page):
        finished = run(shell(block, folder), end - time.monotonic(), **environment)
        assert finished.code == 0, finished.output
        outputs.append(finished.output)
    return outputs


@pytest.mark.full
def test_the_commands_of_the_quickstart_train(tmp_path: Path) -> None:
    page = "docs/quickstart.md"
    (tmp_path / "train.py").write_text(programs(ROOT / page)[0])
    info, one_node, two_nodes, two_nodes_here, logged = run_commands(page, tmp_path)
    assert "torch_hbmcomm" in info
    assert one_node == "2 ranks, loss 0.0000\n"
    # Agents of torchrun that leave at different times may add warnings about their store.
    for output in (two_nodes, two_nodes_here):
        assert output.count("4 ranks, loss 0.0000\n") == 1, output
    assert "2 ranks, loss 0.0000\n" in logged
    for rank in range(2):
        assert re.search(rf"\[hbm rank {rank}\] info: .*running on NUMA node", logged), logged


# The beginning of a program of torch-ccl, for mpiexec.
OF_TORCH_CCL = """
import os, torch, oneccl_bindings_for_pytorch
os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["PMI_RANK"], os.environ["PMI_SIZE"]
os.environ["MASTER_ADDR"] = "127.0.0.1"
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "name", "groups", "beginning"),
    [
        ("docs/from-gloo.md", "gloo", 2, ""),
        ("docs/from-mpi.md", "mpi", 4, ""),
        ("docs/from-torch-ccl.md", "ccl", 4, OF_TORCH_CCL),
    ],
)
def test_the_command_for_programs_of_another_backend_trains_over_hbm(
    page: str,
    name: str,
    groups: int,
    beginning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    program = beginning + programs(ROOT / "README.md")[0].replace('"hbm"', f'"{name}"')
    program = program.replace(
        "dist.destroy", "print(dist.group.WORLD._get_backend(torch.device('cpu')))\ndist.destroy"
    )
    (tmp_path / "train.py").write_text(program)
    (output,) = run_commands(page, tmp_path)
    assert output.count("torch_hbmcomm") == groups, output


@pytest.mark.full
def test_the_program_for_mpiexec_forms_a_group(tmp_path: Path) -> None:
    (program,) = programs(ROOT / "docs/from-mpi.md")
    file = tmp_path / "train.py"
    file.write_text(
        f"import os, torch.distributed as dist\n{program}{SUM}os.write(1, b'summed\\n')"
    )
    finished = run([BIN / "mpiexec", "-n", "2", sys.executable, file], PYTHONPATH=str(ROOT))
    assert (finished.code, finished.output) == (0, "summed\n" * 2)
