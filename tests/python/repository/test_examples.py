"""Runs every example by the command that examples/README.md gives for it.

An example verifies its own result. The test checks the exit status, 0, and the line that reports
success.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.box_process import TOKEN, BoxProcess
from harness.network import skip_unless_namespaces_work

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
TIMEOUT = 800  # seconds, for one example
ROW = re.compile(r"^\| \[(?P<name>[^]]+)\].*\| `(?P<command>[^`]+)` \|$", re.MULTILINE)
COMMANDS = {
    match["name"]: match["command"] for match in ROW.finditer((EXAMPLES / "README.md").read_text())
}

SAYS = {
    "ddp_digits.py": r"OK: [\d.]+% of the test images recognised",
    "fsdp2.py": r"OK: FSDP2 torch\.float32 .*\nOK: FSDP2 torch\.bfloat16",
    "device_mesh.py": r"OK: weights of the 2 x 2 mesh",
    "functional_collectives.py": r"OK: all_reduce, .* compiled by aot_eager",
    "checkpoint.py": r"OK: resumed after step 5",
    "allreduce_check.py": r"OK: 3 allreduces of 64 MiB on 2 ranks over hbm",
    "async_parameter_server.py": r"OK: [\d.]+% of the test images recognised",
    "low_rank.py": r"OK: [\d.]+% of the bytes were sent \(10% requested\)",
    "outer_steps.py": r"OK: [\d.]+% of the test images recognised, with [\d.]+% of the bytes",
    "heal.py": r"rank 1 \(pid \d+ on \S+\) has died\nOK: 3 workers finished step 30",
    "two_nodes.sh": r"OK: 2 nodes summed 3 x 16 MiB over the link",
    "numpy_mpi4py.py": r"are on NUMA node \d+\n(?s:.*)OK: all results are right",
}
QUICK = {"heal.py"}


def here(command: str) -> list[str]:
    """Return the words of `command`, with this interpreter and its launchers."""
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "mpiexec": [str(Path(sys.executable).with_name("mpiexec"))],
        "python": [sys.executable],
    }
    return [word for given in shlex.split(command) for word in programs.get(given, [given])]


def test_every_example_is_in_the_table() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == COMMANDS.keys() == SAYS.keys()


def test_heal_keeps_its_state_if_a_member_dies_within_the_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broadcast fills its tensor and then raises."""
    spec = importlib.util.spec_from_file_location("heal", EXAMPLES / "heal.py")
    assert spec is not None and spec.loader is not None
    heal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(heal)
    monkeypatch.setattr(heal.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(heal.dist, "all_gather", lambda steps, _: steps[1].fill_(10))
    sources = []

    def broadcast(tensor: torch.Tensor, source: int) -> None:
        tensor.fill_(10)
        sources.append(source)
        if dies:
            raise heal.dist.DistBackendError("rank 1 has died")

    monkeypatch.setattr(heal.dist, "broadcast", broadcast)
    step, weights = torch.zeros(1), torch.zeros(3)
    dies = True
    with pytest.raises(heal.dist.DistBackendError):
        heal.newest_state(step, weights)
    assert step.tolist() == [0] and weights.tolist() == [0, 0, 0]
    dies = False
    step, weights = heal.newest_state(step, weights)
    assert step.tolist() == [10] and weights.tolist() == [10, 10, 10]
    assert sources == [1, 1]  # one broadcast for each call


@pytest.mark.full
def test_c_example_compiles_and_runs_as_documented(tmp_path: Path) -> None:
    """The comment at the head of the program has the commands."""
    head = (EXAMPLES / "memory_box.c").read_text().partition("*/")[0]
    lines = [line.removeprefix(" *     ") for line in head.splitlines()]
    where, compile_it = (next(x for x in lines if x.startswith(y)) for y in ("pkg=", "cc "))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = tmp_path / "memory_box"
    subprocess.run(
        ["sh", "-ec", f"{where}\n{compile_it.replace('-o memory_box', f'-o {program}')}"],
        cwd=ROOT, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    with BoxProcess("--memory", "64MiB") as box:
        environment = os.environ | {"HBMCOMM_BOX": box.url, "HBMCOMM_TOKEN": TOKEN}
        done = subprocess.run(
            [program, "4"], env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    assert done.returncode == 0, done.stderr
    assert "every weight is 40" in done.stdout


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in COMMANDS],
)
def test_example_verifies_itself(name: str) -> None:
    if name == "two_nodes.sh":
        skip_unless_namespaces_work()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    with subprocess.Popen(
        here(COMMANDS[name]), cwd=ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            output, _ = process.communicate()
            pytest.fail(f"{name} still ran after {TIMEOUT} s:\n{output}")
    assert process.returncode == 0, output
    assert re.search(SAYS[name], output), output
