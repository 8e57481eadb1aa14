"""Measures what training loses when a part of the bytes is sent:

    python -m benchmarks.layer_drop.accuracy --task convolutions --optimizer AdamW --seeds 5

Plain training, layer_drop_hook with its defaults, and PyTorch's PowerSGD at the largest rank within
the same bytes, with one start and one order of data for each seed. With `--contenders bfloat16` the
hook sends as many bytes of bfloat16, which are twice as many numbers.

One process stands for 4 ranks: it averages the gradients of 4 ranks' batches itself. The hook's
approximations and those of PowerSGD are linear in the gradients of the ranks but for the basis,
which they take of the average, so that one rank with the average finds what 4 ranks find (a test
compares them: tests/python/layer_drop/test_low_rank.py). Models with BatchNorm, whose statistics
are of one rank's batch, cannot be measured so.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_hbmcomm as hbmcomm
from benchmarks.layer_drop.tasks import TASKS, Task
from torch_hbmcomm.bench.result import Unavailable

RANKS = 4
CONTENDERS = ("hook", "PowerSGD", "bfloat16")
_VANILLA = 2  # first steps that PowerSGD sends whole, the fewest that PyTorch takes
_LEAST_SAVED = 2  # PowerSGD approximates what then has at most this part of its elements

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters, rate: torch.optim.AdamW(parameters, rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
    "SGD": lambda parameters, rate: torch.optim.SGD(parameters, rate),
}


def train(
    task: Task, optimizer: str, contender: str, ratio: float, seed: int, steps: int
) -> tuple[float, float]:
    """Return the quality in the end, and the part of the gradients' bytes that was sent."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.model())
    share = _register(ddp, contender, ratio, steps)
    rate = task.rates[optimizer]
    steps_it = OPTIMIZERS[optimizer](ddp.parameters(), rate)
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in steps_it.param_groups:
            group["lr"] = rate * _schedule(step, steps)
        inputs, targets = task.examples(RANKS * task.batch, draw)
        steps_it.zero_grad()
        task.loss(ddp(inputs), targets).backward()
        steps_it.step()
    return task.quality(ddp.module), share()


def _schedule(step: int, steps: int) -> float:
    """Warm up over a tenth of the steps; fall to a twentieth along a cosine."""
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return min(1.0, (step + 1) / (0.1 * steps)) * (0.05 + 0.95 * cosine)


def _register(
    ddp: DistributedDataParallel, contender: str, ratio: float, steps: int
) -> Callable[[], float]:
    """Register the contender's hook. Returns a function that tells what part it has sent."""
    if contender in ("hook", "bfloat16"):
        narrow = contender == "bfloat16"
        state = hbmcomm.LayerDropState(
            model=ddp,
            ratio=1 - 2 * (1 - ratio) if narrow else ratio,
            wire_dtype=torch.bfloat16 if narrow else None,
            log_every=None,
        )
        ddp.register_comm_hook(state, hbmcomm.layer_drop_hook)
        return lambda: state.summary()["sent_bytes"] / state.summary()["gradient_bytes"]
    if contender == "PowerSGD":
        parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        rank, share = power_sgd_rank([list(one.shape) for one in parameters], 1 - ratio)
        power = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=_VANILLA
        )
        ddp.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
        return lambda: (_VANILLA + (steps - _VANILLA) * share) / steps
    return lambda: 1.0


def power_sgd_rank(shapes: list[list[int]], share: float) -> tuple[int, float]:
    """Return the largest rank, at least 1, at which PowerSGD sends at most that share of all
    elements in a step, and what it sends."""

    def sent(rank: int) -> float:
        found = 0
        for shape in shapes:
            numel, rows = math.prod(shape), shape[0]
            factors = rank * (rows + numel // rows)
            compressed = len(shape) > 1 and factors * _LEAST_SAVED < numel
            found += factors if compressed else numel
        return found / sum(map(math.prod, shapes))

    rank = 1
    while sent(rank + 1) <= share:
        rank += 1
    return rank, sent(rank)


def main() -> None:
    parser = argparse.ArgumentParser(description="What training loses with a part of the bytes.")
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=None)
    parser.add_argument("--ratios", default="0.9,0.95")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS[:2])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="append a line for each contender to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        task = TASKS[args.task]()
    except Unavailable as error:
        parser.error(str(error))
    optimizer = args.optimizer or next(iter(task.rates))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        seeds = range(args.seeds)
        plain = [train(task, optimizer, "plain", 0, seed, args.steps)[0] for seed in seeds]
        title = f"{args.task}, {optimizer}, {args.steps} steps, {args.seeds} seeds"
        table = Table("", "bytes", "beside plain", "by seed", title=title)
        table.add_row("plain", "100 %", "", " ".join(f"{value:.3f}" for value in plain))
        for ratio in map(float, args.ratios.split(",")):
            for contender in args.contenders:
                runs = [train(task, optimizer, contender, ratio, s, args.steps) for s in seeds]
                row = _row(plain, runs) | {"contender": contender, "ratio": ratio}
                row |= {"task": args.task, "optimizer": optimizer, "steps": args.steps}
                _show(table, row)
                if args.json is not None:
                    with args.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
        dist.destroy_process_group()
    Console().print(table)


def _row(plain: list[float], runs: list[tuple[float, float]]) -> dict[str, object]:
    differences = [value - base for (value, _), base in zip(runs, plain, strict=True)]
    several = len(runs) > 1
    return {
        "share": statistics.fmean(share for _, share in runs),
        "difference": statistics.fmean(differences),
        "error": statistics.stdev(differences) / math.sqrt(len(runs)) if several else None,
        "plain": plain,
        "differences": differences,
    }


def _show(table: Table, row: dict[str, object]) -> None:
    error = f" ± {row['error']:.3f}" if row["error"] is not None else ""
    each = " ".join(f"{value:+.3f}" for value in row["differences"])  # type: ignore[attr-defined]
    name = f"{row['contender']}, R = {row['ratio']}"
    table.add_row(name, f"{row['share']:.2%}", f"{row['difference']:+.3f}{error}", each)


if __name__ == "__main__":
    main()
