"""Environment variables of torch_hbmcomm that are empty, wrong or misspelt."""

from __future__ import annotations

import re
from datetime import datetime, timezone

import pytest
from harness import beyond_gloo
from harness.warm import run_warm

from torch_hbmcomm.variables import VARIABLES

pytestmark = beyond_gloo

USES = """
import torch, torch_hbmcomm
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch_hbmcomm import smb

def group(backend):
    dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
    dist.all_reduce(torch.ones(1))
    print(type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__)
    dist.destroy_process_group()

def memory():
    print(int(torch_hbmcomm.memory.empty(4).fill_(1).sum()))

def box():
    server = smb.Server(memory="1MiB", token="token")
    smb.connect(server.url, "token").close()
    server.close()
"""
TWO_RANKS = """
import os, tempfile, torch
import torch.distributed as dist
file = tempfile.mktemp()
child = os.fork()
dist.init_process_group("hbm", init_method=f"file://{file}", rank=int(child != 0), world_size=2)
dist.new_group([0, 1])
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def output_of(code: str, **environment: str) -> str:
    finished = run_warm(USES + code, 120, **environment)
    assert finished.code == 0, finished.output
    return finished.output


def test_an_empty_variable_counts_as_unset() -> None:
    everything = "group('gloo'); group('hbm'); memory(); box()"
    said = output_of(everything, **dict.fromkeys(VARIABLES, ""))
    assert said.split() == ["ProcessGroupGloo", "ProcessGroupHbm", "4"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HBMCOMM_ALLOCATOR", "segmnet", ('neither "default" nor "segment"',)),
        ("HBMCOMM_INSTEAD_OF", "nccl", ('place of "nccl"', "gloo, mpi, ucc and ccl", "unset")),
        ("HBMCOMM_INSTEAD_OF", "gloo,", ('place of "";',)),
        ("HBMCOMM_INSTEAD_OF", "gloo,all", ('place of "all";',)),
    ],
)
def test_a_wrong_value_raises_in_programs_with_hbm(
    name: str, value: str, words: tuple[str, ...]
) -> None:
    code = """
group("gloo")
for use in (memory, lambda: group("hbm")):
    try: use()
    except ValueError as error: print(error)
"""
    said = output_of(code, **{name: value})
    assert "ProcessGroupGloo\n" in said
    errors = [line for line in said.splitlines() if line.startswith(f"{name}={value}")]
    assert len(errors) == 2, said
    assert all(word in error for word in words for error in errors), said
    # With a wrong HBMCOMM_INSTEAD_OF, group("gloo") makes a group of Gloo, and hbm warns of it.
    assert said.count("this group is one of gloo") == (name == "HBMCOMM_INSTEAD_OF"), said


@pytest.mark.parametrize("backend", ["mpi", "ccl"])
def test_a_wrong_list_is_named_if_pytorch_lacks_the_backend(backend: str) -> None:
    code = f"""
try: group({backend!r})
except (AssertionError, RuntimeError) as error: print("refused by PyTorch")
"""
    said = output_of(code, HBMCOMM_INSTEAD_OF="mpi,clc", PYTHONWARNINGS="ignore")
    assert said.count(f"[hbm] warn: this group is one of {backend}: HBMCOMM_INSTEAD_OF=") == 1, said
    assert 'place of "clc"' in said and "refused by PyTorch" in said, said


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"HBMCOMM_INSTEAD_OF": "nccl"}, 'place of "nccl"'),
        ({"HBMCOMM_MEMORY": "fast"}, "HBMCOMM_MEMORY"),
    ],
)
def test_a_wrong_value_does_not_fail_the_import_that_replaces_the_allocator(
    wrong: dict[str, str], words: str
) -> None:
    code = """
print(int(torch.ones(1 << 16).sum()))
try: memory()
except ValueError as error: print(error)
"""
    first, *rest = output_of(code, HBMCOMM_ALLOCATOR="segment", **wrong).splitlines()
    assert first == str(1 << 16), (first, rest)
    assert words in "\n".join(rest), rest


@pytest.mark.parametrize(
    "use", ["group('hbm'); group('hbm')", "memory(); memory()", "box(); box()"]
)
def test_a_misspelt_variable_is_named_once(use: str) -> None:
    wrong = {"HBMCOMM_ALOCATOR": "segment", "HBMCOMM_LOG": "debgu"}
    said = output_of(use, **wrong)
    assert said.count("[hbm] warn: ") == 2, said
    assert (
        "HBMCOMM_ALOCATOR is no variable of torch_hbmcomm: did you mean HBMCOMM_ALLOCATOR?" in said
    )
    assert "HBMCOMM_LOG=debgu is not error, warn, info or debug" in said


def test_lines_of_the_log_have_the_time_in_utc() -> None:
    before = datetime.now(timezone.utc)
    said = output_of("group('hbm')", HBMCOMM_LGO="info", HBMCOMM_LOG="info", TZ="UTC-9")
    after = datetime.now(timezone.utc)
    lines = [line for line in said.splitlines() if "[hbm" in line]
    assert sum("[hbm rank 0] info: " in line for line in lines) > 0, said
    assert sum("[hbm] warn: HBMCOMM_LGO" in line for line in lines) == 1, said
    for line in lines:
        found = re.match(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z \[hbm", line)
        assert found, line
        time = datetime.fromisoformat(f"{found[1]}+00:00")
        assert before.replace(microsecond=before.microsecond // 1000 * 1000) <= time <= after, line


def test_a_job_names_a_misspelt_variable_once() -> None:
    said = output_of(TWO_RANKS, HBMCOMM_LGO="info", HBMCOMM_LOG="loud")
    assert said.count("HBMCOMM_LGO") == 1, said
    assert said.count("HBMCOMM_LOG=loud") == 2, said  # each rank, as RANK is not set


def test_a_program_without_hbm_hears_of_no_variable() -> None:
    assert output_of("group('gloo')", HBMCOMM_ALOCATOR="segment").split() == ["ProcessGroupGloo"]


def test_ranks_but_the_first_name_no_variable() -> None:
    wrong = {"HBMCOMM_LGO": "info", "HBMCOMM_LOG": "loud", "RANK": "1"}
    assert output_of("memory()", **wrong).split() == ["4"]


def test_empty_nodes_of_memkind_count_as_unset() -> None:
    said = output_of(
        """
try: torch_hbmcomm.memory.empty(4, policy="bind")
except RuntimeError as error: print(error)
""",
        MEMKIND_HBW_NODES="",
    )
    if said:  # a machine without HBM
        assert 'memory policy "bind" needs high-bandwidth memory' in said, said


def test_absent_nodes_of_memkind_are_named() -> None:
    said = output_of(
        """
try: torch_hbmcomm.memory.empty(4, policy="bind")
except ValueError as error: print(error)
""",
        MEMKIND_HBW_NODES="4095",
    )
    assert "MEMKIND_HBW_NODES=4095; this machine has NUMA nodes 0 to " in said, said
    assert "unset the variable" in said, said
