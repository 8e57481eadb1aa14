"""Measures all_reduce and training steps of ranks that share one accelerator, over hbm and Gloo.

    python -m benchmarks.gpu --json gpu.json

A call ends when the device has the result. Contenders alternate. The contender `copies` copies the
bytes of an all_reduce to the host and, at the same time, as many bytes back to the device. The
host's memory is pinned, and the ranks do not communicate. No all_reduce that copies through the
host can be faster. Further rows are:

- `issue`: the time until an asynchronous all_reduce returns
- `chunks`: all_reduces of one size, divided into chunks of several sizes
  (HBMCOMM_DEVICE_CHUNK_BYTES)
- `ddp`: a training step under DistributedDataParallel
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_hbmcomm.bench.ranks import join, launch, leave
from torch_hbmcomm.bench.report import check_file, fail
from torch_hbmcomm.bench.result import Measurement, Result, describe_machine, measurements
from torch_hbmcomm.bench.rounds import Samples, interleave, timed

SIZES = [8, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30]  # bytes
_MOST_SAMPLES = 5  # in a turn
_WIDTH, _LAYERS = 4096, 6  # about 100 M parameters
_BATCH = 64
_CHUNKS = [1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20]  # bytes
_CHUNKED = 256 << 20  # bytes of the tensor for the comparison of chunks
_CHUNK_BYTES = "HBMCOMM_DEVICE_CHUNK_BYTES"
CONTENDERS = {
    "hbm": "through shared memory",
    "gloo": "PyTorch's own backend",
    "copies": "to the host and back, without communication",
    **{f"chunks of {size}": "through shared memory, in chunks" for size in _CHUNKS},
    "one go": "through shared memory, uncut",
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Call = Callable[[], object]


def groups(device: torch.device) -> dict[str, dist.ProcessGroup]:
    """Make a group of all ranks over each backend that accepts the device's tensors."""
    made = {"hbm": dist.new_group(backend=f"{device.type}:hbm")}
    if device.type == "cuda":  # Gloo accepts no other device
        made["gloo"] = dist.new_group(backend="cuda:gloo")
    return made


def all_reduces(
    device: torch.device, by_name: dict[str, dist.ProcessGroup], size: int
) -> dict[str, Call]:
    """Return an all_reduce of `size` bytes of float32 over each group, and the copies."""
    tensor = torch.zeros(size // 4, device=device)
    calls = {name: _all_reduce(tensor, group) for name, group in by_name.items()}
    return calls | {"copies": copies(tensor)}


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Call:
    def call() -> None:
        dist.all_reduce(tensor, group=group)
        torch.accelerator.synchronize(tensor.device)

    return call


def chunk_sizes(device: torch.device, sizes: list[int], bytes_in_all: int) -> dict[str, Call]:
    """Return all_reduces of `bytes_in_all` bytes, one for each size of chunk and one undivided."""
    tensor = torch.zeros(bytes_in_all // 4, device=device)
    calls = {}
    before = os.environ.get(_CHUNK_BYTES)
    for size in [*sizes, bytes_in_all]:
        os.environ[_CHUNK_BYTES] = str(size)
        group = dist.new_group(backend=f"{device.type}:hbm")
        call = _all_reduce(tensor, group)
        call()  # the group reads the variable when it sees its first tensor on the device
        calls["one go" if size == bytes_in_all else f"chunks of {size}"] = call
    os.environ.pop(_CHUNK_BYTES)
    if before is not None:
        os.environ[_CHUNK_BYTES] = before
    return calls


def copies(tensor: torch.Tensor) -> Call:
    down = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    up, other = torch.empty_like(down).pin_memory(), torch.empty_like(tensor)
    streams = [torch.Stream(device=tensor.device) for _ in range(2)]

    def call() -> None:
        with streams[0]:
            down.copy_(tensor, non_blocking=True)
        with streams[1]:
            other.copy_(up, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return call


def issues(
    device: torch.device, by_name: dict[str, dist.ProcessGroup], size: int
) -> dict[str, list[float]]:
    """Return, for each group, the microseconds until each asynchronous all_reduce returned."""
    tensor = torch.zeros(size // 4, device=device)
    found: dict[str, list[float]] = {}
    for name, group in by_name.items():
        works: list[dist.Work | None] = []

        def call(group: dist.ProcessGroup = group, works: list[dist.Work | None] = works) -> None:
            works.append(dist.all_reduce(tensor, group=group, async_op=True))

        found[name] = []
        for _ in range(20):
            found[name] += timed(call)(1, 1)
            for work in works:
                if work is not None:
                    work.wait()
            works.clear()
            torch.accelerator.synchronize(device)
    return found


def training_steps(
    device: torch.device, by_name: dict[str, dist.ProcessGroup], width: int = _WIDTH
) -> dict[str, Call]:
    """Return a step under DistributedDataParallel over each group."""

    def over(group: dist.ProcessGroup) -> Call:
        layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
        model = DistributedDataParallel(nn.Sequential(*layers).to(device), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.randn(_BATCH, width).to(device)

        def call() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            torch.accelerator.synchronize(device)

        return call

    return {name: over(group) for name, group in by_name.items()}


def measure_rank(rounds: int, sizes: list[int]) -> dict[str, dict[str, Samples]]:
    """Measure on one rank. Return each row's samples."""
    join()
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, 0)
    by_name = groups(device)
    rows: dict[str, dict[str, Samples]] = {}

    def take(row: str, calls: dict[str, Call]) -> None:
        turns = {name: timed(call) for name, call in calls.items()}
        rows[row] = interleave(
            turns, rounds, barrier=dist.barrier, agree=_least, most_samples=_MOST_SAMPLES
        )

    for size in sizes:
        take(f"all_reduce {size}", all_reduces(device, by_name, size))
    take(f"chunks of {_CHUNKED}", chunk_sizes(device, _CHUNKS, _CHUNKED))
    found = issues(device, by_name, 16 << 20)
    rows["issue"] = {name: Samples(interleaved=samples) for name, samples in found.items()}
    take("ddp", training_steps(device, by_name))
    leave()
    return rows


def _least(number: int) -> int:
    """Return the least of all ranks' numbers."""
    agreed = torch.tensor(number)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return int(agreed)


def slowest(ranks: list[dict[str, dict[str, Samples]]]) -> list[Measurement]:
    """Make the measurements of all rows. Each sample is the slowest rank's."""
    found = []
    for row, contenders in ranks[0].items():
        samples = {}
        for name, one in contenders.items():
            everyone = [rank[row][name] for rank in ranks]
            samples[name] = Samples(
                one.calls,
                [max(each) for each in zip(*(s.interleaved for s in everyone), strict=True)],
                [max(each) for each in zip(*(s.alone for s in everyone), strict=True)],
            )
        found += measurements({"row": row}, samples)
    return found


@app.command()
def main(
    json: Annotated[Path, typer.Option(help="Write the result to this file.")],
    ranks: Annotated[int, typer.Option(help="Ranks, which share the device.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns of each contender.")] = 7,
) -> None:
    """Measure on the accelerator that PyTorch finds."""
    check_file(json)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        fail("PyTorch finds no accelerator on this machine")
    plan = {"ranks": ranks, "rounds": rounds, "device": str(accelerator)}
    result = Result(
        benchmark="gpu",
        machine=describe_machine(),
        plan=plan,
        contenders=CONTENDERS,
        references=["copies"],
        unavailable={"nccl": "refuses ranks that share a device"},
        measurements=slowest(launch(ranks, measure_rank, rounds, SIZES)),
    )
    json.write_text(result.to_json())
    for one in result.measurements:
        print(f"{one.of['row']:24} {one.contender:8} {one.median:12.1f} us")


if __name__ == "__main__":
    app()
