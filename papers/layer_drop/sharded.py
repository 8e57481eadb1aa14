"""Measures the loss of quality with replicate_shards, on the tasks of papers.layer_drop.accuracy:

    torchrun --standalone --nproc-per-node 4 -m papers.layer_drop.sharded --task transformer

With `--nproc-per-node 2` each node has a single shard: whole parameters, as under DDP.

The processes are two emulated nodes, which have replicas of a model. FSDP2 shards each replica over
the processes of a node. Plain training sends everything between the nodes. For each seed, all
contenders start with the same weights, and get the data in the same order. Tasks with BatchNorm are
left out: their statistics would be of smaller batches than under papers.layer_drop.accuracy.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_hbmcomm as hbmcomm
from papers.layer_drop.accuracy import row_of
from papers.layer_drop.learning import OPTIMIZERS, PLAIN, RANKS, Learned, schedule
from papers.layer_drop.tasks import TASKS, Task
from torch_hbmcomm.bench import checkout, report

_NODES = 2

Config = hbmcomm.LowRank | hbmcomm.LayerDrop
CONTENDERS: dict[str, Callable[[float], Config]] = {
    "LowRank": lambda ratio: hbmcomm.LowRank(ratio=ratio),
    "LayerDrop": lambda ratio: hbmcomm.LayerDrop(ratio=ratio),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss of quality with replicas of shards.")
    names = [name for name in TASKS if name != "resnet"]
    parser.add_argument("--task", choices=names, default="digits")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=None)
    parser.add_argument("--ratios", default="0.9")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["LowRank"])
    parser.add_argument("--seeds", type=int, default=1, help="the number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="append a line for each contender to this file")
    args = parser.parse_args()
    report.check_file(args.json)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # of layers that are always sent
    dist.init_process_group("hbm")
    shards = dist.get_world_size() // _NODES
    if shards * _NODES != dist.get_world_size() or RANKS % dist.get_world_size():
        parser.error(f"there are 2 or 4 processes, not {dist.get_world_size()}")
    mesh = init_device_mesh("cpu", (_NODES, shards), mesh_dim_names=("nodes", "shards"))
    task = TASKS[args.task]()
    optimizer = args.optimizer or next(iter(task.rates))

    seeds = range(args.first_seed, args.first_seed + args.seeds)
    terms = {"task": args.task, "optimizer": optimizer, "steps": args.steps, "shards": shards}
    terms |= {"first_seed": args.first_seed, "megabits": None}

    def measure(config: Config) -> list[Learned]:
        return [learn(task, mesh, optimizer, config, seed, args.steps) for seed in seeds]

    plain = measure(hbmcomm.LowRank(ratio=0))
    ratios = [float(ratio) for ratio in args.ratios.split(",")]
    cases: list[tuple[str, float]] = [(PLAIN, 0.0)]
    cases += [(name, ratio) for ratio in ratios for name in args.contenders]
    title = f"{args.task}, {optimizer}, {args.steps} steps, nodes of {shards}"
    table = Table("", "bytes", "quality", "beside plain", title=title)
    for name, ratio in cases:
        runs = plain if name == PLAIN else measure(CONTENDERS[name](ratio))
        row = row_of(plain, runs) | {"contender": name, "ratio": ratio} | terms | checkout.state()
        error = "" if row["error"] is None else f" ± {row['error']:.3f}"
        quality = f"{row['qualities']['mean']:.3f}"
        title = name if name == PLAIN else f"{name}, R = {ratio}"
        table.add_row(title, f"{row['share']:.2%}", quality, f"{row['difference']:+.3f}{error}")
        if dist.get_rank() == 0 and args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if dist.get_rank() == 0:
        report.show(table)
    dist.destroy_process_group()


def learn(
    task: Task, mesh: DeviceMesh, optimizer: str, config: Config, seed: int, steps: int
) -> Learned:
    """Train, and evaluate at the end. The share is of the bytes between the nodes."""
    torch.manual_seed(seed)
    model = task.model()
    fully_shard(model, mesh=mesh["shards"])
    state = hbmcomm.replicate_shards(
        model, config, replicas=mesh.get_group("nodes"), log_every=None
    )
    rate = task.rates[optimizer]
    stepping = OPTIMIZERS[optimizer](model.parameters(), rate)
    draw = torch.Generator().manual_seed(seed)
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        for group in stepping.param_groups:
            group["lr"] = rate * schedule(step, steps)
        inputs, targets = task.examples(RANKS * task.batch, draw)
        stepping.zero_grad()
        outputs = model(inputs.chunk(world)[rank])
        task.loss(outputs, targets.chunk(world)[rank]).backward()
        stepping.step()
    counts = state.summary()
    share = counts["sent_bytes"] / counts["gradient_bytes"]
    return Learned(share=share, steps=[steps], quality=[task.quality(model)])


if __name__ == "__main__":
    main()
