"""Collectives of random kinds and sizes on an accelerator's tensors, issued without waiting."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import accelerator
from harness.context import Context
from harness.data import assert_same, placed, random_numbers


def check_random_calls(context: Context, largest: int) -> None:
    """Check that collectives of up to `largest` elements give the same bits as on the CPU."""
    late = accelerator.load()
    draw = context.shared_random
    late.set_longest_delay(draw.choice([0, 50, 300]))
    works, results, expected = [], [], []
    for _ in range(6):
        count = draw.choice([1, largest // 8, draw.randrange(1, largest)])
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.int16, torch.uint8])
        data = random_numbers(context, count, dtype)
        on_cpu, on_device = data.clone(), placed(context, data)
        root = draw.randrange(context.size)
        kind = draw.choice(["all_reduce", "broadcast", "all_gather", "reduce_scatter", "strided"])
        op = draw.choice([dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX])
        if kind == "broadcast":
            dist.broadcast(on_cpu, root)
            works.append(dist.broadcast(on_device, root, async_op=True))
        elif kind == "all_gather":
            whole = torch.empty(context.size * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, on_cpu)
            received = torch.empty_like(whole, device=context.device)
            works.append(dist.all_gather_into_tensor(received, on_device, async_op=True))
            on_cpu, on_device = whole, received
        elif kind == "reduce_scatter":
            many = random_numbers(context, context.size * count, dtype)
            dist.reduce_scatter_tensor(on_cpu, many, op)
            work = dist.reduce_scatter_tensor(on_device, placed(context, many), op, async_op=True)
            works.append(work)
        elif kind == "strided":
            dist.all_reduce(on_cpu, op)
            on_device = torch.stack([on_device, on_device], -1)[..., 0]
            works.append(dist.all_reduce(on_device, op, async_op=True))
        else:
            dist.all_reduce(on_cpu, op)
            works.append(dist.all_reduce(on_device, op, async_op=True))
        results.append(on_device)
        expected.append((f"{kind} of {count} {dtype}", on_cpu))
    for work, result, (what, right) in zip(works, results, expected, strict=True):
        assert work is not None
        work.wait()
        assert_same(result.cpu().clone(memory_format=torch.contiguous_format), right, what)
    late.synchronize()
    late.set_longest_delay(300)
    assert late.pinned_counts()["freed_in_copy"] == 0
    assert late.pinned_counts()["reused_in_copy"] == 0
