"""Tensors of GPUs: Panda 2019."""

from __future__ import annotations

from benchmarks.markdown import Table
from papers.report.experiment import Experiment, Label
from papers.report.verdicts import (
    PANDA,
    Claim,
    unmeasurable,
)

_ROWS = (
    (
        "all_reduce of 16 GPUs compared with other libraries",
        "GPUs and their nodes",
        "`benchmarks/gpu.sh`",
    ),
    ("latency and bandwidth of all_reduce to 1,536 GPUs", "a cluster of GPUs", "-"),
    ("images a second, GPUs", "GPUs and their nodes", "the section images, on CPUs"),
)


def _claim(item: str, finding: str, needed: str, here: str = "") -> Claim:
    return Claim(PANDA, item, finding, unmeasurable(f"It needs {needed}.", here))


_CLAIMS = (
    _claim(
        "Slides on CUDA-aware MPI",
        "Staging of device buffers in a pipeline overlaps their copies with the transfer, with"
        " MPI's plain interface.",
        "two nodes with GPUs",
        "hbm stages tensors of a device in a pipeline, and the tests run it on an emulated device.",
    ),
    _claim(
        "Slide on MVAPICH2-GDR: latency and bandwidth",
        "An optimized design, with GPUDirect RDMA, carries data between GPUs of two nodes (curves"
        " without numbers).",
        "two nodes with GPUs and InfiniBand",
    ),
    _claim(
        "Slide on Horovod",
        "ResNet-50 scales with up to 90 % efficiency on 64 GPUs (Pascal).",
        "64 GPUs",
        "The section images has images a second on CPUs.",
    ),
    _claim(
        "Slides on all_reduce of 16 GPUs: Baidu, Open MPI, NCCL2, DGX-2",
        "MVAPICH2-GDR is better than NCCL2 or comparable in most cases; it is also compared with"
        " Baidu's all_reduce and Open MPI (curves without numbers).",
        "16 GPUs",
        "benchmarks/gpu.sh compares all_reduce of 2 ranks on one GPU with Gloo.",
    ),
    _claim(
        "Slide on MPI_Allreduce at scale",
        "On up to 1,536 GPUs, latency and bandwidth of all_reduce are better than NCCL's in most"
        " cases (curves without numbers).",
        "a cluster of GPUs",
    ),
    _claim(
        "Slide on TensorFlow and MVAPICH2-GDR",
        "ResNet-50 learns on 8 of the 16 GPUs of a DGX-2 (a curve without numbers).",
        "a node of 8 GPUs",
    ),
    _claim(
        "Slide on OSU-Caffe",
        "A net for CIFAR-10 scales to 64 GPUs, and GoogLeNet to 128 (a curve without numbers).",
        "128 GPUs, and OSU-Caffe",
    ),
    _claim(
        "Slide on out-of-core training",
        "Managed memory can train nets that exceed a GPU's memory, with negligible or no overhead."
        " OC-Caffe-Opt on a V100 is up to 80 % better than Intel's Caffe on CPUs for ResNet-50.",
        "OC-Caffe, which is another framework, and a GPU",
    ),
    _claim(
        "Slides on RDMA for gRPC and TensorFlow",
        "Compared with IPoIB, RDMA makes gRPC's latency up to 2.7, 2.8 and 2.5 times better (small,"
        " medium and large messages), and training of Inception3 up to 20, 34 and 37 % faster on 8,"
        " 16 and 24 GPUs.",
        "InfiniBand, GPUs and TensorFlow over gRPC, which is another framework",
    ),
    _claim(
        "Slides on RDMA for Hadoop and Spark",
        "Compared with IPoIB, RDMA makes RandomWriter 3 times and TeraGen 4 times faster, and"
        " reduces the time of PageRank by 37 % (32 nodes) and 43 % (64 nodes).",
        "InfiniBand, Hadoop and Spark, which are other frameworks",
    ),
    _claim(
        "Slide on deep learning over big data",
        "Compared with IPoIB, BigDL over RDMA-Spark is 2.6 times as fast, with similar accuracy.",
        "InfiniBand and Spark, which is another framework",
    ),
)


GPUS = Experiment(
    name="gpus",
    figures="tensors of GPUs, and other frameworks",
    label=Label.NOT_MEASURABLE,
    differs=(
        "At most one GPU is available. The tests run every collective on an emulated device. It has"
        " streams, and memory that the host cannot access, but its speed is not realistic."
        " benchmarks/gpu.sh compared all_reduce and training steps of 2 ranks on one H200 with Gloo"
        " (docs/accelerators.md)."
    ),
    claims=_CLAIMS,
    runs=(),
    table=lambda results: Table(("figure", "needed hardware", "substitute here"), _ROWS),
    panels=lambda results: (),
)
