"""The reduction kernels agree with PyTorch's arithmetic, on each instruction set that is here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

SCRIPT = """
import hashlib, torch, torch.distributed as dist
dist.init_process_group("hbm", store=dist.HashStore(), rank=0, world_size=1)
narrow = [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn,
          torch.float8_e5m2fnuz, torch.float8_e4m3fnuz]
digest = hashlib.sha256()

def same(found, wanted):
    bits = torch.uint8 if found.itemsize == 1 else torch.int16
    nan = found.float().isnan()
    assert torch.equal(nan, wanted.float().isnan())
    assert torch.equal(found.view(bits)[~nan], wanted.view(bits)[~nan])
    digest.update(found.view(torch.uint8).numpy().tobytes())

for dtype in narrow:
    width = 8 * torch.empty(0, dtype=dtype).itemsize
    codes = torch.arange(2**width).to(torch.uint8 if width == 8 else torch.uint16)
    every = codes.view(dtype)
    averaged = every.clone()
    dist.all_reduce(averaged, dist.ReduceOp.AVG)  # decodes, divides by 1, encodes
    same(averaged, every)
    for factor in (0.5, 3.0, -0.3):
        scaled = every.clone()
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(factor))
        same(scaled, (every.float() * factor).to(dtype))
print(digest.hexdigest())
"""


def run(isa: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"HBMCOMM_ISA": isa},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_instruction_set_agrees_with_pytorch() -> None:
    digests = {}
    for isa in ("baseline", "avx2", "avx512"):
        done = run(isa)
        if "cannot run" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        digests[isa] = done.stdout.strip()
    assert "baseline" in digests
    assert len(set(digests.values())) == 1, digests
    assert len(digests["baseline"]) == hashlib.sha256().digest_size * 2


def test_an_unknown_instruction_set_is_refused() -> None:
    done = run("sse9")
    assert done.returncode != 0
    assert "sse9" in done.stderr and "HBMCOMM_ISA" in done.stderr
