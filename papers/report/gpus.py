"""Tensors of GPUs: Panda 2019."""

from __future__ import annotations

from benchmarks.markdown import Table
from papers.report.experiment import Experiment, Label

_ROWS = (
    (
        "all_reduce of 16 GPUs compared with other libraries",
        "GPUs and their nodes",
        "`benchmarks/gpu.sh`",
    ),
    ("latency and bandwidth of all_reduce to 1,536 GPUs", "a cluster of GPUs", "-"),
    ("images a second, GPUs", "GPUs and their nodes", "the section images, on CPUs"),
)

GPUS = Experiment(
    name="gpus",
    paper="Panda 2019, Scalable and Distributed DNN Training on Modern HPC Systems",
    figures="tensors of GPUs",
    label=Label.NOT_MEASURABLE,
    differs=(
        "At most one GPU is available. The tests run every collective on an emulated device. It has"
        " streams, and memory that the host cannot access, but its speed is not realistic."
        " benchmarks/gpu.sh compared all_reduce and training steps of 2 ranks on one H200 with Gloo"
        " (docs/accelerators.md)."
    ),
    found=(
        "ResNet-50 with Horovod on 64 GPUs (Pascal) scales with up to 90 % efficiency. The figures"
        " of all_reduce are curves without numbers. The keynote also has gains of other frameworks:"
        " up to 80 % by out-of-core training, and 20, 34 and 37 % over gRPC on 8, 16 and 24 GPUs.",
    ),
    runs=(),
    table=lambda results: Table(("figure", "needed hardware", "substitute here"), _ROWS),
    panels=lambda results: (),
)
