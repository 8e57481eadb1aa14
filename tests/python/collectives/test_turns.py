"""An all_to_all between nodes is split into turns, in which a rank sends to at most one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import beyond_gloo
from harness.jobs import BIN, run

pytestmark = beyond_gloo

_JOB = """
import os, sys
os.environ["HBMCOMM_NODE_ID"] = sys.argv[1][int(os.environ["RANK"])]
import torch, torch.distributed as dist
dist.init_process_group("hbm")
found, mine = torch.empty(400_000), torch.full((400_000,), float(dist.get_rank()))
dist.all_to_all_single(found, mine)
assert (found.view(4, -1) == torch.arange(4.0)[:, None]).all()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("layout", "blocks"), [("aabb", "2 blocks"), ("aaab", "1 block")])
def test_not_between_very_uneven_nodes(layout: str, blocks: str, tmp_path: Path) -> None:
    """Each turn is a block. Between very uneven nodes there is one block, so there are no turns."""
    script = tmp_path / "job.py"
    script.write_text(_JOB)
    torchrun: list[str | Path] = [
        BIN / "torchrun",
        "--standalone",
        "--nproc-per-node=4",
        script,
        layout,
    ]
    finished = run(torchrun, HBMCOMM_LOG="debug")
    assert finished.code == 0, finished.output
    announced = re.findall(
        r"alltoall.*: 2 nodes, .* leaders? of each, (\d+ blocks?) of", finished.output
    )
    assert len(announced) == 4 and set(announced) == {blocks}, finished.output
