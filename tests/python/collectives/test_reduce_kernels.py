"""The reduction kernels agree with PyTorch's arithmetic on each instruction set of this machine."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, RankFailure, beyond_gloo
from torch._C._distributed_c10d import HashStore, _make_nccl_premul_sum

pytestmark = beyond_gloo

NARROW = [
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
    torch.float8_e4m3fnuz,
]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bytes:
    """Assert equal bits, except of not-a-numbers. Returns the bytes of `found`."""
    bits = torch.uint8 if found.itemsize == 1 else torch.int16
    nan = found.float().isnan()
    assert torch.equal(nan, wanted.float().isnan())
    assert torch.equal(found.view(bits)[~nan], wanted.view(bits)[~nan])
    return found.view(torch.uint8).numpy().tobytes()


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert as newer releases of PyTorch do: numbers beyond float8_e4m3fn saturate."""
    if dtype == torch.float8_e4m3fn and torch.tensor(1e6).to(dtype).float().isnan():
        most = torch.finfo(dtype).max
        tensor = tensor.clamp(-most, most)
    return tensor.to(dtype)


def check_every_number(context: Context) -> str:
    dist.init_process_group("hbm", store=HashStore(), rank=0, world_size=1)
    digest = hashlib.sha256()
    for dtype in NARROW:
        width = 8 * dtype.itemsize
        codes = torch.arange(2**width).to(torch.uint8 if width == 8 else torch.uint16)
        every = codes.view(dtype)
        averaged = every.clone()
        dist.all_reduce(averaged, dist.ReduceOp.AVG)  # decodes, divides by 1, encodes
        digest.update(same(averaged, every))
        for factor in (0.5, 3.0, -0.3):
            scaled = every.clone()
            dist.all_reduce(scaled, _make_nccl_premul_sum(factor))
            digest.update(same(scaled, rounded(every.float() * factor, dtype)))
    return digest.hexdigest()


def run(isa: str) -> str:
    pool = Pool(1, bare=True, environment={"HBMCOMM_ISA": isa})
    try:
        digest: str = pool.run(check_every_number)[0]
        assert pool.close() == [0]
    finally:
        pool.kill()
    return digest


def test_every_instruction_set_agrees_with_pytorch() -> None:
    digests = {}
    for isa in ("baseline", "avx2", "avx512f", "avx512"):
        try:
            digests[isa] = run(isa)
        except RankFailure as failure:
            if "cannot run" not in str(failure):
                raise
    assert "baseline" in digests
    assert len(set(digests.values())) == 1, digests


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(RankFailure, match=r"(?s)HBMCOMM_ISA.*sse9"):
        run("sse9")
