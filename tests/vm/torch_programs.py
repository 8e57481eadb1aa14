"""Runs the programs that need PyTorch, each in a fork: the guest's half of test_torch.py."""

from __future__ import annotations

import importlib
import multiprocessing
import os

import parameter_server_training
import torch_tensors

PROGRAMS = {"torch_tensors": torch_tensors, "parameter_server_training": parameter_server_training}
ENVIRONMENT = {"torch_tensors": {"HBMCOMM_MEMORY": "bind"}, "parameter_server_training": {}}


def run(name: str) -> None:
    os.environ.update(ENVIRONMENT[name])
    PROGRAMS[name].main()


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # else each optimizer imports it in its fork
    for name in PROGRAMS:
        print(f"--- {name}", flush=True)
        process = multiprocessing.get_context("fork").Process(target=run, args=(name,))
        process.start()
        process.join()
        assert process.exitcode == 0, name
