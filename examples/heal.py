"""Trains on while workers die: survivors and a newcomer form the next group in the same processes.

    python examples/heal.py

Worker 1 is killed at step 10, and worker 3 takes its place. The parent process starts the workers.
It writes the members of each group into a file, and each worker writes its handle into another. A
job on several machines can exchange the same texts through a shared folder, a socket or a
torch.distributed.TCPStore.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

import torch_hbmcomm

STEPS = 30


def work(folder: Path, number: int) -> None:
    """Train until the last step."""
    uuid, step, weights = 0, torch.zeros(1), torch.zeros(1000)
    while step < STEPS:
        try:
            if not dist.is_initialized():
                uuid, handles = next_members(folder, number, uuid)
                torch_hbmcomm.reconfigure(uuid, handles, timeout=timedelta(seconds=60))
                step, weights = newest_state(step, weights)
            if number == 1 and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            gradients = torch.ones(1000)
            dist.all_reduce(gradients)
            weights += gradients / dist.get_world_size()
            step += 1
        except dist.DistError as error:  # a member has died: the step is not done
            write(folder / f"error.{number}", str(error))
            if dist.is_initialized():
                dist.destroy_process_group()
    assert (weights == STEPS).all()
    dist.destroy_process_group()


def newest_state(step: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step and the weights of the member that has done most steps."""
    steps = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, step)
    furthest = int(torch.stack(steps).argmax())  # a newcomer is at step 0
    state = torch.cat([step, weights])  # a copy: if a member dies now, the own state stays whole
    dist.broadcast(state, furthest)
    return state[:1], state[1:]


def next_members(folder: Path, number: int, uuid: int) -> tuple[int, list[str]]:
    """Wait for a group after the group `uuid`. Returns its uuid and its members' handles."""
    while True:
        newest = max((int(file.suffix[1:]) for file in folder.glob("members.*")), default=0)
        if newest > uuid:
            own = folder / f"handle.{newest}.{number}"
            if not own.exists():
                write(own, torch_hbmcomm.reconfigure_handle())
            members = (folder / f"members.{newest}").read_text().split()
            files = [folder / f"handle.{newest}.{member}" for member in members]
            if all(file.exists() for file in files):
                return newest, [file.read_text() for file in files]
        time.sleep(0.001)


def write(file: Path, text: str) -> None:
    """Write a file. Other processes see the whole text, or no file."""
    draft = file.with_name(f"draft.{os.getpid()}")
    draft.write_text(text)
    draft.rename(file)


def supervise(folder: Path) -> None:
    """Start three workers, and another one when a worker has died."""
    context = multiprocessing.get_context("spawn")
    workers: dict[int, multiprocessing.process.BaseProcess] = {}
    uuid = started = 0
    died = False
    while True:
        for number in range(started, 4 if died else 3):
            workers[number] = context.Process(target=work, args=(folder, number))
            workers[number].start()
            started = number + 1
        uuid += 1
        write(folder / f"members.{uuid}", " ".join(map(str, workers)))
        ready = wait([each.sentinel for each in workers.values()])
        ended = [number for number, each in workers.items() if each.sentinel in ready]
        codes = []
        for number in ended:
            workers[number].join()
            codes.append(workers.pop(number).exitcode)
        if codes != [-signal.SIGKILL]:
            break
        died = True
    for each in workers.values():
        each.join()
        codes.append(each.exitcode)
    if codes != [0, 0, 0]:
        sys.exit(f"the workers ended with {codes}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        supervise(Path(name))
        errors = {file.read_text() for file in Path(name).glob("error.*")}
        print(*errors, sep="\n")
    print(f"OK: 3 workers finished step {STEPS}, one of them a newcomer")
